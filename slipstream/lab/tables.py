"""Tables for a terminal, all of one look. Torch-free; called by what turns rows of a report into something to read."""

from collections.abc import Collection, Sequence

from rich import box
from rich.table import Table


def new_table(title: str, columns: Sequence[str], words: Collection[str] = ()) -> Table:
    """Figures stand to the right; the columns named in `words` hold words, which may be folded."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True
    )
    for name in columns:
        if name in words:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


def shown(value: float | None, spec: str, scale: int = 1) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else format(value * scale, spec)


def share(count: int | None, whole: int) -> str:
    return "-" if count is None else f"{count}/{whole}"
