"""`ops.logprobs.report` in one pass over the logits: nothing of the vocabulary's size is written, sorted or copied.

`_tiles` leaves of each (row, tile of the vocabulary) its largest logit, its sum of exponentials, how many of its tokens
come before the one asked about, and its best tokens in order; `_join` puts the tiles of a row together. Order is an
integer key of logit and id, as in the reference. Called by the Triton backend; fixed launches, no host reads. What a
step emits is found on the device too (`_locate`), where who asks for how much is read there: so that can be captured.

Letters in shapes: O rows of logits, V token ids, n rows that are reported, K top tokens, B padded sequences, S drafts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream import logprobs, plan
from slipstream.config import MAX_LOGPROBS
from slipstream.logprobs import NUM_REPORT_COLUMNS, num_columns
from slipstream.plan import NUM_VERDICT_COLUMNS

RANK, VALUE, TOP = (tl.constexpr(c) for c in (logprobs.RANK, logprobs.VALUE, NUM_REPORT_COLUMNS))
NUM_ACCEPTED, TOKENS = tl.constexpr(plan.NUM_ACCEPTED), tl.constexpr(NUM_VERDICT_COLUMNS)
_INF = tl.constexpr(float("inf"))
_LEAST = tl.constexpr(-(2**63))
BLOCK = 4096  # tokens of a tile
MAX_ROWS = 4096  # at once: with V = 150k and 20 top tokens, 25 MiB between the two kernels


def report(logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """logits [O, V] bf16, fp16 or fp32, rows and token_ids [n] int64 -> a report [n, NUM_REPORT_COLUMNS + 2 K] int32.

    K = min(num_top, V). Rows below O and ids below V are the caller's duty.
    """
    vocab_size = logits.shape[1]
    out = torch.empty(len(rows), num_columns(num_top, vocab_size), dtype=torch.int32, device=logits.device)
    for first in range(0, len(rows), MAX_ROWS):
        part = slice(first, first + MAX_ROWS)
        _report(logits, rows[part], token_ids[part], min(num_top, vocab_size), out[part])
    return out


def report_outputs(
    logits: Tensor, result: Tensor, *, cu_outputs: Tensor, turns: Tensor, num_top: Tensor, out: Tensor
) -> None:
    """Report the tokens that a step has emitted, of those who ask, into the leading part of `out`.

    logits [O, V]; result a verdict [B, NUM_VERDICT_COLUMNS + S + 1]; cu_outputs [B + 1]; turns [B] int64: 0, 1, .. of
    those who ask, -1 of the others; num_top [1] int64, K, at most MAX_LOGPROBS and V. out [n] int32 is read as
    [A, S + 1, NUM_REPORT_COLUMNS + 2 K]: y_0 .. y_S of the A who ask; behind the last token that counts stands anything.
    """
    count, num_places = len(result), result.shape[1] - NUM_VERDICT_COLUMNS
    found = torch.empty(3, count * num_places, dtype=torch.int64, device=logits.device)
    _locate[(count,)](
        result, result.stride(0), cu_outputs, turns, num_places, logits.shape[1], *found.unbind(),
        PLACES=triton.next_power_of_2(num_places),
    )  # fmt: skip
    for first in range(0, count * num_places, MAX_ROWS):
        rows, token_ids, lines = found[:, first : first + MAX_ROWS].unbind()
        _report(logits, rows, token_ids, min(MAX_LOGPROBS, logits.shape[1]), out, num_top, lines)


def _report(
    logits: Tensor, rows: Tensor, token_ids: Tensor, most: int, out: Tensor, num_top: Tensor | None = None,
    lines: Tensor | None = None,
) -> None:  # fmt: skip
    """With num_top and lines, who asks is known on the device alone; most is a bound then. Rows below 0 are left out."""
    assert logits.stride(1) == 1, "the logits of a row must lie side by side"
    count, vocab_size = len(rows), logits.shape[1]
    block = min(BLOCK, max(16, triton.next_power_of_2(vocab_size)))
    num_tiles = triton.cdiv(vocab_size, block)
    peaks = torch.empty(count, num_tiles, dtype=torch.float32, device=logits.device)
    sums, before = torch.empty_like(peaks), torch.empty_like(peaks, dtype=torch.int32)
    best = torch.empty(count, num_tiles, max(most, 1), dtype=torch.int64, device=logits.device)
    is_found = lines is not None
    asked = most if num_top is None else num_top
    _tiles[(num_tiles, count)](
        logits, logits.stride(0), vocab_size, rows, token_ids, asked, peaks, sums, before, best, IS_FOUND=is_found,
        BLOCK=block, num_warps=8 if block > 2048 else 4,
    )  # fmt: skip
    _join[(count,)](
        logits, logits.stride(0), vocab_size, rows, token_ids, asked, peaks, sums, before, best, num_tiles,
        out, 0 if is_found else out.stride(0), lines if is_found else rows, IS_FOUND=is_found,
        TILES=triton.next_power_of_2(num_tiles), PLACES=triton.next_power_of_2(MAX_LOGPROBS),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["result_stride", "num_places"],
    do_not_specialize_on_alignment=["rows", "token_ids", "lines"],
)
def _locate(
    result, result_stride, cu_outputs, turns, num_places, vocab_size, rows, token_ids, lines, PLACES: tl.constexpr
):  # fmt: skip
    """One program: one sequence. Row -1 of what was not emitted, or not asked for."""
    sequence = tl.program_id(0).to(tl.int64)
    place, turn = tl.arange(0, PLACES), tl.load(turns + sequence)
    verdict = result + sequence * result_stride
    counts = (turn >= 0) & (place <= tl.load(verdict + NUM_ACCEPTED)) & (place < num_places)
    token_id = tl.load(verdict + TOKENS + place, mask=counts, other=0)
    token_id = tl.minimum(tl.maximum(token_id, 0), vocab_size - 1)  # of an invalid row
    at = sequence * num_places + place
    tl.store(rows + at, tl.where(counts, tl.load(cu_outputs + sequence) + place, -1), mask=place < num_places)
    tl.store(token_ids + at, token_id.to(tl.int64), mask=counts)
    tl.store(lines + at, turn * num_places + place, mask=counts)


@triton.jit
def _key(x, token_id, vocab_size):
    """int64, larger where the logit is, and among equal ones where the id is lower."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # no negative zero
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) + (vocab_size - 1 - token_id).to(tl.int64)


@triton.jit
def _logit(key):
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _number(most, IS_FOUND: tl.constexpr):
    """A number of the host, or one that lies on the device."""
    if IS_FOUND:
        return tl.load(most).to(tl.int32)
    else:
        return most


@triton.jit(do_not_specialize=["most"], do_not_specialize_on_alignment=["rows", "token_ids"])
def _tiles(
    logits, row_stride, vocab_size, rows, token_ids, most, peaks, sums, before, best, IS_FOUND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one tile of one row."""
    tile, n = tl.program_id(0), tl.program_id(1)
    line = tl.load(rows + n)
    if line >= 0:
        row = logits + line * row_stride
        token_id = tile * BLOCK + tl.arange(0, BLOCK)
        is_token = token_id < vocab_size
        x = tl.load(row + token_id, mask=is_token, other=-_INF).to(tl.float32)
        peak = tl.max(x, axis=0)
        shift = tl.where(peak > -_INF, peak, 0.0)
        at = n.to(tl.int64) * tl.num_programs(0) + tile
        tl.store(peaks + at, peak)
        tl.store(sums + at, tl.sum(tl.exp(x - shift), axis=0))
        own = tl.load(token_ids + n)
        own_key = _key(tl.load(row + own).to(tl.float32), own, vocab_size)
        key = tl.where(is_token, _key(x, token_id, vocab_size), _LEAST)
        tl.store(before + at, tl.sum((key > own_key).to(tl.int32), axis=0))
        num_top = _number(most, IS_FOUND)
        for place in range(num_top):
            top = tl.max(key, axis=0)
            tl.store(best + at * num_top + place, top)
            key = tl.where(key == top, _LEAST, key)


@triton.jit(
    do_not_specialize=["most", "num_tiles", "out_stride"],
    do_not_specialize_on_alignment=["rows", "token_ids", "lines", "out"],
)
def _join(
    logits, row_stride, vocab_size, rows, token_ids, most, peaks, sums, before, best, num_tiles, out, out_stride, lines,
    IS_FOUND: tl.constexpr, TILES: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One program: one row."""
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + n)
    if row >= 0:
        tile, place = tl.arange(0, TILES), tl.arange(0, PLACES)
        is_tile = tile < num_tiles
        at = n * num_tiles + tile
        peak = tl.load(peaks + at, mask=is_tile, other=-_INF)
        highest = tl.max(peak, axis=0)
        scale = tl.where(peak > -_INF, tl.exp(peak - highest), 0.0)
        total = highest + tl.log(tl.sum(scale * tl.load(sums + at, mask=is_tile, other=0.0), axis=0))
        own = tl.load(logits + row * row_stride + tl.load(token_ids + n)).to(tl.float32)
        num_top = _number(most, IS_FOUND)
        if IS_FOUND:
            line = out + tl.load(lines + n) * (TOP + 2 * num_top)
        else:
            line = out + n * out_stride
        tl.store(line + RANK, 1 + tl.sum(tl.load(before + at, mask=is_tile, other=0), axis=0))
        tl.store(line + VALUE, (own - total).to(tl.int32, bitcast=True))
        candidate = at[:, None] * num_top + place[None, :]
        is_candidate = is_tile[:, None] & (place < num_top)[None, :]
        key = tl.load(best + candidate, mask=is_candidate, other=_LEAST)
        for k in range(num_top):
            top = tl.max(tl.max(key, axis=1), axis=0)
            tl.store(line + TOP + k, (vocab_size - 1 - (top & 0xFFFFFFFF)).to(tl.int32))
            tl.store(line + TOP + num_top + k, (_logit(top) - total).to(tl.int32, bitcast=True))
            key = tl.where(key == top, _LEAST, key)
