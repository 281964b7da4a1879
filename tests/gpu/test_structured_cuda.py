"""Grammars on a CUDA device: the text of the CPU in every mode, beside the graphs, and no wait but the one for drafts."""

from dataclasses import replace

import pytest
import torch

from slipstream.config import MODES, SamplingParams
from slipstream.draft.ngram import NGramDraft
from slipstream.ops.allowed import strike
from slipstream.testing import tiny_models, tiny_spec
from tests.e2e.grammars import ANY, grammars
from tests.gpu.test_engine_cuda import no_synchronisation
from tests.lossless.harness import on, run
from tests.ops.test_allowed import case

pytestmark = pytest.mark.gpu

SPEC = tiny_spec(vocab_size=20)
PROMPTS = [[(7 * i + 3 * j) % 17 + 3 for j in range(1 + (5 * i) % 29)] for i in range(16)]


def params_for(temperature: float) -> list[SamplingParams]:
    """Every second request is constrained."""
    free = [SamplingParams(temperature=temperature, seed=700 + i, max_tokens=20) for i in range(len(PROMPTS))]
    return [replace(p, structured=ANY) if i % 2 else p for i, p in enumerate(free)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_token_ids_equal_plain_decoding_on_the_cpu(mode: str, temperature: float) -> None:
    params = params_for(temperature)
    plain = run(tiny_models(spec=SPEC), "off", PROMPTS, params, grammars=grammars(20))
    models = on("cuda", tiny_models("dspark", spec=SPEC))
    assert run(models, mode, PROMPTS, params, grammars=grammars(20)).answers == plain.answers


@pytest.mark.parametrize("mode", ["static", "lag-budget"])
def test_look_up_and_rejection(mode: str) -> None:
    """Greedy, so that both rules say the same."""
    params = params_for(0.0)
    plain = run(tiny_models(spec=SPEC), "off", PROMPTS, params, grammars=grammars(20))
    models = on("cuda", tiny_models(spec=SPEC))
    for drafter, acceptance in ((NGramDraft(torch.device("cuda")), "coupled"), (None, "rejection")):
        served = models if drafter else on("cuda", tiny_models("dspark", spec=SPEC))
        other = run(served, mode, PROMPTS, params, drafter=drafter, acceptance=acceptance, grammars=grammars(20))
        assert other.answers == plain.answers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_struck_as_on_the_cpu(dtype: torch.dtype) -> None:
    for seed in range(20):
        logits, arguments, _ = case(seed, 70, 4, dtype)
        there = strike(logits.cuda(), **{name: value.cuda() for name, value in arguments.items()})
        assert torch.equal(there.cpu(), strike(logits, **arguments))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_striking_does_not_wait() -> None:
    logits, arguments, _ = case(3, 70, 4)
    moved, placed = logits.cuda(), {name: value.cuda() for name, value in arguments.items()}
    with no_synchronisation():
        strike(moved, **placed)
