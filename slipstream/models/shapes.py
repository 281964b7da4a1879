"""Shapes without weights: the names after `random:`, as specs of targets and drafters.

`random:qwen3-8b`, or `random:` and a config.json (or a folder with one), is a target whose weights are drawn at random;
`random` as a drafter is a DSpark of the published shape for whatever target it serves, `random:` and a drafter's
config.json (or a built-in name) is that drafter. What such models write means nothing; how long they take does. No torch here;
the weights are drawn by `random_weights`. Called by `load` and the command `inspect`.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.models.checkpoint import DrafterSpec, default_target_layer_ids, expected_tensors, spec_from_config
from slipstream.models.folder import member, read_json
from slipstream.models.inspect import describe_drafter, describe_target, is_drafter
from slipstream.models.layout import decide_layout
from slipstream.models.locate import RANDOM, built_in_drafters
from slipstream.models.spec import FULL, DecoderSpec

# The published DSpark (DeepSpec): layers, Markov rank; its files draft 7 tokens. The size of the block changes no weight,
# so 16 serves every S up to 16.
DSPARK_LAYERS, DSPARK_RANK, DSPARK_BLOCK = 5, 256, 16


def _shape(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, *, tied: bool = False, **others: Any
) -> dict[str, Any]:
    """The part of a config.json that differs within a family."""
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "tie_word_embeddings": tied, **others,
    }  # fmt: skip


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip


_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
          "max_position_embeddings": 40960}  # fmt: skip
_QWEN25 = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768}
_LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
           "max_position_embeddings": 131072}  # fmt: skip
_SMOLLM2 = {"model_type": "llama", "vocab_size": 49152, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}

# Name -> the config.json of the published model, as far as it is arithmetic. `num_values` gives their published sizes.
TARGET_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": _QWEN3 | _shape(28, 1024, 3072, 16, 8, tied=True),
    "qwen3-1.7b": _QWEN3 | _shape(28, 2048, 6144, 16, 8, tied=True),
    "qwen3-4b": _QWEN3 | _shape(36, 2560, 9728, 32, 8, tied=True),
    "qwen3-8b": _QWEN3 | _shape(36, 4096, 12288, 32, 8),
    "qwen3-14b": _QWEN3 | _shape(40, 5120, 17408, 40, 8),
    "qwen3-32b": _QWEN3 | _shape(64, 5120, 25600, 64, 8),
    "qwen2.5-0.5b": _QWEN25 | _shape(24, 896, 4864, 14, 2, tied=True, vocab_size=151936),
    "qwen2.5-7b": _QWEN25 | _shape(28, 3584, 18944, 28, 4, vocab_size=152064),
    "llama-3.1-8b": _LLAMA3 | _shape(32, 4096, 14336, 32, 8, rope_scaling=_llama3_rope(8.0)),
    "llama-3.2-1b": _LLAMA3 | _shape(16, 2048, 8192, 32, 8, tied=True, rope_scaling=_llama3_rope(32.0)),
    "llama-3.2-3b": _LLAMA3 | _shape(28, 3072, 8192, 24, 8, tied=True, rope_scaling=_llama3_rope(32.0)),
    "smollm2-135m": _SMOLLM2 | _shape(30, 576, 1536, 9, 3, tied=True, rope_theta=1e5),
    "smollm2-360m": _SMOLLM2 | _shape(32, 960, 2560, 15, 5, tied=True, rope_theta=1e5),
    "smollm2-1.7b": _SMOLLM2 | _shape(24, 2048, 8192, 32, 32, tied=True, rope_theta=1.3e5),
}
_WHAT_SHAPES_ARE = f"a shape is a config.json, a folder with one, or one of {', '.join(TARGET_SHAPES)}"


def shape_name(name: str | os.PathLike[str]) -> str | None:
    """What stands after `random:`, empty for `random` alone; None for a model that has weights of its own."""
    head, _, shape = str(name).partition(":")
    return shape if head == RANDOM else None


def target_shape(shape: str) -> DecoderSpec:
    """The target of a known shape or of a config.json; nothing ends its answers but their length.

    Raises CheckpointError for a name that is neither, and for what `DecoderSpec.from_hf` refuses.
    """
    if not shape:
        raise CheckpointError(
            f"random is a drafter; as a model it needs a shape, random:SHAPE, where {_WHAT_SHAPES_ARE}"
        )
    config = config_of(shape)
    if is_drafter(config):
        raise CheckpointError(f"{shape} is the config of a drafter; name it with --draft random:{shape}")
    # A random model comes upon its end token by accident only, and a bench wants answers of a known length.
    return dataclasses.replace(DecoderSpec.from_hf(config), eos_token_ids=(), bos_token_id=None)


def drafter_shape(shape: str, target: DecoderSpec, layout: str | None = None) -> DrafterSpec:
    """The drafter of a config.json or a built-in one, the published one where `shape` is empty.

    `layout` overrides what the config says. It shares the target's embedding and head, unless it is of another width.
    """
    if not shape:
        return published_dspark(target, layout)
    config = config_of(shape)
    if not is_drafter(config):
        raise CheckpointError(f"{shape} is no drafter; --draft random makes one that fits the target")
    spec = spec_from_config(config, layout)
    own = spec.hidden_size != target.hidden_size
    return dataclasses.replace(spec, own_embedding=own, own_head=own)


def published_dspark(target: DecoderSpec, layout: str | None = None) -> DrafterSpec:
    """What DeepSpec publishes for a target: five layers of the target's own form, Markov rank 256, confidence head."""
    config = {"architectures": ["Qwen3DSparkModel"], "speculative_tokens": DSPARK_BLOCK}
    decision = decide_layout(config, DSPARK_BLOCK, layout)
    return DrafterSpec(
        algorithm="dspark",
        layout=decision.layout,
        layout_reason=decision.reason,
        block_size=DSPARK_BLOCK,
        num_layers=DSPARK_LAYERS,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        max_position_embeddings=target.max_position_embeddings,
        layer_types=(FULL,) * DSPARK_LAYERS,
        target_layer_ids=_spread(target.num_layers),
        num_target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        mask_token_id=target.vocab_size - 1,
        markov_rank=DSPARK_RANK,
        confidence_head=True,
        confidence_with_markov=True,
    )


def _spread(num_target_layers: int) -> tuple[int, ...]:
    """The published rule; a target too shallow for it has fewer layers to read."""
    ids = default_target_layer_ids(num_target_layers, DSPARK_LAYERS)
    return tuple(sorted({min(max(layer, 0), num_target_layers - 1) for layer in ids}))


def config_of(shape: str) -> dict[str, Any]:
    """The config.json of a known shape or a built-in drafter, at a path, or in the folder there."""
    if shape.lower() in TARGET_SHAPES:
        return dict(TARGET_SHAPES[shape.lower()])
    path = built_in_drafters().get(shape) or Path(shape).expanduser()
    if path.is_dir():
        return read_json(member(path, "config.json"))
    if not path.is_file():
        raise CheckpointError(f"there is no shape {shape!r}; {_WHAT_SHAPES_ARE}")
    return read_json(path)


# --- told without weights ---------------------------------------------------------------------------------------------


def describe_shape(shape: str, layout: str | None = None) -> dict[str, Any]:
    """What `slipstream inspect` says of a shape, a target's or a drafter's."""
    if shape and is_drafter(config := config_of(shape)):
        drafter = spec_from_config(config, layout)
        values = sum(map(math.prod, expected_tensors(drafter).values()))
        return describe_drafter(drafter) | {"weights": RANDOM, "values": values}
    if layout is not None:
        raise CheckpointError(f"random:{shape} is not a drafter, so it has no layout to override")
    target = target_shape(shape)
    return describe_target(target) | {"weights": RANDOM, "values": num_values(target)}


def num_values(spec: DecoderSpec) -> int:
    """Weights of a target, the output head counted once where it is the embedding."""
    hidden, inner, q_dims, kv_dims = spec.hidden_size, spec.intermediate_size, spec.num_q_dims, spec.num_kv_dims
    matrices = hidden * (q_dims + 2 * kv_dims) + q_dims * hidden + 3 * hidden * inner
    norms = 2 * hidden + 2 * spec.head_dim * spec.qk_norm
    biases = (q_dims + 2 * kv_dims) * spec.qkv_bias + hidden * spec.o_bias + (2 * inner + hidden) * spec.mlp_bias
    tables = spec.vocab_size * hidden * (1 if spec.tie_word_embeddings else 2)
    return spec.num_layers * (matrices + norms + biases) + tables + hidden
