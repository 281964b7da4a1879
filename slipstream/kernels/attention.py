"""Attention over paged KV in Triton: any mix of prefill, verify and decode rows.

A program owns a *tile* (a few rows of one sequence), one KV head and one split of the keys; the query heads that share
the KV head are packed beside the rows, so that every key is read once for all of them. What a launch needs beyond
tensors are numbers of the padded step, so a launch can be captured in a CUDA graph: lengths are read on the device. It
does not write KV (`kernels.rope` does). Called by the GPU networks; `kernels.own_attention`, for rows that bring their
keys, shares its parts. The reference, for any device, is `ops.attention`.

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
# Splits that may be as short as a launch allows, merged in one go; each more must bring FURTHER_TOKENS. On an H200
# 1 x 4096 of Qwen3-8B is best in 16 splits, 1 x 300 in 4.
FIRST_SPLITS, FURTHER_TOKENS = 4, 256
_FIRST_SPLITS, _FURTHER_TOKENS = tl.constexpr(FIRST_SPLITS), tl.constexpr(FURTHER_TOKENS)
# A GPU that is nearly empty gains by splits that would otherwise cost more in the reduction than they save.
FEW_PAIRS = 24
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Which rows each tile owns, and all else that its programs want to know before they look at page tables.

    One record, so that no load of it waits for another: a step with a short context is a chain of waits for memory.
    """

    records: Tensor  # [T, 4] int32: first row in q, number of rows (0 = unused), slot, position of the first row
    block_q: int  # rows of a tile at most
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

    chunk_n: int  # keys that a program handles at a time
    num_warps: int
    num_stages: int  # of the software pipeline: chunks of keys in flight, about
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
    by_length = min(max_context_hint // min_split_tokens(pairs), FIRST_SPLITS + max_context_hint // FURTHER_TOKENS)
    return max(1, min(MAX_SPLIT_PROGRAMS // pairs, by_length, MAX_SPLITS))


def min_split_tokens(pairs: int) -> int:
    """Of a launch with so many pairs of a tile and a KV head.

    H200, 1 x 300: Qwen3-8B 7.5 us by 64, 9.3 by 256; SmolLM2 6.1, 6.7. 32 x 300 of SmolLM2 (96 pairs): 8.9, 8.0.
    """
    return 64 if pairs <= FEW_PAIRS else 256


def paged_attention(
    q: Tensor, key_pages: Tensor, value_pages: Tensor, tiles: Tiles, page_table: Tensor, scale: float,
    window: int | None, workspace: Workspace, *, out: Tensor | None = None, launch: Launch | None = None,
) -> Tensor:  # fmt: skip
    """q [R, nh, hd] (its heads side by side, any row stride), pages [pages, page_size, nkv, hd] -> [R, nh * hd].

    page_table [N + 1, P] int64. A row sees the positions of its slot up to its own, of the last `window` only where one
    is given (the row itself counts). KV of the rows is stored already. Rows that belong to no tile are not written.
    """
    _, num_heads, head_dim = q.shape
    assert q.stride()[1:] == (head_dim, 1), f"heads of q must stand side by side, strides {q.stride()}"
    options = launch_options(num_heads, head_dim, q.dtype, key_pages, value_pages, tiles, workspace, launch)
    out = q.new_empty(len(q), num_heads * head_dim) if out is None else out
    _attention_kernel[(key_pages.shape[2], tiles.num_splits, len(tiles.records))](
        out, q, key_pages, value_pages, tiles.records, page_table,
        workspace.partials, workspace.stats, workspace.arrivals,
        q.stride(0), out.stride(0), page_table.stride(0), page_table.shape[1],
        window or 0, scale * LOG2_E, HAS_WINDOW=window is not None, **options,
    )  # fmt: skip
    return out


def launch_options(
    num_heads: int, head_dim: int, dtype: torch.dtype, key_pages: Tensor, value_pages: Tensor, tiles: Tiles,
    workspace: Workspace, launch: Launch | None,
) -> dict[str, int]:  # fmt: skip
    """What every kernel over pages is compiled for and cut by; asserts that they and the workspace fit the launch."""
    _, page_size, num_kv_heads, _ = key_pages.shape
    group, (num_tiles, num_fields) = num_heads // num_kv_heads, tiles.records.shape
    packed_rows, padded_dim = _packed_rows(tiles.block_q, group), _padded(head_dim)
    assert key_pages.is_contiguous() and value_pages.is_contiguous()
    assert num_fields == 4 and tiles.records.is_contiguous(), f"records {tiles.records.shape, tiles.records.stride()}"
    pairs = num_tiles * num_kv_heads
    assert tiles.num_splits == 1 or _fits(workspace, pairs, tiles.num_splits, packed_rows, padded_dim), (
        f"the workspace is too small for {pairs} x {tiles.num_splits} programs of {packed_rows} rows"
    )
    launch = launch or choose_launch(packed_rows, head_dim, dtype, pairs)
    return {
        "num_splits": tiles.num_splits, "min_split_log2": launch.min_split_tokens.bit_length() - 1,
        "GROUP": group, "HEAD_DIM": head_dim, "NUM_KV_HEADS": num_kv_heads, "PAGE_SIZE": page_size,
        "ROWS": packed_rows, "DIM": padded_dim, "CHUNK_N": launch.chunk_n,
        "MERGED": _merged(packed_rows * padded_dim, launch),
        "num_warps": launch.num_warps, "num_stages": launch.num_stages,
    }  # fmt: skip


def deterministic_launch(block_q: int, group: int, head_dim: int, dtype: torch.dtype) -> Launch:
    """For launches of one block_q and one split: a row's result then depends on its own position and keys alone.

    Chunks begin at multiples of chunk_n whatever the tile, and of those that a row does not see nothing reaches it: weights
    are 0 and the running maximum stays, so that what was summed is multiplied by exactly 1.
    """
    if dtype == torch.float32:
        return Launch(16 if _packed_rows(block_q, group) > 64 else 32, 4, 2)
    return Launch(64, 8 if _padded(head_dim) > 64 and _packed_rows(block_q, group) > 64 else 4, 3)


def _merged(size: int, launch: Launch) -> int:
    """Splits of `size` sums that are loaded at a time when they are merged: what fits into 128 registers of a thread.

    Launches of few warps are for a full GPU, which hardly splits; there registers decide how many programs it holds.
    """
    registers = 128 if launch.num_warps >= 4 else 32
    return max(1, min(FIRST_SPLITS, registers * 32 * launch.num_warps // size))


def choose_launch(packed_rows: int, head_dim: int, dtype: torch.dtype, pairs: int) -> Launch:
    """For `pairs` of a tile and a KV head, each with packed_rows (query heads x rows) queries.

    Measured on an H200 (bench/attention.py), us by [chunk_n, warps, stages] and splits.
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
VARYING = ["table_stride", "table_columns", "window", "num_splits", "min_split_log2"]


@triton.jit(do_not_specialize=VARYING)
def _attention_kernel(
    out, q, key_pages, value_pages, records, page_table, partials, stats, arrivals,
    q_stride, out_stride, table_stride, table_columns, window, scale, num_splits, min_split_log2,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, CHUNK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """`scale` includes log2(e): all exponentials are of base 2. What a load needs is worked out before anything else."""
    kv_head, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row_base, num_rows, slot, start = read_record(records, tile)
    end = start + num_rows
    begin = tl.maximum(start - window + 1, 0) if HAS_WINDOW else 0
    first_chunk, num_chunks, share = cut(begin, end, num_splits, min_split_log2, CHUNK_N)
    # Rounding up may leave the last ones without work. One way out for all, after all of the record is asked for.
    if (num_rows == 0) | ((split > 0) & (split * share >= num_chunks)):
        return
    last_chunk = first_chunk + tl.minimum((split + 1) * share, num_chunks)
    first_chunk += split * share

    table = page_table + slot.to(tl.int64) * table_stride
    # Nobody waits for page numbers beyond this split's.
    table_columns = tl.minimum(table_columns, tl.cdiv(last_chunk * CHUNK_N, PAGE_SIZE))
    pages = lookup(table, table_columns, first_chunk * CHUNK_N, tl.arange(0, CHUNK_N), PAGE_SIZE, CHUNK_N)
    packed = tl.arange(0, ROWS)
    row, dim = packed // GROUP, tl.arange(0, DIM)
    kept_rows = row < num_rows
    kept = kept_rows[:, None] & (dim < HEAD_DIM)[None, :]
    head_at = (kv_head * GROUP + packed % GROUP) * HEAD_DIM
    queries = tl.load(q + ((row_base + row) * q_stride + head_at)[:, None] + dim[None, :], mask=kept, other=0.0)
    position = (start + row)[:, None]

    acc, total, top = attend_pages(
        queries, position, position, key_pages, value_pages, kv_head, pages, table, table_columns,
        begin, end, first_chunk, last_chunk, window, scale,
        HEAD_DIM, NUM_KV_HEADS, PAGE_SIZE, ROWS, DIM, CHUNK_N, HAS_WINDOW,
    )  # fmt: skip
    out_at = out + ((row_base + row) * out_stride + head_at)[:, None] + dim[None, :]
    finish(
        out_at, acc, total, top, partials, stats, arrivals, tile * NUM_KV_HEADS + kv_head, split, num_splits,
        num_chunks, share, dim, kept, kept_rows, ROWS, DIM, MERGED,
    )  # fmt: skip


@triton.jit
def read_record(records, tile):
    """First row, number of rows, slot and first position of a tile: see `Tiles`."""
    at = records + 4 * tile
    return tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def cut(begin, end, num_splits, min_split_log2, CHUNK_N: tl.constexpr):
    """Positions begin .. end - 1 in chunks: the first one, their number, and how many of them are a split's share."""
    first_chunk = begin // CHUNK_N
    num_chunks = tl.cdiv(end, CHUNK_N) - first_chunk
    return first_chunk, num_chunks, _share(num_chunks, num_splits, min_split_log2, CHUNK_N)


@triton.jit
def attend_pages(
    queries, position, last, key_pages, value_pages, kv_head, pages, table, table_columns,
    begin, end, first_chunk, last_chunk, window, scale,
    HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, CHUNK_N: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """A running softmax over chunks first_chunk .. last_chunk - 1 of what positions begin .. end - 1 keep in pages.

    Rows stand at `position` [ROWS, 1] and see no position beyond `last`, a number or [ROWS, 1]; `pages` are those of
    the first chunk. Returns acc [ROWS, DIM], total and top [ROWS], as `fold` takes them.
    """
    offset, dim = tl.arange(0, CHUNK_N), tl.arange(0, DIM)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    # Finite, so that a row which sees nothing of a chunk subtracts no infinities.
    top = tl.full([ROWS], -1e30, tl.float32)
    for chunk in range(first_chunk, last_chunk):
        at = chunk * CHUNK_N + offset
        element = _elements(pages, chunk, offset, kv_head, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, CHUNK_N)
        element = element[:, None] + dim[None, :]
        # The next chunk's pages are looked up a chunk ahead: KV loads then wait for no other load.
        pages = lookup(table, table_columns, (chunk + 1) * CHUNK_N, offset, PAGE_SIZE, CHUNK_N)
        there = (at >= begin) & (at < end) if HAS_WINDOW else at < end
        inside = there[:, None] & (dim < HEAD_DIM)[None, :]
        keys = tl.load(key_pages + element, mask=inside, other=0.0)
        values = tl.load(value_pages + element, mask=inside, other=0.0)
        seen = at[None, :] <= last
        if HAS_WINDOW:
            seen = seen & (at[None, :] > position - window)
        acc, total, top = fold(queries, keys, values, seen, scale, acc, total, top)
    return acc, total, top


@triton.jit
def finish(
    out_at, acc, total, top, partials, stats, arrivals, pair, split, num_splits, num_chunks, share,
    dim, kept, kept_rows, ROWS: tl.constexpr, DIM: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Rows of a split to `out_at`, by the last split to arrive where several share the keys of a pair."""
    if share >= num_chunks:  # nobody shares the keys
        tl.store(out_at, acc * (1 / total)[:, None], mask=kept)
    else:
        # Of the first split's rows in the workspace.
        place = pair.to(tl.int64) * num_splits * ROWS + tl.arange(0, ROWS)
        _publish(partials, stats, place + split * ROWS, dim, kept, kept_rows, acc, total, top, DIM)
        # Every thread's stores, the barrier, one thread's release: whoever acquires this count sees them all.
        tl.debug_barrier()
        num_used = tl.cdiv(num_chunks, share)
        if tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu") == num_used - 1:
            tl.store(arrivals + pair, 0)  # all have arrived: ready for the next launch
            acc, total = _merge(partials, stats, place, dim, kept, kept_rows, num_used, ROWS, DIM, MERGED)
            tl.store(out_at, acc * (1 / total)[:, None], mask=kept)


@triton.jit
def _share(num_chunks, num_splits, min_split_log2, CHUNK_N: tl.constexpr):
    """Chunks of each split: as many splits as are worth their merge, in equal shares."""
    num_tokens = num_chunks * CHUNK_N
    num_used = tl.minimum(num_tokens >> min_split_log2, _FIRST_SPLITS + num_tokens // _FURTHER_TOKENS)
    num_used = tl.maximum(tl.minimum(num_used, num_splits), 1)
    # Rounded up. A division of integers takes three times as long, and all loads wait for this one; half a chunk is
    # far more than a float errs by.
    return tl.maximum(((num_chunks + num_used - 0.5) / num_used).to(tl.int32), 1)


@triton.jit
def lookup(table, columns, first, offset, PAGE_SIZE: tl.constexpr, CHUNK_N: tl.constexpr):
    """Page numbers of positions first .. first + CHUNK_N - 1, int32; the null page beyond the table.

    Numbers are loaded one by one where that is possible: a vector of them would pass through shared memory.
    """
    if PAGE_SIZE % CHUNK_N == 0:
        pages = _page(table, columns, first // PAGE_SIZE) + tl.zeros_like(offset)
    elif CHUNK_N % PAGE_SIZE == 0 and CHUNK_N <= 8 * PAGE_SIZE:
        pages = tl.zeros_like(offset)
        for i in tl.static_range(CHUNK_N // PAGE_SIZE):
            pages = tl.where(offset // PAGE_SIZE == i, _page(table, columns, first // PAGE_SIZE + i), pages)
    else:
        pages = _page(table, columns, (first + offset) // PAGE_SIZE)
    return pages


@triton.jit
def _page(table, columns, column):
    return tl.load(table + column, mask=column < columns, other=0).to(tl.int32)


@triton.jit
def _elements(
    pages, chunk, offset, kv_head, PAGE_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    CHUNK_N: tl.constexpr,
):  # fmt: skip
    """Where a chunk's keys begin in their pool, int64: it may hold more than 2^31 elements, a page holds few."""
    if CHUNK_N % PAGE_SIZE == 0:  # the same in every chunk
        within = offset % PAGE_SIZE
    else:
        within = (chunk * CHUNK_N + offset) % PAGE_SIZE
    page_elements: tl.constexpr = PAGE_SIZE * NUM_KV_HEADS * HEAD_DIM
    return pages.to(tl.int64) * page_elements + (within * NUM_KV_HEADS + kv_head) * HEAD_DIM


@triton.jit
def fold(queries, keys, values, seen, scale, acc, total, top):
    """Take a chunk of keys into the running softmax: acc [ROWS, DIM], total and top [ROWS], all fp32."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
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
    partials, stats, place, dim, kept, kept_rows, num_used, ROWS: tl.constexpr, DIM: tl.constexpr, MERGED: tl.constexpr
):
    """Sum the splits in their order, whoever arrived last: the result does not depend on timing.

    Loads of MERGED splits are in flight together, those that do not exist too: what is left over after some full turns
    would wait for each by itself. They go past the first-level cache (".cg"), which knows nothing of other
    multiprocessors' stores.
    """
    acc = tl.zeros([ROWS, DIM], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], -1e30, tl.float32)
    stats_at = stats + 2 * place
    for first in range(0, num_used, MERGED):
        new_top = top
        for i in tl.static_range(MERGED):
            there = kept_rows & (first + i < num_used)
            at = stats_at + 2 * (first + i) * ROWS
            new_top = tl.maximum(new_top, tl.load(at, mask=there, other=-1e30, cache_modifier=".cg"))
        decay = tl.exp2(top - new_top)
        acc, total, top = acc * decay[:, None], total * decay, new_top
        for i in tl.static_range(MERGED):
            there = kept_rows & (first + i < num_used)
            at = stats_at + 2 * (first + i) * ROWS
            weight = tl.exp2(tl.load(at, mask=there, other=-1e30, cache_modifier=".cg") - top)
            total += weight * tl.load(at + 1, mask=there, other=0.0, cache_modifier=".cg")
            part_at = partials + (place + (first + i) * ROWS)[:, None] * DIM + dim[None, :]
            inside = kept & (first + i < num_used)
            acc += weight[:, None] * tl.load(part_at, mask=inside, other=0.0, cache_modifier=".cg")
    return acc, total
