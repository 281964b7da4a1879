"""What a decoder is, as a value: the shape of its layers and every switch that changes its arithmetic.

`DecoderSpec.from_hf` reads a Hugging Face `config.json`; `models.gguf` makes the same value from GGUF metadata.
A key that would change the maths and is not honoured is refused by name; keys about training, serving or history
are ignored. No torch here: the scheduler and the command line read specs too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.models.rope import RopeSpec, short

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
MAX_COUNT, MAX_LAYERS, MAX_POSITIONS = 2**24, 4096, 2**22


def most_of(key: str) -> int:
    """The largest value that a count of a config.json may have."""
    return {"num_hidden_layers": MAX_LAYERS, "max_position_embeddings": MAX_POSITIONS}.get(key, MAX_COUNT)


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
        max_position = _required(values, "max_position_embeddings")
        if family != "llama" and values.get("mlp_bias"):
            raise CheckpointError(f"config.json: mlp_bias is not part of {family}")
        for key in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            if not isinstance(values[key], bool):
                raise CheckpointError(f"config.json: {key} must be true or false, found {short(values[key])}")
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
            max_position_embeddings=max_position,
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
                f"config.json: {key} = {short(value)} changes the arithmetic in a way that is not supported; "
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
        raise CheckpointError(f"config.json: layer_types must be a list of names, found {short(kinds)}")
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
        raise CheckpointError(f"a token id must be a whole number, found {short(value)} (bos_token_id, eos_token_id)")
    return tuple(ids)


def _required(config: Mapping[str, Any], key: str) -> int:
    value, most = config.get(key), most_of(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise CheckpointError(f"config.json: {key} must be a whole number from 1 to {most}, found {short(value)}")
    return value


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _epsilon(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise CheckpointError(f"config.json: rms_norm_eps must be a number from 0 to 1, found {short(value)}")
    return float(value)


def _check_spec(spec: DecoderSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads {spec.num_heads} is not a multiple of num_key_value_heads {spec.num_kv_heads}"
        )
    if not 0 <= spec.rms_norm_eps < 1:
        raise CheckpointError(f"the epsilon of the norms must be a number from 0 to 1, found {spec.rms_norm_eps!r}")
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
