"""A product with a weight together with what stands before and after it in a network, as one operation.

A layer of a decoder is four of these and attention. Spelled out in torch here: what runs on a CPU, and what the
kernels (`slipstream.kernels.linear`, same signature) are compared with. Knows no network; called by whoever runs one
through a backend.
"""

import torch.nn.functional as F
from torch import Tensor

from slipstream.ops.linear import linear
from slipstream.ops.norm import rms_norm


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """y = n(x) weight^T + bias, n the RMS norm with the weight `norm` if given.

    x [R, I], weight [O, I], bias [O], norm [I] -> [R, O]. `gated`: the O rows of the weight are the gate's and then
    the other half's, y becomes silu(first half) * second half, [R, O / 2]. `residual` [R, O]: y is added to it in
    place and it is returned. `out` [R, O]: y is written there, and it is returned. Only one of the last two.
    """
    assert residual is None or out is None, "a result goes into residual or out, not both"
    y = linear(x if norm is None else rms_norm(x, norm, eps), weight, bias)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    if residual is not None:
        return residual.add_(y)
    return y if out is None else out.copy_(y)
