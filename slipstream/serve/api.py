"""The routes: from a request's body to a job, and from its parts to a response.

Every error leaves in the shape of the OpenAI API, with a status that says whose fault it is. Called by `app`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from importlib import metadata
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from slipstream.errors import SlipstreamError
from slipstream.request import Request
from slipstream.serve.desk import Desk
from slipstream.serve.lanes import Lane
from slipstream.serve.options import ServeOptions
from slipstream.serve.problems import Problem, problem_of
from slipstream.serve.protocol import (
    Answering,
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
    json_bytes,
    parse,
)
from slipstream.serve.render import Chat, Completion, Renderer, Spelling, Style, usage_of
from slipstream.serve.service import Job, Service
from slipstream.serve.sse import EventStream, events, watch
from slipstream.serve.stats import Stats

_MOST_DROPPED_BYTES = 1 << 26  # of a body that is too large: a client that is cut off would not read the answer

router = APIRouter()
Asked = TypeVar("Asked", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
BODIES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


@router.post("/v1/chat/completions")
async def chat_completions(http: HttpRequest) -> Response:
    asked = await _asked(http, ChatRequest)
    lane = _service(http).lane(asked.verify)
    host, messages = lane.host, _plain(asked.messages)

    def prepare() -> list[list[Request]]:
        token_ids = host.chat_ids(messages, **(asked.chat_template_kwargs or {}))
        return [host.prepare(token_ids, asked.sampling_params(host.room_for_answer(len(token_ids))))]

    return await _answer(http, asked, lane, Chat(), prepare, 1)


@router.post("/v1/completions")
async def completions(http: HttpRequest) -> Response:
    asked = await _asked(http, CompletionRequest)
    lane = _service(http).lane(asked.verify)

    def prepare() -> list[list[Request]]:
        params = asked.sampling_params(asked.most_tokens)
        return [lane.host.prepare(prompt, params) for prompt in asked.prompt]

    return await _answer(http, asked, lane, Completion(), prepare, len(asked.prompt))


# What is asked for most, and is not looked for among all routes.
ANSWERS: dict[str, Callable[[HttpRequest], Awaitable[Response]]] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
}


@router.get("/v1/models")
async def models(http: HttpRequest) -> Response:
    return _json({"object": "list", "data": [_model(_service(http))]})


@router.get("/v1/models/{name:path}")
async def model(http: HttpRequest, name: str) -> Response:
    service = _service(http)
    _check_model(service, name)
    return _json(_model(service))


@router.post("/tokenize")
async def tokenize(http: HttpRequest) -> Response:
    asked, service = await _asked(http, TokenizeRequest), _service(http)
    host = service.host

    def encode() -> list[int]:
        if asked.messages is not None:
            return host.chat_ids(_plain(asked.messages), **(asked.chat_template_kwargs or {}))
        return host.tokenizer.encode(asked.prompt or "", add_special=asked.add_special_tokens is not False)

    tokens = await _in_pool(service, asked, encode)
    return _json({"tokens": tokens, "count": len(tokens), "max_model_len": host.max_model_len})


@router.post("/detokenize")
async def detokenize(http: HttpRequest) -> Response:
    asked, service = await _asked(http, DetokenizeRequest), _service(http)
    size = service.host.facts.vocab_size
    for token in asked.tokens:
        if not 0 <= token < size:
            raise Problem(400, f"tokens holds {token}; ids are whole numbers from 0 to {size - 1}", param="tokens")

    def decode() -> str:
        return service.host.tokenizer.decode(asked.tokens, skip_special=False)

    return _json({"prompt": await _in_pool(service, asked, decode)})


@router.get("/health")
async def health(http: HttpRequest) -> Response:
    """Whether the engine works; a load balancer wants /ready."""
    service = _service(http)
    engines = {mode: lane.engine for mode, lane in service.lanes.items()}
    modes = {mode: _health(engine) for mode, engine in engines.items()}
    worst = min(engines.values(), key=lambda engine: (engine.state == "running", -engine.num_failures))
    about = {**_health(worst), "failures": sum(engine.num_failures for engine in engines.values()), "modes": modes}
    return _json(about, 200 if service.is_healthy else 503)


@router.get("/ready")
async def ready(http: HttpRequest) -> Response:
    """Whether new requests are taken."""
    return _json({"ready": _service(http).is_ready}, 200 if _service(http).is_ready else 503)


@router.get("/version")
async def version(http: HttpRequest) -> Response:
    service = _service(http)
    return _json({"version": metadata.version("slipstream"), "mode": service.own.mode, "modes": list(service.lanes)})


@router.get("/stats")
async def stats(http: HttpRequest) -> Response:
    """The engines' figures, for whoever draws them."""
    found = http.app.state.stats
    assert isinstance(found, Stats)
    return _json(await found.look())


@router.get("/metrics")
async def metrics(http: HttpRequest) -> Response:
    service = _service(http)
    num_failures = {mode: lane.engine.num_failures for mode, lane in service.lanes.items()}
    page = service.metrics.render(await service.snapshots(), num_failures)
    return Response(page, media_type=service.metrics.content_type)


def _health(engine: Desk) -> dict[str, Any]:
    return {"status": engine.state, "failures": engine.num_failures, "last_failure": engine.failure}


def _service(http: HttpRequest) -> Service:
    service = http.app.state.service
    assert isinstance(service, Service)
    return service


def _spelling(http: HttpRequest) -> Spelling:
    spelling = http.app.state.spelling
    assert isinstance(spelling, Spelling)
    return spelling


def _json(value: Any, status: int = 200) -> Response:
    return Response(json_bytes(value), status, media_type="application/json")


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.text} for message in messages]


def _model(service: Service) -> dict[str, Any]:
    about = {"id": service.model, "object": "model", "created": service.created, "owned_by": "slipstream"}
    return {**about, "max_model_len": service.host.max_model_len}


def _check_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.model:
        message = f"there is no model {name!r} here, only {service.model!r}"
        raise Problem(404, message, param="model", code="model_not_found")


async def _answer(
    http: HttpRequest, asked: ChatRequest | CompletionRequest, lane: Lane, style: Style,
    prepare: Callable[[], list[list[Request]]], num_prompts: int,
) -> Response:  # fmt: skip
    service, entry = _service(http), http.scope["slipstream"]
    entry.fields["stream"] = bool(asked.stream)
    if asked.user is not None:
        entry.fields["user"] = asked.user
    job = service.open(lane, num_prompts, asked.n or 1, bool(asked.return_steps))
    watcher = watch(http.receive, job)
    handed_over = False
    try:
        job.start(await _unless_failed(job, _in_pool(service, asked, prepare), asked.asks_for_form))
        entry.fields["prompt_tokens"] = job.num_prompt_tokens
        renderer = Renderer(style, entry.request_id, service.model, _spelling(http), bool(asked.return_token_ids))
        if asked.stream:
            # Headers wait for the first token: whatever is wrong before that gets a status of its own.
            await job.begun()
            handed_over = True
            return EventStream(job, watcher, events(job, renderer, asked.usage_in_stream))
        parts = await job.whole()
        entry.fields["completion_tokens"] = job.num_output_tokens
        return _json(renderer.whole(parts, usage_of(job)))
    except SlipstreamError as error:
        raise _blamed(asked, error) from error
    finally:
        if not handed_over:
            watcher.cancel()
            job.close()


async def _unless_failed(job: Job, work: Coroutine[Any, Any, Any], may_take_long: bool) -> Any:
    """The result of work for a job. Problem as soon as its client has left or its time is up, if the work may take long."""
    if not may_take_long:
        return await work
    task = asyncio.ensure_future(work)
    job.mailbox.on_failure = task.cancel
    try:
        await asyncio.wait([task])
    finally:
        task.cancel()
        job.mailbox.on_failure = lambda: None
    if job.mailbox.failure is not None:
        raise job.mailbox.failure
    return task.result()


async def _in_pool(service: Service, asked: Body, work: Callable[[], Any]) -> Any:
    """The result of work on a request that would hold up the loop. Problem where the request is at fault."""
    is_form = isinstance(asked, Answering) and asked.asks_for_form
    try:
        if isinstance(asked, CompletionRequest) and not is_form and asked.is_quick:
            return work()
        return await service.in_pool(work, is_form)
    except SlipstreamError as error:
        raise _blamed(asked, error) from error


def _blamed(asked: Body, error: SlipstreamError) -> Problem:
    problem = problem_of(error, type(asked).model_fields)
    return asked.blamed(problem) if isinstance(asked, Answering) else problem


async def _asked(http: HttpRequest, cls: type[Asked]) -> Asked:
    """The body of a request. Problem where it is not JSON, too large, or says what nobody here understands."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Problem(415, f"content-type is {kind or 'missing'}; send application/json", code="wrong_content_type")
    asked = parse(cls, await _body(http, _service(http).options))
    _check_model(_service(http), asked.model)
    return asked


async def _body(http: HttpRequest, options: ServeOptions) -> bytes:
    parts, size, limit, seconds = [], 0, options.max_body_bytes, options.body_timeout_s
    too_large = Problem(413, f"the body has more than {limit} bytes", code="body_too_large")
    declared = int(found) if (found := http.headers.get("content-length", "")).isdecimal() else 0
    if declared > (limit if "expect" in http.headers else _MOST_DROPPED_BYTES):
        raise too_large
    try:
        async with asyncio.timeout(seconds):
            async for part in http.stream():
                size += len(part)
                if size > _MOST_DROPPED_BYTES:
                    break
                if size <= limit:
                    parts.append(part)
    except TimeoutError:
        raise Problem(408, f"the body did not arrive within {seconds:g} s", code="slow_body") from None
    if size > limit:
        raise too_large
    return b"".join(parts)
