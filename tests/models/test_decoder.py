"""The decoder against transformers in fp32: logits, tapped features, RoPE scalings, windows, biases, both heads."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.models.decoder import Decoder
from slipstream.models.layers import FIRST_POSITIONS, DenseAttend, Rotary, inverse_frequencies, prepack_networks
from slipstream.models.locate import resolve_target
from slipstream.models.rope import RopeSpec
from slipstream.models.spec import FULL, SLIDING, DecoderSpec
from slipstream.models.weights import destinations, load_decoder
from tests.models.hf import LLAMA3, YARN, distance, reference, saved

TOLERANCE = 1e-4
TOKENS = torch.tensor([1, 40, 7, 96, 7, 3, 3, 12, 88, 60, 5, 41, 13, 2, 77, 30, 31, 32, 33, 34, 35, 36, 37, 38])
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, untied": ("llama", {}),
    "llama, tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama, one kv head each": ("llama", {"num_key_value_heads": 4}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}),
    "llama, dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window from layer 1": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3, untied": ("qwen3", {}),
    "qwen3, biases, yarn": ("qwen3", {"attention_bias": True, "rope_parameters": YARN}),
    "qwen3, mixed windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": [SLIDING, FULL, SLIDING]},
    ),
}


@torch.inference_mode()
def run(decoder: Decoder, token_ids: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
    hidden, features = decoder(token_ids, torch.arange(len(token_ids)), DenseAttend(decoder.spec), taps)
    return decoder.logits(hidden), features


@pytest.mark.parametrize("case", CASES)
def test_logits_and_taps_equal_transformers(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    model = saved(family, tmp_path, shards="biases" in case, **changes)
    logits, streams = reference(model, TOKENS)
    taps = (2, -1, 0)  # last layer before the final norm, embedding, first layer, in an order of their own
    decoder = load_decoder(tmp_path, torch.float32)
    ours, features = run(decoder, TOKENS, taps)
    assert distance(ours, logits) < TOLERANCE
    assert features is not None
    for feature, tap in zip(features.chunk(3, dim=-1), taps, strict=True):
        assert distance(feature, streams[tap + 1]) < TOLERANCE


def test_a_window_hides_what_lies_before_it_from_sliding_layers_only(tmp_path: Path) -> None:
    changed = TOKENS.clone()
    changed[3] = 50
    for kinds, sees in (([SLIDING] * 3, False), ([SLIDING, FULL, SLIDING], True)):
        folder = tmp_path / str(sees)
        saved("qwen3", folder, use_sliding_window=True, sliding_window=4, layer_types=kinds)
        decoder = load_decoder(folder, torch.float32)
        before, after = run(decoder, TOKENS)[0], run(decoder, changed)[0]
        assert torch.equal(before[:3], after[:3])
        assert not torch.equal(before[3], after[3])
        # three layers of window 4 reach back 9 positions: row 13 cannot know of token 3
        assert torch.equal(before[13:], after[13:]) != sees


def test_a_tap_reads_its_own_layer_boundary() -> None:
    """A layer that adds its number: a tap that is off by one reads another number."""
    spec = DecoderSpec(
        family="llama", vocab_size=8, hidden_size=4, intermediate_size=4, num_layers=3, num_heads=1, num_kv_heads=1, head_dim=4,
        rms_norm_eps=1e-6, rope=RopeSpec(theta=1e4), max_position_embeddings=8, mlp_bias=True, layer_types=(FULL,) * 3,
    )  # fmt: skip
    decoder = Decoder(spec).init_random(0)
    with torch.no_grad():
        for index, layer in enumerate(decoder.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            layer.mlp.down_proj.bias.fill_(10.0**index)
    token_ids = torch.tensor([3, 1])
    _, features = run(decoder, token_ids, (-1, 0, 1, 2))
    assert features is not None
    added = features.reshape(2, 4, 4) - decoder.embed(token_ids)[:, None]
    expected = torch.tensor([0.0, 1.0, 11.0, 111.0])[None, :, None].expand(2, 4, 4)
    torch.testing.assert_close(added, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [(24,), (12, 12), (5, 1, 18)])
def test_packed_sequences_do_not_see_each_other(lengths: tuple[int, ...], tmp_path: Path) -> None:
    saved("qwen3", tmp_path, use_sliding_window=True, sliding_window=5, layer_types=[SLIDING, FULL, SLIDING])
    decoder = load_decoder(tmp_path, torch.float32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.inference_mode():
        packed = decoder(TOKENS, positions, DenseAttend(decoder.spec, lengths))[0]
    alone = torch.cat([decoder.norm(decoder_stream(decoder, part)) for part in TOKENS.split(lengths)])
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def decoder_stream(decoder: Decoder, token_ids: Tensor) -> Tensor:
    features = run(decoder, token_ids, (decoder.spec.num_layers - 1,))[1]
    assert features is not None
    return features


def test_rope_tables_stay_fp32_and_follow_the_module() -> None:
    rotary = Rotary(RopeSpec(theta=1e4), 8, 32)
    cos, sin = rotary.to(torch.bfloat16).table(torch.tensor([[0, 31]]))
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (1, 2, 8)
    angle = 31 * inverse_frequencies(RopeSpec(theta=1e4), 8)
    torch.testing.assert_close(sin[0, 1], torch.cat((-angle.sin(), angle.sin())))


def test_rope_tables_grow_with_what_is_served_and_not_with_what_is_claimed() -> None:
    rope = RopeSpec(theta=1e4)
    rotary, whole = Rotary(rope, 8, 1 << 22), Rotary(rope, 8, 140_000)
    assert rotary.cos_sin.shape == (FIRST_POSITIONS, 8)
    before = rotary.cos_sin
    rotary.reach(1000)
    assert rotary.cos_sin is before
    rotary.reach(140_000)
    assert rotary.cos_sin.shape == (140_000, 8) and len(before) == FIRST_POSITIONS
    assert rotary.to(torch.bfloat16).cos_sin.shape == (140_000, 8) and rotary.cos_sin.dtype == torch.float32
    torch.testing.assert_close(rotary.cos_sin[:FIRST_POSITIONS], before)
    whole.reach(1 << 20)
    assert whole.cos_sin.shape == (140_000, 8), "a model knows no positions beyond its own"
    angle = 139_999 * inverse_frequencies(rope, 8)
    torch.testing.assert_close(whole.table(torch.tensor([139_999]))[0][0], torch.cat((angle.cos(), angle.cos())))


def test_rope_divisors_of_a_gguf_file_equal_llama3() -> None:
    llama3 = RopeSpec(
        theta=5e5, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    plain = inverse_frequencies(RopeSpec(theta=5e5), 64)
    divisors = tuple((plain / inverse_frequencies(llama3, 64)).tolist())
    given = RopeSpec(theta=5e5, scaling="factors", divisors=divisors)
    torch.testing.assert_close(inverse_frequencies(given, 64), inverse_frequencies(llama3, 64))


def test_random_weights_are_frozen_seeded_and_independent_of_dtype(target_spec: DecoderSpec) -> None:
    first, again = Decoder(target_spec).init_random(1, std=0.1), Decoder(target_spec).init_random(1, std=0.1)
    other = Decoder(target_spec).init_random(2, std=0.1)
    half = Decoder(target_spec, dtype=torch.bfloat16).init_random(1, std=0.1)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
        assert torch.equal(weight.bfloat16(), half.state_dict()[name])
    assert not torch.equal(first.embed_tokens.weight, other.embed_tokens.weight)
    assert not any(parameter.requires_grad for parameter in first.parameters())
    assert not first.training


def test_a_copy_runs_on_its_own_weights(target_spec: DecoderSpec) -> None:
    first = Decoder(target_spec).init_random(1, std=0.1)
    second = copy.deepcopy(first).init_random(2, std=0.1)
    fresh = Decoder(target_spec).init_random(2, std=0.1)
    assert torch.equal(run(second, TOKENS % 64)[0], run(fresh, TOKENS % 64)[0])
    assert not torch.equal(run(first, TOKENS % 64)[0], run(second, TOKENS % 64)[0])


def test_moving_and_loading_reach_what_runs(target_spec: DecoderSpec) -> None:
    decoder, other = Decoder(target_spec).init_random(1, std=0.1), Decoder(target_spec).init_random(2, std=0.1)
    decoder.load_state_dict(other.state_dict())
    assert torch.equal(run(decoder, TOKENS % 64)[0], run(other, TOKENS % 64)[0])
    assert run(decoder.to(torch.float64).to(torch.bfloat16), TOKENS % 64)[0].dtype == torch.bfloat16


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bf16 arithmetic")
@pytest.mark.parametrize("rows", [1, 3, 8, 24])
def test_prepacked_weights_change_no_bit(target_spec: DecoderSpec, rows: int) -> None:
    decoder = Decoder(dataclasses.replace(target_spec, qkv_bias=True), dtype=torch.bfloat16).init_random(1, std=0.1)
    before = run(decoder, TOKENS[:rows] % 64)[0]
    assert prepack_networks(decoder)
    assert torch.equal(run(decoder, TOKENS[:rows] % 64)[0], before)
    assert not prepack_networks(Decoder(target_spec, dtype=torch.float16)), "fp16 has no such layout"


@pytest.mark.slow
def test_smollm2_logits_equal_transformers_on_the_same_weights() -> None:
    """fp32, from the GGUF file. The reference's weights come through the gguf library and another un-permutation."""
    path = resolve_target("smollm2-135m")
    model = smollm2_in_transformers(path)
    token_ids = torch.tensor([1, 4093, 198, 504, 3575, 17, 28, 338])
    logits, streams = reference(model, token_ids)
    decoder = load_decoder(path, torch.float32)
    taps = (1, 8, 15, 22, 28, 29)
    ours, features = run(decoder, token_ids, taps)
    assert distance(ours, logits) < TOLERANCE
    assert features is not None
    for feature, tap in zip(features.chunk(len(taps), dim=-1), taps, strict=True):
        assert distance(feature, streams[tap + 1]) < TOLERANCE


@pytest.mark.slow
def test_smollm2_weights_equal_those_that_transformers_reads_from_the_same_file() -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = resolve_target("smollm2-135m")
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=smollm2_in_transformers(path))
    ours = destinations(load_decoder(path, torch.float32))
    assert {name.removeprefix("model.") for name in theirs["tensors"]} == ours.keys()
    for name, value in theirs["tensors"].items():
        assert torch.equal(ours[name.removeprefix("model.")], torch.as_tensor(value)), name


def smollm2_in_transformers(path: Path) -> Any:
    import gguf
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    weights = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name in outer:
            weights[outer[tensor.name]] = values
            continue
        _, layer, part, kind = tensor.name.split(".")
        if part in ("attn_q", "attn_k"):  # row 2 i + j of a head belongs at j * 32 + i
            order = [head * 64 + 2 * i + j for head in range(len(values) // 64) for j in range(2) for i in range(32)]
            values = values[order]
        weights[f"model.layers.{layer}.{names[part]}.{kind}"] = values
    model.load_state_dict(weights, assign=True, strict=False)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies were made on the meta device
    return model.eval()
