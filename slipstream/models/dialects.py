"""Which drafter configs are understood: the dialects, the classes, the keys, and the names of what is refused.

Several networks go by the names "dflash" and "dspark". A config passes only if every key in it is known to be honoured,
known not to touch the arithmetic of a forward, or switched off; anything else is refused by name. What a tensor's name
gives away of another network stands here too. Torch-free; called by `checkpoint` and `inspect`; the other direction,
configs for other engines, is `dialect_configs`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.models.layout import LAYOUT_FLAGS

CLASSES = ("Qwen3DSparkModel", "DFlashDraftModel", "DSparkDraftModel")
DFLASH2, DOMINO = "DFlash2 (convolutions and top-k selectors)", "Domino (a recurrent correction of the logits)"
DFLARE, DFLY = "DFlare (features fused per layer)", "DFly (features fused per layer, corrected hidden states)"
DEEPSEEK_V4 = "the DSpark bundled with DeepSeek-V4 (experts, window 128, own tables under mtp.)"
# Look-alikes: class name -> what it is. A name alone does not decide (exporters reuse them), so keys and tensors do too.
REFUSED_CLASSES = {
    "Gemma4DSparkModel": "the Gemma4 drafter is another network (scaled embedding, four norms a layer, capped logits)",
    "DFlash2DraftModel": DFLASH2,
    "DominoDraftModel": DOMINO,
    "DFlareDraftModel": DFLARE,
    "QwenDFlareDraftModel": DFLARE,
    "DFlyDraftModel": DFLY,
    "Qwen3DFlyModel": DFLY,
}
# Values of speculators_model_type and of dflash_config.projector_type that name them.
_REFUSED_KINDS = {"dflash2": DFLASH2, "domino": DOMINO, "dflare": DFLARE, "dfly": DFLY}
# Keys of other networks that go by the same names, and of options that change the arithmetic.
REFUSED_KEYS = {
    "conv_kernel_size": DFLASH2,
    "conv_group_size": DFLASH2,
    "selector_rank": DFLASH2,
    "selector_top_k": DFLASH2,
    "gru_hidden_dim": DOMINO,
    "emb_dim": DOMINO,
    "pure_draft_prefix_len": DOMINO,
    "shift_label": DOMINO,
    "domino_config": DOMINO,
    "fusion_mode": DFLARE,
    "dflare_config": DFLARE,
    "enable_hidden_correction": DFLY,
    "dspark_block_size": DEEPSEEK_V4,
    "dspark_markov_rank": DEEPSEEK_V4,
    "dspark_target_layer_ids": DEEPSEEK_V4,
    "dspark_noise_token_id": DEEPSEEK_V4,
    "quantization_config": "quantised weights",
    "compression_config": "quantised weights",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "attention_sink_bias": "attention sinks",
    "attention_value_scale": "scaled attention values",
    "input_embedding_scale": "scaled embeddings",
    "output_multiplier": "scaled logits",
    "logit_scale": "scaled logits",
    "final_logit_softcapping": "capped logits",
}
PROJECTORS = (None, "dflash", "dspark")
# Where the id of the mask token may stand, and where its text may.
MASK_ID_KEYS, MASK_TEXT_KEY = ("mask_token_id", "pard_token", "ptd_token_id"), "mask_token"
CAUSAL_KEYS = ("is_causal", "causal")
_NESTED_KEYS = frozenset((
    "block_size", *MASK_ID_KEYS, MASK_TEXT_KEY, "target_layer_ids", "num_target_layers", "target_hidden_size",
    *CAUSAL_KEYS, "use_swa", "swa_window_size", "is_neox_style", "projector_type", "markov_rank", "markov_head_type",
    "enable_confidence_head", "confidence_head_with_markov", "attention_mode", *LAYOUT_FLAGS,
    # Of training; confidence_head_alpha above 0 also says that there is a head.
    "num_anchors", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha", "loss_decay_gamma",
))  # fmt: skip
_TOP_KEYS = _NESTED_KEYS - {"use_swa", "swa_window_size", "is_neox_style", "projector_type", "attention_mode"} | frozenset((
    "architectures", "dflash_config", "speculative_tokens", "draft_vocab_size", "vocab_size", "hidden_size",
    "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "max_position_embeddings",
    "attention_bias", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "hidden_act",
    "speculators_model_type", "transformer_layer_config", "speculators_config",
    "aux_hidden_state_layer_ids", "sliding_window_non_causal",
    # Keys that say nothing about the arithmetic of a forward.
    "slipstream", "model_type", "auto_map", "torch_dtype", "dtype", "transformers_version", "speculators_version",
    "use_cache", "attention_dropout", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id",
    "tie_word_embeddings", "_name_or_path", "name_or_path", "target_model_type", "return_dict", "id2label", "label2id",
    "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "problem_type", "is_encoder_decoder",
    "pretraining_tp", "tokenizer_class", "_attn_implementation", "attn_implementation", "max_length", "num_beams",
    "num_beam_groups", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "num_return_sequences",
))  # fmt: skip
_SCALES = ("attention_value_scale", "input_embedding_scale", "output_multiplier", "logit_scale")  # 1 has no effect
# Part of a tensor's name -> the network that has such a tensor.
_FOREIGN_TENSORS = {
    "aux_hidden_norms": "another network (norms per feature)",
    "g_proj": "another network (gated attention)",
    "qkv_proj": "another way of writing weights (fused projections); write q_proj, k_proj and v_proj",
    "gate_up_proj": "another way of writing weights (fused projections); write gate_proj and up_proj",
    "attention_sink_bias": "another network (attention sinks)",
    "layer_scalar": "another network (Gemma4)",
    "mtp.": DEEPSEEK_V4,
    "conv": DFLASH2,
    "selector": DFLASH2,
    "prefix_gru": DOMINO,
    "embed_proj": DOMINO,
    "context_proj": DFLARE,
    "hidden_correction": DFLY,
    "mask_embedding": "a drafter with a mask vector of its own",
    "weight_scale": "quantised weights",
    "weight_packed": "quantised weights",
    "qweight": "quantised weights",
}
# Files beside the weights that hold a part of the network; pickles, so they are not opened.
_FOREIGN_FILES = {"mask_embedding.pt": "a mask vector of its own, which takes the place of the mask token's embedding"}


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


def dialect_of(config: Mapping[str, Any]) -> str:
    """Whose way of writing a config this is. It decides nothing about the network; every key is read for itself."""
    if "slipstream" in config:
        return "slipstream"
    if config.get("speculators_model_type"):
        return "speculators"
    if architecture(config) == "Qwen3DSparkModel":
        return "deepspec"
    projector = section(config, "dflash_config").get("projector_type")
    return "specforge" if projector == "dspark" or architecture(config) == "DSparkDraftModel" else "z-lab"


def refuse_other_networks(config: Mapping[str, Any]) -> None:
    """Raise on another network, on options that change the arithmetic, and on keys that nobody here has heard of."""
    name, kind = architecture(config), config.get("speculators_model_type")
    need(name not in REFUSED_CLASSES, f"architectures {name} is not supported: {REFUSED_CLASSES.get(name or '')}")
    known_kind = kind in (None, "dflash", "dspark")
    need(known_kind, f"speculators_model_type {kind!r} is not a block drafter that is supported{_named(kind)}")
    nested, body = section(config, "dflash_config"), section(config, "transformer_layer_config")
    places = (("", config, _TOP_KEYS), ("dflash_config.", nested, _NESTED_KEYS))
    for place, values in (*(place[:2] for place in places), ("transformer_layer_config.", body)):
        for key in sorted(values.keys() & REFUSED_KEYS.keys()):
            need(_is_off(key, values[key]), f"{place}{key} is not supported: it belongs to {REFUSED_KEYS[key]}")
    projector = nested.get("projector_type")
    known = projector in PROJECTORS
    need(known, f"dflash_config.projector_type {projector!r} is not supported: another network{_named(projector)}")
    known_class = kind is not None or name in CLASSES
    need(known_class, f"architectures {name!r} is not a block drafter; known: {', '.join(CLASSES)}, speculators files")
    for place, values, known_keys in places:
        for key in sorted(values.keys() - known_keys):
            need(
                _is_off(key, values[key]),
                f"{place}{key} is an unknown key and may change the arithmetic; "
                "remove it from config.json if it does not",
            )
    need(nested.get("is_neox_style") is not False, "dflash_config.is_neox_style=false is not supported (RoPE in pairs)")
    mode = nested.get("attention_mode")  # what the head counts say as well
    need(mode in (None, "gqa", "mha"), f"dflash_config.attention_mode {mode!r} is not supported, only gqa and mha")
    act = (body if kind else config).get("hidden_act") or "silu"
    need(act == "silu", f"hidden_act {act!r} is not supported, only silu")


def refuse_foreign_files(folder: Path) -> None:
    """Raise where a part of the network lies in a file beside the weights."""
    for name, holds in _FOREIGN_FILES.items():
        need(
            not (folder / name).exists(),
            f"{folder / name} holds {holds}; such drafters are not supported, and a pickle is never opened",
        )


def refuse_foreign_tensor(name: str) -> None:
    """Raise for a tensor that this network does not have and another one is known by."""
    for part, network in _FOREIGN_TENSORS.items():
        need(part not in name, f"tensor {name} is not supported: it belongs to {network}")


def _named(kind: Any) -> str:
    network = _REFUSED_KINDS.get(kind) if isinstance(kind, str) else None
    return f": it is {network}" if network else ""


def _is_off(key: str, value: Any) -> bool:
    """Whether an option has no effect under this value."""
    return value in (None, False, 0, "", [], {}) or (key in _SCALES and value == 1)
