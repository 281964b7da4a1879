"""The attention kernel against the definition, row by row in float64, over ragged steps and odd sizes."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from slipstream.kernels.attention import (
    MAX_SPLIT_PROGRAMS,
    Launch,
    Tiles,
    Workspace,
    _fits,
    _packed_rows,
    attention_workspace,
    choose_launch,
    choose_splits,
    paged_attention,
)
from tests.kernels.steps import NAN, TINY_LAUNCH, Shape, Step, assert_close, workspace

# The interpreter is NumPy, which warns of what padding rows do: 1 / 0, and a maximum of nothing but NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _scalars_are_loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 interprets a scalar as an array of one element, which NumPy 2.4 no longer takes for an integer."""
    usual = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        usual(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


def run_paged(step: Step, tiles: Tiles, window: int | None, space: Workspace, launch: Launch | None) -> Tensor:
    """The rows that have a tile; the padding rows must be as they were."""
    out = torch.full((len(step.qkv), step.shape.num_heads * step.shape.head_dim), 7.0).to(step.qkv)
    got = paged_attention(
        step.heads(0, step.shape.num_heads), step.key_pages, step.value_pages, tiles, step.table,
        step.shape.head_dim**-0.5, window, space, out=out, launch=launch,
    )  # fmt: skip
    assert got is out
    num_rows = sum(step.rows)
    assert bool((out[num_rows:] == 7).all())
    return out[:num_rows]


MIXED = ([29, 0, 17, 70, 3], [4, 6, 1, 2, 0])  # verify, prefill from nothing, decode, verify, a padding sequence


@pytest.mark.parametrize(
    ("block_q", "num_splits", "window"),
    [(8, 1, None), (4, 4, None), (4, 1, 33), (8, 4, 33), (8, 1, 5), (1, 4, 5)],
)
def test_mixed_rows(dtype: torch.dtype, device: str, block_q: int, num_splits: int, window: int | None) -> None:
    shape = Shape()
    step, space = Step(shape, *MIXED, dtype, device), workspace(shape, block_q, device)
    for _ in range(1 if num_splits == 1 else 2):  # a second call finds the counters as the first left them
        got = run_paged(step, step.tiles(block_q, num_splits), window, space, TINY_LAUNCH)
        assert_close(got, step.expected(window))
        assert not bool(space.arrivals.any())


@pytest.mark.parametrize(
    "shape",
    [
        Shape(num_kv_heads=1, group=1, head_dim=16, page_size=16),
        Shape(num_kv_heads=3, group=3, head_dim=64, page_size=64),  # SmolLM2's; a page holds several chunks
        Shape(num_kv_heads=2, group=2, head_dim=80, page_size=7),  # a page size that divides nothing
        Shape(num_kv_heads=2, group=4, head_dim=128, page_size=8),
        Shape(num_kv_heads=1, group=8, head_dim=64, page_size=1),
    ],
    ids=lambda shape: f"{shape.num_heads}x{shape.num_kv_heads}x{shape.head_dim}p{shape.page_size}",
)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_sizes(dtype: torch.dtype, device: str, shape: Shape, num_splits: int) -> None:
    step, space = Step(shape, [70, 130, 0], [3, 1, 5], dtype, device), workspace(shape, 4, device)
    launch = dataclasses.replace(choose_launch(16, shape.head_dim, dtype, 16), min_split_tokens=32)
    window = None if num_splits == 1 else 100
    assert_close(run_paged(step, step.tiles(4, num_splits), window, space, launch), step.expected(window))


def test_the_usual_launch_gives_the_same_rows_in_any_tiling(dtype: torch.dtype, device: str) -> None:
    shape = Shape(head_dim=16)
    step, space = Step(shape, [300, 5], [17, 3], dtype, device), workspace(shape, 32, device)
    for block_q, num_splits in ((32, 2), (16, 1)):
        assert_close(run_paged(step, step.tiles(block_q, num_splits), None, space, None), step.expected(None))


def test_more_splits_than_are_merged_at_a_time(dtype: torch.dtype, device: str) -> None:
    shape = Shape(num_kv_heads=1, group=2, head_dim=16)
    step, space = Step(shape, [1500, 40], [2, 1], dtype, device), workspace(shape, 2, device)
    for _ in range(2):
        assert_close(run_paged(step, step.tiles(2, 9), None, space, TINY_LAUNCH), step.expected(None))
        assert not bool(space.arrivals.any())
    used = (
        space.stats[: 4 * 9 * 32].view(4, 9, 16, 2)[:, :, 0].isfinite().all(-1).sum(1)
    )  # of the programs of each tile
    assert sorted(used.tolist()) == [0, 0, 3, 9]


def test_a_row_that_is_not_finite_spoils_itself_alone(dtype: torch.dtype, device: str) -> None:
    shape = Shape()
    step, space = Step(shape, [20, 9], [4, 2], dtype, device), workspace(shape, 4, device)
    clean = run_paged(step, step.tiles(4, 2), None, space, TINY_LAUNCH)
    step.qkv[1, : shape.num_heads * shape.head_dim] = NAN
    got = run_paged(step, step.tiles(4, 2), None, space, TINY_LAUNCH)
    assert bool(got[1].isnan().all())
    others = [0, 2, 3, 4, 5]
    assert torch.equal(got[others], clean[others])


def test_splits_follow_load_and_length() -> None:
    assert choose_splits(num_tiles=1, num_kv_heads=3, max_context_hint=60) == 1  # too short
    assert choose_splits(num_tiles=1, num_kv_heads=3, max_context_hint=300) == 4
    assert choose_splits(num_tiles=32, num_kv_heads=3, max_context_hint=300) == 1  # splits may be short on an idle GPU
    assert choose_splits(num_tiles=32, num_kv_heads=3, max_context_hint=2048) == 4
    assert choose_splits(num_tiles=1, num_kv_heads=8, max_context_hint=32768) == 32
    assert choose_splits(num_tiles=512, num_kv_heads=8, max_context_hint=10**5) == 1  # the GPU is full
    for tiles, heads, hint in itertools.product((1, 3, 32, 256), (1, 3, 8), (1, 4096, 10**6)):
        splits = choose_splits(tiles, heads, hint)
        assert splits == 1 or splits * tiles * heads <= MAX_SPLIT_PROGRAMS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_launches_suit_the_kernel(dtype: torch.dtype) -> None:
    """The shortest split is a whole number of chunks, or the reverse; everything staged fits a multiprocessor."""
    for packed, head_dim, pairs in itertools.product((16, 32, 64, 128), (16, 64, 80, 128), (1, 24, 96, 384, 4096)):
        launch = choose_launch(packed, head_dim, dtype, pairs)
        assert launch.min_split_tokens.bit_count() == launch.chunk_n.bit_count() == 1
        padded = 1 << (head_dim - 1).bit_length()
        assert 2 * launch.num_stages * launch.chunk_n * padded * dtype.itemsize <= 200 * 1024


def test_every_launch_fits_the_usual_workspace() -> None:
    shape, most_rows = Shape(num_kv_heads=8, group=4, head_dim=16), 17
    space = attention_workspace(shape.num_heads, shape.num_kv_heads, shape.head_dim, most_rows, "cpu")
    for tiles in range(1, 100):
        splits = choose_splits(tiles, shape.num_kv_heads, 10**6)
        assert splits == 1 or _fits(space, tiles * shape.num_kv_heads, splits, _packed_rows(most_rows, 4), 16)


def test_a_workspace_that_is_too_small_is_refused(device: str) -> None:
    shape = Shape()
    step, space = Step(shape, [20, 9], [4, 2], torch.float32, device), workspace(shape, 1, device)
    with pytest.raises(AssertionError, match="too small"):
        run_paged(step, step.tiles(4, 400), None, space, TINY_LAUNCH)


# What only a device can get wrong. The shape is that of Qwen3-8B's attention.
WIDE = Shape(num_kv_heads=8, group=4, head_dim=128, page_size=16)


def call(step: Step, tiles: Tiles, space: Workspace) -> Tensor:
    return paged_attention(
        step.heads(0, step.shape.num_heads), step.key_pages, step.value_pages, tiles, step.table, step.shape.head_dim**-0.5, None, space,
    )[: sum(step.rows)]  # fmt: skip


@pytest.mark.gpu
def test_programs_that_arrive_in_any_order_give_the_same_bits() -> None:
    step = Step(WIDE, [2100, 700, 1500, 3, 2048] * 6, [8, 1, 5, 2, 3] * 6, torch.bfloat16, "cuda")
    space, tiles = workspace(WIDE, 8, "cuda"), step.tiles(8, 4)
    first = call(step, tiles, space)
    assert_close(first, step.expected(None))
    for _ in range(500):
        space.partials.fill_(NAN)  # what is read too early is not what the last launch left there
        space.stats.fill_(NAN)
        assert torch.equal(call(step, tiles, space), first)
    assert not bool(space.arrivals.any())


@pytest.mark.gpu
def test_a_graph_follows_lengths_and_tables() -> None:
    step = Step(WIDE, [900, 10, 2000], [4, 4, 4], torch.bfloat16, "cuda")
    space, tiles = workspace(WIDE, 4, "cuda"), step.tiles(4, choose_splits(8, 8, 2048))
    call(step, tiles, space)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(step, tiles, space)
    for context in ([900, 10, 2000], [1, 0, 1999], [300, 4, 7]):
        tiles.records[tiles.records[:, 1] > 0, 3] = torch.tensor(context, dtype=torch.int32, device="cuda")
        graph.replay()
        assert torch.equal(out, call(step, tiles, space))
    step.table[step.slots[0]] = step.table[step.slots[2]]
    graph.replay()
    assert torch.equal(out, call(step, tiles, space))


@pytest.mark.gpu
def test_pages_beyond_two_to_the_31_elements() -> None:
    step = Step(WIDE, [500, 33], [3, 1], torch.bfloat16, "cuda")
    space, tiles = workspace(WIDE, 4, "cuda"), step.tiles(4, 2)
    expected = call(step, tiles, space)
    used, elements = len(step.key_pages), step.key_pages[0].numel()
    shift = 2**31 // elements + 7
    for name in ("key_pages", "value_pages"):
        pages = torch.empty(shift + used, *step.key_pages.shape[1:], dtype=torch.bfloat16, device="cuda")
        pages[shift:] = getattr(step, name)
        setattr(step, name, pages)
    step.table += shift
    assert torch.equal(call(step, tiles, space), expected)
