"""Text to token ids and back, chat messages to prompt text, and text that grows token by token.

Sources: a Hugging Face folder (`tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`) or the metadata of a
GGUF file, whose pre-tokenizer is looked up by name in a table and refused if it is not there. Special tokens written
in a text are read as special tokens, in raw text as in chat text: whoever serves untrusted text must strip them.
No torch, and no transformers, here. Called by `LLM`, the streams and the command line.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from slipstream.errors import CheckpointError, RequestError
from slipstream.models.gguf import GGUFFile
from slipstream.models.headers import read_json
from slipstream.models.spec import token_ids

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoding shows for bytes that are no (or not yet a) character
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# The splits of Llama 3 and Qwen2, as their published tokenizer.json files have them; they differ in how digits group.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pre:
    """What `tokenizer.ggml.pre` stands for."""

    digits_alone: bool = False  # each digit is a piece of its own, cut before all else
    split: str | None = None  # None: the split of GPT-2, built into the byte-level step
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is a token is taken whole
    add_bos: bool = False  # where the file does not say


_PRE_TOKENIZERS: Mapping[str, _Pre] = {
    "smollm": _Pre(digits_alone=True),
    "llama-bpe": _Pre(split=_SPLIT % "{1,3}", ignore_merges=True, add_bos=True),
    "qwen2": _Pre(split=_SPLIT % "", nfc=True),
}


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
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise RequestError("the text holds a lone surrogate, which is no character; decode it properly first")
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special and self.add_bos is None).ids
        if add_special and self.add_bos and self.bos_token_id is not None:
            return [self.bos_token_id, *ids]
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, on all cores."""
        return [encoding.ids for encoding in self.backend.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids; ids that are no token of the vocabulary give no text."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special))

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
        try:
            return _template(self.chat_template).render(values)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{self.source}: the chat template is malformed: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise RequestError(f"the chat template of {self.source} refuses these messages: {error}") from error


class TextStream:
    """The text of one growing sequence of tokens: what is pushed and flushed adds up to `Tokenizer.answer` of them.

    A token may end within a character; that character is held back until it is whole, what stands before it is not.
    Decoding looks back to the last whole token only, so a push costs the same however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._ids: list[int] = []  # context whose text is out, then tokens whose text is not, or not all of it
        self._num_released = 0  # how many of `_ids` are context
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
        fork._ids, fork._num_released, fork._num_chars_out = self._ids, self._num_released, self._num_chars_out
        return fork

    def push(self, *token_ids: int) -> str:
        """Add a token, or several; returns the text that became certain, often of exactly these tokens."""
        self._ids = [*self._ids, *token_ids]  # a new list: the former may be a fork's
        return self._release(hold_back=True)

    def flush(self) -> str:
        """What was held back, incomplete characters shown as replacement characters."""
        return self._release(hold_back=False)

    def _release(self, hold_back: bool) -> str:
        num_before = len(self._decode(self._ids[: self._num_released]))
        text = self._decode(self._ids)
        num_out = num_before + self._num_chars_out
        if hold_back and text.endswith(_REPLACEMENT):
            text = text.rstrip(_REPLACEMENT)
            self._num_chars_out = max(len(text), num_out) - num_before
            return text[num_out:]
        if len(text) > num_before:  # tokens without a text of their own stay context for those after them
            self._ids = self._ids[self._num_released :]
        self._num_released, self._num_chars_out = len(self._ids), 0
        return text[num_out:]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)


def load_tokenizer(path: Path) -> Tokenizer:
    """From a model folder or a GGUF file; raises CheckpointError naming what is missing or not supported."""
    path = Path(path)
    found = _read_gguf(path) if path.is_file() else _read_folder(path)
    backend: tokenizers.Tokenizer = found["backend"]
    added = backend.get_added_tokens_decoder()
    return Tokenizer(
        source=str(path),
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        **found,
    )


def _read_folder(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json; save the model's fast tokenizer there")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
        raise CheckpointError(f"{file} cannot be read as a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    specials = {name: _content(config[name]) for name in _SPECIAL_NAMES if config.get(name)}
    ids = {name: backend.token_to_id(text) for name, text in specials.items()}
    return {
        "backend": backend,
        "bos_token_id": ids.get("bos_token"),
        "eos_token_ids": _folder_eos(folder, ids.get("eos_token")),
        "special_tokens": specials,
        "chat_template": _folder_template(folder, config),
    }


def _folder_eos(folder: Path, own: int | None) -> tuple[int, ...]:
    """The tokenizer's end token and those that the model's configs name; generation_config.json often names more."""
    files = [folder / name for name in ("generation_config.json", "config.json")]
    named = [token_ids(read_json(file).get("eos_token_id")) for file in files if file.is_file()]
    return tuple(dict.fromkeys((*token_ids(own), *(one for ids in named for one in ids))))


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {str(one.get("name")): one.get("template") for one in template if isinstance(one, Mapping)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template is not a text")
    return template


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


def _read_gguf(path: Path) -> dict[str, Any]:
    with GGUFFile(path) as file:
        metadata = {key.removeprefix("tokenizer."): value for key, value in file.metadata.items()}
        eos_token_ids = file.eos_token_ids
    kind, pre_name = metadata.get("ggml.model"), str(metadata.get("ggml.pre"))
    if kind != "gpt2":
        raise CheckpointError(f"{path}: tokenizer.ggml.model {kind!r} is not supported, only 'gpt2' (byte-level BPE)")
    if pre_name not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise CheckpointError(f"{path}: tokenizer.ggml.pre {pre_name!r} is not supported (known: {known})")
    tokens: list[str] = metadata.get("ggml.tokens") or []
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"ggml.{key}_token_id") for name, key in keys.items()}
    return {
        "backend": _byte_level(path, metadata, tokens, _PRE_TOKENIZERS[pre_name]),
        "bos_token_id": ids["bos_token"],
        "eos_token_ids": eos_token_ids,
        "add_bos": bool(metadata.get("ggml.add_bos_token", _PRE_TOKENIZERS[pre_name].add_bos)),
        "special_tokens": {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)},
        "chat_template": metadata.get("chat_template"),
    }


def _byte_level(path: Path, metadata: Mapping[str, Any], tokens: list[str], pre: _Pre) -> tokenizers.Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("ggml.merges") or []]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises plain Exception, for example for a merge without its token
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens and merges do not fit together: {error}") from error
    backend = tokenizers.Tokenizer(model)
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits_alone else []
    if pre.split is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    kinds = metadata.get("ggml.token_type") or []
    typed = list(zip(tokens, kinds, strict=False))
    backend.add_special_tokens([AddedToken(t, normalized=False) for t, kind in typed if kind == _CONTROL])
    backend.add_tokens([AddedToken(t, normalized=False) for t, kind in typed if kind == _USER_DEFINED])
    return backend


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


@functools.lru_cache(maxsize=16)
def _template(text: str) -> jinja2.Template:
    """Compiled once: that takes milliseconds, and rendering a conversation some ten microseconds."""
    return _environment().from_string(text)


def _environment() -> ImmutableSandboxedEnvironment:
    """Where chat templates run: files from strangers, so no attribute of Python's own and no change to its input."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
