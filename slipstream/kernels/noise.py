"""Counter-based randomness inside kernels: the numbers of `ops.noise`, made where they are used and never stored.

Device functions only, no kernel. The integers are bit-equal to `ops.noise` (Philox4x32-10 and its counter layout). The
uniforms of rejection are float64 as there; Gumbel noise is computed in fp32, as accurate as the reference, see
`gumbel_from_bits`. Called by the kernels in accept, draft and reject; knows nothing of slots.
"""

import triton
import triton.language as tl

from slipstream.ops.noise import OFFSET_SHIFT, Purpose

_OFFSET_SHIFT = tl.constexpr(OFFSET_SHIFT)
_GUMBEL, _DRAFT = tl.constexpr(int(Purpose.GUMBEL)), tl.constexpr(int(Purpose.DRAFT))


@triton.jit
def philox_words(seed, position, counter, purpose):
    """Four uint32 words of (seed, position, counter); int64, int64, integer; shapes that broadcast. purpose: a scalar."""
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    tag = tl.zeros_like(counter).to(tl.uint32) + purpose
    return tl.philox(seed, counter.to(tl.uint32), low, tag, high)


@triton.jit
def gumbel_from_bits(r):
    """g = -log(-log(1 - u)), u = (r + 0.5) * 2^-32, for r uint32: fp32, in [-3.14, 22.88].

    u needs 33 bits, but not the smaller, t, of u and 1 - u: it has an fp32 of 24 good bits at any size. With u = t the
    logarithm of w = fl(1 - t) lacks what was rounded away, (1 - w) - t, which is exact and is added: the relative error
    of the inner result stays at 2^-23 for the smallest u as for the largest.
    """
    flipped = r ^ 0xFFFFFFFF
    is_small = r < flipped
    t = (tl.where(is_small, r, flipped).to(tl.int32).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    w = tl.where(is_small, 1.0 - t, t)
    rounded_away = tl.where(is_small, t - (1.0 - w), 0.0)
    return -tl.log(rounded_away - tl.log(w))


@triton.jit
def gumbel_run(seed, position, counter):
    """Noise [..., 4 * C] of the token ids 4 * counter .. 4 * counter + 3, side by side; counter [..., C].

    seed and position broadcast with counter. One Philox call for four ids.
    """
    r0, r1, r2, r3 = philox_words(seed, position, counter, _GUMBEL)
    return gumbel_from_bits(tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3)))


@triton.jit
def draft_gumbel_run(seed, anchor, offset, counter):
    """Noise [..., 4 * C] of the drafter's columns 4 * counter .. 4 * counter + 3, of the draft named (seed, anchor, offset).

    That of `ops.noise.draft_gumbel`: no other draw has it. seed and anchor broadcast with counter, offset is a scalar.
    """
    r0, r1, r2, r3 = philox_words(seed, anchor, counter, ((offset << _OFFSET_SHIFT) + _DRAFT).to(tl.uint32))
    return gumbel_from_bits(tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3)))


@triton.jit
def gumbel_at(seed, position, token_id):
    """Noise of scattered token ids; all three broadcast. Four times the price of `gumbel_run`."""
    r0, r1, r2, r3 = philox_words(seed, position, token_id >> 2, _GUMBEL)
    lane = token_id & 3
    return gumbel_from_bits(tl.where(lane < 2, tl.where(lane == 0, r0, r1), tl.where(lane == 2, r2, r3)))


@triton.jit
def uniform(seed, anchor, offset, PURPOSE: tl.constexpr):
    """The 52-bit uniform of `CounterSource`, float64, never 0, never 1; offset is the counter."""
    r0, r1, _, _ = philox_words(seed, anchor, offset, PURPOSE)
    r = ((r0 >> 6).to(tl.int64) << 26) + (r1 >> 6).to(tl.int64)
    return (r.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
