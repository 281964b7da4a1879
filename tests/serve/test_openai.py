"""The official client: sync, async, streams, structured output, and its exceptions."""

import asyncio
from collections.abc import Iterator

import openai
import pydantic
import pytest

from slipstream.config import SamplingParams
from slipstream.llm import LLM
from slipstream.load import Models
from tests.serve.conftest import MODEL, Running, make_llm

MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
PARAMS = SamplingParams(temperature=1, seed=2, max_tokens=40)
FIELDS = {"model": MODEL, "messages": MESSAGES, "seed": 2, "max_tokens": 40}


@pytest.fixture(scope="module")
def offline(tiny_pair: Models) -> LLM:
    return make_llm(tiny_pair, "off")


@pytest.fixture
def client(served: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI, offline: LLM) -> None:
    (answer,) = offline.chat([MESSAGES], PARAMS)
    completion = client.chat.completions.create(**FIELDS, logprobs=True, top_logprobs=1)
    assert completion.choices[0].message.content == answer.text
    assert completion.choices[0].finish_reason == answer.finish_reason
    assert completion.usage.completion_tokens == answer.completion_tokens
    assert len(completion.choices[0].logprobs.content) == answer.completion_tokens
    # What it answered can be said again as it stands.
    asked = [*MESSAGES, completion.choices[0].message, MESSAGES[0]]
    assert client.chat.completions.create(**(FIELDS | {"messages": asked, "max_tokens": 3})).choices


def test_streams(client: openai.OpenAI, offline: LLM) -> None:
    answers = offline.chat([MESSAGES], SamplingParams(temperature=1, seed=2, max_tokens=40, n=2))
    texts, ends, usage = ["", ""], ["", ""], None
    stream = client.chat.completions.create(**FIELDS, n=2, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [answer.text for answer in answers]
    assert ends == [answer.finish_reason for answer in answers]
    assert usage.completion_tokens == sum(answer.completion_tokens for answer in answers)


def test_completions(client: openai.OpenAI, offline: LLM) -> None:
    (answer,) = offline.generate(["once upon"], PARAMS)
    fields = {"model": MODEL, "prompt": "once upon", "seed": 2, "max_tokens": 40}
    assert client.completions.create(**fields).choices[0].text == answer.text
    stream = client.completions.create(**fields, stream=True, extra_body={"top_k": 0})
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.text


def test_async(served: Running, offline: LLM) -> None:
    """Many at once, streams among them, each with its own answer."""
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=30) for seed in range(16)]
    answers = offline.chat([MESSAGES] * 16, params)

    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        fields = {"model": MODEL, "messages": MESSAGES, "seed": seed, "max_tokens": 30}
        if seed % 2:
            return (await client.chat.completions.create(**fields)).choices[0].message.content
        stream = await client.chat.completions.create(**fields, stream=True)
        return "".join([chunk.choices[0].delta.content async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(16)))

    assert asyncio.run(ask_all()) == [answer.text for answer in answers]


class Verdict(pydantic.BaseModel):
    ok: bool


def test_structured_output(client: openai.OpenAI) -> None:
    fields = FIELDS | {"max_tokens": 150, "seed": 1}
    parsed = client.chat.completions.parse(**fields, response_format=Verdict).choices[0].message.parsed
    assert isinstance(parsed, Verdict)
    with client.chat.completions.stream(**fields, response_format=Verdict) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "slipstream"


def test_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**(FIELDS | {"model": "gpt-9"}))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**FIELDS, tools=[])
    assert bad.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**(FIELDS | {"temperature": -1}), stream=True)
    assert bad.value.param == "temperature"
    assert bad.value.request_id
