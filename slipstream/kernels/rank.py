"""Stage `rank` on a GPU, in one launch: fresh survival from raw confidence, then widths that hand out a budget.

The same rule as ops/survival.py and ops/rank.py, ties included: of all drafts that caps allow, the K of largest
survival, the earlier position first and then the earlier row. Reads nothing on the host and never looks at a draft.
Called by lag-budget's `rank` stage.

One program does it all: with B x S of a few thousand, the K-th largest of them is found by bisection in registers
faster than by a second launch. Letters in shapes: N slots, B sequences, S drafts of a block, d of them drafted.
"""

import triton
import triton.language as tl
from torch import Tensor

from slipstream.plan import EDGE

_NOBODY = -1  # sort key of a draft that may not be verified
_BITS_OF_TWO = 1 << 30  # 2.0 as an integer; a survival is at most 1


def rank(
    signal: Tensor, num_drafts: int, calibration: Tensor, slots: Tensor, temperature: Tensor, caps: Tensor,
    total: Tensor, widths: Tensor,
) -> None:  # fmt: skip
    """Widths [B] int64 of the `total` drafts with the largest calibrated survival, written into `widths`.

    signal [D or more, S] float32, raw confidence of which the first num_drafts columns count; calibration [2, S', 2]
    float32 (greedy and sampled; scale and shift of the logit by position), S' >= num_drafts; slots and caps [B] int64,
    temperature [N + 1]; total [1] int64. Sequences without a row in `signal` get width 0, as those with cap 0; what
    stands in their rows does not matter. Widths sum to min(total, sum of caps), a cap counting up to num_drafts.
    """
    num_sequences, max_drafts = len(slots), signal.shape[1]
    assert num_drafts <= min(max_drafts, calibration.shape[1]), (num_drafts, max_drafts, calibration.shape)
    assert signal.stride(1) == 1 and calibration.is_contiguous(), (signal.stride(), calibration.stride())
    if num_sequences == 0:
        return
    block_b, block_s = _padded(num_sequences), triton.next_power_of_2(max(max_drafts, 1))
    _rank[(1,)](
        signal, calibration, slots, temperature, caps, total, widths,
        num_sequences, min(num_sequences, len(signal)), num_drafts, signal.stride(0), calibration.stride(0),
        EDGE=EDGE, NOBODY=_NOBODY, ABOVE_ALL=_BITS_OF_TWO * block_b * block_s, BLOCK_B=block_b, BLOCK_S=block_s,
        num_warps=_num_warps(block_b * block_s),
    )  # fmt: skip


def _padded(num_sequences: int) -> int:
    """Sequences that the program is compiled for: few sizes, so that there are few variants."""
    return next((size for size in (16, 64, 256) if num_sequences <= size), triton.next_power_of_2(num_sequences))


def _num_warps(num_keys: int) -> int:
    """16 keys a thread, but one warp as long as it can: within a warp, counting needs no barrier."""
    return min(max(num_keys // 512, 1), 8)


@triton.jit(do_not_specialize=["num_sequences", "num_signals", "num_drafts", "signal_stride", "calibration_stride"])
def _rank(
    signal, calibration, slots, temperature, caps, total, widths,
    num_sequences, num_signals, num_drafts, signal_stride, calibration_stride,
    EDGE: tl.constexpr, NOBODY: tl.constexpr, ABOVE_ALL: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    b, j = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_S)
    slot = tl.load(slots + b, mask=b < num_signals, other=0)
    sampled = tl.load(temperature + slot, mask=b < num_signals, other=0) > 0
    cap = tl.load(caps + b, mask=b < num_signals, other=0)
    allowed = (j[None, :] < cap[:, None]) & (j < num_drafts)[None, :]
    raw = tl.load(signal + b[:, None] * signal_stride + j[None, :], mask=allowed, other=0)
    shared = calibration + sampled[:, None].to(tl.int32) * calibration_stride + 2 * j[None, :]
    scale, shift = tl.load(shared, mask=allowed, other=0), tl.load(shared + 1, mask=allowed, other=0)
    survival = _survival(raw, scale, shift, EDGE)

    # A key for each draft, all different: by survival, then by position, then by row.
    place = j[None, :] * BLOCK_B + b[:, None]
    bits = survival.to(tl.int32, bitcast=True).to(tl.int64)  # grows with the value, for that is not negative
    key = tl.where(allowed, bits * (BLOCK_B * BLOCK_S) + (BLOCK_B * BLOCK_S - 1 - place), NOBODY)
    bound = _bound(key, tl.load(total), ABOVE_ALL)
    tl.store(widths + b, tl.sum((key >= bound).to(tl.int64), 1), mask=b < num_sequences)


@triton.jit
def _survival(raw, scale, shift, EDGE: tl.constexpr):
    """Running product of calibrated confidence along a row, 0 from the first that is not finite on."""
    clamped = tl.minimum(tl.maximum(raw, EDGE), 1 - EDGE)
    confidence = tl.sigmoid((tl.log(clamped) - tl.log(1 - clamped)) * scale + shift)
    is_finite = (tl.abs(raw) < float("inf")) & (confidence == confidence)
    product = tl.cumprod(tl.where(is_finite, confidence, 0.0), 1)
    # A product in another order may rise in its last bit. Then a draft's turn would depend on later ones.
    return tl.associative_scan(product, 1, _smaller)


@triton.jit
def _smaller(left, right):
    return tl.minimum(left, right)


@triton.jit
def _bound(key, total, ABOVE_ALL: tl.constexpr):
    """The key that min(total, all) of the keys >= 0 reach. They differ, so bisection meets that number exactly."""
    low, high = tl.zeros([], tl.int64), tl.full([], ABOVE_ALL, tl.int64)
    wanted = tl.maximum(total, 0)
    reached = tl.sum((key >= low).to(tl.int32))
    while (reached > wanted) & (high - low > 1):
        middle = (low + high) // 2
        above = tl.sum((key >= middle).to(tl.int32))
        if above >= wanted:
            low, reached = middle, above
        else:
            high = middle
    return low
