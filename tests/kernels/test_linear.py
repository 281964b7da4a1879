"""`fused_linear` and its parts against `ops.fused`: every combination of what it fuses, odd sizes, and its bounds."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels import linear as kernels
from slipstream.kernels.gated import silu_mul
from slipstream.kernels.linear import FUSED, Tile, add_linear, choose_tile, fused_linear, guess_tile, tiled_linear
from slipstream.kernels.norm import rms_norm
from slipstream.models.fused import FusedDecoder
from slipstream.models.layers import DenseAttend
from slipstream.ops import fused
from slipstream.ops.fused import HalfNormed
from slipstream.ops.rope import apply_rope
from slipstream.testing import tiny_models, tiny_spec

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
    half = add_linear(x, weight, None, weight.new_empty(0, 24), (weight[:, 0], weight.t().contiguous()))
    assert half is not None
    assert fused_linear(half.rows, weight.t().contiguous(), norm=weight[:, 0], half=half).shape == (0, 40)
    assert rms_norm(x, weight[0], EPS).shape == (0, 40)
    assert silu_mul(x).shape == (0, 20)


# ---------------------------------------------------------------------------------------------- norms of which half is made

LANES = Tile(rows=16, columns=16, depth=16, lanes=4, warps=4, stages=2)
APART = Tile(rows=32, columns=8, depth=16, lanes=1, warps=4, stages=2, norm_apart=True)
# Rows, inputs of the product into the stream, the stream, outputs of the product that reads it: tiny models, heads of 8
# and 80, one row, several tiles of rows, columns that fill no tile.
CHAINS = [(1, 32, 32, 48), (5, 40, 32, 24), (17, 80, 32, 240), (33, 24, 40, 33), (6, 96, 136, 18)]


def by_tiles(monkeypatch: pytest.MonkeyPatch, tile: Tile) -> None:
    monkeypatch.setattr(kernels, "choose_tile", lambda *_: tile)


@pytest.mark.parametrize("tile", [LANES, APART], ids=["lanes", "apart"])
@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_half_a_norm_is_made_where_rows_are_written(
    chain: tuple[int, int, int, int], tile: Tile, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product behind it reads no row of the stream, and nobody launches a norm."""
    by_tiles(monkeypatch, tile)
    monkeypatch.setattr(kernels, "rms_norm", None)
    num_rows, num_in, hidden, num_out = chain
    given = {"dtype": dtype, "device": device}
    x, weight, bias = (
        draw(num_rows, num_in, **given),
        draw(hidden, num_in, seed=1, **given),
        draw(hidden, seed=2, **given),
    )
    norm, then = draw(hidden, seed=3, **given), draw(2 * num_out, hidden, seed=4, **given)
    stream = draw(num_rows, hidden, seed=5, **given)
    expected = exact(x, weight, bias, residual=stream)
    half = add_linear(x, weight, bias, stream, (norm, then))
    assert half is not None and half.rows.dtype == dtype
    assert_near(stream, expected)
    assert_near(half.rows, stream.double() * norm.double())  # of rows as stored
    assert_near(half.squares.sum(1), stream.double().square().sum(1))
    unread = torch.full_like(stream, torch.nan)
    for gated in (False, True):
        actual = fused_linear(unread, then, norm=norm, eps=EPS, gated=gated, half=half)
        assert_near(actual, exact(stream, then, norm=norm, eps=EPS, gated=gated))


def test_fp16_rows_are_normed_before_they_are_weighted(device: str) -> None:
    """Else a long row times a large weight of the norm leaves the range."""
    given: dict[str, Any] = {"dtype": torch.float16, "device": device}
    x, weight, then = draw(3, 24, **given), draw(40, 24, seed=1, **given), 0.1 * draw(9, 40, seed=2, **given)
    norm, stream = torch.full((40,), 8.0, **given), 1e4 * draw(3, 40, seed=3, **given).clamp(-2, 2)
    half = add_linear(x, weight, None, stream, (norm, then))
    actual = fused_linear(stream, then, norm=norm, eps=EPS, half=half)
    torch.testing.assert_close(actual.double(), exact(stream, then, norm=norm, eps=EPS), rtol=1e-2, atol=1e-1)


def test_the_reference_has_the_same_two_ways(device: str) -> None:
    given: dict[str, Any] = {"dtype": torch.float32, "device": device}
    x, weight, norm = draw(5, 24, **given), draw(40, 24, seed=1, **given), draw(40, seed=2, **given)
    then, stream = draw(9, 40, seed=3, **given), draw(5, 40, seed=4, **given)
    half = fused.add_linear(x, weight, None, stream, (norm, then))
    actual, expected = (fused.fused_linear(stream, then, norm=norm, eps=EPS, half=h) for h in (half, None))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert fused.add_linear(x, weight, None, stream) is None


def test_rows_stay_whole_where_a_library_makes_either_product(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, then = (draw(*shape, dtype=dtype, device=device) for shape in ((3, 24), (40, 24), (9, 40)))
    for library in (weight, then):
        monkeypatch.setattr(kernels, "choose_tile", lambda _, w, __, library=library: None if w is library else LANES)
        stream = draw(3, 40, dtype=dtype, device=device, seed=1)
        expected = exact(x, weight, residual=stream)
        assert add_linear(x, weight, None, stream, (then[0], then)) is None
        assert_near(stream, expected)


def test_a_half_normed_row_that_is_not_finite_stays_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_tiles(monkeypatch, APART)
    given: dict[str, Any] = {"dtype": torch.float32, "device": device}
    x, weight, then = draw(4, 24, **given), draw(43, 24, seed=1, **given), draw(20, 43, seed=2, **given)

    def chain() -> Tensor:
        stream = torch.zeros(4, 43, device=device)
        return fused_linear(
            stream, then, norm=then[0], eps=EPS, half=add_linear(x, weight, None, stream, (then[0], then))
        )

    expected = chain()
    x[2] = torch.nan
    actual, others = chain(), [0, 1, 3]
    assert torch.equal(actual[others], expected[others]) and actual[2].isnan().all()


def test_halves_fill_their_places_and_no_more(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stream, rows and squares lie in one buffer of NaN, and the stream's rows in wider ones."""
    buffer = torch.full((4096,), torch.nan, device=device)
    given: dict[str, Any] = {"dtype": torch.float32, "device": device}
    x, weight, norm = draw(18, 24, **given), draw(21, 24, seed=1, **given), draw(21, seed=2, **given)
    stream = buffer[:900].view(18, 50)[:, 7:28]
    half = HalfNormed(buffer[1000 : 1000 + 18 * 21].view(18, 21), buffer[2000 : 2000 + 18 * 3].view(18, 3))
    stream.fill_(0)
    num_before = int(buffer.isnan().sum())
    tiled_linear(x, weight, None, APART, residual=stream, into=(norm, half))
    assert_near(half.rows, exact(x, weight) * norm.double())
    assert_near(half.squares.sum(1), exact(x, weight).square().sum(1))
    assert int(buffer.isnan().sum()) == num_before - 18 * 21 - 18 * 3


@pytest.mark.parametrize("num_rows", [3, 33])
def test_a_network_launches_the_norms_of_its_ends_alone(
    num_rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And computes what the plain modules do; in fp32, for in bf16 layers round differently."""
    by_tiles(monkeypatch, APART)
    launched: list[Tensor] = []

    def counted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        launched.append(weight)
        return rms_norm(x, weight, eps)

    monkeypatch.setattr(kernels, "rms_norm", counted)
    decoder = tiny_models(spec=tiny_spec(vocab_size=40)).target.to(device)
    spec, positions = decoder.spec, torch.arange(num_rows, device=device)
    cos, sin = decoder.rotary.table(positions)
    dense, network = DenseAttend(spec), FusedDecoder(decoder, FUSED)

    def attend(layer: int, qkv: Tensor) -> Tensor:
        heads = qkv.view(num_rows, -1, spec.head_dim)
        qk, v = heads.split_with_sizes((spec.num_heads + spec.num_kv_heads, spec.num_kv_heads), 1)
        norms = network.head_norms(layer)
        parts = qk.split_with_sizes((spec.num_heads, spec.num_kv_heads), 1)
        q, k = (
            apply_rope(part if norm is None else fused.rms_norm(part, norm, spec.rms_norm_eps), cos, sin)
            for part, norm in zip(parts, norms, strict=True)
        )
        return dense(layer, q, k, v)

    token_ids = (7 * positions) % 40
    stream = torch.empty(num_rows, spec.hidden_size, device=device)
    taps = {0: torch.empty_like(stream)}
    logits = network.logits(network.forward(token_ids, attend, taps, stream))
    hidden, features = decoder(token_ids, positions, dense, taps=(0,))
    assert [w is decoder.norm.weight for w in launched] == [False, True]
    assert features is not None
    assert_near(taps[0], features)
    assert_near(logits, decoder.logits(hidden))


def test_tiles_are_chosen_by_rows() -> None:
    weight = torch.empty(960, 576, dtype=torch.bfloat16, device="meta")
    assert choose_tile(1, weight, True) is not None
    assert choose_tile(100_000, weight, True) is None
    for max_rows, tile in itertools.chain.from_iterable(kernels.TUNED.values()):
        assert max_rows > 0 and (tile is None or tile.rows >= 16)
    for listed in kernels.TUNED.values():
        assert [rows for rows, _ in listed] == sorted(rows for rows, _ in listed)
