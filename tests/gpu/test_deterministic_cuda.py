"""A deterministic engine on a CUDA device, in bf16: rows have the same bits, and requests the same text, in any company.

Kernels at the shapes of SmolLM2-135M and Qwen3-8B; engines on random models of their widths with fewer layers. The
tests of tests/kernels/test_deterministic.py run here too, on tiny shapes.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.config import MODES, SamplingParams
from slipstream.draft.ngram import NGramDraft
from slipstream.kernels.accept import deterministic_tile_size
from slipstream.kernels.attention import deterministic_launch
from slipstream.kernels.filters import cut_rows
from slipstream.kernels.linear import deterministic_linear, fused_linear
from slipstream.load import Models
from slipstream.models.random_weights import random_decoder, random_drafter
from slipstream.models.shapes import TARGET_SHAPES, published_dspark
from slipstream.models.spec import DecoderSpec
from slipstream.models.synthetic import synthetic_tokenizer
from tests.kernels.acceptance import make_case
from tests.kernels.steps import Shape, Step
from tests.kernels.test_deterministic import BLOCK_Q, attend, best_of
from tests.lossless.harness import Run, run
from tests.lossless.same_bits import SameBits

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 8, 33, 256)
# Outputs, inputs and what stands around the product: of SmolLM2-135M, then of Qwen3-8B.
PRODUCTS = [
    (960, 576, "normed"), (576, 576, "residual"), (3072, 576, "gated"), (576, 1536, "residual"), (49152, 576, "normed"),
    (6144, 4096, "normed"), (4096, 4096, "residual"), (24576, 4096, "gated"), (4096, 12288, "residual"),
    (151936, 4096, "normed"),
]  # fmt: skip


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize(("num_out", "num_in", "kind"), PRODUCTS)
def test_products(num_out: int, num_in: int, kind: str) -> None:
    weight, x = draw(num_out, num_in, seed=1).div_(num_in**0.5), draw(max(ROWS) + 1800, num_in)
    residual, norm = draw(len(x), num_out, seed=2) if kind == "residual" else None, draw(num_in, seed=3)

    def product(first: int, count: int, function: Any = deterministic_linear) -> Tensor:
        rows = slice(first, first + count)
        options: dict[str, Any] = {} if kind == "residual" else {"norm": norm, "eps": 1e-6}
        options |= {"gated": True} if kind == "gated" else {}
        options |= {} if residual is None else {"residual": residual[rows].clone()}
        result: Tensor = function(x[rows].clone(), weight, **options)
        return result

    few = product(0, max(ROWS))
    assert bool(few.isfinite().all())
    for count in ROWS:
        for first in {0, 7, max(ROWS) - count}:
            got = product(first, min(count, max(ROWS) - first))
            assert torch.equal(got, few[first : first + count]), (first, count)
    if num_out <= 24576:
        assert torch.equal(product(0, len(x))[: max(ROWS)], few), "a long prompt"
    near = product(0, max(ROWS), fused_linear).float()
    error = (few.float() - near).abs().max() / near.abs().max()
    assert float(error) < 2e-2


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("shape", [Shape(3, 3, 64, 16), Shape(8, 4, 128, 16), Shape(2, 2, 8, 8)], ids=str)
def test_attention(shape: Shape, window: int | None) -> None:
    context, rows = [0, 63, 60, 127, 2045, 700, 1, 300], [40, 9, 8, 1, 16, 3, 2, 7]
    step = Step(shape, context, rows, torch.bfloat16, "cuda")
    launch = deterministic_launch(BLOCK_Q, shape.group, shape.head_dim, torch.bfloat16)
    alone = attend(step, [1], window, launch)
    for cuts in ([8], [2], [5, 3], [7, 1, 4]):
        assert torch.equal(attend(step, cuts, window, launch), alone), cuts


@pytest.mark.parametrize("num_token_ids", [49152, 2500])
def test_scores_beside_a_request_with_filters(num_token_ids: int) -> None:
    """With a cut and without: other compiled kernels, equal scores of those who ask for nothing."""
    case = make_case("cuda", num_token_ids=num_token_ids, dtype=torch.bfloat16, num_padding=0, heat=(0.7,) * 7)
    case.top_p[:-1:2] = 0.9
    block = deterministic_tile_size(num_token_ids)
    whole = best_of(case, slice(None), block=block)
    cut = best_of(case, slice(None), block=block, cut=case.cut())
    free = case.top_p[case.tensors["slots"][case.tensors["output_sequence"]]] == 1
    assert 0 < int(free.sum()) < len(free)
    assert all(torch.equal(a[free], b[free]) for a, b in zip(cut, whole, strict=True))
    for row in range(0, len(free), 5):
        alone = best_of(case, slice(row, row + 1), block=block)
        assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(alone, whole, strict=True))


@pytest.mark.parametrize("num_token_ids", [49152, 2501])
def test_filters(num_token_ids: int) -> None:
    """Rows of an odd vocabulary lie anywhere in memory; programs add up in any order, and are more where rows are few.

    And in fp32, which penalties of a neighbour make of a step's logits.
    """
    logits = 3 * draw(64, num_token_ids)
    turns = torch.arange(64, device="cuda")
    asked = {
        "temperature": 0.5 + turns / 64, "top_k": turns % 3 * 50, "top_p": 1.0 - turns % 5 * 0.02,
        "min_p": turns % 7 * 1e-3,
    }  # fmt: skip

    def cut(first: int, last: int, kind: torch.dtype = torch.bfloat16) -> Tensor:
        rows = torch.arange(last - first, device="cuda")
        found = cut_rows(logits[first:last].to(kind), num_token_ids, output_sequence=rows, slots=rows + first, **asked)
        return torch.stack([found.floor.double(), found.last.double()])

    whole = cut(0, 64)
    assert 0 < int((whole[0] == -torch.inf).sum()) < 64
    for _ in range(20):
        assert torch.equal(cut(0, 64), whole)
    for first, last in ((0, 1), (5, 6), (62, 64), (3, 36)):
        assert torch.equal(cut(first, last), whole[:, first:last])
        assert torch.equal(cut(first, last, torch.float32), whole[:, first:last])


# ----------------------------------------------------------------------------------------------------------- the engine

LAYERS = {"smollm2-135m": 8, "qwen3-8b": 8}


def models_of(shape: str, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Models:
    """Random weights of the shape's widths, over fewer layers and tokens, and a random drafter for them."""
    config = {**TARGET_SHAPES[shape], "num_hidden_layers": LAYERS[shape], "vocab_size": 2000, **changes}
    spec = replace(DecoderSpec.from_hf(config), eos_token_ids=(), bos_token_id=None)
    target = random_decoder(spec, dtype, device)
    network = random_drafter(published_dspark(spec), target)
    return Models(target, synthetic_tokenizer(spec.vocab_size), network, f"random:{shape}", "random", None)


@pytest.fixture(scope="module", params=tuple(LAYERS))
def models(request: pytest.FixtureRequest) -> Iterator[Models]:
    yield models_of(request.param)
    torch.cuda.empty_cache()


PROMPTS = [[(37 * i + 11 * j * j) % 1900 for j in range(1 + (13 * i) % 71)] for i in range(40)]


def params_of(count: int, max_tokens: int) -> list[SamplingParams]:
    """Greedy, sampled, and sampled with filters and penalties, in turns."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 0.8},
    ]
    kinds[3] |= {"top_p": 0.9, "top_k": 500, "presence_penalty": 0.5}
    return [SamplingParams(**kinds[i % 4], seed=i, max_tokens=max_tokens) for i in range(count)]


def served(models: Models, mode: str, count: int = len(PROMPTS), max_tokens: int = 20, **options: Any) -> Run:
    given: dict[str, Any] = {"backend": "triton", "deterministic": True, "max_num_batched_tokens": 256, **options}
    return run(models, mode, PROMPTS[:count], params_of(count, max_tokens), **given)


def test_texts_of_all_modes_and_batches_are_those_of_plain_decoding(models: Models) -> None:
    plain = served(models, "off", concurrency=32)
    assert served(models, "off", count=8, concurrency=1).answers == plain.answers[:8]
    assert served(models, "off", concurrency=5, max_num_batched_tokens=17).answers == plain.answers
    for mode in MODES[1:]:
        other = served(models, mode, concurrency=32 if mode == "static" else 12)
        assert other.answers == plain.answers, mode
        assert 0 < other.totals.accepted < other.totals.verified
        assert mode == "static" or other.totals.verified < other.totals.drafted
    looked_up = served(models, "lag", concurrency=12, drafter=NGramDraft(models.device))
    assert looked_up.answers == plain.answers


def test_logits_hang_on_the_tokens_before_them_alone(models: Models) -> None:
    """Launched, not replayed; the texts are those of replays."""
    found, common = SameBits(), {"count": 12, "max_tokens": 10}
    plain = served(models, "off", concurrency=1, adapt=found.adapt, **common)
    for mode, options in (
        ("off", {"concurrency": 12}), ("static", {"concurrency": 12}), ("lag", {"concurrency": 3}),
        ("static", {"concurrency": 7, "max_num_batched_tokens": 13}),
    ):  # fmt: skip
        assert served(models, mode, adapt=found.adapt, **options, **common).answers == plain.answers
    assert found.num_again > 300 and not found.differing, found.differing[:20]
    assert served(models, "static", concurrency=12, **common).answers == plain.answers


def test_logits_of_other_engines_do_depend_on_the_step(models: Models) -> None:
    """The control."""
    found, common = SameBits(), {"count": 12, "max_tokens": 10, "deterministic": False}
    served(models, "off", concurrency=1, adapt=found.adapt, **common)
    served(models, "static", concurrency=12, adapt=found.adapt, **common)
    assert found.num_again > 100 and found.differing
