"""Token ids with speculation equal token ids without it: every mode, drafter, draft count and concurrency.

fp32 on tiny models; the same on SmolLM2 is in test_identity_smollm2.py. Coupled acceptance makes sampled answers as
reproducible as greedy ones, so both are compared token by token.
"""

from dataclasses import replace
from functools import cache

import pytest

from slipstream.config import MODES, SamplingParams
from slipstream.decide.cost import CostModel
from slipstream.draft.base import Drafter
from slipstream.load import Models
from slipstream.testing import TableDrafter, next_token_table, tiny_models, tiny_spec
from tests.lossless.harness import NearTies, Run, judge, run, scripted_cost

SPECULATING = [mode for mode in MODES if mode != "off"]
NEAR_TIES = NearTies()  # over the whole matrix
VOCAB = 20  # few enough tokens for random drafters to be right now and then
PROMPTS = [[(7 * i + 3 * j) % 17 + 3 for j in range(1 + (5 * i) % 29)] for i in range(20)]
DRAFTERS = ("dspark", "dflash", "table")
MOST = {"dspark": 8, "dflash": 7, "table": 12}
ONE_BY_ONE = 10  # prompts where they come one after another; a single draft needs them all to be accepted now and then


def params_for(temperature: float) -> list[SamplingParams]:
    top_p = 0.9 if temperature else 1.0
    return [
        SamplingParams(temperature=temperature, top_p=top_p, seed=1000 + i, max_tokens=10 + i % 5, ignore_eos=i % 2 > 0)
        for i in range(len(PROMPTS))
    ]


@cache
def models_with(name: str) -> Models:
    return tiny_models(None if name == "table" else name, spec=tiny_spec(vocab_size=VOCAB))


@cache
def plain_run(temperature: float) -> Run:
    return run(models_with("table"), "off", PROMPTS, params_for(temperature))


def drafter_for(name: str, temperature: float) -> Drafter | None:
    if name != "table":
        return None
    answers = [[*p, *a] for p, a in zip(PROMPTS, plain_run(temperature).answers, strict=True)]
    return TableDrafter(next_token_table(answers, VOCAB), MOST["table"])


def cost_for(name: str, num_drafts: int, concurrency: int) -> CostModel:
    """A single draft is priced so that some are verified and some are not; the table's are right more often.

    So are those of dflash, of which hardly any is right: among eight sequences only a low price has enough of them tried.
    """
    if name == "dflash" and concurrency > 1:
        return scripted_cost(row_ms=0.05 if num_drafts == 1 else 0.25, fixed_ms=1.0 if num_drafts == 1 else 4.0)
    if num_drafts > 1:
        return scripted_cost()
    return scripted_cost(row_ms=1.1 if name == "table" else 0.4 if concurrency == 1 else 0.2, fixed_ms=1.0)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("size", ["one", "seven", "most"])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("mode", SPECULATING)
def test_token_ids_equal_plain_decoding(mode: str, name: str, size: str, concurrency: int, temperature: float) -> None:
    num_drafts = {"one": 1, "seven": 7, "most": MOST[name]}[size]
    prompts = PROMPTS[:ONE_BY_ONE] if concurrency == 1 and num_drafts > 1 else PROMPTS
    params, plain = params_for(temperature)[: len(prompts)], plain_run(temperature)
    plain = replace(plain, answers=plain.answers[: len(prompts)])
    other = run(
        models_with(name), mode, prompts, params, num_drafts=num_drafts, concurrency=concurrency,
        drafter=drafter_for(name, temperature), cost=cost_for(name, num_drafts, concurrency),
    )  # fmt: skip
    outcome, found = judge(models_with(name), mode, prompts, params, plain, other, NEAR_TIES)
    assert outcome == "equal", found
