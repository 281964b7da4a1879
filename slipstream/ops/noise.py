"""Counter-based randomness: the same numbers for the same key, on any device and in any batch.

Everything random in a step comes from Philox4x32-10, a pure function of a key and a counter. The 64-bit request
seed is the key; the counter names the draw. Nothing has a state, so batch order, width and mode cannot move a draw.
Two users: `gumbel` (noise per position and token id, shared by drafter and target under coupled acceptance) and
`CounterSource` (draft, accept and residual draws under rejection). Knows nothing of models, slots or policies.

Counter words, injective in what they name (see `Purpose` for the third):

    word 0              word 1              word 2                  word 3
    token id // 4       position, low 32    GUMBEL                  position, high 32     lane of the output = token id % 4
    column // 4         anchor, low 32      DRAFT + 256 * offset    anchor, high 32       lane of the output = column % 4
    offset in block     anchor, low 32      ACCEPT or RESIDUAL      anchor, high 32       lanes 0 and 1 make one uniform
"""

from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
OFFSET_SHIFT = 8  # of the offset in word 2, beside a draft's purpose
_TILE = 1 << 18  # counters per pass: bounds the temporaries at about 20 MB; 2 cores still share the work


class Purpose(IntEnum):
    """What a draw is for; the third counter word, which keeps the streams disjoint."""

    GUMBEL = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3  # also the token after a fully accepted block: the two never happen at one offset of one step


class RandomSource(Protocol):
    """Draws under rejection. A draw is named by (seed, anchor position, offset in the block, purpose)."""

    def bernoulli(self, prob: Tensor, seed: Tensor, anchor: Tensor, offset: Tensor, purpose: Purpose) -> Tensor:
        """True with probability `prob` [N]; seed, anchor and offset are [N] int64. Returns [N] bool."""

    def categorical(self, prob: Tensor, seed: Tensor, anchor: Tensor, offset: Tensor, purpose: Purpose) -> Tensor:
        """One index per row of `prob` [N, V], in proportion to it, never one of probability 0. Returns [N] int64."""


def philox(seed: Tensor, position: Tensor, counters: Tensor, purpose: Purpose = Purpose.GUMBEL) -> Tensor:
    """Philox4x32-10 for every (seed, position) and counter.

    seed, position [N] int64; counters [C] or [N, C] int64, word 0. Returns [N, C, 4] int64 holding uint32 values.
    """
    counters = counters if counters.dim() == 2 else counters[None, :]
    words = (counters, position[:, None], torch.full_like(counters[:1, :1], purpose), position[:, None] >> 32)
    return torch.stack(_philox4x32(words, (seed[:, None], seed[:, None] >> 32)), dim=-1)


def gumbel(
    seed: Tensor,
    position: Tensor,
    vocab_size: int,
    token_ids: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard Gumbel noise of every token id at every (seed, position), always finite.

    seed, position [N] int64. Returns [N, vocab_size], or the columns `token_ids` ([M] or [N, M]) of it. One Philox
    call yields four neighbouring ids, so scattered ids cost four times as much each: when more than a quarter of the
    vocabulary is wanted, make the whole row once and index it.
    """
    if token_ids is not None:
        words = philox(seed, position, token_ids >> 2)
        lane = (token_ids & 3).expand(words.shape[:2])
        return _gumbel_from_uint32(words.gather(2, lane[..., None])[..., 0].double()).to(dtype)
    return _gumbel_run(seed, position, torch.full_like(seed, Purpose.GUMBEL), vocab_size, dtype)


def draft_gumbel(
    seed: Tensor, anchor: Tensor, offset: Tensor, num_columns: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Standard Gumbel noise of every column of the drafter for the draft that (seed, anchor, offset) names.

    seed, anchor, offset [N] int64. Returns [N, num_columns], always finite.
    """
    return _gumbel_run(seed, anchor, Purpose.DRAFT + (offset << OFFSET_SHIFT), num_columns, dtype)


def _gumbel_run(seed: Tensor, position: Tensor, tag: Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
    """[N, num_columns] of counters 0, 1, 2, ...; tag [N] is their word 2."""
    counters = torch.arange((num_columns + 3) // 4, device=seed.device)
    out = torch.empty(seed.shape[0], 4 * counters.shape[0], dtype=dtype, device=seed.device)
    rows = max(1, _TILE // counters.shape[0])
    for first in range(0, seed.shape[0], rows):
        tile = slice(first, first + rows)
        _gumbel_rows(out[tile], seed[tile], position[tile], tag[tile], counters)
    return out[:, :num_columns]


def _gumbel_rows(out: Tensor, seed: Tensor, position: Tensor, tag: Tensor, counters: Tensor) -> None:
    """Fill `out` [N, 4 * C] for all columns of the given counters [C]."""
    lanes = torch.empty(*out.shape[:1], counters.shape[0], 4, dtype=torch.float64, device=out.device)
    words = (counters[None, :], position[:, None], tag[:, None], position[:, None] >> 32)
    for lane, word in enumerate(_philox4x32(words, (seed[:, None], seed[:, None] >> 32))):
        lanes[..., lane].copy_(word)
    out.copy_(_gumbel_from_uint32(lanes.view(out.shape), out.dtype))


def _gumbel_from_uint32(r: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """g = -log(-log1p(-u)), u = (r + 0.5) * 2^-32, for r [...] float64 holding uint32 values; overwrites r.

    u needs 33 bits. In fp32 the 128 largest would round to 1 and give -inf, so u and log1p are float64; the result
    of the inner logarithm lies in [2^-33, 22.9], which the outer one takes in the wanted precision.
    The outcome lies in [-3.14, 22.88]: a large value comes from a small u, where u is finest.
    """
    exponential = r.add_(0.5).mul_(-(2.0**-32)).log1p_().neg_()
    return exponential.to(dtype).log_().neg_()


def _philox4x32(words: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds over four counter words [N or 1, C or 1] and two key words [N, 1], int64, low 32 bits used.

    int64 products wrap, so the low 64 bits of a 32 x 32 product are right and an arithmetic shift leaves the high
    word in the low 32 bits, with sign bits above it. Words 1 and 3 only ever meet an xor, so they may carry such
    bits; one mask per product operand cleans up. The first two rounds work on the broadcast shapes, the others in
    place on six buffers: fresh temporaries of this size cost more in page faults than the arithmetic.
    """
    w0, w1, w2, w3 = (words[0] & _MASK, words[1], words[2] & _MASK, words[3])
    k0, k1 = key
    for _ in range(2):
        product0, product1 = w0 * _MULTIPLIERS[0], w2 * _MULTIPLIERS[1]
        w0 = ((product1 >> 32) ^ w1 ^ k0) & _MASK
        w2 = ((product0 >> 32) ^ w3 ^ k1) & _MASK
        w1, w3 = product1, product0
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    w0, w1, w2, w3 = (word.expand_as(w0).contiguous() for word in (w0, w1, w2, w3))  # w0 met key and counters by now
    spare0, spare1 = torch.empty_like(w0), torch.empty_like(w0)
    for _ in range(_ROUNDS - 2):
        torch.mul(w0, _MULTIPLIERS[0], out=spare0)
        torch.mul(w2, _MULTIPLIERS[1], out=spare1)
        torch.bitwise_right_shift(spare1, 32, out=w0).bitwise_xor_(w1).bitwise_xor_(k0).bitwise_and_(_MASK)
        torch.bitwise_right_shift(spare0, 32, out=w2).bitwise_xor_(w3).bitwise_xor_(k1).bitwise_and_(_MASK)
        w1, w3, spare0, spare1 = spare1, spare0, w3, w1
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return w0, w1.bitwise_and_(_MASK), w2, w3.bitwise_and_(_MASK)


class CounterSource:
    """The engine's `RandomSource`, from Philox keyed by the request seed.

    A name has one 52-bit uniform, but for drafts: theirs is Gumbel noise of every column, as kernels that draw a block
    want it, who never see a whole row. That costs twice as much here.
    """

    def bernoulli(self, prob: Tensor, seed: Tensor, anchor: Tensor, offset: Tensor, purpose: Purpose) -> Tensor:
        return self._uniform(seed, anchor, offset, purpose) < prob

    def categorical(self, prob: Tensor, seed: Tensor, anchor: Tensor, offset: Tensor, purpose: Purpose) -> Tensor:
        """Drafts by the largest log prob + noise; others by inversion of the cumulative sum, in float64 so that 150k small
        terms do not drift.

        Rounding may land on a token outside the support about once in 2^52 draws; the likeliest one stands in.
        """
        if purpose is Purpose.DRAFT:
            return prob.log().add_(draft_gumbel(seed, anchor, offset, prob.shape[-1], prob.dtype)).argmax(-1)
        cumulative = prob.cumsum(-1, dtype=torch.float64)
        point = self._uniform(seed, anchor, offset, purpose)[:, None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, point, right=True).clamp_(max=prob.shape[-1] - 1)
        return torch.where(prob.gather(-1, drawn) > 0, drawn, prob.argmax(-1, keepdim=True))[:, 0]

    @staticmethod
    def _uniform(seed: Tensor, anchor: Tensor, offset: Tensor, purpose: Purpose) -> Tensor:
        """(r + 0.5) * 2^-52 in float64, r the top 26 bits of two lanes: never 0, never 1."""
        words = philox(seed, anchor, offset[:, None], purpose)[:, 0]
        r = ((words[:, 0] >> 6) << 26) + (words[:, 1] >> 6)
        return (r.double() + 0.5) * 2.0**-52
