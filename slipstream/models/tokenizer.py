"""Text to token ids and back, chat messages to prompt text, and text that grows token by token.

Sources: a Hugging Face folder (`tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`) or the metadata of a
GGUF file, whose pre-tokenizer is looked up by name in a table and refused if it is not there. Special tokens written
in a text are read as special tokens, in raw text as in chat text: whoever serves untrusted text must strip them.
No torch, and no transformers, here. Called by `load`, the streams and the command line.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from slipstream.errors import CheckpointError, EngineError, RequestError
from slipstream.models.folder import member, naming, read_json, read_text
from slipstream.models.gguf_tokenizer import read_gguf
from slipstream.models.spec import token_ids
from slipstream.models.template import shared_renderer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoding shows for bytes that are no (or not yet a) character
_MAX_TOKENIZER_BYTES, _MAX_TEMPLATE_BYTES = 64_000_000, 1_000_000
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """One model's tokenizer, made by `load_tokenizer`."""

    source: str  # the path it came from, for messages
    backend: tokenizers.Tokenizer
    vocab_size: int  # ids that it can produce are below; the model's table may be larger
    special_ids: frozenset[int]  # tokens without a text of their own
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # every token that ends an answer
    add_bos: bool | None = None  # None: the backend's own post-processor decides
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # "bos_token": "<s>", ..., for the chat template
    chat_template: str | None = None

    def is_special(self, token_id: int) -> bool:
        """Whether a token marks structure and has no text of its own."""
        return token_id in self.special_ids

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of a text. `add_special` puts the model's begin token first, if the model uses one."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError(
                "the text holds a lone surrogate, which is no character; decode it properly first"
            ) from None
        try:
            # Of one text alone the library would hold Python's lock, for seconds if it has megabytes.
            (found,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special and self.add_bos is None)
            ids: list[int] = found.ids
        except BaseException as error:
            if _is_libraries(error):
                raise RequestError(f"the tokenizer of {self.source} cannot read this text: {error}") from error
            raise
        if add_special and self.add_bos and self.bos_token_id is not None:
            return [self.bos_token_id, *ids]
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, on all cores."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids; ids that are no token of the vocabulary give no text."""
        try:
            return str(self.backend.decode(list(ids), skip_special_tokens=skip_special))
        except BaseException as error:
            if _is_libraries(error):
                raise EngineError(f"the tokenizer of {self.source} cannot write these tokens: {error}") from error
            raise

    def tokens_from(self, first: int) -> dict[int, str]:
        """The tokens whose ids are `first` and above, by id: added ones and those of the vocabulary proper."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        return {token_id: text for text, token_id in sorted(vocabulary.items(), key=_by_id) if token_id >= first}

    def is_added(self, token_id: int) -> bool:
        """Whether a token stands beside the vocabulary proper: plain text is never encoded to it."""
        return token_id in self.backend.get_added_tokens_decoder()

    @property
    def has_byte_fallback(self) -> bool:
        """Tokens for single bytes (as SentencePiece has them): one that fits nowhere spoils the text of those before it."""
        return self.backend.token_to_id("<0x00>") is not None

    def answer(self, ids: Sequence[int]) -> str:
        """The text of token ids as a stream gives it: what was whole stays, whatever bytes come after it."""
        text = self.decode(ids)
        if _REPLACEMENT not in text or not self.has_byte_fallback:
            return text
        stream = self.stream()
        return "".join([*map(stream.push, ids), stream.flush()])

    def token(self, token_id: int) -> str | None:
        """The token's own spelling (byte-level alphabet), None for an id that has none."""
        spelling: str | None = self.backend.id_to_token(token_id)
        return spelling

    def pieces(self, count: int) -> list[bytes]:
        """The bytes of tokens 0 .. count - 1, special ones spelled out; none for ids without a token.

        RequestError where the vocabulary does not say them: it is neither byte-level nor has tokens for single bytes.
        """
        bytes_of = _piece_bytes(self.backend)
        if bytes_of is None:
            raise RequestError(
                f"structured cannot be kept: {self.source} has a tokenizer whose tokens are not made of bytes, and no grammar can be "
                "checked on them: leave structured out, or take a model with a byte-level tokenizer"
            )
        found = [b""] * count
        for text, token_id in self.backend.get_vocab(with_added_tokens=False).items():
            if token_id < count:
                found[token_id] = bytes_of(text)
        for token_id, added in self.backend.get_added_tokens_decoder().items():
            if token_id < count:
                found[token_id] = added.content.encode()
        return found

    def stream(self, skip_special: bool = True) -> "TextStream":
        """A decoder for one growing text."""
        return TextStream(self, skip_special)

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt text of a conversation, [{"role": ..., "content": ...}, ...], by the model's own template.

        `variables` reach the template (for example enable_thinking). Encode the result without add_special: a
        template writes the begin token itself.
        """
        if self.chat_template is None:
            raise RequestError(f"{self.source} has no chat template; give raw text instead of messages")
        if not messages:
            raise RequestError("messages is empty; a conversation needs at least one message")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(f"messages[{index}] must be an object with a role and a content")
        values: dict[str, Any] = {"tools": None, "documents": None, **self.special_tokens, **variables}
        values |= {"messages": [dict(message) for message in messages], "add_generation_prompt": add_generation_prompt}
        return shared_renderer().render(self.chat_template, values, self.source)


class TextStream:
    """The text of one growing sequence of tokens: what is pushed and flushed adds up to `Tokenizer.answer` of them.

    A token may end within a character; that character is held back until it is whole, what stands before it is not.
    Decoding looks back to the last whole token only, so a push costs the same however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._ids: list[int] = []  # context whose text is out, then tokens whose text is not, or not all of it
        self._num_released = 0  # how many of `_ids` are context
        self._num_chars_before = 0  # of the context's text
        self._num_chars_out = 0  # of the text of the others

    @property
    def reads_ahead(self) -> bool:
        """Tokens may be pushed together: what comes of them is what comes of each."""
        return not self._tokenizer.has_byte_fallback

    @property
    def is_whole(self) -> bool:
        """Nothing is held back."""
        return self._num_released == len(self._ids)

    def fork(self) -> "TextStream":
        """One that goes on from here by itself."""
        fork = TextStream(self._tokenizer, self._skip_special)
        fork._ids, fork._num_released = self._ids, self._num_released
        fork._num_chars_before, fork._num_chars_out = self._num_chars_before, self._num_chars_out
        return fork

    def push(self, *token_ids: int) -> str:
        """Add a token, or several; returns the text that became certain, often of exactly these tokens."""
        self._ids = [*self._ids, *token_ids]  # a new list: the former may be a fork's
        return self._release(hold_back=True)

    def flush(self) -> str:
        """What was held back, incomplete characters shown as replacement characters."""
        return self._release(hold_back=False)

    def _release(self, hold_back: bool) -> str:
        if self.is_whole:
            return ""
        num_before = self._num_chars_before
        text = self._decode(self._ids)
        num_out = num_before + self._num_chars_out
        if hold_back and text.endswith(_REPLACEMENT):
            text = text.rstrip(_REPLACEMENT)
            self._num_chars_out = max(len(text), num_out) - num_before
            return text[num_out:]
        if len(text) > num_before:  # tokens without a text of their own stay context for those after them
            self._ids, self._num_chars_before = self._context(self._ids[self._num_released :])
        else:
            self._num_chars_before = len(text)
        self._num_released, self._num_chars_out = len(self._ids), 0
        return text[num_out:]

    def _context(self, ids: list[int]) -> tuple[list[int], int]:
        """As few of them as those after them need, and the length of their text."""
        last = self._decode(ids[-1:])
        if last and _REPLACEMENT not in last:
            return ids[-1:], len(last)
        return ids, len(self._decode(ids))

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)


def _by_id(item: tuple[str, int]) -> int:
    return item[1]


def load_tokenizer(path: Path) -> Tokenizer:
    """From a model folder or a GGUF file; raises CheckpointError naming what is missing or not supported."""
    path = Path(path)
    with naming(path):
        found = read_gguf(path) if path.is_file() else _read_folder(path)
    backend: tokenizers.Tokenizer = found["backend"]
    added = backend.get_added_tokens_decoder()
    return Tokenizer(
        source=str(path),
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        **found,
    )


def _read_folder(folder: Path) -> dict[str, Any]:
    file = member(folder, "tokenizer.json")
    if not file.is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json; save the model's fast tokenizer there")
    backend = _backend(file)
    config = _if_there(folder, "tokenizer_config.json")
    specials = {name: _content(folder, name, config[name]) for name in _SPECIAL_NAMES if config.get(name)}
    ids = {name: backend.token_to_id(text) for name, text in specials.items()}
    for name in ("bos_token", "eos_token"):  # the others are never looked for
        if name in ids and ids[name] is None:
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'} names the {name} {specials[name]!r}, which {file.name} does not have; "
                "the two belong to different models: fetch both again"
            )
    return {
        "backend": backend,
        "bos_token_id": ids.get("bos_token"),
        "eos_token_ids": _folder_eos(folder, ids.get("eos_token")),
        "special_tokens": specials,
        "chat_template": _folder_template(folder, config),
    }


def _backend(file: Path) -> tokenizers.Tokenizer:
    text = read_text(file, _MAX_TOKENIZER_BYTES)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
        backend.no_truncation()
        backend.no_padding()
        backend.encode("")  # puts in the special tokens of its post-processor, if they are there
    except BaseException as error:
        if _is_libraries(error):
            raise CheckpointError(f"{file} cannot be read as a tokenizer: {error}; fetch it again") from error
        raise
    return backend


def _is_libraries(error: BaseException) -> bool:
    """Whether the library raised it: an Exception for whatever it does not like, or a panic, which is none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _if_there(folder: Path, name: str) -> dict[str, Any]:
    """A config that a folder may lack."""
    file = member(folder, name)
    return read_json(file) if file.is_file() else {}


def _folder_eos(folder: Path, own: int | None) -> tuple[int, ...]:
    """The tokenizer's end token and those that the model's configs name; generation_config.json often names more."""
    configs = [_if_there(folder, name) for name in ("generation_config.json", "config.json")]
    named = [token_ids(config.get("eos_token_id")) for config in configs]
    return tuple(dict.fromkeys((*token_ids(own), *(one for ids in named for one in ids))))


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = member(folder, "chat_template.jinja")
    if file.is_file():
        return read_text(file, _MAX_TEMPLATE_BYTES)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {str(one.get("name")): one.get("template") for one in template if isinstance(one, Mapping)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template is not a text; mend it")
    return template


def _content(folder: Path, name: str, token: Any) -> str:
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: {name} is {token!r}, it must be a text; mend it")
    return text


def _piece_bytes(backend: tokenizers.Tokenizer) -> Callable[[str], bytes] | None:
    """From a token's spelling to its bytes, as the backend's decoder reads it; None where that is not known."""
    if backend.decoder is None:
        return None
    state = json.loads(backend.decoder.__getstate__())
    steps = [step["type"] for step in state.get("decoders", [state])]
    if "ByteLevel" in steps:
        return _from_byte_level
    return _from_byte_fallback if "ByteFallback" in steps else None


def _from_byte_level(spelling: str) -> bytes:
    """A token spelled in the alphabet of GPT-2; one that is not stands for itself."""
    try:
        return bytes(byte_alphabet()[char] for char in spelling)
    except KeyError:
        return spelling.encode()


def _from_byte_fallback(spelling: str) -> bytes:
    """As SentencePiece has it: \N{LOWER ONE EIGHTH BLOCK} is a space, <0x0A> a byte."""
    if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", spelling):
        return bytes.fromhex(byte[1])
    return spelling.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte: itself where it is visible, else one of those from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}
