"""Kernels that are launched while the one before them ends (programmatic dependent launch, since Hopper).

Getting programs onto the device takes about a microsecond after the last one of the kernel before has left, and a step of
a small model is a chain of hundreds. A kernel that says `**early(x)` is brought there meanwhile, and its programs wait for
all memory of the kernel before as the first thing they do (`if EARLY: gdc_wait()`): every program, whatever it does
next, since who comes after it relies on that. Nothing is read ahead of the wait. With many rows, whose products are a
library's, and elsewhere launches are as usual.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

_HOPPER = 9
# Plain steps of SmolLM2 on an H200 (bench/results/tune-step-smollm2-h200.json), ms with and without: 1 row 0.66, 0.70; 32
# rows 0.69, 0.73; 128 rows 0.98, 1.01; 256 rows 1.35, 1.29.
_MOST_ROWS = 128
ENABLED = True  # bench/tune_step.py measures what it brings


def early(rows: Tensor) -> dict[str, Any]:
    """Options of a launch over these rows, [R, any]."""
    is_early = ENABLED and len(rows) <= _MOST_ROWS and _can(rows.device)
    return {"EARLY": True, "launch_pdl": True} if is_early else {}


@cache
def _can(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _HOPPER
