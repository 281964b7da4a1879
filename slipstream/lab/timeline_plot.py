"""A picture of a few steps of every bench case, one below the other on one scale: what overlaps and who waits.

Drawn from the same spans and arrows as the Chrome trace; nothing is measured here. Called by `slipstream bench`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from slipstream.lab import plots
from slipstream.lab.timeline import ORDER, TRACKS, arrows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from slipstream.device.events import Span

NUM_STEPS = 2  # whole ones; the stages around them show who overlaps with whom
PANEL_WIDTH, PANEL_HEIGHT = 11.0, 1.5  # inches
BAR = 0.7  # of a track's height
LABEL_SHARE = 0.05  # of the picture's width from which on a bar has its name in it
ARROW = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "linewidth": 0.9, "connectionstyle": "arc3,rad=-0.1"}
ARROW_COLORS = {"confidence": "#7a3db8", "widths": "#222222"}
OTHER_COLOR = "0.6"
COLORS: Mapping[str, str] = {
    "schedule": "#9ecae1", "take_confidence": "#eeeeee", "decide": "#d62728", "collect": "#eeeeee", "commit": "#6baed6",
    "export_confidence": "#b58fd8", "export": "#c7c7c7", "load": "#dddddd", "draft": "#ff9f40", "rank": "#e377c2",
    "layout": "#c5e0a5", "fill": "#98c97a", "verify": "#2ca02c", "accept": "#17becf", "apply": "#9edae5",
    "absorb": "#c7e9e4", "settle": "#bcbd22", "report": "#dbdb8d",
}  # fmt: skip


def timeline_plot(path: Path, cases: "Mapping[str, Sequence[Span]]") -> None:
    """One panel a case. All begin at the start of a typical step and show equally much time."""
    windows = {label: window(spans, NUM_STEPS) for label, spans in cases.items()}
    width_s = max((end - start for start, end in windows.values()), default=0.0)
    figure = _new_figure(max(1, len(cases)))
    shown: set[str] = set()
    for axes, (label, spans) in zip(figure.axes, cases.items(), strict=False):
        shown |= _draw(axes, label, spans, windows[label][0], width_s)
    figure.axes[-1].set_xlabel("ms")
    _legend(figure, shown)
    plots.save(figure, path)


def window(spans: "Sequence[Span]", num_steps: int) -> tuple[float, float]:
    """Start and end in seconds of consecutive decode steps, from verify to verify, that take about as long as most do."""
    drafting = {s.step for s in spans if s.name == "draft"}
    verifies = [s for s in spans if s.name == "verify" and s.kind == "device"]
    starts = sorted(s.start_s for s in verifies if s.step in drafting or not drafting)
    num_steps = min(num_steps, len(starts) - 1)
    if num_steps < 1:
        return min((s.start_s for s in spans), default=0.0), max((s.end_s for s in spans), default=0.0)
    found = list(zip(starts, starts[num_steps:], strict=False))
    typical_s = num_steps * median(after - before for before, after in pairwise(starts))
    return min(found, key=lambda ends: abs(ends[1] - ends[0] - typical_s))


def _new_figure(rows: int) -> "Figure":
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(PANEL_WIDTH, PANEL_HEIGHT * rows + 0.9), layout="constrained")
    figure.subplots(rows, 1, sharex=True)
    return figure


def _draw(axes: "Axes", label: str, spans: "Sequence[Span]", start_s: float, width_s: float) -> set[str]:
    """Bars and arrows of one case; the names of what is in the picture."""
    shown = set()
    for span, left, right in _within(spans, start_s, width_s):
        color = COLORS.get(span.name, OTHER_COLOR)
        hatch = "////" if span.kind == "wait" else None
        axes.barh(_height(span), right - left, BAR, left, color=color, edgecolor="0.35", linewidth=0.4, hatch=hatch)
        if right - left >= LABEL_SHARE * 1e3 * width_s:
            axes.text(
                (left + right) / 2, _height(span), f"{span.name} {span.step}", ha="center", va="center", fontsize=6.5
            )
        shown.add(span.name)
    for arrow in arrows(spans):
        tail, head = 1e3 * (_middle(arrow.source) - start_s), 1e3 * (arrow.target.start_s - start_s)
        if tail >= 0 and head <= 1e3 * width_s:
            ends = (head, _height(arrow.target)), (tail, _height(arrow.source))
            axes.annotate("", *ends, arrowprops={**ARROW, "color": ARROW_COLORS[arrow.name]})
    axes.set(xlim=(0, 1e3 * width_s or 1), ylim=(-0.6, len(ORDER) - 0.4), yticks=range(len(ORDER)))
    axes.set_yticklabels(list(reversed(ORDER)))
    axes.set_title(label, loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    return shown


def _within(spans: "Sequence[Span]", start_s: float, width_s: float) -> "Iterator[tuple[Span, float, float]]":
    """Spans that lie in the picture, and the ms where they begin and end in it."""
    for span in spans:
        left, right = max(0.0, span.start_s - start_s), min(width_s, span.end_s - start_s)
        if left < right:
            yield span, 1e3 * left, 1e3 * right


def _height(span: "Span") -> int:
    return len(ORDER) - 1 - ORDER.index(TRACKS[span.kind])


def _middle(span: "Span") -> float:
    return (span.start_s + span.end_s) / 2


def _legend(figure: "Figure", shown: set[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bars = [Patch(facecolor=color, edgecolor="0.35", label=name) for name, color in COLORS.items() if name in shown]
    lines = [Line2D([], [], color=color, label=f"{name}, arrow") for name, color in ARROW_COLORS.items()]
    figure.legend(handles=[*bars, *lines], loc="outside lower center", ncols=8, fontsize="small", frameon=False)
