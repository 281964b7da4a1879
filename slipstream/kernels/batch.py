"""The step's ragged batch on a GPU: slots are loaded, widths become rows, drafts go into their rows.

One launch for each of `admit`, `write_pages`, `layout`, `fill` and `draft_inputs`; their reference is device/state.py
and device/batch.py. Sizes are padded: a sequence without rows (no given tokens, width 0, nothing to emit) stands for
nobody, and rows, outputs and tiles beyond the real ones are made harmless. Nothing is read on the host, so all of it
can be captured; the grids depend on padded sizes only. Knows nothing of networks. Called by the engine's triton path.

Letters in shapes: N slots (row N of the state is for padding), L positions and P pages per request, B sequences,
R rows, O output rows, T tiles (of attention queries), all of the last four padded.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.cache.pages import NULL_PAGE, SCRATCH_PAGE
from slipstream.ops.shape_logits import Shaping

_BLOCK = 128  # elements a program handles at a time: a sequence rarely has more rows, and a prefill gets many programs
_MAX_SEQUENCES_AT_ONCE = 512  # summed up in one go by each program of `layout`; more of them take more turns
_WANTED_PROGRAMS = 1024  # of `layout`: about what an H200 holds at once


# ---------------------------------------------------------------------------------------------------- stage load


@dataclass(frozen=True, slots=True, eq=False)
class Admissions:
    """New owners of slots, packed; `plan.Admission`, one after another."""

    slots: Tensor  # [A] int64; below 0: padding, nobody is admitted
    cu_tokens: Tensor  # [A + 1] int64
    tokens: Tensor  # [cu_tokens[A] or more] int32
    context: Tensor  # [A] int64: tokens whose KV is in the cache
    temperature: Tensor  # [A] float32
    top_k: Tensor  # [A] int64
    top_p: Tensor  # [A] float32
    min_p: Tensor  # [A] float32
    seed: Tensor  # [A] int64
    repetition: Tensor  # [A] float32, like the next two
    frequency: Tensor
    presence: Tensor
    num_prompt: Tensor  # [A] int64
    cu_edits: Tensor  # [A + 1] int64
    edit_ids: Tensor  # [cu_edits[A] or more] int64
    edit_values: Tensor  # the same, float32
    edit_until: Tensor  # the same, int64


def admit(
    new: Admissions, *, token_ids: Tensor, context: Tensor, page_table: Tensor, temperature: Tensor, top_k: Tensor,
    top_p: Tensor, min_p: Tensor, seed: Tensor, shaping: Shaping,
) -> None:  # fmt: skip
    """Give slots to new owners: tokens from the start of the row on, context, an empty page table, parameters.

    The keywords are the fields of the slot state: token_ids [N + 1, L + 1] int32, context [N + 1] int64, page_table
    [N + 1, P] int64, then [N + 1] each, and what requests ask of logits. No slot may come twice. What stood behind the tokens stays there.
    """
    num_admissions = len(new.slots)
    if num_admissions == 0:
        return
    num_chunks = min(triton.cdiv(token_ids.shape[1], 8 * _BLOCK), 32)
    _admit[(num_admissions, num_chunks)](
        new.slots, new.cu_tokens, new.tokens, new.context, new.temperature, new.top_k, new.top_p, new.min_p, new.seed,
        new.repetition, new.frequency, new.presence, new.num_prompt,
        new.cu_edits, new.edit_ids, new.edit_values, new.edit_until,
        token_ids, context, page_table, temperature, top_k, top_p, min_p, seed,
        shaping.repetition, shaping.frequency, shaping.presence, shaping.num_prompt,
        shaping.num_edits, shaping.edit_ids, shaping.edit_values, shaping.edit_until,
        token_ids.stride(0), page_table.stride(0), page_table.shape[1], shaping.edit_ids.shape[1],
        NULL_PAGE=NULL_PAGE, BLOCK=8 * _BLOCK,
    )  # fmt: skip


@triton.jit
def _admit(
    new_slots, cu_tokens, new_tokens, new_context, new_temperature, new_top_k, new_top_p, new_min_p, new_seed,
    new_repetition, new_frequency, new_presence, new_num_prompt, cu_edits, new_edit_ids, new_edit_values, new_edit_until,
    token_ids, context, page_table, temperature, top_k, top_p, min_p, seed,
    repetition, frequency, presence, num_prompt, num_edits, edit_ids, edit_values, edit_until,
    token_stride, page_stride, num_pages, edit_stride, NULL_PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    new, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(new_slots + new)
    if slot >= 0:
        start = tl.load(cu_tokens + new)
        num_tokens = (tl.load(cu_tokens + new + 1) - start).to(tl.int32)
        step = tl.num_programs(1) * BLOCK
        for first in range(chunk * BLOCK, num_tokens, step):
            column = first + tl.arange(0, BLOCK)
            token = tl.load(new_tokens + start + column, mask=column < num_tokens, other=0)
            tl.store(token_ids + slot * token_stride + column, token, mask=column < num_tokens)
        for first in range(chunk * BLOCK, num_pages, step):
            column = first + tl.arange(0, BLOCK)
            tl.store(page_table + slot * page_stride + column, NULL_PAGE, mask=column < num_pages)
        if chunk == 0:
            tl.store(context + slot, tl.load(new_context + new))
            tl.store(temperature + slot, tl.load(new_temperature + new))
            tl.store(top_k + slot, tl.load(new_top_k + new))
            tl.store(top_p + slot, tl.load(new_top_p + new))
            tl.store(min_p + slot, tl.load(new_min_p + new))
            tl.store(seed + slot, tl.load(new_seed + new))
            tl.store(repetition + slot, tl.load(new_repetition + new))
            tl.store(frequency + slot, tl.load(new_frequency + new))
            tl.store(presence + slot, tl.load(new_presence + new))
            tl.store(num_prompt + slot, tl.load(new_num_prompt + new))
            first_edit = tl.load(cu_edits + new)
            count = (tl.load(cu_edits + new + 1) - first_edit).to(tl.int32)
            tl.store(num_edits + slot, count.to(tl.int64))
            for first in range(0, count, BLOCK):
                column = first + tl.arange(0, BLOCK)
                source, target, inside = first_edit + column, slot * edit_stride + column, column < count
                tl.store(edit_ids + target, tl.load(new_edit_ids + source, mask=inside, other=0), mask=inside)
                tl.store(edit_values + target, tl.load(new_edit_values + source, mask=inside, other=0.0), mask=inside)
                tl.store(edit_until + target, tl.load(new_edit_until + source, mask=inside, other=0), mask=inside)


def write_pages(page_table: Tensor, writes: Tensor) -> None:
    """page_table[slot, index] = page for every row (slot, index, page) of writes [n, 3] int64; a slot below 0: none."""
    assert writes.is_contiguous(), writes.stride()
    if len(writes):
        grid = (triton.cdiv(len(writes), _BLOCK),)
        _write_pages[grid](page_table, writes, len(writes), page_table.stride(0), BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["num_writes"])
def _write_pages(page_table, writes, num_writes, page_stride, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(writes + 3 * i, mask=i < num_writes, other=-1)
    index = tl.load(writes + 3 * i + 1, mask=slot >= 0, other=0)
    page = tl.load(writes + 3 * i + 2, mask=slot >= 0, other=0)
    tl.store(page_table + slot * page_stride + index, page, mask=slot >= 0)


# -------------------------------------------------------------------------------------------------- stage layout


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What `layout` fills: the padded rows of a step, their outputs, and the tiles that attention works by."""

    cu_outputs: Tensor  # [B + 1] int64
    positions: Tensor  # [R] int64; of padding 0
    kv_slots: Tensor  # [R] int64; of padding in the scratch page
    token_ids: Tensor  # [R] int64; of draft rows 0 until `fill`, of padding 0
    draft_index: Tensor  # [R] int64: sequence * draft_stride + j in the row of draft j, all others -1
    output_rows: Tensor  # [O] int64; of padding 0
    output_sequence: Tensor  # [O] int64; of padding -1
    output_offset: Tensor  # [O] int64: 0 for the row of the last given token, j for the row of draft j; of padding 0
    tiles: Tensor  # [T, 4] int32, records of kernels.attention.Tiles; zeros where unused


def make_rows(
    *, num_sequences: int, num_rows: int, num_outputs: int, num_tiles: int, device: torch.device | str
) -> Rows:
    """Memory for `layout` to fill: zeros, which stand for no sequence."""
    counts = {
        "cu_outputs": num_sequences + 1, "positions": num_rows, "kv_slots": num_rows, "token_ids": num_rows,
        "draft_index": num_rows, "output_rows": num_outputs, "output_sequence": num_outputs,
        "output_offset": num_outputs,
    }  # fmt: skip
    made = {name: torch.zeros(count, dtype=torch.int64, device=device) for name, count in counts.items()}
    return Rows(**made, tiles=torch.zeros(num_tiles, 4, dtype=torch.int32, device=device))


def max_tiles(num_sequences: int, num_rows: int, block_q: int) -> int:
    """Tiles that are enough for any such step: each sequence ends with at most one that is not full."""
    return min(num_rows, num_rows // block_q + num_sequences)


def layout(
    slots: Tensor, num_given: Tensor, emits: Tensor, widths: Tensor, *, context: Tensor, page_table: Tensor,
    token_ids: Tensor, page_size: int, block_q: int, draft_stride: int, out: Rows,
) -> None:  # fmt: skip
    """Widths to rows: slots, num_given, emits (bool) and widths [B], the rest int64, with the slot state -> out.

    A sequence has num_given + widths rows, and widths + 1 outputs if it emits; all rows together must fit R, all
    outputs O, and their tiles of block_q rows T: what does not fit is left out. draft_stride: see Rows.draft_index.
    """
    num_sequences, num_rows = len(slots), len(out.positions)
    assert len(out.cu_outputs) == num_sequences + 1, (len(out.cu_outputs), num_sequences)
    assert out.tiles.is_contiguous(), out.tiles.stride()
    chunks = min(triton.cdiv(num_rows, _BLOCK), _WANTED_PROGRAMS // (num_sequences + 1))
    # One program (or several, where rows are many) for each sequence, and as many for the padding behind the last.
    _layout[(num_sequences + 1, max(chunks, 1))](
        slots, num_given, emits, widths, context, page_table, token_ids,
        out.cu_outputs, out.positions, out.kv_slots, out.token_ids, out.draft_index,
        out.output_rows, out.output_sequence, out.output_offset, out.tiles,
        num_sequences, num_rows, len(out.output_rows), len(out.tiles), block_q, draft_stride,
        page_table.stride(0), page_table.shape[1], token_ids.stride(0), token_ids.shape[1],
        PAGE_SIZE=page_size, SCRATCH_PAGE=SCRATCH_PAGE, BLOCK_B=_MAX_SEQUENCES_AT_ONCE, BLOCK=_BLOCK,
    )  # fmt: skip


_VARY = ["num_sequences", "num_rows", "num_outputs", "num_tiles", "block_q", "draft_stride"]


@triton.jit(do_not_specialize=_VARY)
def _layout(
    slots, num_given, emits, widths, context, page_table, token_ids,
    cu_outputs, positions, kv_slots, row_token_ids, draft_index,
    output_rows, output_sequence, output_offset, tiles,
    num_sequences, num_rows, num_outputs, num_tiles, block_q, draft_stride,
    page_stride, num_pages, token_stride, num_columns,
    PAGE_SIZE: tl.constexpr, SCRATCH_PAGE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b, chunk = tl.program_id(0), tl.program_id(1)
    row_start, output_start, tile_start = _starts(b, num_given, emits, widths, block_q, BLOCK_B)
    if chunk == 0:
        tl.store(cu_outputs + b, output_start.to(tl.int64))
    begin, step = chunk * BLOCK, tl.num_programs(1) * BLOCK
    if b == num_sequences:
        _pad_rows(kv_slots, row_start + begin, num_rows, step, PAGE_SIZE, SCRATCH_PAGE, BLOCK)
        _pad(positions, row_start + begin, num_rows, step, 0, BLOCK)
        _pad(row_token_ids, row_start + begin, num_rows, step, 0, BLOCK)
        _pad(draft_index, row_start + begin, num_rows, step, -1, BLOCK)
        _pad(output_rows, output_start + begin, num_outputs, step, 0, BLOCK)
        _pad(output_sequence, output_start + begin, num_outputs, step, -1, BLOCK)
        _pad(output_offset, output_start + begin, num_outputs, step, 0, BLOCK)
        _pad(tiles, 4 * tile_start + begin, 4 * num_tiles, step, 0, BLOCK)
    else:
        given, width = tl.load(num_given + b).to(tl.int32), tl.load(widths + b).to(tl.int32)
        slot = tl.load(slots + b)
        start = tl.load(context + slot)
        _write_rows(
            b, begin, step, row_start, given, given + width, num_rows,
            start, page_table + slot * page_stride, token_ids + slot * token_stride,
            num_pages, num_columns, draft_stride,
            positions, kv_slots, row_token_ids, draft_index, PAGE_SIZE, SCRATCH_PAGE, BLOCK,
        )  # fmt: skip
        outputs = tl.where(tl.load(emits + b), width + 1, 0)
        _write_outputs(
            b, begin, step, output_start, outputs, num_outputs, row_start + given - 1,
            output_rows, output_sequence, output_offset, BLOCK,
        )  # fmt: skip
        _write_tiles(
            begin, step, tile_start, num_tiles, block_q, row_start, given + width, num_rows, slot, start, tiles, BLOCK
        )  # fmt: skip


@triton.jit
def _starts(b, num_given, emits, widths, block_q, BLOCK_B: tl.constexpr):
    """Rows, outputs and tiles of the sequences before b: each program sums up for itself, so that one launch does."""
    rows = tl.zeros([BLOCK_B], tl.int32)
    outputs = tl.zeros([BLOCK_B], tl.int32)
    tiles = tl.zeros([BLOCK_B], tl.int32)
    for first in range(0, b, BLOCK_B):
        i = first + tl.arange(0, BLOCK_B)
        given = tl.load(num_given + i, mask=i < b, other=0).to(tl.int32)
        width = tl.load(widths + i, mask=i < b, other=0).to(tl.int32)
        emitting = tl.load(emits + i, mask=i < b, other=0)
        rows += given + width
        outputs += tl.where(emitting, width + 1, 0)
        tiles += tl.cdiv(given + width, block_q)
    return tl.sum(rows, 0), tl.sum(outputs, 0), tl.sum(tiles, 0)


@triton.jit
def _write_rows(
    b, begin, step, row_start, given, count, num_rows, start, pages, tokens, num_pages, num_columns, draft_stride,
    positions, kv_slots, row_token_ids, draft_index,
    PAGE_SIZE: tl.constexpr, SCRATCH_PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of sequence b, the first at position `start`; pages and tokens point to its rows of the slot state."""
    for first in range(begin, count, step):
        offset = first + tl.arange(0, BLOCK)
        row, position = row_start + offset, start + offset
        inside = (offset < count) & (row < num_rows)
        index = position // PAGE_SIZE
        page = tl.load(pages + index, mask=inside & (index < num_pages), other=SCRATCH_PAGE)
        token = tl.load(tokens + position, mask=inside & (offset < given) & (position < num_columns), other=0)
        draft = tl.where(offset >= given, b * draft_stride + offset - given, -1)
        tl.store(positions + row, position, mask=inside)
        tl.store(kv_slots + row, page * PAGE_SIZE + position % PAGE_SIZE, mask=inside)
        tl.store(row_token_ids + row, token.to(tl.int64), mask=inside)
        tl.store(draft_index + row, draft.to(tl.int64), mask=inside)


@triton.jit
def _write_outputs(
    b, begin, step, output_start, count, num_outputs, first_row,
    output_rows, output_sequence, output_offset, BLOCK: tl.constexpr,
):  # fmt: skip
    """Outputs of sequence b; first_row is the row of its last given token."""
    for first in range(begin, count, step):
        offset = first + tl.arange(0, BLOCK).to(tl.int64)
        output = output_start + offset
        inside = (offset < count) & (output < num_outputs)
        tl.store(output_rows + output, first_row + offset, mask=inside)
        tl.store(output_sequence + output, tl.zeros([BLOCK], tl.int64) + b, mask=inside)
        tl.store(output_offset + output, offset, mask=inside)


@triton.jit
def _write_tiles(
    begin, step, tile_start, num_tiles, block_q, row_start, count, num_rows, slot, start, tiles, BLOCK: tl.constexpr
):
    """Tiles of a sequence: block_q of its `count` rows each, the last one what remains."""
    row_end = tl.minimum(row_start + count, num_rows)
    for first in range(begin, tl.cdiv(count, block_q), step):
        place = first + tl.arange(0, BLOCK)
        row, tile = row_start + place * block_q, tile_start + place
        inside = (place * block_q < count) & (tile < num_tiles)
        tile_rows = tl.maximum(tl.minimum(row_end - row, block_q), 0)
        _write_records(tiles + 4 * tile, row, tile_rows, slot, start + place * block_q, inside)


@triton.jit
def _write_records(at, first_row, num_rows, slot, position, mask):
    """As kernels.attention reads them: see `Tiles`."""
    tl.store(at, first_row, mask=mask)
    tl.store(at + 1, num_rows, mask=mask)
    tl.store(at + 2, slot.to(tl.int32) + tl.zeros_like(first_row), mask=mask)
    tl.store(at + 3, position.to(tl.int32), mask=mask)


@triton.jit
def _pad_rows(
    kv_slots, begin, end, step, PAGE_SIZE: tl.constexpr, SCRATCH_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    for first in range(begin, end, step):
        row = first + tl.arange(0, BLOCK)
        tl.store(kv_slots + row, (SCRATCH_PAGE * PAGE_SIZE + row % PAGE_SIZE).to(tl.int64), mask=row < end)


@triton.jit
def _pad(target, begin, end, step, value: tl.constexpr, BLOCK: tl.constexpr):
    for first in range(begin, end, step):
        i = first + tl.arange(0, BLOCK)
        tl.store(target + i, value, mask=i < end)


# ---------------------------------------------------------------------------------------- stages fill and draft


def fill(token_ids: Tensor, draft_index: Tensor, drafts: Tensor) -> None:
    """token_ids[r] = drafts[draft_index[r]] in place, where that is not -1: drafts go into their rows.

    token_ids and draft_index [R] int64 as `layout` left them; drafts any contiguous int64, read as if it were flat.
    """
    assert drafts.is_contiguous(), drafts.stride()
    num_rows = len(token_ids)
    if num_rows:
        _fill[(triton.cdiv(num_rows, _BLOCK),)](token_ids, draft_index, drafts, num_rows, BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["num_rows"])
def _fill(token_ids, draft_index, drafts, num_rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(draft_index + row, mask=row < num_rows, other=-1)
    draft = tl.load(drafts + index, mask=index >= 0, other=0)
    tl.store(token_ids + row, draft, mask=index >= 0)


def draft_inputs(
    slots: Tensor, context: Tensor, token_ids: Tensor, mask_token_id: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What a block drafter starts from: ids [B, n] (anchor, mask, mask, ...) and anchors [B], both int64, and blocks
    [B, 4] int32, the records of its attention (`Tiles`).

    slots [B] and the slot state's context and token_ids; num_rows n. Row i stands at context + i.
    """
    shape = (len(slots), num_rows)
    input_ids = torch.empty(shape, dtype=torch.int64, device=slots.device)
    anchors, blocks = torch.empty_like(slots), torch.empty(len(slots), 4, dtype=torch.int32, device=slots.device)
    if input_ids.numel():
        _draft_inputs[(triton.cdiv(input_ids.numel(), _BLOCK),)](
            slots, context, token_ids, input_ids, anchors, blocks, input_ids.numel(), num_rows, token_ids.stride(0),
            mask_token_id, BLOCK=_BLOCK,
        )  # fmt: skip
    return input_ids, anchors, blocks


@triton.jit(do_not_specialize=["size", "num_rows", "mask_token_id"])
def _draft_inputs(
    slots, context, token_ids, input_ids, anchors, blocks, size, num_rows, token_stride, mask_token_id,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, row = i // num_rows, i % num_rows
    slot = tl.load(slots + b, mask=i < size, other=0)
    start = tl.load(context + slot, mask=i < size, other=0)
    is_anchor = (i < size) & (row == 0)
    anchor = tl.load(token_ids + slot * token_stride + start, mask=is_anchor, other=0).to(tl.int64)
    tl.store(anchors + b, anchor, mask=is_anchor)
    tl.store(input_ids + i, tl.where(row == 0, anchor, mask_token_id), mask=i < size)
    _write_records(blocks + 4 * b, i, num_rows, slot, start, is_anchor)
