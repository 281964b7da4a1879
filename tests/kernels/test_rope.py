"""Norm, rotation and the KV write in one kernel against the torch references, over odd sizes."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels.rope import rope_and_store, store_context
from slipstream.models.layers import Rotary
from slipstream.models.rope import RopeSpec
from slipstream.ops.norm import rms_norm
from slipstream.ops.rope import apply_rope

EPS, PAGE_SIZE, NUM_PAGES, MAX_POSITION = 1e-5, 4, 9, 50
SIZES = [(1, 1, 8), (9, 3, 64), (4, 2, 80), (8, 1, 128)]  # heads, KV heads, head size


def randn(*shape: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def table(head_dim: int, device: str) -> Rotary:
    return Rotary(RopeSpec(theta=100.0), head_dim, MAX_POSITION).to(device)


def rotated(heads: Tensor, norm: Tensor | None, rotary: Rotary, positions: Tensor) -> Tensor:
    """The reference in fp32 of heads [R, n, hd]."""
    wide = heads.float()
    wide = wide if norm is None else rms_norm(wide, norm.float(), EPS)
    return apply_rope(wide, *rotary.table(positions.clamp(max=MAX_POSITION - 1)))


def assert_close(got: Tensor, expected: Tensor) -> None:
    tolerance = 1e-2 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.float(), expected.float(), rtol=tolerance, atol=tolerance)


def rows(device: str) -> tuple[Tensor, Tensor]:
    """Positions, the last beyond the table, and KV slots in any order."""
    return torch.tensor([0, 49, 7, 7, 60], device=device), torch.tensor([35, 8, 12, 9, 31], device=device)


def pages(num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str, layers: tuple[int, ...] = ()) -> Tensor:
    return torch.full((*layers, NUM_PAGES, PAGE_SIZE, num_kv_heads, head_dim), float("nan"), dtype=dtype, device=device)


def assert_stored(stored: Tensor, kv_slots: Tensor, expected: Tensor) -> None:
    """Pages hold `expected` [R, nkv, hd] at the rows' slots and are untouched elsewhere."""
    by_slot = stored.flatten(0, 1)
    assert_close(by_slot[kv_slots], expected)
    others = torch.ones(len(by_slot), dtype=torch.bool, device=stored.device)
    others[kv_slots] = False
    assert bool(by_slot[others].isnan().all())


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SIZES)
@pytest.mark.parametrize("norms", [False, True])
def test_rows(num_heads: int, num_kv_heads: int, head_dim: int, norms: bool, dtype: torch.dtype, device: str) -> None:
    positions, kv_slots = rows(device)
    rotary, total = table(head_dim, device), num_heads + 2 * num_kv_heads
    qkv = randn(len(positions), total * head_dim + 8, dtype=dtype, device=device, seed=1)[:, : total * head_dim]
    heads = qkv.clone().view(len(positions), total, head_dim)
    q_norm, k_norm = (randn(head_dim, dtype=dtype, device=device, seed=i) if norms else None for i in (2, 3))
    keys, values = (pages(num_kv_heads, head_dim, dtype, device) for _ in range(2))
    rope_and_store(qkv, positions, rotary.cos_sin, q_norm, k_norm, EPS, keys, values, kv_slots, num_heads)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q, k = rotated(q, q_norm, rotary, positions), rotated(k, k_norm, rotary, positions)
    got = qkv.unflatten(1, (total, head_dim))
    assert_close(got[:, : num_heads + num_kv_heads], torch.cat((q, k), dim=1))
    assert torch.equal(got[:, num_heads + num_kv_heads :], v)
    assert_stored(keys, kv_slots, k)
    assert_stored(values, kv_slots, v)
    assert torch.equal(values.flatten(0, 1)[kv_slots], v)


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(3, 64), (1, 8), (2, 80)])
def test_context_of_all_layers(num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    positions, kv_slots = rows(device)
    rotary, num_layers = table(head_dim, device), 3
    kv = randn(len(positions), num_layers * 2 * num_kv_heads * head_dim, dtype=dtype, device=device, seed=1)
    before = kv.clone()
    k_norms = randn(num_layers, head_dim, dtype=dtype, device=device, seed=2)
    keys, values = (pages(num_kv_heads, head_dim, dtype, device, (num_layers,)) for _ in range(2))
    store_context(kv, positions, rotary.cos_sin, k_norms, EPS, keys, values, kv_slots)
    assert torch.equal(kv, before)
    parts = kv.view(len(positions), num_layers, 2, num_kv_heads, head_dim)
    for layer in range(num_layers):
        expected = rotated(parts[:, layer, 0], k_norms[layer], rotary, positions)
        assert_stored(keys[layer], kv_slots, expected)
        assert_stored(values[layer], kv_slots, parts[:, layer, 1])


def test_no_rows_are_no_launch(dtype: torch.dtype, device: str) -> None:
    rotary, positions = table(8, device), torch.empty(0, dtype=torch.int64, device=device)
    keys = pages(1, 8, dtype, device, (2,))
    qkv = torch.empty(0, 24, dtype=dtype, device=device)
    rope_and_store(qkv, positions, rotary.cos_sin, None, None, EPS, keys[0], keys[1], positions, 1)
    kv, norms = torch.empty(0, 32, dtype=dtype, device=device), torch.ones(2, 8, dtype=dtype, device=device)
    store_context(kv, positions, rotary.cos_sin, norms, EPS, keys, keys.clone(), positions)
    assert bool(keys.isnan().all())
