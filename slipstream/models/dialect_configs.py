"""config.json in the words of each dialect: this project's own, z-lab's, DeepSpec's and that of speculators.

Our own form is z-lab's or DeepSpec's with the layout said twice, and reads back as any spec. The other three hold only
keys that their engines know, so each can say less: what a dialect cannot say is refused by name, with the dialect that
can. Torch-free; called by `drafters` (save) and `export`; the other direction is `checkpoint`.
"""

from typing import Any

from slipstream.errors import CheckpointError
from slipstream.models.checkpoint import DrafterSpec
from slipstream.models.dialects import need
from slipstream.models.rope import RopeSpec
from slipstream.models.spec import SLIDING


def config_from_spec(spec: DrafterSpec) -> dict[str, Any]:
    """A config.json that reads back as this spec: z-lab's form for fill-in DFlash, DeepSpec's flat form for the rest.

    The layout is written twice, as a flag and as the number of drafts, so that a slip in one of them is noticed.
    """
    z_lab = spec.algorithm == "dflash" and spec.layout == "fill_in"
    taps = {"mask_token_id": spec.mask_token_id, "target_layer_ids": list(spec.target_layer_ids)}
    return {
        "architectures": ["DFlashDraftModel" if z_lab else "Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": spec.block_size,
        "sample_from_anchor": spec.layout == "anchor_first",
        "speculative_tokens": spec.max_draft_tokens,
        **({"dflash_config": taps} if z_lab else taps),
        "num_target_layers": spec.num_target_layers,
        "target_hidden_size": spec.target_hidden_size,
        **layer_fields(spec),
        "draft_vocab_size": spec.num_draft_logits,
        "tie_word_embeddings": False,
        **({} if z_lab else _heads(spec)),
    }


# --- for other engines ------------------------------------------------------------------------------------------------


def z_lab_config(spec: DrafterSpec) -> dict[str, Any]:
    """The config of a z-lab DFlash folder. `auto_map` is left out: it names code that does not lie in the folder."""
    _refuse_reduced(spec, "z-lab")
    _need(spec.algorithm == "dflash", "z-lab", "a Markov or confidence head", "deepspec or speculators")
    _need(spec.layout == "fill_in", "z-lab", "the layout anchor_first", "deepspec or speculators")
    _refuse_other_width(spec, "z-lab")
    _refuse_last_layer(spec, "z-lab")
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": spec.block_size,
        "dflash_config": {"mask_token_id": spec.mask_token_id, "target_layer_ids": list(spec.target_layer_ids)},
        "num_target_layers": spec.num_target_layers,
        **layer_fields(spec),
        "tie_word_embeddings": False,
    }


def deepspec_config(spec: DrafterSpec) -> dict[str, Any]:
    """The flat config of a DeepSpec folder, DSpark or (rank 0, no confidence head) DFlash; both are anchor-first."""
    _refuse_reduced(spec, "deepspec")
    _need(spec.layout == "anchor_first", "deepspec", "the layout fill_in", "z-lab or speculators")
    _need(SLIDING not in spec.layer_types, "deepspec", "sliding windows", "z-lab or speculators")
    _refuse_other_width(spec, "deepspec")
    _refuse_last_layer(spec, "deepspec")
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.target_layer_ids),
        "num_target_layers": spec.num_target_layers,
        "num_anchors": 512,  # of training, but DeepSpec's model does not start without it
        **layer_fields(spec),
        "tie_word_embeddings": False,
        **_heads(spec),
    }


def speculators_config(spec: DrafterSpec, target_name: str, target_class: str) -> dict[str, Any]:
    """The nested config of a speculators folder for the target of this name and class."""
    _refuse_last_layer(spec, "speculators")
    # An anchor-first DFlash goes as a DSpark without heads: vLLM refuses that layout under the name dflash.
    kind = "dspark" if spec.algorithm == "dspark" or spec.layout == "anchor_first" else "dflash"
    other_width = spec.target_hidden_size != spec.hidden_size
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": spec.max_draft_tokens, "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }  # fmt: skip
    return {
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "block_size": spec.block_size,
        "sample_from_anchor": spec.layout == "anchor_first",
        "mask_token_id": spec.mask_token_id,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in spec.target_layer_ids],
        "draft_vocab_size": spec.num_draft_logits,
        "target_hidden_size": spec.target_hidden_size if other_width else None,
        "sliding_window_non_causal": False,
        **({"confidence_head_with_markov": False, **_heads(spec)} if kind == "dspark" else {}),
        "transformer_layer_config": {"model_type": "qwen3", **layer_fields(spec), "tie_word_embeddings": False},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target_name, "architectures": [target_class]},
        },
    }


def _need(ok: bool, dialect: str, what: str, other: str) -> None:
    need(ok, f"{what} cannot be said in the dialect {dialect}; export to {other}")


def _refuse_reduced(spec: DrafterSpec, dialect: str) -> None:
    what = f"a reduced vocabulary ({spec.draft_vocab_size} of {spec.vocab_size} tokens)"
    _need(spec.draft_vocab_size is None, dialect, what, "speculators")


def _refuse_other_width(spec: DrafterSpec, dialect: str) -> None:
    what = f"a hidden size of {spec.hidden_size} beside the target's {spec.target_hidden_size}"
    _need(spec.hidden_size == spec.target_hidden_size, dialect, what, "speculators")


def _refuse_last_layer(spec: DrafterSpec, dialect: str) -> None:
    """Engines on transformers read the last layer's output after the final norm, DeepSpec before it, speculators none."""
    depth = spec.num_target_layers
    need(depth is not None, "num_target_layers is not known; add it to the drafter's config.json, or name the target")
    need(
        spec.target_layer_ids[-1] != (depth or 0) - 1,
        f"target layer {spec.target_layer_ids[-1]} is the last of {depth}: engines of the dialect {dialect} disagree "
        "about its features, so identical drafts cannot be promised; train with a lower layer",
    )


# --- parts ------------------------------------------------------------------------------------------------------------


def layer_fields(spec: DrafterSpec) -> dict[str, Any]:
    """The layers, as a Qwen3 config says them."""
    return {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        **_rope_to_hf(spec.rope),
        "max_position_embeddings": spec.max_position_embeddings,
        "attention_bias": spec.attention_bias,
        "layer_types": list(spec.layer_types),
        "sliding_window": spec.sliding_window,
        "use_sliding_window": SLIDING in spec.layer_types,
        "vocab_size": spec.vocab_size,
    }


def _heads(spec: DrafterSpec) -> dict[str, Any]:
    heads: dict[str, Any] = {"markov_rank": spec.markov_rank, "enable_confidence_head": spec.confidence_head}
    if spec.markov_rank:
        heads["markov_head_type"] = spec.markov_head_type
    if spec.confidence_head:
        heads["confidence_head_with_markov"] = spec.confidence_with_markov
    return heads


def _rope_to_hf(rope: RopeSpec) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` that `RopeSpec.from_hf` reads back as this spec."""
    fields = {
        "none": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor"),
    }.get(rope.scaling)
    if fields is None:
        raise CheckpointError(f"RoPE scaling {rope.scaling!r} cannot be written to config.json; use another")
    scaling = {"rope_type": rope.scaling, **{name: getattr(rope, name) for name in fields}}
    if rope.original_max_position:
        scaling["original_max_position_embeddings"] = rope.original_max_position
    return {"rope_theta": rope.theta, "rope_scaling": scaling if fields else None}
