"""Ragged paged attention: any mix of prefill, verify and decode rows, and the drafter's blocks, in plain torch.

Rows of one sequence stand side by side. Sequences are grouped into *segments* whose bounds the host knows (upper
bounds of rows and of KV length); inside a segment everything is padded to those bounds and masked, so that no length is ever
read back from the device. Masks and indices depend on the step alone: they are made once per step by `plan_paged` and
`plan_block` and used in every layer. Query heads that share a KV head are packed into the row axis, so KV is read once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Segment:
    """Sequences first..last-1, each with at most `max_rows` rows and `max_kv` tokens of KV, its own rows included."""

    first: int
    last: int
    max_rows: int
    max_kv: int


@dataclass(frozen=True, slots=True)
class _SegmentPlan:
    row_index: Tensor  # [n, max_rows] rows of q, padded
    pages: Tensor  # [n, pages]
    masks: dict[int | None, Tensor]  # window -> additive [n, 1, max_rows, L]


@dataclass(frozen=True, slots=True)
class PagedPlan:
    segments: tuple[_SegmentPlan, ...]
    ragged_index: Tensor  # [R] where each row stands in the concatenated padded outputs


def plan_paged(
    segments: tuple[Segment, ...], cu_rows: Tensor, context: Tensor, page_table: Tensor, row_sequence: Tensor,
    row_offset: Tensor, page_size: int, windows: frozenset[int | None], dtype: torch.dtype,
) -> PagedPlan:  # fmt: skip
    """cu_rows [B + 1], context [B] (KV before the rows), page_table [B, P], row_sequence and row_offset [R]."""
    num_rows = row_sequence.shape[0]
    plans, bases, base = [], [], 0
    for segment in segments:
        span = slice(segment.first, segment.last)
        steps = torch.arange(segment.max_rows, device=cu_rows.device)
        row_index = (cu_rows[:-1][span, None] + steps).clamp_(max=num_rows - 1)
        num_pages = -(-segment.max_kv // page_size)
        positions = context[span, None] + steps  # [n, max_rows]
        keys_at = torch.arange(num_pages * page_size, device=cu_rows.device)
        masks = {window: _causal_mask(positions, keys_at, window, dtype) for window in windows}
        plans.append(_SegmentPlan(row_index, page_table[span, :num_pages], masks))
        count = segment.last - segment.first
        bases.append(base + torch.arange(count, device=cu_rows.device) * segment.max_rows)
        base += count * segment.max_rows
    return PagedPlan(tuple(plans), torch.cat(bases)[row_sequence] + row_offset)


def paged_attention(
    q: Tensor, key_pages: Tensor, value_pages: Tensor, plan: PagedPlan, scale: float, window: int | None
) -> Tensor:
    """q [R, heads, head_dim]; pages [num_pages, page_size, kv_heads, head_dim], the rows' own KV written.

    Returns [R, heads * head_dim]. Row i of a sequence sees positions up to its own, within the window (window counts the row itself).
    """
    outputs = []
    for segment in plan.segments:
        n, rows = segment.row_index.shape
        keys = _gather(key_pages, segment.pages)
        values = _gather(value_pages, segment.pages)
        mask = segment.masks[window]
        outputs.append(packed_attention(q[segment.row_index], keys, values, mask, scale).reshape(n * rows, -1))
    padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return padded.index_select(0, plan.ragged_index)


@dataclass(frozen=True, slots=True)
class BlockPlan:
    pages: Tensor  # [N, pages]
    masks: dict[int | None, Tensor]  # window -> additive [N, 1, n, L + n]


def plan_block(
    context: Tensor, page_table: Tensor, positions: Tensor, max_context: int, page_size: int,
    windows: frozenset[int | None], dtype: torch.dtype,
) -> BlockPlan:  # fmt: skip
    """context [N] tokens of context KV, at most max_context; page_table [N, P]; positions [N, n] of the block's rows."""
    num_pages = max(1, -(-max_context // page_size))
    keys_at = torch.arange(num_pages * page_size, device=context.device)
    return BlockPlan(
        page_table[:, :num_pages],
        {window: _block_mask(context, positions, keys_at, window, dtype) for window in windows},
    )


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, key_pages: Tensor, value_pages: Tensor, plan: BlockPlan, scale: float,
    window: int | None,
) -> Tensor:  # fmt: skip
    """A drafter's block: q [N, n, heads, head_dim], k, v [N, n, kv_heads, head_dim] -> [N, n, heads * head_dim].

    Every row sees the context and the whole block; on a sliding layer (window W) only what lies within W - 1 before
    its position, and the block causally.
    """
    keys = torch.cat([_gather(key_pages, plan.pages), k], dim=1)
    values = torch.cat([_gather(value_pages, plan.pages), v], dim=1)
    return packed_attention(q, keys, values, plan.masks[window], scale)


def packed_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q [N, n, heads, head_dim], keys, values [N, L, kv_heads, head_dim], additive mask [N, 1, n, L] -> like q, flat."""
    batch, rows, heads, head_dim = q.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    packed = q.view(batch, rows, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(batch, kv_heads, group * rows, head_dim)
    if group > 1 and rows > 1:
        mask = mask.repeat(1, 1, group, 1)  # rows vary fastest, as in `packed`
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    out = scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
    return out.view(batch, kv_heads, group, rows, head_dim).permute(0, 3, 1, 2, 4).reshape(batch, rows, -1)


def _gather(pages: Tensor, table: Tensor) -> Tensor:
    """[num_pages, page_size, h, d] by table [N, P] -> [N, P * page_size, h, d]."""
    return pages.index_select(0, table.flatten()).view(table.shape[0], -1, *pages.shape[2:])


def _causal_mask(positions: Tensor, keys_at: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    seen = keys_at <= positions[..., None]
    if window is not None:
        seen = seen & (keys_at > positions[..., None] - window)
    return _additive(seen, dtype)


def _block_mask(context: Tensor, positions: Tensor, keys_at: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    n = positions.shape[1]
    seen = (keys_at < context[:, None])[:, None, :].expand(-1, n, -1)
    inside = torch.ones(n, n, dtype=torch.bool, device=context.device)
    if window is not None:
        # The lower bound of a row's window is its own position minus W - 1, in the block as in the context.
        seen = seen & (keys_at > positions[..., None] - window)
        inside = inside.tril() & inside.triu(1 - window)
    return _additive(torch.cat([seen, inside.expand(len(context), -1, -1)], dim=-1), dtype)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """bool [N, n, L] -> 0 / -inf [N, 1, n, L]."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))[:, None]
