"""Bodies of requests as values, whatever bytes come: a request, or a problem that names what is wrong."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers

from slipstream.config import SamplingParams
from slipstream.errors import CapacityError, ConfigError, EngineError, RequestError
from slipstream.serve import protocol
from slipstream.serve.guard import Keys, request_id_of
from slipstream.serve.problems import Problem, problem_of
from slipstream.serve.protocol import (
    Answering,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)

KINDS: list[Any] = [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]
NAMES = sorted(
    {name for kind in KINDS for name in kind.model_fields} | {"tools", "json", "type", "schema", "role", "content"}
)
ATOMS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["user", "text"])
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=8,
)
GOOD: dict[Any, dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "hi"}]},
    CompletionRequest: {"prompt": "hi"},
    TokenizeRequest: {"prompt": "hi"},
    DetokenizeRequest: {"tokens": [1]},
}
PROFILE = settings(max_examples=300, deadline=None, derandomize=True, database=None)


def read(kind: Any, body: bytes) -> None:
    """No other exceptions than those that become a status of 4xx."""
    try:
        asked = parse(kind, body)
        if isinstance(asked, Answering):
            assert isinstance(asked.sampling_params(100), SamplingParams)
        return
    except (Problem, RequestError) as error:
        problem = problem_of(error, kind.model_fields)
    assert problem.status == 400
    assert len(json.dumps(problem.body, allow_nan=False)) < 10_000


@PROFILE
@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), VALUES, max_size=5))
def test_any_fields(kind: Any, fields: dict[str, Any]) -> None:
    read(kind, json.dumps({**GOOD[kind], **fields}).encode())


@PROFILE
@given(st.sampled_from(KINDS), st.sampled_from(NAMES), VALUES)
def test_any_value_of_one_field(kind: Any, name: str, value: Any) -> None:
    read(kind, json.dumps({**GOOD[kind], name: value}).encode())


@PROFILE
@given(
    st.sampled_from(KINDS),
    st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "replace")),
)
def test_any_bytes(kind: Any, body: bytes) -> None:
    read(kind, body)


def test_of_thousands_of_unknown_names_no_list_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take longer than the event loop may stand still."""
    monkeypatch.setattr(protocol, "_problem", lambda errors: pytest.fail("a list was made"))
    body = {"prompt": "x", **{f"k{i}": 1 for i in range(5000)}}
    with pytest.raises(Problem, match="unknown or unsupported field: k0") as refused:
        parse(CompletionRequest, json.dumps(body).encode())
    assert (refused.value.status, refused.value.param) == (400, "k0")


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionRequest, {"prompt": "x", "stop": [1] * 5000}, "stop.0"),
        (CompletionRequest, {"prompt": "x", "structured": {"choice": [1] * 5000}}, "structured.choice.0"),
        (ChatRequest, {"messages": [{"role": "user", "content": "x", "z": 1}] * 5000}, "messages.0.z"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}] * 5000}]},
            "messages.0.content.0.text",
        ),
        (DetokenizeRequest, {"tokens": ["x"] * 5000}, "tokens.0"),
    ],
)
def test_a_list_ends_at_its_first_wrong_value_which_is_named(
    kind: Any, body: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    usual = protocol._problem
    monkeypatch.setattr(protocol, "_problem", lambda errors: found.append(len(errors)) or usual(errors))
    with pytest.raises(Problem) as refused:
        parse(kind, json.dumps(body).encode())
    assert refused.value.param == param and found[0] < 5


def test_one_object_of_thousands_of_unknown_names_is_named_too() -> None:
    nested = {"prompt": "x", "structured": {f"k{i}": 1 for i in range(5000)}}
    with pytest.raises(Problem) as refused:
        parse(CompletionRequest, json.dumps(nested).encode())
    assert refused.value.param == "structured.k0"


def test_names_are_not_repeated_at_any_length() -> None:
    with pytest.raises(Problem) as refused:
        parse(CompletionRequest, json.dumps({"prompt": "x", "y" * 10**6: 1}).encode())
    assert len(json.dumps(refused.value.body)) < 1000


def test_defaults_are_those_of_the_api() -> None:
    chat = parse(ChatRequest, json.dumps(GOOD[ChatRequest]).encode()).sampling_params(77)
    assert chat == SamplingParams(temperature=1.0, max_tokens=77)
    completion = parse(CompletionRequest, b'{"prompt": "x"}').sampling_params(77)
    assert completion == SamplingParams(temperature=1.0, max_tokens=16)
    nulls = {name: None for name in CompletionRequest.model_fields if name != "prompt"}
    assert parse(CompletionRequest, json.dumps({"prompt": "x", **nulls}).encode()).sampling_params(77) == completion
    assert parse(TokenizeRequest, b'{"prompt": "x", "add_special_tokens": null}').prompt == "x"
    options = (
        b'{"prompt": "x", "stream": true, "stream_options": {"include_usage": null, "continuous_usage_stats": null}}'
    )
    assert not parse(CompletionRequest, options).usage_in_stream.include_usage


def test_every_field_of_the_engine_can_be_asked_for() -> None:
    """A new one must be added to the protocol, or be left out here with a reason."""
    for kind in (ChatRequest, CompletionRequest):
        missing = set(SamplingParams.__dataclass_fields__) - set(kind.model_fields)
        assert missing == set()


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (RequestError("top_p is 2; it must lie in (0, 1]"), 400, "top_p"),
        (RequestError("structured.json is no JSON"), 400, "structured"),
        (RequestError("the chat template refuses"), 400, None),
        (CapacityError("the request may need 9 KV pages"), 400, None),
        (ConfigError("structured output needs the library xgrammar"), 501, None),
        (EngineError("a step failed"), 500, None),
        (Problem(418, "a teapot", param="tea"), 418, "tea"),
    ],
)
def test_errors_of_the_engine_as_answers(error: Exception, status: int, param: str | None) -> None:
    """What they are called comes from where they are made: a message may quote anything."""
    assert problem_of(RequestError("logit_bias holds 'max_model_len'"), {}).code is None
    assert (
        problem_of(RequestError("prompt is long", code="context_length_exceeded"), {}).code == "context_length_exceeded"
    )
    problem = problem_of(error, CompletionRequest.model_fields)
    assert (problem.status, problem.param) == (status, param)
    with pytest.raises(KeyError):
        problem_of(KeyError("a bug"), {})


def test_a_problem_holds_no_calls_and_with_them_no_prompts() -> None:
    def refuse(prompt: str) -> None:
        try:
            raise RequestError("prompt is too long")
        except RequestError as error:
            raise problem_of(error, {"prompt": None}) from error

    with pytest.raises(Problem) as raised:
        refuse("x" * 1000)
    problem = raised.value.alone()
    assert (problem.__traceback__, problem.__cause__, problem.__context__) == (None, None, None)
    assert problem.param == "prompt"


def test_a_message_does_not_repeat_a_body_of_megabytes() -> None:
    problem = Problem(400, f"verify is {'x' * (4 << 20)!r}, and this server offers off", param="verify")
    assert len(problem.message) < 2100
    assert problem.body["error"]["message"].endswith("and this server offers off")


def test_ids_are_kept_only_where_they_are_harmless() -> None:
    assert request_id_of("abc-1_2.3") == "abc-1_2.3"
    for bad in (None, "", "a\nb", 'a"b', "x" * 129, "ä"):
        assert request_id_of(bad) is None


def test_no_keys_admit_everybody() -> None:
    assert Keys([]).admit(Headers({}))
    assert not Keys(["k"]).admit(Headers({}))
    assert Keys(["k", "l"]).admit(Headers({"authorization": "bearer l"}))
