"""What this machine could do at best with these weights.

A decode step cannot be faster than its linear layers: they are timed alone, in the same run as everything else, so that
a speed-up is never a ratio against a slow baseline. Twice: as torch multiplies (`linear_ms`), and as this engine does on
weights that it has prepacked (`prepacked_ms`, the true floor; equal where nothing is). Called by `bench` and the demo.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.decoder import Decoder
from slipstream.ops.linear import linear

COPY_BYTES = 256 * 2**20
REPEATS = 11


def ceilings(target: Decoder) -> dict[str, float]:
    """Time of all linear layers of one step at 1 and 8 rows, and the bandwidth of a plain copy."""
    weights = linear_weights(target)
    num_bytes = sum(w.numel() * w.element_size() for w in weights)
    one_row_ms = linear_ms(weights, 1, linear)
    return {
        "linear_ms_1_row": linear_ms(weights, 1, F.linear),
        "linear_ms_8_rows": linear_ms(weights, 8, F.linear),
        "prepacked_ms_1_row": one_row_ms,
        "prepacked_ms_8_rows": linear_ms(weights, 8, linear),
        "linear_weights_mb": num_bytes / 1e6,
        "linear_gb_per_s": num_bytes / 1e6 / one_row_ms,
        "copy_gb_per_s": copy_gb_per_s(weights[0].device),
    }


def linear_weights(target: Decoder) -> list[Tensor]:
    """Every matrix that one row passes through, in the order of a step, the output head included."""
    layers = [module.weight for module in target.layers.modules() if isinstance(module, nn.Linear)]
    return [*layers, target.head_weight]


@torch.inference_mode()
def linear_ms(weights: list[Tensor], rows: int, product: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Median time of one pass over the matrices, each with an input of its own width."""
    widths = {w.shape[1] for w in weights}
    inputs = {n: torch.randn(rows, n, device=weights[0].device).to(weights[0].dtype) for n in widths}

    def step() -> None:
        for weight in weights:
            product(inputs[weight.shape[1]], weight)

    return median_ms(step, weights[0].device)


def copy_gb_per_s(device: torch.device) -> float:
    """Bytes read plus bytes written per second, of a copy that no cache holds."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / 1e6 / median_ms(lambda: target.copy_(source), device)


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
