"""Attention alone at long contexts: what verify rows cost beside decode rows, and how fast KV is read.

The kernel of `slipstream.kernels.attention` on a GPU; on a CPU the torch reference, so that the phase runs there too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.gpu_parts.goals import Report, at_least, at_most, ratio
from bench.gpu_parts.scale import Scale
from bench.gpu_parts.session import Clock, Session
from slipstream.lab.ceilings import copy_gb_per_s, graph_ms, median_ms
from slipstream.ops.attention import Segment, paged_attention, plan_paged

PAGE_SIZE = 16


def run(session: Session, scale: Scale, clock: Clock) -> Report:
    device = session.models.device
    dtype = session.models.dtype
    count, context = scale.attention
    copy = copy_gb_per_s(device)
    times = {w: attention_ms(device, dtype, scale, w) for w in sorted({0, *(w for w in (1, 3, 7, 15) if w < context)})}
    _, kv_heads, size = scale.attention_heads
    kv_bytes = 2 * count * context * kv_heads * size * dtype.itemsize
    speed = {w: kv_bytes / 1e6 / ms for w, ms in times.items()}
    report = {
        "sequences": count, "context": context, "heads": list(scale.attention_heads), "copy_gb_per_s": copy,
        "ms_by_width": {str(w): ms for w, ms in times.items()}, "kv_gb_per_s": {str(w): v for w, v in speed.items()},
    }  # fmt: skip
    where = f"attention, {count} x {context} context"
    return report, [
        at_most(f"{where}: w=7 / w=0", ratio(times[7], times[0]), 1.3),
        at_least(f"{where}: w=0: KV bytes / time, of copy", speed[0] / copy, 0.6),
        at_least(f"{where}: w=7: KV bytes / time, of copy", speed[7] / copy, 0.6),
    ]


def attention_ms(device: torch.device, dtype: torch.dtype, scale: Scale, width: int) -> float:
    """One layer: `count` sequences of width + 1 rows after `context` tokens each; pages lie scattered."""
    count, context = scale.attention
    heads, kv_heads, size = scale.attention_heads
    rows, pages_each = width + 1, -(-(context + width + 1) // PAGE_SIZE)
    num_pages = 2 + count * pages_each
    keys, values = (torch.randn(num_pages, PAGE_SIZE, kv_heads, size, device=device, dtype=dtype) for _ in range(2))
    order = torch.randperm(count * pages_each, device=device) + 2
    table = torch.cat([order.view(count, pages_each), torch.zeros(1, pages_each, dtype=torch.int64, device=device)])
    contexts = torch.tensor([context] * count + [0], device=device)
    q = torch.randn(count * rows, heads, size, device=device, dtype=dtype)
    cu_rows = torch.arange(count + 1, device=device) * rows
    call = _kernel if device.type == "cuda" else _reference
    attend = call(q, keys, values, cu_rows, contexts, table, rows)
    return graph_ms(attend) if device.type == "cuda" else median_ms(attend, device)


def _kernel(
    q: Tensor, keys: Tensor, values: Tensor, cu_rows: Tensor, contexts: Tensor, table: Tensor, rows: int
) -> Callable[[], Any]:
    from slipstream.kernels import attention

    count, (_, _, kv_heads, size) = len(cu_rows) - 1, keys.shape
    block_q = 1 << (rows - 1).bit_length()
    slots = torch.arange(count, device=q.device)
    records = torch.stack([cu_rows[:-1], torch.full_like(slots, rows), slots, contexts[:-1]], 1).int()
    tiles = attention.Tiles(records, block_q, attention.choose_splits(count, kv_heads, table.shape[1] * PAGE_SIZE))
    workspace = attention.attention_workspace(q.shape[1], kv_heads, size, block_q, q.device)
    return lambda: attention.paged_attention(q, keys, values, tiles, table, size**-0.5, None, workspace)


def _reference(
    q: Tensor, keys: Tensor, values: Tensor, cu_rows: Tensor, contexts: Tensor, table: Tensor, rows: int
) -> Callable[[], Any]:
    count = len(cu_rows) - 1
    at = torch.arange(count * rows, device=q.device)
    segment = Segment(0, count, rows, table.shape[1] * PAGE_SIZE)
    plan = plan_paged(
        (segment,),
        cu_rows,
        contexts[:count],
        table[:count],
        at // rows,
        at % rows,
        PAGE_SIZE,
        frozenset([None]),
        q.dtype,
    )
    return lambda: paged_attention(q, keys, values, plan, q.shape[2] ** -0.5, None)
