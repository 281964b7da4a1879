"""`ops.logprobs.report` in one pass over the logits: nothing of the vocabulary's size is written, sorted or copied.

`_tiles` leaves of each (row, tile of the vocabulary) its largest logit, its sum of exponentials, how many of its tokens
come before the one asked about, and its best tokens in order; `_join` puts the tiles of a row together. Order is an
integer key of logit and id, as in the reference. Called by the Triton backend; fixed launches, no host reads.

Letters in shapes: O rows of logits, V token ids, n rows that are reported, K top tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream import logprobs
from slipstream.config import MAX_LOGPROBS
from slipstream.logprobs import NUM_REPORT_COLUMNS, num_columns

RANK, VALUE, TOP = (tl.constexpr(c) for c in (logprobs.RANK, logprobs.VALUE, NUM_REPORT_COLUMNS))
_INF = tl.constexpr(float("inf"))
_LEAST = tl.constexpr(-(2**63))
BLOCK = 4096  # tokens of a tile
MAX_ROWS = 4096  # at once: with V = 150k and 20 top tokens, 25 MiB between the two kernels


def report(logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """logits [O, V] bf16, fp16 or fp32, rows and token_ids [n] int64 -> a report [n, NUM_REPORT_COLUMNS + 2 K] int32.

    K = min(num_top, V). Rows below O and ids below V are the caller's duty.
    """
    assert logits.stride(1) == 1, "the logits of a row must lie side by side"
    vocab_size = logits.shape[1]
    out = torch.empty(len(rows), num_columns(num_top, vocab_size), dtype=torch.int32, device=logits.device)
    for first in range(0, len(rows), MAX_ROWS):
        part = slice(first, first + MAX_ROWS)
        _report(logits, rows[part], token_ids[part], min(num_top, vocab_size), out[part])
    return out


def _report(logits: Tensor, rows: Tensor, token_ids: Tensor, most: int, out: Tensor) -> None:
    count, vocab_size = len(rows), logits.shape[1]
    block = min(BLOCK, max(16, triton.next_power_of_2(vocab_size)))
    num_tiles = triton.cdiv(vocab_size, block)
    peaks = torch.empty(count, num_tiles, dtype=torch.float32, device=logits.device)
    sums, before = torch.empty_like(peaks), torch.empty_like(peaks, dtype=torch.int32)
    best = torch.empty(count, num_tiles, max(most, 1), dtype=torch.int64, device=logits.device)
    _tiles[(num_tiles, count)](
        logits, logits.stride(0), vocab_size, rows, token_ids, most, peaks, sums, before, best, BLOCK=block,
        num_warps=8 if block > 2048 else 4,
    )  # fmt: skip
    _join[(count,)](
        logits, logits.stride(0), vocab_size, rows, token_ids, most, peaks, sums, before, best, num_tiles,
        out, out.stride(0), TILES=triton.next_power_of_2(num_tiles), PLACES=triton.next_power_of_2(MAX_LOGPROBS),
    )  # fmt: skip


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


@triton.jit(do_not_specialize=["most"], do_not_specialize_on_alignment=["rows", "token_ids"])
def _tiles(
    logits, row_stride, vocab_size, rows, token_ids, most, peaks, sums, before, best, BLOCK: tl.constexpr
):  # fmt: skip
    """One program: one tile of one row."""
    tile, n = tl.program_id(0), tl.program_id(1)
    row = logits + tl.load(rows + n) * row_stride
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
    for place in range(most):
        top = tl.max(key, axis=0)
        tl.store(best + at * most + place, top)
        key = tl.where(key == top, _LEAST, key)


@triton.jit(
    do_not_specialize=["most", "num_tiles", "out_stride"], do_not_specialize_on_alignment=["rows", "token_ids", "out"]
)
def _join(
    logits, row_stride, vocab_size, rows, token_ids, most, peaks, sums, before, best, num_tiles, out, out_stride,
    TILES: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One program: one row."""
    n = tl.program_id(0).to(tl.int64)
    tile, place = tl.arange(0, TILES), tl.arange(0, PLACES)
    is_tile = tile < num_tiles
    at = n * num_tiles + tile
    peak = tl.load(peaks + at, mask=is_tile, other=-_INF)
    highest = tl.max(peak, axis=0)
    scale = tl.where(peak > -_INF, tl.exp(peak - highest), 0.0)
    total = highest + tl.log(tl.sum(scale * tl.load(sums + at, mask=is_tile, other=0.0), axis=0))
    own = tl.load(logits + tl.load(rows + n) * row_stride + tl.load(token_ids + n)).to(tl.float32)
    line = out + n * out_stride
    tl.store(line + RANK, 1 + tl.sum(tl.load(before + at, mask=is_tile, other=0), axis=0))
    tl.store(line + VALUE, (own - total).to(tl.int32, bitcast=True))
    candidate = at[:, None] * most + place[None, :]
    is_candidate = is_tile[:, None] & (place < most)[None, :]
    key = tl.load(best + candidate, mask=is_candidate, other=_LEAST)
    for k in range(most):
        top = tl.max(tl.max(key, axis=1), axis=0)
        tl.store(line + TOP + k, (vocab_size - 1 - (top & 0xFFFFFFFF)).to(tl.int32))
        tl.store(line + TOP + most + k, (_logit(top) - total).to(tl.int32, bitcast=True))
        key = tl.where(key == top, _LEAST, key)
