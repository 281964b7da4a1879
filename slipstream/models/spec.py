"""What a decoder is, as a value: the shape of its layers and every switch that changes its arithmetic.

`DecoderSpec.from_hf` reads a Hugging Face `config.json`; `models.gguf` makes the same value from GGUF metadata.
A key that would change the maths and is not honoured is refused by name; keys about training, serving or history
are ignored. No torch here: the scheduler and the command line read specs too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import CheckpointError

FULL = "full_attention"
SLIDING = "sliding_attention"

# What transformers assumes where a config.json is silent. None: derived from other fields.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "num_key_value_heads": None, "head_dim": None},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": None},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
_COMMON_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
}

# Keys that are honoured here.
_HONOURED = frozenset(
    (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "hidden_act",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "rope_interleaved",
        "use_sliding_window",
        "sliding_window",
        "max_window_layers",
        "layer_types",
        "bos_token_id",
        "eos_token_id",
    )
)
# Keys that look like mathematics to `_MATHS` but act only in training.
_HARMLESS = frozenset(
    (
        "attention_dropout",
        "output_router_logits",
        "router_aux_loss_coef",
    )
)
# Parts of key names that announce arithmetic which this decoder does not have.
_MATHS = (
    "quantization",
    "quant_method",
    "expert",
    "moe",
    "router",
    "softcap",
    "soft_cap",
    "sink",
    "multiplier",
    "logit_scale",
    "logits_scaling",
    "embedding_scale",
    "scale_emb",
    "scale_depth",
    "query_pre_attn",
    "alibi",
    "parallel_residual",
    "clip_qkv",
    "kv_lora_rank",
    "q_lora_rank",
    "chunk_size",
    "attention_chunk",
    "no_rope_layers",
    "nope",
    "window",
    "norm_type",
    "qk_norm",
    "layernorm_bias",
    "mtp",
    "cross_attention",
    "vision_config",
    "audio_config",
)


# Far above every real model. What exceeds them is a slip or an attack, and would only end in a lack of memory.
MAX_COUNT, MAX_LAYERS = 2**24, 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary frequencies. `models.layers.inverse_frequencies` turns them into numbers."""

    theta: float
    scaling: str = "none"  # none | linear | dynamic | llama3 | yarn | factors
    factor: float = 1.0  # linear, llama3, yarn; dynamic acts only beyond max_position_embeddings, which is never served
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 0  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    divisors: tuple[float, ...] = ()  # factors: one per frequency, from a GGUF `rope_freqs` tensor  [head_dim / 2]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "RopeSpec":
        """From `rope_parameters` (newer files) or `rope_theta` and `rope_scaling` (older ones)."""
        given = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(given, Mapping):
            raise CheckpointError(f"config.json: rope_scaling must be an object or null, found {_short(given)}")
        given = dict(given)
        if any(isinstance(value, Mapping) for value in given.values()):
            raise CheckpointError("config.json: rope_parameters differ by layer type, which is not supported")
        kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
        given.pop("type", None)
        theta = float(given.pop("rope_theta", None) or config.get("rope_theta") or _COMMON_DEFAULTS["rope_theta"])
        partial = given.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
        if partial != 1.0:
            raise CheckpointError(f"config.json: partial_rotary_factor {partial} is not supported, only 1.0")
        if not 0 < theta < math.inf:
            raise CheckpointError(f"config.json: rope_theta must be a finite number above 0, found {theta}")
        if not isinstance(kind, str) or kind not in _ROPE_READERS:
            known = ", ".join(["default", *(name for name in _ROPE_READERS if name != "default")])
            raise CheckpointError(f"config.json: rope type {kind!r} is not supported (known: {known})")
        positions = int(config.get("max_position_embeddings") or 0)
        return _ROPE_READERS[kind](theta, given, config, positions)


def _rope_none(theta: float, given: dict[str, Any], config: Mapping[str, Any], positions: int) -> RopeSpec:
    # A left-over `factor` or `original_max_position_embeddings` beside type "default" has no effect in transformers.
    return RopeSpec(theta=theta)


def _rope_linear(theta: float, given: dict[str, Any], config: Mapping[str, Any], positions: int) -> RopeSpec:
    return RopeSpec(theta=theta, scaling="linear", factor=_rope_number(given, "linear", "factor"))


def _rope_dynamic(theta: float, given: dict[str, Any], config: Mapping[str, Any], positions: int) -> RopeSpec:
    original = given.get("original_max_position_embeddings")
    if original is not None and int(original) < positions:
        raise CheckpointError(
            f"config.json: dynamic RoPE scaling from {original} to {positions} positions depends on the length of each "
            "request and is not supported; set max_position_embeddings to the original length, or use yarn"
        )
    return RopeSpec(theta=theta, scaling="dynamic", factor=_rope_number(given, "dynamic", "factor"))


def _rope_llama3(theta: float, given: dict[str, Any], config: Mapping[str, Any], positions: int) -> RopeSpec:
    return RopeSpec(
        theta=theta,
        scaling="llama3",
        factor=_rope_number(given, "llama3", "factor"),
        low_freq_factor=_rope_number(given, "llama3", "low_freq_factor"),
        high_freq_factor=_rope_number(given, "llama3", "high_freq_factor"),
        original_max_position=_original_positions(given, config, positions),
    )


def _rope_yarn(theta: float, given: dict[str, Any], config: Mapping[str, Any], positions: int) -> RopeSpec:
    original = _original_positions(given, config, positions)
    factor = float(given.get("factor") or positions / original)
    return RopeSpec(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=bool(given.get("truncate", True)),
        attention_factor=_yarn_attention_factor(given, factor),
    )


_ROPE_READERS = {
    "default": _rope_none,
    "none": _rope_none,
    "linear": _rope_linear,
    "dynamic": _rope_dynamic,
    "llama3": _rope_llama3,
    "yarn": _rope_yarn,
}


def _rope_number(given: Mapping[str, Any], kind: str, key: str) -> float:
    value = given.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"config.json: rope type {kind} needs {key} as a number above 0, found {value!r}")
    return float(value)


def _original_positions(given: Mapping[str, Any], config: Mapping[str, Any], positions: int) -> int:
    keys = "original_max_position_embeddings"
    original = int(config.get(keys) or given.get(keys) or positions)
    if original <= 0:
        raise CheckpointError(f"config.json: {keys} must be above 0, found {original}")
    return original


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """The growth of attention logits that YaRN compensates: 0.1 weight ln(factor) + 1 (arXiv 2309.00071, eq. 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    over, under = given.get("mscale"), given.get("mscale_all_dim")
    if over and under:
        return yarn_magnitude(factor, float(over)) / yarn_magnitude(factor, float(under))
    return yarn_magnitude(factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSpec:
    """One dense decoder of the Llama, Qwen2 or Qwen3 family."""

    family: str  # llama | qwen2 | qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_word_embeddings: bool = False  # the output head is the embedding table
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each query and key head, before RoPE
    sliding_window: int | None = None
    layer_types: tuple[str, ...]  # [num_layers] of FULL and SLIDING
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        _check_spec(self)

    @property
    def num_q_dims(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_kv_dims(self) -> int:
        return self.num_kv_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """Keys that a query of this layer sees, itself included: positions p - window + 1 .. p. None: all."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DecoderSpec":
        """Read a Hugging Face config; raises CheckpointError naming the key that is missing or cannot be honoured."""
        family = config.get("model_type")
        if not isinstance(family, str) or family not in _DEFAULTS:
            known = ", ".join(_DEFAULTS)
            raise CheckpointError(f"config.json: model_type {family!r} is not supported (known: {known})")
        refuse_unknown_maths(config, _HONOURED)
        values = {**_COMMON_DEFAULTS, **_DEFAULTS[family], **{k: v for k, v in config.items() if v is not None}}
        num_layers = _required(config, "num_hidden_layers")
        num_heads = _required(config, "num_attention_heads")
        hidden_size = _required(config, "hidden_size")
        if family != "llama" and values.get("mlp_bias"):
            raise CheckpointError(f"config.json: mlp_bias is not part of {family}")
        for key in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            if not isinstance(values[key], bool):
                raise CheckpointError(f"config.json: {key} must be true or false, found {_short(values[key])}")
        try:
            sliding_window, layer_types = read_layer_types(config, num_layers, family)
            rope = RopeSpec.from_hf(values)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise CheckpointError(
                f"config.json: a value about RoPE, layer types or windows is malformed: {error}"
            ) from error
        return cls(
            family=family,
            vocab_size=_required(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_required(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_required({"num_key_value_heads": num_heads} | _given(values), "num_key_value_heads"),
            head_dim=_required({"head_dim": hidden_size // num_heads} | _given(values), "head_dim"),
            rms_norm_eps=_epsilon(values["rms_norm_eps"]),
            rope=rope,
            max_position_embeddings=_required(values, "max_position_embeddings"),
            tie_word_embeddings=values["tie_word_embeddings"],
            qkv_bias=family == "qwen2" or values["attention_bias"],
            o_bias=family != "qwen2" and values["attention_bias"],
            mlp_bias=values["mlp_bias"],
            qk_norm=family == "qwen3",
            sliding_window=sliding_window,
            layer_types=layer_types,
            eos_token_ids=token_ids(config.get("eos_token_id")),
            bos_token_id=next(iter(token_ids(config.get("bos_token_id"))), None),
        )


def refuse_unknown_maths(config: Mapping[str, Any], honoured: frozenset[str]) -> None:
    """Raise for a key outside `honoured` that announces arithmetic and is not switched off (None, False, 0, empty)."""
    for key, value in config.items():
        if key in honoured or key in _HARMLESS or not value:
            continue
        if any(part in key.lower() for part in _MATHS):
            raise CheckpointError(
                f"config.json: {key} = {_short(value)} changes the arithmetic in a way that is not supported; "
                "use a checkpoint without it"
            )
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"config.json: hidden_act {config['hidden_act']!r} is not supported, only silu")
    if config.get("rope_interleaved"):
        raise CheckpointError("config.json: rope_interleaved is not supported; permute the q and k rows to half order")


def read_layer_types(config: Mapping[str, Any], num_layers: int, family: str) -> tuple[int | None, tuple[str, ...]]:
    """The sliding window and each layer's kind. Llama has no window; Qwen has one only under use_sliding_window."""
    enabled = family != "llama" and bool(config.get("use_sliding_window", False))
    window = int(config.get("sliding_window") or 4096) if enabled else None
    if family == "llama" and config.get("sliding_window"):
        raise CheckpointError("config.json: sliding_window is not part of the llama family; set it to null")
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(config.get("max_window_layers", 28)) if enabled else num_layers
        kinds = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise CheckpointError(f"config.json: layer_types must be a list of names, found {_short(kinds)}")
    if SLIDING in kinds and window is None:
        raise CheckpointError(
            f"config.json: layer_types names {SLIDING}, but no window is set; "
            "set use_sliding_window and sliding_window, or make every layer full_attention"
        )
    return window, tuple(kinds)


def token_ids(value: Any) -> tuple[int, ...]:
    """An id, a list of ids or None, as found in configs, as a tuple."""
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if not all(type(one) is int for one in ids):
        raise CheckpointError(f"a token id must be a whole number, found {_short(value)} (bos_token_id, eos_token_id)")
    return tuple(ids)


def _required(config: Mapping[str, Any], key: str) -> int:
    value, most = config.get(key), MAX_LAYERS if key == "num_hidden_layers" else MAX_COUNT
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise CheckpointError(f"config.json: {key} must be a whole number from 1 to {most}, found {_short(value)}")
    return value


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _epsilon(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise CheckpointError(f"config.json: rms_norm_eps must be a number from 0 to 1, found {_short(value)}")
    return float(value)


def _check_spec(spec: DecoderSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads {spec.num_heads} is not a multiple of num_key_value_heads {spec.num_kv_heads}"
        )
    if spec.head_dim % 2:
        raise CheckpointError(f"head_dim {spec.head_dim} is odd; RoPE needs pairs")
    if len(spec.layer_types) != spec.num_layers:
        raise CheckpointError(f"layer_types names {len(spec.layer_types)} layers of {spec.num_layers}")
    unknown = set(spec.layer_types) - {FULL, SLIDING}
    if unknown:
        raise CheckpointError(f"layer_types {sorted(unknown)} are not supported (known: {FULL}, {SLIDING})")
    if SLIDING in spec.layer_types and (spec.sliding_window is None or spec.sliding_window < 1):
        raise CheckpointError(f"sliding_window must be at least 1, found {spec.sliding_window}")
    if spec.rope.divisors and len(spec.rope.divisors) != spec.head_dim // 2:
        raise CheckpointError(
            f"rope_freqs holds {len(spec.rope.divisors)} factors for {spec.head_dim // 2} frequencies"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
