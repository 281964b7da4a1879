"""Under a grammar speculation answers as plain decoding does, and that as the definition says.

Every second request is constrained; the others share steps with them, and answer as if these were not there.
"""

from dataclasses import replace
from functools import cache

import pytest

from slipstream.config import MODES, SamplingParams
from slipstream.load import Models
from slipstream.testing import TableDrafter, next_token_table, tiny_models, tiny_spec
from tests.e2e.grammars import ANY, allowed_after, grammars, plain_answer
from tests.lossless.harness import GAP, PRUNING, Run, run

SPECULATING = [mode for mode in MODES if mode != "off"]
VOCAB = 20
PROMPTS = [[(7 * i + 3 * j) % 17 + 3 for j in range(1 + (5 * i) % 29)] for i in range(12)]
WISHES: dict[str, dict[str, object]] = {
    "alone": {},
    "shaped": {
        "min_p": 0.05, "repetition_penalty": 1.2, "frequency_penalty": -0.4, "presence_penalty": 0.8, "top_k": 8,
        "top_p": 0.9, "logit_bias": {3: 1.5, 8: -4.0},
    },
}  # fmt: skip
CASES = [(name, t) for name in WISHES for t in (0.0, 1.0)]


def params_for(name: str, temperature: float) -> list[SamplingParams]:
    free = [SamplingParams(temperature=temperature, seed=700 + i, max_tokens=20 + i % 5) for i in range(len(PROMPTS))]
    return [replace(p, structured=ANY, **WISHES[name]) if i % 2 else p for i, p in enumerate(free)]  # type: ignore[arg-type]


@cache
def models_with(algorithm: str | None) -> Models:
    return tiny_models(algorithm, spec=tiny_spec(vocab_size=VOCAB))


@cache
def plain_run(name: str, temperature: float) -> Run:
    return run(models_with(None), "off", PROMPTS, params_for(name, temperature), grammars=grammars(VOCAB))


@pytest.mark.parametrize(("name", "temperature"), CASES)
def test_plain_decoding_follows_the_definition(name: str, temperature: float) -> None:
    params, answers = params_for(name, temperature), plain_run(name, temperature).answers
    for prompt, each, answer in zip(PROMPTS, params, answers, strict=True):
        expected, gap = plain_answer(models_with(None), prompt, each)
        assert answer == expected, gap
        assert gap > GAP, "a near tie: take other seeds"
    without = run(models_with(None), "off", PROMPTS, [replace(p, structured=None) for p in params])
    changed = [a != b for a, b in zip(answers, without.answers, strict=True)]
    assert sum(changed[1::2]) > 3, "the grammar forbids nothing here"
    assert not any(changed[::2]), "a request that is free noticed the others"
    assert any(answer[-1] == 1 for answer in answers[1::2]), "none is complete"
    for answer in answers[1::2]:
        allowed_after([token for token in answer if token != 1], VOCAB)


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
    other = run(models, mode, PROMPTS, params, drafter=table, num_drafts=5, grammars=grammars(VOCAB))
    assert other.answers == plain.answers
    totals = other.totals
    assert 0 < totals.accepted < totals.verified
    assert mode not in PRUNING or totals.verified < totals.drafted


@pytest.mark.parametrize("mode", SPECULATING)
@pytest.mark.parametrize("name", WISHES)
def test_rejection_is_greedy_too(name: str, mode: str) -> None:
    """At T = 0 both rules emit the target's argmax; T > 0 is enumerated in test_enumeration_structured.py."""
    params, plain = params_for(name, 0.0), plain_run(name, 0.0)
    options = {"num_drafts": 5, "acceptance": "rejection", "grammars": grammars(VOCAB)}
    other = run(models_with("dspark"), mode, PROMPTS, params, **options)  # type: ignore[arg-type]
    assert other.answers == plain.answers
    assert 0 < other.totals.accepted < other.totals.verified


@pytest.mark.parametrize("mode", SPECULATING)
def test_rejection_keeps_to_the_grammar(mode: str) -> None:
    params = params_for("alone", 1.0)
    options = {"num_drafts": 5, "acceptance": "rejection", "grammars": grammars(VOCAB)}
    other = run(models_with("dspark"), mode, PROMPTS, params, **options)  # type: ignore[arg-type]
    for answer in other.answers[1::2]:
        allowed_after([token for token in answer if token != 1], VOCAB)
    assert 0 < other.totals.accepted < other.totals.verified
