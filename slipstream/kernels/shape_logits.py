"""Penalties and edits, as `ops.shape_logits` defines them, on tiles of logits that are being read anyway.

`count_tokens` counts what stands in each sequence, one row of the vocabulary's length per sequence; a tile of a row of
logits then needs these counts, the drafts before the row and the edits (`shaped`, inside other kernels). So no shaped
copy of the logits is made for coupled acceptance, which at 2,176 rows of 152k tokens would take 1.3 GB in fp32, and be
written and read once more; counts of 256 sequences take 156 MB. Only sequences that ask for penalties are counted. Fixed
launches, no host reads: all of it can be captured. Sums of counts are of integers, so threads may add in any order.

Letters in shapes: B padded sequences, O padded output rows, V token ids, S drafts at most, N slots, L positions.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.ops.shape_logits import Shaping

IN_PROMPT = tl.constexpr(1 << 30)  # bit of a count: the token stands in the prompt; below it, how often in the output
_TOKENS_AT_ONCE = 512  # of a history
_CHUNKS = 8  # programs that share a history: long ones alone fill them
_CLEARED_AT_ONCE = 4096
BLOCK = 4096  # tokens of a tile of `shape_logits`


@dataclass(frozen=True, slots=True, eq=False)
class Shaper:
    """What shaping goes by, at fixed addresses: requests by slot, and counts by place in the step."""

    asked: Shaping  # of N + 1 slots
    token_ids: Tensor  # [N + 1, L + 1] int32
    counts: Tensor  # [B or more, V] int32, written anew in every step

    @classmethod
    def make(cls, asked: Shaping, token_ids: Tensor, num_token_ids: int) -> "Shaper":
        """With room for as many sequences as there are slots to own."""
        counts = torch.zeros(len(token_ids) - 1, num_token_ids, dtype=torch.int32, device=token_ids.device)
        return cls(asked, token_ids, counts)

    @property
    def penalties(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.asked.repetition, self.asked.frequency, self.asked.presence

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of kernels that call `shaped`, in its order."""
        asked = self.asked
        return (
            self.counts, self.counts.stride(0), *self.penalties, asked.num_prompt, asked.num_edits, asked.edit_ids,
            asked.edit_values, asked.edit_until, asked.edit_ids.stride(0),
        )  # fmt: skip


def count_tokens(shaper: Shaper, *, slots: Tensor, num_given: Tensor, emits: Tensor, context: Tensor) -> None:
    """Fill the first B rows of the counts, as far as sequences emit and ask for penalties.

    slots, num_given [B] int64; emits [B] bool; context [N + 1] int64: context + num_given tokens are known.
    """
    counts, penalties = shaper.counts, shaper.penalties
    count, num_token_ids = len(slots), counts.shape[1]
    assert count <= len(counts), (count, counts.shape)
    _clear[(triton.cdiv(num_token_ids, _CLEARED_AT_ONCE), count)](
        counts, counts.stride(0), num_token_ids, slots, emits, *penalties, BLOCK=_CLEARED_AT_ONCE
    )
    _count[(_CHUNKS, count)](
        counts, counts.stride(0), slots, num_given, emits, context, shaper.token_ids, shaper.token_ids.stride(0),
        *penalties, shaper.asked.num_prompt, BLOCK=_TOKENS_AT_ONCE,
    )  # fmt: skip


def shape_logits(
    logits: Tensor, num_token_ids: int, shaper: Shaper, *, output_sequence: Tensor, output_offset: Tensor,
    slots: Tensor, num_given: Tensor, emits: Tensor, context: Tensor, drafts: Tensor,
) -> Tensor:  # fmt: skip
    """logits [O, V'] bf16 or fp32 -> a new [O, V] fp32 after penalties and edits; rows of nobody hold anything.

    For what reads whole rows: filters, and rejection. Arguments as of `kernels.accept.accept_coupled`.
    """
    assert logits.stride(1) == 1, "the logits of a row must lie side by side"
    count_tokens(shaper, slots=slots, num_given=num_given, emits=emits, context=context)
    out = torch.empty(len(logits), num_token_ids, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, max(16, triton.next_power_of_2(num_token_ids)))
    if len(logits):
        _shape[(triton.cdiv(num_token_ids, block), len(logits))](
            logits, logits.stride(0), num_token_ids, output_sequence, output_offset, slots, num_given, context,
            drafts, drafts.stride(0), *shaper.arguments, out, BLOCK=block, num_warps=8 if block > 2048 else 4,
        )  # fmt: skip
    return out


@triton.jit
def _is_penalised(slot, repetition, frequency, presence):
    neutral = (tl.load(repetition + slot) == 1.0) & (tl.load(frequency + slot) == 0.0)
    return ~(neutral & (tl.load(presence + slot) == 0.0))


@triton.jit
def _clear(
    counts, counts_stride, num_token_ids, slots, emits, repetition, frequency, presence, BLOCK: tl.constexpr
):  # fmt: skip
    tile, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if (tl.load(emits + sequence) != 0) & _is_penalised(tl.load(slots + sequence), repetition, frequency, presence):
        token_id = tile * BLOCK + tl.arange(0, BLOCK)
        zero = tl.zeros((BLOCK,), tl.int32)
        tl.store(counts + sequence * counts_stride + token_id, zero, mask=token_id < num_token_ids)


@triton.jit
def _count(
    counts, counts_stride, slots, num_given, emits, context, token_ids, token_ids_stride,
    repetition, frequency, presence, num_prompt, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: every so many of the tokens of one sequence."""
    chunk, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + sequence)
    if (tl.load(emits + sequence) != 0) & _is_penalised(slot, repetition, frequency, presence):
        num_known = (tl.load(context + slot) + tl.load(num_given + sequence)).to(tl.int32)
        start = tl.load(num_prompt + slot).to(tl.int32)  # of the output
        first_known = tl.where(tl.load(repetition + slot) == 1.0, start, 0)  # only repetition looks at prompts
        row, tokens = counts + sequence * counts_stride, token_ids + slot * token_ids_stride
        for first in range(first_known + chunk * BLOCK, num_known, tl.num_programs(0) * BLOCK):
            column = first + tl.arange(0, BLOCK)
            is_known, is_output = column < num_known, column >= start
            token = tl.load(tokens + column, mask=is_known, other=0)
            tl.atomic_add(row + token, tl.full((BLOCK,), 1, tl.int32), mask=is_known & is_output, sem="relaxed")
            tl.atomic_or(row + token, tl.full((BLOCK,), IN_PROMPT, tl.int32), mask=is_known & ~is_output, sem="relaxed")


@triton.jit
def shaped(
    x, tile, num_token_ids, sequence, slot, offset, num_known, drafts, drafts_stride,
    counts, counts_stride, repetition, frequency, presence, num_prompt, num_edits, edit_ids, edit_values, edit_until,
    edit_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [BLOCK] fp32, logits of one tile of a row -> the same after penalties and edits.

    offset: drafts of the sequence (int64) that stand before the row; num_known: tokens before those. Neutral rows pass
    bit for bit.
    """
    token_id = tile * BLOCK + tl.arange(0, BLOCK)
    if _is_penalised(slot, repetition, frequency, presence):
        packed = tl.load(counts + sequence * counts_stride + token_id, mask=token_id < num_token_ids, other=0)
        times = packed & (IN_PROMPT - 1)
        for place in range(offset):
            times += (token_id == tl.load(drafts + sequence * drafts_stride + place)).to(tl.int32)
        factor = tl.load(repetition + slot)
        repeated = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + factor), x * factor)
        x = tl.where((packed > 0) | (times > 0), repeated, x)
        lowered = x - tl.load(frequency + slot) * times.to(tl.float32) - tl.load(presence + slot)
        x = tl.where(times > 0, lowered, x)
    num_output = num_known + offset - tl.load(num_prompt + slot)
    for edit in range(tl.load(num_edits + slot).to(tl.int32)):
        at = slot * edit_stride + edit
        place = tl.load(edit_ids + at) - tile * BLOCK
        if (place >= 0) & (place < BLOCK):
            changed = x + tl.load(edit_values + at)
            x = tl.where((tl.arange(0, BLOCK) == place) & (num_output < tl.load(edit_until + at)), changed, x)
    return x


@triton.jit
def _shape(
    logits, row_stride, num_token_ids, output_sequence, output_offset, slots, num_given, context, drafts, drafts_stride,
    counts, counts_stride, repetition, frequency, presence, num_prompt, num_edits, edit_ids, edit_values, edit_until,
    edit_stride, out, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one tile of one row."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sequence = tl.load(output_sequence + row)
    if sequence >= 0:
        slot = tl.load(slots + sequence)
        token_id = tile * BLOCK + tl.arange(0, BLOCK)
        is_token = token_id < num_token_ids
        x = tl.load(logits + row * row_stride + token_id, mask=is_token, other=0.0).to(tl.float32)
        num_known = tl.load(context + slot) + tl.load(num_given + sequence)
        x = shaped(
            x, tile, num_token_ids, sequence, slot, tl.load(output_offset + row).to(tl.int32), num_known,
            drafts, drafts_stride, counts, counts_stride, repetition, frequency, presence, num_prompt, num_edits,
            edit_ids, edit_values, edit_until, edit_stride, BLOCK,
        )  # fmt: skip
        tl.store(out + row * num_token_ids + token_id, x, mask=is_token)
