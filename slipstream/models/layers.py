"""The parts that networks are made of: norm, rotary table, packed linear layers, and the seam to attention.

`Attend` is the only thing a network knows of where its keys and values live; the engine supplies paged attention,
tests, data capture and the trainer `DenseAttend`. Nothing here loads files or knows a model family.

Shapes: R rows (tokens of any requests, flattened), H hidden size, hd head size.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.rope import RopeSpec
from slipstream.models.spec import DecoderSpec
from slipstream.ops.linear import linear, prepack
from slipstream.ops.norm import rms_norm

Map = Callable[[Tensor], Tensor]


class Attend(Protocol):
    """Attention of one step, given by whoever owns the keys and values; applies the layer's window and the mask."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R, num_heads, hd], k and v [R, num_kv_heads, hd], norms and RoPE applied -> [R, num_heads * hd]."""
        ...


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight; fp32 inside."""

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))  # [size]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def bind(self) -> Map:
        """This norm as a plain function, see `PackedLinear.bind`."""
        return functools.partial(rms_norm, weight=self.weight, eps=self.eps)


class PackedLinear(nn.Linear):
    """Several linear layers over one input as one: the rows of its weight are its parts, in order.

    The weight is left uninitialised; a loader or an `init_random` fills it. `parts` gives the rows of each.
    """

    def __init__(
        self,
        in_features: int,
        parts: Sequence[int],
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_features, sum(parts), bias=bias, dtype=dtype, device=device)
        self.parts = tuple(parts)

    def reset_parameters(self) -> None:
        """Leave the memory as it is: initialising what is about to be loaded costs seconds."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def bind(self) -> Map:
        """This layer as a plain function of x.

        Calling a module and looking up its parameters costs more than a small operation of one row; a network that
        is run step after step binds its layers once. Loading and moving change parameters in place and stay visible.
        """
        return functools.partial(linear, weight=self.weight, bias=self.bias)


def prepack_networks(*networks: nn.Module) -> bool:
    """Make networks that are only served faster (`ops.linear.prepack`); returns whether this machine gains by it.

    Call it once, after `share`, with target and drafter together: what they share is then copied once.
    """
    linears = [module.weight for network in networks for module in network.modules() if isinstance(module, nn.Linear)]
    heads = [network.head_weight for network in networks if hasattr(network, "head_weight")]
    return prepack([weight for weight in (*heads, *linears) if isinstance(weight, Tensor)])


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions, [head_dim / 2] fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / rope.theta**exponents
    return _SCALINGS[rope.scaling](rope, head_dim, plain)


def _unscaled(rope: RopeSpec, head_dim: int, plain: Tensor) -> Tensor:
    return plain


def _linear(rope: RopeSpec, head_dim: int, plain: Tensor) -> Tensor:
    return plain / rope.factor


def _divided(rope: RopeSpec, head_dim: int, plain: Tensor) -> Tensor:
    return plain / torch.tensor(rope.divisors, dtype=torch.float32, device="cpu")


def _llama3(rope: RopeSpec, head_dim: int, plain: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    turns = rope.original_max_position * plain / (2 * math.pi)  # whole turns within the trained context
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeSpec, head_dim: int, plain: Tensor) -> Tensor:
    """As llama3, but the blend is linear in the dimension, not in the number of turns (arXiv 2309.00071)."""

    def dimension(turns: float) -> float:  # the (fractional) pair that makes this many turns in the trained context
        wave = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    return stretched * plain / rope.factor + (1 - stretched) * plain


_SCALINGS: Mapping[str, Callable[[RopeSpec, int, Tensor], Tensor]] = {
    "none": _unscaled,
    "dynamic": _unscaled,  # acts beyond max_position_embeddings only, where the table ends
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "factors": _divided,
}


FIRST_POSITIONS = 1 << 17  # rows of a rotary table at first: 64 MiB at a head size of 128


class Rotary(nn.Module):
    """Cosines and sines of positions, always fp32.

    Models claim millions of positions and are served with thousands: the table has the first 131,072 of them until
    somebody who goes beyond says so (`reach`).
    """

    def __init__(
        self, rope: RopeSpec, head_dim: int, max_position: int, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.rope, self.head_dim, self.max_position = rope, head_dim, max_position
        self.cos_sin: Tensor  # [positions, head_dim] fp32: head_dim / 2 cosines, then as many sines
        table = self._compute(min(max_position, FIRST_POSITIONS))
        self.register_buffer("cos_sin", table.to(device or "cpu"), persistent=False)

    def reach(self, num_positions: int) -> None:
        """Have a row for each of so many positions, as far as the model knows them; an older table stays as it is."""
        wanted = min(num_positions, self.max_position)
        if wanted > len(self.cos_sin):
            self.cos_sin = self._compute(wanted).to(self.cos_sin.device)

    def bytes_to_reach(self, num_positions: int) -> int:
        """What `reach` takes of the CPU's memory while it works: the table, and what that is made of."""
        wanted = min(num_positions, self.max_position)
        return 4 * wanted * self.head_dim * self.cos_sin.itemsize if wanted > len(self.cos_sin) else 0

    def _compute(self, num_positions: int) -> Tensor:
        positions = torch.arange(num_positions, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, inverse_frequencies(self.rope, self.head_dim))
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * self.rope.attention_factor

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [...], each [..., head_dim] fp32, as `ops.rope.apply_rope` wants them.

        The first half of sin is negated. Look up once per step, not once per layer.
        """
        cos, sin = self.cos_sin[positions].chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow `.to(device)` but not `.to(dtype)`: positions in the thousands do not survive bf16 tables."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.cos_sin.dtype != torch.float32:
            self.cos_sin = self._compute(len(self.cos_sin)).to(self.cos_sin.device)
        return self


class DenseAttend:
    """Causal attention over whole sequences, without a cache: for parity tests, data capture and training.

    The rows of a call are the sequences of `lengths` one after another (default: all rows are one sequence).
    """

    def __init__(self, spec: DecoderSpec, lengths: Sequence[int] | None = None) -> None:
        self.spec = spec
        self.lengths = None if lengths is None else tuple(lengths)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = self.lengths or (q.shape[0],)
        assert sum(lengths) == q.shape[0], f"{q.shape[0]} rows, but sequences of {lengths}"
        window = self.spec.window(layer)
        if len(set(lengths)) == 1:
            return _causal(q, k, v, len(lengths), window)
        parts = zip(*(rows.split_with_sizes(lengths) for rows in (q, k, v)), strict=True)
        return torch.cat([_causal(qs, ks, vs, 1, window) for qs, ks, vs in parts])


def _causal(q: Tensor, k: Tensor, v: Tensor, num_seqs: int, window: int | None) -> Tensor:
    """`num_seqs` sequences of equal length L: q [N * L, heads, hd] -> [N * L, heads * hd]."""
    length = q.shape[0] // num_seqs
    q, k, v = (
        rows.reshape(num_seqs, length, *rows.shape[1:]).transpose(1, 2) for rows in (q, k, v)
    )  # [N, heads, L, hd]
    mask = None
    if window is not None and window < length:
        age = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)  # [L, L]
        mask = (age >= 0) & (age < window)
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": q.shape[1] != k.shape[1]}
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(0, 1).flatten(1)
