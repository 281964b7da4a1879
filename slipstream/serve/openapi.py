"""The OpenAPI document: what each route takes, what it answers, and with which errors.

Bodies are read and answers written by the routes themselves, so that the document has to be told of both; a test holds
what a server does against it. Called by `app`.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from slipstream.serve.api import BODIES

Schema = dict[str, Any]

_TEXT, _WHOLE, _NUMBER, _FLAG = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
_COUNT = {"type": "integer", "minimum": 0}


def document(app: FastAPI) -> Schema:
    """Made once."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = _bodies(schema["paths"]) | _ANSWERS
        schema["components"] = {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["responses"] = _responses(path, operation)
                if 401 in _statuses(path):
                    operation["security"] = [{"key": []}, {}]  # whether keys are asked for is an option
        app.openapi_schema = schema
    return app.openapi_schema


def _bodies(paths: Mapping[str, Any]) -> Schema:
    """The schemas of what is asked, once the routes that take them say so."""
    inputs: list[Any] = [(cls, "validation") for cls in BODIES.values()]
    found, definitions = models_json_schema(inputs, ref_template="#/components/schemas/{model}")
    places = {cls.__name__: place for (cls, _), place in found.items()}
    for path, cls in BODIES.items():
        body = {"required": True, "content": {"application/json": {"schema": places[cls.__name__]}}}
        paths[path]["post"]["requestBody"] = body
    return dict(definitions["$defs"])


def _responses(path: str, operation: Mapping[str, Any]) -> Schema:
    kept = operation["responses"] if path not in _GIVEN else {}
    return kept | {str(status): _response(path, status) for status in _statuses(path)}


def _statuses(path: str) -> tuple[int, ...]:
    answers = (200, 400, 401, 404, 408, 413, 415, 429, 500, 501, 503, 504)
    known: dict[str, tuple[int, ...]] = {
        "/v1/chat/completions": answers, "/v1/completions": answers,
        "/tokenize": (200, 400, 401, 404, 408, 413, 415), "/detokenize": (200, 400, 401, 404, 408, 413, 415),
        "/v1/models": (200, 401), "/v1/models/{name}": (200, 401, 404), "/health": (200, 503), "/ready": (200, 503),
        "/version": (200,), "/metrics": (200,), "/stats": (200,),
    }  # fmt: skip
    return known.get(path, ())


def _response(path: str, status: int) -> Schema:
    if status != 200 and path not in ("/health", "/ready"):
        return {"description": _PROBLEMS[status], "content": _json(_ref("Problem"))}
    content = {"text/plain": {"schema": _TEXT}} if path == "/metrics" else _json(_ref(_GIVEN[path]))
    if path in ("/v1/chat/completions", "/v1/completions"):
        content |= {"text/event-stream": {"schema": _event(f"{_GIVEN[path]}Chunk")}}
    return {"description": "As asked." if status == 200 else "Not now.", "content": content}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _event(name: str) -> Schema:
    """Each of the server-sent events; the last one is none of JSON."""
    chunk = {"type": "string", "contentMediaType": "application/json", "contentSchema": _ref(name)}
    return {"type": "object", "properties": {"data": {"anyOf": [chunk, _enum("[DONE]")]}}, "required": ["data"]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(optional: Mapping[str, Schema] | None = None, **required: Schema) -> Schema:
    """No other fields than these."""
    return {
        "type": "object", "properties": {**required, **(optional or {})}, "required": list(required),
        "additionalProperties": False,
    }  # fmt: skip


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _by_name(value: Schema) -> Schema:
    return {"type": "object", "additionalProperties": value}


def _enum(*values: Any) -> Schema:
    return {"enum": list(values)}


_GIVEN = {
    "/v1/chat/completions": "ChatCompletion", "/v1/completions": "TextCompletion", "/v1/models": "Models",
    "/v1/models/{name}": "Model", "/tokenize": "Tokens", "/detokenize": "Text", "/health": "Health", "/ready": "Ready",
    "/version": "Version", "/metrics": "", "/stats": "Stats",
}  # fmt: skip
_PROBLEMS = {
    400: "A field is unknown or unsupported, or its value is wrong; the prompt does not fit.",
    401: "A key is asked for, and this is none.",
    404: "There is no such model.",
    408: "The body did not arrive in time, or the client did not take its tokens.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "The queue is full; retry-after says when to come again.",
    500: "The engine failed, and this request with it.",
    501: "A form was asked for, and xgrammar is not installed.",
    503: "The server is shutting down, or the engine has failed for good.",
    504: "The answer was not complete in time.",
}
_TOKEN = {"token": _TEXT, "logprob": _NUMBER, "bytes": _list({"type": "integer", "minimum": 0, "maximum": 255})}
_USAGE = _object(
    prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
)  # fmt: skip
_ENDING = {"finish_reason": _enum("stop", "length"), "stop_reason": {"type": ["string", "integer", "null"]}}
_EXTRAS = {
    "token_ids": _list(_COUNT), "prompt_token_ids": _list(_COUNT),
    "prompt_logprobs": _list(_or_null(_by_name(_object(logprob=_NUMBER, decoded_token=_TEXT)))),
    "steps": _list(_object(drafted=_COUNT, verified=_COUNT, accepted=_COUNT, tokens=_list(_TEXT))),
}  # fmt: skip
_STATE = _enum("running", "restarting", "dead", "stopped")
_HEALTH = {"status": _STATE, "failures": _COUNT, "last_failure": {"type": ["string", "null"]}}
_TIMES = _or_null(_object(sum=_NUMBER, count=_COUNT))  # of so many, in seconds; null: never measured
_FIGURES = _object(  # those that are optional: not before the engine has answered once
    {
        **dict.fromkeys(("running", "waiting", "steps", "rows", "drafted", "verified", "accepted", "emitted"), _COUNT),
        **dict.fromkeys(("verified_at", "accepted_at", "widths"), _list(_COUNT)),
        **dict.fromkeys(("step_s", "decide_s", "decide_hidden_s", "build_s", "gap_s"), _TIMES),
        "kv_usage": _NUMBER, "device_busy": _or_null(_NUMBER),
    },
    state=_STATE, open=_COUNT, tokens=_COUNT,
)  # fmt: skip


_CHAT_LOGPROBS = _or_null(
    _object(content=_list(_object(**_TOKEN, top_logprobs=_list(_object(**_TOKEN)))), refusal={"type": "null"})
)
_TEXT_LOGPROBS = _or_null(
    _object(
        tokens=_list(_TEXT), token_logprobs=_list(_NUMBER), top_logprobs=_list(_by_name(_NUMBER)),
        text_offset=_list(_COUNT),
    )
)  # fmt: skip


def _answer(kind: str, **fields: Schema) -> Schema:
    """A whole one."""
    choices = {**_list(_object(_EXTRAS, index=_COUNT, **fields, **_ENDING)), "minItems": 1}
    return _object(id=_TEXT, object=_enum(kind), created=_WHOLE, model=_TEXT, choices=choices, usage=_USAGE)


def _chunk(kind: str, **fields: Schema) -> Schema:
    """A piece of one, or the usage behind all pieces."""
    ending = {"finish_reason": _enum("stop", "length", None), "stop_reason": _ENDING["stop_reason"]}
    choices = _list(_object(_EXTRAS, index=_COUNT, **fields, **ending))
    usage = {"usage": _or_null(_USAGE)}
    return _object(usage, id=_TEXT, object=_enum(kind), created=_WHOLE, model=_TEXT, choices=choices)


_ANSWERS: Schema = {
    "Problem": _object(
        error=_object(
            message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code={"type": ["string", "null"]}
        )
    ),
    "ChatCompletion": _answer(
        "chat.completion", message=_object(role=_enum("assistant"), content=_TEXT), logprobs=_CHAT_LOGPROBS
    ),
    "ChatCompletionChunk": _chunk(
        "chat.completion.chunk", delta=_object({"role": _enum("assistant")}, content=_TEXT), logprobs=_CHAT_LOGPROBS
    ),
    "TextCompletion": _answer("text_completion", text=_TEXT, logprobs=_TEXT_LOGPROBS),
    "TextCompletionChunk": _chunk("text_completion", text=_TEXT, logprobs=_TEXT_LOGPROBS),
    "Model": _object(id=_TEXT, object=_enum("model"), created=_WHOLE, owned_by=_TEXT, max_model_len=_COUNT),
    "Models": _object(object=_enum("list"), data=_list(_ref("Model"))),
    "Tokens": _object(tokens=_list(_COUNT), count=_COUNT, max_model_len=_COUNT),
    "Text": _object(prompt=_TEXT),
    "Health": _object(**_HEALTH, modes=_by_name(_object(**_HEALTH))),
    "Ready": _object(ready=_FLAG),
    "Version": _object(version=_TEXT, mode=_TEXT, modes=_list(_TEXT)),
    "Stats": _object(
        model=_TEXT, max_model_len=_COUNT, verify=_TEXT, dtype=_TEXT, acceptance=_TEXT, needs_key=_FLAG, ready=_FLAG, time_s=_NUMBER,
        modes=_by_name(_FIGURES),
    ),
}  # fmt: skip
