"""The OpenAPI document is true: of answers that are asked for here, and of what schemathesis makes up."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from slipstream.load import Models
from tests.serve.conftest import CHAT, COMPLETIONS, Running, make_llm, serving

USER = [{"role": "user", "content": "hi"}]
EVERYTHING = {
    "n": 2, "seed": 1, "max_tokens": 6, "prompt_logprobs": 2, "return_token_ids": True, "stop": "e",
    "return_steps": True, "verify": "static",
}  # fmt: skip
ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": USER, "max_tokens": 3}),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 2, **EVERYTHING}),
    (CHAT, {"messages": USER, "seed": 1, "stop_token_ids": list(range(60, 90))}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 3}),
    (COMPLETIONS, {"prompt": ["x", "y"], "logprobs": 2, **EVERYTHING}),
    ("/tokenize", {"prompt": "abc"}),
    ("/detokenize", {"tokens": [70]}),
]


@pytest.fixture(scope="module")
def document(served: Running) -> dict[str, Any]:
    found: dict[str, Any] = served.http.get("/openapi.json").json()
    return found


def check(document: dict[str, Any], path: str, method: str, response: Any) -> None:
    responses = document["paths"][path][method]["responses"]
    content = responses[str(response.status_code)]["content"]
    kind = response.headers["content-type"].partition(";")[0]
    schema = content[kind]["schema"]
    bodies = [response.json()] if kind == "application/json" else []
    if kind == "text/event-stream":
        schema = schema["properties"]["data"]["anyOf"][0]["contentSchema"]
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        bodies = list(map(json.loads, events))
        assert bodies
    for body in bodies:
        jsonschema_rs.validate({**schema, "components": document["components"]}, body)


def test_what_is_answered_is_what_the_document_says(served: Running, document: dict[str, Any]) -> None:
    for path, fields in ASKED:
        response = served.post(path, **fields)
        assert response.status_code == 200, response.text
        check(document, path, "post", response)
        for bad in ({"foo": 1}, {"model": "gpt-9"}):
            refused = served.post(path, **(fields | bad))
            assert refused.status_code in (400, 404)
            check(document, path, "post", refused)
        check(document, path, "post", served.http.post(path, content=b"{}"))
        if path in (CHAT, COMPLETIONS):
            usage = {"stream_options": {"include_usage": True}}
            check(document, path, "post", served.post(path, **fields, stream=True, **usage))
    for path in ("/v1/models", "/health", "/ready", "/version", "/metrics", "/stats"):
        check(document, path, "get", served.http.get(path))
    check(document, "/v1/models/{name}", "get", served.http.get("/v1/models/tiny"))
    check(document, "/v1/models/{name}", "get", served.http.get("/v1/models/none"))


def test_an_answer_that_the_document_does_not_know_is_noticed(served: Running, document: dict[str, Any]) -> None:
    """Else the test above would say nothing."""
    schema = {"$ref": "#/components/schemas/ChatCompletion", "components": document["components"]}
    body = served.post(CHAT, messages=USER, max_tokens=3).json()
    for wrong in (body | {"extra": 1}, body | {"choices": []}, {key: body[key] for key in body if key != "usage"}):
        with pytest.raises(jsonschema_rs.ValidationError):
            jsonschema_rs.validate(schema, wrong)


def test_every_route_is_described(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert "422" not in operation["responses"], path  # what the framework thinks of wrong bodies
            assert all(response.get("content") for response in operation["responses"].values()), path
            assert ("requestBody" in operation) == (method == "post"), path


@pytest.fixture
def small(tiny_pair: Models) -> Iterator[Running]:
    """Answers are short where nobody says how long they may be; the process that compiles grammars has started."""
    with serving(make_llm(tiny_pair, max_num_seqs=16, max_model_len=48)) as running:
        assert running.post(COMPLETIONS, prompt="x", structured={"choice": ["a"]}).status_code == 200
        yield running
        running.settle()


@pytest.mark.slow
def test_schemathesis_finds_nothing(small: Running, tmp_path: Path) -> None:
    """What a schema cannot say (a prompt that does not fit, say) is refused though the schema allows it."""
    command = [
        sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run",
        f"{small.url}/openapi.json", "--seed", "1", "--max-examples", "10", "--phases", "examples,coverage,fuzzing",
        "--exclude-checks", "positive_data_acceptance", "--request-timeout", "60", "--no-color",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-5000:]
    assert "Tested: 11" in done.stdout
