"""Rejection acceptance on the device without dense distributions: one pass over the target's logits, then one row each.

`_row_stats` leaves largest logit, mass and argmax of each (row, tile); `_judge` needs the probability of the drafts
only; the token after them is drawn by inversion over the one row where the sequence stopped, summed by tiles first. q is
made of the drafter's logits where it is looked at. Same draws as `verify.accept.RejectionStep` with `CounterSource`, up
to the rounding of a softmax in fp32. Four fixed launches that go by device values and shapes alone, so they can be
captured. Called by the engine's GPU path; knows nothing of how drafts were drawn.

Letters in shapes as in `kernels.accept`; D decoding sequences, d drafts of each, Vd columns of the drafter.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.accept import IS_INVALID, NUM_ACCEPTED, TOKENS, WIDTH, tile_size
from slipstream.kernels.noise import uniform
from slipstream.ops.noise import Purpose
from slipstream.ops.reject import DraftLaw
from slipstream.plan import NUM_VERDICT_COLUMNS

_ACCEPT, _RESIDUAL = tl.constexpr(int(Purpose.ACCEPT)), tl.constexpr(int(Purpose.RESIDUAL))
_INF = tl.constexpr(float("inf"))
_VARYING = ["num_outputs", "drafts_stride", "result_stride", "num_sums", "num_sequences", "peak_stride"]


@dataclass(frozen=True, slots=True, eq=False)
class KeptLaw:
    """What drafts were drawn from, as kernels leave and read it: `DraftLaw` without what slot state knows.

    Of the first sequences of a step and their first drafts; nobody reads beyond the widths, nor of greedy sequences.
    """

    logits: Tensor  # [D, d, Vd] in the drafter's dtype, Vd side by side: what was drawn from, as it was rounded
    peak: Tensor  # [D, d] fp32, the largest of each
    mass: Tensor  # [D, d] fp32, sum of exp((logits - peak) / temperature)
    columns: Tensor | None  # [V] int32, where each token id stands among the columns, -1: nowhere; None: the identity

    @classmethod
    def make(
        cls, num_slots: int, num_drafts: int, token_ids: Tensor | None, num_token_ids: int, dtype: torch.dtype,
        device: torch.device,
    ) -> "KeptLaw":  # fmt: skip
        """Buffers for any step. token_ids [Vd], ascending, are what a reduced vocabulary's columns stand for."""
        num_columns = num_token_ids if token_ids is None else len(token_ids)
        padded = -(-num_columns // 16) * 16  # rows begin where vectors can be stored
        logits = torch.zeros(num_slots, num_drafts, padded, dtype=dtype, device=device)
        numbers = torch.zeros(2, num_slots, num_drafts, device=device)
        return cls(logits[..., :num_columns], numbers[0], numbers[1], _columns(token_ids, num_token_ids))

    @classmethod
    def of(cls, law: DraftLaw, num_token_ids: int) -> "KeptLaw":
        """Of a step's own, which is not copied."""
        return cls(law.logits, law.peak, law.mass, _columns(law.token_ids, num_token_ids))

    def hold(self, law: DraftLaw) -> None:
        """Copy that of a step, of the same columns, to where kernels look for it."""
        count, num_drafts = law.peak.shape
        for kept, values in ((self.logits, law.logits), (self.peak, law.peak), (self.mass, law.mass)):
            kept[:count, :num_drafts].copy_(values)


def _columns(token_ids: Tensor | None, num_token_ids: int) -> Tensor | None:
    if token_ids is None:
        return None
    columns = torch.full((num_token_ids,), -1, dtype=torch.int32, device=token_ids.device)
    columns[token_ids] = torch.arange(len(token_ids), dtype=torch.int32, device=token_ids.device)
    return columns


def accept_rejection(
    logits: Tensor, num_token_ids: int, *, output_sequence: Tensor, output_offset: Tensor, cu_outputs: Tensor,
    widths: Tensor, emits: Tensor, drafts: Tensor, law: KeptLaw | None, slots: Tensor, num_given: Tensor,
    context: Tensor, temperature: Tensor, seed: Tensor, result: Tensor, is_filtered: bool = False,
) -> None:  # fmt: skip
    """Fill `result` as `accept_coupled` does, under rejection; the arguments are those of `accept_coupled`, and

    law: what drafts were drawn from, where the sequence's temperature is above 0; None: every draft was certain. Read for
    drafts within the widths only, so it may be of fewer sequences.
    """
    device, num_sequences, num_outputs = logits.device, len(widths), logits.shape[0]
    num_drafts = result.shape[1] - NUM_VERDICT_COLUMNS - 1
    assert logits.stride(1) == 1 and drafts.shape[1] >= num_drafts, (logits.stride(), drafts.shape, result.shape)
    where_law = _arguments(law)
    kinds = {"IS_CERTAIN": law is None, "IS_MAPPED": law is not None and law.columns is not None}
    block, sum_block = tile_size(num_outputs, num_token_ids), tile_size(num_sequences, num_token_ids)
    num_tiles, num_sums = triton.cdiv(num_token_ids, block), triton.cdiv(num_token_ids, sum_block)
    peaks = torch.empty(num_outputs, num_tiles, device=device)
    masses, ids = torch.empty_like(peaks), torch.empty_like(peaks, dtype=torch.int32)
    stopped = torch.empty(num_sequences, 2, device=device)  # largest logit and mass of the row where a sequence stopped
    best = torch.empty(num_sequences, dtype=torch.int32, device=device)  # its argmax
    sums = torch.empty(2, num_sequences, num_sums, dtype=torch.float64, device=device)  # of p and of max(p - q, 0)
    if num_outputs:
        _row_stats[(num_tiles, num_outputs)](
            logits, logits.stride(0), num_token_ids, output_sequence, slots, temperature, peaks, masses, ids,
            IS_FILTERED=is_filtered, BLOCK=block, num_warps=4 if block <= 2048 else 8,
        )  # fmt: skip
    _judge[(num_sequences,)](
        peaks, masses, ids, num_tiles, num_outputs, num_token_ids, logits, logits.stride(0), cu_outputs, widths, emits,
        drafts, drafts.stride(0), *where_law, num_drafts, slots, num_given, context, temperature, seed,
        result, result.stride(0), stopped, best,
        IS_FILTERED=is_filtered, **kinds,
        PLACES=triton.next_power_of_2(num_drafts + 1), TILES=triton.next_power_of_2(num_tiles),
    )  # fmt: skip
    where = (
        logits, logits.stride(0), num_token_ids, num_outputs, cu_outputs, widths, emits, drafts, drafts.stride(0),
        *where_law, slots, temperature, result, result.stride(0), stopped, sums, num_sums, num_sequences,
    )  # fmt: skip
    flags = {"IS_FILTERED": is_filtered, "BLOCK": sum_block, **kinds}
    _sum_tiles[(num_sums, num_sequences)](*where, **flags)
    _draw_following[(num_sequences,)](
        *where, best, seed, num_given, context, SUMS=triton.next_power_of_2(num_sums), **flags
    )  # fmt: skip


def _arguments(law: KeptLaw | None) -> tuple[Tensor | int | None, ...]:
    """Logits with two strides, peaks and masses with one, and the columns."""
    if law is None:
        return None, 0, 0, None, None, 0, None
    assert law.logits.stride(2) == 1, law.logits.stride()
    assert law.peak.stride() == law.mass.stride() and law.peak.stride(1) == 1, (law.peak.stride(), law.mass.stride())
    assert law.peak.dtype == law.mass.dtype == torch.float32, law.peak.dtype
    return law.logits, law.logits.stride(0), law.logits.stride(1), law.peak, law.mass, law.peak.stride(0), law.columns


@triton.jit
def _draft_prob(
    logits, sequence_stride, place_stride, peaks, masses, peak_stride, columns, sequence, place, token_id, heat, mask,
    IS_MAPPED: tl.constexpr,
):  # fmt: skip
    """q of token ids at places of one sequence, fp32; 0 where masked, and where the drafter has no such token."""
    column = token_id
    if IS_MAPPED:
        column = tl.load(columns + token_id, mask=mask, other=-1)
        mask = mask & (column >= 0)
    row = logits + sequence * sequence_stride + place * place_stride
    x = tl.load(row + column, mask=mask, other=-_INF).to(tl.float32)
    at = sequence * peak_stride + place + token_id * 0
    peak, mass = tl.load(peaks + at, mask=mask, other=0.0), tl.load(masses + at, mask=mask, other=1.0)
    return tl.where(mask, tl.exp((x - peak) / heat) / mass, 0.0)


@triton.jit
def _shifted_exp(x, peak, heat, IS_FILTERED: tl.constexpr):
    """exp((x - peak) / temperature) where the peak is finite; the logits are divided already if filtered."""
    scaled = x - tl.where(tl.abs(peak) < _INF, peak, 0.0)
    if not IS_FILTERED:
        scaled = scaled / heat
    return tl.exp(scaled)


@triton.jit
def _row_stats(
    logits, row_stride, num_token_ids, output_sequence, slots, temperature, peaks, masses, ids,
    IS_FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one tile of one row."""
    tile, row = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(output_sequence + row)
    if sequence >= 0:
        heat = tl.load(temperature + tl.load(slots + sequence))
        token_id = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * row_stride + token_id, mask=token_id < num_token_ids, other=-_INF)
        x = x.to(tl.float32)
        x = tl.where(x == x, x, _INF)  # NaN makes the row invalid as +inf does
        peak, best = tl.max(x, axis=0, return_indices=True)
        mass = tl.full((), 1.0, tl.float32)
        if heat > 0:
            mass = tl.sum(_shifted_exp(x, peak, heat, IS_FILTERED), axis=0)
        place = row * tl.num_programs(0) + tile
        tl.store(peaks + place, peak)
        tl.store(masses + place, mass)
        tl.store(ids + place, tile * BLOCK + best)


@triton.jit(
    do_not_specialize=["num_tiles", "num_outputs", "drafts_stride", "num_drafts", "result_stride", "peak_stride"]
)
def _judge(
    peaks, masses, ids, num_tiles, num_outputs, num_token_ids, logits, row_stride, cu_outputs, widths, emits,
    drafts, drafts_stride,
    law_logits, law_stride, law_place_stride, law_peaks, law_masses, peak_stride, columns,
    num_drafts, slots, num_given, context,
    temperature, seed, result, result_stride, stopped, best,
    IS_FILTERED: tl.constexpr, IS_CERTAIN: tl.constexpr, IS_MAPPED: tl.constexpr, PLACES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One program: one sequence; how many drafts stand, and what is known of the row behind them."""
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
    top, top_tile = tl.max(peak, axis=1, return_indices=True)
    likeliest = tl.minimum(tl.load(ids + row * num_tiles + top_tile, mask=is_row, other=0), num_token_ids - 1)
    share = _shifted_exp(peak, top[:, None], tl.where(heat > 0, heat, 1.0), IS_FILTERED)
    mass = tl.sum(tl.load(masses + at, mask=is_tile, other=0.0) * share, axis=1)

    is_draft = is_row & (place < width) & (place < num_drafts)
    draft = tl.load(drafts + sequence * drafts_stride + place, mask=is_draft, other=0)
    target_prob = (draft == likeliest).to(tl.float32)
    if heat > 0:
        x = tl.load(logits + row * row_stride + draft, mask=is_draft, other=0.0).to(tl.float32)
        target_prob = _shifted_exp(x, top, heat, IS_FILTERED) / mass
    ratio = target_prob
    if not IS_CERTAIN:
        prob = (draft >= 0).to(tl.float32)  # greedy: certain
        if heat > 0:
            prob = _draft_prob(
                law_logits, law_stride, law_place_stride, law_peaks, law_masses, peak_stride, columns, sequence,
                place.to(tl.int64), draft, heat, is_draft, IS_MAPPED,
            )  # fmt: skip
        ratio = tl.where(prob > 0, target_prob / tl.where(prob > 0, prob, 1.0), 0.0)
    anchor = tl.load(context + slot) + tl.load(num_given + sequence) - 1
    passes = uniform(tl.load(seed + slot), anchor, place, _ACCEPT) < ratio.to(tl.float64)
    num_accepted = tl.min(tl.where(is_draft & passes, PLACES, place), axis=0)

    is_bad = is_row & (place <= num_accepted) & ~(tl.abs(top) < _INF)
    out = result + sequence * result_stride
    tl.store(out + WIDTH, width.to(tl.int32))
    tl.store(out + NUM_ACCEPTED, num_accepted)
    tl.store(out + IS_INVALID, tl.max(is_bad.to(tl.int32), axis=0))
    tl.store(out + TOKENS + place, draft.to(tl.int32), mask=place <= num_drafts)
    is_last = place == num_accepted
    tl.store(stopped + sequence * 2 + place * 0, top, mask=is_last)
    tl.store(stopped + sequence * 2 + 1 + place * 0, mass, mask=is_last)
    tl.store(best + sequence + place * 0, likeliest, mask=is_last)


@triton.jit
def _stopped_row(
    tile, sequence, logits, row_stride, num_token_ids, num_outputs, cu_outputs, widths, drafts, drafts_stride,
    law_logits, law_stride, law_place_stride, law_peaks, law_masses, peak_stride, columns, heat, num_accepted, stopped,
    IS_FILTERED: tl.constexpr, IS_CERTAIN: tl.constexpr, IS_MAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """p and max(p - q, 0) of one tile of the row behind the accepted drafts, float64; q is 0 if no draft was refused."""
    token_id = tile * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(cu_outputs + sequence) + num_accepted
    is_known = (token_id < num_token_ids) & (row < num_outputs)
    x = tl.load(logits + row * row_stride + token_id, mask=is_known, other=-_INF).to(tl.float32)
    peak, mass = tl.load(stopped + sequence * 2), tl.load(stopped + sequence * 2 + 1)
    p = tl.where(is_known, _shifted_exp(x, peak, heat, IS_FILTERED) / mass, 0.0)
    is_refused = num_accepted < tl.load(widths + sequence)
    if IS_CERTAIN:
        draft = tl.load(drafts + sequence * drafts_stride + num_accepted, mask=is_refused, other=-1)
        q = (token_id == draft).to(tl.float32)
    else:
        q = _draft_prob(
            law_logits, law_stride, law_place_stride, law_peaks, law_masses, peak_stride, columns, sequence,
            num_accepted, token_id, heat, is_known & is_refused, IS_MAPPED,
        )  # fmt: skip
    return p.to(tl.float64), tl.maximum(p - q, 0.0).to(tl.float64)


@triton.jit(do_not_specialize=_VARYING)
def _sum_tiles(
    logits, row_stride, num_token_ids, num_outputs, cu_outputs, widths, emits, drafts, drafts_stride,
    law_logits, law_stride, law_place_stride, law_peaks, law_masses, peak_stride, columns,
    slots, temperature, result, result_stride, stopped, sums, num_sums,
    num_sequences, IS_FILTERED: tl.constexpr, IS_CERTAIN: tl.constexpr, IS_MAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one tile of the row where one sequence stopped. Greedy sequences need no sums."""
    tile, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    heat = tl.load(temperature + tl.load(slots + sequence))
    if (heat > 0) & (tl.load(emits + sequence) != 0):
        num_accepted = tl.load(result + sequence * result_stride + NUM_ACCEPTED).to(tl.int64)
        p, residual = _stopped_row(
            tile, sequence, logits, row_stride, num_token_ids, num_outputs, cu_outputs, widths, drafts, drafts_stride,
            law_logits, law_stride, law_place_stride, law_peaks, law_masses, peak_stride, columns,
            heat, num_accepted, stopped, IS_FILTERED, IS_CERTAIN, IS_MAPPED, BLOCK,
        )  # fmt: skip
        at = sequence * num_sums + tile
        tl.store(sums + at, tl.sum(p, axis=0))
        tl.store(sums + num_sequences * num_sums + at, tl.sum(residual, axis=0))


@triton.jit(do_not_specialize=_VARYING)
def _draw_following(
    logits, row_stride, num_token_ids, num_outputs, cu_outputs, widths, emits, drafts, drafts_stride,
    law_logits, law_stride, law_place_stride, law_peaks, law_masses, peak_stride, columns,
    slots, temperature, result, result_stride, stopped, sums, num_sums,
    num_sequences, best, seed, num_given, context,
    IS_FILTERED: tl.constexpr, IS_CERTAIN: tl.constexpr, IS_MAPPED: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One program: the token after the accepted drafts of one sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + sequence)
    heat, is_emitting = tl.load(temperature + slot), tl.load(emits + sequence)
    out = result + sequence * result_stride
    num_accepted = tl.load(out + NUM_ACCEPTED).to(tl.int64)
    # Greedy: p is one-hot, so whatever is left of it after q is its argmax.
    following = tl.load(best + sequence)
    if (heat > 0) & (is_emitting != 0):
        tile = tl.arange(0, SUMS)
        at = sequence * num_sums + tile
        sum_p = tl.load(sums + at, mask=tile < num_sums, other=0.0)
        sum_residual = tl.load(sums + num_sequences * num_sums + at, mask=tile < num_sums, other=0.0)
        # Nothing is left only where p <= q everywhere, that is p = q up to rounding: p itself is right there.
        is_refused = (num_accepted < tl.load(widths + sequence)) & (tl.sum(sum_residual, axis=0) > 0)
        weight = tl.where(is_refused, sum_residual, sum_p)
        cumulative = tl.cumsum(weight, axis=0)
        anchor = tl.load(context + slot) + tl.load(num_given + sequence) - 1
        point = uniform(tl.load(seed + slot), anchor, num_accepted, _RESIDUAL) * tl.sum(weight, axis=0)
        chosen = tl.min(tl.where((cumulative > point) & (weight > 0), tile, num_sums - 1), axis=0)
        before = tl.sum(tl.where(tile < chosen, weight, 0.0), axis=0)
        p, residual = _stopped_row(
            chosen, sequence, logits, row_stride, num_token_ids, num_outputs, cu_outputs, widths, drafts, drafts_stride,
            law_logits, law_stride, law_place_stride, law_peaks, law_masses, peak_stride, columns,
            heat, num_accepted, stopped, IS_FILTERED, IS_CERTAIN, IS_MAPPED, BLOCK,
        )  # fmt: skip
        inner = tl.where(is_refused, residual, p)
        column = tl.arange(0, BLOCK)
        is_past = (before + tl.cumsum(inner, axis=0) > point) & (inner > 0)
        first = tl.min(tl.where(is_past, column, BLOCK), axis=0)
        # Rounding may leave the point behind the tile's last token; the tile's likeliest one stands in.
        _, heaviest = tl.max(inner, axis=0, return_indices=True)
        following = tl.minimum(chosen * BLOCK + tl.where(first < BLOCK, first, heaviest), num_token_ids - 1)
    tl.store(out + TOKENS + num_accepted, following)
