"""Attention over paged KV in Triton: any mix of prefill, verify and decode rows, and a drafter's blocks.

One kernel does both. A program owns a *tile* (a few rows of one sequence), one KV head and one split of the keys; the
query heads that share the KV head are packed beside the rows, so that every key is read once for all of them. What a
launch needs beyond tensors are numbers of the padded step, so a launch can be captured in a CUDA graph: lengths are
read on the device. It does not write KV (`kernels.rope` does). Called by the GPU networks; the reference, for any
device, is `ops.attention`.

Letters in shapes: R rows, B sequences, N slots, P pages of a slot, T tiles, nh, nkv, hd heads, KV heads, head size.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SPLITS = 32
# Programs that splitting aims at, three for each of an H200's 132 multiprocessors. 32 x 4096 of Qwen3-8B, 8 rows each,
# 256 programs unsplit: 133.6 us; 512: 143, 1024: 156.
MAX_SPLIT_PROGRAMS = 384
# A GPU that is nearly empty gains by splits that would otherwise cost more in the reduction than they save.
FEW_PAIRS = 24


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Which rows each tile owns: rows first_row .. first_row + block_q - 1 of its sequence, where there are so many."""

    sequence: Tensor  # [T] int32, -1 = unused
    first_row: Tensor  # [T] int32, counted within the sequence's rows
    block_q: int  # rows of a tile
    num_splits: int  # programs that share a tile's keys


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """What programs of one tile hand each other. Launches on one stream may share one; made by `attention_workspace`."""

    partials: Tensor  # fp32: unscaled outputs of splits
    stats: Tensor  # fp32: running maximum and sum of every row of a split
    arrivals: Tensor  # int32: splits of a (tile, KV head) that are done; all 0 between launches


@dataclass(frozen=True, slots=True)
class Launch:
    """How a launch is cut; changes speed, never values beyond rounding."""

    block_n: int  # keys that a program handles at a time
    num_warps: int
    num_stages: int  # of the software pipeline: blocks of KV in flight, about
    min_split_tokens: int = 256  # no split is shorter; a power of two


def attention_workspace(
    num_heads: int, num_kv_heads: int, head_dim: int, max_block_q: int, device: torch.device | str,
    max_programs: int = MAX_SPLIT_PROGRAMS,
) -> Workspace:  # fmt: skip
    """Room for every launch whose splits come from `choose_splits` and whose tiles have at most `max_block_q` rows."""
    rows = max_programs * _packed_rows(max_block_q, num_heads // num_kv_heads)
    return Workspace(
        partials=torch.empty(rows * _padded(head_dim), dtype=torch.float32, device=device),
        stats=torch.empty(2 * rows, dtype=torch.float32, device=device),
        arrivals=torch.zeros(max_programs, dtype=torch.int32, device=device),
    )


def choose_splits(num_tiles: int, num_kv_heads: int, max_context_hint: int) -> int:
    """Splits that fill the GPU with `num_tiles` tiles whose contexts reach about `max_context_hint` tokens.

    A generous hint is harmless: a shorter context uses fewer splits, and the programs of the others leave at once.
    """
    pairs = max(1, num_tiles * num_kv_heads)
    by_load, by_length = MAX_SPLIT_PROGRAMS // pairs, max_context_hint // min_split_tokens(pairs)
    return max(1, min(by_load, by_length, MAX_SPLITS))


def min_split_tokens(pairs: int) -> int:
    """Of a launch with so many pairs of a tile and a KV head.

    H200, 1 x 300: Qwen3-8B 7.5 us by 64, 9.3 by 256; SmolLM2 6.1, 6.7. 32 x 300 of SmolLM2 (96 pairs): 8.9, 8.0.
    """
    return 64 if pairs <= FEW_PAIRS else 256


def paged_attention(
    q: Tensor, key_pages: Tensor, value_pages: Tensor, tiles: Tiles, cu_rows: Tensor, slots: Tensor, context: Tensor,
    page_table: Tensor, scale: float, window: int | None, workspace: Workspace, *, out: Tensor | None = None,
    launch: Launch | None = None,
) -> Tensor:  # fmt: skip
    """q [R, nh, hd] (its heads side by side, any row stride), pages [pages, page_size, nkv, hd] -> [R, nh * hd].

    cu_rows [B + 1], slots [B], context [N + 1], page_table [N + 1, P], all int64. Row i of sequence b stands at position
    context[slots[b]] + i and sees positions up to its own, of the last `window` only where one is given (the row itself
    counts). KV of the rows is stored already. Rows that belong to no tile are not written.
    """
    out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2]) if out is None else out
    rows = _Rows(q, out, tiles.sequence, tiles.first_row, cu_rows, len(tiles.sequence), tiles.block_q, tiles.num_splits)
    _run(rows, None, key_pages, value_pages, slots, context, page_table, scale, window, workspace, launch)
    return out


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor, context: Tensor,
    page_table: Tensor, scale: float, window: int | None, workspace: Workspace, num_splits: int, *,
    launch: Launch | None = None,
) -> Tensor:  # fmt: skip
    """A drafter's blocks: q [D, n, nh, hd], k, v [D, n, nkv, hd] (views of one tensor or alike) -> [D, n, nh * hd].

    Row i of block b stands at position context[slots[b]] + i. It sees the KV of the pages before the context's end and
    the whole block; on a sliding layer (`window`) only what lies within window - 1 before it, and the block causally.
    """
    num_blocks, n, num_heads, head_dim = q.shape
    assert k.stride() == v.stride(), f"strides {k.stride()} and {v.stride()}"
    out = q.new_empty(num_blocks, n, num_heads * head_dim)
    flat = [_flat(rows) for rows in (q, k, v)]
    rows = _Rows(flat[0], out.view(num_blocks * n, -1), slots, slots, slots, num_blocks, n, num_splits)
    own = (flat[1], flat[2])
    _run(rows, own, key_pages, value_pages, slots, context, page_table, scale, window, workspace, launch)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The query side of a launch; the tile tensors are read only where there are no blocks."""

    q: Tensor  # [R, nh, hd]
    out: Tensor  # [R, nh * hd]
    tile_sequence: Tensor
    tile_first_row: Tensor
    cu_rows: Tensor
    num_tiles: int
    block_q: int
    num_splits: int


def _run(
    rows: _Rows, own: tuple[Tensor, Tensor] | None, key_pages: Tensor, value_pages: Tensor, slots: Tensor,
    context: Tensor, page_table: Tensor, scale: float, window: int | None, workspace: Workspace, launch: Launch | None,
) -> None:  # fmt: skip
    _, num_heads, head_dim = rows.q.shape
    _, page_size, num_kv_heads, _ = key_pages.shape
    group = num_heads // num_kv_heads
    packed_rows, padded_dim = _packed_rows(rows.block_q, group), _padded(head_dim)
    assert rows.q.stride()[1:] == (head_dim, 1), f"heads of q must stand side by side, strides {rows.q.stride()}"
    assert key_pages.is_contiguous() and value_pages.is_contiguous()
    pairs = rows.num_tiles * num_kv_heads
    assert rows.num_splits == 1 or _fits(workspace, pairs, rows.num_splits, packed_rows, padded_dim), (
        f"the workspace is too small for {pairs} x {rows.num_splits} programs of {packed_rows} rows"
    )
    launch = launch or choose_launch(packed_rows, head_dim, rows.q.dtype, pairs)
    own_keys, own_values = own or (rows.q, rows.q)
    _attention_kernel[(num_kv_heads, rows.num_splits, rows.num_tiles)](
        rows.out, rows.q, key_pages, value_pages, own_keys, own_values,
        rows.tile_sequence, rows.tile_first_row, rows.cu_rows, slots, context, page_table,
        workspace.partials, workspace.stats, workspace.arrivals,
        rows.q.stride(0), rows.out.stride(0), own_keys.stride(0), page_table.stride(0), page_table.shape[1],
        rows.block_q, window or 0, rows.num_splits, -(-launch.min_split_tokens // launch.block_n), scale * math.log2(math.e),
        GROUP=group, HEAD_DIM=head_dim, NUM_KV_HEADS=num_kv_heads, PAGE_SIZE=page_size, ROWS=packed_rows, DIM=padded_dim,
        BLOCK_N=launch.block_n, HAS_WINDOW=window is not None,
        OWN_N=0 if own is None else max(16, triton.next_power_of_2(rows.block_q)),
        # Loads of this many splits in flight when they are merged, but for the registers that the main loop has anyway.
        MERGE_UNROLL=max(1, min(4, 2048 * launch.num_warps // (packed_rows * padded_dim))),
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip


def choose_launch(packed_rows: int, head_dim: int, dtype: torch.dtype, pairs: int) -> Launch:
    """For `pairs` of a tile and a KV head, each with packed_rows (query heads x rows) queries.

    Measured on an H200 (bench/attention.py), us by [block_n, warps, stages] and splits.
    """
    shortest, wide = min_split_tokens(pairs), _padded(head_dim) > 64
    if dtype == torch.float32:  # no tensor cores, twice the bytes: for parity, not for speed
        return Launch(16 if packed_rows > 64 else 32, 4, 2, shortest)
    if wide and packed_rows > 64:
        # Qwen3-8B, 17 rows each, 32 x 4096: 227; [64,4,3] 523, where sums of 128 x 128 do not fit into registers.
        return Launch(64, 8, 3, shortest)
    if wide or packed_rows > 32:
        # Qwen3-8B, 32 x 4096: 127.7, [64,2,3] 142; with 8 rows each 133.6, [64,2,3] 200. 32 x 256: 13.0, [64,2,3] 14.5,
        # [128,4,2] 14.1. 1 x 300: 7.6, [128,4,3] 7.5. 256 x 256: 74.4, [128,4,2] 73.7. Prefill 4 x 2048, tiles of 16
        # rows: 453; tiles of 32: [32,4,3] 460. 1 x 4096 by 16 splits: 17.8; 1 x 32768 by 32: 44.4.
        return Launch(64, 4, 3, shortest)
    if pairs > MAX_SPLIT_PROGRAMS:
        # SmolLM2, 256 x 300: 20.7, [64,2,3] 20.1; with 8 rows each 23.8, [64,4,3] 28.8; its drafter 25.0.
        return Launch(32, 2, 4, shortest)
    # SmolLM2, 32 x 300: 8.0, [64,4,3] 8.7; with 8 rows each 9.0; its drafter 9.5. 1 x 300 by 4 splits: 6.1, [64,4,3]
    # 6.5; with 8 rows 6.9; its drafter 7.5, [64,4,4] 7.2. 32 x 2048, 8 rows: [128,4,2] by 4 splits 23.8, [32,2,4] 25.3.
    return Launch(128, 4, 3, shortest)


def _flat(rows: Tensor) -> Tensor:
    """[D, n, heads, hd] -> [D * n, heads, hd] without a copy."""
    num_blocks, n, heads, head_dim = rows.shape
    assert num_blocks == 1 or rows.stride(0) == n * rows.stride(1), f"blocks must follow each other, {rows.stride()}"
    assert rows.stride()[2:] == (head_dim, 1), f"heads must stand side by side, strides {rows.stride()}"
    return rows.as_strided((num_blocks * n, heads, head_dim), rows.stride()[1:])


def _packed_rows(block_q: int, group: int) -> int:
    """Rows of a program's matrices: all heads of the group for all rows of a tile; a product needs 16."""
    return max(16, int(triton.next_power_of_2(block_q * group)))


def _padded(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))


def _fits(workspace: Workspace, pairs: int, num_splits: int, packed_rows: int, padded_dim: int) -> bool:
    rows = pairs * num_splits * packed_rows
    return (
        pairs <= len(workspace.arrivals)
        and 2 * rows <= len(workspace.stats)
        and rows * padded_dim <= len(workspace.partials)
    )


# Arguments that differ between launches of one engine: specialising on 1 or on multiples of 16 would compile variants.
_VARYING = ["table_stride", "table_columns", "block_q", "window", "num_splits", "min_share"]


@triton.jit(do_not_specialize=_VARYING)
def _attention_kernel(
    out, q, key_pages, value_pages, own_keys, own_values,
    tile_sequence, tile_first_row, cu_rows, slots, context, page_table,
    partials, stats, arrivals,
    q_stride, out_stride, own_stride, table_stride, table_columns,
    block_q, window, num_splits, min_share, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, OWN_N: tl.constexpr,
    MERGE_UNROLL: tl.constexpr,
):  # fmt: skip
    """OWN_N = 0: tiles of rows; else blocks of block_q rows that also see each other, padded to OWN_N keys.

    `scale` includes log2(e): all exponentials are of base 2.
    """
    kv_head, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # What the tile is: its sequence, where its rows begin, how many there are.
    if OWN_N > 0:
        sequence, first_row, row_base = tile, 0, tile.to(tl.int64) * block_q
        num_rows = block_q
    else:
        sequence, first_row = tl.load(tile_sequence + tile), tl.load(tile_first_row + tile)
        if sequence < 0:
            return
        row_base = tl.load(cu_rows + sequence) + first_row
        num_rows = tl.minimum(block_q, (tl.load(cu_rows + sequence + 1) - row_base).to(tl.int32))
    slot = tl.load(slots + sequence)
    length = tl.load(context + slot).to(tl.int32)
    table = page_table + slot * table_stride

    # Its keys: positions begin .. end - 1, cut into blocks, and the share of them that is this program's.
    end = length if OWN_N > 0 else length + first_row + num_rows
    begin = tl.maximum(length + first_row - window + 1, 0) if HAS_WINDOW else 0
    num_blocks = tl.cdiv(end, BLOCK_N) - begin // BLOCK_N
    # As many splits as have min_share blocks each, then equal shares; rounding up may leave the last ones without work.
    num_used = tl.maximum(tl.minimum(num_splits, num_blocks // min_share), 1)
    share = tl.maximum(tl.cdiv(num_blocks, num_used), 1)
    num_used = tl.maximum(tl.cdiv(num_blocks, share), 1)
    if split >= num_used:
        return
    first_block = begin // BLOCK_N + split * share
    last_block = tl.minimum(first_block + share, tl.cdiv(end, BLOCK_N))

    packed = tl.arange(0, ROWS)
    row, dim = packed // GROUP, tl.arange(0, DIM)
    kept = (row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    head_at = (kv_head * GROUP + packed % GROUP) * HEAD_DIM
    rows = tl.load(q + ((row_base + row) * q_stride + head_at)[:, None] + dim[None, :], mask=kept, other=0.0)
    position = length + first_row + row

    acc = tl.zeros([ROWS, DIM], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    # Finite, so that a row which sees nothing of a block subtracts no infinities.
    top = tl.full([ROWS], -1e30, tl.float32)
    offset = tl.arange(0, BLOCK_N)
    pages = _lookup(table, table_columns, first_block * BLOCK_N, offset, PAGE_SIZE, BLOCK_N)
    for block in range(first_block, last_block):
        at = block * BLOCK_N + offset
        kv_row = pages.to(tl.int64) * PAGE_SIZE + at % PAGE_SIZE
        # The next block's pages are looked up a block ahead: KV loads then wait for no other load.
        pages = _lookup(table, table_columns, (block + 1) * BLOCK_N, offset, PAGE_SIZE, BLOCK_N)
        there = at < end
        if HAS_WINDOW:
            there = there & (at >= begin)
        element = (kv_row * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]
        seen = there[None, :]
        if OWN_N == 0:
            seen = seen & (at[None, :] <= position[:, None])
        if HAS_WINDOW:
            seen = seen & (at[None, :] > position[:, None] - window)
        inside = there[:, None] & (dim < HEAD_DIM)[None, :]
        acc, total, top = _fold(rows, key_pages + element, value_pages + element, inside, seen, scale, acc, total, top)

    if OWN_N > 0:  # noqa: SIM102  (known when compiling; joined by `and` it would not be)
        if split == num_used - 1:  # the last split also takes the block's own keys
            other = tl.arange(0, OWN_N)
            element = ((row_base + other) * own_stride + kv_head * HEAD_DIM)[:, None] + dim[None, :]
            seen = (other < block_q)[None, :]
            if HAS_WINDOW:
                seen = seen & (other[None, :] <= row[:, None]) & (other[None, :] > row[:, None] - window)
            inside = (other < block_q)[:, None] & (dim < HEAD_DIM)[None, :]
            acc, total, top = _fold(
                rows, own_keys + element, own_values + element, inside, seen, scale, acc, total, top
            )

    out_at = out + ((row_base + row) * out_stride + head_at)[:, None] + dim[None, :]
    if num_used == 1:
        tl.store(out_at, acc / total[:, None], mask=kept)
    else:
        pair = tile * NUM_KV_HEADS + kv_head
        place = pair.to(tl.int64) * num_splits * ROWS + packed  # of the first split's rows in the workspace
        kept_rows = row < num_rows
        _publish(partials, stats, place + split * ROWS, dim, kept, kept_rows, acc, total, top, DIM)
        # Every thread's stores, the barrier, one thread's release: whoever acquires this count sees them all.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu") == num_used - 1:
            tl.store(arrivals + pair, 0)  # all have arrived: ready for the next launch
            acc, total = _merge(partials, stats, place, dim, kept, kept_rows, num_used, ROWS, DIM, MERGE_UNROLL)
            tl.store(out_at, acc / total[:, None], mask=kept)


@triton.jit
def _lookup(table, columns, first, offset, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page numbers of positions first .. first + BLOCK_N - 1, int32; the null page beyond the table.

    Numbers are loaded one by one where that is possible: a vector of them would pass through shared memory.
    """
    if PAGE_SIZE % BLOCK_N == 0:
        pages = _page(table, columns, first // PAGE_SIZE) + tl.zeros_like(offset)
    elif BLOCK_N % PAGE_SIZE == 0 and BLOCK_N <= 8 * PAGE_SIZE:
        pages = tl.zeros_like(offset)
        for i in tl.static_range(BLOCK_N // PAGE_SIZE):
            pages = tl.where(offset // PAGE_SIZE == i, _page(table, columns, first // PAGE_SIZE + i), pages)
    else:
        pages = _page(table, columns, (first + offset) // PAGE_SIZE)
    return pages


@triton.jit
def _page(table, columns, column):
    return tl.load(table + column, mask=column < columns, other=0).to(tl.int32)


@triton.jit
def _fold(rows, key_at, value_at, inside, seen, scale, acc, total, top):
    """Take a block of keys into the running softmax: acc [ROWS, DIM], total and top [ROWS], all fp32."""
    keys = tl.load(key_at, mask=inside, other=0.0)
    values = tl.load(value_at, mask=inside, other=0.0)
    scores = tl.dot(rows, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    decay = tl.exp2(top - new_top)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return acc, total * decay + tl.sum(weights, 1), new_top


@triton.jit
def _publish(partials, stats, place, dim, kept, kept_rows, acc, total, top, DIM: tl.constexpr):
    tl.store(partials + place[:, None] * DIM + dim[None, :], acc, mask=kept, cache_modifier=".cg")
    tl.store(stats + 2 * place, top, mask=kept_rows, cache_modifier=".cg")
    tl.store(stats + 2 * place + 1, total, mask=kept_rows, cache_modifier=".cg")


@triton.jit
def _merge(
    partials, stats, place, dim, kept, kept_rows, num_used, ROWS: tl.constexpr, DIM: tl.constexpr, UNROLL: tl.constexpr
):
    """Sum the splits in their order, whoever arrived last: the result does not depend on timing.

    The loads go past the first-level cache (".cg"), which knows nothing of other multiprocessors' stores.
    """
    acc = tl.zeros([ROWS, DIM], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], -1e30, tl.float32)
    for _ in tl.range(0, num_used, loop_unroll_factor=UNROLL):  # that many splits' loads in flight
        part = tl.load(partials + place[:, None] * DIM + dim[None, :], mask=kept, other=0.0, cache_modifier=".cg")
        part_top = tl.load(stats + 2 * place, mask=kept_rows, other=-1e30, cache_modifier=".cg")
        part_total = tl.load(stats + 2 * place + 1, mask=kept_rows, other=1.0, cache_modifier=".cg")
        new_top = tl.maximum(top, part_top)
        decay, weight = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
        acc = acc * decay[:, None] + part * weight[:, None]
        total = total * decay + part_total * weight
        top = new_top
        place += ROWS
    return acc, total
