"""Small model folders on disk, and what a drafter read from one drafts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.models.block_attend import DenseBlockAttend
from slipstream.models.decoder import Decoder
from slipstream.models.drafters import BlockDrafter
from slipstream.models.headers import INDEX
from slipstream.models.spec import DecoderSpec
from slipstream.models.weights import destinations
from slipstream.train.walks import draft_greedily

Change = Callable[[dict[str, Tensor]], None]


def write_target(folder: Path, spec: DecoderSpec, dtype: torch.dtype = torch.float32) -> Decoder:
    """A random Llama in Hugging Face layout, and the same as a Decoder of fp32."""
    target = Decoder(spec, torch.float32).init_random(1)
    target.load_state_dict({name: value.to(dtype).float() for name, value in target.state_dict().items()})
    folder.mkdir()
    tensors = {name: place.to(dtype).clone() for name, place in destinations(target).items() if "rotary" not in name}
    prefixed = {name if name == "lm_head.weight" else f"model.{name}": value for name, value in tensors.items()}
    save_file(prefixed, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size, "intermediate_size": spec.intermediate_size, "head_dim": spec.head_dim,
        "num_hidden_layers": spec.num_layers, "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads, "rms_norm_eps": spec.rms_norm_eps, "rope_theta": spec.rope.theta,
        "max_position_embeddings": spec.max_position_embeddings, "tie_word_embeddings": spec.tie_word_embeddings,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return target


@torch.no_grad()
def drafts(drafter: BlockDrafter) -> tuple[Tensor, Tensor]:
    """Greedy drafts [2, d] after two anchors of one random context, and the hidden rows [2, n, H] behind them."""
    spec = drafter.spec
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(12, len(spec.target_layer_ids) * spec.target_hidden_size, generator=generator)
    places, anchors, anchor_ids = torch.arange(12), torch.tensor([7, 12]), torch.tensor([11, 40])
    rows = spec.rows(spec.max_draft_tokens)
    block = torch.full((2, rows), spec.mask_token_id)
    block[:, 0] = anchor_ids
    attend = DenseBlockAttend(spec, drafter.context_kv(features, places), places, anchors)
    hidden = drafter.hidden(drafter.embed(block), anchors[:, None] + torch.arange(rows), attend)
    return draft_greedily(drafter, hidden, anchor_ids, spec.max_draft_tokens), hidden


def edit(folder: Path, change: Change) -> None:
    """Other tensors in a folder of one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def configure(folder: Path, *dropped: str, **fields: Any) -> None:
    """Other fields in a folder's config."""
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in dropped}
    (folder / "config.json").write_text(json.dumps(config | fields))


def rename(old: str, new: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return change


def shard(folder: Path, backwards: bool) -> None:
    """Cut a folder's only file in two; backwards puts its last tensors into the first file."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    half = len(names) // 2
    parts = [names[half:], names[:half]] if backwards else [names[:half], names[half:]]
    where = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
