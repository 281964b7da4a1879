"""Kernels that are launched while the one before them ends (programmatic dependent launch, since Hopper).

Getting programs onto the device takes about a microsecond after the last one of the kernel before has left, and a step of
a small model is a chain of hundreds. A kernel that says `**early(x, n)` is brought there meanwhile, and before its programs
touch memory they wait for all of the kernel before (`after_previous`): every program, whatever it does next, since who
comes after it relies on that. Where a kernel overlaps, programs of the next one come as soon as there is room beside its
last ones. A product that does so has the first of its weight, which nobody changes, fetched before it waits. With many
rows, whose products are a library's, and elsewhere launches are as usual.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HOPPER = 9
# Plain steps of SmolLM2 on an H200 (bench/results/tune-step-smollm2-h200.json), ms with and without: 1 row 0.66, 0.70; 32
# rows 0.69, 0.73; 128 rows 0.98, 1.01; 256 rows 1.35, 1.29.
MOST_ROWS = 128
MULTIPROCESSORS = 132  # of an H100 or H200
# Programs of a kernel beside which others may come: one each. Where several have to go before there is room, those of the
# next kernel crowd where they went first: Qwen3-8B's shape at 32 rows, ms: 4.9, and 5.6 if all kernels overlap. SmolLM2 at
# 1 and 32 rows 0.634 and 0.647, and 0.652 and 0.692 if none does (docs/LOG.md).
MOST_PROGRAMS = MULTIPROCESSORS
_LINE_BYTES = tl.constexpr(128)
ENABLED = True  # bench/tune_step.py measures what it brings


def early(rows: Tensor, num_programs: int) -> dict[str, Any]:
    """Arguments of a launch over these rows, [R, any]; num_programs: of those that have work.

    `overlaps` is no constant, so that there are not twice as many kernels to be compiled.
    """
    if not (ENABLED and len(rows) <= MOST_ROWS and _can(rows.device)):
        return {"overlaps": 0}
    return {"overlaps": int(num_programs <= MOST_PROGRAMS), "EARLY": True, "launch_pdl": True}


@triton.jit
def after_previous(overlaps, EARLY: tl.constexpr):
    """Wait for the kernel before; from then on the next one's programs may come."""
    if EARLY:
        gdc_wait()
        if overlaps != 0:
            gdc_launch_dependents()


@triton.jit
def fetch(rows, overlaps, LINES: tl.constexpr):
    """Have the first LINES lines of memory of each of `rows`, [n] pointers, brought to the second-level cache."""
    if overlaps != 0:
        step: tl.constexpr = _LINE_BYTES // (rows.dtype.element_ty.primitive_bitwidth // 8)
        at = rows[:, None] + (tl.arange(0, LINES) * step)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )


@cache
def _can(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _HOPPER
