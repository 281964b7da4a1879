"""What happened when: spans of host and device stages of every step, on one clock.

Off by default; a Recorder is handed to the engine by benches and by the tests that assert the order of stages. On a CPU
a device stage runs where it is launched, so host and device spans do not overlap.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

Kind = Literal["host", "wait", "device"]
Mark: TypeAlias = "torch.cuda.Event | float"


@dataclass(frozen=True, slots=True)
class Span:
    step: int
    name: str
    kind: Kind
    start_s: float
    end_s: float


class Recorder:
    """Collects spans in the order in which stages begin."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextmanager
    def span(self, step: int, name: str, kind: Kind) -> Iterator[None]:
        index = len(self.spans)
        start = time.perf_counter()
        self.spans.append(Span(step, name, kind, start, start))
        try:
            yield
        finally:
            self.spans[index] = Span(step, name, kind, start, time.perf_counter())

    def names(self, step: int | None = None) -> list[str]:
        return [span.name for span in self.spans if step is None or span.step == step]

    def clear(self) -> None:
        self.spans.clear()


class NullRecorder(Recorder):
    """Records nothing."""

    @contextmanager
    def span(self, step: int, name: str, kind: Kind) -> Iterator[None]:
        yield


class Stopwatch:
    """Device time between two marks of one step, read when the step is collected.

    On a GPU the marks are events on the compute stream; on a CPU launches run where they are made, and the host's
    clock is the device's.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu

    def mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @staticmethod
    def elapsed_ms(start: Mark, end: Mark) -> float:
        """Only after the step was collected: waits for nothing then."""
        if isinstance(start, float):
            assert isinstance(end, float)
            return 1e3 * (end - start)
        assert isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end))
