"""Every field of `SamplingParams` does something, and refuses what it cannot be: none is silently ignored.

One case a field, and a field without a case fails. What each does exactly is tested where it is done.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from slipstream.config import MAX_BIASES, MAX_LOGPROBS, MAX_SIBLINGS, MAX_STOPS, SamplingParams
from slipstream.errors import RequestError
from slipstream.llm import LLM, Completion
from slipstream.testing import assert_nothing_left
from tests.e2e.engines import SPECULATING, VOCAB, ScriptedDrafter, make_llm, prompts_of
from tests.e2e.grammars import ANY, EOS, allowed_after, grammars
from tests.e2e.test_endings import byte_models

(PROMPT,) = PROMPTS = prompts_of(6)
LENGTH = 16
MODES = pytest.mark.parametrize("mode", ["off", *SPECULATING])
NAN, INF = float("nan"), float("inf")
ENDLESS = {"max_tokens": LENGTH, "ignore_eos": True}
HOT = {"temperature": 1.5, "seed": 4}


@dataclass(frozen=True)
class Case:
    value: Any
    holds: Callable[[list[Completion], list[Completion]], bool]  # of the answers without it, and with it
    refused: tuple[Any, ...]  # values out of range
    beside: dict[str, Any] = dataclasses.field(default_factory=dict)  # asked for in both


def ids(answers: list[Completion]) -> tuple[int, ...]:
    return answers[0].token_ids


def differ(without: list[Completion], with_it: list[Completion]) -> bool:
    return ids(without) != ids(with_it)


@cache
def whole(*wish: tuple[str, Any]) -> Completion:
    """Plain decoding's answer that nothing ends."""
    llm = make_llm("off", models=byte_models())
    return llm.generate(PROMPTS, SamplingParams(**ENDLESS, **dict(wish)))[0]


def third() -> int:
    return whole().token_ids[2]


def never_twice(without: list[Completion], with_it: list[Completion]) -> bool:
    return len(set(ids(without))) < LENGTH == len(set(ids(with_it)))


def in_grammar(answers: list[Completion]) -> bool:
    return all(allowed_after(ids(answers)[:n], VOCAB)[token] for n, token in enumerate(ids(answers)))


def cases() -> dict[str, Case]:
    text = whole().text
    inner = text[len(text) // 2 :][:2]
    return {
        "temperature": Case(1.5, differ, (-0.1, NAN, INF, "1", None, True), {"seed": 4}),
        "top_p": Case(0.2, differ, (0, 0.0, -0.1, 1.01, NAN, "0.5", None), HOT),
        "top_k": Case(1, lambda _, b: ids(b) == whole().token_ids, (-1, 1.5, 2**63, "2", None, True), HOT),
        "min_p": Case(1.0, lambda _, b: ids(b) == whole().token_ids, (-0.1, 1.1, NAN, "0", None), HOT),
        "repetition_penalty": Case(50.0, differ, (0, -1, 1001, NAN, INF, "1", None)),
        "frequency_penalty": Case(2.0, differ, (-2.1, 2.1, NAN, "1", None)),
        "presence_penalty": Case(2.0, differ, (-2.1, 2.1, NAN, "1", None)),
        "logit_bias": Case(
            {7: 100.0}, lambda _, b: ids(b) == (7,) * LENGTH,
            ({7: 101}, {7: NAN}, {-1: 1.0}, {VOCAB: 1.0}, {"seven": 1.0}, {7: "1"}, [7], None,
             dict.fromkeys(range(MAX_BIASES + 1), 1.0)),
        ),
        "min_tokens": Case(
            8, lambda a, b: len(ids(a)) < 8 <= len(ids(b)), (-1, LENGTH + 1, 1.5, "3", None), {"stop_token_ids": [third()]}
        ),
        "seed": Case(5, differ, (2**64, -(2**63) - 1, 1.5, "1", True), HOT),
        "max_tokens": Case(
            5, lambda a, b: ids(b) == ids(a)[:5] and b[0].finish_reason == "length", (0, -1, 1.5, "3", None, True)
        ),
        "stop_token_ids": Case(
            (third(),), lambda a, b: ids(b) == ids(a)[: ids(a).index(third()) + 1] and b[0].stop_reason == third(),
            ((-1,), (1.5,), ("a",), 3, None, (True,), (VOCAB,)),
        ),
        "ignore_eos": Case(
            False, lambda a, b: len(ids(b)) < len(ids(a)) and ids(b)[-1] == b[0].stop_reason == EOS, (0, "no", None),
            {"logit_bias": {EOS: 3.0}},
        ),
        "stop": Case(
            inner, lambda a, b: b[0].text == a[0].text[: a[0].text.index(inner)] and b[0].stop_reason == inner,
            ("", ("",), 3, None, ("a", 3), ("\ud800",), tuple("abcdefghijklmnopqrstuvwxyz"[: MAX_STOPS + 1])),
        ),
        "include_stop_str_in_output": Case(
            True, lambda a, b: b[0].text == a[0].text + inner, (1, "yes", None), {"stop": inner}
        ),
        "n": Case(
            3, lambda a, b: len({x.token_ids for x in b}) == 3 and b[0].token_ids == ids(a),
            (0, -1, MAX_SIBLINGS + 1, 1.5, "2", None, True), HOT,
        ),
        "logprobs": Case(
            2, lambda a, b: a[0].logprobs is None and [len(x.top) for x in b[0].logprobs or ()] == [2] * LENGTH,
            (-1, MAX_LOGPROBS + 1, 1.5, "1", True),
        ),
        "prompt_logprobs": Case(
            0, lambda a, b: a[0].prompt_logprobs is None and [x and x.token_id for x in b[0].prompt_logprobs or ()] == [None, *PROMPT[1:]],
            (-1, MAX_LOGPROBS + 1, 1.5, "1", True),
        ),
        "structured": Case(
            ANY, lambda a, b: not in_grammar(a) and in_grammar(b), ("json", 3, {}, {"regex": "a", "json": True}, {"form": "a"}),
            {"ignore_eos": False},
        ),
    }  # fmt: skip


FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


def test_every_field_has_a_case() -> None:
    assert list(cases()) == FIELDS


@MODES
@pytest.mark.parametrize("name", FIELDS)
def test_it_changes_the_answer(name: str, mode: str) -> None:
    """In every mode; that the answer is right too, tests/lossless says."""
    case = cases()[name]
    without, with_it = (answers_of(mode, {**case.beside, **wish}) for wish in ({}, {name: case.value}))
    assert case.holds(without, with_it), (without, with_it)


def answers_of(mode: str, wish: dict[str, Any]) -> list[Completion]:
    drafter = ScriptedDrafter([[*PROMPT, *whole().token_ids]]) if mode != "off" else None
    llm: LLM = make_llm(mode, drafter, models=byte_models())
    llm.grammars = grammars(VOCAB)
    answers = llm.generate(PROMPTS, SamplingParams(**{**ENDLESS, **wish}))
    assert_nothing_left(llm.engine)
    return answers


@pytest.mark.parametrize("name", FIELDS)
def test_what_it_cannot_be_is_refused_by_name(name: str) -> None:
    """Before anything is queued, in so many words."""
    llm = make_llm("off", models=byte_models())
    for value in cases()[name].refused:
        with pytest.raises(RequestError) as refused:
            llm.generate(PROMPTS, SamplingParams(**{**ENDLESS, name: value}))
        assert re.search(rf"\b{name}\b", str(refused.value)), (value, str(refused.value))
        assert_nothing_left(llm.engine)
