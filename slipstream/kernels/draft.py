"""The serial draw of a block of drafts: Markov bias, noise and argmax per position without a host in between.

One launch per position, because draft j + 1 needs draft j: each program adds W2 W1[previous] to its tile of the base
logits, draws, and raises one 64-bit word per sequence to the largest (score, column). Without a Markov head the
positions do not depend on each other and share one launch. A last launch turns words into token ids, and says how sure
the drafter is of each, by probabilities or by its confidence head. Same tokens as under `BlockDraft.propose`, but that
the bias is summed in fp32 throughout: as `CoupledStep.draw`, or, where what is drawn from is kept, as
`RejectionStep.draw` with `CounterSource`. Called by the engine's GPU path; knows nothing of pages or hidden layers.

Letters in shapes: D padded decoding sequences, d drafts of S at most, Vd draft vocabulary, V target vocabulary, r rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.noise import draft_gumbel_run, gumbel_at, gumbel_run
from slipstream.kernels.reject import KeptLaw

_UNSET = -(2**63)
_SIGNALS = {"none": 0, "peak": 1, "drawn": 2, "head": 3}
_INF = tl.constexpr(float("inf"))
_NONE, _PEAK, _DRAWN, _HEAD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@dataclass(frozen=True, slots=True)
class ConfidenceHead:
    """sigmoid(weight [h ; W1[previous]] + bias) of each draft, in fp32 arithmetic."""

    hidden: Tensor  # [D, d, H], a view with H side by side
    weight: Tensor  # [H (+ r)] or [1, H (+ r)]
    bias: Tensor | None  # [1]
    has_markov: bool  # reads a row of W1


def draft_workspace(max_decode: int, max_drafts: int, device: torch.device | str) -> Tensor:
    """What `draft_chain` needs from call to call; it leaves it as it found it. One per stream of work."""
    return torch.full((max_decode * max_drafts,), _UNSET, dtype=torch.int64, device=device)


def draft_chain(
    base_logits: Tensor, markov_w1: Tensor | None, markov_w2: Tensor | None, anchors: Tensor,
    token_ids: Tensor | None, num_columns: int, *, slots: Tensor, context: Tensor, temperature: Tensor, seed: Tensor,
    sample: bool, signal: str, drafts: Tensor, prob: Tensor, previous: Tensor, workspace: Tensor,
    head: ConfidenceHead | None = None, law: KeptLaw | None = None,
) -> None:  # fmt: skip
    """Draw d drafts per sequence, left to right, into the first d columns of drafts and prob.

    base_logits [D, d, Vd] bf16 or fp32, of which the columns below num_columns count; markov_w1 [V, r], markov_w2
    [Vd, r] or both None; anchors [D] int64; token_ids [Vd] int64 ascending, the target ids of the columns, or None for
    the identity; slots [D] int64; context, seed [N + 1] int64, temperature [N + 1] fp32.
    drafts [D, S] int64 target ids; prob [D, S] fp32 by `signal`: "peak" the largest probability at the sequence's
    temperature (1 where greedy), "drawn" the draft's own, "head" what `head` says, "none" 0; previous [D, S] int64, with a
    Markov head the token before each draft. sample: add the noise of position context + 1 + j, keyed by target id, where
    temperature > 0; otherwise argmax.

    law, of num_columns columns, if rejection is to judge (and sample): what the drafts of each sequence whose temperature
    is above 0 were drawn from is written there, logits rounded to its dtype before the draw. The noise of draft j is named
    (context, j) then, as no other draw is: see `ops.noise.draft_gumbel`.
    """
    num_sequences, num_drafts, _ = base_logits.shape
    assert (head is not None) == (signal == "head"), signal
    assert base_logits.stride(2) == 1 and num_drafts * num_sequences <= workspace.numel(), base_logits.shape
    kind, rank = _SIGNALS[signal], 0 if markov_w1 is None else markov_w1.shape[1]
    assert law is None or (sample and law.logits.shape[2] == num_columns and law.logits.stride(2) == 1), law
    shape = _chain_shape(num_sequences, num_drafts, num_columns, rank)
    keeps = law is not None
    reads = kind if signal in ("peak", "drawn") else _SIGNALS["peak"] if keeps else 0
    kept = (None, 0, 0) if law is None else (law.logits, law.logits.stride(0), law.logits.stride(1))
    numbers = (None, None, 0) if law is None else (law.peak, law.mass, law.peak.stride(0))
    size = num_drafts * num_sequences * shape.num_tiles if reads else 0
    parts = [torch.empty(size, dtype=torch.float32, device=base_logits.device) for _ in range(3)]
    for position in range(num_drafts if rank else 1):
        _draw[(shape.num_tiles, triton.cdiv(num_sequences, shape.block_d), 1 if rank else num_drafts)](
            base_logits, base_logits.stride(0), base_logits.stride(1), markov_w1, markov_w2, rank, anchors, token_ids,
            num_columns, num_sequences, position, slots, context, temperature, seed,
            previous, previous.stride(0), workspace, *parts, shape.span, *kept,
            SAMPLE=sample, KEEPS=keeps, READS=reads, IS_MAPPED=token_ids is not None,
            BLOCK_D=shape.block_d, BLOCK_V=shape.block_v, RANK=shape.rank, num_warps=shape.num_warps,
        )  # fmt: skip
    asked: tuple[Any, ...] = (None, 0, 0, None, None)
    width = read_rank = 0
    if head is not None:
        width, read_rank = head.hidden.shape[2], rank if head.has_markov else 0
        assert head.hidden.stride(2) == 1 and head.weight.numel() == width + read_rank, (head.weight.shape, width)
        asked = head.hidden, head.hidden.stride(0), head.hidden.stride(1), head.weight, head.bias
    _finish[(num_sequences, num_drafts)](
        workspace, *parts, shape.num_tiles, shape.span, token_ids, num_columns, num_sequences, slots, temperature,
        drafts, drafts.stride(0), prob, prob.stride(0), *numbers,
        *asked, width, previous, previous.stride(0), markov_w1, read_rank,
        SIGNAL=kind, KEEPS=keeps, READS=reads, IS_MAPPED=token_ids is not None,
        TILES=triton.next_power_of_2(shape.num_tiles), BLOCK=min(4096, triton.next_power_of_2(max(width, 1))),
        RANK=triton.next_power_of_2(read_rank) if read_rank else 0, num_warps=4 if head is not None else 1,
    )  # fmt: skip


@dataclass(frozen=True)
class _ChainShape:
    block_d: int  # sequences per program
    block_v: int  # columns per turn of a program's loop
    span: int  # columns per program
    num_tiles: int
    rank: int  # r as a power of two, 0 without a Markov head
    num_warps: int


_NUM_PROGRAMS = 396  # three per SM of an H200
_SMALL_W2 = 1 << 22  # entries that stay in the L2, so that sequences may read them one by one


def _chain_shape(num_sequences: int, num_drafts: int, num_columns: int, rank: int) -> _ChainShape:
    """One sequence per program where that reads no more memory; else 16 or 64, so that W2 is read once for all."""
    if rank == 0:
        block = 1024 if num_sequences * num_drafts * num_columns <= 1 << 20 else 4096
        block = min(block, max(16, triton.next_power_of_2(num_columns)))
        return _ChainShape(1, block, block, triton.cdiv(num_columns, block), 0, 4 if block <= 2048 else 8)
    padded_rank: int = max(16, triton.next_power_of_2(rank))
    alone = num_sequences == 1 or (num_sequences <= 8 and num_columns * padded_rank <= _SMALL_W2)
    block_d = 1 if alone else 16 if num_sequences <= 16 else 64
    block_v = max(16, min(128, (8192 if alone else 16384) // padded_rank))
    num_blocks = triton.cdiv(num_columns, block_v)
    turns = triton.cdiv(num_blocks, max(1, _NUM_PROGRAMS // triton.cdiv(num_sequences, block_d)))
    num_tiles = triton.cdiv(num_blocks, turns)
    return _ChainShape(block_d, block_v, turns * block_v, num_tiles, padded_rank, 4 if alone else 8)


@triton.jit
def _pack(score, column):
    """(score, column) as one int64 that grows with the score and, among equals, falls with the column."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # the sum turns -0 into +0
    ordered = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def _unpack_column(word, num_columns):
    """The column of `_pack`; some valid one where nobody wrote."""
    return tl.minimum(0x7FFFFFFF - (word & 0xFFFFFFFF), num_columns - 1)


@triton.jit
def _load_tile(row, is_live, w2, rank, start, end, BLOCK_V: tl.constexpr, RANK: tl.constexpr):
    """Base logits [BLOCK_D, BLOCK_V] and rows of W2 [BLOCK_V, RANK] of the columns from `start` on; 0 beyond `end`."""
    columns = start + tl.arange(0, BLOCK_V)
    is_known = columns < end
    x = tl.load(row[:, None] + columns[None, :], mask=is_live[:, None] & is_known[None, :], other=0.0)
    weight = x
    if RANK > 0:
        of_rank = tl.arange(0, RANK)
        at = columns[:, None].to(tl.int64) * rank + of_rank[None, :]
        weight = tl.load(w2 + at, mask=is_known[:, None] & (of_rank < rank)[None, :], other=0.0)
    return x, weight


@triton.jit
def _noisy(
    x, divisor, is_hot, key, anchor_at, position, start, columns, is_known, token_ids,
    KEEPS: tl.constexpr, IS_MAPPED: tl.constexpr,
):  # fmt: skip
    """x / temperature + noise where hot; nothing is computed where all of the program's sequences are greedy."""
    if tl.max(is_hot.to(tl.int32), axis=0) > 0:
        counter = (start // 4 + tl.arange(0, x.shape[1] // 4))[None, :]
        if KEEPS:
            noise = draft_gumbel_run(key, anchor_at, position, counter)
        elif IS_MAPPED:
            named = tl.load(token_ids + columns, mask=is_known, other=0)
            noise = gumbel_at(key, anchor_at + 1 + position, named[None, :])
        else:
            noise = gumbel_run(key, anchor_at + 1 + position, counter)
        x = tl.where(is_hot[:, None], x / divisor + noise, x)
    return x


@triton.jit(do_not_specialize=["num_sequences", "position"])
def _draw(
    base, sequence_stride, position_stride, w1, w2, rank, anchors, token_ids,
    num_columns, num_sequences, position, slots, context, temperature, seed,
    befores, before_stride, words, peaks, masses, chosens, span, law, law_stride, law_place_stride,
    SAMPLE: tl.constexpr, KEEPS: tl.constexpr, READS: tl.constexpr, IS_MAPPED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_D sequences, `span` columns, one position."""
    tile = tl.program_id(0)
    position += tl.program_id(2)
    sequence = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_live = sequence < num_sequences
    slot = tl.load(slots + sequence, mask=is_live, other=0)
    heat = tl.load(temperature + slot, mask=is_live, other=0.0)
    is_hot = heat > 0
    divisor = tl.where(is_hot, heat, 1.0)[:, None]
    if SAMPLE:
        key = tl.load(seed + slot, mask=is_live, other=0)[:, None]
        anchor_at = tl.load(context + slot, mask=is_live, other=0)[:, None]
    row = base + sequence.to(tl.int64) * sequence_stride + position.to(tl.int64) * position_stride
    if KEEPS:
        kept = law + sequence.to(tl.int64) * law_stride + position.to(tl.int64) * law_place_stride
    begin = tile * span
    end = tl.minimum(begin + span, num_columns)
    if RANK > 0:
        # What does not depend on the draft before is on its way while that is looked up.
        next_x, next_weight = _load_tile(row, is_live, w2, rank, begin, end, BLOCK_V, RANK)
        if position == 0:
            previous = tl.load(anchors + sequence, mask=is_live, other=0)
        else:
            word = tl.load(words + (position - 1) * num_sequences + sequence, mask=is_live, other=0)
            previous = _unpack_column(word, num_columns)
            if IS_MAPPED:
                previous = tl.load(token_ids + previous)
        tl.store(befores + sequence * before_stride + position, previous, mask=is_live & (tile == 0))
        of_rank = tl.arange(0, RANK)
        is_embedding = is_live[:, None] & (of_rank < rank)[None, :]
        embedding = tl.load(w1 + previous[:, None] * rank + of_rank[None, :], mask=is_embedding, other=0.0)

    best = tl.full((BLOCK_D,), -_INF, tl.float32)
    column = tl.zeros((BLOCK_D,), tl.int32) + begin
    peak, mass, chosen = best, tl.zeros((BLOCK_D,), tl.float32), best
    for start in range(begin, end, BLOCK_V):
        columns = start + tl.arange(0, BLOCK_V)
        is_known = columns < end
        if RANK == 0:
            x = _load_tile(row, is_live, w2, rank, start, end, BLOCK_V, RANK)[0].to(tl.float32)
        else:
            x, weight = next_x.to(tl.float32), next_weight
            next_x, next_weight = _load_tile(row, is_live, w2, rank, start + BLOCK_V, end, BLOCK_V, RANK)
            if BLOCK_D == 1:
                x += tl.sum(weight.to(tl.float32) * embedding.to(tl.float32), axis=1)[None, :]
            else:
                x += tl.dot(embedding, tl.trans(weight), input_precision="ieee")
        if KEEPS:  # drawn from as it is kept
            rounded = x.to(law.dtype.element_ty)
            tl.store(kept[:, None] + columns[None, :], rounded, mask=is_hot[:, None] & is_known[None, :])
            x = rounded.to(tl.float32)
        x = tl.where(is_known[None, :], x, -_INF)
        finite = tl.where(x == x, x, -_INF)  # NaN is never drawn; it shows in `mass`
        score = finite
        if SAMPLE:
            score = _noisy(
                finite, divisor, is_hot, key, anchor_at, position, start, columns, is_known, token_ids, KEEPS, IS_MAPPED
            )  # fmt: skip
        top, index = tl.max(score, axis=1, return_indices=True)
        is_better = top > best
        best = tl.where(is_better, top, best)
        column = tl.where(is_better, start + index, column)
        if READS != _NONE:
            raised = tl.maximum(peak, tl.max(finite, axis=1))
            shift = tl.where(raised > -_INF, raised, 0.0)[:, None]
            mass *= tl.sum(tl.exp((peak[:, None] - shift) / divisor), axis=1)
            mass += tl.sum(tl.exp((x - shift) / divisor), axis=1)
            peak = raised
        if READS == _DRAWN:
            is_column = columns[None, :] == (start + index)[:, None]
            chosen = tl.where(is_better, tl.sum(tl.where(is_column, finite, 0.0), axis=1), chosen)

    at = position * num_sequences + sequence
    tl.atomic_max(words + at, _pack(best, column), mask=is_live, sem="relaxed")
    if READS != _NONE:
        part = at * tl.num_programs(0) + tile
        tl.store(peaks + part, peak, mask=is_live)
        tl.store(masses + part, mass, mask=is_live)
        tl.store(chosens + part, chosen, mask=is_live)


@triton.jit(do_not_specialize=["num_tiles", "num_sequences", "peak_stride", "before_stride"])
def _finish(
    words, peaks, masses, chosens, num_tiles, span, token_ids, num_columns, num_sequences, slots, temperature,
    drafts, drafts_stride, prob, prob_stride, law_peaks, law_masses, peak_stride,
    hidden, sequence_stride, position_stride, weight, bias, width, befores, before_stride, w1, rank,
    SIGNAL: tl.constexpr, KEEPS: tl.constexpr, READS: tl.constexpr, IS_MAPPED: tl.constexpr, TILES: tl.constexpr,
    BLOCK: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """One program: one draft. Clears its word for the next call."""
    sequence, position = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = position * num_sequences + sequence
    said = prob + sequence * prob_stride + position
    if SIGNAL == _HEAD:
        row = hidden + sequence * sequence_stride + position.to(tl.int64) * position_stride
        before = befores + sequence * before_stride + position
        tl.store(said, _confidence(row, weight, bias, width, before, w1, rank, BLOCK, RANK))
    column = _unpack_column(tl.load(words + at), num_columns)
    tl.debug_barrier()  # all warps have read it
    tl.store(words + at, -0x8000000000000000)
    drafted = column
    if IS_MAPPED:
        drafted = tl.load(token_ids + column)
    tl.store(drafts + sequence * drafts_stride + position, drafted)
    if SIGNAL == _NONE:
        tl.store(said, 0.0)
    if READS != _NONE:
        heat = tl.load(temperature + tl.load(slots + sequence))
        divisor = tl.where(heat > 0, heat, 1.0)
        tile = tl.arange(0, TILES)
        part = at * num_tiles + tile
        peak = tl.load(peaks + part, mask=tile < num_tiles, other=-_INF)
        mass = tl.load(masses + part, mask=tile < num_tiles, other=0.0)
        read = tl.max(peak, axis=0)
        shift = tl.where(read > -_INF, read, 0.0)
        total = tl.sum(mass * tl.exp((peak - shift) / divisor), axis=0)
        if KEEPS:
            of_law = sequence * peak_stride + position
            tl.store(law_peaks + of_law, shift)
            tl.store(law_masses + of_law, total)
        if (SIGNAL == _PEAK) | (SIGNAL == _DRAWN):
            if SIGNAL == _DRAWN:
                read = tl.load(chosens + at * num_tiles + column // span)
            tl.store(said, tl.exp((read - shift) / divisor) / total)


@triton.jit
def _confidence(row, weight, bias, width, before, w1, rank, BLOCK: tl.constexpr, RANK: tl.constexpr):
    """What the head says of the draft whose hidden row [width] this is; before: where the token before it stands."""
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_known = column < width
        h = tl.load(row + column, mask=is_known, other=0.0).to(tl.float32)
        total += tl.sum(h * tl.load(weight + column, mask=is_known, other=0.0).to(tl.float32), axis=0)
    if RANK > 0:
        of_rank = tl.arange(0, RANK)
        is_rank = of_rank < rank
        e = tl.load(w1 + tl.load(before) * rank + of_rank, mask=is_rank, other=0.0).to(tl.float32)
        total += tl.sum(e * tl.load(weight + width + of_rank, mask=is_rank, other=0.0).to(tl.float32), axis=0)
    if bias is not None:
        total += tl.load(bias).to(tl.float32)
    return 1.0 / (1.0 + tl.exp(-total))
