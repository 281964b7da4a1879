"""Noise inside kernels: the integers of `ops.noise` bit for bit, and fp32 noise as accurate as its float64."""

import math
import random

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.noise import draft_gumbel_run, gumbel_at, gumbel_from_bits, gumbel_run, philox_words, uniform
from slipstream.ops.noise import CounterSource, Purpose, draft_gumbel, gumbel, philox

SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0)
POSITIONS = (0, 1, 4095, 2**31, 2**33 + 5, 2**40)


@triton.jit
def _words(out, seeds, positions, num_counters, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    counter = tl.arange(0, BLOCK)
    words = philox_words(tl.load(seeds + row), tl.load(positions + row), counter, PURPOSE)
    for lane in tl.static_range(4):
        tl.store(out + (row * num_counters + counter) * 4 + lane, words[lane].to(tl.int64))


@triton.jit
def _run(out, seeds, positions, rows, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, ROWS)
    seed = tl.load(seeds + row, mask=row < rows, other=0)
    position = tl.load(positions + row, mask=row < rows, other=0)
    noise = gumbel_run(seed[:, None], position[:, None], tl.arange(0, BLOCK // 4)[None, :])
    tl.store(out + row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], noise, mask=row[:, None] < rows)


@triton.jit
def _draft_run(out, seeds, anchors, first_offset, BLOCK: tl.constexpr):
    row, offset = tl.program_id(0), tl.program_id(1)
    noise = draft_gumbel_run(
        tl.load(seeds + row), tl.load(anchors + row), first_offset + offset, tl.arange(0, BLOCK // 4)
    )
    tl.store(out + (row * tl.num_programs(1) + offset) * BLOCK + tl.arange(0, BLOCK), noise)


@triton.jit
def _at(out, seeds, positions, token_ids, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    noise = gumbel_at(tl.load(seeds + row), tl.load(positions + row), tl.load(token_ids + column))
    tl.store(out + row * BLOCK + column, noise)


@triton.jit
def _from_bits(out, bits, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r = tl.load(bits + index, mask=index < size, other=0).to(tl.uint32)
    tl.store(out + index, gumbel_from_bits(r), mask=index < size)


@triton.jit
def _uniform(out, seeds, anchors, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    row, offset = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(out + row * BLOCK + offset, uniform(tl.load(seeds + row), tl.load(anchors + row), offset, PURPOSE))


@pytest.fixture
def keys(device: str) -> tuple[Tensor, Tensor]:
    """Every seed with every position."""
    pairs = torch.cartesian_prod(torch.tensor(SEEDS), torch.tensor(POSITIONS))
    return pairs[:, 0].contiguous().to(device), pairs[:, 1].contiguous().to(device)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_words_are_bit_equal_for_every_purpose(keys: tuple[Tensor, Tensor], purpose: Purpose) -> None:
    seeds, positions = keys
    out = torch.empty(len(seeds), 64, 4, dtype=torch.int64, device=seeds.device)
    _words[(len(seeds),)](out, seeds, positions, 64, PURPOSE=int(purpose), BLOCK=64)
    assert torch.equal(out, philox(seeds, positions, torch.arange(64, device=seeds.device), purpose))


def test_a_run_of_ids_is_the_reference_row(keys: tuple[Tensor, Tensor]) -> None:
    seeds, positions = keys
    out = torch.empty(len(seeds), 128, device=seeds.device)
    _run[(1,)](out, seeds, positions, len(seeds), ROWS=64, BLOCK=128)
    torch.testing.assert_close(out, gumbel(seeds, positions, 128), rtol=5e-7, atol=5e-7)


@pytest.mark.parametrize("first_offset", [0, 255])
def test_noise_of_drafts_is_the_reference_row(keys: tuple[Tensor, Tensor], first_offset: int) -> None:
    seeds, anchors = keys
    out = torch.empty(len(seeds), 3, 64, device=seeds.device)
    _draft_run[(len(seeds), 3)](out, seeds, anchors, first_offset, BLOCK=64)
    for j in range(3):
        expected = draft_gumbel(seeds, anchors, torch.full_like(anchors, first_offset + j), 62)
        torch.testing.assert_close(out[:, j, :62], expected, rtol=5e-7, atol=5e-7)


def test_scattered_ids_are_columns_of_the_reference_row(keys: tuple[Tensor, Tensor]) -> None:
    seeds, positions = keys
    token_ids = torch.tensor(random.Random(0).sample(range(151_936), 64), device=seeds.device)
    out = torch.empty(len(seeds), 64, device=seeds.device)
    _at[(len(seeds),)](out, seeds, positions, token_ids, BLOCK=64)
    torch.testing.assert_close(out, gumbel(seeds, positions, 0, token_ids), rtol=5e-7, atol=5e-7)


def _hard_bits() -> list[int]:
    """All scales near both ends and the middle, where formulas change, and some of everything else."""
    near_ends = [(1 << k) + d for k in range(33) for d in (-2, -1, 0, 1, 2)]
    flipped = [2**32 - 1 - r for r in near_ends]
    middle = [2**31 + d for d in range(-300, 300)]
    generator = random.Random(1)
    anything = [generator.getrandbits(32) for _ in range(30_000)]
    small = [generator.getrandbits(generator.randrange(1, 33)) for _ in range(10_000)]
    return [r for r in near_ends + flipped + middle + anything + small if 0 <= r < 2**32]


def test_fp32_noise_is_as_accurate_as_float64_rounded_to_fp32(device: str) -> None:
    bits = torch.tensor(_hard_bits(), device=device)
    out = torch.empty(len(bits), device=device)
    _from_bits[(triton.cdiv(len(bits), 1024),)](out, bits, len(bits), BLOCK=1024)
    exact = [-math.log(-math.log1p(-(r + 0.5) * 2.0**-32)) for r in bits.tolist()]
    error = (out.double().cpu() - torch.tensor(exact, dtype=torch.float64)).abs()
    # Inner result to a few 2^-24, which the outer logarithm turns into an absolute error; and the result's rounding.
    assert (error <= 4e-7 + 2.0**-23 * torch.tensor(exact).abs()).all(), error.max()
    assert out.isfinite().all() and out.min() > -3.15 and out.max() < 22.9


@pytest.mark.parametrize("purpose", [Purpose.ACCEPT, Purpose.RESIDUAL])
def test_uniforms_are_bit_equal(keys: tuple[Tensor, Tensor], purpose: Purpose) -> None:
    seeds, anchors = keys
    out = torch.empty(len(seeds), 16, dtype=torch.float64, device=seeds.device)
    _uniform[(len(seeds),)](out, seeds, anchors, PURPOSE=int(purpose), BLOCK=16)
    for offset in range(16):
        expected = CounterSource._uniform(seeds, anchors, torch.full_like(anchors, offset), purpose)
        assert torch.equal(out[:, offset], expected)
