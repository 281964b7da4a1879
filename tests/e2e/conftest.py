"""A tiny target and a tiny drafter as a user has them: folders with weights, tokenizer and chat template."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, pre_tokenizers

from slipstream.models.checkpoint import DrafterSpec
from slipstream.models.decoder import Decoder
from slipstream.models.drafters import BlockDrafter, save_drafter
from slipstream.models.rope import RopeSpec
from slipstream.models.spec import FULL, DecoderSpec

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|mask|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 256 + len(SPECIAL)
TARGET_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "eos_token_id": 257, "bos_token_id": None,
}  # fmt: skip
DRAFTER_SPEC = DrafterSpec(
    algorithm="dspark", layout="anchor_first", layout_reason="made for a test", block_size=5, num_layers=1,
    hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5,
    rope=RopeSpec(theta=1e4), max_position_embeddings=256, layer_types=(FULL,), target_layer_ids=(0, 1),
    num_target_layers=2, target_hidden_size=32, vocab_size=VOCAB_SIZE, mask_token_id=258, markov_rank=4,
    confidence_head=True, confidence_with_markov=True,
)  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    """One token per byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_target(folder: Path) -> Decoder:
    """A random target in Hugging Face layout."""
    folder.mkdir()
    target = Decoder(DecoderSpec.from_hf(TARGET_CONFIG), dtype=torch.float32).init_random(seed=3, std=0.3)
    tensors = {"lm_head.weight": target.head_weight, "model.embed_tokens.weight": target.embed_tokens.weight}
    tensors["model.norm.weight"] = target.norm.weight
    for index, layer in enumerate(target.layers):
        name = f"model.layers.{index}"
        qkv, gate_up = layer.self_attn.qkv_proj, layer.mlp.gate_up_proj
        for part, weight in zip(("q", "k", "v"), qkv.weight.split(qkv.parts), strict=True):
            tensors[f"{name}.self_attn.{part}_proj.weight"] = weight
        for part, weight in zip(("gate", "up"), gate_up.weight.split(gate_up.parts), strict=True):
            tensors[f"{name}.mlp.{part}_proj.weight"] = weight
        tensors[f"{name}.self_attn.o_proj.weight"] = layer.self_attn.o_proj.weight
        tensors[f"{name}.mlp.down_proj.weight"] = layer.mlp.down_proj.weight
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = getattr(layer, norm).weight
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(TARGET_CONFIG))
    write_tokenizer(folder)
    return target


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(target, drafter). The drafter is random too: with 259 tokens it is right now and then."""
    root = tmp_path_factory.mktemp("tiny")
    target = write_target(root / "target")
    drafter = BlockDrafter(DRAFTER_SPEC, dtype=torch.float32)
    drafter.share(target)
    drafter.init_random(seed=5, std=0.2)
    save_drafter(drafter, root / "drafter", dtype=torch.float32)
    return root / "target", root / "drafter"
