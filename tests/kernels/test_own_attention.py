"""Attention of rows that bring their keys against its parts: rotation and the KV write, then attention over pages."""

import itertools

import pytest
import torch
from torch import Tensor

from slipstream.cache.pages import SCRATCH_PAGE
from slipstream.kernels.attention import Launch, Tiles, Workspace, paged_attention
from slipstream.kernels.own_attention import block_attention, decode_attention
from slipstream.kernels.rope import rope_and_store
from slipstream.models.layers import Rotary
from slipstream.models.rope import RopeSpec
from tests.kernels.steps import NAN, TINY_LAUNCH, Shape, Step, assert_close, one_row, workspace

# The interpreter is NumPy, which warns of what padding rows do: 1 / 0, and a maximum of nothing but NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SLOW = pytest.mark.slow  # interpreted
EPS, MAX_POSITION = 1e-5, 72  # some rows stand beyond the table
DECODING = ([29, 0, 17, 70, 3], [4, 6, 1, 8, 0])  # context and rows of each sequence; one has none


def turn(step: Step, norms: bool) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
    """cos_sin, q_norm, k_norm, eps."""
    shape, device = step.shape, step.qkv.device
    cos_sin = Rotary(RopeSpec(theta=100.0), shape.head_dim, MAX_POSITION).cos_sin.to(device)
    if not norms:
        return cos_sin, None, None, EPS
    weights = torch.randn(2, shape.head_dim, generator=torch.Generator().manual_seed(5)).to(step.qkv)
    return cos_sin, weights[0], weights[1], EPS


def places(step: Step) -> tuple[Tensor, Tensor]:
    """Position and KV slot of every row, padding in the scratch page."""
    positions, kv_slots, ps = [], [], step.shape.page_size
    for slot, start, count in zip(step.slots.tolist(), step.context[step.slots].tolist(), step.rows, strict=True):
        for position in range(start, start + count):
            positions.append(position)
            kv_slots.append(int(step.table[slot, position // ps]) * ps + position % ps)
    padding = range(len(step.qkv) - len(positions))
    made = positions + [0 for _ in padding], kv_slots + [SCRATCH_PAGE * ps + i % ps for i in padding]
    return torch.tensor(made[0], device=step.qkv.device), torch.tensor(made[1], device=step.qkv.device)


def assert_same(got: Tensor, expected: Tensor) -> None:
    """Up to rounding; NaN where NaN is expected."""
    tolerance = 2e-2 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def check_decode(
    step: Step, block_q: int, num_splits: int, window: int | None, norms: bool, launch: Launch | None = TINY_LAUNCH
) -> None:
    """Outputs, stored KV and counters, after a second call too; nothing else is written, and qkv stays as it was."""
    shape, space = step.shape, workspace(step.shape, block_q, str(step.qkv.device))
    (positions, kv_slots), turns, tiles = places(step), turn(step, norms), step.tiles(block_q, num_splits)
    num_rows, scale, before = sum(step.rows), shape.head_dim**-0.5, step.qkv.clone()
    for pages in (step.key_pages, step.value_pages):
        pages.flatten(0, 1)[kv_slots[:num_rows]] = NAN  # nobody reads a row's key before it is there
    expected_pages = [step.key_pages.clone(), step.value_pages.clone()]
    rows = step.qkv.clone()
    rope_and_store(rows, positions, *turns, *expected_pages, kv_slots, shape.num_heads)
    q = rows[:, : shape.num_heads * shape.head_dim].view(len(rows), shape.num_heads, shape.head_dim)
    expected = paged_attention(q, *expected_pages, tiles, step.table, scale, window, space, launch=launch)
    for pages in expected_pages:
        pages[SCRATCH_PAGE] = NAN  # padding rows store nothing
    for _ in range(1 if num_splits == 1 else 2):
        out = torch.full_like(expected, 7.0)
        got = decode_attention(
            step.qkv, step.key_pages, step.value_pages, tiles, step.table, *turns, kv_slots, scale, window, space,
            out=out, launch=launch,
        )  # fmt: skip
        assert got is out and bool((out[num_rows:] == 7).all())
        assert_same(out[:num_rows], expected[:num_rows])
        for pages, wanted in zip((step.key_pages, step.value_pages), expected_pages, strict=True):
            assert_same(pages, wanted)
        assert not bool(space.arrivals.any())
    assert torch.equal(step.qkv, before)


@pytest.mark.parametrize(
    ("num_splits", "window", "norms"),
    [
        (1, None, True),
        (3, None, False),
        (4, 33, True),
        *(pytest.param(*case, marks=SLOW) for case in [(1, 33, False), (3, 5, True), (4, 1, False)]),
    ],
)
def test_decoding_rows(dtype: torch.dtype, device: str, num_splits: int, window: int | None, norms: bool) -> None:
    check_decode(Step(Shape(), *DECODING, dtype, device), 8, num_splits, window, norms)


def test_one_row_each(dtype: torch.dtype, device: str) -> None:
    check_decode(Step(Shape(), [40, 0, 16, 33], [1, 1, 1, 1], dtype, device), 1, 4, None, True)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(num_kv_heads=1, group=1, head_dim=16, page_size=16),
        Shape(num_kv_heads=3, group=3, head_dim=64, page_size=64),  # SmolLM2's; a page holds several chunks
        Shape(num_kv_heads=2, group=2, head_dim=80, page_size=7),  # half a head is no power of two
        Shape(num_kv_heads=2, group=4, head_dim=128, page_size=8),
        Shape(num_kv_heads=1, group=8, head_dim=8, page_size=1),
    ],
    ids=lambda shape: f"{shape.num_heads}x{shape.num_kv_heads}x{shape.head_dim}p{shape.page_size}",
)
@pytest.mark.parametrize(("num_splits", "window", "norms"), [pytest.param(1, None, True, marks=SLOW), (3, 50, False)])
def test_sizes(dtype: torch.dtype, device: str, shape: Shape, num_splits: int, window: int | None, norms: bool) -> None:
    step = Step(shape, [70, 130, 0], [3, 1, 4], dtype, device)
    check_decode(step, 4, num_splits, window, norms, Launch(32, 4, 2, min_split_tokens=32))


@SLOW
def test_the_usual_launch(dtype: torch.dtype, device: str) -> None:
    check_decode(Step(Shape(head_dim=16), [300, 5], [17, 3], dtype, device), 32, 2, None, True, None)


@pytest.mark.parametrize("window", [None, 4, 30])
@pytest.mark.parametrize(("n", "num_splits", "norms"), [(1, 1, True), (5, 3, False), (17, 2, True)])
def test_blocks(dtype: torch.dtype, device: str, window: int | None, n: int, num_splits: int, norms: bool) -> None:
    shape, context = Shape(num_kv_heads=1, head_dim=16), [37, 0, 66]
    step = Step(shape, context, [0] * len(context), dtype, device)
    rows = torch.randn(len(context) * n, shape.heads_dim, generator=torch.Generator().manual_seed(n)).to(device, dtype)
    turns, space = turn(step, norms), workspace(shape, n, device)
    turned, before = rows.clone(), (step.key_pages.clone(), step.value_pages.clone())
    positions = torch.cat([torch.arange(start, start + n) for start in context]).to(device)
    elsewhere = (
        step.key_pages.clone(),
        step.value_pages.clone(),
        torch.zeros_like(positions),
    )  # what it stores is unused
    rope_and_store(turned, positions, *turns, *elsewhere, shape.num_heads)
    heads = turned.view(len(context), n, -1, shape.head_dim)
    q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=2)
    for _ in range(1 if num_splits == 1 else 2):
        out = block_attention(
            rows, step.key_pages, step.value_pages, step.blocks(n, num_splits), step.table, *turns,
            shape.head_dim**-0.5, window, space, launch=TINY_LAUNCH,
        )  # fmt: skip
        assert out.shape == (len(context) * n, shape.num_heads * shape.head_dim)
        assert not bool(space.arrivals.any())
        for b, i in itertools.product(range(len(context)), range(n)):
            first = 0 if window is None else max(0, context[b] + i - window + 1)
            inside = slice(0, n) if window is None else slice(max(0, i - window + 1), i + 1)
            keys, values = (
                torch.cat([past[first : context[b]], own[b, inside].double().cpu()])
                for past, own in zip(step.kv[b], (k, v), strict=True)
            )
            assert_close(out[b * n + i], one_row(q[b, i].double().cpu(), keys, values))
    for pages, same in zip((step.key_pages, step.value_pages), before, strict=True):
        assert torch.equal(pages.nan_to_num(), same.nan_to_num())


def test_fewer_rows_leave_the_others_as_they_are(dtype: torch.dtype, device: str) -> None:
    """Rows of a tile beyond its number are nobody's: drafts are pruned on the device, a launch knows only the most."""
    step = Step(Shape(head_dim=16), [40, 9], [4, 4], dtype, device)
    space, tiles = workspace(step.shape, 4, device), step.tiles(4, 2)
    whole = call(step, tiles, space)
    step.qkv[2:4] = step.qkv[6:8] = NAN
    tiles.records[:, 1].clamp_(max=2)
    assert torch.equal(call(step, tiles, space)[[0, 1, 4, 5]], whole[[0, 1, 4, 5]])


def call(step: Step, tiles: Tiles, space: Workspace) -> Tensor:
    """With the usual launch."""
    (_, kv_slots), scale = places(step), step.shape.head_dim**-0.5
    return decode_attention(
        step.qkv, step.key_pages, step.value_pages, tiles, step.table, *turn(step, True), kv_slots, scale, None, space,
    )[: sum(step.rows)]  # fmt: skip


# What only a device can get wrong. The shape is that of Qwen3-8B's attention.
WIDE = Shape(num_kv_heads=8, group=4, head_dim=128, page_size=16)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "block_q", "num_splits"), [(WIDE, 8, 4), (WIDE, 32, 1), (Shape(3, 3, 64, 16), 8, 3)])
def test_on_a_device(shape: Shape, block_q: int, num_splits: int) -> None:
    context, rows = [2100, 700, 1500, 3, 2048, 0] * 4, [8, 1, 5, 2, 3, 4] * 4
    check_decode(Step(shape, context, rows, torch.bfloat16, "cuda"), block_q, num_splits, None, True, None)
    check_decode(Step(shape, context, rows, torch.bfloat16, "cuda"), block_q, num_splits, 1000, False, None)


@pytest.mark.gpu
def test_programs_that_arrive_in_any_order_give_the_same_bits() -> None:
    step = Step(WIDE, [2100, 700, 1500, 3, 2048] * 6, [8, 1, 5, 2, 3] * 6, torch.bfloat16, "cuda")
    space, tiles = workspace(WIDE, 8, "cuda"), step.tiles(8, 4)
    first = call(step, tiles, space)
    for _ in range(300):
        space.partials.fill_(NAN)
        space.stats.fill_(NAN)
        assert torch.equal(call(step, tiles, space), first)
    assert not bool(space.arrivals.any())
