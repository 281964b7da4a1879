"""Coupled acceptance on the device: the target's token of every output row, which drafts stand, slots moved forward.

One pass over the logits, behind those that find where filters cut them (`kernels.filters`): `_row_best` leaves the best
token of each (row, tile), `_verdict` joins the tiles, compares with the drafts and counts; nothing of size [O, V] is
written. Same tokens as `verify.accept.CoupledStep` with `ops.sample` and `ops.noise`, up to the rounding of logit /
temperature + noise. A row's result depends on nothing but the row and its request; and on the number of rows, which
decides how scores are rounded, unless `block` is given. Fixed launches, no host reads: all of it can be captured. Called
by the engine's GPU path; knows nothing of how drafts or widths were chosen.

Letters in shapes: B padded sequences, O padded output rows, V token ids, S drafts at most, N slots, L positions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream import plan
from slipstream.kernels.filters import Cut
from slipstream.kernels.noise import gumbel_run
from slipstream.kernels.shape_logits import Shaper, count_tokens, shaped
from slipstream.plan import NUM_VERDICT_COLUMNS

# Columns of `result`, as kernels know them.
WIDTH, NUM_ACCEPTED, IS_INVALID = (tl.constexpr(c) for c in (plan.WIDTH, plan.NUM_ACCEPTED, plan.IS_INVALID))
TOKENS = tl.constexpr(NUM_VERDICT_COLUMNS)
_INF = tl.constexpr(float("inf"))


def accept_coupled(
    logits: Tensor, num_token_ids: int, *, output_sequence: Tensor, output_offset: Tensor, cu_outputs: Tensor,
    widths: Tensor, emits: Tensor, drafts: Tensor, slots: Tensor, num_given: Tensor, context: Tensor,
    temperature: Tensor, seed: Tensor, result: Tensor, block: int | None = None, shaper: Shaper | None = None,
    cut: Cut | None = None,
) -> None:  # fmt: skip
    """Fill `result`, a verdict [B, NUM_VERDICT_COLUMNS + S + 1] int32 (see `plan`).

    logits [O, V'] bf16 or fp32 of which the columns below num_token_ids count; output_sequence (-1: skip) and
    output_offset [O], cu_outputs [B + 1], widths, slots, num_given [B] int64, emits [B] bool; drafts [B or more, S]
    int64, or [D, S] if widths are 0 from row D on; context, seed [N + 1] int64, temperature [N + 1] fp32.
    block: see `row_best`. shaper: where somebody asks for penalties or edits. cut: where somebody filters, of the very
    logits that are read: never with a shaper, for penalties come before filters. Invalid: a row that a token was taken
    from holds NaN or +inf, or nothing but -inf, before it was cut.
    """
    num_outputs, num_drafts = logits.shape[0], result.shape[1] - NUM_VERDICT_COLUMNS - 1
    assert drafts.shape[1] >= num_drafts, (drafts.shape, result.shape)
    if shaper is not None:
        count_tokens(shaper, slots=slots, num_given=num_given, emits=emits, context=context)
    peaks, scores, ids = row_best(
        logits, num_token_ids, output_sequence=output_sequence, output_offset=output_offset, slots=slots,
        num_given=num_given, context=context, temperature=temperature, seed=seed, block=block,
        shaping=None if shaper is None else (shaper, drafts), cut=cut,
    )  # fmt: skip
    num_tiles = ids.shape[1]
    _verdict[(len(widths),)](
        peaks, scores, ids, num_tiles, num_outputs, num_token_ids, cu_outputs, widths, emits,
        drafts, drafts.stride(0), num_drafts, slots, temperature,
        result, result.stride(0),
        PLACES=triton.next_power_of_2(num_drafts + 1), TILES=triton.next_power_of_2(num_tiles),
    )  # fmt: skip


def row_best(
    logits: Tensor, num_token_ids: int, *, output_sequence: Tensor, output_offset: Tensor, slots: Tensor,
    num_given: Tensor, context: Tensor, temperature: Tensor, seed: Tensor, block: int | None = None,
    shaping: tuple[Shaper, Tensor] | None = None, cut: Cut | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Per row and tile of the vocabulary, [O, tiles] each: largest logit fp32, best score fp32, its token id int32.

    The score is (logit - largest of the tile) / temperature + noise, so no small temperature can overflow; greedy: 0;
    outside the cut: -inf. Arguments as of `accept_coupled`. Rows that are skipped stay unwritten. block: tokens of a
    tile, a power of two; scores are rounded by tile, so that it has to be given where near ties must not hang on the
    number of rows.
    shaping: a shaper that has counted the step's tokens, and its drafts.
    """
    assert logits.stride(1) == 1, "the logits of a row must lie side by side"
    num_outputs = logits.shape[0]
    block = block or tile_size(num_outputs, num_token_ids)
    num_tiles = triton.cdiv(num_token_ids, block)
    peaks = torch.empty(num_outputs, num_tiles, dtype=torch.float32, device=logits.device)
    scores, ids = torch.empty_like(peaks), torch.empty_like(peaks, dtype=torch.int32)
    rows = (
        logits, logits.stride(0), num_token_ids, output_sequence, output_offset, slots, num_given, context, temperature,
        seed, peaks, scores, ids,
    )  # fmt: skip
    grid, num_warps = (num_tiles, num_outputs), 4 if block <= 2048 else 8
    if num_outputs and shaping is None:
        cuts = (None, None) if cut is None else (cut.floor, cut.last)
        _row_best[grid](*rows, *cuts, BLOCK=block, num_warps=num_warps)
    elif num_outputs and shaping is not None:
        assert cut is None, "penalties come before filters"
        shaper, drafts = shaping
        _shaped_row_best[grid](*rows, drafts, drafts.stride(0), *shaper.arguments, BLOCK=block, num_warps=num_warps)
    return peaks, scores, ids


def apply(
    result: Tensor, *, slots: Tensor, num_given: Tensor, emits: Tensor, context: Tensor, token_ids: Tensor
) -> None:
    """`device.state.apply_verdict` in one launch: context += given + n, the emitted tokens become known.

    result as `accept_coupled` fills it; slots, num_given [B] int64; emits [B] bool; context [N + 1] int64;
    token_ids [N + 1, L + 1] int32. Padding sequences share the scratch slot, which they leave as it is.
    """
    num_drafts = result.shape[1] - NUM_VERDICT_COLUMNS - 1
    _apply[(len(slots),)](
        result, result.stride(0), num_drafts, slots, num_given, emits, context, token_ids, token_ids.stride(0),
        PLACES=triton.next_power_of_2(num_drafts + 1),
    )  # fmt: skip


def deterministic_tile_size(num_token_ids: int) -> int:
    """Tokens per program for any number of rows: between what is best for few and for many."""
    whole_row: int = triton.next_power_of_2(num_token_ids)
    return min(2048, max(16, whole_row))


def tile_size(num_rows: int, num_token_ids: int) -> int:
    """Tokens per program: few rows are cut finely to fill the device, many coarsely to save programs."""
    block = 1024 if num_rows * num_token_ids <= 1 << 20 else 4096
    whole_row: int = triton.next_power_of_2(num_token_ids)
    return min(block, max(16, whole_row))


@triton.jit
def _row_best(
    logits, row_stride, num_token_ids, output_sequence, output_offset, slots, num_given, context, temperature, seed,
    peaks, scores, ids, floors, lasts, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one tile of one row. floors, lasts: of the cuts, or None."""
    tile, row = tl.program_id(0), tl.program_id(1)
    # Asked for before it is known whether anybody wants them: waiting for that first made a launch half as long again.
    token_id = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * row_stride + token_id, mask=token_id < num_token_ids, other=-_INF)
    sequence = tl.load(output_sequence + row)
    if sequence >= 0:
        slot = tl.load(slots + sequence)
        heat = tl.load(temperature + slot)
        position = tl.load(context + slot) + tl.load(num_given + sequence) + tl.load(output_offset + row)
        floor, last = None, None
        if floors is not None:
            floor, last = tl.load(floors + row), tl.load(lasts + row)
        _keep_best(x.to(tl.float32), floor, last, tile, row, heat, seed + slot, position, peaks, scores, ids, BLOCK)


@triton.jit
def _shaped_row_best(
    logits, row_stride, num_token_ids, output_sequence, output_offset, slots, num_given, context, temperature, seed,
    peaks, scores, ids, drafts, drafts_stride,
    counts, counts_stride, repetition, frequency, presence, num_prompt, num_edits, edit_ids, edit_values, edit_until,
    edit_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """`_row_best` after penalties and edits."""
    tile, row = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(output_sequence + row)
    if sequence >= 0:
        slot = tl.load(slots + sequence)
        token_id = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * row_stride + token_id, mask=token_id < num_token_ids, other=-_INF)
        heat, offset = tl.load(temperature + slot), tl.load(output_offset + row)
        num_known = tl.load(context + slot) + tl.load(num_given + sequence)
        x = shaped(
            x.to(tl.float32), tile, num_token_ids, sequence, slot, offset.to(tl.int32), num_known, drafts,
            drafts_stride, counts, counts_stride, repetition, frequency, presence, num_prompt, num_edits, edit_ids,
            edit_values, edit_until, edit_stride, BLOCK,
        )  # fmt: skip
        _keep_best(x, None, None, tile, row, heat, seed + slot, num_known + offset, peaks, scores, ids, BLOCK)


@triton.jit
def _keep_best(x, floor, last, tile, row, heat, seed, position, peaks, scores, ids, BLOCK: tl.constexpr):
    """x [BLOCK] fp32, -inf where no token is. floor, last: the row's cut, or None."""
    x = tl.where(x == x, x, _INF)  # NaN makes the row invalid as +inf does
    peak, best = _first_best(x, BLOCK)
    score = tl.full((), 0.0, tl.float32)
    if heat > 0:
        counter = tile * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        scaled = (x - tl.where(tl.abs(peak) < _INF, peak, 0.0)) / heat
        noisy = scaled + gumbel_run(tl.load(seed), position, counter)
        if floor is not None:
            token_id = tile * BLOCK + tl.arange(0, BLOCK)
            noisy = tl.where((x > floor) | ((x == floor) & (token_id <= last)), noisy, -_INF)
        score, best = _first_best(noisy, BLOCK)
    place = row * tl.num_programs(0) + tile
    tl.store(peaks + place, peak)
    tl.store(scores + place, score)
    tl.store(ids + place, tile * BLOCK + best)


@triton.jit
def _first_best(x, BLOCK: tl.constexpr):
    """The largest of x [BLOCK], no NaN, and its first place. Two reductions of numbers are cheaper than one of pairs."""
    best = tl.max(x, axis=0)
    return best, tl.min(tl.where(x == best, tl.arange(0, BLOCK), BLOCK), axis=0)


@triton.jit(do_not_specialize=["num_tiles", "num_outputs", "drafts_stride", "num_drafts", "result_stride"])
def _verdict(
    peaks, scores, ids, num_tiles, num_outputs, num_token_ids, cu_outputs, widths, emits,
    drafts, drafts_stride, num_drafts, slots, temperature,
    result, result_stride, PLACES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One program: one sequence, its rows times the tiles of the vocabulary."""
    sequence = tl.program_id(0).to(tl.int64)
    width, is_emitting = tl.load(widths + sequence), tl.load(emits + sequence)
    slot = tl.load(slots + sequence)
    heat = tl.load(temperature + slot)
    place, tile = tl.arange(0, PLACES), tl.arange(0, TILES)
    row = tl.load(cu_outputs + sequence) + place
    is_row = (place <= width) & (place <= num_drafts) & (row < num_outputs) & (is_emitting != 0)
    at = row[:, None] * num_tiles + tile[None, :]
    is_tile = is_row[:, None] & (tile < num_tiles)[None, :]
    peak = tl.load(peaks + at, mask=is_tile, other=-_INF)
    top = tl.max(peak, axis=1)
    below = tl.where(peak == top[:, None], 0.0, peak - top[:, None]) / tl.where(heat > 0, heat, 1.0)
    score = tl.where(is_tile, tl.load(scores + at, mask=is_tile, other=0.0) + below, -_INF)
    _, best = tl.max(score, axis=1, return_indices=True)  # tiles ascend, so the first index wins ties
    emitted = tl.load(ids + row * num_tiles + best, mask=is_row, other=0)
    emitted = tl.minimum(emitted, num_token_ids - 1)  # an invalid row may name a masked id
    is_draft = is_row & (place < width) & (place < num_drafts)
    draft = tl.load(drafts + sequence * drafts_stride + place, mask=is_draft, other=-1)
    num_accepted = tl.min(tl.where(is_draft & (draft == emitted), PLACES, place), axis=0)
    is_bad = is_row & (place <= num_accepted) & ~(tl.abs(top) < _INF)
    out = result + sequence * result_stride
    tl.store(out + WIDTH, width.to(tl.int32))
    tl.store(out + NUM_ACCEPTED, num_accepted)
    tl.store(out + IS_INVALID, tl.max(is_bad.to(tl.int32), axis=0))
    tl.store(out + TOKENS + place, emitted, mask=place <= num_drafts)


@triton.jit(do_not_specialize=["result_stride", "num_drafts"])
def _apply(
    result, result_stride, num_drafts, slots, num_given, emits, context, token_ids, token_ids_stride,
    PLACES: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    out = result + sequence * result_stride
    num_accepted = tl.load(out + NUM_ACCEPTED)
    emitted = tl.load(out + TOKENS + place, mask=place <= num_drafts, other=0)
    slot = tl.load(slots + sequence)
    start = tl.load(context + slot) + tl.load(num_given + sequence)  # position of y_0
    wanted = (place <= num_accepted) & (tl.load(emits + sequence) != 0)
    tl.store(token_ids + slot * token_ids_stride + start + place, emitted, mask=wanted)
    tl.store(context + slot, start + num_accepted)
