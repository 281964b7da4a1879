"""Reading a drafter's config and headers: every dialect, the layout and its reason, and what is refused by name."""

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import CheckpointError
from slipstream.models import headers
from slipstream.models.checkpoint import (
    DrafterSpec,
    canonical_name,
    check_fit,
    check_tensors,
    default_target_layer_ids,
    expected_tensors,
    spec_from_config,
    with_tensors,
)
from slipstream.models.dialect_configs import config_from_spec
from slipstream.models.headers import TensorHeader, read_headers
from slipstream.models.inspect import describe
from slipstream.models.layout import decide_layout
from slipstream.models.rope import RopeSpec
from slipstream.models.shapes import num_values
from slipstream.models.spec import FULL, SLIDING, DecoderSpec
from slipstream.models.tensors import target_tensors

QWEN3_8B = {
    "model_type": "qwen3", "num_hidden_layers": 5, "num_target_layers": 36, "hidden_size": 4096,
    "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_scaling": None, "layer_types": [FULL] * 5,
    "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36, "attention_bias": False,
    "vocab_size": 151936, "max_position_embeddings": 40960, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "attention_dropout": 0.0, "initializer_range": 0.02,
    "bos_token_id": 151643, "eos_token_id": 151645, "transformers_version": "4.57.1",
}  # fmt: skip
TAPS = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
Z_LAB = QWEN3_8B | {
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16,
    "dflash_config": TAPS,
}  # fmt: skip
DEEPSPEC = QWEN3_8B | TAPS | {
    "architectures": ["Qwen3DSparkModel"], "block_size": 7, "num_anchors": 512, "markov_rank": 256,
    "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
SPECFORGE = QWEN3_8B | {
    "architectures": ["DSparkDraftModel"], "block_size": 7,
    "dflash_config": TAPS | {
        "projector_type": "dspark", "markov_rank": 256, "markov_head_type": "gated", "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}  # fmt: skip
SPECULATORS = {
    "speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], "block_size": 8, "mask_token_id": 9,
    "aux_hidden_state_layer_ids": [2, 20, 39], "draft_vocab_size": 32000,
    "transformer_layer_config": {"num_hidden_layers": 3, "hidden_size": 2048, "num_key_value_heads": 8},
    "speculators_config": {"algorithm": "dspark", "proposal_methods": [{"speculative_tokens": 8}]},
}  # fmt: skip


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def headers_of(spec: DrafterSpec, prefix: str = "") -> dict[str, TensorHeader]:
    """The headers that a whole file of this spec has."""
    return {
        prefix + name: TensorHeader(
            name=prefix + name, dtype="I64" if name == "d2t" else "BF16", shape=shape, file=Path("model.safetensors")
        )
        for name, shape in expected_tensors(spec).items()
    }


# --- dialects ---------------------------------------------------------------------------------------------------------


def test_z_lab_file_of_qwen3_8b() -> None:
    spec = spec_from_config(Z_LAB)
    assert (spec.algorithm, spec.layout, spec.block_size, spec.max_draft_tokens) == ("dflash", "fill_in", 16, 15)
    assert (spec.target_layer_ids, spec.mask_token_id, spec.target_hidden_size) == ((1, 9, 17, 25, 33), 151669, 4096)
    assert (spec.rows(15), spec.draft_rows(15)) == (16, slice(1, 16))
    assert spec.rope == RopeSpec(theta=1e6)
    shapes = expected_tensors(spec)
    # As a third party counted in the published file's header.
    assert (len(shapes), sum(map(math.prod, shapes.values()))) == (58, 1_048_626_432)


def test_deepspec_file_of_qwen3_8b() -> None:
    spec = spec_from_config(DEEPSPEC)
    assert (spec.algorithm, spec.layout, spec.block_size, spec.max_draft_tokens) == ("dspark", "anchor_first", 7, 7)
    assert (spec.rows(7), spec.draft_rows(3)) == (7, slice(0, 3))
    assert (spec.markov_rank, spec.markov_head_type, spec.confidence_with_markov) == (256, "vanilla", True)
    shapes = expected_tensors(dataclasses.replace(spec, own_embedding=True, own_head=True))
    assert sum(map(math.prod, shapes.values())) == 2_371_081_729


def test_deepspec_dflash_is_anchor_first_all_the_same() -> None:
    spec = spec_from_config(without(DEEPSPEC, "markov_head_type") | {"markov_rank": 0, "enable_confidence_head": False})
    assert (spec.algorithm, spec.layout, spec.max_draft_tokens) == ("dflash", "anchor_first", 7)


def test_specforge_nests_everything() -> None:
    spec = spec_from_config(SPECFORGE)
    assert (spec.layout, spec.markov_head_type, spec.confidence_head) == ("anchor_first", "gated", True)
    assert spec.target_layer_ids == (1, 9, 17, 25, 33)


def test_speculators_counts_hidden_states_and_saves_differences() -> None:
    spec = spec_from_config(SPECULATORS)
    assert (spec.layout, spec.max_draft_tokens, spec.target_layer_ids) == ("anchor_first", 8, (1, 19, 38))
    assert (spec.markov_rank, spec.confidence_with_markov, spec.draft_vocab_size) == (256, True, 32000)
    assert (spec.vocab_size, spec.num_heads, spec.head_dim, spec.rope.theta) == (151936, 32, 128, 1e4)


def test_block_size_may_be_nested_and_layers_default() -> None:
    config = without(Z_LAB, "block_size") | {"dflash_config": {"block_size": 8, "mask_token_id": 5}}
    spec = spec_from_config(config)
    assert (spec.block_size, spec.target_layer_ids) == (8, (1, 9, 17, 25, 33))
    assert default_target_layer_ids(36, 1) == (18,)
    assert default_target_layer_ids(64, 5) == (1, 16, 31, 46, 61)


def test_a_value_in_two_places_must_agree() -> None:
    with pytest.raises(CheckpointError, match="mask_token_id is 7 at the top level and 151669 in dflash_config"):
        spec_from_config(Z_LAB | {"mask_token_id": 7})


def test_sliding_layers_and_windows() -> None:
    types = [SLIDING, FULL, SLIDING, FULL, FULL]
    spec = spec_from_config(Z_LAB | {"layer_types": types, "sliding_window": 2048})
    assert [spec.window(layer) for layer in range(5)] == [2048, None, 2048, None, None]
    nested = TAPS | {"swa_window_size": 512}
    assert spec_from_config(Z_LAB | {"layer_types": types, "dflash_config": nested}).sliding_window == 512
    ruled = without(Z_LAB, "layer_types") | {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 64}
    assert spec_from_config(ruled).layer_types == (FULL, FULL, FULL, SLIDING, SLIDING)


# --- layout -----------------------------------------------------------------------------------------------------------

PROPOSES = {"proposal_methods": [{"speculative_tokens": 7}]}


@pytest.mark.parametrize(
    ("config", "layout", "reason"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "fill_in", "architectures DFlashDraftModel without a layout flag"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 0}, "anchor_first", "architectures Qwen3DSparkModel"),
        ({"architectures": ["DSparkDraftModel"]}, "anchor_first", "architectures DSparkDraftModel"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dspark"}}, "anchor_first",
         "dflash_config.projector_type dspark"),
        ({"architectures": ["DFlashDraftModel"], "sample_from_anchor": True}, "anchor_first", "sample_from_anchor"),
        ({"architectures": ["Qwen3DSparkModel"], "sample_from_anchor": False}, "fill_in", "sample_from_anchor=false"),
        ({"architectures": ["Qwen3DSparkModel"], "dspark_bonus_anchor": True}, "fill_in", "dspark_bonus_anchor=true"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"query_zero_predicts_next": True}}, "anchor_first",
         "dflash_config.query_zero_predicts_next=true"),
        ({"speculators_model_type": "dspark"}, "fill_in", "older than that flag"),
        ({"speculators_model_type": "dspark", "speculators_config": PROPOSES}, "fill_in", "speculative_tokens=7"),
        ({"speculators_model_type": "dflash", "speculative_tokens": 8}, "anchor_first", "speculative_tokens=8"),
        ({"speculators_model_type": "dspark", "sample_from_anchor": False, "speculators_config": PROPOSES}, "fill_in",
         "sample_from_anchor=false"),
    ],
)  # fmt: skip
def test_layout_and_its_reason(config: dict[str, Any], layout: str, reason: str) -> None:
    decision = decide_layout(config, block_size=8)
    assert decision.layout == layout
    assert reason in decision.reason


def test_the_user_overrides_any_flag() -> None:
    config = {"sample_from_anchor": True, "speculative_tokens": 7}
    assert decide_layout(config, 8, "fill_in").layout == "fill_in"
    assert decide_layout(config, 8, "anchor_first").reason == "set by the user"


@pytest.mark.parametrize(
    ("config", "override", "message"),
    [
        ({"sample_from_anchor": True, "speculative_tokens": 7}, None, "anchor_first.*contradicts layout fill_in"),
        ({"sample_from_anchor": False, "speculative_tokens": 8}, None, "fill_in.*contradicts layout anchor_first"),
        ({"sample_from_anchor": True, "dspark_bonus_anchor": True}, None, "contradict each other"),
        ({"sample_from_anchor": True, "dflash_config": {"sample_from_anchor": False}}, None, "contradict each other"),
        ({"sample_from_anchor": "yes"}, None, "sample_from_anchor is 'yes'; it must be true or false"),
        ({"speculative_tokens": 5}, None, "speculative_tokens 5 fits neither layout of block_size 8"),
        ({}, "sideways", "layout 'sideways' is unknown"),
    ],
)
def test_a_wrong_layout_flag_is_an_error(config: dict[str, Any], override: str | None, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decide_layout(config, 8, override)


def test_what_is_written_reads_back(drafter_spec: Callable[..., DrafterSpec]) -> None:
    ropes = (
        RopeSpec(theta=1e5),
        RopeSpec(theta=1e4, scaling="linear", factor=2.0),
        RopeSpec(theta=1e6, scaling="yarn", factor=4.0, original_max_position=32, attention_factor=1.1),
        RopeSpec(theta=5e5, scaling="llama3", factor=8.0, original_max_position=64),
    )
    heads: tuple[dict[str, Any], ...] = (
        {"algorithm": "dflash"},
        {"algorithm": "dspark", "markov_rank": 4, "markov_head_type": "rnn"},
        {"algorithm": "dspark", "confidence_head": True},
        {"algorithm": "dspark", "markov_rank": 4, "confidence_head": True, "confidence_with_markov": True},
    )
    windows: tuple[dict[str, Any], ...] = ({}, {"layer_types": (SLIDING, FULL), "sliding_window": 6})
    for layout, rope, head, window in itertools.product(("fill_in", "anchor_first"), ropes, heads, windows):
        spec = drafter_spec(layout=layout, rope=rope, draft_vocab_size=16, attention_bias=True, **head, **window)
        read = spec_from_config(json.loads(json.dumps(config_from_spec(spec))))
        assert dataclasses.replace(read, layout_reason="test") == spec


def test_a_flipped_flag_in_a_written_file_is_noticed(dspark_spec: Callable[..., DrafterSpec]) -> None:
    config = config_from_spec(dspark_spec())
    with pytest.raises(CheckpointError, match="contradicts"):
        spec_from_config(config | {"sample_from_anchor": False})


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DEEPSPEC | {"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel is not supported"),
        (Z_LAB | {"architectures": ["Eagle3Model"]}, "'Eagle3Model' is not a block drafter"),
        (SPECULATORS | {"speculators_model_type": "eagle3"}, "speculators_model_type 'eagle3' is not a block drafter"),
        (Z_LAB | {"dflash_config": TAPS | {"conv_kernel_size": 3}}, "conv_kernel_size is not supported.*DFlash2"),
        (Z_LAB | {"dflash_config": TAPS | {"selector_rank": 64}}, "selector_rank is not supported.*DFlash2"),
        (Z_LAB | {"dflash_config": TAPS | {"fusion_mode": "gate"}}, "fusion_mode is not supported.*DFlare"),
        (Z_LAB | {"dflash_config": TAPS | {"projector_type": "domino"}}, "projector_type 'domino' is not supported"),
        (QWEN3_8B | {"dspark_block_size": 5, "architectures": ["DeepseekV4"]}, "dspark_block_size.*DeepSeek-V4"),
        (DEEPSPEC | {"rms_norm_eps": -1}, "rms_norm_eps is -1; it must be above 0"),
        (SPECULATORS | {"transformer_layer_config": {"rms_norm_eps": 0.0}}, "rms_norm_eps is 0.0; it must be above 0"),
        (Z_LAB | {"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*must be a finite number"),
        (Z_LAB | {"rope_theta": math.inf}, "rope_theta is inf; it must be a finite number"),
        (DEEPSPEC | {"quantization_config": {"quant_method": "nvfp4"}}, "quantization_config.*quantised"),
        (Z_LAB | {"dflash_config": TAPS | {"final_logit_softcapping": 30.0}}, "final_logit_softcapping"),
        (Z_LAB | {"dflash_config": TAPS | {"attention_sink_bias": True}}, "attention_sink_bias.*attention sinks"),
        (Z_LAB | {"dflash_config": TAPS | {"is_neox_style": False}}, "is_neox_style"),
        (Z_LAB | {"dflash_config": TAPS | {"magic": 2}}, "dflash_config.magic is an unknown key.*remove it"),
        (Z_LAB | {"embedding_scale": 8.0}, "embedding_scale is an unknown key.*remove it"),
        (Z_LAB | {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        (Z_LAB | {"dflash_config": TAPS | {"use_swa": True, "swa_window_size": 64}}, "use_swa without sliding layers"),
        (Z_LAB | {"is_causal": True}, "is_causal=true with full layers"),
        (Z_LAB | {"layer_types": [SLIDING] * 5, "sliding_window": 8, "dflash_config": TAPS | {"causal": False}},
         "causal=false with sliding layers"),
        (Z_LAB | {"layer_types": [SLIDING] * 5}, "sliding_window must be a whole number above 0"),
        (Z_LAB | {"layer_types": [FULL] * 4}, "layer_types names 4 layers, num_hidden_layers is 5"),
        (Z_LAB | {"layer_types": ["chunked"] * 5}, "layer_types .*chunked"),
        (Z_LAB | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (without(Z_LAB, "hidden_size"), "config.json lacks hidden_size"),
        (without(Z_LAB, "dflash_config"), "config.json lacks mask_token_id"),
        (Z_LAB | {"block_size": 1}, "block_size is 1; it must be a whole number from 2"),
        (Z_LAB | {"hidden_size": "4096"}, "hidden_size is '4096'"),
        (Z_LAB | {"dflash_config": TAPS | {"mask_token_id": 151936}}, "mask_token_id 151936 is outside the embedding"),
        (Z_LAB | {"dflash_config": TAPS | {"target_layer_ids": [1, 36]}}, "reaches past the target's 36 layers"),
        (Z_LAB | {"dflash_config": TAPS | {"target_layer_ids": [9, 1]}}, "must ascend"),
        (Z_LAB | {"dflash_config": TAPS | {"target_layer_ids": []}}, "target_layer_ids is empty"),
        (Z_LAB | {"dflash_config": TAPS | {"target_layer_ids": "1,9"}}, "must be a list of layer numbers"),
        (DEEPSPEC | {"markov_head_type": "lstm"}, "markov_head_type 'lstm' is unknown"),
        (DEEPSPEC | {"markov_rank": 0}, "confidence_head_with_markov is true but markov_rank is 0"),
        (DEEPSPEC | {"draft_vocab_size": 200000}, "draft_vocab_size 200000 exceeds vocab_size"),
        (DEEPSPEC | {"enable_confidence_head": 1}, "enable_confidence_head is 1; it must be true or false"),
        (Z_LAB | {"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple"),
        (Z_LAB | {"head_dim": 127}, "head_dim 127 is odd"),
    ],
)  # fmt: skip
def test_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config(config)


@pytest.mark.parametrize("config", [Z_LAB, DEEPSPEC, SPECFORGE, SPECULATORS])
def test_a_value_of_the_wrong_kind_is_an_error_and_no_crash(config: dict[str, Any]) -> None:
    refused = 0
    for place in ("", "dflash_config", "transformer_layer_config"):
        values = config.get(place, {}) if place else config
        for key, wrong in itertools.product(values, ("x", -1, 1.5, True, [1], ["x"], {"a": 1}, None)):
            changed = values | {key: wrong}
            try:
                spec_from_config(config | {place: changed} if place else changed)
            except CheckpointError:
                refused += 1
    assert refused > 40


def test_options_that_are_off_are_no_reason_to_refuse() -> None:
    off = TAPS | {
        "final_logit_softcapping": None,
        "attention_sink_bias": False,
        "magic": None,
        "projector_type": "dflash",
    }
    assert spec_from_config(Z_LAB | {"dflash_config": off, "quantization_config": None}) == spec_from_config(Z_LAB)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48, "target_hidden_size": 48}, "draft hidden size: it reads target features of width 48"),
        ({"hidden_size": 48}, "draft hidden size 48 is not the target's 32"),
        ({"vocab_size": 63}, "vocab_size 63 is not the target's 64"),
        ({"target_layer_ids": (0, 4), "num_target_layers": None}, r"\[0, 4\] reaches past the target's 4 layers"),
        ({"num_target_layers": 6}, "num_target_layers is 6, the target has 4"),
    ],
)
def test_a_drafter_for_another_target(
    drafter_spec: Callable[..., DrafterSpec], target_spec: DecoderSpec, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=f"does not fit the target: .*{message}"):
        check_fit(drafter_spec(**changes), target_spec)


def test_a_narrower_drafter_with_own_tables_fits(
    drafter_spec: Callable[..., DrafterSpec], target_spec: DecoderSpec
) -> None:
    check_fit(drafter_spec(hidden_size=16, own_embedding=True, own_head=True), target_spec)


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "model."])
def test_whole_files_pass_with_and_without_prefix(dspark_spec: Callable[..., DrafterSpec], prefix: str) -> None:
    spec = dspark_spec(markov_head_type="rnn", draft_vocab_size=16, attention_bias=True, own_head=True)
    bare = dataclasses.replace(spec, own_head=False, draft_vocab_size=None)
    headers = headers_of(spec, prefix)
    assert with_tensors(bare, headers) == spec
    assert check_tensors(spec, headers).keys() == expected_tensors(spec).keys()


def test_names_of_other_dialects() -> None:
    assert canonical_name("midlayer.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
    assert canonical_name("model.encoder.output_norm_enc.weight") == "hidden_norm.weight"
    assert canonical_name("logit_head.markov_head.markov_w1.weight") == "markov_head.markov_w1.weight"
    assert canonical_name("draft_id_to_target_id") == "d2t"


def test_a_confidence_head_without_bias_is_known_by_its_tensors(dspark_spec: Callable[..., DrafterSpec]) -> None:
    headers = headers_of(dspark_spec())
    del headers["confidence_head.proj.bias"]
    spec = with_tensors(dspark_spec(), headers)
    assert not spec.confidence_bias
    check_tensors(spec, headers)


def test_each_missing_tensor_is_named(dspark_spec: Callable[..., DrafterSpec]) -> None:
    spec = dspark_spec(markov_head_type="gated", draft_vocab_size=16)
    for name in expected_tensors(spec).keys() - {"confidence_head.proj.bias"}:
        headers = headers_of(spec)
        del headers[name]
        with pytest.raises(CheckpointError, match=f"tensor {name} .*missing|tensor {name} is missing"):
            check_tensors(with_tensors(spec, headers), headers)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fc.weight", {"shape": (32, 96)}, "2 target layers x target hidden size 32"),
        ("norm.weight", {"shape": (33,)}, r"norm.weight has shape \[33\], config.json asks for \[32\]"),
        ("norm.weight", {"dtype": "F8_E4M3"}, "norm.weight has type F8_E4M3; supported: BF16"),
        ("layers.2.input_layernorm.weight", {}, "layers.2.input_layernorm.weight is surplus"),
        ("model.norm.weight", {}, "norm.weight and model.norm.weight are the same weight"),
        ("layers.0.self_attn.q_proj.weight_scale", {}, "quantised"),
        ("aux_hidden_norms.0.weight", {}, "another network"),
    ],
)
def test_a_wrong_tensor_is_named(
    drafter_spec: Callable[..., DrafterSpec], name: str, change: dict[str, Any], message: str
) -> None:
    headers = headers_of(drafter_spec())
    header = headers.get(name) or TensorHeader(name=name, dtype="BF16", shape=(32,), file=Path("x"))
    headers[name] = dataclasses.replace(header, **change)
    with pytest.raises(CheckpointError, match=message):
        check_tensors(drafter_spec(), headers)


def test_leftovers_of_training_are_ignored(drafter_spec: Callable[..., DrafterSpec]) -> None:
    headers = headers_of(drafter_spec())
    headers["t2d"] = TensorHeader(name="t2d", dtype="BOOL", shape=(64,), file=Path("x"))
    check_tensors(drafter_spec(), headers)


# --- header files -----------------------------------------------------------------------------------------------------


def write_file(path: Path, entries: Any, data_bytes: int, claim: int | None = None) -> Path:
    raw = json.dumps(entries).encode()
    path.write_bytes((len(raw) if claim is None else claim).to_bytes(8, "little") + raw + bytes(data_bytes))
    return path


ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def test_headers_are_read_with_their_metadata_skipped(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"__metadata__": {"format": "pt"}, "a": ENTRY}, 24)
    (header,) = read_headers(tmp_path).values()
    assert (header.name, header.dtype, header.shape, header.num_bytes) == ("a", "F32", (2, 3), 24)


@pytest.mark.parametrize(
    ("entries", "data_bytes", "claim", "message"),
    [
        ({"a": ENTRY}, 20, None, "lies outside the file.*cut short"),
        ({"a": ENTRY | {"data_offsets": [0, 20]}}, 24, None, "has 20 bytes, its shape .* needs 24"),
        ({"a": ENTRY | {"data_offsets": [24, 0]}}, 24, None, "lies outside"),
        ({"a": ENTRY | {"data_offsets": [-24, 0]}}, 24, None, "malformed"),
        ({"a": ENTRY | {"shape": [2.0, 3]}}, 24, None, "malformed"),
        ({"a": ENTRY | {"dtype": "INT3"}}, 24, None, "type 'INT3', which is not supported"),
        ({"a": {"dtype": "F32"}}, 24, None, "lacks dtype, shape or data_offsets"),
        ({"a": ENTRY}, 24, 10**9, "not a whole safetensors file"),
        ({"a": ENTRY}, 24, 5, "broken safetensors header"),
        ([ENTRY], 24, None, "not an object"),
    ],
)
def test_a_damaged_header_is_refused(
    tmp_path: Path, entries: Any, data_bytes: int, claim: int | None, message: str
) -> None:
    write_file(tmp_path / "model.safetensors", entries, data_bytes, claim)
    with pytest.raises(CheckpointError, match=message):
        read_headers(tmp_path)


def test_a_digest_of_the_weights_changes_with_them_and_reads_a_bounded_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file is read whole; of a large one slices from the first byte to the last, its size in any case."""
    path = tmp_path / "model.safetensors"
    whole = bytes(range(100))

    def digest(data: bytes) -> str:
        path.write_bytes(data)
        return headers.weights_digest(tmp_path)

    def with_changed(place: int) -> str:
        return digest(whole[:place] + b"!" + whole[place + 1 :])

    for num_slices, size, seen in (
        (10, 10, range(100)),
        (25, 7, range(100)),
        (3, 8, [*range(8), *range(46, 54), *range(92, 100)]),
    ):
        monkeypatch.setattr(headers, "NUM_SLICES", num_slices)
        monkeypatch.setattr(headers, "SLICE_BYTES", size)
        assert digest(whole) == digest(whole)
        assert [place for place in range(100) if with_changed(place) != digest(whole)] == [p for p in seen if p != 33]
        assert digest(whole + whole) != digest(whole)
        assert digest(b"") != digest(b"\0")


def test_a_shard_that_is_missing_and_a_tensor_in_two_shards(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    write_file(tmp_path / "one.safetensors", {"a": ENTRY}, 24)
    with pytest.raises(CheckpointError, match=r"names two.safetensors, which is missing"):
        read_headers(tmp_path)
    write_file(tmp_path / "two.safetensors", {"a": ENTRY}, 24)
    with pytest.raises(CheckpointError, match=r"tensor a is in both one.safetensors and two.safetensors"):
        read_headers(tmp_path)


# --- inspect ----------------------------------------------------------------------------------------------------------


def write_folder(folder: Path, spec: DrafterSpec) -> Path:
    entries, at = {}, 0
    for name, header in headers_of(spec).items():
        entries[name] = {
            "dtype": header.dtype,
            "shape": list(header.shape),
            "data_offsets": [at, at + header.num_bytes],
        }
        at += header.num_bytes
    folder.mkdir()
    write_file(folder / "model.safetensors", entries, at)
    (folder / "config.json").write_text(json.dumps(config_from_spec(spec)))
    return folder


def test_describe_a_drafter(tmp_path: Path, dspark_spec: Callable[..., DrafterSpec]) -> None:
    spec = dspark_spec(draft_vocab_size=16)
    folder = write_folder(tmp_path / "drafter", spec)
    report = describe(folder)
    assert report["kind"] == "drafter"
    assert (report["layout"], report["layout_reason"]) == ("anchor_first", "flag sample_from_anchor=true")
    assert (report["max_draft_tokens"], report["mask_token_id"], report["target_layer_ids"]) == (5, 3, [0, 2])
    assert report["markov"] == {"type": "vanilla", "rank": 6}
    assert (report["vocab_size"], report["draft_vocab_size"], report["head"]) == (64, 16, "target's")
    shapes = expected_tensors(spec)
    assert report["tensors"] == len(shapes)
    assert report["values"] == sum(map(math.prod, shapes.values()))
    assert report["bytes"] == 2 * (report["values"] - 16) + 8 * 16
    assert describe(folder, "fill_in")["max_draft_tokens"] == 4
    json.dumps(report)


def test_describe_a_target_folder(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    entries, at = {}, 0
    for name, shape in target_tensors(DecoderSpec.from_hf(config)).items():
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at := at + 2 * math.prod(shape)]}
    write_file(tmp_path / "model.safetensors", entries, at)
    report = describe(tmp_path)
    assert (report["kind"], report["family"], report["tensors"]) == ("target", "qwen3", len(entries))
    assert (report["bytes"], report["values"]) == (at, num_values(DecoderSpec.from_hf(config)))
    with pytest.raises(CheckpointError, match="is not a drafter"):
        describe(tmp_path, "fill_in")


def test_describe_names_what_is_wrong(tmp_path: Path, drafter_spec: Callable[..., DrafterSpec]) -> None:
    with pytest.raises(CheckpointError, match=r"neither a folder nor a \.gguf file"):
        describe(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"config.json does not exist"):
        describe(tmp_path)
    folder = write_folder(tmp_path / "drafter", drafter_spec())
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        describe(folder)
    (folder / "config.json").write_text(json.dumps(DEEPSPEC | {"architectures": ["Gemma4DSparkModel"]}))
    with pytest.raises(CheckpointError, match="Gemma4DSparkModel is not supported"):
        describe(folder)


def test_inspecting_imports_no_torch() -> None:
    code = "import sys, slipstream.models.inspect; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
