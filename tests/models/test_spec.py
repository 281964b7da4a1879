"""Reading config.json: what is honoured, what is refused by name, what transformers assumes where a file is silent."""

from typing import Any

import pytest

from slipstream.errors import CheckpointError
from slipstream.models.spec import FULL, SLIDING, DecoderSpec

BASE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4,
}  # fmt: skip
QWEN = BASE | {"model_type": "qwen3", "num_key_value_heads": 2}


def test_smollm2s_own_config_is_read() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.041,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "transformers_version": "4.42.3",
        "use_cache": True,
        "vocab_size": 49152,
    }  # fmt: skip
    spec = DecoderSpec.from_hf(config)
    assert (spec.head_dim, spec.num_kv_heads, spec.rope.theta, spec.tie_word_embeddings) == (64, 3, 1e5, True)
    assert (spec.eos_token_ids, spec.bos_token_id, spec.window(0)) == ((2,), 1, None)


def test_what_a_silent_file_means() -> None:
    llama = DecoderSpec.from_hf(BASE)
    assert (llama.num_kv_heads, llama.head_dim, llama.max_position_embeddings, llama.rope.theta) == (4, 8, 2048, 1e4)
    assert not (llama.qkv_bias or llama.o_bias or llama.mlp_bias or llama.qk_norm)
    qwen2 = DecoderSpec.from_hf(QWEN | {"model_type": "qwen2"})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, False, 8)
    qwen3 = DecoderSpec.from_hf(QWEN)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, [FULL] * 3),
        ({"sliding_window": 16}, [FULL] * 3),  # a window without use_sliding_window is off
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, [FULL, SLIDING, SLIDING]),
        ({"use_sliding_window": True, "sliding_window": 16}, [FULL] * 3),  # max_window_layers is 28 by default
        ({"use_sliding_window": True, "sliding_window": 16, "layer_types": [SLIDING, FULL, SLIDING]}, [SLIDING, FULL, SLIDING]),
    ],
)  # fmt: skip
def test_sliding_windows(changes: dict[str, Any], kinds: list[str]) -> None:
    spec = DecoderSpec.from_hf(QWEN | changes)
    assert list(spec.layer_types) == kinds
    assert [spec.window(layer) for layer in range(3)] == [16 if kind == SLIDING else None for kind in kinds]


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2}, "rope_parameters": None},
    ],
)
def test_older_and_newer_spelling_of_rope(changes: dict[str, Any]) -> None:
    rope = DecoderSpec.from_hf(BASE | changes).rope
    assert (rope.theta, rope.scaling, rope.factor) == (5e5, "linear", 2.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mistral"}, "mistral"),
        ({"model_type": None}, "model_type"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"attention_sink": True}, "attention_sink"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"no_rope_layers": [0, 1]}, "no_rope_layers"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}}, "dynamic"),
        ({"rope_parameters": {FULL: {"rope_type": "default"}}}, "rope_parameters"),
        ({"sliding_window": 4}, "sliding_window"),
        ({"layer_types": [SLIDING] * 3}, "use_sliding_window"),
        ({"layer_types": [FULL] * 2}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        DecoderSpec.from_hf(BASE | changes)


@pytest.mark.parametrize("harmless", [{"num_local_experts": 0}, {"quantization_config": None}, {"use_cache": True}])
def test_switched_off_or_beside_the_maths_is_no_refusal(harmless: dict[str, Any]) -> None:
    assert DecoderSpec.from_hf(BASE | harmless) == DecoderSpec.from_hf(BASE)
