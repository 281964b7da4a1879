"""RMS normalisation of rows in one launch, for where it cannot be part of the product that follows.

Same arithmetic as `ops.norm.rms_norm`: fp32 inside, one rounding. Called by `kernels.linear` when a library multiplies,
or a tile wants the norm apart. Knows no network.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.early import after_previous, early


@triton.jit(do_not_specialize=["overlaps"])
def _rms_norm(
    x, weight, out, x_stride, out_stride, eps, overlaps, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    after_previous(overlaps, EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    wide = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, (wide * scale * weights).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`: x [R, H], weight [H] -> [R, H]."""
    num_rows, size = x.shape
    assert x.stride(1) == 1 and weight.shape == (size,), (x.stride(), weight.shape)
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        _rms_norm[(num_rows,)](
            x, weight, out, x.stride(0), out.stride(0), eps, SIZE=size, BLOCK=block, num_warps=_num_warps(block),
            **early(x, num_rows),
        )  # fmt: skip
    return out


def _num_warps(block: int) -> int:
    """Eight elements a thread: one 16-byte load of bf16."""
    return max(1, min(block // 256, 16))
