"""Reading GGUF files: the decoder's spec, its weights as fp32 arrays, and what a tokenizer is made of.

The container is parsed by `gguf_container`, so that a tokenizer or a spec is read in milliseconds and without further
packages; only dequantising needs the `gguf` library, which is imported then. Here keys and names get their meaning,
and values the types that they must have. Names and row order are those of Hugging Face: llama files store the query and
key rows interleaved for their own RoPE order, which is undone. No torch here. Called by `weights`, `inspect`,
`gguf_tokenizer` and `export`.
"""

import contextlib
import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from slipstream.errors import CheckpointError
from slipstream.models.folder import naming
from slipstream.models.gguf_container import TYPES, Container, Span, TensorEntry
from slipstream.models.rope import RopeSpec, yarn_magnitude
from slipstream.models.spec import FULL, MAX_LAYERS, DecoderSpec, most_of
from slipstream.models.tensors import Stored

FAMILIES = ("llama", "qwen2", "qwen3")
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
_CONFIG_NAMES = {"block_count": "num_hidden_layers", "context_length": "max_position_embeddings"}
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


class GGUFFile:
    """An open GGUF file, mapped into memory. A context manager; arrays that it yielded stay valid after it closes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise CheckpointError(f"{path} is not a GGUF file: it has {path.stat().st_size} bytes")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._container = Container(self._map, path)
        except BaseException:
            self._map.close()
            raise
        self.entries = self._container.entries

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(BufferError):  # a traceback may still hold a view; the map then goes with it
            self._map.close()

    @property
    def architecture(self) -> str:
        return self.text("general.architecture") or ""

    def spec(self) -> DecoderSpec:
        """The decoder that this file holds; raises CheckpointError naming the key that cannot be honoured."""
        with naming(self.path):
            return self._spec()

    def _spec(self) -> DecoderSpec:
        family = self.architecture
        if family not in FAMILIES:
            raise CheckpointError(
                f"{self.path}: architecture {family!r} is not supported (known: {', '.join(FAMILIES)})"
            )
        self._refuse_unknown_maths()
        num_layers, num_heads = self._count("block_count"), self._count("attention.head_count")
        hidden_size = self._count("embedding_length")
        head_dim = self._count("attention.key_length", hidden_size // num_heads)
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
            rope=self._rope(head_dim),
            max_position_embeddings=self._count("context_length"),
            tie_word_embeddings="output.weight" not in self.entries,
            qkv_bias="blk.0.attn_q.bias" in self.entries,
            o_bias="blk.0.attn_output.bias" in self.entries,
            mlp_bias="blk.0.ffn_up.bias" in self.entries,
            qk_norm="blk.0.attn_q_norm.weight" in self.entries,
            layer_types=(FULL,) * num_layers,
            eos_token_ids=self.eos_token_ids,
            bos_token_id=self.token_id("bos"),
        )

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: end of sequence and, where the file has one, end of turn."""
        ids = (self.token_id("eos"), self.token_id("eot"))
        return tuple(dict.fromkeys(one for one in ids if one is not None))

    def text(self, key: str) -> str | None:
        """A text of the metadata, None where there is none."""
        value = self._value(key)
        if value is not None and not isinstance(value, str):
            raise CheckpointError(f"{self.path}: {key} is {value!r}, it must be a text; fetch the file again")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A truth of the metadata."""
        value = self._value(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {key} is {value!r}, it must be true or false; fetch the file again")
        return default if value is None else value

    def token_id(self, kind: str) -> int | None:
        """The id of a special token (bos, eos, unknown, ...), None where the file names none."""
        key = f"tokenizer.ggml.{kind}_token_id"
        value = self._value(key)
        if value is not None and (type(value) is not int or value < 0):
            raise CheckpointError(f"{self.path}: {key} is {value!r}, it must be a token's id; fetch the file again")
        return value

    def array(self, key: str, most: int | None = None) -> list[Any]:
        """A list of numbers or of texts; empty where the file has none. CheckpointError for more than `most` items."""
        value = self._value(key)
        if most is not None and isinstance(value, Span) and value.num_items > most:
            raise CheckpointError(
                f"{self.path}: {key} has {value.num_items} items, {most} at most belong to this model"
            )
        return [] if value is None else self._container.array(key)

    @property
    def num_rows(self) -> int | None:
        """Of the embedding, one for each token; None in a file without weights."""
        entry = self.entries.get("token_embd.weight")
        return None if entry is None else entry.shape[0]

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

    def stored(self) -> list[Stored]:
        """What `tensors` will give, told without reading it."""
        entries = (entry for entry in self.entries.values() if entry.name != _ROPE_FREQS)
        return [Stored(hf_name(entry.name), entry.shape, "F32") for entry in entries]

    def read(self, entry: TensorEntry) -> npt.NDArray[np.float32]:
        """One tensor as fp32, in its torch shape."""
        rows = int(np.prod(entry.shape[:-1], dtype=np.int64))
        raw = np.frombuffer(self._map, np.uint8, entry.num_bytes, entry.start)
        if entry.kind == 0:
            return raw.view(np.float32).reshape(entry.shape).copy()
        quants, library_type = _gguf_library(TYPES[entry.kind][0])
        values: npt.NDArray[np.float32] = quants.dequantize(raw.reshape(rows, -1), library_type)
        return values.reshape(entry.shape)

    def _value(self, key: str) -> Any:
        return self._container.metadata.get(key)

    def _get(self, key: str) -> Any:
        return self._value(f"{self.architecture}.{key}")

    def _count(self, key: str, default: int | None = None) -> int:
        value, most = self._get(key), most_of(_CONFIG_NAMES.get(key, key))
        value = default if value is None else value
        if isinstance(value, Span) and value.num_items <= MAX_LAYERS:
            per_layer = self._container.array(f"{self.architecture}.{key}")
            value = per_layer[0] if len(set(per_layer)) == 1 else per_layer
        if type(value) is not int or not 0 < value <= most:
            raise CheckpointError(
                f"{self.path}: {self.architecture}.{key} must be one whole number from 1 to {most}, found {value!r}"
            )
        return value

    def _number(self, key: str) -> float | None:
        value = self._get(key)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise CheckpointError(
                f"{self.path}: {self.architecture}.{key} is {value!r}, it must be a finite number; fetch the file again"
            )
        return None if value is None else float(value)

    def _expect(self, key: str, value: int) -> None:
        found = self._get(key)
        if found is not None and found != value:
            raise CheckpointError(
                f"{self.path}: {self.architecture}.{key} is {found}, only {value} (the head size) is supported"
            )

    def _norm_eps(self) -> float:
        value = self._number("attention.layer_norm_rms_epsilon")
        if value is None:
            raise CheckpointError(f"{self.path}: {self.architecture}.attention.layer_norm_rms_epsilon is missing")
        return float(f"{value:.7g}")  # stored as fp32: 9.99999975e-06 was 1e-05

    def _vocab_size(self) -> int:
        if self.num_rows is None:
            raise CheckpointError(f"{self.path}: tensor token_embd.weight is missing; fetch the file again")
        return self.num_rows

    def _refuse_unknown_maths(self) -> None:
        for key, neutral in _NEUTRAL.items():
            value = self._get(key)
            if value is not None and value != neutral:
                raise CheckpointError(
                    f"{self.path}: {self.architecture}.{key} = {value} changes the arithmetic in a way that is not "
                    "supported; use a file without it"
                )
        if self._value("split.count") not in (None, 0, 1):
            raise CheckpointError(f"{self.path} is one part of a split file; join the parts with `gguf-split --merge`")

    def _rope(self, head_dim: int) -> RopeSpec:
        theta = self._number("rope.freq_base") or 10000.0
        scale = self._number("rope.scale_linear")
        kind = self.text(f"{self.architecture}.rope.scaling.type") or ("linear" if scale else "none")
        factor = self._number("rope.scaling.factor") or scale or 1.0
        if _ROPE_FREQS in self.entries:
            if kind != "none":
                raise CheckpointError(f"{self.path}: rope.scaling.type {kind} together with {_ROPE_FREQS} is unknown")
            return RopeSpec(theta=theta, scaling="factors", divisors=self._divisors(head_dim // 2))
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
            attention_factor=(self._number("rope.scaling.attn_factor") or 1.0) * yarn_magnitude(factor),
            beta_fast=self._number("rope.scaling.yarn_beta_fast") or 32.0,
            beta_slow=self._number("rope.scaling.yarn_beta_slow") or 1.0,
        )

    def _divisors(self, count: int) -> tuple[float, ...]:
        """One for each of so many frequencies; compared with that before it is read, for it may be of any size."""
        entry = self.entries[_ROPE_FREQS]
        if entry.shape != (count,):
            raise CheckpointError(
                f"{self.path}: tensor {_ROPE_FREQS} has shape {list(entry.shape)}, and there are {count} frequencies; "
                "fetch the file again"
            )
        return tuple(self.read(entry).tolist())


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
