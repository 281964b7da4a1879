"""Products of few rows with a weight: one kernel for norm, product, bias, gate and residual; a library for many rows.

Few rows are a matter of reading the weight once, and in a small model of how many kernels there are and how long each
takes from its first load to its last store. So a program owns some outputs and the whole depth, with many loads in
flight, and cuts the depth over its warps (`lanes`): a tensor core adds up one chain in 33 cycles a link, which for the
576 inputs of SmolLM2 would be as long as the memory takes. Rows are normalised on the way into the product and scaled
by their length after it. Sums are fp32 and never depend on what ran before: no atomics, no split over programs.

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

from slipstream.kernels.gated import silu_mul
from slipstream.kernels.norm import rms_norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """How one product is cut up. All sizes but `stages` are powers of two, rows and depth at least 16."""

    rows: int  # of x, per program
    columns: int  # rows of the weight, per program
    depth: int  # inputs that one lane takes per turn of the loop
    lanes: int  # parts of the depth, summed apart by a warp each: as many as warps, or 1 and warps share outputs
    warps: int
    stages: int  # turns of the loop whose loads are in flight
    norm_apart: bool = False  # the norm is a launch of its own
    rows_first: bool = False  # programs that share part of the weight follow each other, not those that share rows of x


def _tile(rows: int, columns: int, depth: int, lanes: int, stages: int, norm_apart: bool = False) -> Tile:
    warps = 2 if lanes == 2 else 4
    return Tile(rows=rows, columns=columns, depth=depth, lanes=lanes, warps=warps, stages=stages, norm_apart=norm_apart)


# What the product of a weight [O, I] runs with, by (O, I): tiles with the largest number of rows that each is for.
# None is the library, which also takes all rows above the last. Shapes that are not listed: `guess_tile`.
# From bench/tune_linear.py on an H200 (bench/results/tune-linear-h200.json); in comments us at 8 and 64 rows, norm, gate
# and residual included, tile against library. All products of a step of SmolLM2-135M: 0.55 ms at 8 rows against 0.67.
# Launching each while the one before runs, its weight fetched ahead (programmatic dependent launch): 0.81 ms against 0.57.
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

_NUM_PROGRAMS = 132  # multiprocessors of an H100 or H200
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


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x, weight, bias, norm, residual, out, num_rows, x_stride, out_stride, eps,
    NUM_OUT: tl.constexpr, NUM_IN: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LANES: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    """Program (i, j), or (j, i): BLOCK_N rows of the weight (gate and up in turns if gated) for BLOCK_M rows of x."""
    # Rows beyond the last are computed from the others and not stored: cheaper than masks in the loop. From one each, for
    # all of them from a single row would have all programs ask for the same few lines of memory at once.
    column_tile, row_tile = tl.program_id(1 if ROWS_FIRST else 0), tl.program_id(0 if ROWS_FIRST else 1)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        weight_ids = tl.minimum(columns // 2, NUM_OUT - 1) + columns % 2 * NUM_OUT
    else:
        weight_ids = tl.minimum(columns, NUM_OUT - 1)
    weight_rows = weight + weight_ids.to(tl.int64) * NUM_IN
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

    k = tl.arange(0, BLOCK_K)
    if LANES == 1:  # two dimensions: a third would leave all but one warp without work, or without their own
        x_inputs, weight_inputs = k[None, :], k[:, None]  # [1, k], [k, 1]
        x_tile, weight_tile = x_rows[:, None] + x_inputs, weight_rows[None, :] + weight_inputs  # [m, k], [k, n]
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    else:
        lane = tl.arange(0, LANES)[:, None, None] * BLOCK_K
        x_inputs, weight_inputs = lane + k[None, None, :], lane + k[None, :, None]  # [lanes, 1, k], [lanes, k, 1]
        x_tile, weight_tile = x_rows[None, :, None] + x_inputs, weight_rows[None, None, :] + weight_inputs
        sums = tl.zeros((LANES, BLOCK_M, BLOCK_N), tl.float32)
        squares = tl.zeros((LANES, BLOCK_M, BLOCK_K), tl.float32)
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
            squares += wide * wide
            xs = (wide * norms.to(tl.float32)).to(weights.dtype)
        sums = tl.dot(xs, weights, sums, input_precision="ieee")

    if LANES == 1:
        y, lengths = sums, tl.sum(squares, 1)
    else:
        y, lengths = tl.sum(sums, 0), tl.sum(tl.sum(squares, 2), 0)  # [m, n], [m]
    if norm is not None:
        y *= tl.rsqrt(lengths / NUM_IN + eps)[:, None]
    if bias is not None:
        y += biases.to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(y, (BLOCK_M, BLOCK_N // 2, 2)))
        y = gate * tl.sigmoid(gate) * up
    if residual is not None:
        y += former.to(tl.float32)
    tl.store(out + offsets, y.to(out.dtype.element_ty), mask=keep)


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
) -> Tensor:
    """`ops.fused.fused_linear`, which see, on a GPU: x [R, I], weight [O, I] -> [R, O], or [R, O / 2] if gated.

    x, residual and out may have any stride between rows, weight is contiguous. Depends on shapes alone, so it can be
    captured; eager calls cost the host one launch, or up to three where the library multiplies.
    """
    tile = choose_tile(x.shape[0], weight, norm is not None)
    if tile is None:
        return _library(x, weight, bias, norm, eps, residual, gated, out)
    return tiled_linear(x, weight, bias, tile, norm=norm, eps=eps, residual=residual, gated=gated, out=out)


def choose_tile(num_rows: int, weight: Tensor, has_norm: bool) -> Tile | None:
    """How `fused_linear` makes this product; None: with the library. bf16 and fp16 use the tuned table."""
    listed = TUNED.get((weight.shape[0], weight.shape[1])) if weight.element_size() == 2 else None
    if listed is not None:
        return next((tile for max_rows, tile in listed if num_rows <= max_rows), None)
    return guess_tile(weight, has_norm) if num_rows <= _FEW_ROWS else None


def guess_tile(weight: Tensor, has_norm: bool) -> Tile:
    """For up to 16 rows and a shape that nobody has tuned: enough programs for all multiprocessors, many loads ahead."""
    num_rows, num_in = weight.shape
    half = weight.element_size() == 2
    columns, lanes, depth = 16, 4, 32 if half else 16
    while half and columns < 64 and num_rows >= 2 * columns * _NUM_PROGRAMS:
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
) -> Tensor:
    """`fused_linear` by the kernel, whatever the number of rows, cut up as `tile` says."""
    assert residual is None or out is None, "a result goes into residual or out, not both"
    (num_rows, num_in), num_weight_rows = x.shape, weight.shape[0]
    assert weight.is_contiguous() and weight.shape[1] == num_in and x.stride(1) == 1, (x.shape, weight.shape)
    num_out = num_weight_rows // 2 if gated else num_weight_rows
    out = residual if residual is not None else out
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device) if out is None else out
    assert out.shape == (num_rows, num_out) and out.stride(1) == 1, (out.shape, out.stride())
    if norm is not None and tile.norm_apart:
        x, norm = rms_norm(x, norm, eps), None
    if num_rows:
        column_tiles, row_tiles = triton.cdiv(num_weight_rows, tile.columns), triton.cdiv(num_rows, tile.rows)
        _product[(row_tiles, column_tiles) if tile.rows_first else (column_tiles, row_tiles)](
            x, weight, bias, norm, residual, out, num_rows, x.stride(0), out.stride(0), eps,
            NUM_OUT=num_out, NUM_IN=num_in, GATED=gated,
            BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, LANES=tile.lanes, ROWS_FIRST=tile.rows_first,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


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
