"""Structured output of SmolLM2 with the shipped drafter: valid, and in every mode the text of plain decoding."""

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
import torch

from slipstream import LLM, SamplingParams, StructuredOutput
from slipstream.config import MODES, SpeculativeConfig
from slipstream.decide.make import make_policy
from slipstream.load import Models, load_models
from slipstream.prompts import user
from slipstream.testing import assert_nothing_left
from tests.lossless.harness import scripted_cost

SPECULATING = [mode for mode in MODES if mode != "off"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["big", "small", "red"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON = StructuredOutput(json=SCHEMA)
DATE = r"(19|20)[0-9]{2}-[0-9]{2}-[0-9]{2}"
MAX_TOKENS = 48
FORMS: dict[str, tuple[str, dict[str, object]]] = {  # question, what is asked
    "json": ("Describe a person as JSON with name, age and tags.", {"structured": PERSON}),
    "regex": ("When did people walk on the moon?", {"structured": StructuredOutput(regex=DATE)}),
    "choice": ("Is the sky green?", {"structured": StructuredOutput(choice=("yes, it is", "no, it is not"))}),
    "after": (
        "Think about an answer, and then give it as JSON.",
        {"structured": StructuredOutput(choice=('{"answer": true}', '{"answer": false}'), after=".")},
    ),
    "shaped": (
        "Describe another person.",
        {"structured": PERSON, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.3},
    ),
    "free": ("What is a prime number?", {}),
}


@cache
def models() -> Models:
    return load_models("smollm2-135m", "smollm2-135m-dspark", dtype="float32", device="cpu")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def llm_for(mode: str) -> LLM:
    speculative, policy = SpeculativeConfig(), None
    if mode != "off":
        speculative = SpeculativeConfig.for_mode(mode, draft_model="smollm2-135m-dspark", num_speculative_tokens=7)
        policy, _ = make_policy(speculative, num_drafts=7, has_head=True, cost=scripted_cost())
    return LLM(models(), speculative=speculative, policy=policy, max_num_seqs=8, max_model_len=256)


def params_for(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, seed=i, max_tokens=MAX_TOKENS, **asked)  # type: ignore[arg-type]
        for i, (_, asked) in enumerate(FORMS.values())
    ]


CHATS = [user(question) for question, _ in FORMS.values()]


@cache
def plain(temperature: float) -> list[tuple[tuple[int, ...], str, str]]:
    answers = llm_for("off").chat(CHATS, params_for(temperature))
    return [(answer.token_ids, answer.text, answer.finish_reason) for answer in answers]


def check_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) == {"name", "age", "tags"}
    assert isinstance(person["name"], str) and len(person["name"]) <= 20
    assert isinstance(person["age"], int) and 0 <= person["age"] <= 150
    assert 1 <= len(person["tags"]) <= 3 and set(person["tags"]) <= {"big", "small", "red"}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_have_the_form(temperature: float) -> None:
    found = dict(zip(FORMS, plain(temperature), strict=True))
    for name in ("json", "regex", "choice", "shaped"):
        assert found[name][2] == "stop", found[name]
    check_person(found["json"][1])
    check_person(found["shaped"][1])
    assert re.fullmatch(DATE, found["regex"][1])
    assert found["choice"][1] in ("yes, it is", "no, it is not")
    thought, point, answer = found["after"][1].partition(".")
    assert thought
    if point:
        assert json.loads(answer)["answer"] in (True, False)
    assert point or temperature == 0
    alone = llm_for("off").chat(CHATS[-1:], params_for(temperature)[-1:])[0]
    assert alone.token_ids == found["free"][0], "a free request noticed its neighbours"


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "temperature"), [*product(SPECULATING, (0.0, 1.0))])
def test_every_mode_gives_the_text_of_plain_decoding(mode: str, temperature: float) -> None:
    llm = llm_for(mode)
    answers = llm.chat(CHATS, params_for(temperature))
    assert [(answer.token_ids, answer.text, answer.finish_reason) for answer in answers] == plain(temperature)
    assert 0 < llm.engine.totals.accepted < llm.engine.totals.verified
    assert_nothing_left(llm.engine)


@pytest.mark.slow
def test_rejection_keeps_the_form() -> None:
    speculative = SpeculativeConfig.for_mode("static", draft_model="smollm2-135m-dspark", acceptance="rejection")
    llm = LLM(models(), speculative=speculative, max_num_seqs=8, max_model_len=256)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=64, structured=PERSON, n=3)
    answers = llm.chat(CHATS[:1], params)
    for answer in answers:
        check_person(answer.text)
    assert len({answer.text for answer in answers}) == 3
    assert 0 < llm.engine.totals.accepted < llm.engine.totals.verified


@pytest.mark.slow
def test_a_stream_of_structured_text_joins() -> None:
    llm, params = llm_for("lag"), params_for(1.0)[0]
    chunks = list(llm.stream(CHATS[0], params))
    assert "".join(chunk.text for chunk in chunks) == plain(1.0)[0][1]
    assert len(chunks) > 3
