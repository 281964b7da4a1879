"""Reading GGUF files: the metadata, the decoder's spec, its weights as fp32 arrays, and the tokenizer's raw material.

The container is parsed here (a header, key-value pairs, a table of tensors), so that a tokenizer or a spec is read in
milliseconds and without further packages; only dequantising needs the `gguf` library, which is imported then.
Names and row order are those of Hugging Face: llama files store the query and key rows interleaved for their own RoPE
order, which is undone. No torch here. Called by `weights` and `tokenizer`.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import contextlib
import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from slipstream.errors import CheckpointError
from slipstream.models.spec import FULL, DecoderSpec, RopeSpec, yarn_magnitude

FAMILIES = ("llama", "qwen2", "qwen3")
# Values per block and bytes per block of the tensor types that are read, by their number in the format.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4  # of arrays within arrays
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_ROPE_FREQS = "rope_freqs.weight"  # enters the spec, not the network
# Metadata that changes the arithmetic and is not honoured; each must be absent or have the value beside it.
_NEUTRAL: dict[str, Any] = {
    "expert_count": 0,
    "attention.sliding_window": 0,
    "attention.max_alibi_bias": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.scale": 0.0,
    "attention.causal": True,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 0.0,
    "residual_scale": 0.0,
    "embedding_scale": 0.0,
    "use_parallel_residual": False,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of the file: what it is and where it lies."""

    name: str
    shape: tuple[int, ...]  # as in torch: rows first
    kind: int  # key of TYPES
    start: int  # byte in the file
    num_bytes: int


class GGUFFile:
    """An open GGUF file, mapped into memory. A context manager; arrays that it yielded stay valid after it closes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise CheckpointError(f"{path} is not a GGUF file: it has {path.stat().st_size} bytes")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            reader = _Reader(self._map, path)
            self.metadata, self.entries = reader.read_all()
        except CheckpointError:
            self._map.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(BufferError):  # a traceback may still hold a view; the map then goes with it
            self._map.close()

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def spec(self) -> DecoderSpec:
        """The decoder that this file holds; raises CheckpointError naming the key that cannot be honoured."""
        family = self.architecture
        if family not in FAMILIES:
            raise CheckpointError(
                f"{self.path}: architecture {family!r} is not supported (known: {', '.join(FAMILIES)})"
            )
        self._refuse_unknown_maths()
        num_layers, num_heads = self._count("block_count"), self._count("attention.head_count")
        hidden_size = self._count("embedding_length")
        head_dim = int(self._get("attention.key_length") or hidden_size // num_heads)
        self._expect("attention.value_length", head_dim)
        self._expect("rope.dimension_count", head_dim)
        return DecoderSpec(
            family=family,
            vocab_size=self._vocab_size(),
            hidden_size=hidden_size,
            intermediate_size=self._count("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=self._count("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=self._norm_eps(),
            rope=self._rope(),
            max_position_embeddings=self._count("context_length"),
            tie_word_embeddings="output.weight" not in self.entries,
            qkv_bias="blk.0.attn_q.bias" in self.entries,
            o_bias="blk.0.attn_output.bias" in self.entries,
            mlp_bias="blk.0.ffn_up.bias" in self.entries,
            qk_norm="blk.0.attn_q_norm.weight" in self.entries,
            layer_types=(FULL,) * num_layers,
            eos_token_ids=self.eos_token_ids,
            bos_token_id=self.metadata.get("tokenizer.ggml.bos_token_id"),
        )

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: end of sequence and, where the file has one, end of turn."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return tuple(dict.fromkeys(int(self.metadata[key]) for key in keys if key in self.metadata))

    def tensors(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """Hugging Face name and fp32 values of each tensor, one at a time; unknown names pass through as they are."""
        spec = self.spec()
        for entry in self.entries.values():
            if entry.name == _ROPE_FREQS:
                continue
            values = self.read(entry)
            if spec.family == "llama" and ".attn_q." in entry.name:
                values = _half_order(values, spec.num_heads)
            elif spec.family == "llama" and ".attn_k." in entry.name:
                values = _half_order(values, spec.num_kv_heads)
            yield hf_name(entry.name), values

    def read(self, entry: TensorEntry) -> npt.NDArray[np.float32]:
        """One tensor as fp32, in its torch shape."""
        rows = int(np.prod(entry.shape[:-1], dtype=np.int64))
        raw = np.frombuffer(self._map, np.uint8, entry.num_bytes, entry.start)
        if entry.kind == 0:
            return raw.view(np.float32).reshape(entry.shape).copy()
        quants, library_type = _gguf_library(TYPES[entry.kind][0])
        values: npt.NDArray[np.float32] = quants.dequantize(raw.reshape(rows, -1), library_type)
        return values.reshape(entry.shape)

    def _get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def _count(self, key: str, default: int | None = None) -> int:
        value = self._get(key)
        value = default if value is None else value
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]  # one entry per layer, all equal
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(
                f"{self.path}: {self.architecture}.{key} must be one whole number above 0, found {value!r}"
            )
        return value

    def _expect(self, key: str, value: int) -> None:
        found = self._get(key)
        if found is not None and found != value:
            raise CheckpointError(
                f"{self.path}: {self.architecture}.{key} is {found}, only {value} (the head size) is supported"
            )

    def _norm_eps(self) -> float:
        value = self._get("attention.layer_norm_rms_epsilon")
        if value is None:
            raise CheckpointError(f"{self.path}: {self.architecture}.attention.layer_norm_rms_epsilon is missing")
        return float(f"{value:.7g}")  # stored as fp32: 9.99999975e-06 was 1e-05

    def _vocab_size(self) -> int:
        entry = self.entries.get("token_embd.weight")
        if entry is None:
            raise CheckpointError(f"{self.path}: tensor token_embd.weight is missing; fetch the file again")
        return entry.shape[0]

    def _refuse_unknown_maths(self) -> None:
        for key, neutral in _NEUTRAL.items():
            value = self._get(key)
            if value is not None and value != neutral:
                raise CheckpointError(
                    f"{self.path}: {self.architecture}.{key} = {value} changes the arithmetic in a way that is not "
                    "supported; use a file without it"
                )
        if int(self.metadata.get("split.count", 0)) > 1:
            raise CheckpointError(f"{self.path} is one part of a split file; join the parts with `gguf-split --merge`")

    def _rope(self) -> RopeSpec:
        theta = float(self._get("rope.freq_base") or 10000.0)
        kind = self._get("rope.scaling.type") or ("linear" if self._get("rope.scale_linear") else "none")
        factor = float(self._get("rope.scaling.factor") or self._get("rope.scale_linear") or 1.0)
        if _ROPE_FREQS in self.entries:
            if kind != "none":
                raise CheckpointError(f"{self.path}: rope.scaling.type {kind} together with {_ROPE_FREQS} is unknown")
            divisors = self.read(self.entries[_ROPE_FREQS]).tolist()
            return RopeSpec(theta=theta, scaling="factors", divisors=tuple(divisors))
        if kind == "none" or factor == 1.0:
            return RopeSpec(theta=theta)
        if kind == "linear":
            return RopeSpec(theta=theta, scaling="linear", factor=factor)
        if kind != "yarn":
            raise CheckpointError(
                f"{self.path}: rope.scaling.type {kind!r} is not supported (known: none, linear, yarn)"
            )
        return RopeSpec(
            theta=theta,
            scaling="yarn",
            factor=factor,
            original_max_position=self._count("rope.scaling.original_context_length"),
            attention_factor=float(self._get("rope.scaling.attn_factor") or 1.0) * yarn_magnitude(factor),
            beta_fast=float(self._get("rope.scaling.yarn_beta_fast") or 32.0),
            beta_slow=float(self._get("rope.scaling.yarn_beta_slow") or 1.0),
        )


def hf_name(name: str) -> str:
    """A GGUF tensor's name as Hugging Face spells it, without "model."; names that are not known stay as they are."""
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER_NAMES:
        return f"{_OUTER_NAMES[stem]}.{kind}"
    prefix, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if prefix == "blk" and layer.isdigit() and part in _LAYER_NAMES:
        return f"layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    return name


def _half_order(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of each head from interleaved pairs (0, hd/2, 1, hd/2 + 1, ...) back to halves."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _gguf_library(type_name: str) -> tuple[Any, Any]:
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"reading {type_name} tensors of a GGUF file needs the gguf package: pip install gguf"
        ) from error
    return gguf.quants, gguf.GGMLQuantizationType[type_name]


class _Reader:
    """A cursor over the container. Every length is checked against the file before it is used."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def read_all(self) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
        magic, version, num_tensors, num_pairs = self._unpack("<4sIQQ")
        if magic != b"GGUF":
            raise CheckpointError(f"{self.path} is not a GGUF file (it starts with {magic!r})")
        if version not in (2, 3):
            raise CheckpointError(f"{self.path} is GGUF version {version}; versions 2 and 3 are read")
        metadata = {}
        for _ in range(num_pairs):
            key = self._string()
            metadata[key] = self._value(self._unpack("<I")[0])
        raw = [self._raw_entry() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        if alignment <= 0:
            raise self._broken(f"general.alignment is {alignment}")
        base = -(-self.at // alignment) * alignment
        entries = {name: self._entry(name, shape, kind, base + offset) for name, shape, kind, offset in raw}
        if len(entries) != len(raw):
            raise self._broken("two tensors have the same name")
        return metadata, entries

    def _raw_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._unpack("<I")
        if num_dims > 4:
            raise self._broken(f"tensor {name} has {num_dims} dimensions")
        shape = self._unpack(f"<{num_dims}Q")
        kind, offset = self._unpack("<IQ")
        return name, tuple(reversed(shape)), kind, offset

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> TensorEntry:
        if kind not in TYPES:
            known = ", ".join(label for label, _, _ in TYPES.values())
            raise CheckpointError(f"{self.path}: tensor {name} has type number {kind}, which is not read ({known} are)")
        label, block_values, block_bytes = TYPES[kind]
        if not shape or shape[-1] % block_values:
            raise self._broken(f"tensor {name} of shape {list(shape)} does not divide into {label} blocks")
        num_bytes = math.prod(shape) // block_values * block_bytes
        if start + num_bytes > len(self.data):
            raise self._broken(f"tensor {name} ends at byte {start + num_bytes} of {len(self.data)}")
        return TensorEntry(name=name, shape=shape, kind=kind, start=start, num_bytes=num_bytes)

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, count = self._unpack("<IQ")
            return self._array(item_kind, count, depth + 1)
        if kind not in _SCALARS:
            raise self._broken(f"a value has type number {kind}")
        return self._unpack("<" + _SCALARS[kind])[0]

    def _array(self, kind: int, count: int, depth: int) -> list[Any]:
        if depth > _MAX_DEPTH:
            raise self._broken("arrays are nested too deeply")
        if kind in _SCALARS:
            size = count * struct.calcsize("<" + _SCALARS[kind])
            if size > len(self.data) - self.at:
                raise self._broken(f"an array of {count} values runs past the end")
            return list(self._unpack(f"<{count}{_SCALARS[kind]}"))
        return [self._value(kind, depth) for _ in range(count)]

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        if length > len(self.data) - self.at:
            raise self._broken(f"a text of {length} bytes runs past the end")
        raw = self.data[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8", errors="replace")

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        size = struct.calcsize(layout)
        if size > len(self.data) - self.at:
            raise self._broken("it ends within its header")
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += size
        return values

    def _broken(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a whole GGUF file: {what}; fetch it again")
