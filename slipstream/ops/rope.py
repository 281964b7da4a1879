"""Rotary position embedding, half rotation (the "neox" order), computed in fp32.

The pair of dimension i is i + hd/2:  y[i] = x[i] cos - x[i+hd/2] sin,  y[i+hd/2] = x[i+hd/2] cos + x[i] sin.
The minus sign lives in the table: `sin` comes with its **first half negated** (`models.layers.Rotary.table` makes
it so), which turns the rotation into one roll and one fused multiply-add. Query and key heads that share a position
are rotated in one call by their callers, the decoder and the drafters.
"""

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., heads, hd] by cos, sin [..., hd] fp32 (sin's first half negated); returns x's shape and dtype."""
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(wide * cos.unsqueeze(-2), swapped, sin.unsqueeze(-2)).to(x.dtype)
