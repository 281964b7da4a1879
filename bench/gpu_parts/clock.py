"""How well spans of replays tell when the device worked, on a device that was idle before: the hard case.

The event before a replay is reached at once, while the host still prepares the launch, so an idle device would count as
working; that is what `one_launch` corrects (`slipstream.device.events`). Both are held against replays in a queue: a
span may be laid too short there, which reads as a device that had nothing to do, but not too long.
"""

import statistics
import time
from collections.abc import Callable

import torch

from bench.gpu_parts.goals import Report, at_most, reported
from bench.gpu_parts.scale import Scale
from bench.gpu_parts.session import Clock, Session
from slipstream.device.events import EventPool, Recorder
from slipstream.lab.ceilings import queued_ms

KERNELS = 200  # about as many as a step of a small model
REPLAYS = 30


def run(session: Session, scale: Scale, clock: Clock) -> Report:
    if not torch.cuda.is_available():
        return {"left_out": "a CPU runs stages where they are launched"}, []
    graph = small_products()
    alone_ms = queued_ms(graph.replay)
    launch_us = host_us(graph.replay)
    found = {corrected: span_ms(graph.replay, corrected) for corrected in (False, True)}
    longer = {corrected: 1e3 * (ms - alone_ms) for corrected, ms in found.items()}
    report = {"kernels": KERNELS, "queued_ms": alone_ms, "launch_us": launch_us, "span_ms": found[False],
              "span_ms_one_launch": found[True]}  # fmt: skip
    return report, [
        reported(f"clock: launching a graph of {KERNELS} kernels, us", launch_us),
        reported("clock: span of a replay on an idle device, us longer than in a queue, uncorrected", longer[False]),
        at_most("clock: span of a replay on an idle device, us longer than in a queue", longer[True], 20.0),
    ]


def small_products() -> torch.cuda.CUDAGraph:
    x, weight = (torch.randn(n, 576, device="cuda", dtype=torch.bfloat16) for n in (1, 576))
    x @ weight  # libraries set themselves up outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(KERNELS):
            x @ weight
    return graph


def span_ms(replay: Callable[[], None], one_launch: bool) -> float:
    """Median length of a span around one replay, the device idle before."""
    recorder = Recorder(EventPool())
    for number in range(REPLAYS):
        torch.cuda.synchronize()
        time.sleep(0.001)
        with recorder.span(number, "verify", "device", one_launch):
            replay()
    return 1e3 * statistics.median(span.end_s - span.start_s for span in recorder.spans)


def host_us(replay: Callable[[], None]) -> float:
    """Median host time of one launch on an idle device."""
    times = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        replay()
        times.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(times)
