"""What happened when: spans of host and device stages of every step, on one clock.

Off by default; a Recorder is handed to the engine by benches and by the tests that assert the order of stages. On a CPU
a device stage runs where it is launched, so host and device spans do not overlap.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Kind = Literal["host", "wait", "device"]


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
