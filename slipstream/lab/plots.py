"""Pictures of measurements, each one function from numbers to a file. matplotlib is the optional extra `plot`.

Nothing is measured or chosen here. The format follows the file's name (.png, .svg, .pdf). Called by the commands.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import ConfigError
from slipstream.lab.quality import Bin

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_INCHES = 3.4
LARGEST_DOT = 120.0  # points squared, of the bin that holds most


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityPanel:
    """Predicted against observed survival, for each of several forms of the prediction."""

    title: str
    series: tuple[tuple[str, Sequence[Bin]], ...]  # name, table


def reliability_plot(path: Path, panels: Sequence[ReliabilityPanel]) -> None:
    """One square a panel; the diagonal is what a perfect predictor would show, a dot's area how many drafts it is."""
    figure = new_figure(len(panels), 1)
    for axes, panel in zip(figure.axes, panels, strict=True):
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        most = max((one.count for _, table in panel.series for one in table), default=1)
        for name, table in panel.series:
            _draw_table(axes, name, table, most)
        axes.set(title=panel.title, xlabel="predicted survival", xlim=(0, 1), ylim=(0, 1), aspect="equal")
        axes.legend(loc="upper left", fontsize="small", frameon=False)
    figure.axes[0].set_ylabel("observed")
    save(figure, path)


def _draw_table(axes: "Axes", name: str, table: Sequence[Bin], most: int) -> None:
    predicted, outcome = [one.predicted for one in table], [one.outcome for one in table]
    (line,) = axes.plot(predicted, outcome, linewidth=1, label=name)
    area = [LARGEST_DOT * one.count / most for one in table]
    axes.scatter(predicted, outcome, s=area, color=line.get_color(), alpha=0.6, linewidths=0)


def require_matplotlib(path: Path) -> None:
    """Called before anything is measured, so that a missing extra or an impossible file costs no minutes."""
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ConfigError(f"plot {path}: matplotlib is not installed; pip install 'slipstream[plot]'") from error
    known = sorted(matplotlib.figure.Figure().canvas.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in known:
        raise ConfigError(f"plot {path}: its name must end in one of {', '.join('.' + name for name in known)}")


def new_figure(columns: int, rows: int) -> "Figure":
    """Panels side by side. A Figure of its own: pyplot would keep state and look for a display."""
    import matplotlib.figure

    size = (PANEL_INCHES * columns, PANEL_INCHES * rows + 0.4)
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    figure.subplots(rows, columns)
    return figure


def save(figure: "Figure", path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
