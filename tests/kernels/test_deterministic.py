"""A row's result is the same bits whatever shares its launch, for each kernel of a deterministic engine and for all of it.

Interpreted, fp32 only, with products added up term by term: this shows that nothing but a row's own data and position
decides how its sums are cut up. That the instructions of a GPU treat all rows of a block alike is shown there, where the
same tests run in bf16 too, and by tests/gpu/test_deterministic_cuda.py. Each test has a control that must differ.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench import deterministic as bench
from slipstream.config import SamplingParams
from slipstream.draft.ngram import NGramDraft
from slipstream.kernels.accept import accept_coupled, deterministic_tile_size, row_best
from slipstream.kernels.attention import Launch, deterministic_launch, paged_attention
from slipstream.kernels.linear import deterministic_linear, deterministic_tile, fused_linear
from slipstream.kernels.rope import DETERMINISTIC_HEADS, rope_and_store
from slipstream.lab.bench_options import BenchOptions
from slipstream.prompts import MadeUp
from slipstream.testing import tiny_models, tiny_spec
from slipstream.verify import fused_rules
from tests.kernels.acceptance import make_case
from tests.kernels.conftest import HAS_CUDA
from tests.kernels.steps import NAN, Shape, Step, assert_close, workspace
from tests.lossless.harness import on, run
from tests.lossless.same_bits import SameBits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=not HAS_CUDA)
def rows_of_a_block_are_multiplied_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a tensor core. The BLAS below NumPy adds up by where in a block a row stands, on some processors."""
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        product = np.einsum("...mk,...kn->...mn", a.data, b.data, optimize=False)
        return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def draw(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


# ------------------------------------------------------------------------------------------------------------- products

NUM_ROWS = 70
KINDS = {"plain": {}, "normed": {"norm": True}, "gated": {"norm": True, "gated": True}, "residual": {"residual": True}}


def product(function: Any, x: Tensor, weight: Tensor, kind: str, first: int = 0) -> Tensor:
    """x are rows `first` on of NUM_ROWS."""
    given: dict[str, Any] = dict(KINDS[kind])
    if given.pop("norm", False):
        given |= {"norm": draw(x.shape[1], dtype=x.dtype, device=str(x.device), seed=3), "eps": 1e-5}
    if given.pop("residual", False):
        whole = draw(NUM_ROWS, len(weight), dtype=x.dtype, device=str(x.device), seed=4)
        given["residual"] = whole[first : first + len(x)].clone()
    result: Tensor = function(x, weight, **given)
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(48, 96), (34, 136)], ids=str)
def test_products_of_any_number_of_rows(size: tuple[int, int], kind: str, dtype: torch.dtype, device: str) -> None:
    weight = draw(*size, dtype=dtype, device=device, seed=1)
    x = draw(NUM_ROWS, size[1], dtype=dtype, device=device)
    whole = product(deterministic_linear, x, weight, kind)
    for first, last in ((0, 1), (69, 70), (3, 5), (0, 16), (5, 38), (1, 70)):
        part = product(deterministic_linear, x[first:last].contiguous(), weight, kind, first)
        assert torch.equal(part, whole[first:last]), (first, last)


def test_the_product_of_other_engines_does_depend_on_the_number_of_rows(device: str) -> None:
    """The control: a kernel for few rows, a library for many."""
    weight, x = (draw(n, 136, dtype=torch.float32, device=device, seed=n) for n in (48, 70))
    assert not torch.equal(fused_linear(x[:1], weight), fused_linear(x, weight)[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tiles_hang_on_the_weight_alone_and_fit(dtype: torch.dtype) -> None:
    for size in ((960, 576), (576, 1536), (24576, 4096), (151936, 4096), (40, 32), (6144, 4096)):
        tile = deterministic_tile(torch.empty(size, dtype=dtype, device="meta"), True)
        assert tile.rows >= 16 and tile.columns.bit_count() == 1
        assert tile.stages * tile.lanes * tile.depth * (tile.rows + tile.columns) * dtype.itemsize <= 113 * 1024


# ------------------------------------------------------------------------------------------------------------ attention

BLOCK_Q = 8


def attend(step: Step, cuts: list[int], window: int | None, launch: Launch, num_splits: int = 1) -> Tensor:
    """Rows of every sequence in tiles of `cuts` rows, in turns."""
    made, context = [], step.context[step.slots].tolist()
    for b, (slot, count) in enumerate(zip(step.slots.tolist(), step.rows, strict=True)):
        first = turn = 0
        while first < count:
            size = min(cuts[turn % len(cuts)], count - first)
            made.append([step.starts[b] + first, size, slot, context[b] + first])
            first, turn = first + size, turn + 1
    shape, tiles = step.shape, step.records(made, BLOCK_Q, num_splits)
    space = workspace(shape, BLOCK_Q, str(step.qkv.device))
    return paged_attention(
        step.heads(0, shape.num_heads), step.key_pages, step.value_pages, tiles, step.table, shape.head_dim**-0.5,
        window, space, launch=launch,
    )[: sum(step.rows)]  # fmt: skip


@pytest.mark.parametrize("window", [None, 5])
def test_attention_of_rows_in_any_tiles(window: int | None, dtype: torch.dtype, device: str) -> None:
    """Contexts around the borders of chunks: a row next to rows that see a chunk more, or begin a chunk earlier."""
    shape = Shape()
    launch = deterministic_launch(BLOCK_Q, shape.group, shape.head_dim, dtype)
    size = launch.chunk_n
    step = Step(shape, [size - 3, 2 * size - 1, 30], [7, 8, 1], dtype, device)
    alone = attend(step, [1], window, launch)
    assert_close(alone, step.expected(window))
    for cuts in ([8], [2], [5, 3]):
        assert torch.equal(attend(step, cuts, window, launch), alone), cuts


@pytest.mark.slow
def test_attention_that_is_split_by_load_does_depend_on_the_tile(device: str) -> None:
    """The control."""
    shape = Shape()
    step, launch = Step(shape, [60, 95], [8, 8], torch.float32, device), Launch(16, 2, 2, min_split_tokens=16)
    assert not torch.equal(attend(step, [1], None, launch, 4), attend(step, [8], None, launch, 4))


def test_rotation_of_any_number_of_rows(dtype: torch.dtype, device: str) -> None:
    num_heads, num_kv_heads, head_dim, count = 4, 2, 64, 40
    qkv = draw(count, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=device)
    cos_sin, norm = draw(64, head_dim, dtype=torch.float32, device=device, seed=1), torch.ones_like(qkv[0, :head_dim])
    positions = torch.arange(count, device=device)

    def turned(first: int, last: int) -> tuple[Tensor, Tensor]:
        pages = torch.full((2, 8, 8, num_kv_heads, head_dim), NAN, dtype=dtype, device=device)
        rows, at = qkv[first:last].clone(), positions[first:last]
        rope_and_store(
            rows, at, cos_sin, norm, norm, 1e-6, *pages, at, num_heads, heads_per_program=DETERMINISTIC_HEADS
        )
        return rows, pages.flatten(1, 2)[:, first:last]

    rows, kept = turned(0, count)
    for first, last in ((0, 1), (7, 8), (3, 20), (39, 40)):
        some, some_kept = turned(first, last)
        assert torch.equal(some, rows[first:last]) and torch.equal(some_kept, kept[:, first:last])


# ----------------------------------------------------------------------------------------------------------- acceptance


def best_of(case: Any, rows: slice, **options: Any) -> list[Tensor]:
    named = {name: case.tensors[name] for name in ("slots", "num_given", "context", "temperature", "seed")}
    outputs = {name: case.tensors[name][rows] for name in ("output_sequence", "output_offset")}
    logits = options.pop("logits", case.logits)[rows]
    return list(row_best(logits, case.num_token_ids, **named, **outputs, **options))


@pytest.mark.slow
def test_scores_of_any_number_of_rows_and_beside_filters(dtype: torch.dtype, device: str) -> None:
    """Somebody asks for top-p: the others' scores keep their bits, and a row's cut is its own."""
    case, block = make_case(device, num_token_ids=300, dtype=dtype, num_padding=0, heat=(0.7,) * 7), 128
    case.top_p[:-1:2] = 0.9
    whole = best_of(case, slice(None), block=block)
    for rows in (slice(0, 1), slice(4, 9), slice(2, None)):
        assert all(torch.equal(a, b[rows]) for a, b in zip(best_of(case, rows, block=block), whole, strict=True))
    cut = best_of(case, slice(None), block=block, cut=case.cut())
    free = case.top_p[case.tensors["slots"][case.tensors["output_sequence"]]] == 1
    assert 0 < int(free.sum()) < len(free)
    assert all(torch.equal(a[free], b[free]) for a, b in zip(cut, whole, strict=True))
    assert not torch.equal(cut[1][~free], whole[1][~free])  # the control


# ----------------------------------------------------------------------------------------------------------- the engine

SPEC = tiny_spec(vocab_size=20)
PROMPTS = [[(7 * i + 3 * j) % 17 + 3 for j in range(1 + (5 * i) % 11)] for i in range(4)]


def served(
    device: str, mode: str, found: SameBits, deterministic: bool = True, algorithm: str | None = "dspark",
    max_tokens: int = 7, **options: Any,
) -> Any:  # fmt: skip
    models = on(device, tiny_models(None if mode == "off" else algorithm, spec=SPEC))
    params = [SamplingParams(temperature=float(i % 2), seed=i, max_tokens=max_tokens) for i in range(len(PROMPTS))]
    return run(
        models, mode, PROMPTS, params, backend="triton", deterministic=deterministic, adapt=found.adapt, num_drafts=3,
        **options,
    )  # fmt: skip


# Who cuts kernels by what a step holds.
BY_THE_STEP = (
    "device.triton.choose_splits", "kernels.attention.choose_launch", "kernels.linear.choose_tile",
    "kernels.accept.tile_size", "verify.fused.decode_attention",
)  # fmt: skip


@pytest.mark.slow
def test_logits_hang_on_the_tokens_before_them_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time; and three at a time with drafts, prompts read in chunks of a few tokens. Nobody asks how many."""
    for name in BY_THE_STEP:
        monkeypatch.setattr(f"slipstream.{name}", None)
    found = SameBits()
    few: dict[str, Any] = {"max_tokens": 3}
    plain, looks_up = served(device, "off", found, concurrency=1, **few), NGramDraft(torch.device(device))
    other = served(
        device, "static", found, algorithm=None, drafter=looks_up, concurrency=3, max_num_batched_tokens=5, **few
    )  # fmt: skip
    assert other.answers == plain.answers
    assert len(found.shapes) > 6 and found.num_again > 8
    assert not found.differing, found.differing


def test_acceptance_beside_a_request_with_filters(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is given what it is given without, and a cut: the target's own logits, in tiles of the same size."""
    calls: list[tuple[bool, int, torch.dtype]] = []

    def recorded(logits: Tensor, *args: Any, block: int, cut: Any, **options: Any) -> None:
        calls.append((cut is not None, block, logits.dtype))
        accept_coupled(logits, *args, block=block, cut=cut, **options)

    monkeypatch.setattr(fused_rules, "accept_coupled", recorded)
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=2, top_p=p) for i, p in enumerate((1.0, 0.7))]
    models, found = on(device, tiny_models(spec=SPEC)), SameBits()
    options: dict[str, Any] = {"backend": "triton", "deterministic": True}
    both = run(models, "off", PROMPTS[:2], params, adapt=found.adapt, **options)
    free = run(models, "off", PROMPTS[:1], params[:1], adapt=found.adapt, **options)
    assert free.answers == both.answers[:1]
    block, dtype = deterministic_tile_size(SPEC.vocab_size), models.dtype
    assert len(calls) >= 4 and set(calls) == {(False, block, dtype), (True, block, dtype)}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["adaptive", "lag", "lag-budget"])
def test_logits_in_the_modes_that_prune(device: str, mode: str) -> None:
    found = SameBits()
    plain = served(device, "off", found, concurrency=2)
    assert served(device, mode, found, concurrency=4).answers == plain.answers
    assert found.num_again > 20 and not found.differing, found.differing


@pytest.mark.slow
def test_logits_of_other_engines_do_depend_on_the_step(device: str) -> None:
    """The control."""
    found = SameBits()
    served(device, "off", found, deterministic=False, concurrency=1)
    served(device, "static", found, deterministic=False, concurrency=3, max_num_batched_tokens=5)
    assert found.num_again > 20 and found.differing


@pytest.mark.slow
def test_the_bench_pairs_engines(device: str) -> None:
    given = BenchOptions(
        model="tiny", draft="tiny", modes=("off", "static"), num_speculative_tokens=(3,), concurrency=(2,), waves=1,
        requests=2, prompts=MadeUp(5), sampling=SamplingParams(max_tokens=4, ignore_eos=True),
        engine={"backend": "triton"},
    )  # fmt: skip
    rows = bench.measure(given, on(device, tiny_models("dspark")), lambda line: None)["rows"]
    assert [(row["mode"], row["deterministic"]) for row in rows] == [
        ("off", False), ("static", False), ("off", True), ("static", True),
    ]  # fmt: skip
    assert [row["same_as_off"] for row in rows[2:]] == [2, 2]
    assert len(bench.table(rows)) == 4
