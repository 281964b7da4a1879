"""GGUF files written with the gguf library and read by ours: types, names, row order, metadata, refusals."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from slipstream.errors import CheckpointError
from slipstream.models.gguf import GGUFFile, hf_name
from slipstream.models.gguf_container import TYPES
from slipstream.models.layers import DenseAttend
from slipstream.models.weights import load_decoder, read_spec
from tests.models.hf import distance, random_model, reference

Pairs = dict[str, tuple[np.ndarray, str]]  # tensor name -> values and type
LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write(path: Path, tensors: Pairs, metadata: dict[str, Any], arch: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        add: Callable[..., None] = {
            bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array,
        }[type(value)]  # fmt: skip
        add(key, value)
    for name, (values, kind) in tensors.items():
        type_number = gguf.GGMLQuantizationType[kind]
        raw = gguf.quants.quantize(values.astype(np.float32), type_number)
        writer.add_tensor(name, raw, raw_dtype=None if kind in ("F32", "F16") else type_number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata_of(config: Any, arch: str) -> dict[str, Any]:
    return {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }


def tensors_of(model: Any, arch: str, kind: str = "F32") -> Pairs:
    """A transformers model under GGUF names; llama's query and key rows interleaved as its converter does."""
    pairs: Pairs = {}
    for name, value in model.state_dict().items():
        values, (stem, _, suffix) = value.numpy(), name.removeprefix("model.").rpartition(".")
        outer = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
        if stem in outer:
            pairs[f"{outer[stem]}.{suffix}"] = values, "F32"
            continue
        _, layer, part = stem.split(".", 2)
        if arch == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            size = model.config.head_dim
            order = [
                h * size + j * size // 2 + i
                for h in range(len(values) // size)
                for i in range(size // 2)
                for j in (0, 1)
            ]
            values = values[order]
        pairs[f"blk.{layer}.{LAYER[part]}.{suffix}"] = values, kind if values.ndim == 2 else "F32"
    return pairs


CASES = {
    "llama": ("llama", {"attention_bias": True, "head_dim": 8}),
    "qwen2": ("qwen2", {"head_dim": 8}),
    "qwen3": ("qwen3", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_in_gguf_computes_what_transformers_does(case: str, tmp_path: Path) -> None:
    arch, changes = CASES[case]
    model = random_model(arch, **changes)
    path = write(tmp_path / "m.gguf", tensors_of(model, arch), metadata_of(model.config, arch), arch)
    decoder = load_decoder(path, torch.float32)
    token_ids = torch.tensor([1, 40, 7, 96, 7, 3, 12])
    with torch.inference_mode():
        hidden, _ = decoder(token_ids, torch.arange(7), DenseAttend(decoder.spec))
        assert distance(decoder.logits(hidden), reference(model, token_ids)[0]) < 1e-4


@pytest.mark.parametrize("kind", [label for label, _, _ in TYPES.values()])
def test_every_type_dequantises_as_the_library_does(kind: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(8, 512)).astype(np.float32)
    type_number = gguf.GGMLQuantizationType[kind]
    if kind == "Q6_K":  # the library reads it and cannot write it: any bytes are a valid block but for its scale
        raw = np.random.default_rng(1).integers(0, 256, (8, 2 * 210), dtype=np.uint8)
        raw.reshape(16, 210)[:, 208:] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    else:
        raw = gguf.quants.quantize(values, type_number)
    expected = gguf.quants.dequantize(raw, type_number)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("x.weight", raw, raw_dtype=None if kind in ("F32", "F16") else type_number)
    writer.add_tensor("after.weight", np.arange(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(tmp_path / "t.gguf") as file:
        read = file.read(file.entries["x.weight"])
        assert read.dtype == np.float32
        assert read.shape == (8, 512)
        np.testing.assert_array_equal(read, expected)
        assert file.read(file.entries["after.weight"]).tolist() == [0.0, 1.0, 2.0]
    if kind != "Q6_K":  # and the bytes mean what was written
        assert np.abs(read - values).max() < {"F32": 1e-9, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 3e-2}.get(kind, 0.5)


def test_names_are_those_of_hugging_face() -> None:
    assert hf_name("blk.12.attn_q.bias") == "layers.12.self_attn.q_proj.bias"
    assert hf_name("output.weight") == "lm_head.weight"
    assert hf_name("blk.0.ffn_gate_exps.weight") == "blk.0.ffn_gate_exps.weight"


@pytest.fixture
def small() -> Any:
    return random_model("llama", head_dim=8, tie_word_embeddings=True)


def small_file(path: Path, model: Any, tensors: Pairs | None = None, **metadata: Any) -> Path:
    pairs = {name: pair for name, pair in tensors_of(model, "llama").items() if name != "output.weight"}
    changes = {key.replace("__", "."): value for key, value in metadata.items()}
    return write(path, pairs | (tensors or {}), metadata_of(model.config, "llama") | changes)


def test_rope_scalings_of_the_metadata(tmp_path: Path, small: Any) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    rope = read_spec(small_file(tmp_path / "a.gguf", small, **linear)).rope
    assert (rope.scaling, rope.factor) == ("linear", 4.0)
    yarn = linear | {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 16}
    rope = read_spec(small_file(tmp_path / "b.gguf", small, **yarn)).rope
    assert (rope.scaling, rope.original_max_position, round(rope.attention_factor, 4)) == ("yarn", 16, 1.1386)
    divisors: Pairs = {"rope_freqs.weight": (np.array([1.0, 2.0, 4.0, 8.0], np.float32), "F32")}
    path = small_file(tmp_path / "c.gguf", small, divisors)
    assert read_spec(path).rope.divisors == (1.0, 2.0, 4.0, 8.0)
    load_decoder(path, torch.float32)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.attention.sliding_window": 64}, "sliding_window"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count"),
        ({"llama.attention.head_count_kv": [2, 1, 2]}, "head_count_kv"),
        ({"llama.block_count": 0}, "block_count"),
        ({"split.count": 3}, "gguf-split --merge"),
    ],
)
def test_metadata_that_changes_the_maths_is_refused(
    metadata: dict[str, Any], named: str, tmp_path: Path, small: Any
) -> None:
    with pytest.raises(CheckpointError, match=named):
        read_spec(small_file(tmp_path / "m.gguf", small, **metadata))


def test_surplus_and_missing_tensors_are_named(tmp_path: Path, small: Any) -> None:
    surplus: Pairs = {"blk.0.ffn_gate_exps.weight": (np.zeros((2, 32), np.float32), "F32")}
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_gate_exps\.weight is not used"):
        load_decoder(small_file(tmp_path / "a.gguf", small, surplus), torch.float32)
    pairs = tensors_of(small, "llama")
    del pairs["blk.2.ffn_up.weight"], pairs["output.weight"]
    path = write(tmp_path / "b.gguf", pairs, metadata_of(small.config, "llama"))
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.up_proj\.weight is missing"):
        load_decoder(path, torch.float32)


def test_another_architecture_and_another_type(tmp_path: Path, small: Any) -> None:
    path = write(tmp_path / "a.gguf", {}, {}, arch="gemma3")
    with pytest.raises(CheckpointError, match="gemma3"):
        read_spec(path)
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "llama")
    writer.add_tensor("x.weight", np.zeros((1, 144), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"x\.weight has type number 12"):
        read_spec(tmp_path / "b.gguf")


def test_without_the_library_the_error_says_how_to_get_it(
    tmp_path: Path, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = tensors_of(small, "llama", kind="Q8_0")
    del pairs["output.weight"]
    pairs = {name: (values, kind if values.shape[-1] % 32 == 0 else "F32") for name, (values, kind) in pairs.items()}
    path = write(tmp_path / "m.gguf", pairs, metadata_of(small.config, "llama"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert read_spec(path).num_layers == 3
    with pytest.raises(CheckpointError, match="pip install gguf"):
        load_decoder(path, torch.float32)
