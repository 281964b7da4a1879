"""How long steps take, and what of them is on the critical path, for the metrics.

Every step's length is kept: two readings of a clock. What a step spends on deciding and building, and how long the
device stood still, is known only of steps whose stages are recorded, and recording costs something: after each look
(`snapshot` of `metrics`) the next few steps are, and no others. In the engine's thread only. Called by `driver`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from slipstream.lab.critical_path import step_times

if TYPE_CHECKING:
    from slipstream.device.events import Recorder
    from slipstream.llm import LLM

NUM_RECORDED = 16  # steps after each look
NUM_LEFT_OUT = 1  # of the recorded ones: only what the device did beside the next
_STEP_S = (2e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_HOST_S = (1e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.05, 0.1)


class Durations:
    """A histogram of seconds. prometheus_client's own takes a lock each time; this one has one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # [i] in (bounds[i - 1], bounds[i]]; the last one beyond all
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds

    def extend(self, many: Iterable[float]) -> None:
        for seconds in many:
            self.add(seconds)

    @property
    def num(self) -> int:
        return sum(self.counts)

    def copy(self) -> "Durations":
        twin = Durations(self.bounds)
        twin.counts, twin.sum_s = self.counts.copy(), self.sum_s
        return twin


class StepTimings:
    """Since the start. A field that is empty was never measured: a CPU has no device beside the host."""

    def __init__(self) -> None:
        self.step = Durations(_STEP_S)
        self.decide, self.decide_hidden, self.build, self.gap = (Durations(_HOST_S) for _ in range(4))
        self.device_busy: float | None = None  # of the steps that were recorded last, in [0, 1]

    def copy(self) -> "StepTimings":
        twin = StepTimings()
        for name in ("step", "decide", "decide_hidden", "build", "gap"):
            setattr(twin, name, getattr(self, name).copy())
        twin.device_busy = self.device_busy
        return twin


class StepMeter:
    """Makes the steps of an LLM's engine, and times them."""

    def __init__(self, llm: "LLM") -> None:
        self.timings = StepTimings()
        self._llm = llm
        self._has_device = llm.models.device.type != "cpu"
        self._is_wanted = False
        self._recorder: Recorder | None = None  # while steps are recorded
        self._num_left = 0

    def look(self) -> StepTimings:
        """What is known by now; the next steps are recorded, for the next look."""
        self._is_wanted = True
        return self.timings.copy()

    def step(self) -> None:
        """One of the engine's steps."""
        if self._is_wanted and self._recorder is None:
            self._is_wanted, self._num_left = False, NUM_RECORDED
            self._recorder = self._llm.record()
        start = perf_counter()
        self._llm.engine.step()
        self.timings.step.add(perf_counter() - start)
        if self._recorder is not None:
            self._num_left -= 1
            if not self._num_left or not self._llm.engine.has_work:
                self._close(self._recorder)

    def forget_recording(self) -> None:
        """The engine has failed, and its recorder with it: others will be recorded instead."""
        self._is_wanted |= self._recorder is not None
        self._recorder = None

    def _close(self, recorder: "Recorder") -> None:
        """On a GPU this waits for the steps that were recorded."""
        self._recorder = None
        self._llm.stop_recording()
        times, known = step_times(recorder.spans, NUM_LEFT_OUT), self.timings
        known.build.extend(times.build_s)
        if self._llm.speculative.mode != "off":
            known.decide.extend(times.decide_s)
        if self._has_device:
            known.decide_hidden.extend(times.decide_hidden_s)
            known.gap.extend(times.gap_s)
            known.device_busy = times.device_busy if times.device_busy is not None else known.device_busy
