"""A whole model of one layer as bytes, in both formats, for tests that damage it; and what must come of damage.

Everything is made in memory once. A damaged folder is written, loaded as `LLM` loads it, and must be refused: in time,
by an error of ours that says where the fault is, and without a look at anything beyond the folder.
"""

import json
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from slipstream.errors import SlipstreamError
from slipstream.load import Models, load_models

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 8, 12, 2, 1, 4, 16
MOST_SECONDS = 5.0
MOST_MESSAGE = 5_000  # characters

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64,
    "tie_word_embeddings": True, "eos_token_id": 1, "bos_token_id": 0, "hidden_act": "silu",
}  # fmt: skip
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
    "model.norm.weight": (HIDDEN,),
}
TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"

Header = dict[str, Any]


@dataclass(frozen=True)
class Link:
    """A symbolic link, in place of a file's bytes."""

    target: str


Files = dict[str, "bytes | Link"]
Change = Callable[[Files], Files]


# ------------------------------------------------------------------------------------------------------ Hugging Face


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(len(name)).normal(0, 0.1, shape).astype(np.float32)


@cache
def _whole() -> tuple[str, bytes]:
    header: Header = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, shape in SHAPES.items():
        raw = values(name, shape).tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return json.dumps(header), data


def header() -> Header:
    """A copy of the whole file's header, to be changed."""
    found: Header = json.loads(_whole()[0])
    return found


def data() -> bytes:
    return _whole()[1]


def packed(head: "Header | list[Any] | bytes", body: bytes | None = None, claim: int | None = None) -> bytes:
    """A safetensors file of such a header; `claim` is the header's length as the file has it."""
    raw = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(raw) if claim is None else claim) + raw + (data() if body is None else body)


@cache
def tokenizer_json() -> bytes:
    vocab = {word: index for index, word in enumerate(("<s>", "</s>", *(f"w{i}" for i in range(2, VOCAB))))}
    backend = tokenizers.Tokenizer(WordLevel(vocab, unk_token="w2"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend.to_str().encode()


def folder_files() -> Files:
    """A model folder that loads."""
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [1]}).encode(),
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": json.dumps(tokenizer_config).encode(),
        "model.safetensors": packed(header()),
    }


def write(folder: Path, files: Mapping[str, "bytes | Link"]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        if isinstance(content, Link):
            (folder / name).symlink_to(content.target)
        else:
            (folder / name).write_bytes(content)
    return folder


# -------------------------------------------------------------------------------------------------------------- GGUF

U8, I32, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 5, 4, 6, 7, 8, 9, 10
_LAYOUT = {U8: "<B", I32: "<i", U32: "<I", F32: "<f", BOOL: "<?", U64: "<Q"}
Typed = tuple[int, Any]  # type number and value; of an array: (ARRAY, (item type, [values]))

ALPHABET = [chr(c) for c in range(0x21, 0x21 + 12)]
METADATA: dict[str, Typed] = {
    "general.architecture": (STRING, "llama"),
    "llama.block_count": (U32, 1),
    "llama.context_length": (U32, 64),
    "llama.embedding_length": (U32, HIDDEN),
    "llama.feed_forward_length": (U32, INNER),
    "llama.attention.head_count": (U32, HEADS),
    "llama.attention.head_count_kv": (U32, KV_HEADS),
    "llama.attention.key_length": (U32, HEAD_DIM),
    "llama.rope.freq_base": (F32, 10000.0),
    "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "tokenizer.ggml.model": (STRING, "gpt2"),
    "tokenizer.ggml.pre": (STRING, "qwen2"),
    "tokenizer.ggml.tokens": (ARRAY, (STRING, ["<s>", "</s>", *ALPHABET, '!"', "#$"])),
    "tokenizer.ggml.token_type": (ARRAY, (I32, [3, 3, *[1] * 14])),
    "tokenizer.ggml.merges": (ARRAY, (STRING, ['! "', "# $"])),
    "tokenizer.ggml.bos_token_id": (U32, 0),
    "tokenizer.ggml.eos_token_id": (U32, 1),
    "tokenizer.chat_template": (STRING, TEMPLATE),
}
_GGUF_NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
    "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def text(value: "str | bytes") -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def typed(kind: int, value: Any) -> bytes:
    """A value as the file has it, without its type number."""
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        item, items = value
        return struct.pack("<IQ", item, len(items)) + b"".join(typed(item, one) for one in items)
    return struct.pack(_LAYOUT[kind], value)


def pair(key: "str | bytes", kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


def info(name: "str | bytes", shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A tensor's entry; shape as in torch."""
    dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


@dataclass(frozen=True)
class Gguf:
    """The parts of a file, each of which may be replaced."""

    pairs: tuple[bytes, ...]
    infos: tuple[bytes, ...]
    data: bytes
    magic: bytes = b"GGUF"
    version: int = 3
    num_infos: int | None = None
    num_pairs: int | None = None

    def parts(self) -> list[bytes]:
        """In order; borders are where one ends."""
        counts = (
            len(self.infos) if self.num_infos is None else self.num_infos,
            len(self.pairs) if self.num_pairs is None else self.num_pairs,
        )
        parts = [self.magic, struct.pack("<I", self.version), *(struct.pack("<Q", count) for count in counts)]
        parts += [*self.pairs, *self.infos]
        size = sum(map(len, parts))
        return [*parts, bytes(-size % 32), self.data]

    def to_bytes(self) -> bytes:
        return b"".join(self.parts())


def gguf_name(name: str) -> str:
    stem = name.removeprefix("model.").removesuffix(".weight")
    part = _GGUF_NAMES[stem.rpartition(".")[2]]
    return f"blk.0.{part}.weight" if stem.startswith("layers.") else f"{part}.weight"


Tensors = dict[str, tuple[tuple[int, ...], bytes]]


def gguf_tensors() -> Tensors:
    return {gguf_name(name): (shape, values(name, shape).tobytes()) for name, shape in SHAPES.items()}


def gguf(metadata: Mapping[str, Typed] | None = None, tensors: Tensors | None = None) -> Gguf:
    """A file of fp32 tensors, each at a multiple of 32 bytes."""
    infos, body = [], b""
    for name, (shape, raw) in (gguf_tensors() if tensors is None else tensors).items():
        body += bytes(-len(body) % 32)
        infos.append(info(name, shape, 0, len(body)))
        body += raw
    given = METADATA if metadata is None else metadata
    pairs = tuple(pair(key, kind, typed(kind, value)) for key, (kind, value) in given.items())
    return Gguf(pairs=pairs, infos=tuple(infos), data=body)


# ------------------------------------------------------------------------------------------------------ what must come


def load(path: Path, **options: Any) -> Models:
    return load_models(str(path), dtype="float32", device="cpu", **options)


def refusal(path: Path, says: str = "", **options: Any) -> str:
    """The error of ours, found in time, without a look beyond the model's own folder."""
    began = time.monotonic()
    home = path if path.is_dir() else path.parent
    with opened_files() as opened, pytest.raises(SlipstreamError, match=says) as caught:
        load(path, **options)
    message = str(caught.value)
    assert time.monotonic() - began < MOST_SECONDS
    assert len(message) < MOST_MESSAGE, f"{len(message)} characters"
    assert message.replace("\n", "").isprintable(), ascii(message)
    strange = [name for name in opened if not _is_ours(name, home)]
    assert not strange, f"read outside: {strange}"
    return message


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """The paths of what Python opens meanwhile."""
    _OPENED.clear()
    _LISTENING.append(True)
    if not _HOOKED:
        _HOOKED.append(True)
        sys.addaudithook(_hear)
    try:
        yield _OPENED
    finally:
        _LISTENING.clear()


_OPENED: list[str] = []
_LISTENING: list[bool] = []
_HOOKED: list[bool] = []  # a hook stays for ever


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if _LISTENING and event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        _OPENED.append(os.fsdecode(args[0]))


def _is_ours(name: str, home: Path) -> bool:
    """In the model's folder, or of Python and its packages, which may be imported at any time."""
    path = os.path.realpath(name)
    libraries = (sys.prefix, sys.base_prefix, *filter(None, sys.path), "/proc", "/sys", "/dev")
    return path.startswith((str(home.resolve()) + os.sep, *(os.path.realpath(one) for one in libraries)))
