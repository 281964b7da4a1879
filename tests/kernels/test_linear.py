"""`fused_linear` and its parts against `ops.fused`: every combination of what it fuses, odd sizes, and its bounds."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels import linear as kernels
from slipstream.kernels.gated import silu_mul
from slipstream.kernels.linear import Tile, choose_tile, fused_linear, guess_tile, tiled_linear
from slipstream.kernels.norm import rms_norm
from slipstream.ops import fused

EPS = 1e-5
# Rows, outputs, inputs: odd everything, whole tiles, a tiny model, more rows than a tile, more inputs than a turn.
SHAPES = [(3, 33, 136), (16, 32, 64), (1, 50, 40), (5, 32, 32), (21, 18, 96), (2, 7, 300)]


def draw(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[actual.dtype]
    assert torch.isfinite(actual).all()
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-6)
    assert error < tolerance, float(error)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """The reference in float64."""
    tensors = {name: v.double() if isinstance(v, Tensor) else v for name, v in options.items()}
    return fused.fused_linear(x.double(), weight.double(), None if bias is None else bias.double(), **tensors)


COMBINATIONS = tuple(itertools.product((False, True), (False, True), (False, True), ("new", "out", "residual")))


@pytest.mark.parametrize("library", [False, True], ids=["kernel", "library"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(
    shape: tuple[int, int, int], library: bool, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = (lambda *_: None) if library else (lambda _, weight, has_norm: guess_tile(weight, has_norm))
    monkeypatch.setattr(kernels, "choose_tile", choice)
    # All 24 for one shape, a fifth of them, every single choice among them, for the others: the interpreter is slow.
    for has_norm, has_bias, gated, where in COMBINATIONS[:: 1 if shape == SHAPES[0] else 5]:
        assert_combination(shape, has_norm, has_bias, gated, where, dtype, device)


def assert_combination(
    shape: tuple[int, int, int],
    has_norm: bool,
    has_bias: bool,
    gated: bool,
    where: str,
    dtype: torch.dtype,
    device: str,
) -> None:
    num_rows, num_out, num_in = shape
    x = draw(num_rows, num_in, dtype=dtype, device=device)
    weight = draw(num_out * (1 + gated), num_in, dtype=dtype, device=device, seed=1)
    bias = draw(num_out * (1 + gated), dtype=dtype, device=device, seed=2) if has_bias else None
    options: dict[str, Any] = {"gated": gated}
    if has_norm:
        options |= {"norm": draw(num_in, dtype=dtype, device=device, seed=3), "eps": EPS}
    target = draw(num_rows, num_out, dtype=dtype, device=device, seed=4)
    expected = exact(x, weight, bias, **options, **({"residual": target} if where == "residual" else {}))
    given = {} if where == "new" else {where: target}
    actual = fused_linear(x, weight, bias, **options, **given)
    assert actual.dtype == dtype and (where == "new" or actual is target)
    assert_near(actual, expected)


@pytest.mark.parametrize(
    "tile",
    [
        Tile(rows=16, columns=16, depth=16, lanes=1, warps=1, stages=2),
        Tile(rows=16, columns=8, depth=16, lanes=8, warps=4, stages=3),
        Tile(rows=32, columns=16, depth=16, lanes=2, warps=4, stages=3, norm_apart=True),
        Tile(rows=64, columns=32, depth=32, lanes=2, warps=8, stages=4),
    ],
    ids=lambda tile: f"{tile.rows}x{tile.columns}x{tile.depth}x{tile.lanes}",
)
def test_any_tile_computes_the_same(tile: Tile, dtype: torch.dtype, device: str) -> None:
    x, weight = (draw(n, 72, dtype=dtype, device=device, seed=n) for n in (37, 44))
    norm = draw(72, dtype=dtype, device=device, seed=5)
    options: dict[str, Any] = {"norm": norm, "eps": EPS, "gated": True}
    assert_near(tiled_linear(x, weight, None, tile, **options), exact(x, weight, **options))


def test_rows_of_wider_matrices(dtype: torch.dtype, device: str) -> None:
    """Views of rows are read and written, and what lies between them is left alone, whatever it holds."""
    wide = torch.full((5, 100), torch.nan, dtype=dtype, device=device)
    x, weight = draw(5, 40, dtype=dtype, device=device), draw(24, 40, dtype=dtype, device=device)
    wide[:, 8:48] = x
    wide[:, 64:88] = 0
    residual = wide[:, 64:88]
    fused_linear(wide[:, 8:48], weight, residual=residual)
    assert_near(residual, exact(x, weight))
    assert wide[:, 48:64].isnan().all() and wide[:, 88:].isnan().all()
    assert_near(rms_norm(wide[:, 8:48], weight[0], EPS), fused.rms_norm(x.double(), weight[0].double(), EPS))
    assert_near(silu_mul(wide[:, 64:88].clone()), exact(x, weight, gated=True))


def test_memory_around_the_operands_stays_out(dtype: torch.dtype, device: str) -> None:
    """All in one buffer of NaN: whatever was read beyond an operand would show in the result."""
    buffer = torch.full((4096,), torch.nan, dtype=dtype, device=device)
    num_rows, num_out, num_in = 3, 22, 40
    x, weight, norm, bias, out = (
        buffer[start : start + size].view(shape)
        for start, size, shape in (
            (512, num_rows * num_in, (num_rows, num_in)),
            (1024, num_out * num_in, (num_out, num_in)),
            (2048, num_in, (num_in,)),
            (2560, num_out, (num_out,)),
            (3072, num_rows * num_out // 2, (num_rows, num_out // 2)),
        )
    )
    for seed, operand in enumerate((x, weight, norm, bias, out)):
        operand.copy_(draw(*operand.shape, dtype=dtype, device=device, seed=seed))
    num_before = int(buffer.isnan().sum())
    fused_linear(x, weight, bias, norm=norm, eps=EPS, gated=True, out=out)
    assert_near(out, exact(x, weight, bias, norm=norm, eps=EPS, gated=True))
    assert int(buffer.isnan().sum()) == num_before


def test_a_row_that_is_not_finite_stays_alone(dtype: torch.dtype, device: str) -> None:
    x, weight = draw(4, 40, dtype=dtype, device=device), draw(24, 40, dtype=dtype, device=device)
    norm = torch.ones(40, dtype=dtype, device=device)
    expected = fused_linear(x, weight, norm=norm, eps=EPS)
    x[2] = torch.nan
    actual = fused_linear(x, weight, norm=norm, eps=EPS)
    others = [0, 1, 3]
    assert torch.equal(actual[others], expected[others]) and actual[2].isnan().all()


def test_no_rows(dtype: torch.dtype, device: str) -> None:
    weight = draw(24, 40, dtype=dtype, device=device)
    x = draw(0, 40, dtype=dtype, device=device)
    assert fused_linear(x, weight, gated=True).shape == (0, 12)
    assert rms_norm(x, weight[0], EPS).shape == (0, 40)
    assert silu_mul(x).shape == (0, 20)


def test_tiles_are_chosen_by_rows() -> None:
    weight = torch.empty(960, 576, dtype=torch.bfloat16, device="meta")
    assert choose_tile(1, weight, True) is not None
    assert choose_tile(100_000, weight, True) is None
    for max_rows, tile in itertools.chain.from_iterable(kernels.TUNED.values()):
        assert max_rows > 0 and (tile is None or tile.rows >= 16)
    for listed in kernels.TUNED.values():
        assert [rows for rows, _ in listed] == sorted(rows for rows, _ in listed)
