"""What happened when, step by step, to look at: the spans of bench cases as a Chrome trace, which Perfetto opens.

A case is a process with three tracks: stages of the host, of the device, and copies as they are started. Arrows lead from
a confidence to the decision that uses it, and from a decision to the verify that it decides. Knows spans and nothing of
engines; `bench --probe --timeline` collects them here, `timeline_plot` makes a picture of the same.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slipstream.files import replace_text

if TYPE_CHECKING:  # it stands beside code that needs torch
    from slipstream.device.events import Kind, Span

Track = Literal["host", "device", "copies"]

TRACKS: "Mapping[Kind, Track]" = {"host": "host", "wait": "host", "device": "device", "copy": "copies"}
ORDER: tuple[Track, ...] = ("host", "copies", "device")  # from top to bottom
MAX_LANES = 100  # of a track; a run needs one


class Timeline:
    """The spans of every case, from its latest wave: by then nothing runs for the first time."""

    def __init__(self) -> None:
        self.cases: dict[str, tuple[Span, ...]] = {}  # label -> spans, in the order in which cases take turns

    def add(self, label: str, spans: "Sequence[Span]") -> None:
        """Keeps a copy; the recorder's own list is cleared and filled again."""
        self.cases[label] = tuple(spans)

    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        """Chrome trace JSON. `about` says where and how it was measured."""
        path.parent.mkdir(parents=True, exist_ok=True)
        trace = {"traceEvents": trace_events(self.cases), "displayTimeUnit": "ms", "otherData": dict(about)}
        replace_text(path, json.dumps(trace, separators=(",", ":")) + "\n")


def trace_events(cases: "Mapping[str, Sequence[Span]]") -> list[dict[str, Any]]:
    """The events of a Chrome trace, times in microseconds; every case begins at 0."""
    events: list[dict[str, Any]] = []
    flow_ids = count(1)
    for pid, (label, spans) in enumerate(cases.items(), start=1):
        origin_s = min((span.start_s for span in spans), default=0.0)
        process = _Process(pid, origin_s, dict(zip(map(id, spans), _threads(spans), strict=True)))
        events += process.names(label)
        events += [process.slice(span) for span in spans]
        for arrow in arrows(spans):
            events += process.flow(arrow, next(flow_ids))
    return events


# --------------------------------------------------------------------------------------------------------------- arrows


@dataclass(frozen=True, slots=True)
class Arrow:
    """What one span hands to a later one."""

    name: Literal["confidence", "widths"]
    source: "Span"
    target: "Span"


def arrows(spans: "Sequence[Span]") -> list[Arrow]:
    """From confidence to decision and from decision to verify, wherever both ends were recorded."""
    exports = {span.step: span for span in spans if span.name == "export_confidence"}
    verifies = {span.step: span for span in spans if span.name == "verify" and span.kind == "device"}
    found: list[Arrow] = []
    taken: Span | None = None  # the latest confidence that no decision has used
    for span in sorted((s for s in spans if TRACKS[s.kind] == "host"), key=lambda s: s.start_s):
        if span.name == "take_confidence":
            taken = exports.get(span.step)
        elif span.name == "decide":
            if taken is not None:
                found.append(Arrow("confidence", taken, span))
            if span.step in verifies:
                found.append(Arrow("widths", span, verifies[span.step]))
            taken = None
    return found


# -------------------------------------------------------------------------------------------------------- trace events


@dataclass(frozen=True, slots=True)
class _Process:
    """One case: where its times begin, and on which thread each of its spans lies (by the span's identity)."""

    pid: int
    origin_s: float
    threads: "Mapping[int, int]"

    def names(self, label: str) -> Iterator[dict[str, Any]]:
        yield self._about("process_name", 0, {"name": label})
        yield self._about("process_sort_index", 0, {"sort_index": self.pid})
        for tid in sorted(set(self.threads.values())):
            track, lane = divmod(tid, MAX_LANES)
            yield self._about("thread_name", tid, {"name": ORDER[track] + (f" {lane + 1}" if lane else "")})
            yield self._about("thread_sort_index", tid, {"sort_index": tid})

    def _about(self, name: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": self.pid, "tid": tid, "args": args}

    def slice(self, span: "Span") -> dict[str, Any]:
        start, end = self._us(span.start_s), self._us(span.end_s)  # both rounded: neighbours must not overlap by that
        return {
            "ph": "X", "name": span.name, "cat": span.kind, "ts": start, "dur": round(end - start, 3),
            "args": {"step": span.step}, **self._place(span),
        }  # fmt: skip

    def flow(self, arrow: Arrow, flow_id: int) -> Iterator[dict[str, Any]]:
        """Begins in the middle of its source, for an end belongs to the next slice, and enters its target at the start."""
        middle_s = (arrow.source.start_s + arrow.source.end_s) / 2
        common = {"name": arrow.name, "cat": "flow", "id": flow_id}
        yield {"ph": "s", **common, "ts": self._us(middle_s), **self._place(arrow.source)}
        yield {"ph": "f", "bp": "e", **common, "ts": self._us(arrow.target.start_s), **self._place(arrow.target)}

    def _place(self, span: "Span") -> dict[str, int]:
        return {"pid": self.pid, "tid": self.threads[id(span)]}

    def _us(self, at_s: float) -> float:
        return round(1e6 * (at_s - self.origin_s), 3)


def _threads(spans: "Sequence[Span]") -> list[int]:
    """[spans] thread of each: its track's first lane, unless it cuts across a span there, which viewers cannot draw."""
    lanes: dict[Track, list[list[float]]] = {track: [] for track in ORDER}  # of every lane the ends of open spans
    found = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].start_s, -spans[i].end_s)):
        span, track = spans[index], TRACKS[spans[index].kind]
        lane = next((n for n, ends in enumerate(lanes[track]) if _fits(span, ends)), len(lanes[track]))
        if lane == len(lanes[track]):
            lanes[track].append([])
        lanes[track][lane].append(span.end_s)
        found[index] = ORDER.index(track) * MAX_LANES + lane
    return found


def _fits(span: "Span", open_ends: list[float]) -> bool:
    """After all spans of a lane or within its innermost open one; those that are over are dropped."""
    while open_ends and open_ends[-1] <= span.start_s:
        open_ends.pop()
    return not open_ends or span.end_s <= open_ends[-1]
