"""What this machine could do at best with these weights.

A decode step cannot be faster than its linear layers: they are timed alone, in the same run as everything else, so that
a speed-up is never a ratio against a slow baseline. On a CPU twice: as torch multiplies (`linear_ms`), and as this engine
does on weights that it has prepacked (`prepacked_ms`, the true floor; equal where nothing is). On a GPU inside CUDA graphs,
and for more rows: there weights are read once for many of them. Called by `bench`, the demo and bench/gpu.py.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.device.events import EventPool
from slipstream.lab.report import row_key
from slipstream.models.decoder import Decoder
from slipstream.ops.linear import linear

CPU_ROWS = (1, 8)
GPU_ROWS = (1, 8, 32, 128, 256, 512, 1024)
COPY_BYTES = 256 * 2**20
GPU_COPY_BYTES = 2**30  # far above what a cache holds, and long beside a launch
REPEATS = 11

Product = Callable[[Tensor, Tensor], Tensor]


def ceilings(target: Decoder, rows: Sequence[int] | None = None) -> dict[str, float]:
    """Time of all linear layers of one step at several numbers of rows, and the bandwidth of a plain copy.

    rows: 1 and 8 on a CPU, up to 1024 on a GPU unless given. The keys are linear_ms_1_row, linear_ms_8_rows and so on.
    """
    weights = linear_weights(target)
    on_gpu = weights[0].is_cuda
    num_bytes = sum(w.numel() * w.element_size() for w in weights)
    rows = rows or (GPU_ROWS if on_gpu else CPU_ROWS)
    plain = {n: linear_ms(weights, n, F.linear) for n in rows}
    packed = {} if on_gpu else {n: linear_ms(weights, n, linear) for n in rows}
    return {
        **{f"linear_ms_{row_key(n)}": ms for n, ms in plain.items()},
        **{f"prepacked_ms_{row_key(n)}": ms for n, ms in packed.items()},
        "linear_weights_mb": num_bytes / 1e6,
        "linear_gb_per_s": num_bytes / 1e6 / (packed or plain)[rows[0]],
        "copy_gb_per_s": copy_gb_per_s(weights[0].device),
    }


def linear_weights(target: Decoder) -> list[Tensor]:
    """Every matrix that one row passes through, in the order of a step, the output head included."""
    layers = [module.weight for module in target.layers.modules() if isinstance(module, nn.Linear)]
    return [*layers, target.head_weight]


@torch.inference_mode()
def linear_ms(weights: list[Tensor], rows: int, product: Product) -> float:
    """Median time of one pass over the matrices, each with a random input of its own width."""
    widths = {w.shape[1] for w in weights}
    inputs = {n: torch.randn(rows, n, device=weights[0].device).to(weights[0].dtype) for n in widths}

    def step() -> None:
        for weight in weights:
            product(inputs[weight.shape[1]], weight)

    return graph_ms(step) if weights[0].is_cuda else median_ms(step, weights[0].device)


def copy_gb_per_s(device: torch.device) -> float:
    """Bytes read plus bytes written per second, of a copy that no cache holds."""
    if device.type != "cuda":
        source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return 2 * COPY_BYTES / 1e6 / median_ms(lambda: target.copy_(source), device)
    source = torch.randint(2**31, (GPU_COPY_BYTES // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * GPU_COPY_BYTES / 1e6 / queued_ms(lambda: target.copy_(source))


def graph_ms(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median device time of the work that `call` launches, replayed as a CUDA graph: no launch is waited for."""
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries set themselves up outside the capture
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return queued_ms(graph.replay, repeats)


def queued_ms(launch: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median device time of one launch among several in a queue, by events; the first three do not count."""
    pool = EventPool()
    marks = [pool.record()]
    for _ in range(repeats + 3):
        launch()
        marks.append(pool.record())
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairwise(marks[3:]))


def median_ms(call: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Median over `repeats` calls after two that do not count; the device is idle before and after each."""
    times = []
    for index in range(repeats + 2):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        if index >= 2:
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
