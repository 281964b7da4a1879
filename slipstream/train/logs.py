"""What a run leaves to be looked at: `log.csv` (losses), `validation.csv` (acceptance by position), and its picture.

CSV, one line a time, so that a run can be watched. A new run begins new files; a resumed one goes on where its checkpoint
stands. Called by the trainer, on the rank that leads.
"""

import csv
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from slipstream.files import replace_text

PLOT = "acceptance.png"


class RunLog:
    """The files of one run under `folder`, and the console."""

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder, self.console = folder, console

    def begin(self, step: int) -> None:
        """Drop what stands in the files beyond `step`: an earlier run's, or what was done again after a cut."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in (self.folder / "log.csv", self.folder / "validation.csv"):
            if path.exists():
                header, *lines = path.read_text(encoding="utf-8").splitlines()
                kept = [line for line in lines if int(line.partition(",")[0]) <= step]
                replace_text(path, "".join(f"{line}\n" for line in [header, *kept])) if kept else path.unlink()

    def losses(self, step: int, seconds: float, values: dict[str, float], overlap: list[float]) -> None:
        """One step's terms; `overlap` [block_size] is the mean acceptance probability at T = 1 by place."""
        places = {f"overlap_{place}": value for place, value in enumerate(overlap, 1)}
        _append(self.folder / "log.csv", {"step": step, "seconds": round(seconds, 2), **values, **places})

    def show(self, step: int, seconds: float, values: dict[str, float]) -> None:
        """The same in a line of text, where no progress bar can be drawn."""
        if not self.console.is_terminal:
            shown = " ".join(f"{name} {value:.3f}" for name, value in values.items())
            self.console.print(f"step {step} {seconds:.1f} s {shown}", highlight=False)

    def validation(self, step: int, seconds: float, report: dict[str, Any]) -> None:
        """The report of `walks.evaluate` on the held-out answers."""
        lengths = {f"length_{name}": report[name]["mean_accepted_length"] for name in ("all", "no_loops")}
        by_position = enumerate(report["all"]["acceptance_by_position"], 1)
        row = {"step": step, "seconds": round(seconds, 2), **lengths, **{f"accepted_{k}": v for k, v in by_position}}
        _append(self.folder / "validation.csv", row)
        self.console.print(
            f"step {step}: {lengths['length_all']:.2f} tokens per step, {lengths['length_no_loops']:.2f} without loops",
            highlight=False,
        )

    def plot(self) -> None:
        """Acceptance by position over the run, as acceptance.png; a note if matplotlib is missing."""
        path = self.folder / "validation.csv"
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            self.console.print("no plot: matplotlib is not installed (pip install 'slipstream[plot]')")
            return
        if not path.exists():
            return
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        steps = [int(row["step"]) for row in rows]
        for k in itertools.takewhile(lambda k: f"accepted_{k}" in rows[0], itertools.count(1)):
            axes.plot(steps, [float(row[f"accepted_{k}"]) for row in rows], marker="o", ms=3, label=f"draft {k}")
        axes.set(xlabel="step", ylabel="accepted, given those before it", ylim=(0, 1), title="held-out greedy answers")
        axes.legend(ncols=2, fontsize="small")
        figure.savefig(self.folder / PLOT, dpi=120)


def _append(path: Path, row: dict[str, Any]) -> None:
    """One more line; the header is written with the first."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(row)
        writer.writerow([round(value, 5) if isinstance(value, float) else value for value in row.values()])


def progress_bar(console: Console) -> Progress:
    """Drawn on terminals only."""
    columns: Sequence[Any] = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    return Progress(*columns, console=console, disable=not console.is_terminal)
