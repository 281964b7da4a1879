"""Top-k, top-p and min-p without sorting and without a copy: where a row is cut, for kernels that read the row anyway.

`ops.sample.filter_logits` keeps a prefix of the order (logit descending, token id ascending). Such a prefix is two
numbers: a token stays whose logit is above `floor`, or equal to it with an id of at most `last`. The floor is searched
among all numbers that a logit may be, by an integer that grows with them: each pass adds up what lies at or above 16
bounds and goes on between the two of them where the sum crosses what is asked for. Passes read only tiles whose largest
logit reaches down to where is searched; a row that asks for nothing is not read.

Weights are rounded to multiples of 2^-34 of the largest, of which 2^18 times the largest still fits into float64. So sums
are exact, in whatever order programs add: a row's cut depends on the row and its request alone, not on how many programs
share it. Fixed launches, no host reads: all of it can be captured. Three things differ from `filter_logits`, by rounding:
ties are of logits as they came, not of divided ones; a share that comes within 5e-6 of top-p may end on either side of
it; and so may a probability that is min-p times the largest to within rounding.

Letters in shapes: O padded output rows, B padded sequences, V token ids, N slots, T tiles of a row, P passes.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_INF = tl.constexpr(float("inf"))
_NUM_BOUNDS = 16
_BOUNDS = tl.constexpr(_NUM_BOUNDS)
TILE = 1024  # tokens whose largest logit is kept
_TOKENS_AT_ONCE = 128  # one for each thread, which holds 16 sums
_PROGRAMS = 4096  # of a launch, as far as rows have tiles: several for each processor
# A weight is 0 beyond so many temperatures below the largest logit: there the first bounds of a search end.
_WEIGHTLESS = tl.constexpr(24.3)
_LOG2_E = tl.constexpr(1.4426950408889634)
_MOST = tl.constexpr(3e38)  # of the inverse of a temperature near 0
_ROUNDER = tl.constexpr(393216.0)  # 1.5 * 2^18: a float64 of this size is a multiple of 2^-34


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Token t of a row stays where its logit is above `floor`, or equal to it and t <= `last`."""

    floor: Tensor  # [O] fp32, -inf where nothing is left out
    last: Tensor  # [O] int32


def cut_rows(
    logits: Tensor, num_token_ids: int, *, output_sequence: Tensor, slots: Tensor, temperature: Tensor, top_k: Tensor,
    top_p: Tensor, min_p: Tensor,
) -> Cut:  # fmt: skip
    """The cut of every row that belongs to a sequence; of others anything.

    logits [O, V'] bf16, fp16 or fp32 of which the columns below num_token_ids count; output_sequence [O] (-1: nobody's), slots
    [B] int64; what slots ask for, as in `filter_logits`: temperature, top_p, min_p [N + 1] fp32, top_k [N + 1] int64.
    Greedy rows, and those with NaN or +inf or nothing but -inf, are not cut.
    """
    assert logits.stride(1) == 1, "the logits of a row must lie side by side"
    assert logits.dtype in (torch.bfloat16, torch.float16, torch.float32), logits.dtype
    count, device = len(logits), logits.device
    unused_bits = 16 if logits.dtype == torch.bfloat16 else 0  # of a logit in fp32
    passes = 1 + (32 - unused_bits) // 4  # of each search: the first goes by values, the others divide by 16
    tile = min(TILE, max(16, triton.next_power_of_2(num_token_ids)))
    num_tiles = triton.cdiv(num_token_ids, tile)
    tiles_each = triton.cdiv(num_tiles, min(num_tiles, triton.cdiv(_PROGRAMS, max(count, 1))))  # of a program

    def make(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    cut = Cut(make(count, dtype=torch.float32), make(count, dtype=torch.int32))
    if not count:
        return cut
    summits, ties = make(count, num_tiles, dtype=torch.float32), make(count, num_tiles, dtype=torch.int32)
    search = (
        torch.empty_like(cut.floor), make(2 * passes, 2, count, dtype=torch.int32),
        make(2 * passes, 3, count, dtype=torch.float64),
        torch.zeros(2 * passes, count, _NUM_BOUNDS, dtype=torch.float64, device=device),
    )  # fmt: skip
    rows = logits, logits.stride(0), num_token_ids, output_sequence, slots, temperature, top_k, top_p
    tiles = summits, num_tiles, tiles_each
    # Two kernels that compute the same bounds must round alike, whatever each could join to one instruction.
    alike: dict[str, Any] = {"UNUSED": unused_bits, "num_warps": 4, "enable_fp_fusion": False}
    sizes = {**alike, "TILE": tile}
    whole, at_once = {"TILES": triton.next_power_of_2(num_tiles)}, min(_TOKENS_AT_ONCE, tile)
    grid = triton.cdiv(num_tiles, tiles_each), count
    _find_summits[grid](*rows, min_p, *tiles, TILE=tile, num_warps=4)
    _begin[(count,)](*rows[2:], min_p, summits, num_tiles, *search, **whole, **alike)
    for step in range(2 * passes):
        _narrow[grid](*rows, *tiles, *search, step, passes, IS_SHARE=step >= passes, AT_ONCE=at_once, **sizes)
    _count_ties[grid](*rows, *tiles, *search, passes, ties, **sizes)
    _finish[(count,)](*rows, min_p, num_tiles, *search, passes, ties, cut.floor, cut.last, **sizes, **whole)
    return cut


@triton.jit
def _key(x, UNUSED: tl.constexpr):
    """fp32 -> int64 that grows with it, by 1 from one number to the next; both zeros are 0."""
    bits = x.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits) >> UNUSED).to(tl.int64)


@triton.jit
def _value(key, UNUSED: tl.constexpr):
    """The fp32 of a key."""
    magnitude = (tl.abs(key) << UNUSED).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(key < 0, -magnitude, magnitude)


@triton.jit
def _weight(x, peak, heat):
    """Probability as a share of the largest one, float64, a multiple of 2^-34."""
    weight = tl.exp2((x - peak) * tl.minimum(_LOG2_E / heat, _MOST))
    return weight.to(tl.float64) + _ROUNDER - _ROUNDER


@triton.jit
def _wishes(slot, peak, num_token_ids, temperature, top_k, top_p):
    """Temperature, k, p, and whether the row is cut by them."""
    heat, count, share = tl.load(temperature + slot), tl.load(top_k + slot), tl.load(top_p + slot)
    may = (heat > 0) & (tl.abs(peak) < _INF)
    return heat, count, share, may & (count > 0) & (count < num_token_ids), may & (share < 1)


@triton.jit
def _bounds(low, high, peak, spread, is_first, UNUSED: tl.constexpr):
    """[_BOUNDS] keys from `low` on, ascending, below `high`: at first closer to each other the closer to the peak."""
    place = tl.arange(0, _BOUNDS)
    away = (place.to(tl.float32) - (_BOUNDS - 1)) / (_BOUNDS - 2)
    near = tl.maximum(_key(peak - away * away * _WEIGHTLESS * spread, UNUSED), low)
    far = low + (high - low) * place // _BOUNDS
    return tl.where(is_first & (place > 0), near, tl.where(place > 0, far, low))


@triton.jit
def _at(values, place):
    """values [_BOUNDS] -> the one at a place."""
    return tl.sum(tl.where(tl.arange(0, _BOUNDS) == place, values, tl.zeros_like(values)), axis=0)


@triton.jit
def _read(row, step, num_outputs, brackets, amounts):
    """The state of a search ahead of a step.

    low, high: keys; what lies at or above `low` sums up to `need` or more, what lies at or above `high` does not.
    before, through: these two sums, of `high` and of `low`.
    """
    at = brackets + step * 2 * num_outputs + row
    low, high = tl.load(at).to(tl.int64), tl.load(at + num_outputs).to(tl.int64)
    at = amounts + step * 3 * num_outputs + row
    return low, high, tl.load(at), tl.load(at + num_outputs), tl.load(at + 2 * num_outputs)


@triton.jit
def _write(low, high, before, through, need, row, step, num_outputs, brackets, amounts):
    at = brackets + step * 2 * num_outputs + row
    tl.store(at, low.to(tl.int32))
    tl.store(at + num_outputs, high.to(tl.int32))
    at = amounts + step * 3 * num_outputs + row
    tl.store(at, before)
    tl.store(at + num_outputs, through)
    tl.store(at + 2 * num_outputs, need)


@triton.jit
def _is_open(low, high, step, passes, by_count, by_share):
    """Whether the step measures anything. The first one of a search does in any case: sums at `low` are needed."""
    is_wanted = tl.where(step < passes, by_count, by_share)
    return is_wanted & ((high - low > 1) | (step == 0) | (step == passes))


@triton.jit
def _state(
    row, step, passes, num_outputs, peak, heat, count, share, by_count, by_share, brackets, amounts, sums,
    UNUSED: tl.constexpr,
):  # fmt: skip
    """See `_read`: what `step` goes by, step 1 on, from what the step before measured.

    Steps 0 .. passes - 1 search for top-k, where all weights are 1; those from `passes` on for top-p.
    """
    last = step - 1
    low, high, before, through, need = _read(row, last, num_outputs, brackets, amounts)
    if _is_open(low, high, last, passes, by_count, by_share):
        measured = tl.load(sums + (last * num_outputs + row) * _BOUNDS + tl.arange(0, _BOUNDS))
        if last == passes:
            need = tl.maximum(share.to(tl.float64) * (_at(measured, 0) - need), 1e-300)
        is_first = (last == 0) | (last == passes)
        bounds = _bounds(low, high, peak, tl.where(last < passes, 1.0, heat), is_first, UNUSED)
        found = tl.maximum(tl.sum((measured >= need).to(tl.int32), axis=0) - 1, 0)
        through = _at(measured, found)
        low = _at(bounds, found)
        if found < _BOUNDS - 1:
            before = _at(measured, found + 1)
            high = _at(bounds, found + 1)
    if (step == passes) & by_share:
        # Among what top-k left; of tokens at its floor it may have left out some.
        need = tl.zeros_like(need)
        if by_count:
            need = (through - count.to(tl.float64)) * _weight(_value(low, UNUSED), peak, heat)
        else:
            low = _key(tl.zeros_like(peak) - _INF, UNUSED)
        high = _key(peak, UNUSED) + 1
        before = tl.zeros_like(before)
    return low, high, before, through, need


@triton.jit(do_not_specialize=["num_tiles", "tiles_each"])
def _find_summits(
    logits, row_stride, num_token_ids, output_sequence, slots, temperature, top_k, top_p, min_p, summits, num_tiles,
    tiles_each, TILE: tl.constexpr,
):  # fmt: skip
    """One program: the largest logit of each of some tiles of one row; NaN counts as +inf, as it does in acceptance."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sequence = tl.load(output_sequence + row)
    if sequence >= 0:
        slot = tl.load(slots + sequence)
        _, _, _, by_count, by_share = _wishes(slot, 0.0, num_token_ids, temperature, top_k, top_p)
        if by_count | by_share | (tl.load(min_p + slot) > 0):
            for tile in range(part * tiles_each, tl.minimum((part + 1) * tiles_each, num_tiles)):
                token_id = tile * TILE + tl.arange(0, TILE)
                x = tl.load(logits + row * row_stride + token_id, mask=token_id < num_token_ids, other=-_INF)
                x = x.to(tl.float32)
                tl.store(summits + row * num_tiles + tile, tl.max(tl.where(x == x, x, _INF), axis=0))


@triton.jit(do_not_specialize=["num_tiles"])
def _begin(
    num_token_ids, output_sequence, slots, temperature, top_k, top_p, min_p, summits, num_tiles, peaks, brackets,
    amounts, sums, UNUSED: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One program: where the search in one row begins."""
    row, num_outputs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    sequence = tl.load(output_sequence + row)
    if sequence >= 0:
        slot = tl.load(slots + sequence)
        _, count, _, by_count, by_share = _wishes(slot, 0.0, num_token_ids, temperature, top_k, top_p)
        peak = tl.full((), _INF, tl.float32)
        if by_count | by_share | (tl.load(min_p + slot) > 0):
            tile = tl.arange(0, TILES)
            tops = tl.load(summits + row * num_tiles + tile, mask=tile < num_tiles, other=-_INF)
            peak = tl.max(tops, axis=0)
            if tl.abs(peak) < _INF:
                low, high = _key(tl.zeros_like(peak) - _INF, UNUSED), _key(peak, UNUSED) + 1
                if by_count & (count <= num_tiles):
                    # As many tokens as there are tiles with summits that high lie there at least.
                    end = high
                    while end - low > 1:
                        middle = low + (end - low) // 2
                        is_enough = tl.sum((tops >= _value(middle, UNUSED)).to(tl.int32), axis=0) >= count
                        low = tl.where(is_enough, middle, low)
                        end = tl.where(is_enough, end, middle)
                zero = tl.full((), 0.0, tl.float64)
                _write(low, high, zero, zero, count.to(tl.float64), row, 0, num_outputs, brackets, amounts)
        tl.store(peaks + row, peak)


@triton.jit(do_not_specialize=["num_tiles", "tiles_each", "step", "passes"])
def _narrow(
    logits, row_stride, num_token_ids, output_sequence, slots, temperature, top_k, top_p, summits, num_tiles,
    tiles_each, peaks, brackets, amounts, sums, step, passes, IS_SHARE: tl.constexpr, AT_ONCE: tl.constexpr,
    UNUSED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: some tiles of one row, of which it adds up what lies at or above each bound of this step."""
    part, row, num_outputs = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    sequence = tl.load(output_sequence + row)
    if sequence >= 0:
        peak = tl.load(peaks + row)
        slot = tl.load(slots + sequence)
        heat, count, share, by_count, by_share = _wishes(slot, peak, num_token_ids, temperature, top_k, top_p)
        if by_share if IS_SHARE else by_count:
            if step == 0:
                low, high, before, through, need = _read(row, step, num_outputs, brackets, amounts)
            else:
                low, high, before, through, need = _state(
                    row, step, passes, num_outputs, peak, heat, count, share, by_count, by_share, brackets, amounts,
                    sums, UNUSED,
                )  # fmt: skip
                if part == 0:
                    _write(low, high, before, through, need, row, step, num_outputs, brackets, amounts)
            if _is_open(low, high, step, passes, by_count, by_share):
                spread = heat if IS_SHARE else tl.full((), 1.0, tl.float32)
                is_first = (step == 0) | (step == passes)
                bounds = _value(_bounds(low, high, peak, spread, is_first, UNUSED), UNUSED)[:, None]
                floor = _value(low, UNUSED)
                found = tl.zeros((_BOUNDS, AT_ONCE), tl.float64)  # threads lie along the tokens
                is_reached = False
                for tile in range(part * tiles_each, tl.minimum((part + 1) * tiles_each, num_tiles)):
                    if tl.load(summits + row * num_tiles + tile) >= floor:
                        is_reached = True
                        for first in tl.range(tile * TILE, (tile + 1) * TILE, AT_ONCE, loop_unroll_factor=4):
                            token_id = first + tl.arange(0, AT_ONCE)
                            is_token = token_id < num_token_ids
                            x = tl.load(logits + row * row_stride + token_id, mask=is_token, other=float("nan"))
                            x = x.to(tl.float32)
                            if IS_SHARE:
                                found += tl.where(x[None, :] >= bounds, _weight(x, peak, heat)[None, :], 0.0)
                            else:
                                found += (x[None, :] >= bounds).to(tl.float64)
                if is_reached:
                    at = sums + (step * num_outputs + row) * _BOUNDS + tl.arange(0, _BOUNDS)
                    tl.atomic_add(at, tl.sum(found, axis=1), sem="relaxed")


@triton.jit(do_not_specialize=["num_tiles", "tiles_each", "passes"])
def _count_ties(
    logits, row_stride, num_token_ids, output_sequence, slots, temperature, top_k, top_p, summits, num_tiles,
    tiles_each, peaks, brackets, amounts, sums, passes, ties, UNUSED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: some tiles of one row, and how many tokens of each have the logit that was found."""
    part, row, num_outputs = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    sequence = tl.load(output_sequence + row)
    if sequence >= 0:
        peak = tl.load(peaks + row)
        slot = tl.load(slots + sequence)
        heat, count, share, by_count, by_share = _wishes(slot, peak, num_token_ids, temperature, top_k, top_p)
        if by_count | by_share:
            low, _, _, _, _ = _state(
                row, tl.where(by_share, 2 * passes, passes), passes, num_outputs, peak, heat, count, share, by_count,
                by_share, brackets, amounts, sums, UNUSED,
            )  # fmt: skip
            floor = _value(low, UNUSED)
            for tile in range(part * tiles_each, tl.minimum((part + 1) * tiles_each, num_tiles)):
                num_ties = tl.full((), 0, tl.int32)
                if tl.load(summits + row * num_tiles + tile) >= floor:
                    token_id = tile * TILE + tl.arange(0, TILE)
                    x = tl.load(logits + row * row_stride + token_id, mask=token_id < num_token_ids, other=float("nan"))
                    num_ties = tl.sum((x.to(tl.float32) == floor).to(tl.int32), axis=0)
                tl.store(ties + row * num_tiles + tile, num_ties)


@triton.jit(do_not_specialize=["num_tiles", "passes"])
def _finish(
    logits, row_stride, num_token_ids, output_sequence, slots, temperature, top_k, top_p, min_p, num_tiles, peaks,
    brackets, amounts, sums, passes, ties, floors, lasts, UNUSED: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """One program: the cut of one row."""
    row, num_outputs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    sequence = tl.load(output_sequence + row)
    if sequence >= 0:
        peak = tl.load(peaks + row)
        slot = tl.load(slots + sequence)
        heat, count, share, by_count, by_share = _wishes(slot, peak, num_token_ids, temperature, top_k, top_p)
        floor = tl.zeros_like(peak) - _INF
        last = num_token_ids
        if by_count | by_share:
            low, _, before, _, need = _state(
                row, tl.where(by_share, 2 * passes, passes), passes, num_outputs, peak, heat, count, share, by_count,
                by_share, brackets, amounts, sums, UNUSED,
            )  # fmt: skip
            floor = _value(low, UNUSED)
            weight = tl.where(by_share, _weight(floor, peak, heat), 1.0)
            num_kept = tl.minimum(tl.ceil((need - before) / weight), num_token_ids).to(tl.int32)
            tile = tl.arange(0, TILES)
            num_ties = tl.load(ties + row * num_tiles + tile, mask=tile < num_tiles, other=0)
            through = tl.cumsum(num_ties, axis=0)
            at = tl.sum((through < num_kept).to(tl.int32), axis=0)  # the tile of the last one that is kept
            if at < num_tiles:
                num_kept -= tl.sum(tl.where(tile < at, num_ties, 0), axis=0)
                token_id = at * TILE + tl.arange(0, TILE)
                x = tl.load(logits + row * row_stride + token_id, mask=token_id < num_token_ids, other=float("nan"))
                rank = tl.cumsum((x.to(tl.float32) == floor).to(tl.int32), axis=0)
                last = at * TILE + tl.sum((rank < num_kept).to(tl.int32), axis=0)
        least = tl.load(min_p + slot)
        if (heat > 0) & (least > 0) & (tl.abs(peak) < _INF):
            lowest = peak + heat * tl.log(least)
            if lowest > floor:
                floor = lowest
                last = num_token_ids
        tl.store(floors + row, floor)
        tl.store(lasts + row, last)
