"""Whatever a request asks of its logits, speculation answers as plain decoding does, and that as the definitions say.

Each parameter by itself and all together, greedy and sampled, in every mode. Half of the requests ask for nothing:
they share steps with the others, and answer as if these were not there.
"""

from dataclasses import replace
from functools import cache

import pytest

from slipstream.config import MODES, SamplingParams
from slipstream.load import Models
from slipstream.testing import TableDrafter, next_token_table, tiny_models, tiny_spec
from tests.lossless.harness import GAP, NearTies, Run, judge, run, scores_after

SPECULATING = [mode for mode in MODES if mode != "off"]
NEAR_TIES = NearTies()
VOCAB = 20
PROMPTS = [[(7 * i + 3 * j) % 17 + 3 for j in range(1 + (5 * i) % 29)] for i in range(12)]
STOPS = (4, 7, 11, 16)
WISHES: dict[str, dict[str, object]] = {
    "min_p": {"min_p": 0.25},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "presence_penalty": {"presence_penalty": 1.1},
    "logit_bias": {"logit_bias": {3: 1.5, 8: -4.0, 12: 2.5}},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": STOPS},
    "all": {
        "min_p": 0.05, "repetition_penalty": 1.2, "frequency_penalty": -0.4, "presence_penalty": 0.8, "top_k": 12,
        "top_p": 0.9, "logit_bias": {3: 1.5, 8: -4.0}, "min_tokens": 6, "stop_token_ids": STOPS,
    },
}  # fmt: skip
CASES = [(name, t) for name in WISHES for t in (0.0, 1.0) if (name, t) != ("min_p", 0.0)]


def params_for(name: str, temperature: float) -> list[SamplingParams]:
    base = [SamplingParams(temperature=temperature, seed=1000 + i, max_tokens=14 + i % 5) for i in range(len(PROMPTS))]
    return [replace(p, **WISHES[name]) if i % 2 else p for i, p in enumerate(base)]  # type: ignore[arg-type]


@cache
def models_with(algorithm: str | None) -> Models:
    return tiny_models(algorithm, spec=tiny_spec(vocab_size=VOCAB))


@cache
def plain_run(name: str, temperature: float) -> Run:
    return run(models_with(None), "off", PROMPTS, params_for(name, temperature))


@pytest.mark.parametrize(("name", "temperature"), CASES)
def test_plain_decoding_follows_the_definitions(name: str, temperature: float) -> None:
    models, params = models_with(None), params_for(name, temperature)
    answers = plain_run(name, temperature).answers
    for prompt, each, answer in zip(PROMPTS, params, answers, strict=True):
        assert len(answer) >= each.min_tokens
        for place, token in enumerate(answer):
            scores = scores_after(models, [*prompt, *answer[:place]], each, len(prompt))
            assert scores[token] >= scores.max() - GAP, (prompt, place)
    without = run(models, "off", PROMPTS, [replace(p, max_tokens=p.max_tokens) for p in params_for_nobody(params)])
    changed = [a != b for a, b in zip(answers, without.answers, strict=True)]
    assert any(changed[1::2]), "the parameter changes nothing here"
    assert not any(changed[::2]), "a request that asks for nothing noticed the others"


def params_for_nobody(params: list[SamplingParams]) -> list[SamplingParams]:
    """The same requests, none of which asks for anything; what would end an answer stays."""
    return [
        SamplingParams(temperature=p.temperature, seed=p.seed, max_tokens=p.max_tokens, stop_token_ids=p.stop_token_ids)
        for p in params
    ]


@pytest.mark.parametrize("drafter", ["table", "dspark"])
@pytest.mark.parametrize("mode", SPECULATING)
@pytest.mark.parametrize(("name", "temperature"), CASES)
def test_token_ids_equal_plain_decoding(name: str, temperature: float, mode: str, drafter: str) -> None:
    params, plain = params_for(name, temperature), plain_run(name, temperature)
    table = None
    if drafter == "table":
        answers = [[*p, *a] for p, a in zip(PROMPTS, plain.answers, strict=True)]
        table = TableDrafter(next_token_table(answers, VOCAB), 7)
    models = models_with(None if table else "dspark")
    other = run(models, mode, PROMPTS, params, drafter=table, num_drafts=5)
    outcome, found = judge(models, mode, PROMPTS, params, plain, other, NEAR_TIES)
    assert outcome == "equal", found


@pytest.mark.parametrize("mode", SPECULATING)
@pytest.mark.parametrize("name", [name for name in WISHES if name != "min_p"])
def test_rejection_is_greedy_too(name: str, mode: str) -> None:
    """At T = 0 both rules emit the target's argmax; how it is at T > 0 is enumerated in test_enumeration_shaped.py."""
    params, plain = params_for(name, 0.0), plain_run(name, 0.0)
    models = models_with("dspark")
    other = run(models, mode, PROMPTS, params, num_drafts=5, acceptance="rejection")
    outcome, found = judge(models, mode, PROMPTS, params, plain, other, NEAR_TIES)
    assert outcome == "equal", found
