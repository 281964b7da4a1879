"""Which drafter configs are understood: the classes, the keys, and the names of what is refused.

Several networks go by the names "dflash" and "dspark". A config passes only if every key in it is known to be honoured,
known not to touch the arithmetic of a forward, or switched off; anything else is refused by name. Torch-free; called by
`checkpoint` and `inspect`.
"""

from collections.abc import Mapping
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.models.layout import LAYOUT_FLAGS

CLASSES = ("Qwen3DSparkModel", "DFlashDraftModel", "DSparkDraftModel")
REFUSED_CLASSES = {
    "Gemma4DSparkModel": "the Gemma4 drafter is another network (scaled embedding, four norms a layer, capped logits)",
}
# Keys of other networks that go by the same names, and of options that change the arithmetic.
REFUSED_KEYS = {
    "conv_kernel_size": "DFlash2 (convolutions)",
    "conv_group_size": "DFlash2 (convolutions)",
    "selector_rank": "DFlash2 (top-k selectors)",
    "selector_top_k": "DFlash2 (top-k selectors)",
    "fusion_mode": "DFlare (another fusion of features)",
    "dspark_block_size": "the DSpark bundled with DeepSeek-V4",
    "dspark_markov_rank": "the DSpark bundled with DeepSeek-V4",
    "dspark_target_layer_ids": "the DSpark bundled with DeepSeek-V4",
    "dspark_noise_token_id": "the DSpark bundled with DeepSeek-V4",
    "quantization_config": "quantised weights",
    "compression_config": "quantised weights",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "attention_sink_bias": "attention sinks",
    "attention_value_scale": "scaled attention values",
    "output_multiplier": "scaled logits",
    "logit_scale": "scaled logits",
    "final_logit_softcapping": "capped logits",
}
PROJECTORS = (None, "dflash", "dspark")
_NESTED_KEYS = frozenset((
    "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "target_hidden_size", "causal", "use_swa",
    "swa_window_size", "is_neox_style", "projector_type", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "num_anchors", *LAYOUT_FLAGS,
))  # fmt: skip
_TOP_KEYS = _NESTED_KEYS - {"causal", "use_swa", "swa_window_size", "is_neox_style", "projector_type"} | frozenset((
    "architectures", "dflash_config", "speculative_tokens", "draft_vocab_size", "vocab_size", "hidden_size",
    "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "max_position_embeddings",
    "attention_bias", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "hidden_act",
    "is_causal", "speculators_model_type", "transformer_layer_config", "speculators_config",
    "aux_hidden_state_layer_ids", "sliding_window_non_causal",
    # Keys that say nothing about the arithmetic of a forward.
    "slipstream", "model_type", "auto_map", "torch_dtype", "dtype", "transformers_version", "speculators_version",
    "use_cache", "attention_dropout", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id",
    "tie_word_embeddings", "_name_or_path", "name_or_path", "target_model_type", "return_dict", "id2label", "label2id",
    "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "problem_type", "is_encoder_decoder",
    "pretraining_tp", "tokenizer_class", "_attn_implementation", "attn_implementation",
))  # fmt: skip
_SCALES = ("attention_value_scale", "output_multiplier", "logit_scale")  # 1 has no effect


def need(ok: bool, message: str) -> None:
    """Raise CheckpointError with the message unless ok."""
    if not ok:
        raise CheckpointError(message)


def architecture(config: Mapping[str, Any]) -> str | None:
    """The class that a config names first, if it names one."""
    names = config.get("architectures") or []
    need(
        isinstance(names, list) and all(isinstance(name, str) for name in names),
        "architectures must be a list of names",
    )
    return names[0] if names else None


def section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A nested object of a config; empty where it is absent."""
    value = config.get(key) or {}
    need(isinstance(value, dict), f"{key} is {value!r}; it must be an object")
    return dict(value)


def refuse_other_networks(config: Mapping[str, Any]) -> None:
    """Raise on another network, on options that change the arithmetic, and on keys that nobody here has heard of."""
    name, kind = architecture(config), config.get("speculators_model_type")
    need(name not in REFUSED_CLASSES, f"architectures {name} is not supported: {REFUSED_CLASSES.get(name or '')}")
    need(kind in (None, "dflash", "dspark"), f"speculators_model_type {kind!r} is not a block drafter")
    nested, body = section(config, "dflash_config"), section(config, "transformer_layer_config")
    places = (("", config, _TOP_KEYS), ("dflash_config.", nested, _NESTED_KEYS))
    for place, values in (*(place[:2] for place in places), ("transformer_layer_config.", body)):
        for key in values.keys() & REFUSED_KEYS.keys():
            need(_is_off(key, values[key]), f"{place}{key} is not supported: it belongs to {REFUSED_KEYS[key]}")
    projector = nested.get("projector_type")
    need(projector in PROJECTORS, f"dflash_config.projector_type {projector!r} is not supported: another network")
    known_class = kind is not None or name in CLASSES
    need(known_class, f"architectures {name!r} is not a block drafter; known: {', '.join(CLASSES)}, speculators files")
    for place, values, known in places:
        for key in sorted(values.keys() - known):
            need(
                _is_off(key, values[key]),
                f"{place}{key} is an unknown key and may change the arithmetic; "
                "remove it from config.json if it does not",
            )
    need(nested.get("is_neox_style") is not False, "dflash_config.is_neox_style=false is not supported (RoPE in pairs)")
    act = (body if kind else config).get("hidden_act") or "silu"
    need(act == "silu", f"hidden_act {act!r} is not supported, only silu")


def _is_off(key: str, value: Any) -> bool:
    """Whether an option has no effect under this value."""
    return value in (None, False, 0, "", [], {}) or (key in _SCALES and value == 1)
