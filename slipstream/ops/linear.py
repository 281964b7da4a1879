"""Products with weights, and a faster layout for those that are only served, on a CPU.

oneDNN rearranges a bf16 matrix every time it multiplies by it, which for a few rows takes longer than the product; fp32
products of few rows leave it for a slower library. `prepack` rearranges once and keeps the result beside the weight;
`linear` uses it. In bf16 results are equal to the bit, in fp32 to rounding. The price is the memory of a second copy.
Measured on 2 cores of an EPYC (Zen 5, avx512_bf16), all matrices of SmolLM2-135M but the head, in bf16: 1 row 17.6 ->
9.8 ms, 8 rows 22.4 -> 10.7, 32 rows 34.5 -> 22.8, head at 1 row 3.0 -> 1.7; with the head, in fp32: 8 rows 70 -> 28.
Called by every layer of target and drafters; `prepack` through `models.layers.prepack_networks`, never for training.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LAYOUT = "slipstream_onednn_layout"  # attribute of a weight that was prepacked
_ROWS_HINT = 8  # the layout chosen for few rows; it serves any number


def _onednn(name: str) -> Callable[..., Any] | None:
    """An operator that torch's own compiler emits for frozen CPU models; builds without oneDNN lack it."""
    try:
        operator: Callable[..., Any] = getattr(torch.ops.mkldnn, name).default
    except AttributeError:
        return None
    return operator


_MULTIPLY = _onednn("_linear_pointwise")
_REORDER = _onednn("_reorder_linear_weight")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I], weight [O, I], bias [O] -> x weight^T + bias [..., O]."""
    packed = getattr(weight, _LAYOUT, None)
    if packed is None or _MULTIPLY is None:
        return F.linear(x, weight, bias)
    product: Tensor = _MULTIPLY(x, packed, bias, "none", [], "")
    return product


@torch.no_grad()
def prepack(weights: Iterable[Tensor]) -> bool:
    """Prepare matrices for `linear` where that helps; returns whether it did for any.

    Frozen matrices only: a later change of a weight would not reach its copy. Tensors that share memory share a copy.
    """
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    for weight in weights:
        key = weight.data_ptr(), weight.shape
        if key not in copies and _gains(weight):
            assert _REORDER is not None
            copies[key] = _REORDER(weight.detach(), _ROWS_HINT)
        if key in copies:
            setattr(weight, _LAYOUT, copies[key])
    return bool(copies)


def _gains(weight: Tensor) -> bool:
    if _MULTIPLY is None or _REORDER is None or weight.device.type != "cpu" or weight.requires_grad:
        return False
    native = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return native or weight.dtype == torch.float32
