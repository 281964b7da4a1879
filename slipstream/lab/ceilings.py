"""What this machine could do at best with these weights, and what machine it is.

A decode step cannot be faster than its linear layers: they are timed alone, in the same run as everything else, so that
a speed-up is never a ratio against a slow baseline. Called by `bench` and the demo before anything is measured.
"""

import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.decoder import Decoder

COPY_BYTES = 256 * 2**20
REPEATS = 7


def ceilings(target: Decoder) -> dict[str, float]:
    """Time of all linear layers of one step at 1 and 8 rows, and the bandwidth of a plain copy."""
    weights = linear_weights(target)
    num_bytes = sum(w.numel() * w.element_size() for w in weights)
    one_row_ms = linear_ms(weights, 1)
    return {
        "linear_ms_1_row": one_row_ms,
        "linear_ms_8_rows": linear_ms(weights, 8),
        "linear_weights_mb": num_bytes / 1e6,
        "linear_gb_per_s": num_bytes / 1e6 / one_row_ms,
        "copy_gb_per_s": copy_gb_per_s(weights[0].device),
    }


def linear_weights(target: Decoder) -> list[Tensor]:
    """Every matrix that one row passes through, in the order of a step, the output head included."""
    layers = [module.weight for module in target.layers.modules() if isinstance(module, nn.Linear)]
    return [*layers, target.head_weight]


@torch.inference_mode()
def linear_ms(weights: list[Tensor], rows: int) -> float:
    """Median time of one pass over the matrices, each with an input of its own width."""
    widths = {w.shape[1] for w in weights}
    inputs = {n: torch.randn(rows, n, device=weights[0].device).to(weights[0].dtype) for n in widths}

    def step() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

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


def device_facts(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    if device.type == "cuda":
        return {"type": "cuda", "name": torch.cuda.get_device_name(device), "threads": torch.get_num_threads()}
    return {"type": "cpu", "name": cpu_name(), "threads": torch.get_num_threads()}


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    names = ("slipstream", "torch", "numpy", "tokenizers", "safetensors")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from a source tree
            found[name] = "not installed"
    return found


def git_commit() -> str | None:
    """The commit that was measured, with `-dirty` when files differ from it; None outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # installed inside somebody else's checkout
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
