"""What a decode step spends on deciding, and whether a device stood still meanwhile: from spans to five figures.

Every mode goes through the same arithmetic: host and device spans lie on one clock, and whatever part of a host span
overlaps no device span is on the critical path. Knows nothing of engines or tensors. Called by `bench --probe` and by
the server, which looks at a few steps; what stages take on the device, and the host beside its waits, is for
`bench/gpu.py`.
"""

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it stands beside code that needs torch
    from slipstream.device.events import Span

Interval = tuple[float, float]  # [start, end) in seconds

DECIDE = frozenset({"decide"})
BUILD = frozenset({"schedule"})  # making the plan; copying it down belongs to the device stage `load`
BETWEEN = frozenset({"rank", "layout", "fill"})  # device work that belongs between draft and verify


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """Medians over the decode steps of a run; None where a run had no such step."""

    decide_us: float | None  # deciding while the device had nothing to do
    decide_hidden_us: float | None  # deciding behind device work
    build_us: float | None  # planning while the device had nothing to do
    gap_us: float | None  # from the end of the draft to the start of verify, less the stages that belong there
    device_busy: float | None  # share of the time from the first to the last decode step in which the device worked


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The same of every decode step, in seconds."""

    decide_s: list[float]
    decide_hidden_s: list[float]
    build_s: list[float]
    gap_s: list[float]  # of steps that drafted
    device_busy: float | None


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def overlap(ours: Sequence[Interval], theirs: Sequence[Interval]) -> float:
    """Time that lies in both; each list disjoint and in order."""
    total, i, j = 0.0, 0, 0
    while i < len(ours) and j < len(theirs):
        total += max(0.0, min(ours[i][1], theirs[j][1]) - max(ours[i][0], theirs[j][0]))
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return total


def critical_path(spans: "Sequence[Span]") -> CriticalPath:
    """Five figures from the spans of one run, steps that only prefill left out."""
    times = step_times(spans)
    return CriticalPath(
        decide_us=_median_us(times.decide_s),
        decide_hidden_us=_median_us(times.decide_hidden_s),
        build_us=_median_us(times.build_s),
        gap_us=_median_us(times.gap_s),
        device_busy=times.device_busy,
    )


def step_times(spans: "Sequence[Span]", num_left_out: int = 0) -> StepTimes:
    """num_left_out: decode steps at the beginning that only say what the device did beside the next ones."""
    device = union((s.start_s, s.end_s) for s in spans if s.kind == "device")
    steps, drafting = (found[num_left_out:] for found in _decode_steps(spans))
    decide = [_exposed(step, DECIDE, device) for step in steps]
    build = [_exposed(step, BUILD, device) for step in steps]
    return StepTimes(
        decide_s=[exposed for exposed, _ in decide],
        decide_hidden_s=[hidden for _, hidden in decide],
        build_s=[exposed for exposed, _ in build],
        gap_s=[_gap(step) for step in drafting],
        device_busy=_busy(steps, device),
    )


def stage_ms(spans: "Sequence[Span]", *names: str) -> float | None:
    """Device time of these stages together, per decode step that has them all; the median."""
    steps, _ = _decode_steps(spans)
    found = [[s for s in step if s.kind == "device" and s.name in names] for step in steps]
    whole = [length(union((s.start_s, s.end_s) for s in step)) for step in found if {s.name for s in step} == {*names}]
    return 1e3 * statistics.median(whole) if whole else None


def host_us(spans: "Sequence[Span]") -> float | None:
    """Time between two starts of a decode step in which the host did not wait for the device; the median."""
    steps, _ = _decode_steps(spans)
    starts = [s.start_s for step in steps for s in step if s.kind == "host" and s.name in BUILD]
    waits = union((s.start_s, s.end_s) for s in spans if s.kind == "wait")
    turns = [[turn] for turn in pairwise(sorted(starts))]
    return _median_us([length(turn) - overlap(turn, _window(waits, turn)) for turn in turns])


def _decode_steps(spans: "Sequence[Span]") -> "tuple[list[list[Span]], list[list[Span]]]":
    """(the spans of every decode step, those that drafted). Without a drafter, every step counts."""
    by_step: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_step[span.step].append(span)
    steps = [step for step in by_step.values() if any(s.name == "verify" for s in step)]
    drafting = [step for step in steps if any(s.name == "draft" for s in step)]
    return drafting or steps, drafting


def _exposed(step: "Sequence[Span]", names: frozenset[str], device: Sequence[Interval]) -> tuple[float, float]:
    """(outside device work, inside it) of the step's host spans of these names, in seconds."""
    host = union((s.start_s, s.end_s) for s in step if s.kind == "host" and s.name in names)
    # Only the neighbourhood of the step is looked at: a run has thousands of device spans.
    inside = overlap(host, _window(device, host)) if host else 0.0
    return length(host) - inside, inside


def _window(device: Sequence[Interval], host: Sequence[Interval]) -> list[Interval]:
    first = bisect.bisect_right(device, host[0][0], key=lambda i: i[1])
    last = bisect.bisect_left(device, host[-1][1], key=lambda i: i[0])
    return list(device[first:last])


def _gap(step: "Sequence[Span]") -> float:
    """From the end of the draft to the start of verify, less rank, layout and fill where they lie between the two."""
    draft_end = max(s.end_s for s in step if s.name == "draft" and s.kind == "device")
    verify_start = min(s.start_s for s in step if s.name == "verify" and s.kind == "device")
    between = union((s.start_s, s.end_s) for s in step if s.kind == "device" and s.name in BETWEEN)
    return max(0.0, verify_start - draft_end - overlap(between, [(draft_end, verify_start)]))


def _busy(steps: "Sequence[Sequence[Span]]", device: Sequence[Interval]) -> float | None:
    """From the first of these steps to the end of the last; prefills that come before are not decoding."""
    work = [s for step in steps for s in step if s.kind == "device"]
    if not work:
        return None
    begin, end = min(s.start_s for s in work), max(s.end_s for s in work)
    return overlap(device, [(begin, end)]) / (end - begin) if end > begin else None


def _median_us(seconds: Sequence[float]) -> float | None:
    return statistics.median(seconds) * 1e6 if seconds else None
