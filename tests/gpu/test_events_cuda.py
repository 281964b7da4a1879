"""Spans on a real GPU: they lie where the device worked, on the host's clock, and recording them never waits."""

import itertools
import time
from collections.abc import Callable

import pytest
import torch

from slipstream.config import MODES, SpeculativeConfig
from slipstream.device.events import EventPool, Recorder, Stopwatch, Timeline
from slipstream.lab.ceilings import ceilings, queued_ms
from slipstream.lab.critical_path import critical_path
from slipstream.llm import LLM
from slipstream.testing import tiny_spec, tiny_target
from tests.gpu.test_engine_cuda import PROMPTS, no_synchronisation, params_for, serving

pytestmark = pytest.mark.gpu

TEN_MS = 15_000_000  # cycles, about


def busy(cycles: int = TEN_MS) -> None:
    torch.cuda._sleep(cycles)


def test_a_span_lies_between_launch_and_answer() -> None:
    recorder = Recorder(EventPool())
    for step in range(5):
        begin = time.perf_counter()
        with recorder.span(step, "verify", "device"):
            busy()
        torch.cuda.synchronize()
        end = time.perf_counter()
        (span,) = [span for span in recorder.spans if span.step == step]
        assert begin - 5e-5 < span.start_s < begin + 3e-4
        assert end - 3e-4 < span.end_s < end + 5e-5
        assert span.end_s - span.start_s > 3e-3


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_queued_spans_follow_each_other_and_nothing_waits() -> None:
    recorder = Recorder(EventPool())
    begin = time.perf_counter()
    with no_synchronisation():
        for step in range(20):
            with recorder.span(step, "verify", "device"):
                busy(TEN_MS // 10)
    launched = time.perf_counter() - begin
    spans = recorder.spans
    assert launched < (spans[-1].end_s - spans[0].start_s) / 2
    for before, after in itertools.pairwise(spans):
        assert -1e-6 < after.start_s - before.end_s < 3e-5


def test_clocks_stay_together() -> None:
    """After two seconds a mark on an idle device is still where the host says, to some microseconds."""
    timeline = Timeline(EventPool())
    told, marks = [], []
    for _ in range(20):
        time.sleep(0.1)
        marks.append(timeline.mark())
        told.append(time.perf_counter())
        torch.cuda.synchronize()
    at = timeline.resolve()
    off = sorted(abs(at[mark] - host) for mark, host in zip(marks, told, strict=True))
    assert off[len(off) // 2] < 5e-5


def graph_of(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def test_a_replay_on_an_idle_device_counts_from_its_launch() -> None:
    x = torch.randn(512, 512, device="cuda")
    graph = graph_of(lambda: [x @ x for _ in range(300)])
    alone_s = queued_ms(graph.replay) / 1e3
    recorder = Recorder(EventPool())
    for step in range(20):
        torch.cuda.synchronize()
        with recorder.span(step, "verify", "device", one_launch=True):
            time.sleep(0.002)  # whatever the host does before it launches
            graph.replay()
    lengths = sorted(span.end_s - span.start_s for span in recorder.spans)
    assert 0.5 * alone_s < lengths[10] < 1.5 * alone_s + 5e-5


def test_the_stopwatch_agrees_with_the_host() -> None:
    stopwatch = Stopwatch(on_gpu=True)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    start = stopwatch.mark()
    busy()
    end = stopwatch.mark()
    torch.cuda.synchronize()
    assert Stopwatch.elapsed_ms(start, end) == pytest.approx(1e3 * (time.perf_counter() - begin), rel=0.1)


def test_ceilings_of_a_gpu() -> None:
    spec = tiny_spec(hidden_size=256, intermediate_size=512, head_dim=64)
    target = tiny_target(spec=spec).to("cuda", torch.bfloat16)
    found = ceilings(target, rows=(1, 32))
    assert list(found) == [
        "linear_ms_1_row",
        "linear_ms_32_rows",
        "linear_weights_mb",
        "linear_gb_per_s",
        "copy_gb_per_s",
    ]
    assert 0 < found["linear_ms_1_row"] < 1.0
    assert found["copy_gb_per_s"] > 100


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "off"])
def test_a_run_has_a_critical_path(mode: str) -> None:
    given = serving("dspark")
    config = SpeculativeConfig.for_mode(
        mode, draft_model="dspark", **({} if mode == "static" else {"cost_model": "none"})
    )
    llm = LLM(given["models"], speculative=config, max_model_len=128)
    for _ in range(2):
        recorder = llm.record()
        llm.generate(PROMPTS, params_for(0.0))
        path = critical_path(recorder.spans)
        assert path.gap_us is not None and path.decide_us is not None and path.build_us is not None
        assert path.device_busy is not None and 0 < path.device_busy <= 1
        assert all(span.end_s >= span.start_s for span in recorder.spans)
