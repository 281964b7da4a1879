"""Bodies of requests: the fields of the OpenAI API that are honoured, and those of the engine beside them.

A field that is not here is refused by its name; so is a value of the wrong type (nothing is converted). What a number
may be, `SamplingParams` knows. A null stands for the default. Defaults are those of the OpenAI API, not the engine's:
temperature 1, and an answer of at most 16 tokens (completions) or as long as the context has room for (chat).
Knows no HTTP, no model and no engine.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import from_json

from slipstream.config import MAX_LOGPROBS, MAX_SIBLINGS, MAX_STOP_IDS, SamplingParams
from slipstream.serve.problems import Problem
from slipstream.structured import StructuredOutput

DEFAULT_COMPLETION_TOKENS = 16
QUICK_PROMPT = 512  # token ids, or characters
MOST_ERRORS = 1000  # of one body that are listed without a look for unknown names first
RESERVED_VARIABLES = ("messages", "add_generation_prompt", "self")  # of a chat template: the server sets them


# A list ends at its first wrong value: to name each of a million takes seconds.
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # the usage so far with every event: load generators ask for it


class Structured(Body):
    """The engine's own way to ask for a form; see `slipstream.StructuredOutput`."""

    json_schema: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: Texts | None = None
    after: str | None = None


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # the answer always has the form


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Answering(Body):
    """What chat and completions have in common."""

    model: str | None = None  # None: the one that is served
    user: str | None = Field(None, max_length=256)  # goes into the log
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = Field(None, ge=1, le=MAX_SIBLINGS)
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Beyond the OpenAI API.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = Field(None, max_length=MAX_STOP_IDS)
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    structured: Structured | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    return_steps: bool | None = None  # what became of drafts, step by step
    verify: str | None = None  # the mode, where the server offers several; None: its own

    @property
    def usage_in_stream(self) -> StreamOptions:
        """What of it is wanted."""
        return self.stream_options or StreamOptions()

    @property
    def most_tokens(self) -> int | None:
        """None: as many as there is room for."""
        return self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """None: no log-probabilities are asked for."""
        raise NotImplementedError

    @property
    def asks_for_form(self) -> bool:
        return self.structured is not None or self.response_format is not None

    def check(self) -> None:
        """Problem where fields contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise Problem(400, "stream_options has no effect without stream: true", param="stream_options")

    def sampling_params(self, room: int) -> SamplingParams:
        """room: tokens that an answer can have. RequestError for what cannot be asked for."""
        names = (
            "n", "top_p", "seed", "stop", "frequency_penalty", "presence_penalty", "logit_bias", "top_k", "min_p",
            "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
            "prompt_logprobs",
        )  # fmt: skip
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        most = room if self.most_tokens is None else self.most_tokens
        return SamplingParams(
            **given,
            temperature=1.0 if self.temperature is None else self.temperature,
            max_tokens=most,
            logprobs=self.num_top_logprobs,
            structured=self._structure(),
        )

    def _structure(self) -> StructuredOutput | None:
        asked, own = self.response_format, self.structured
        if own is not None:
            if asked is not None and asked.type != "text":
                raise Problem(
                    400, "response_format and structured both say a form; keep one of them", param="structured"
                )
            return StructuredOutput(**own.model_dump(exclude_none=True, by_alias=True))
        if asked is None or asked.type == "text":
            return None
        if asked.type == "json_object":
            return StructuredOutput(json=True)
        if asked.json_schema is None:
            raise Problem(400, "response_format.json_schema is missing", param="response_format.json_schema")
        return StructuredOutput(json=asked.json_schema.schema_)

    def blamed(self, problem: Problem) -> Problem:
        """A problem of the engine in the request's own words: what it calls `structured` may be a `response_format`."""
        if problem.param != "structured" or self.structured is not None:
            return problem
        message = problem.message.replace("structured.json", "response_format.json_schema.schema")
        return Problem(problem.status, message, code=problem.code, param="response_format")


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1)]


class ChatRequest(Answering):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None  # reach the model's chat template

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise Problem(400, "max_tokens and max_completion_tokens are the same; give one", param="max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise Problem(400, "top_logprobs has no effect without logprobs: true", param="top_logprobs")
        check_variables(self.chat_template_kwargs)


def check_variables(variables: Mapping[str, Any] | None) -> None:
    for name in RESERVED_VARIABLES:
        if name in (variables or {}):
            raise Problem(400, f"chat_template_kwargs cannot set {name}", param="chat_template_kwargs")


Prompt = str | list[int]


def _prompts(value: Any) -> list[Any]:
    """One prompt or several, each a text or token ids, as a list of several."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value and (all(isinstance(one, str) for one in value) or all(map(_is_ids, value))):
        return value
    raise ValueError("must be a text, a list of token ids, or a list of either, and not empty")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1}, "minItems": 1},
    ]
}


class CompletionRequest(Answering):
    """POST /v1/completions."""

    prompt: Annotated[list[Any], BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    logprobs: int | None = None
    echo: Literal[False] | None = None  # a prompt is not repeated; its log-probabilities are prompt_logprobs

    @property
    def is_quick(self) -> bool:
        """To be made a request of, in less time than it takes to ask another thread for it."""
        return not self.stop and sum(map(len, self.prompt)) * (self.n or 1) <= QUICK_PROMPT

    @property
    def most_tokens(self) -> int:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs


class TokenizeRequest(Body):
    """POST /tokenize: the tokens of a raw text, or of a conversation as the model is given it."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]})

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # of a raw text: the begin token, if the model has one, unless false
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise Problem(400, "give either prompt or messages", param="prompt")
        if self.messages is None and self.chat_template_kwargs is not None:
            raise Problem(400, "chat_template_kwargs has no effect without messages", param="chat_template_kwargs")
        check_variables(self.chat_template_kwargs)


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds

    def check(self) -> None:
        pass


Asked = TypeVar("Asked", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


def parse(cls: type[Asked], body: bytes) -> Asked:
    """The body as one of the above. Problem (400) that names the first thing that is wrong."""
    try:
        asked = cls.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > MOST_ERRORS and (unknown := _unknown_of_many(cls, body)):
            raise unknown from None
        raise _problem(error.errors(include_url=False, include_input=False, include_context=False)) from None
    asked.check()
    return asked


def _unknown_of_many(cls: type[Body], body: bytes) -> Problem | None:
    """The first field of the body that there is none of, without a list of all errors: that of a body with hundreds of
    thousands of unknown names would take longer than the loop may stand still."""
    value, known = from_json(body), {field.alias or name for name, field in cls.model_fields.items()}
    unknown = next((name for name in value if name not in known), None) if isinstance(value, dict) else None
    return None if unknown is None else _unknown(unknown[:64])


def _unknown(param: str | None) -> Problem:
    return Problem(400, f"unknown or unsupported field: {param}", param=param, code="unknown_field")


def _problem(errors: Sequence[Mapping[str, Any]]) -> Problem:
    # Where a value may be of several kinds there is an error for each; the deepest is about the kind that was meant.
    first = next((one for one in errors if one["type"] == "extra_forbidden"), None)
    worst = first or max(errors, key=lambda one: len(one["loc"]))
    param = ".".join(str(part)[:64] for part in worst["loc"] if not _is_kind(part)) or None
    if worst["type"] == "json_invalid":
        return Problem(400, f"the body is no JSON: {worst['msg']}", code="invalid_json")
    if worst["type"] == "extra_forbidden":
        return _unknown(param)
    if worst["type"] == "missing":
        return Problem(400, f"{param} is missing", param=param, code="missing_field")
    message = worst["msg"].removeprefix("Value error, ")
    return Problem(400, f"{param or 'the body'}: {message}", param=param, code="invalid_value")


def _is_kind(part: str | int) -> bool:
    """Whether a part of an error's place says which of several kinds of values was tried."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part)


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
