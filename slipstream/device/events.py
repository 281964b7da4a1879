"""What happened when: spans of host and device stages of every step, on one clock.

Off by default; a Recorder is handed to the engine by benches and by the tests that assert the order of stages. On a CPU
a device stage runs where it is launched, so host and device spans do not overlap. On a GPU device stages lie between
timing events of the compute stream; nobody asks for their times before the spans are read, and a Timeline then lays
them onto the host's clock.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch

Kind = Literal["host", "wait", "device", "copy"]  # copy: started here, runs beside all others

_NOTHING = nullcontext()
ANCHOR_TRIES = 8
REBASE_MS = 1000.0  # elapsed times are fp32: up to here they are good to 0.1 us
STOPWATCH_EVENTS = 64  # of 16 steps; at most three are on their way


class TimingEvent(Protocol):
    """The part of `torch.cuda.Event` that is used here."""

    def record(self, stream: "torch.cuda.Stream | None" = None) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: "TimingEvent", /) -> float:
        """From this event to the other, in ms."""
        ...


Mark: TypeAlias = "TimingEvent | float"


@dataclass(frozen=True, slots=True)
class Span:
    step: int
    name: str
    kind: Kind
    start_s: float
    end_s: float


def cuda_event() -> TimingEvent:
    event: TimingEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, assignment]
    return event


class EventPool:
    """Timing events to be used again: making one takes longer than recording it. `make` is replaced in tests."""

    def __init__(self, make: Callable[[], TimingEvent] = cuda_event, stream: "torch.cuda.Stream | None" = None) -> None:
        """stream: where events are recorded; None: on the current one, which takes longer to find than to use."""
        self._make = make
        self._stream = stream
        self._free: list[TimingEvent] = []

    def record(self) -> TimingEvent:
        """An event at this place of the stream."""
        event = self._free.pop() if self._free else self._make()
        event.record(self._stream)
        return event

    def give(self, events: Sequence[TimingEvent]) -> None:
        """Back from whoever has no further question to them."""
        self._free.extend(events)


class Timeline:
    """Marks on the compute stream, whose times on the host's clock are computed afterwards.

    Between two anchors, events whose time the host knows, the device's clock is taken to be linear: the two clocks
    drift apart by some ten microseconds a second. An anchor is good to half the time that recording one event and
    seeing it takes, a few microseconds.
    """

    def __init__(self, pool: EventPool) -> None:
        """Waits for the device."""
        self._pool = pool
        self._events: list[TimingEvent] = []
        self._begin_s = self._anchor()

    def mark(self) -> int:
        """A mark here on the current stream: its index among the times of the next `resolve`."""
        self._events.append(self._pool.record())
        return len(self._events) - 1

    def resolve(self) -> list[float]:
        """When each mark since the last call was reached, in seconds of `time.perf_counter`. Waits for the device."""
        begin_s, end_s = self._begin_s, self._anchor()
        *used, last = self._events
        at_ms = _since_first(self._events)
        scale = (end_s - begin_s) / at_ms[-1] if at_ms[-1] > 0 else 0.0
        self._pool.give(used)
        self._events, self._begin_s = [last], end_s
        return [begin_s + scale * ms for ms in at_ms]

    def _anchor(self) -> float:
        """Add an event and return its time: the middle of the narrowest of several brackets around one."""
        tries = [self._bracketed() for _ in range(ANCHOR_TRIES)]  # the first waits for what is in the stream
        _, best_s, best = min(tries, key=lambda t: t[0])
        self._pool.give([event for _, _, event in tries if event is not best])
        self._events.append(best)
        return best_s

    def _bracketed(self) -> tuple[float, float, TimingEvent]:
        """(seconds from before it was recorded to after it was seen, the middle, the event)"""
        before = time.perf_counter()
        event = self._pool.record()
        event.synchronize()
        after = time.perf_counter()
        return after - before, (before + after) / 2, event


def _since_first(events: Sequence[TimingEvent]) -> list[float]:
    """Milliseconds of every event after the first one."""
    base, base_ms, found = events[0], 0.0, []
    for event in events:
        since_ms = base.elapsed_time(event)
        found.append(base_ms + since_ms)
        if since_ms > REBASE_MS:
            base, base_ms = event, base_ms + since_ms
    return found


class _OpenSpan:
    """A span's block. A class of its own, for a generator would take twice as long, some ten times a step."""

    __slots__ = ("first", "index", "kind", "name", "one_launch", "recorder", "start_s", "step")

    def __init__(self, recorder: "Recorder", step: int, name: str, kind: Kind, one_launch: bool) -> None:
        self.recorder, self.step, self.name, self.kind, self.one_launch = recorder, step, name, kind, one_launch
        self.index, self.first, self.start_s = 0, 0, 0.0

    def __enter__(self) -> None:
        self.recorder._begin(self)

    def __exit__(self, *exception: object) -> None:
        self.recorder._end(self)


class Recorder:
    """Collects spans in the order in which stages begin."""

    def __init__(self, pool: EventPool | None = None) -> None:
        """pool: where timing events come from, on a GPU (waits for it); None: device stages run where launched."""
        self._timeline = None if pool is None else Timeline(pool)
        self._spans: list[Span] = []
        self._pending: list[tuple[int, int, int, bool]] = []  # span, its two marks, whether it is one launch

    def span(self, step: int, name: str, kind: Kind, one_launch: bool = False) -> AbstractContextManager[None]:
        """A stage, from here to the end of the block.

        one_launch: all of the block's work is launched at once at its end (the replay of a graph), so the device has
        not begun it before. Without that, an idle device would count as working while the host prepares a replay.
        """
        return _OpenSpan(self, step, name, kind, one_launch)

    def _begin(self, span: "_OpenSpan") -> None:
        span.index = len(self._spans)
        if span.kind == "device" and self._timeline is not None:
            span.first = self._timeline.mark()
        span.start_s = time.perf_counter()
        self._spans.append(Span(span.step, span.name, span.kind, span.start_s, span.start_s))

    def _end(self, span: "_OpenSpan") -> None:
        self._spans[span.index] = Span(span.step, span.name, span.kind, span.start_s, time.perf_counter())
        if span.kind == "device" and self._timeline is not None:
            self._pending.append((span.index, span.first, self._timeline.mark(), span.one_launch))

    @property
    def spans(self) -> list[Span]:
        """All spans so far. On a GPU this waits for what was launched, so it is for after a run."""
        if self._pending and self._timeline is not None:
            at = self._timeline.resolve()
            for index, first, last, one_launch in self._pending:
                span = self._spans[index]
                start = max(at[first], span.end_s) if one_launch else at[first]
                self._spans[index] = Span(span.step, span.name, span.kind, min(start, at[last]), at[last])
            self._pending.clear()
        return self._spans

    def names(self, step: int | None = None) -> list[str]:
        return [span.name for span in self._spans if step is None or span.step == step]

    def clear(self) -> None:
        """Forget what was recorded; on a GPU this waits for it, and the clocks are compared anew."""
        if self._timeline is not None:
            self._timeline.resolve()
        self._pending.clear()
        self._spans.clear()


class NullRecorder(Recorder):
    """Records nothing."""

    def span(self, step: int, name: str, kind: Kind, one_launch: bool = False) -> AbstractContextManager[None]:
        return _NOTHING


class Stopwatch:
    """Device time between two marks of one step, read when the step is collected.

    On a GPU the marks are events on the compute stream; on a CPU launches run where they are made, and the host's
    clock is the device's. The events take turns: a mark is good for the next STOPWATCH_EVENTS - 1 of them.
    """

    def __init__(self, on_gpu: bool, pool: EventPool | None = None) -> None:
        self._pool = (pool or EventPool()) if on_gpu else None
        self._used: deque[TimingEvent] = deque()

    def mark(self) -> Mark:
        if self._pool is None:
            return time.perf_counter()
        if len(self._used) == STOPWATCH_EVENTS:
            self._pool.give([self._used.popleft()])
        self._used.append(self._pool.record())
        return self._used[-1]

    @staticmethod
    def elapsed_ms(start: Mark, end: Mark) -> float:
        """Only after the step was collected: waits for nothing then."""
        if isinstance(start, float):
            assert isinstance(end, float)
            return 1e3 * (end - start)
        assert not isinstance(end, float)
        return start.elapsed_time(end)
