"""Head norms, rotation and the KV write in one launch, in Triton.

Between the packed projection and attention every head of a row is normed (where the model does that), rotated by its
position, and keys and values go to their KV slots: one kernel instead of six. All arithmetic is fp32 and rounded once.
It does not know sequences or pages; a row brings its position and its KV slot. Called by the GPU networks; the
references are `ops.norm`, `ops.rope` and `KVPool.write`.

Letters in shapes: R rows, L layers, nh, nkv, hd heads, KV heads, head size. A row's heads are q, then k, then v.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Heads that a program (of one warp) turns, by the rows of the launch: a single row's work needs many processors, with
# many rows the processors are full anyway. H200: 1 row of 32 heads of 128 2.54 us by 2, 2.70 by 4; 256 rows 4.25 by 8,
# 4.87 by 4; 256 rows of 9 heads of 64 2.99 by 8, 3.15 by 4.
_FEW_ROWS, _HEADS_OF_FEW, _HEADS_OF_MANY = 16, 2, 8
DETERMINISTIC_HEADS = 4  # for any number of rows


def rope_and_store(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    key_pages: Tensor, value_pages: Tensor, kv_slots: Tensor, num_heads: int, *, heads_per_program: int | None = None,
) -> None:  # fmt: skip
    """Norm and rotate q and k of qkv [R, (nh + 2 nkv) * hd] in place; store k and v at kv_slots [R].

    positions [R] int64, those beyond the table are its last; cos_sin [max_position, hd] fp32 as `Rotary` has it; q_norm,
    k_norm [hd] or both None; pages [pages, page_size, nkv, hd]. Rows with the same KV slot must be padding.
    heads_per_program, a power of two, changes rounding; None: by the number of rows.
    """
    num_rows, head_dim, num_kv_heads = qkv.shape[0], cos_sin.shape[1], key_pages.shape[2]
    heads = num_heads + 2 * num_kv_heads
    assert key_pages.is_contiguous() and value_pages.is_contiguous()
    assert qkv.shape[1] == heads * head_dim and qkv.stride(1) == 1, (qkv.shape, qkv.stride())
    assert (q_norm is None) == (k_norm is None) and cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
    if num_rows:
        heads_per_program = heads_per_program or (_HEADS_OF_FEW if num_rows <= _FEW_ROWS else _HEADS_OF_MANY)
        _rope_kernel[(num_rows, triton.cdiv(heads, heads_per_program))](
            qkv, positions, cos_sin, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
            key_pages, value_pages, kv_slots, qkv.stride(0), cos_sin.shape[0], eps,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, NORMS=q_norm is not None,
            HEADS=heads_per_program, HALF=triton.next_power_of_2(head_dim // 2), num_warps=1,
        )  # fmt: skip


def store_context(
    kv: Tensor, positions: Tensor, cos_sin: Tensor, k_norms: Tensor, eps: float, keys: Tensor, values: Tensor,
    kv_slots: Tensor,
) -> None:  # fmt: skip
    """A drafter's context KV of all layers: kv [R, L * 2 * nkv * hd], of each layer k, then v, as projected.

    k is normed by k_norms [L, hd] and rotated; kv itself is left alone. keys, values [L, pages, page_size, nkv, hd],
    kv_slots [R] int64; the rest as `rope_and_store`.
    """
    num_rows, num_layers = kv.shape[0], k_norms.shape[0]
    num_kv_heads, head_dim = keys.shape[3:]
    assert kv.shape[1] == num_layers * 2 * num_kv_heads * head_dim and kv.stride(1) == 1
    assert keys.is_contiguous() and values.is_contiguous() and k_norms.is_contiguous() and cos_sin.is_contiguous()
    if num_rows:
        _context_kernel[(num_rows, num_layers)](
            kv, positions, cos_sin, k_norms, keys, values, kv_slots,
            kv.stride(0), keys.stride(0), cos_sin.shape[0], eps,
            NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
            HEADS=triton.next_power_of_2(num_kv_heads), HALF=triton.next_power_of_2(head_dim // 2), num_warps=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["max_position"])
def _rope_kernel(
    qkv, positions, cos_sin, q_norm, k_norm, key_pages, value_pages, kv_slots,
    row_stride, max_position, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NORMS: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One program: HEADS heads of one row, each as its two halves [HEADS, HALF]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (pair < HEAD_DIM // 2)[None, :]
    is_query = inside & (head < NUM_HEADS)[:, None]
    turns = inside & (head < NUM_HEADS + NUM_KV_HEADS)[:, None]  # queries and keys
    # All loads before the first use: a single row's time is the length of the chain of loads.
    position, slot = tl.load(positions + row), tl.load(kv_slots + row)
    at = qkv + row * row_stride + head[:, None] * HEAD_DIM + pair[None, :]
    left, right = _halves(at, inside, HEAD_DIM)
    every = tl.zeros([HEADS, 1], tl.int32) + pair[None, :]  # the same for each head
    cos, sin = _angles(cos_sin, position, max_position, every, turns, HEAD_DIM)

    new_left, new_right = left.to(tl.float32), right.to(tl.float32)
    if NORMS:
        q_left, q_right = _halves(q_norm + every, is_query, HEAD_DIM)
        k_left, k_right = _halves(k_norm + every, turns & ~is_query, HEAD_DIM)
        new_left, new_right = _norm(new_left, new_right, q_left + k_left, q_right + k_right, eps, HEAD_DIM)
    new_left, new_right = _turn(new_left, new_right, cos, sin)
    left = tl.where(turns, new_left.to(left.dtype), left)  # values stay as they are
    right = tl.where(turns, new_right.to(right.dtype), right)
    _store(at, left, right, turns, HEAD_DIM)

    # Keys come first: of the heads after the queries, nkv belong to key_pages and nkv to value_pages.
    kv_head = head - NUM_HEADS
    place = slot * NUM_KV_HEADS * HEAD_DIM + kv_head[:, None] * HEAD_DIM + pair[None, :]
    _store(key_pages + place, left, right, turns & ~is_query, HEAD_DIM)
    _store(value_pages + place - NUM_KV_HEADS * HEAD_DIM, left, right, inside & ~turns, HEAD_DIM)


@triton.jit(do_not_specialize=["max_position"])
def _context_kernel(
    kv, positions, cos_sin, k_norms, keys, values, kv_slots,
    row_stride, layer_stride, max_position, eps,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One program: keys and values of one row in one layer."""
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head, pair = tl.arange(0, HEADS), tl.arange(0, HALF)
    inside = (head < NUM_KV_HEADS)[:, None] & (pair < HEAD_DIM // 2)[None, :]
    element = head[:, None] * HEAD_DIM + pair[None, :]
    at = kv + row * row_stride + layer * (2 * NUM_KV_HEADS * HEAD_DIM) + element
    position, slot = tl.load(positions + row), tl.load(kv_slots + row)
    left, right = _halves(at, inside, HEAD_DIM)
    value_left, value_right = _halves(at + NUM_KV_HEADS * HEAD_DIM, inside, HEAD_DIM)
    every = tl.zeros([HEADS, 1], tl.int32) + pair[None, :]  # the same for each head
    weight_left, weight_right = _halves(k_norms + layer * HEAD_DIM + every, inside, HEAD_DIM)
    cos, sin = _angles(cos_sin, position, max_position, every, inside, HEAD_DIM)

    new_left, new_right = _norm(left.to(tl.float32), right.to(tl.float32), weight_left, weight_right, eps, HEAD_DIM)
    new_left, new_right = _turn(new_left, new_right, cos, sin)
    place = layer * layer_stride + slot * NUM_KV_HEADS * HEAD_DIM + element
    _store(keys + place, new_left.to(left.dtype), new_right.to(left.dtype), inside, HEAD_DIM)
    _store(values + place, value_left, value_right, inside, HEAD_DIM)


@triton.jit
def _halves(at, mask, HEAD_DIM: tl.constexpr):
    return tl.load(at, mask=mask, other=0.0), tl.load(at + HEAD_DIM // 2, mask=mask, other=0.0)


@triton.jit
def _store(at, left, right, mask, HEAD_DIM: tl.constexpr):
    tl.store(at, left, mask=mask)
    tl.store(at + HEAD_DIM // 2, right, mask=mask)


@triton.jit
def _angles(cos_sin, position, max_position, pair, mask, HEAD_DIM: tl.constexpr):
    """Cosines and sines of a position."""
    return _halves(cos_sin + tl.minimum(position, max_position - 1) * HEAD_DIM + pair, mask, HEAD_DIM)


@triton.jit
def _norm(left, right, weight_left, weight_right, eps, HEAD_DIM: tl.constexpr):
    squares = tl.sum(left * left + right * right, 1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    return left * scale * weight_left, right * scale * weight_right


@triton.jit
def _turn(left, right, cos, sin):
    return left * cos - right * sin, right * cos + left * sin
