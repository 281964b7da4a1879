"""Log-probabilities of chosen tokens, their ranks, and the most probable tokens beside them, from rows of logits.

Order is logit descending, token id ascending, so ranks and top tokens are the same on every device, ties of bf16
included. Rows are read a few at a time: what is made meanwhile has a fixed size, whatever the step's. No host reads.
Rows that hold NaN give anything; acceptance has ended their requests. Called by the backends' stage `report`.

Letters in shapes: O rows of logits, V token ids, n rows that are reported, K top tokens.
"""

import torch
from torch import Tensor

from slipstream.logprobs import NUM_REPORT_COLUMNS, num_columns

ELEMENTS_AT_ONCE = 1 << 20  # of rows times vocabulary: keys of 8 bytes, and a few times as much beside them


def report(logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """logits [O, V], rows and token_ids [n] int64 -> a report [n, NUM_REPORT_COLUMNS + 2 K] int32, see `logprobs`.

    K = min(num_top, V). Rows below O and ids below V are the caller's duty.
    """
    vocab_size = logits.shape[1]
    most = min(num_top, vocab_size)
    out = torch.empty(len(rows), num_columns(num_top, vocab_size), dtype=torch.int32, device=logits.device)
    at_once = max(ELEMENTS_AT_ONCE // vocab_size, 1)
    for first in range(0, len(rows), at_once):
        part = slice(first, first + at_once)
        _report(logits.index_select(0, rows[part]).float(), token_ids[part, None], most, out[part])
    return out


def _report(x: Tensor, token_ids: Tensor, most: int, out: Tensor) -> None:
    """x [n, V] fp32, token_ids [n, 1] -> out [n, NUM_REPORT_COLUMNS + 2 most]."""
    total = x.logsumexp(-1, keepdim=True)
    key = _order_key(x)
    rank = (key >= key.gather(1, token_ids)).sum(-1, keepdim=True)
    columns = [rank.int(), _bits(x.gather(1, token_ids) - total)]  # RANK, VALUE
    if most:
        top = x.shape[1] - 1 - (key.topk(most, dim=-1).values & 0xFFFFFFFF)
        columns += [top.int(), _bits(x.gather(1, top) - total)]
    assert len(columns) >= NUM_REPORT_COLUMNS
    torch.cat(columns, dim=1, out=out)


def _order_key(x: Tensor) -> Tensor:
    """[n, V] int64, all of a row different: larger where the logit is, and among equal ones where the id is lower."""
    bits = (x + 0.0).view(torch.int32)  # no negative zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) + torch.arange(x.shape[1] - 1, -1, -1, device=x.device)


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)
