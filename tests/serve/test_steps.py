"""What steps take: of all of them how long they were, of the few after a scrape what was on the critical path."""

from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.device.events import NullRecorder, Span
from slipstream.load import Models
from slipstream.serve.metrics import families
from slipstream.serve.steps import NUM_RECORDED, Durations, StepMeter
from tests.serve.conftest import COMPLETIONS, Running, make_llm, serving
from tests.unit.test_critical_path import step

LONG = {"prompt": "once", "max_tokens": 120, "ignore_eos": True}


def samples(running: Running, name: str) -> float:
    return running.metric(f"{name}_count")


def page(running: Running) -> str:
    return str(running.http.get("/metrics").text)


@pytest.mark.parametrize("mode", ["off", "lag"])
def test_metrics_of_steps(tiny_pair: Models, mode: str) -> None:
    llm = make_llm(tiny_pair, mode)
    if mode == "lag":  # which learns that drafts of a random drafter are not worth it
        llm.engine.policy.draft_length = lambda plan: 5 if plan.num_decode else 0  # type: ignore[method-assign]
    with serving(llm) as running:
        running.post(COMPLETIONS, **LONG)
        assert isinstance(llm.engine.recorder, NullRecorder)  # nobody has looked
        assert samples(running, "build_seconds") == 0
        steps = samples(running, "engine_step_seconds")
        assert steps >= running.metric("engine_decode_steps_total", mode=mode) > 0
        running.post(COMPLETIONS, **LONG)
        assert isinstance(llm.engine.recorder, NullRecorder)  # no longer
        # One is left out, and so are steps in which nobody drafts where others do.
        assert 1 <= samples(running, "build_seconds") <= NUM_RECORDED - 1
        assert (samples(running, "decide_seconds") > 0) == (mode != "off")
        assert samples(running, "engine_step_seconds") > steps
        text = page(running)
        for absent in ("gap_seconds", "decide_hidden_seconds", "device_busy_perc"):  # a CPU has none of them
            assert absent not in text
        assert f'slipstream:build_seconds_bucket{{le="+Inf",mode="{mode}",model_name="tiny"}}' in text
        rows, alone = (running.metric(f"engine_decode_{what}_total") for what in ("rows", "steps"))
        assert rows / alone == pytest.approx(1) if mode == "off" else rows > alone
        running.settle()


def test_a_recording_ends_with_the_work_and_with_the_engine(tiny_pair: Models) -> None:
    llm = make_llm(tiny_pair)
    with serving(llm) as running:
        page(running)
        running.post(COMPLETIONS, prompt="x", max_tokens=6, ignore_eos=True)
        running.wait_until(lambda: isinstance(llm.engine.recorder, NullRecorder))
        assert 0 < samples(running, "build_seconds") < 6
        steps = running.metric("engine_decode_steps_total")
        llm.engine.launch_verify = lambda *_: 1 / 0  # type: ignore[method-assign]
        assert running.post(COMPLETIONS, **LONG).status_code == 500
        running.wait_until(lambda: running.http.get("/health").status_code == 200)
        assert running.post(COMPLETIONS, **LONG).status_code == 200
        assert running.metric("engine_decode_steps_total") > steps  # counters never fall
        assert samples(running, "build_seconds") > 6
        running.settle()


class OnADevice:
    """An LLM whose steps are those of `step`: 1 ms of planning, decided from `decide` on, gaps of 0.5 ms."""

    def __init__(self) -> None:
        self.models = SimpleNamespace(device=SimpleNamespace(type="cuda"))
        self.speculative = SimpleNamespace(mode="lag")
        self.engine = SimpleNamespace(step=self._step, has_work=True)
        self.num_recordings, self._num_steps = 0, 0
        self._spans: list[Span] | None = None

    def record(self) -> Any:
        self.num_recordings, self._spans = self.num_recordings + 1, []
        return SimpleNamespace(spans=self._spans)

    def stop_recording(self) -> None:
        self._spans = None

    def _step(self) -> None:
        self._num_steps += 1
        if self._spans is not None:
            self._spans += step(self._num_steps, 14.0 * self._num_steps, decide=(2.5, 3.4))


def test_gaps_and_a_busy_device() -> None:
    llm: Any = OnADevice()
    meter = StepMeter(llm)
    for _ in range(50):
        meter.step()
    assert llm.num_recordings == 0
    assert meter.look().gap.num == 0
    for _ in range(50):
        meter.step()
    timings = meter.look()
    assert llm.num_recordings == 1
    assert timings.step.num == 100
    assert timings.gap.num == timings.decide.num == timings.decide_hidden.num == timings.build.num == NUM_RECORDED - 1
    assert timings.gap.sum_s == pytest.approx(0.5e-3 * timings.gap.num)
    assert timings.decide.sum_s == pytest.approx(0.4e-3 * timings.decide.num)
    assert timings.decide_hidden.sum_s == pytest.approx(0.5e-3 * timings.decide.num)
    assert timings.build.sum_s == pytest.approx(0, abs=1e-9)  # behind the verify before
    assert timings.device_busy == pytest.approx(13.5 / 14)
    names = {family.name for family in families("p:", "m", {"lag": timings})}
    assert names == {f"p:{name}_seconds" for name in ("engine_step", "decide", "decide_hidden", "build", "gap")} | {
        "p:device_busy_perc"
    }
    meter.step()
    assert timings.step.num == 100  # what was looked at stays


def test_durations_as_buckets() -> None:
    durations = Durations((0.1, 0.2))
    durations.extend((0.1, 0.15, 0.2, 5.0))
    assert durations.counts == [1, 2, 1]
    assert durations.num == 4
