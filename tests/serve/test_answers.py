"""What is served is what the engine gives offline: text, tokens, log-probabilities, usage and why it ended."""

import json
import socket
from typing import Any

import pytest

from slipstream.config import SamplingParams
from slipstream.llm import LLM, Completion
from slipstream.load import Models
from slipstream.structured import StructuredOutput
from tests.serve.conftest import CHAT, COMPLETIONS, MODEL, Running, make_llm, serving

PROMPTS = ["The quick brown fox", "one two three four", "a\nb\nc"]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]


@pytest.fixture(scope="module")
def offline(tiny_pair: Models) -> LLM:
    return make_llm(tiny_pair, "off")


def streamed(running: Running, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, which ends as it should."""
    with running.http.stream("POST", path, json={**fields, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> tuple[str, str | None, list[int]]:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    text = "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
    return text, choices[-1]["finish_reason"], [token for choice in choices for token in choice["token_ids"]]


def check(choice: dict[str, Any], answer: Completion) -> None:
    assert choice["token_ids"] == list(answer.token_ids)
    assert choice.get("text", choice.get("message", {}).get("content")) == answer.text
    assert (choice["finish_reason"], choice["stop_reason"]) == (answer.finish_reason, answer.stop_reason)


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1, "seed": 5},
    "filters": {"temperature": 0.8, "seed": 6, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    "bias": {"temperature": 0, "logit_bias": {"70": 100}, "max_tokens": 4},
    "stops": {"temperature": 1, "seed": 7, "stop": ["a", "e"], "max_tokens": 100},
    "stop token": {"temperature": 1, "seed": 8, "stop_token_ids": list(range(60, 90)), "min_tokens": 3},
    "kept stop": {"temperature": 1, "seed": 9, "stop": "o", "include_stop_str_in_output": True, "max_tokens": 100},
    "ignored end": {"temperature": 1, "seed": 10, "ignore_eos": True},
    "several": {"temperature": 1, "seed": 11, "n": 3},
}


def params_of(fields: dict[str, Any], **more: Any) -> SamplingParams:
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return SamplingParams(**{"max_tokens": 16, **fields, **more})


def assert_usage(usage: dict[str, Any], prompt: int, output: int) -> None:
    cached = usage.pop("prompt_tokens_details").pop("cached_tokens")
    assert 0 <= cached < prompt
    assert usage == {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def test_tokens_that_were_not_computed_are_counted(tiny_pair: Models) -> None:
    with serving(make_llm(tiny_pair)) as running:
        prompts = [[5] * 20, [5] * 17 + [6]]
        first, second = (running.post(COMPLETIONS, prompt=p, max_tokens=1).json()["usage"] for p in prompts)
        assert_usage(first, 20, 1)
        assert second["prompt_tokens_details"] == {"cached_tokens": 16}
        assert running.metric("prefix_cache_queries_total") == 38
        assert running.metric("prefix_cache_hits_total") == 16


@pytest.mark.parametrize("case", CASES)
def test_completions_are_those_of_the_engine(served: Running, offline: LLM, case: str) -> None:
    fields = CASES[case]
    answers = offline.generate(PROMPTS[:1], params_of(fields))
    body = served.post(COMPLETIONS, prompt=PROMPTS[0], return_token_ids=True, **fields).json()
    for choice, answer in zip(body["choices"], answers, strict=True):
        check(choice, answer)
    total = sum(answer.completion_tokens for answer in answers)
    prompt = answers[0].prompt_tokens
    assert_usage(body["usage"], prompt, total)
    chunks = streamed(served, COMPLETIONS, prompt=PROMPTS[0], return_token_ids=True, **fields)
    for index, answer in enumerate(answers):
        assert joined(chunks, index) == (answer.text, answer.finish_reason, list(answer.token_ids))


@pytest.mark.parametrize("mode", ["off", "adaptive", "lag", "lag-budget"])
def test_modes_give_the_same_text(tiny_pair: Models, offline: LLM, mode: str) -> None:
    fields = {"temperature": 1.0, "seed": 3, "max_tokens": 40}
    with serving(make_llm(tiny_pair, mode)) as running:
        body = running.post(COMPLETIONS, prompt=PROMPTS, return_token_ids=True, **fields).json()
        for choice, answer in zip(body["choices"], offline.generate(PROMPTS, params_of(fields)), strict=True):
            check(choice, answer)
        assert running.http.get("/version").json()["mode"] == mode
        running.settle()


def test_chat(served: Running, offline: LLM) -> None:
    (answer,) = offline.chat([MESSAGES], SamplingParams(temperature=1, seed=2, max_tokens=30))
    fields = {"messages": MESSAGES, "seed": 2, "max_completion_tokens": 30, "return_token_ids": True}
    body = served.post(CHAT, **fields).json()
    check(body["choices"][0], answer)
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == MODEL
    assert body["choices"][0]["message"]["role"] == "assistant"
    chunks = streamed(served, CHAT, **fields, stream_options={"include_usage": True})
    assert joined(chunks) == (answer.text, answer.finish_reason, list(answer.token_ids))
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in choice["delta"] for chunk in chunks[1:] for choice in chunk["choices"])
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert_usage(chunks[-1]["usage"], body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in MESSAGES]
    assert served.post(CHAT, **(fields | {"messages": parts})).json()["choices"] == body["choices"]


def test_a_chat_without_a_limit_goes_on_to_the_end_of_the_context(served: Running) -> None:
    body = served.post(CHAT, messages=MESSAGES, temperature=0, ignore_eos=True).json()
    assert body["usage"]["total_tokens"] == served.llm.max_model_len
    assert body["choices"][0]["finish_reason"] == "length"


def test_prompts_as_texts_and_ids(served: Running, offline: LLM) -> None:
    ids = [offline.tokenizer.encode(prompt) for prompt in PROMPTS]
    answers = offline.generate(PROMPTS, SamplingParams(max_tokens=16))
    for prompt, expected in ((PROMPTS[0], answers[:1]), (ids[0], answers[:1]), (PROMPTS, answers), (ids, answers)):
        body = served.post(COMPLETIONS, prompt=prompt, temperature=0, return_token_ids=True).json()
        assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
        for choice, answer in zip(body["choices"], expected, strict=True):
            check(choice, answer)
        assert body["usage"]["prompt_tokens"] == sum(answer.prompt_tokens for answer in expected)


def test_logprobs(served: Running, offline: LLM) -> None:
    params = SamplingParams(temperature=1, seed=4, max_tokens=12, logprobs=3, prompt_logprobs=2)
    (answer,) = offline.generate(PROMPTS[:1], params)
    fields = {"prompt": PROMPTS[0], "seed": 4, "max_tokens": 12, "logprobs": 3, "prompt_logprobs": 2}
    choice = served.post(COMPLETIONS, **fields).json()["choices"][0]
    entries = choice["logprobs"]
    assert entries["token_logprobs"] == pytest.approx([entry.logprob for entry in answer.logprobs], abs=1e-4)
    for top, entry in zip(entries["top_logprobs"], answer.logprobs, strict=True):
        own = {(entry.token_id, entry.logprob), *entry.top}
        assert sorted(top.values()) == pytest.approx(sorted(value for _, value in own), abs=1e-4)
    assert entries["text_offset"][0] == 0
    assert entries["text_offset"] == sorted(entries["text_offset"])
    assert choice["prompt_logprobs"][0] is None
    for shown, entry in zip(choice["prompt_logprobs"][1:], answer.prompt_logprobs[1:], strict=True):
        assert shown[str(entry.token_id)]["logprob"] == pytest.approx(entry.logprob, abs=1e-4)
    chunks = streamed(served, COMPLETIONS, return_token_ids=True, **fields)
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [value for each in logprobs for value in each["token_logprobs"]] == pytest.approx(entries["token_logprobs"])
    assert [value for each in logprobs for value in each["text_offset"]] == entries["text_offset"]
    chat = served.post(CHAT, messages=MESSAGES, seed=4, max_tokens=12, logprobs=True, top_logprobs=2).json()
    content = chat["choices"][0]["logprobs"]["content"]
    text = bytes(byte for entry in content for byte in entry["bytes"]).decode(errors="replace")
    (offline_chat,) = offline.chat([MESSAGES], SamplingParams(temperature=1, seed=4, max_tokens=12))
    assert text.startswith(offline_chat.text.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


SCHEMA = {
    "type": "object", "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "bc"]}},
    "required": ["ok", "kind"], "additionalProperties": False,
}  # fmt: skip


def test_structured(served: Running, offline: LLM) -> None:
    params = SamplingParams(temperature=1, seed=1, max_tokens=140, structured=StructuredOutput(json=SCHEMA))
    (answer,) = offline.chat([MESSAGES], params)
    fields = {"messages": MESSAGES, "seed": 1, "max_tokens": 140, "return_token_ids": True}
    shape = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
    choice = served.post(CHAT, **fields, response_format=shape).json()["choices"][0]
    check(choice, answer)
    assert json.loads(choice["message"]["content"])["kind"] in ("a", "bc")
    own = served.post(CHAT, **fields, structured={"json": SCHEMA}).json()["choices"][0]
    check(own, answer)
    choice = served.post(COMPLETIONS, prompt="x", structured={"choice": ["yes", "no"]}).json()["choices"][0]
    assert choice["text"] in ("yes", "no")
    text = served.post(CHAT, **fields, response_format={"type": "text"}).json()["choices"][0]
    (free,) = offline.chat([MESSAGES], SamplingParams(temperature=1, seed=1, max_tokens=140))
    check(text, free)


def test_tokens_there_and_back(served: Running, offline: LLM) -> None:
    text = "héllo <|im_end|> wörld"
    body = served.post("/tokenize", prompt=text).json()
    assert body["tokens"] == offline.tokenizer.encode(text, add_special=True)
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), offline.max_model_len)
    assert served.post("/detokenize", tokens=body["tokens"]).json() == {"prompt": text}
    assert served.post("/tokenize", messages=MESSAGES).json()["tokens"] == offline.chat_ids(MESSAGES)


def test_about_the_server(served: Running) -> None:
    models = served.http.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == [MODEL]
    assert served.http.get(f"/v1/models/{MODEL}").json() == models["data"][0]
    assert served.http.get("/health").json()["status"] == "running"
    assert served.http.get("/ready").json() == {"ready": True}
    schema = served.http.get("/openapi.json").json()
    assert set(schema["components"]["schemas"]) >= {"ChatRequest", "CompletionRequest"}


def test_a_name_of_its_own(tiny_pair: Models) -> None:
    with serving(make_llm(tiny_pair), served_name="org/name") as running:
        assert running.post(COMPLETIONS, model="org/name", prompt="x").json()["model"] == "org/name"
        assert running.post(COMPLETIONS, model=MODEL, prompt="x").status_code == 404
        assert running.http.get("/v1/models/org/name").json()["id"] == "org/name"


def test_request_ids(served: Running) -> None:
    for given, kept in (("my-id.7", True), ("a b", False), ("x" * 200, False), ("", False)):
        response = served.http.post(COMPLETIONS, json={"prompt": "x"}, headers={"x-request-id": given})
        assert (response.headers["x-request-id"] == given) is kept
        assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"


def test_metrics_count_what_happened(tiny_pair: Models) -> None:
    with serving(make_llm(tiny_pair)) as running:
        body = running.post(COMPLETIONS, prompt=PROMPTS, n=2, seed=1, max_tokens=20, ignore_eos=True).json()
        usage = body["usage"]
        assert usage["completion_tokens"] == 120
        assert running.metric("generation_tokens_total") == 120
        assert running.metric("prompt_tokens_total") == usage["prompt_tokens"]
        assert running.metric("request_success_total", finished_reason="length") == 6
        for name in ("time_to_first_token_seconds", "time_per_output_token_seconds", "e2e_request_latency_seconds"):
            assert running.metric(f"{name}_count") == 6
        totals = running.llm.engine.totals
        for name, value in (
            ("drafts", totals.steps), ("draft_tokens", totals.drafted), ("verified_tokens", totals.verified),
            ("accepted_tokens", totals.accepted), ("emitted_tokens", totals.emitted),
        ):  # fmt: skip
            assert running.metric(f"spec_decode_num_{name}_total", mode="static") == value
        assert totals.verified > 0
        assert running.metric("spec_decode_num_verified_tokens_per_pos_total") == totals.verified
        assert running.metric("spec_decode_num_accepted_tokens_per_pos_total") == totals.accepted
        assert running.metric("spec_decode_num_steps_per_width_total") == totals.steps
        assert running.post(COMPLETIONS, prompt="x", foo=1).status_code == 400
        running.wait_until(lambda: running.metric("http_problems_total", status="400") == 1)


def test_usage_with_every_event(served: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = streamed(served, COMPLETIONS, prompt="once", max_tokens=60, ignore_eos=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 60
    assert chunks[-1]["choices"] == []


def test_nothing_waits_for_more_to_send(served: Running) -> None:
    """Else the system holds small packets back until the client has acknowledged the last one, 40 ms later."""
    assert served.http.get("/version").status_code == 200
    connections = [protocol.transport.get_extra_info("socket") for protocol in served.server.server_state.connections]
    assert connections
    assert all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in connections)
