"""Kernels that are launched while the one before them ends (programmatic dependent launch, since Hopper).

Getting programs onto the device takes about a microsecond after the last one of the kernel before has left, and a step of
a small model is a chain of hundreds. A kernel that says `**early(x)` is brought there meanwhile, and its programs wait for
all memory of the kernel before as the first thing they do (`if EARLY: gdc_wait()`): every program, whatever it does
next, since who comes after it relies on that. Nothing is read ahead of the wait. Elsewhere launches are as usual.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

_HOPPER = 9
ENABLED = True  # bench/tune_step.py measures what it brings


def early(tensor: Tensor) -> dict[str, Any]:
    """Options of a launch on this tensor's device."""
    return {"EARLY": True, "launch_pdl": True} if ENABLED and tensor.is_cuda and _can(tensor.device) else {}


@cache
def _can(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= _HOPPER
