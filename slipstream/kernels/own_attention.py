"""Attention of rows that bring their keys: norm, rotation, the KV write and attention of one layer in one launch.

Where every sequence has one tile, all that its rows see beyond the pages are the tile's own keys. So a program norms
and rotates its queries as it loads them, and the last split also the tile's keys, which it attends in registers and
(where they are to stay) stores. Steps with a prompt in them cannot: tiles of one sequence would wait for each other's
keys; they take `kernels.rope`, then `kernels.attention`, which are also what tests compare with. Called by the GPU
networks.

Letters in shapes: R rows, N slots, P pages of a slot, D blocks of n rows, nh, nkv, hd heads, KV heads, head size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention import (
    LOG2_E,
    VARYING,
    Launch,
    Tiles,
    Workspace,
    attend_pages,
    cut,
    finish,
    fold,
    launch_options,
    lookup,
    read_record,
)
from slipstream.kernels.early import after_previous, early

# Launches of two warps are for a full GPU: with so many registers a multiprocessor holds 6 programs, as many as of
# `_attention_kernel`. Left alone the compiler takes 236 for the loads before the loop, and only 4 fit.
_REGISTERS_OF_FEW_WARPS = 168


def decode_attention(
    qkv: Tensor, key_pages: Tensor, value_pages: Tensor, tiles: Tiles, page_table: Tensor, cos_sin: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float, kv_slots: Tensor, scale: float, window: int | None,
    workspace: Workspace, *, out: Tensor | None = None, launch: Launch | None = None,
) -> Tensor:  # fmt: skip
    """`rope_and_store`, then `paged_attention`, where no sequence has a second tile: [R, (nh + 2 nkv) hd] -> [R, nh * hd].

    qkv is as projected and stays so; keys and values of rows that belong to a tile go to kv_slots [R] int64. A row
    stands at its tile's position and so many further; beyond the table cos_sin it is turned as the table's last. The
    other arguments are those of the two.
    """
    return _run(
        qkv, key_pages, value_pages, tiles, page_table, cos_sin, q_norm, k_norm, eps, kv_slots, scale, window,
        workspace, out, launch,
    )  # fmt: skip


def block_attention(
    qkv: Tensor, key_pages: Tensor, value_pages: Tensor, blocks: Tiles, page_table: Tensor, cos_sin: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float, scale: float, window: int | None, workspace: Workspace,
    *, launch: Launch | None = None,
) -> Tensor:  # fmt: skip
    """A drafter's blocks, one after another: qkv [D * n, (nh + 2 nkv) hd] as projected -> [D * n, nh * hd].

    A block is one tile of n rows. Its rows see the KV of the pages before the position of the first row, and the whole
    block; on a sliding layer (`window`) only what lies within window - 1 before them, and the block causally. Nothing
    is stored. The other arguments are those of `decode_attention`.
    """
    return _run(
        qkv, key_pages, value_pages, blocks, page_table, cos_sin, q_norm, k_norm, eps, None, scale, window, workspace,
        None, launch,
    )  # fmt: skip


def _run(
    qkv: Tensor, key_pages: Tensor, value_pages: Tensor, tiles: Tiles, page_table: Tensor, cos_sin: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float, kv_slots: Tensor | None, scale: float,
    window: int | None, workspace: Workspace, out: Tensor | None, launch: Launch | None,
) -> Tensor:  # fmt: skip
    (num_rows, width), head_dim, num_kv_heads = qkv.shape, cos_sin.shape[1], key_pages.shape[2]
    num_heads = width // head_dim - 2 * num_kv_heads
    assert width % head_dim == 0 and num_heads % num_kv_heads == 0 and qkv.stride(1) == 1, (qkv.shape, qkv.stride())
    assert (q_norm is None) == (k_norm is None) and cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
    options = launch_options(num_heads, head_dim, qkv.dtype, key_pages, value_pages, tiles, workspace, launch)
    out = qkv.new_empty(num_rows, num_heads * head_dim) if out is None else out
    # Splits are left out: most have work in long contexts only, and others leave at once.
    num_programs = num_kv_heads * len(tiles.records)
    _own_rows_kernel[(num_kv_heads, tiles.num_splits, len(tiles.records))](
        out, qkv, key_pages, value_pages, tiles.records, page_table,
        cos_sin, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
        tiles.records if kv_slots is None else kv_slots,
        workspace.partials, workspace.stats, workspace.arrivals,
        qkv.stride(0), out.stride(0), page_table.stride(0), page_table.shape[1], len(cos_sin),
        window or 0, scale * LOG2_E, eps,
        HAS_WINDOW=window is not None, NORMS=q_norm is not None, STORES=kv_slots is not None,
        OWN_N=max(16, triton.next_power_of_2(tiles.block_q)), **options, **early(qkv, num_programs),
        maxnreg=_REGISTERS_OF_FEW_WARPS if options["num_warps"] == 2 else None,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=[*VARYING, "max_position", "overlaps"])
def _own_rows_kernel(
    out, qkv, key_pages, value_pages, records, page_table, cos_sin, q_norm, k_norm, kv_slots,
    partials, stats, arrivals,
    row_stride, out_stride, table_stride, table_columns, max_position, window, scale, eps, num_splits, min_split_log2,
    overlaps,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, OWN_N: tl.constexpr, CHUNK_N: tl.constexpr, HAS_WINDOW: tl.constexpr,
    NORMS: tl.constexpr, STORES: tl.constexpr, MERGED: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """As `_attention_kernel`, over the pages before the tile's rows; the last split also takes the rows themselves.

    OWN_N: rows of a tile, padded. STORES tells a decoding tile, whose rows are causal, from a drafter's block.
    """
    after_previous(overlaps, EARLY)
    kv_head, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row_base, num_rows, slot, start = read_record(records, tile)
    begin = tl.maximum(start - window + 1, 0) if HAS_WINDOW else 0
    first_chunk, num_chunks, share = cut(begin, start, num_splits, min_split_log2, CHUNK_N)
    if (num_rows == 0) | ((split > 0) & (split * share >= num_chunks)):
        return
    last_chunk = first_chunk + tl.minimum((split + 1) * share, num_chunks)
    first_chunk += split * share
    is_last_split = (split + 1) * share >= num_chunks

    # All that is asked for before the loop is asked for at once, what is needed last too.
    table = page_table + slot.to(tl.int64) * table_stride
    table_columns = tl.minimum(table_columns, tl.cdiv(last_chunk * CHUNK_N, PAGE_SIZE))
    pages = lookup(table, table_columns, first_chunk * CHUNK_N, tl.arange(0, CHUNK_N), PAGE_SIZE, CHUNK_N)
    packed, own, dim = tl.arange(0, ROWS), tl.arange(0, OWN_N), tl.arange(0, DIM)
    row = packed // GROUP
    kept_rows, own_rows = row < num_rows, own < tl.where(is_last_split, num_rows, 0)
    kept = kept_rows[:, None] & (dim < HEAD_DIM)[None, :]
    wanted = own_rows[:, None] & (dim < HEAD_DIM)[None, :]
    head_at = (kv_head * GROUP + packed % GROUP) * HEAD_DIM
    key_at = (GROUP * NUM_KV_HEADS + kv_head) * HEAD_DIM
    query_from = qkv + ((row_base + row) * row_stride + head_at)[:, None]
    key_from = qkv + ((row_base + own) * row_stride + key_at)[:, None]
    query, query_pair = _load_pairs(query_from, dim, kept, HEAD_DIM)
    key, key_pair = _load_pairs(key_from, dim, wanted, HEAD_DIM)
    own_values = tl.load(key_from + NUM_KV_HEADS * HEAD_DIM + dim[None, :], mask=wanted, other=0.0)
    query_cos, query_sin = _angles(cos_sin, tl.minimum(start + row, max_position - 1), dim, kept, HEAD_DIM)
    key_cos, key_sin = _angles(cos_sin, tl.minimum(start + own, max_position - 1), dim, wanted, HEAD_DIM)
    if STORES:
        own_slots = tl.load(kv_slots + row_base + own, mask=own_rows, other=0)
    if NORMS:
        # As large as the heads: rows of one element would bring a layout of their own, and all tiles into it.
        query_weight, query_pair_weight = _load_pairs(q_norm + tl.zeros_like(row)[:, None], dim, kept, HEAD_DIM)
        key_weight, key_pair_weight = _load_pairs(k_norm + tl.zeros_like(own)[:, None], dim, wanted, HEAD_DIM)
        query, query_pair = _norm(query, query_pair, query_weight, query_pair_weight, eps, HEAD_DIM)
        key, key_pair = _norm(key, key_pair, key_weight, key_pair_weight, eps, HEAD_DIM)
    # Rounded as they would be on their way through memory: later steps see the same keys.
    cached_type: tl.constexpr = key_pages.dtype.element_ty
    queries = (query * query_cos + query_pair * query_sin).to(cached_type)
    own_keys = (key * key_cos + key_pair * key_sin).to(cached_type)
    own_values = own_values.to(cached_type)

    position = (start + row)[:, None]
    acc, total, top = attend_pages(
        queries, position, start - 1, key_pages, value_pages, kv_head, pages, table, table_columns,
        begin, start, first_chunk, last_chunk, window, scale,
        HEAD_DIM, NUM_KV_HEADS, PAGE_SIZE, ROWS, DIM, CHUNK_N, HAS_WINDOW,
    )  # fmt: skip
    if is_last_split:
        seen = own_rows[None, :]
        if STORES or HAS_WINDOW:
            seen = seen & (own[None, :] <= row[:, None])
        if HAS_WINDOW:
            seen = seen & (own[None, :] > row[:, None] - window)
        acc, total, top = fold(queries, own_keys, own_values, seen, scale, acc, total, top)
        if STORES:
            place = ((own_slots * NUM_KV_HEADS + kv_head) * HEAD_DIM)[:, None] + dim[None, :]
            tl.store(key_pages + place, own_keys, mask=wanted)
            tl.store(value_pages + place, own_values, mask=wanted)

    out_at = out + ((row_base + row) * out_stride + head_at)[:, None] + dim[None, :]
    finish(
        out_at, acc, total, top, partials, stats, arrivals, tile * NUM_KV_HEADS + kv_head, split, num_splits,
        num_chunks, share, dim, kept, kept_rows, ROWS, DIM, MERGED,
    )  # fmt: skip


@triton.jit
def _load_pairs(at, dim, mask, HEAD_DIM: tl.constexpr):
    """Heads [rows, DIM] in fp32, and beside each element the other one of its pair, half a head away.

    A second load (the first-level cache has it) instead of halves: these keep the order in which pages are read, and
    heads whose half is no power of two need no tile of their own.
    """
    pair = (dim + HEAD_DIM // 2) % HEAD_DIM
    here, there = tl.load(at + dim[None, :], mask=mask, other=0.0), tl.load(at + pair[None, :], mask=mask, other=0.0)
    return here.to(tl.float32), there.to(tl.float32)


@triton.jit
def _angles(cos_sin, position, dim, mask, HEAD_DIM: tl.constexpr):
    """Cosines and sines of positions [rows], as each element [rows, DIM] wants them: y = x cos + pair sin."""
    half: tl.constexpr = HEAD_DIM // 2
    at = cos_sin + (position * HEAD_DIM)[:, None] + (dim % half)[None, :]
    cos, sin = tl.load(at, mask=mask, other=0.0), tl.load(at + half, mask=mask, other=0.0)
    return cos, tl.where((dim < half)[None, :], -sin, sin)


@triton.jit
def _norm(here, there, weight, pair_weight, eps, HEAD_DIM: tl.constexpr):
    scale = tl.rsqrt(tl.sum(here * here, 1) / HEAD_DIM + eps)[:, None]
    return here * scale * weight, there * scale * pair_weight
