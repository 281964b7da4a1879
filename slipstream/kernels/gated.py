"""silu(gate) * up over rows that hold both halves, in one launch.

Called by `kernels.linear` after a product that a library made; products of few rows have it built in.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.early import after_previous, early

_BLOCK = 1024


@triton.jit(do_not_specialize=["overlaps"])
def _silu_mul(
    both, out, both_stride, out_stride, overlaps, INNER: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False
):
    after_previous(overlaps, EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < INNER
    gate = tl.load(both + row * both_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * both_stride + INNER + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(both: Tensor, out: Tensor | None = None) -> Tensor:
    """both [R, 2 * inner], gate before up -> silu(gate) * up [R, inner], into `out` if given; fp32 inside."""
    num_rows, inner = both.shape[0], both.shape[1] // 2
    assert both.stride(1) == 1, both.stride()
    out = torch.empty(num_rows, inner, dtype=both.dtype, device=both.device) if out is None else out
    if num_rows:
        grid = (num_rows, triton.cdiv(inner, _BLOCK))
        _silu_mul[grid](
            both, out, both.stride(0), out.stride(0), INNER=inner, BLOCK=_BLOCK, num_warps=4,
            **early(both, grid[0] * grid[1]),
        )  # fmt: skip
    return out
