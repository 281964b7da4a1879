"""`return_steps`: what became of drafts, step by step, in texts that join to the answer's."""

from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.commit import Delta
from slipstream.load import Models
from slipstream.serve.render import step_of
from slipstream.stream import TextStream
from tests.serve.conftest import CHAT, COMPLETIONS, Running, make_llm, serving
from tests.serve.test_answers import streamed
from tests.unit.test_stream import REQUEST, Bytes

FIELDS = {"prompt": "once", "seed": 1, "max_tokens": 50, "return_token_ids": True, "return_steps": True}
Step = dict[str, Any]


@pytest.fixture(scope="module")
def pruning(tiny_pair: Models) -> Iterator[Running]:
    with serving(make_llm(tiny_pair, "lag")) as running:
        yield running


def steps_of(events: list[dict[str, Any]], index: int = 0) -> list[Step]:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    for choice in choices:  # what a choice says of its tokens is what its text says
        told = "".join(text for step in choice["steps"] for text in step["tokens"])
        assert told == (choice["text"] if "text" in choice else choice["delta"].get("content", ""))
        assert sum(len(step["tokens"]) for step in choice["steps"]) == len(choice["token_ids"])
    return [step for choice in choices for step in choice["steps"]]


@pytest.mark.parametrize("fields", [{}, {"stop": ["e", "aa"], "seed": 7}, {"n": 2}, {"temperature": 0}])
def test_a_whole_answer_says_what_its_stream_says(served: Running, fields: dict[str, Any]) -> None:
    events = streamed(served, COMPLETIONS, **{**FIELDS, **fields})
    whole = served.post(COMPLETIONS, **{**FIELDS, **fields}).json()
    for choice in whole["choices"]:
        steps = steps_of(events, choice["index"])
        assert steps == steps_of([whole], choice["index"])
        assert len(steps) > 1
        for number, step in enumerate(steps):
            check(step, is_first=number == 0, is_last=number == len(steps) - 1)
            assert (
                step["drafted"] == 5 * (number > 0) or number == len(steps) - 1
            )  # with one token to go nothing is drafted


def check(step: Step, is_first: bool, is_last: bool) -> None:
    assert list(step) == ["drafted", "verified", "accepted", "tokens"]
    assert 0 <= step["accepted"] <= step["verified"] <= step["drafted"]
    if is_first:  # comes of the prompt
        assert (step["drafted"], len(step["tokens"])) == (0, 1)
    if not is_last:  # the end of an answer may cut a step
        assert len(step["tokens"]) == step["accepted"] + 1


def test_counts_are_those_of_the_engine(pruning: Running) -> None:
    """Drafts that were made, verified, accepted; pruned ones among them, or it would say nothing."""
    totals = pruning.llm.engine.totals
    before = totals.drafted, totals.verified, totals.accepted, totals.emitted
    steps = steps_of(streamed(pruning, COMPLETIONS, **FIELDS))
    pruning.settle()
    after = totals.drafted, totals.verified, totals.accepted, totals.emitted
    drafted, verified, accepted = (sum(step[name] for step in steps) for name in ("drafted", "verified", "accepted"))
    emitted = sum(len(step["tokens"]) for step in steps) - 1
    assert [b - a for a, b in zip(before, after, strict=True)] == [drafted, verified, accepted, emitted]
    assert any(step["accepted"] == step["verified"] < step["drafted"] for step in steps)
    assert any(step["accepted"] < step["verified"] for step in steps)


def test_chat(served: Running) -> None:
    fields = {"messages": [{"role": "user", "content": "hé"}], "seed": 3, "max_tokens": 30, "return_token_ids": True}
    events = streamed(served, CHAT, **fields, return_steps=True)
    assert sum(len(step["tokens"]) for step in steps_of(events)) > 1
    assert all("steps" not in choice for event in streamed(served, CHAT, **fields) for choice in event["choices"])
    response = served.post(CHAT, **fields, return_steps="yes")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "return_steps")


def test_what_was_held_back_belongs_to_the_last_token() -> None:
    stream = TextStream(Bytes())
    half = "é".encode()[:1]
    chunk = stream.chunk(Delta(REQUEST, (120, *half), (True, False), 3, "length", drafted=4))
    assert step_of(chunk) == {"drafted": 4, "verified": 3, "accepted": 1, "tokens": ["x", "�"]}
    assert step_of(TextStream(Bytes()).chunk(Delta(REQUEST, (), (), 0, "abort")))["tokens"] == []
