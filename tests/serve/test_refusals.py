"""Requests that cannot be honoured: the right status, the field's name, and nobody else notices."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from slipstream.config import SamplingParams
from slipstream.load import Models
from tests.serve.conftest import CHAT, COMPLETIONS, Running, make_llm, serving, slowed

USER = [{"role": "user", "content": "hi"}]
LONG = {"prompt": "once upon a time", "max_tokens": 80, "ignore_eos": True, "seed": 1}


@pytest.fixture(autouse=True)
def neighbour(served: Running) -> Iterator[None]:
    """An answer in flight beside all of them; it is whole in the end."""
    answers: list[httpx2.Response] = []
    with slowed(served.llm, 0.001):
        thread = threading.Thread(
            target=lambda: answers.append(served.post(COMPLETIONS, **LONG, return_token_ids=True))
        )
        thread.start()
        yield
        thread.join(60)
    (choice,) = answers[0].json()["choices"]
    assert choice["token_ids"] == expected(served)


def expected(served: Running, cache: dict[int, list[int]] = {}) -> list[int]:  # noqa: B006
    if not cache:
        fields = {name: value for name, value in LONG.items() if name != "prompt"}
        llm = make_llm(served.llm.models, "off")
        (answer,) = llm.generate([LONG["prompt"]], SamplingParams(temperature=1, **fields))
        cache[0] = list(answer.token_ids)
    return cache[0]


def problem(response: httpx2.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert response.headers["x-request-id"]
    return error


BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": USER, "tools": []}, "tools"),
    (CHAT, {"messages": USER, "functions": None}, "functions"),
    (CHAT, {"messages": USER, "temprature": 1}, "temprature"),
    (CHAT, {"messages": USER, "structured": {"json": True, "jsn": 1}}, "structured.jsn"),
    (CHAT, {"messages": USER, "stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    (CHAT, {"messages": USER, "stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"messages": USER, "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": USER, "logprobs": 1}, "logprobs"),
    (CHAT, {"messages": USER, "max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
    (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": USER, "max_completion_tokens": -1}, "max_tokens"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages.0.name"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        CHAT,
        {
            "messages": USER,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}},
        },
        "response_format",
    ),
    (
        CHAT,
        {"messages": USER, "response_format": {"type": "json_object"}, "structured": {"regex": "a"}},
        "structured",
    ),
    (
        CHAT,  # found by who compiles it, not by who reads the request
        {
            "messages": USER,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "string", "minLength": 5, "maxLength": 3}},
            },
        },
        "response_format",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "many words " * 2000}]}, "messages"),
    (CHAT, {"messages": USER, "structured": {"regex": "a", "choice": ["b"]}}, "structured"),
    (CHAT, {"messages": USER, "structured": {"regex": "(("}}, "structured"),
    (COMPLETIONS, {"prompt": "x", "echo": True}, "echo"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2}, "best_of"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], []]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, 10**9]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, 2.5]}, "prompt"),
    (COMPLETIONS, {"prompt": "x" * 300}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "x", "n": 10**6}, "n"),
    (COMPLETIONS, {"prompt": ["x"] * 100, "n": 100}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature"),
    (COMPLETIONS, {"prompt": "x", "temperature": "1"}, "temperature"),
    (COMPLETIONS, {"prompt": "x", "temperature": True}, "temperature"),
    (COMPLETIONS, {"prompt": "x", "top_p": 0}, "top_p"),
    (COMPLETIONS, {"prompt": "x", "top_p": 1.5}, "top_p"),
    (COMPLETIONS, {"prompt": "x", "top_k": -1}, "top_k"),
    (COMPLETIONS, {"prompt": "x", "min_p": 2}, "min_p"),
    (COMPLETIONS, {"prompt": "x", "seed": 2**70}, "seed"),
    (COMPLETIONS, {"prompt": "x", "seed": 1.5}, "seed"),
    (COMPLETIONS, {"prompt": "x", "stop": [""]}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": [5]}, "stop.0"),
    (COMPLETIONS, {"prompt": "x", "stop": ["a"] * 17}, "stop"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"100000": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 50}, "min_tokens"),
    (COMPLETIONS, {"prompt": "x", "frequency_penalty": 3}, "frequency_penalty"),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 30}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "x", "structured": {"json": True}, "ignore_eos": True}, "ignore_eos"),
    (COMPLETIONS, {"prompt": "x", "model": 5}, "model"),
    (COMPLETIONS, {"prompt": ["x"] * 300, "n": 2}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 3000}, "prompt"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
    ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
]


@pytest.mark.parametrize("part", range(4))
def test_the_field_at_fault_is_named(served: Running, part: int) -> None:
    for path, fields, param in BAD_FIELDS[part::4]:
        error = problem(served.post(path, **fields), 400)
        assert error["param"] == param, (path, fields, error)
        assert error["type"] == "invalid_request_error"
        if path in (CHAT, COMPLETIONS) and param != "stream_options":  # a stream is refused before it begins
            assert problem(served.post(path, **{**fields, "stream": True}), 400)["param"] == param


def test_bodies_that_are_no_json(served: Running) -> None:
    for body in (b"", b"{", b"[1]", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 10**5, b'{"a": NaN}', b"null", b"5"):
        response = served.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        problem(response, 400)
    numbers = b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "temperature": 1e400}'
    for body in numbers:
        response = served.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert problem(response, 400)["param"] == "temperature"


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data; boundary=x"]
)
def test_a_wrong_content_type(served: Running, kind: str) -> None:
    error = problem(served.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": kind}), 415)
    assert error["code"] == "wrong_content_type"


def test_a_content_type_with_parameters(served: Running) -> None:
    kind = {"content-type": "Application/JSON; charset=utf-8"}
    assert served.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=kind).status_code == 200


def test_an_unknown_model(served: Running) -> None:
    for path, fields in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        error = problem(served.post(path, model="gpt-9", **fields), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    problem(served.http.get("/v1/models/gpt-9"), 404)


def test_unknown_paths_and_methods(served: Running) -> None:
    problem(served.http.get("/v1/nothing"), 404)
    problem(served.http.get(CHAT), 405)
    problem(served.http.post("/health"), 405)


@pytest.mark.parametrize("size", [5 << 20, 10 << 20, 90 << 20])
def test_a_prompt_of_many_megabytes(served: Running, size: int) -> None:
    """The answer is read, although the client has still been sending; too much, and it is cut off."""
    body = b'{"prompt": "' + b"x" * size + b'"}'
    try:
        response = served.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    except httpx2.TransportError:
        assert size > 64 << 20
    else:
        assert problem(response, 413)["code"] == "body_too_large"
    assert served.http.get("/health").status_code == 200


def test_a_body_in_chunks_is_counted_too(served: Running) -> None:
    chunks = (b" " * (1 << 20) for _ in range(6))
    problem(served.http.post(COMPLETIONS, content=chunks, headers={"content-type": "application/json"}), 413)


@pytest.mark.parametrize("more", [b"", b"expect: 100-continue\r\n"])
def test_a_body_that_says_it_is_too_large_is_not_waited_for(served: Running, more: bytes) -> None:
    size = 5 << 20 if more else 99 << 30
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s\r\n"
            % (size, more)
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_bytes_that_are_no_http(served: Running) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(b"\x00\x01\x02 garbage\r\n\r\n")
        assert b"400" in connection.recv(1000)
    with socket.create_connection(("127.0.0.1", served.port)) as connection:  # and leaves in the middle of its body
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        )
    assert served.http.get("/health").status_code == 200


def test_keys(tiny_pair: Models, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsecret-1\n\n  secret-2  \nschlüssel\n", encoding="utf-8")
    with serving(make_llm(tiny_pair), api_keys=file) as running:
        for key in ("secret-1", "secret-2", "schlüssel"):
            headers = {b"authorization": f"Bearer {key}".encode()}
            assert running.http.post(COMPLETIONS, json={"prompt": "x"}, headers=headers).status_code == 200
        wrong: list[dict[str, str]] = [
            {}, {"authorization": "Bearer secret-3"}, {"authorization": "Bearer"}, {"authorization": "secret-1"},
            {"authorization": "Basic secret-1"}, {"authorization": "Bearer # ours"}, {"authorization": "Bearer ä"},
        ]  # fmt: skip
        for headers in wrong:
            raw = {name.encode(): value.encode() for name, value in headers.items()}
            for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
                response = running.http.post(path, json={"prompt": "x"}, headers=raw)
                assert problem(response, 401)["code"] == "invalid_api_key"
            problem(running.http.get("/v1/models", headers=raw), 401)
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert running.http.get(path).status_code == 200


def test_every_problem_is_logged_once_without_texts(served: Running, caplog: pytest.LogCaptureFixture) -> None:
    def problems() -> list[Any]:
        return [record for record in caplog.records if getattr(record, "fields", {}).get("problem")]

    with caplog.at_level("INFO", logger="slipstream.serve"):
        served.post(COMPLETIONS, prompt="a secret text", temperature=-1)
        served.wait_until(lambda: bool(problems()))  # the line comes after the response
    (record,) = problems()
    assert record.fields["status"] == 400
    assert "a secret text" not in json.dumps(record.fields)
