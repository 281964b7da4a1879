"""Small random models as transformers writes them, with transformers as the reference for what they compute."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.25, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 10000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}


def random_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model with every weight random, biases and norms included."""
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[family]
    own = {"head_dim": 16} if family == "qwen3" else {}
    model = model_class(config_class(**(SIZES | own | changes))).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.25
            parameter.copy_(noise + 1.0 if "norm" in name else noise)
    return model


def saved(family: str, folder: Path, *, shards: bool = False, seed: int = 0, **changes: Any) -> Any:
    """The same, written to `folder` with save_pretrained."""
    model = random_model(family, seed, **changes)
    model.save_pretrained(folder, max_shard_size="12KB" if shards else "1GB")
    return model


def reference(model: Any, token_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits [R, V], and the residual stream: the embedding's output, then that after each layer."""
    streams: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        streams.append((output[0] if isinstance(output, tuple) else output).reshape(len(token_ids), -1))

    hooked = [model.model.embed_tokens, *model.model.layers]
    handles = [module.register_forward_hook(keep) for module in hooked]
    with torch.inference_mode():
        logits = model(token_ids[None]).logits[0]
    for handle in handles:
        handle.remove()
    return logits, streams


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative to the reference, over all values and over the worst row."""
    gap = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    return max(float(gap.max()), float((ours - theirs).norm() / theirs.norm()))
