"""Parts of answers as the objects of the OpenAI API, for a whole answer and for a stream of chunks.

Two styles, one for each kind of request; a choice is rendered from a `Part` either way. Knows no HTTP.
"""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from slipstream.errors import RequestError
from slipstream.host import Host
from slipstream.logprobs import TokenLogprob
from slipstream.serve.service import Job, Part
from slipstream.stream import Chunk

LEAST_LOGPROB = -9999.0  # for minus infinity, which JSON does not have


class Spelling:
    """The texts and bytes of single tokens."""

    def __init__(self, host: Host) -> None:
        self._tokenizer, self._count = host.tokenizer, host.facts.vocab_size
        self._pieces: list[bytes] | None = None

    def bytes_of(self, token_id: int) -> bytes:
        if self._pieces is None:
            try:
                self._pieces = self._tokenizer.pieces(self._count)
            except RequestError:  # a vocabulary that does not say its bytes
                self._pieces = [self._tokenizer.decode([i], skip_special=False).encode() for i in range(self._count)]
        return self._pieces[token_id] if token_id < len(self._pieces) else b""

    def text_of(self, token_id: int) -> str:
        return self.bytes_of(token_id).decode(errors="replace")

    def key_of(self, token_id: int) -> str:
        """A text that no other token has, as long as no two tokens have the same bytes."""
        piece = self.bytes_of(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class Style(Protocol):
    id_prefix: str
    object: str
    chunk_object: str

    def choice(self, part: Part, spelling: Spelling) -> dict[str, Any]: ...
    def chunk_choice(self, part: Part, spelling: Spelling) -> dict[str, Any]: ...


class Chat:
    id_prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, part: Part, spelling: Spelling) -> dict[str, Any]:
        message = {"role": "assistant", "content": part.text}
        return {"index": part.index, "message": message, **self._rest(part, spelling)}

    def chunk_choice(self, part: Part, spelling: Spelling) -> dict[str, Any]:
        delta = {"content": part.text} if part.num_tokens_before else {"role": "assistant", "content": part.text}
        return {"index": part.index, "delta": delta, **self._rest(part, spelling)}

    def _rest(self, part: Part, spelling: Spelling) -> dict[str, Any]:
        logprobs = None
        if part.logprobs is not None:
            logprobs = {"content": [_chat_entry(entry, spelling) for entry in part.logprobs], "refusal": None}
        return {"logprobs": logprobs, **_ending(part)}


class Completion:
    id_prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def choice(self, part: Part, spelling: Spelling) -> dict[str, Any]:
        logprobs = None if part.logprobs is None else _completion_logprobs(part, part.logprobs, spelling)
        return {"index": part.index, "text": part.text, "logprobs": logprobs, **_ending(part)}

    chunk_choice = choice


def _ending(part: Part) -> dict[str, Any]:
    """finish_reason is stop or length here: other ends are errors. stop_reason: the stop string or token, of our own."""
    return {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}


def _chat_entry(entry: TokenLogprob, spelling: Spelling) -> dict[str, Any]:
    own = _spelled(entry.token_id, entry.logprob, spelling)
    return own | {"top_logprobs": [_spelled(token, logprob, spelling) for token, logprob in entry.top]}


def _spelled(token_id: int, logprob: float, spelling: Spelling) -> dict[str, Any]:
    piece = list(spelling.bytes_of(token_id))
    return {"token": spelling.text_of(token_id), "logprob": _finite(logprob), "bytes": piece}


def _completion_logprobs(part: Part, entries: Sequence[TokenLogprob], spelling: Spelling) -> dict[str, Any]:
    offsets, at = [], part.num_chars_before
    for piece in part.pieces[: len(entries)]:
        offsets.append(at)
        at += len(piece)
    return {
        "tokens": [spelling.key_of(entry.token_id) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            {spelling.key_of(token): _finite(logprob) for token, logprob in _with_own(entry)} for entry in entries
        ],
        "text_offset": offsets,
    }


def _with_own(entry: TokenLogprob) -> list[tuple[int, float]]:
    """The most probable tokens, and the chosen one where it is none of them."""
    own = [] if any(token == entry.token_id for token, _ in entry.top) else [(entry.token_id, entry.logprob)]
    return [*entry.top, *own]


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _prompt_logprobs(part: Part, spelling: Spelling) -> list[dict[str, Any] | None] | None:
    """Token id -> what the model said of it, None for the first token; an extension of the API."""
    if part.prompt_logprobs is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": _finite(logprob), "decoded_token": spelling.text_of(token)}
            for token, logprob in _with_own(entry)
        }
        for entry in part.prompt_logprobs
    ]


class Renderer:
    """The objects of one response."""

    def __init__(self, style: Style, request_id: str, model: str, spelling: Spelling, token_ids: bool) -> None:
        self._style, self._spelling, self._token_ids = style, spelling, token_ids
        self._head = {"id": style.id_prefix + request_id, "object": style.object, "created": int(time.time())}
        self._head |= {"model": model}

    def whole(self, parts: Sequence[Part], usage: dict[str, int]) -> dict[str, Any]:
        choices = [self._style.choice(part, self._spelling) | self._extras(part) for part in parts]
        return {**self._head, "choices": choices, "usage": usage}

    def chunk(self, parts: Sequence[Part], usage: dict[str, Any]) -> dict[str, Any]:
        """usage: nothing, {"usage": None}, or with no parts the usage."""
        choices = [self._style.chunk_choice(part, self._spelling) | self._extras(part) for part in parts]
        return {**self._head, "object": self._style.chunk_object, "choices": choices, **usage}

    def _extras(self, part: Part) -> dict[str, Any]:
        """Fields beyond the API, where they were asked for."""
        extras: dict[str, Any] = {}
        if part.prompt_logprobs is not None:
            extras["prompt_logprobs"] = _prompt_logprobs(part, self._spelling)
        if self._token_ids:
            extras["token_ids"] = part.token_ids
            if not part.num_tokens_before:
                extras["prompt_token_ids"] = list(part.request.prompt_ids)
        if part.steps is not None:
            extras["steps"] = [step_of(chunk) for chunk in part.steps]
        return extras


def step_of(chunk: Chunk) -> dict[str, Any]:
    """What became of a step's drafts. The first `accepted` tokens are drafts, one behind them the target's own."""
    texts = [piece.text for piece in chunk.pieces]
    count = len(chunk.token_ids)
    if len(texts) > count > 0:  # what was held back at the end belongs to the last token
        texts[count - 1 :] = ["".join(texts[count - 1 :])]
    counts = {"drafted": chunk.drafted, "verified": chunk.width, "accepted": sum(chunk.accepted)}
    return {**counts, "tokens": texts}


def usage_of(job: Job) -> dict[str, Any]:
    """Of all its prompts, each counted once, and of what their answers have until now."""
    num_prompt, num_output = job.num_prompt_tokens, job.num_output_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": job.num_cached_tokens},
    }
