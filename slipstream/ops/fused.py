"""A product with a weight together with what stands before and after it in a network, as one operation.

A layer of a decoder is four of these and attention. Spelled out in torch here: what runs on a CPU, and what the
kernels (`slipstream.kernels.linear`, same signature) are compared with. Knows no network; called by whoever runs one
through a backend.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops.linear import linear
from slipstream.ops.norm import rms_norm

Following: TypeAlias = tuple[Tensor, Tensor]  # weights of a norm [H] and of the product behind it [O, H]


@dataclass(frozen=True, slots=True, eq=False)
class HalfNormed:
    """Rows times a norm's weight that are still to be divided by their length: a product can be divided as well."""

    rows: Tensor  # [R, H]
    squares: Tensor  # [R, parts] fp32: sums of squares, before the weight, of parts of the row


@dataclass(frozen=True, slots=True)
class Products:
    """Who makes the products of a network: the functions of this file, or kernels with the same signatures."""

    linear: Callable[..., Tensor]
    add: Callable[..., HalfNormed | None]


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
    half: HalfNormed | None = None,
) -> Tensor:
    """y = n(x) weight^T + bias, n the RMS norm with the weight `norm` if given.

    x [R, I], weight [O, I], bias [O], norm [I] -> [R, O]. `gated`: the O rows of the weight are the gate's and then
    the other half's, y becomes silu(first half) * second half, [R, O / 2]. `residual` [R, O]: y is added to it in
    place and it is returned. `out` [R, O]: y is written there, and it is returned. Only one of the last two.
    `half`: x as `add_linear` left it for this norm, which may be used instead of x.
    """
    assert residual is None or out is None, "a result goes into residual or out, not both"
    if half is not None:
        length = half.squares.sum(1, keepdim=True) / x.shape[1] + eps  # [R, 1], the square of it
        y = linear((half.rows * length.rsqrt()).to(x.dtype), weight, bias)
    else:
        y = linear(x if norm is None else rms_norm(x, norm, eps), weight, bias)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    if residual is not None:
        return residual.add_(y)
    return y if out is None else out.copy_(y)


def add_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, following: Following | None = None
) -> HalfNormed | None:
    """residual [R, H] += x weight^T + bias, in place; x [R, I], weight [H, I], bias [H].

    following: who reads the residual next, if a norm does. Returns the rows half normed for that, where it costs nothing
    and helps; None: `following` norms them itself. Squares are those of the rows as stored.
    """
    fused_linear(x, weight, bias, residual=residual)
    if following is None:
        return None
    wide = residual.float() if residual.dtype != torch.float64 else residual
    return HalfNormed((wide * following[0]).to(residual.dtype), wide.square().sum(1, keepdim=True))
