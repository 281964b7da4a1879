"""Loading: every tensor used, every expected tensor present, or an error that names the tensor and the remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.errors import CheckpointError
from slipstream.models.decoder import Decoder
from slipstream.models.layers import PackedLinear
from slipstream.models.tensors import target_tensors
from slipstream.models.weights import destinations, fill, load_decoder, read_spec
from slipstream.testing import tiny_spec
from tests.models.hf import saved

Tensors = dict[str, Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved("qwen3", tmp_path, tie_word_embeddings=False)
    return tmp_path


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Replace a folder's weights by a changed copy in one file."""
    tensors = load_file(folder / "model.safetensors")
    save_file({name: value.contiguous() for name, value in change(tensors).items()}, folder / "model.safetensors")


def set_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def state(folder: Path) -> Tensors:
    return load_decoder(folder, torch.float32).state_dict()


def assert_same(first: Tensors, second: Tensors) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_decoder(folder, torch.float32)
    return str(caught.value)


def test_packed_rows_are_q_k_v_and_gate_up(folder: Path) -> None:
    file, ours = load_file(folder / "model.safetensors"), state(folder)
    prefix = "model.layers.1.self_attn"
    rows = [file[f"{prefix}.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(ours["layers.1.self_attn.qkv_proj.weight"], torch.cat(rows))
    rows = [file[f"model.layers.2.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(ours["layers.2.mlp.gate_up_proj.weight"], torch.cat(rows))


def test_dtype_and_frozen(folder: Path) -> None:
    decoder = load_decoder(folder, torch.bfloat16)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
    assert not decoder.training


def test_names_with_and_without_model_prefix(folder: Path) -> None:
    before = state(folder)
    rewrite(folder, lambda tensors: {name.removeprefix("model."): value for name, value in tensors.items()})
    assert_same(before, state(folder))
    rewrite(folder, lambda tensors: {f"model.{name}": value for name, value in tensors.items()})
    assert_same(before, state(folder))


def test_shards_in_either_order(folder: Path) -> None:
    before = state(folder)
    tensors = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    for names in (("a.safetensors", "b.safetensors"), ("b.safetensors", "a.safetensors")):
        halves = dict(tensors[: len(tensors) // 2]), dict(tensors[len(tensors) // 2 :])
        for file, half in zip(names, halves, strict=True):
            save_file(half, folder / file)
        weight_map = {name: file for file, half in zip(names, halves, strict=True) for name in half}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert_same(before, state(folder))


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
    ],
)
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    rewrite(folder, lambda tensors: {key: value for key, value in tensors.items() if key != name})
    message = refusal(folder)
    assert name.removeprefix("model.") in message
    assert "missing" in message
    assert ("tie_word_embeddings" if name == "lm_head.weight" else "fetch them again") in message


@pytest.mark.parametrize(
    "name", ["model.layers.3.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias", "x"]
)
def test_a_surplus_tensor_is_named(folder: Path, name: str) -> None:
    rewrite(folder, lambda tensors: {**tensors, name: torch.zeros(4)})
    assert name in refusal(folder)
    assert "not used" in refusal(folder)


def test_tables_that_follow_from_the_config_are_passed_over(folder: Path) -> None:
    before = state(folder)
    rewrite(folder, lambda tensors: {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert_same(before, state(folder))


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    set_config(folder, intermediate_size=60)
    message = refusal(folder)
    assert "gate_proj" in message or "up_proj" in message or "down_proj" in message
    assert "60" in message
    assert "56" in message


def test_a_tensor_stored_twice(folder: Path) -> None:
    rewrite(folder, lambda tensors: {**tensors, "norm.weight": tensors["model.norm.weight"].clone()})
    assert "twice" in refusal(folder)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(folder: Path) -> None:
    set_config(folder, tie_word_embeddings=True)
    message = refusal(folder)
    assert "lm_head.weight differs from embed_tokens.weight" in message
    assert "tie_word_embeddings" in message
    rewrite(folder, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    decoder = load_decoder(folder, torch.float32)
    assert decoder.lm_head is None
    assert decoder.head_weight is decoder.embed_tokens.weight


def test_quantised_weights_are_refused(folder: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        return {**tensors, "model.norm.weight": tensors["model.norm.weight"].to(torch.float8_e4m3fn)}

    rewrite(folder, change)
    assert "model.norm.weight" in refusal(folder)
    assert "F8_E4M3" in refusal(folder)


def test_end_tokens_come_from_both_configs(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert read_spec(folder).eos_token_ids == (2, 5)


def test_a_value_that_the_dtype_cannot_hold_is_told_from_a_damaged_file(folder: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        tensors["model.norm.weight"][3] = 1e30
        return tensors

    rewrite(folder, change)
    load_decoder(folder, torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds 1e\+30, which is more than float16 can hold"):
        load_decoder(folder, torch.float16)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("switch", [True, False])
def test_a_spec_names_the_tensors_that_its_network_has(family: str, switch: bool) -> None:
    """So that headers can be checked before there is a network."""
    spec = tiny_spec(family, tie_word_embeddings=switch, attention_bias=switch, mlp_bias=switch and family == "llama")
    places = destinations(Decoder(spec))
    assert target_tensors(spec) == {name: tuple(place.shape) for name, place in places.items()}


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = PackedLinear(3, (4, 2, 2), bias=True)
        self.register_buffer("d2t", torch.zeros(5, dtype=torch.int64))


def test_fill_serves_other_networks_buffers_and_types() -> None:
    module = TwoLayers()
    assert list(destinations(module)) == [
        "d2t", "q_proj.weight", "k_proj.weight", "v_proj.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias"
    ]  # fmt: skip
    tensors = {name: torch.ones(place.shape) for name, place in destinations(module).items()}
    tensors["d2t"] = torch.arange(5, dtype=torch.int32)
    tensors["v_proj.bias"] = torch.full((2,), 7.0, dtype=torch.bfloat16)
    fill(module, tensors.items(), source="test")
    assert module.qkv_proj.bias.tolist() == [1.0] * 6 + [7.0] * 2
    assert module.get_buffer("d2t").tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(CheckpointError, match="d2t is stored as float32"):
        fill(module, (tensors | {"d2t": torch.zeros(5)}).items(), source="test")
