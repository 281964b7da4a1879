"""Products of few rows with a weight: one kernel for norm, product, bias, gate and residual; a library for many rows.

Few rows are a matter of reading the weight once, and in a small model of how many kernels there are and how long each
takes from its first load to its last store. So a program owns some outputs and the whole depth, with many loads in
flight, and cuts the depth over its warps (`lanes`): a tensor core adds up one chain in 33 cycles a link, which for the
576 inputs of SmolLM2 would be as long as the memory takes. Sums are fp32 and never depend on what ran before: no
atomics, no split over programs.

The norm before most products is no launch either. Dividing by a row's length can wait until after the product; the weight
cannot, and who writes the row applies it: a product into the residual stream stores its rows a second time, times the
weight of the norm that reads them next, with sums of squares of what it stored (`HalfNormed`). So loops are those of
products without a norm. (Unless so many programs would add up the squares that a launch is cheaper.) Folding the norm's
weight into the matrix behind it instead would save that store, of rows that are nothing beside a matrix, but round every
weight once more and change what others read: copies, files, and a drafter whose keys lie behind two norms. Where nobody
did half of it (behind an embedding, or a library), rows are multiplied in the loop, or before the product.

How a product is cut up depends on the number of rows, and its rounding with it; `deterministic_linear` has one way for
each weight. Called by the networks of the GPU backend; reference and signature: `ops.fused.fused_linear`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.early import MULTIPROCESSORS, after_previous, early, fetch
from slipstream.kernels.gated import silu_mul
from slipstream.kernels.norm import rms_norm
from slipstream.ops.fused import Following, HalfNormed, Products


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """How one product is cut up. All sizes but `stages` are powers of two, rows and depth at least 16."""

    rows: int  # of x, per program
    columns: int  # rows of the weight, per program
    depth: int  # inputs that one lane takes per turn of the loop
    lanes: int  # parts of the depth, summed apart by a warp each: as many as warps, or 1 and warps share outputs
    warps: int
    stages: int  # turns of the loop whose loads are in flight
    norm_apart: bool = False  # the norm is a launch of its own, where rows do not come half normed
    rows_first: bool = False  # programs that share part of the weight follow each other, not those that share rows of x


def _tile(rows: int, columns: int, depth: int, lanes: int, stages: int, norm_apart: bool = False) -> Tile:
    warps = 2 if lanes == 2 else 4
    return Tile(rows=rows, columns=columns, depth=depth, lanes=lanes, warps=warps, stages=stages, norm_apart=norm_apart)


# What the product of a weight [O, I] runs with, by (O, I): tiles with the largest number of rows that each is for.
# None is the library, which also takes all rows above the last. Shapes that are not listed: `guess_tile`.
# From bench/tune_linear.py on an H200 (bench/results/tune-linear-h200.json); in comments us at 8 and 64 rows, norm, gate
# and residual included, tile against library. All products of a step of SmolLM2-135M: 0.55 ms at 8 rows against 0.67.
TUNED: Mapping[tuple[int, int], tuple[tuple[int, Tile | None], ...]] = {
    # SmolLM2-135M: qkv 4.3 / 5.3, 5.0 / 5.4; o 2.8 / 3.6, 3.3 / 3.7; gate and up 6.1 / 7.4, 5.7 / 7.6; down 3.5 / 5.1,
    # 4.7 / 5.2; head 24 / 19, 23 / 22
    (960, 576): (
        (16, _tile(16, 8, 64, 4, 4)), (32, _tile(32, 16, 128, 1, 6, True)), (128, _tile(64, 16, 64, 1, 10, True)),
    ),
    (576, 576): (
        (16, _tile(16, 8, 64, 4, 4)), (32, _tile(32, 8, 64, 1, 10)), (64, _tile(64, 8, 64, 1, 10)),
        (128, _tile(64, 16, 64, 1, 10)),
    ),
    (3072, 576): (
        (16, _tile(16, 32, 64, 4, 4)), (32, _tile(32, 32, 64, 1, 10, True)), (64, _tile(64, 32, 64, 1, 10, True)),
    ),
    (576, 1536): ((16, _tile(16, 8, 64, 4, 7)), (32, _tile(32, 8, 64, 4, 7)), (128, _tile(64, 16, 64, 1, 10))),
    (49152, 576): (),
    # Its drafters: gate and up 5.9 / 7.1, 5.6 / 7.3; down 3.2 / 4.6, 4.3 / 4.8; features 5.1 / 6.5, 8.0 / 7.0; head
    # 11.5 / 9.2, 9.7 / 9.6
    (2432, 576): (
        (16, _tile(16, 32, 64, 4, 4)), (32, _tile(32, 32, 64, 1, 10, True)), (64, _tile(64, 32, 64, 1, 10, True)),
    ),
    (576, 1216): ((16, _tile(16, 8, 64, 4, 6)), (32, _tile(32, 8, 64, 4, 6)), (128, _tile(64, 16, 64, 1, 10))),
    (576, 2880): ((16, _tile(16, 8, 64, 4, 10)),),
    (16384, 576): (),
    # Qwen3-8B: the library reaches 2.3 to 4.3 TB/s; o 13.5 / 13.4, 13.9 / 12.8; gate and up 58.5 / 60.4, 59.8 / 60.3 (at
    # one row 62.3 / 55.4); down 32.6 / 33.6, 33.2 / 32.6 (at one row 39.9 / 33.7)
    (6144, 4096): (),
    (4096, 4096): ((8, None), (16, _tile(16, 32, 64, 2, 9)), (32, _tile(32, 32, 128, 1, 6))),
    # In a step, norm and activation as launches of their own cost 8 to 9 us more than beside cold weights (51.3 + 2.6 +
    # 4.6 at 32 rows, and two gaps), so that one launch of 56.5 wins there.
    (24576, 4096): (
        (4, None), (16, _tile(16, 128, 64, 2, 3, True)), (32, _tile(32, 64, 128, 1, 4, True)),
        (64, _tile(64, 128, 64, 1, 4, True)),
    ),
    # In a layer the tile of 32 rows is as fast as the library (115.9 us a layer, 116.3), that of 64 faster (115.8, 118.6).
    # The depth cut over 2 programs, their sums added by the next norm: 114.6.
    (4096, 12288): (
        (4, None), (16, _tile(16, 32, 64, 2, 9)), (32, _tile(32, 32, 128, 1, 6)), (64, _tile(64, 32, 128, 1, 6)),
    ),
    (151936, 4096): (),
}  # fmt: skip

_STAGED_BYTES = 112 * 1024  # per program: two fit into the 227 KB of a multiprocessor
_FEW_ROWS = 16
_MANY_ROWS, _DEPTH = 64, 64  # of a tile that serves any number of rows
_MOST_PROCESSORS = 96


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit(do_not_specialize=["num_rows", "overlaps"])
def _product(
    x, weight, bias, norm, squares, residual, out, next_norm, next_rows, next_squares,
    num_rows, x_stride, out_stride, eps, overlaps,
    NUM_OUT: tl.constexpr, NUM_IN: tl.constexpr, GATED: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LANES: tl.constexpr,
    ROWS_FIRST: tl.constexpr, LINES: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Program (i, j), or (j, i): BLOCK_N rows of the weight (gate and up in turns if gated) for BLOCK_M rows of x.

    squares [R, NUM_PARTS]: x is half normed. next_rows [R, NUM_OUT], next_squares [R, column tiles]: where `out` goes half
    normed, by next_norm. LINES: see `early.fetch`.
    """
    # Rows beyond the last are computed from the others and not stored: cheaper than masks in the loop. From one each, for
    # all of them from a single row would have all programs ask for the same few lines of memory at once.
    column_tile, row_tile = tl.program_id(1 if ROWS_FIRST else 0), tl.program_id(0 if ROWS_FIRST else 1)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        weight_ids = tl.minimum(columns // 2, NUM_OUT - 1) + columns % 2 * NUM_OUT
    else:
        weight_ids = tl.minimum(columns, NUM_OUT - 1)
    weight_rows = weight + weight_ids.to(tl.int64) * NUM_IN
    if EARLY:
        fetch(weight_rows, overlaps, LINES)
    after_previous(overlaps, EARLY)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    x_rows = x + (rows % num_rows).to(tl.int64) * x_stride

    if GATED:
        outputs = column_tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        outputs = columns
    offsets = rows.to(tl.int64)[:, None] * out_stride + outputs[None, :]
    keep = (rows < num_rows)[:, None] & (outputs < NUM_OUT)[None, :]
    # Asked for now, needed last: after the loop each would cost its own trip to memory.
    if residual is not None:
        former = tl.load(residual + offsets, mask=keep, other=0.0)
    if bias is not None:
        biases = tl.load(bias + weight_ids)
    if squares is not None:
        part = tl.arange(0, BLOCK_P)
        place = squares + (rows % num_rows)[:, None] * NUM_PARTS + part[None, :]
        parts = tl.load(place, mask=(part < NUM_PARTS)[None, :], other=0.0)
    if next_norm is not None:
        next_norms = tl.load(next_norm + weight_ids)

    k = tl.arange(0, BLOCK_K)
    if LANES == 1:  # two dimensions: a third would leave all but one warp without work, or without their own
        x_inputs, weight_inputs = k[None, :], k[:, None]  # [1, k], [k, 1]
        x_tile, weight_tile = x_rows[:, None] + x_inputs, weight_rows[None, :] + weight_inputs  # [m, k], [k, n]
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        own_squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    else:
        lane = tl.arange(0, LANES)[:, None, None] * BLOCK_K
        x_inputs, weight_inputs = lane + k[None, None, :], lane + k[None, :, None]  # [lanes, 1, k], [lanes, k, 1]
        x_tile, weight_tile = x_rows[None, :, None] + x_inputs, weight_rows[None, None, :] + weight_inputs
        sums = tl.zeros((LANES, BLOCK_M, BLOCK_N), tl.float32)
        own_squares = tl.zeros((LANES, BLOCK_M, BLOCK_K), tl.float32)
    if norm is not None:
        # As large as the tile of x, though its rows are equal: a smaller one could not be loaded ahead.
        norm_tile = tl.broadcast_to(norm + x_inputs, x_tile.shape)
    MASKED: tl.constexpr = NUM_IN % (LANES * BLOCK_K) != 0
    for start in range(0, NUM_IN, LANES * BLOCK_K):
        xs = _load(x_tile + start, start + x_inputs < NUM_IN, MASKED)
        weights = _load(weight_tile + start, start + weight_inputs < NUM_IN, MASKED)
        if norm is not None:
            norms = _load(norm_tile + start, start + x_inputs < NUM_IN, MASKED)
            wide = xs.to(tl.float32)
            own_squares += wide * wide
            xs = (wide * norms.to(tl.float32)).to(weights.dtype)
        sums = tl.dot(xs, weights, sums, input_precision="ieee")

    if LANES == 1:
        y, lengths = sums, tl.sum(own_squares, 1)
    else:
        y, lengths = tl.sum(sums, 0), tl.sum(tl.sum(own_squares, 2), 0)  # [m, n], [m]
    if squares is not None:
        lengths = tl.sum(parts, 1)
    if norm is not None or squares is not None:
        y *= tl.rsqrt(lengths / NUM_IN + eps)[:, None]
    if bias is not None:
        y += biases.to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(y, (BLOCK_M, BLOCK_N // 2, 2)))
        y = gate * tl.sigmoid(gate) * up
    if residual is not None:
        y += former.to(tl.float32)
    y = y.to(out.dtype.element_ty)
    tl.store(out + offsets, y, mask=keep)
    if next_norm is not None:
        stored = tl.where(keep, y.to(tl.float32), 0.0)
        scaled = (stored * next_norms.to(tl.float32)[None, :]).to(next_rows.dtype.element_ty)
        tl.store(next_rows + rows.to(tl.int64)[:, None] * NUM_OUT + outputs[None, :], scaled, mask=keep)
        column_tiles = tl.num_programs(1 if ROWS_FIRST else 0)
        tl.store(next_squares + rows * column_tiles + column_tile, tl.sum(stored * stored, 1), mask=rows < num_rows)


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    half: HalfNormed | None = None,
) -> Tensor:
    """`ops.fused.fused_linear`, which see, on a GPU: x [R, I], weight [O, I] -> [R, O], or [R, O / 2] if gated.

    x, residual and out may have any stride between rows, weight is contiguous. Depends on shapes alone, so it can be
    captured; eager calls cost the host one launch, or up to three where the library multiplies.
    """
    tile = choose_tile(x.shape[0], weight, norm is not None and half is None)
    if tile is None:
        return _library(x, weight, bias, norm, eps, residual, gated, out)
    return tiled_linear(x, weight, bias, tile, norm=norm, eps=eps, residual=residual, gated=gated, out=out, half=half)


def add_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, following: Following | None = None
) -> HalfNormed | None:
    """`ops.fused.add_linear`, which see. Rows come back half normed where kernels make this product and the following."""
    tile = choose_tile(x.shape[0], weight, False)
    if tile is None:
        _library(x, weight, bias, None, 0.0, residual, False, None)
        return None
    if following is None or not reads_half_normed(x.shape[0], following[1]):
        tiled_linear(x, weight, bias, tile, residual=residual)
        return None
    half = HalfNormed(
        torch.empty(residual.shape, dtype=residual.dtype, device=residual.device),
        torch.empty(len(x), triton.cdiv(len(weight), tile.columns), dtype=torch.float32, device=residual.device),
    )
    tiled_linear(x, weight, bias, tile, residual=residual, into=(following[0], half))
    return half


def reads_half_normed(num_rows: int, weight: Tensor) -> bool:
    """Whether the product with this weight takes rows half normed: the library knows only normed ones.

    Nor a tile that wants them normed and has many programs, each of which would add up the squares: the norm's launch
    overlaps with both neighbours.
    """
    tile = choose_tile(num_rows, weight, False)
    if tile is None or not _may_norm_late(weight):
        return False
    return not (tile.norm_apart and triton.cdiv(len(weight), tile.columns) > MULTIPROCESSORS)


def _may_norm_late(weight: Tensor) -> bool:
    """Whether a row may be weighted by its norm before it is divided by its length: in fp16 a long one leaves the range."""
    return weight.dtype != torch.float16


def choose_tile(num_rows: int, weight: Tensor, has_norm: bool) -> Tile | None:
    """How `fused_linear` makes this product; None: with the library. bf16 and fp16 use the tuned table."""
    listed = TUNED.get((weight.shape[0], weight.shape[1])) if weight.element_size() == 2 else None
    if listed is not None:
        tile = next((tile for max_rows, tile in listed if num_rows <= max_rows), None)
    else:
        tile = guess_tile(weight, has_norm) if num_rows <= _FEW_ROWS else None
    return tile if tile is None or _may_norm_late(weight) else dataclasses.replace(tile, norm_apart=True)


def guess_tile(weight: Tensor, has_norm: bool) -> Tile:
    """For up to 16 rows and a shape that nobody has tuned: enough programs for all multiprocessors, many loads ahead."""
    num_rows, num_in = weight.shape
    half = weight.element_size() == 2
    columns, lanes, depth = 16, 4, 32 if half else 16
    while half and columns < 64 and num_rows >= 2 * columns * MULTIPROCESSORS:
        columns *= 2
    while lanes > 1 and lanes * depth >= 2 * num_in:
        lanes //= 2
    stage_bytes = lanes * depth * (columns + _FEW_ROWS * (1 + has_norm)) * weight.element_size()
    turns = triton.cdiv(num_in, lanes * depth)
    stages = max(2, min(_STAGED_BYTES // stage_bytes, turns + 1, 8))
    return Tile(rows=_FEW_ROWS, columns=columns, depth=depth, lanes=lanes, warps=4, stages=stages)


def deterministic_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, **fused: Any) -> Tensor:
    """`fused_linear` with what it takes, but a row's result is the same bits whatever rows stand beside it, and however
    many."""
    return tiled_linear(x, weight, bias, deterministic_tile(weight, fused.get("norm") is not None), **fused)


def deterministic_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, following: Following | None = None
) -> None:
    """`add_linear` by `deterministic_linear`; norms stay launches of their own."""
    deterministic_linear(x, weight, bias, residual=residual)


def deterministic_tile(weight: Tensor, has_norm: bool) -> Tile:
    """One tile for any number of rows: the order of a sum, and the instruction that makes it, hang on the weight alone.

    64 rows, the least that a warp group multiplies at once: for few rows the weight's way from memory is what takes time
    (H200, by the widths below at 64 rows, and the best for 1 row, us: SmolLM2's layer 18.9, 17.9; Qwen3-8B's 129, 121), and
    many rows want no smaller ones. Columns as wide as leave most multiprocessors a program.
    """
    if weight.element_size() != 2:
        return guess_tile(weight, has_norm)
    num_rows, num_in = weight.shape
    columns = next((n for n in (128, 64, 32) if num_rows >= n * _MOST_PROCESSORS), 16)
    stage_bytes = (_MANY_ROWS + columns) * _DEPTH * weight.element_size()
    stages = max(2, min(_STAGED_BYTES // stage_bytes, triton.cdiv(num_in, _DEPTH) + 1, 10))
    return Tile(
        rows=_MANY_ROWS,
        columns=columns,
        depth=_DEPTH,
        lanes=1,
        warps=4,
        stages=stages,
        norm_apart=True,
        rows_first=True,
    )


def tiled_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: Tile,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    half: HalfNormed | None = None,
    into: tuple[Tensor, HalfNormed] | None = None,
) -> Tensor:
    """`fused_linear` by the kernel, whatever the number of rows, cut up as `tile` says.

    into: the weight of the norm that comes next, and contiguous places for the result half normed by it, with a sum of
    squares for each `tile.columns` of its columns. Not if gated.
    """
    assert residual is None or out is None, "a result goes into residual or out, not both"
    assert not (gated and into), "what is gated is never normed"
    (num_rows, num_in), num_weight_rows = x.shape, weight.shape[0]
    assert weight.is_contiguous() and weight.shape[1] == num_in and x.stride(1) == 1, (x.shape, weight.shape)
    num_out = num_weight_rows // 2 if gated else num_weight_rows
    out = residual if residual is not None else out
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device) if out is None else out
    assert out.shape == (num_rows, num_out) and out.stride(1) == 1, (out.shape, out.stride())
    squares: Tensor | None = None
    if half is not None:
        x, norm, squares = half.rows, None, half.squares
        assert squares.is_contiguous() and len(squares) == num_rows, squares.shape
    elif norm is not None and tile.norm_apart:
        x, norm = rms_norm(x, norm, eps), None
    num_parts = 1 if squares is None else squares.shape[1]
    next_norm, next_half = into or (None, None)
    if num_rows:
        column_tiles, row_tiles = triton.cdiv(num_weight_rows, tile.columns), triton.cdiv(num_rows, tile.rows)
        assert next_half is None or next_half.squares.shape == (num_rows, column_tiles), column_tiles
        _product[(row_tiles, column_tiles) if tile.rows_first else (column_tiles, row_tiles)](
            x, weight, bias, norm, squares, residual, out,
            next_norm, next_half and next_half.rows, next_half and next_half.squares,
            num_rows, x.stride(0), out.stride(0), eps,
            NUM_OUT=num_out, NUM_IN=num_in, GATED=gated,
            NUM_PARTS=num_parts, BLOCK_P=triton.next_power_of_2(num_parts),
            BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, LANES=tile.lanes, ROWS_FIRST=tile.rows_first,
            LINES=_lines_ahead(tile, num_in, weight.element_size()),
            num_warps=tile.warps, num_stages=tile.stages, **early(x, column_tiles * row_tiles),
        )  # fmt: skip
    return out


def _lines_ahead(tile: Tile, num_in: int, element_size: int) -> int:
    """Of a row of the weight, what the loop's first turns load: 128 bytes each, a power of two."""
    num_bytes = min(tile.lanes * tile.depth * tile.stages, num_in) * element_size
    return 1 << (max(num_bytes // 128, 1).bit_length() - 1)


def _library(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
    out: Tensor | None,
) -> Tensor:
    """The same by cuBLAS, with a launch each for norm and gate; the residual is added by cuBLAS itself, in place."""
    assert residual is None or out is None, "a result goes into residual or out, not both"
    if norm is not None:
        x = rms_norm(x, norm, eps)
    if residual is not None and not gated:
        residual.addmm_(x, weight.t())
        return residual if bias is None else residual.add_(bias)
    into = None if gated else out
    y = torch.mm(x, weight.t(), out=into) if bias is None else torch.addmm(bias, x, weight.t(), out=into)
    if not gated:
        return y
    return silu_mul(y, out) if residual is None else residual.add_(silu_mul(y))


FUSED = Products(fused_linear, add_linear)
DETERMINISTIC = Products(deterministic_linear, deterministic_add)
