"""Writing a model folder: safetensors, an index where there are several, config.json last.

Each file appears whole or not at all, so a write that fails leaves the old folder as it was. Knows nothing of what the
tensors mean; called by `drafters` (save) and `export`.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from slipstream.files import replace, replace_text
from slipstream.models.headers import INDEX


def write_folder(
    folder: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any], max_shard_bytes: int | None = None
) -> None:
    """Write the weights in their order and the config; weight files of an earlier write are removed.

    With `max_shard_bytes` the weights are split into files of at most that many bytes, a single larger tensor excepted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(weights, max_shard_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        replace(folder / name, partial(save_file, shard, metadata={"format": "pt"}))
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(weight.nbytes for weight in weights.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    kept = {*names, *([INDEX] if len(shards) > 1 else [])}
    for stale in {path.name for path in folder.glob("model*.safetensors*")} - kept:
        (folder / stale).unlink()
    _write_json(folder / "config.json", config)


def _shards(weights: Mapping[str, Tensor], max_bytes: int | None) -> list[dict[str, Tensor]]:
    """The weights in order, cut wherever the next one would exceed the limit."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, weight in weights.items():
        if max_bytes is not None and shards[-1] and used + weight.nbytes > max_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = weight
        used += weight.nbytes
    return shards


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(value, indent=2) + "\n")
