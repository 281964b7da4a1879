"""The identity of test_identity.py on SmolLM2-135M-Instruct with the shipped drafters, fp32.

The whole matrix takes most of an hour of one core. `make test` runs one case of it, `make test-slow` a third, in which
every mode and drafter meets every draft length, concurrency and temperature; `pytest -m "slow or matrix"` on this file
runs all, and the outcomes are written to runs/identity-smollm2.json.
"""

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from slipstream.config import MODES, SamplingParams
from slipstream.decide.cost import CostModel
from slipstream.draft.base import Drafter
from slipstream.lab import machine
from slipstream.load import Models, load_models
from slipstream.models.headers import weights_digest
from slipstream.models.locate import built_in_drafters
from slipstream.testing import TableDrafter, next_token_table
from tests.lossless.harness import NearTies, Run, judge, run, scripted_cost

SPECULATING = [mode for mode in MODES if mode != "off"]
NEAR_TIES = NearTies()  # over the whole matrix

OPENINGS = [
    "The capital of France", "def add(a, b):", "Once upon a time", "2 + 2 =", "Dear Sir or Madam,", "import numpy as",
    "The quick brown fox", "In 1969, the first", "Water boils at", "SELECT name FROM", "My favourite colour",
    "To make bread, you", "for i in range(", "The sun rises in", "A prime number is", "Question: What is",
    "She opened the door", "class Stack:", "The best way to", "1, 1, 2, 3, 5,",
]  # fmt: skip
DRAFTERS = {"smollm2-135m-dspark": 16, "smollm2-135m-dflash": 7, "table": 16}
SIZES = ("one", "seven", "most")
MAX_TOKENS = 16
QUICK = {("lag", "smollm2-135m-dspark", "seven", 8, 0.0)}
THIRD = {("one", 8, 0.0), ("one", 1, 1.0), ("seven", 8, 0.7), ("seven", 1, 0.0), ("most", 8, 1.0), ("most", 1, 0.7)}


def mark_of(mode: str, name: str, size: str, concurrency: int, temperature: float) -> pytest.MarkDecorator:
    return pytest.mark.slow if (size, concurrency, temperature) in THIRD else pytest.mark.matrix


CASES = [
    pytest.param(*case, marks=[] if case in QUICK else [mark_of(*case), pytest.mark.timeout(600)])
    for case in [
        (mode, name, size, concurrency, temperature)
        for name in DRAFTERS
        for mode in SPECULATING
        for size in SIZES
        if size != "most" or DRAFTERS[name] != 7  # which "seven" is already
        for concurrency in (8, 1)
        for temperature in (0.0, 0.7, 1.0)
    ]
]


@cache
def models_with(name: str) -> Models:
    return load_models("smollm2-135m", None if name == "table" else name, dtype="float32", device="cpu")


@cache
def prompts() -> list[list[int]]:
    tokenizer = models_with("table").tokenizer
    return [tokenizer.encode(opening) for opening in OPENINGS]


def params_for(temperature: float) -> list[SamplingParams]:
    top_p = 0.9 if temperature else 1.0
    return [
        SamplingParams(temperature=temperature, top_p=top_p, seed=i, max_tokens=MAX_TOKENS)
        for i in range(len(OPENINGS))
    ]


def single_draft_cost(name: str, concurrency: int) -> CostModel:
    """A single draft is priced so that some are verified and some are not."""
    if concurrency > 1:
        return scripted_cost(row_ms=0.2, fixed_ms=1.0)
    return scripted_cost(row_ms=0.6 if name == "table" else 1.1, fixed_ms=1.0)


@cache
def plain_run(temperature: float) -> Run:
    return run(models_with("table"), "off", prompts(), params_for(temperature), max_num_batched_tokens=128)


@cache
def table(temperature: float) -> Drafter:
    answers = [[*p, *a] for p, a in zip(prompts(), plain_run(temperature).answers, strict=True)]
    return TableDrafter(next_token_table(answers, models_with("table").vocab_size), DRAFTERS["table"])


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, str]]:
    """What was found, case by case; kept on disk when all ran that `make test` does not run."""
    found: dict[str, str] = {}
    yield found
    if len(found) >= len(CASES) - len(QUICK):
        path = Path("runs/identity-smollm2.json")
        path.parent.mkdir(exist_ok=True)
        weights = {name: weights_digest(folder) for name, folder in built_in_drafters().items()}
        facts = {
            "git": machine.git_commit(), "versions": machine.versions(), "threads": torch.get_num_threads(),
            "dtype": "float32", "prompts": len(OPENINGS), "max_tokens": MAX_TOKENS, "weights": weights,
        }  # fmt: skip
        path.write_text(json.dumps(facts | {"outcomes": found}, indent=1) + "\n", encoding="utf-8")


@pytest.fixture(autouse=True)
def _all_cores() -> Iterator[None]:
    """One thread is right for tiny models; these products are large enough for two."""
    before = torch.get_num_threads()
    beside_others = "PYTEST_XDIST_WORKER" in os.environ
    torch.set_num_threads(1 if beside_others else min(2, os.cpu_count() or 1))
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("mode", "name", "size", "concurrency", "temperature"), CASES)
def test_token_ids_equal_plain_decoding(
    outcomes: dict[str, str], mode: str, name: str, size: str, concurrency: int, temperature: float
) -> None:
    models, params = models_with(name), params_for(temperature)
    num_drafts = {"one": 1, "seven": 7, "most": DRAFTERS[name]}[size]
    cost = scripted_cost() if num_drafts > 1 else single_draft_cost(name, concurrency)
    other = run(
        models, mode, prompts(), params, num_drafts=num_drafts, concurrency=concurrency, cost=cost,
        drafter=table(temperature) if name == "table" else None, max_num_batched_tokens=128,
    )  # fmt: skip
    outcome, found = judge(models, mode, prompts(), params, plain_run(temperature), other, NEAR_TIES)
    outcomes[f"{mode} {name} S={num_drafts} concurrency={concurrency} T={temperature}"] = f"{outcome}: {found}"
    assert outcome == "equal", found
