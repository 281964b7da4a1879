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
NUM_COLORS = 10  # that differ; further lines are dashed
LARGEST_DOT = 120.0  # points squared, of the bin that holds most


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityPanel:
    """Predicted against observed survival, for each of several forms of the prediction."""

    title: str
    series: tuple[tuple[str, Sequence[Bin]], ...]  # name, table


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePanel:
    """Figures over a load, a line for each of several policies."""

    title: str
    xlabel: str
    ylabel: str
    series: tuple[tuple[str, Sequence[float], Sequence[float]], ...]  # name, loads, figures
    doubling: bool = False  # figures grow with the load


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


def lines_plot(path: Path, rows: Sequence[Sequence[LinePanel]]) -> None:
    """Panels in rows of one length, over loads that double. A name has one colour in all of them, and one legend."""
    figure = new_figure(len(rows[0]), len(rows))
    names = list(dict.fromkeys(name for row in rows for panel in row for name, _, _ in panel.series))
    for axes, panel in zip(figure.axes, (panel for row in rows for panel in row), strict=True):
        for name, loads, figures in panel.series:
            at = names.index(name)
            marker, dashes = ("o", "-") if at < NUM_COLORS else ("s", "--")
            axes.plot(loads, figures, dashes, color=f"C{at % NUM_COLORS}", marker=marker, markersize=3, linewidth=1)
        loads_shown = sorted({load for _, loads, _ in panel.series for load in loads})
        if loads_shown and loads_shown[0] > 0:
            axes.set_xscale("log", base=2)
            axes.set_xticks(loads_shown, [f"{load:g}" for load in loads_shown], minor=False)
        if panel.doubling:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:g}")
        axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    _legend(figure, names)
    save(figure, path)


def _legend(figure: "Figure", names: Sequence[str]) -> None:
    """To the right of all panels."""
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color=f"C{at % NUM_COLORS}", linestyle="-" if at < NUM_COLORS else "--", label=name)
        for at, name in enumerate(names)
    ]
    if lines:
        figure.legend(handles=lines, loc="outside right upper", fontsize="small", frameon=False)


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
