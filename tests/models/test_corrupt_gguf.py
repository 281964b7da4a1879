"""Damaged GGUF files: header, metadata, table of tensors, values. Each is refused in time, by key or tensor."""

import contextlib
import dataclasses
import itertools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.errors import CheckpointError, SlipstreamError
from slipstream.models.gguf import GGUFFile
from slipstream.models.gguf_container import TYPES, Container
from slipstream.models.inspect import describe
from slipstream.models.weights import copy
from tests.models.corrupt import (
    ARRAY,
    BOOL,
    F32,
    HIDDEN,
    I32,
    INNER,
    METADATA,
    STRING,
    U8,
    U32,
    U64,
    VOCAB,
    Gguf,
    Tensors,
    Typed,
    gguf,
    gguf_tensors,
    info,
    load,
    pair,
    refusal,
    text,
)

WHOLE = gguf()
RAW = WHOLE.to_bytes()
HUGE, MOST = 2**63, 2**64 - 1
NORM, EMBED, Q = "output_norm.weight", "token_embd.weight", "blk.0.attn_q.weight"


def change(**fields: Any) -> bytes:
    return dataclasses.replace(WHOLE, **fields).to_bytes()


def meta(changes: "dict[str, Typed | None]") -> bytes:
    """Other metadata; None: without that key."""
    merged: dict[str, Typed | None] = {**METADATA, **changes}
    return gguf({key: value for key, value in merged.items() if value is not None}).to_bytes()


def llama(key: str, kind: int, value: Any) -> bytes:
    return meta({f"llama.{key}": (kind, value)})


def more(raw: bytes) -> bytes:
    """One more pair of metadata, as it stands."""
    return change(pairs=(*WHOLE.pairs, raw))


def array(item: int, count: int, raw: bytes = b"") -> bytes:
    return more(pair("x", ARRAY, struct.pack("<IQ", item, count) + raw))


def tensor(which: str, **changes: Any) -> bytes:
    """The whole file with one tensor's entry changed: name, shape, kind or offset."""
    entries, at = [], 0
    for known, (shape, raw) in gguf_tensors().items():
        fields: dict[str, Any] = {"name": known, "shape": shape, "kind": 0, "offset": at}
        entries.append(info(**(fields | changes if known == which else fields)))
        at += len(raw) + -len(raw) % 32
    return change(infos=tuple(entries))


def values(name: str, place: int, value: float) -> bytes:
    tensors: Tensors = gguf_tensors()
    shape, raw = tensors[name]
    found = np.frombuffer(raw, np.float32).copy()
    found[place] = value
    return gguf(None, tensors | {name: (shape, found.tobytes())}).to_bytes()


def with_freqs(*divisors: float, shape: tuple[int, ...] | None = None) -> bytes:
    raw = np.array(divisors, np.float32).tobytes()
    return gguf(None, gguf_tensors() | {"rope_freqs.weight": (shape or (len(divisors),), raw)}).to_bytes()


def scaled(factor: float) -> bytes:
    return meta({"llama.rope.scaling.type": (STRING, "linear"), "llama.rope.scaling.factor": (F32, factor)})


NO_COUNTS: tuple[Typed, ...] = (
    (U32, 0), (I32, -1), (U64, HUGE), (F32, 8.0), (STRING, "8"), (BOOL, True), (ARRAY, (U32, [8, 9])), (ARRAY, (U32, [])),
)  # fmt: skip
FILES: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "it has 0 bytes"),
    "23 bytes": (RAW[:23], "it has 23 bytes"),
    "another format": (b"GGML" + RAW[4:], "not a GGUF file"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + RAW[8:], "version 50331648"),
    "version 0": (change(version=0), "version 0"),
    "version 1": (change(version=1), "version 1"),
    "version 4": (change(version=4), "version 4"),
    **{f"{count} pairs": (change(num_pairs=count), "whole") for count in (len(METADATA) + 1, 65_536, 2**32, HUGE, MOST)},
    **{f"{count} tensors": (change(num_infos=count), "whole") for count in (12, 65_536, 2**32, HUGE, MOST)},
    "no pairs": (change(num_pairs=0), "whole"),
    "no tensors": (change(num_infos=0), "missing"),
    "fewer pairs": (change(num_pairs=3), "whole|architecture|missing"),
    "fewer tensors": (change(num_infos=5), "missing"),
    "a key twice": (more(WHOLE.pairs[3]), "llama.embedding_length stands twice"),
    "a key that never ends": (more(struct.pack("<Q", HUGE) + b"x"), "runs past the end"),
    "a text that never ends": (more(pair("x", STRING, struct.pack("<Q", MOST))), "runs past the end"),
    "a text of 5 MB": (more(pair("x", STRING, text(b"x" * 5_000_000))), "x is a text of 5000000 bytes"),
    "a type that does not exist": (more(pair("x", 13, b"1234")), "type number 13"),
    "a type of 2^32 - 1": (more(pair("x", 2**32 - 1, b"")), "type number 4294967295"),
    "a list of a type that does not exist": (array(77, 2, bytes(8)), "type number 77"),
    "a list of 2^63 bytes": (array(U8, HUGE), "runs past the end"),
    "a list of 2^64 - 1 numbers": (array(U64, MOST), "runs past the end"),
    "a list of 2^62 numbers, which wraps": (array(U32, 2**62), "runs past the end"),
    "a list of 2^40 texts": (array(STRING, 2**40), "items"),
    "a list of a million texts": (array(STRING, 1_000_000), "run past the end"),
    "a list of texts, one too long": (array(STRING, 2, text("a") + struct.pack("<Q", HUGE)), "run past the end|runs past"),
    "a list of 2^40 lists": (array(ARRAY, 2**40), "items"),
    "lists without end": (more(pair("x", ARRAY, struct.pack("<IQ", ARRAY, 1) * 100_000)), "nested too deeply"),
    "lists of lists of nothing": (array(ARRAY, 10**6, struct.pack("<IQ", ARRAY, 0) * 10), "items"),
    **{
        f"alignment {value}": (meta({"general.alignment": (kind, value)}), "alignment")
        for kind, value in ((U32, 0), (U32, 1), (U32, 33), (U32, 2**31), (STRING, "32"), (F32, 32.0), (BOOL, True), (I32, -32))
    },
    "alignment that is a list": (meta({"general.alignment": (ARRAY, (U32, [32]))}), "alignment"),
    **{
        f"architecture {value!r}": (meta({"general.architecture": value}), "architecture")
        for value in (None, (U32, 1), (STRING, ""), (STRING, "\0llama"), (ARRAY, (STRING, ["llama"])), (STRING, "x" * 9_999))
    },
    **{
        f"{key} {value!r}": (llama(key, kind, value), key)
        for key in ("block_count", "embedding_length", "attention.head_count", "context_length", "feed_forward_length")
        for kind, value in NO_COUNTS
    },
    "block_count 2^31": (llama("block_count", U32, 2**31), "block_count"),
    "block_count 4096": (llama("block_count", U32, 4096), "missing"),
    "no block_count": (meta({"llama.block_count": None}), "block_count"),
    "no epsilon": (meta({"llama.attention.layer_norm_rms_epsilon": None}), "epsilon"),
    **{
        f"{key} {value!r}": (llama(key, kind, value), says)
        for key, says in (("attention.layer_norm_rms_epsilon", "epsilon"), ("rope.freq_base", "freq_base|theta"))
        for kind, value in ((F32, float("nan")), (F32, float("inf")), (F32, -1.0), (STRING, "1e-5"), (ARRAY, (F32, [1.0])))
    },
    "a head of no size": (llama("attention.key_length", U32, 0), "key_length"),
    "a head of odd size": (llama("attention.key_length", U32, 3), "head_dim 3"),
    "heads that do not divide": (llama("attention.head_count_kv", U32, 3), "num_attention_heads 2"),
    "a scaling that is a number": (llama("rope.scaling.type", U32, 1), "scaling.type"),
    "a factor that is NaN": (scaled(float("nan")), "factor"),
    "a factor below 0": (scaled(-2.0), "factor"),
    "a split": (meta({"split.count": (U32, 2)}), "split"),
    "a split that is a text": (meta({"split.count": (STRING, "2")}), "split"),
    "frequencies of 0": (with_freqs(1.0, 0.0), "rope_freqs"),
    "frequencies of NaN": (with_freqs(1.0, float("nan")), "rope_freqs"),
    "too many frequencies": (with_freqs(1.0, 1.0, 1.0), "rope_freqs"),
    "a matrix of frequencies": (with_freqs(1.0, 1.0, shape=(2, 1)), "rope_freqs"),
    **{
        f"tokenizer {key} {value!r}"[:60]: (meta({f"tokenizer.{key}": value}), f"tokenizer.{key}".replace(".", "\\."))
        for key in ("ggml.model", "ggml.pre", "chat_template")
        for value in ((U32, 1), (ARRAY, (STRING, ["gpt2"])), (BOOL, False))
    },
    **{
        f"tokenizer {key} {value!r}"[:60]: (meta({f"tokenizer.ggml.{key}": value}), f"tokenizer.ggml.{key}")
        for key in ("tokens", "merges")
        for value in ((U32, 1), (STRING, "a b"), (ARRAY, (U32, [1, 2])), (ARRAY, (ARRAY, [(STRING, ["a"])])))
    },
    "no tokens": (meta({"tokenizer.ggml.tokens": None}), "tokenizer.ggml.tokens"),
    "merges of no tokens": (meta({"tokenizer.ggml.merges": (ARRAY, (STRING, ["y z"]))}), "merges do not fit"),
    "merges of one part": (meta({"tokenizer.ggml.merges": (ARRAY, (STRING, ["!"]))}), "merges do not fit"),
    "types that are a text": (meta({"tokenizer.ggml.token_type": (STRING, "1")}), "token_type"),
    **{
        f"{kind} token {value!r}": (meta({f"tokenizer.ggml.{kind}_token_id": value}), "token")
        for kind in ("eos", "bos")
        for value in ((STRING, "1"), (I32, -1), (F32, 1.0), (ARRAY, (U32, [1])), (U32, VOCAB), (U64, HUGE))
    },
    **{f"add_bos {value!r}": (meta({"tokenizer.ggml.add_bos_token": value}), "add_bos") for value in ((U32, 1), (STRING, "yes"))},
    "a tensor twice": (tensor(NORM, name=EMBED), f"two tensors have the name {EMBED}"),
    "a name that never ends": (change(infos=(*WHOLE.infos[:-1], struct.pack("<Q", HUGE))), "runs past the end"),
    "a name of a MB": (tensor(NORM, name="x" * 1_000_000), "name of 1000000"),
    "no name": (tensor(NORM, name=""), "name of 0"),
    "a name with NUL": (tensor(NORM, name="a\0b"), "a tensor has the name"),
    "a name that moves the cursor": (tensor(NORM, name="\x1b[2J"), "a tensor has the name"),
    "a name that is no text": (tensor(NORM, name=b"\xff\xfe.weight"), "not used"),
    "a path as name": (tensor(NORM, name="../../etc/passwd"), r"\.\./\.\./etc/passwd is not used"),
    **{f"{count} dimensions": (tensor(NORM, shape=(1,) * count), "dimensions") for count in (5, 100)},
    "no dimension": (tensor(NORM, shape=()), f"tensor {NORM} of shape"),
    **{
        f"shape {shape}": (tensor(NORM, shape=shape), f"tensor {NORM}")
        for shape in ((0,), (0, HUGE), (MOST,), (2**32, 2**32), (2**62, 4), (HIDDEN + 1,), (HIDDEN * 1000,))
    },
    **{f"shape {shape}": (tensor(NORM, shape=shape), "norm.weight has shape") for shape in ((HIDDEN, 1), (1, 1, 1, HIDDEN))},
    **{f"type {kind}": (tensor(NORM, kind=kind), NORM) for kind in (2, 8, 12, 14, 31, 99, 2**32 - 1)},
    **{f"half the bytes, type {kind}": (tensor(EMBED, kind=kind), "belong to no tensor") for kind in (1, 30)},
    **{f"offset {offset}": (tensor(NORM, offset=offset), NORM) for offset in (1, 8, 2**20, HUGE, MOST, MOST - 31)},
    "two that overlap": (tensor(NORM, offset=0), "begins within"),
    "a tensor turned around": (tensor("blk.0.ffn_up.weight", shape=(HIDDEN, INNER)), "up_proj.weight has shape"),
    "a tensor of another model": (tensor(NORM, name="blk.0.ssm_in.weight"), "ssm_in.weight is not used"),
    "no embedding": (tensor(EMBED, name="x.weight"), f"tensor {EMBED} is missing"),
    "cut in the values": (RAW[:-100], "ends at byte"),
    "cut by a byte": (RAW[:-1], "ends at byte"),
    "NaN": (values(NORM, 3, np.nan), "norm.weight.*not finite"),
    "NaN at the end of a matrix": (values(EMBED, -1, np.nan), "embed_tokens.weight.*not finite"),
    "infinity": (values(Q, 0, -np.inf), "q_proj.weight.*not finite"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_damaged_file_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(FILES[case][0])
    assert "m.gguf" in refusal(path, FILES[case][1])


def test_the_whole_file_loads(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(RAW)
    assert load(tmp_path / "m.gguf").eos_token_ids == {1}
    assert describe(tmp_path / "m.gguf")["vocab_size"] == VOCAB


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """At every border of its parts, and a byte before and after each."""
    path = tmp_path / "m.gguf"
    ends = list(itertools.accumulate(map(len, WHOLE.parts())))[:-1]
    for length in sorted({end + by for end in ends for by in (-1, 0, 1)}):
        path.write_bytes(RAW[:length])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            describe(path)


def test_any_byte_of_the_header_may_be_wrong() -> None:
    """It is another file then, or none: never an error of Python's."""
    header_bytes = sum(map(len, WHOLE.parts()[:-2]))
    for place, value in itertools.product(range(header_bytes), (0, 0x7F, 0xFF)):
        with contextlib.suppress(SlipstreamError):
            Container(RAW[:place] + bytes([value]) + RAW[place + 1 :], Path("m.gguf"))


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != 0])
def test_blocks_of_noise_are_seen_as_no_numbers(kind: int, tmp_path: Path) -> None:
    """Whatever stands in a block there is no error of Python's; that its scale is NaN is seen when it is copied."""
    _, block_values, block_bytes = TYPES[kind]
    entry, noise = info("x.weight", (2, block_values), kind, 0), b"\xff" * (2 * block_bytes)
    path = tmp_path / "m.gguf"
    path.write_bytes(Gguf(pairs=WHOLE.pairs, infos=(entry,), data=noise).to_bytes())
    with GGUFFile(path) as file:
        values = torch.from_numpy(file.read(file.entries["x.weight"]))
    assert values.shape == (2, block_values)
    with pytest.raises(CheckpointError, match=r"x holds .* not finite"):
        copy(torch.empty(2, block_values), values, "x", "m.gguf")


def test_metadata_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    """So that a file which is refused costs nothing: a list of texts stays in the file."""
    (tmp_path / "m.gguf").write_bytes(RAW)
    with GGUFFile(tmp_path / "m.gguf") as file:
        assert file.array("tokenizer.ggml.merges") == ['! "', "# $"]
        assert file.array("tokenizer.ggml.token_type") == [3, 3, *[1] * 14]
        assert file.array("tokenizer.ggml.absent") == []


def test_a_link_to_a_file_is_the_users_own(tmp_path: Path) -> None:
    """Who names a file means what it leads to; hubs keep files like that."""
    (tmp_path / "blob").write_bytes(RAW)
    (tmp_path / "m.gguf").symlink_to("blob")
    load(tmp_path / "m.gguf")
