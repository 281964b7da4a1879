"""Ragged paged attention against the definition, row by row, in fp32."""

import pytest
import torch
from torch import Tensor

from slipstream.ops.attention import Segment, block_attention, paged_attention, plan_block, plan_paged

PAGE, HEADS, KV_HEADS, DIM = 4, 6, 2, 8


def one_row(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q [heads, dim] over keys, values [L, kv_heads, dim], all visible."""
    group = q.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    weights = torch.einsum("hd,lhd->hl", q, keys).mul(DIM**-0.5).softmax(-1)
    return torch.einsum("hl,lhd->hd", weights, values).flatten()


def paged(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Random KV of the sequences in shuffled pages; what nobody may see is NaN, but for the null page."""
    num_pages = 2 + sum(-(-n // PAGE) for n in lengths)
    keys, values = (torch.full((num_pages, PAGE, KV_HEADS, DIM), float("nan")) for _ in range(2))
    keys[0] = values[0] = 0
    order = iter((torch.randperm(num_pages - 2) + 2).tolist())
    table = torch.zeros(len(lengths), 8, dtype=torch.int64)
    slots = []
    for b, length in enumerate(lengths):
        count = -(-length // PAGE)
        table[b, :count] = torch.tensor([next(order) for _ in range(count)])
        keys[table[b, :count]] = values[table[b, :count]] = 0  # a page is zeroed when it gets an owner
        positions = torch.arange(length)
        slots.append(table[b, positions // PAGE] * PAGE + positions % PAGE)
        for pool in (keys, values):
            pool.view(-1, KV_HEADS, DIM)[slots[b]] = torch.randn(length, KV_HEADS, DIM)
    return keys, values, table, slots


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("bounds", ["tight", "loose", "split"])
def test_rows_see_their_past_and_nothing_else(window: int | None, bounds: str) -> None:
    torch.manual_seed(0)
    context, rows = torch.tensor([5, 0, 11]), torch.tensor([3, 9, 1])
    keys, values, table, slots = paged((context + rows).tolist())
    cu_rows = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
    sequence = torch.repeat_interleave(torch.arange(3), rows)
    offset = torch.arange(13) - cu_rows[sequence]
    segments = {
        "tight": (Segment(0, 1, 3, 8), Segment(1, 2, 9, 9), Segment(2, 3, 1, 12)),
        "loose": (Segment(0, 3, 10, 20),),
        "split": (Segment(0, 2, 9, 12), Segment(2, 3, 4, 16)),
    }[bounds]
    plan = plan_paged(segments, cu_rows, context, table, sequence, offset, PAGE, frozenset([window]), torch.float32)
    q = torch.randn(13, HEADS, DIM)
    out = paged_attention(q, keys, values, plan, DIM**-0.5, window)
    for row in range(13):
        b = int(sequence[row])
        last = int(context[b] + offset[row])
        seen = slots[b][0 if window is None else max(0, last - window + 1) : last + 1]
        expected = one_row(q[row], keys.view(-1, KV_HEADS, DIM)[seen], values.view(-1, KV_HEADS, DIM)[seen])
        torch.testing.assert_close(out[row], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 4])
def test_blocks_see_their_context_and_themselves(window: int | None) -> None:
    torch.manual_seed(1)
    context, n = torch.tensor([6, 0, 9]), 3
    keys, values, table, slots = paged(context.tolist())
    positions = context[:, None] + torch.arange(n)
    plan = plan_block(context, table, positions, 12, PAGE, frozenset([window]), torch.float32)
    q, k, v = torch.randn(3, n, HEADS, DIM), torch.randn(3, n, KV_HEADS, DIM), torch.randn(3, n, KV_HEADS, DIM)
    out = block_attention(q, k, v, keys, values, plan, DIM**-0.5, window)
    for b in range(3):
        for i in range(n):
            s = int(context[b])
            first = 0 if window is None else max(0, s + i - window + 1)
            inside = slice(0, n) if window is None else slice(max(0, i - window + 1), i + 1)
            all_keys = torch.cat([keys.view(-1, KV_HEADS, DIM)[slots[b][first:s]], k[b, inside]])
            all_values = torch.cat([values.view(-1, KV_HEADS, DIM)[slots[b][first:s]], v[b, inside]])
            torch.testing.assert_close(out[b, i], one_row(q[b, i], all_keys, all_values), rtol=1e-5, atol=1e-6)
