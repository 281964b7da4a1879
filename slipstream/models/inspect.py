"""What a checkpoint is, told from its config and its headers: the command `slipstream inspect`.

No weight is read and torch is not imported. A drafter's report carries the layout and how it was decided; a file that
could not be loaded raises the same CheckpointError here as it would there.
"""

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.models.checkpoint import DrafterSpec, read_checkpoint
from slipstream.models.dialects import CLASSES, REFUSED_CLASSES, architecture
from slipstream.models.folder import member, naming, read_json
from slipstream.models.headers import TensorHeader, read_headers
from slipstream.models.spec import DecoderSpec
from slipstream.models.tensors import Stored, check_target


def describe(path: Path, layout: str | None = None) -> dict[str, Any]:
    """A JSON-ready report on a model folder or a .gguf file; `layout` overrides what a drafter's file says."""
    path = Path(path)
    if path.suffix == ".gguf":
        return _describe_gguf(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is neither a folder nor a .gguf file")
    with naming(path):
        config = read_json(member(path, "config.json"))
        if is_drafter(config):
            spec, headers = read_checkpoint(path, layout)
            return describe_drafter(spec) | _sizes(headers.values())
        if layout is not None:
            raise CheckpointError(f"{path} is not a drafter, so it has no layout to override")
        target, found = DecoderSpec.from_hf(config), read_headers(path).values()
    check_target(target, (Stored(header.name, header.shape, header.dtype) for header in found), str(path))
    return describe_target(target) | _sizes(found)


def is_drafter(config: dict[str, Any]) -> bool:
    """Whether a config.json belongs to a block drafter, be it one that is refused."""
    marks = {"dflash_config", "speculators_model_type", "dspark_block_size"}
    return bool(marks & config.keys()) or architecture(config) in {*CLASSES, *REFUSED_CLASSES}


def describe_drafter(spec: DrafterSpec) -> dict[str, Any]:
    """The part of a drafter's report that its spec tells."""
    return {
        "kind": "drafter",
        "dialect": spec.dialect,
        "algorithm": spec.algorithm,
        "layout": spec.layout,
        "layout_reason": spec.layout_reason,
        "block_size": spec.block_size,
        "max_draft_tokens": spec.max_draft_tokens,
        "target_layer_ids": list(spec.target_layer_ids),
        "target_hidden_size": spec.target_hidden_size,
        "num_target_layers": spec.num_target_layers,
        "mask_token_id": spec.mask_token_id,
        "markov": {"type": spec.markov_head_type, "rank": spec.markov_rank} if spec.markov_rank else None,
        "confidence_head": {"reads_markov": spec.confidence_with_markov} if spec.confidence_head else None,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.num_draft_logits,
        "embedding": "own" if spec.own_embedding else "target's",
        "head": "own" if spec.own_head else "target's",
        **_body(spec),
    }


def describe_target(spec: DecoderSpec) -> dict[str, Any]:
    """The part of a target's report that its spec tells."""
    return {
        "kind": "target",
        "family": spec.family,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tie_word_embeddings,
        **_body(spec),
    }


def _body(spec: DrafterSpec | DecoderSpec) -> dict[str, Any]:
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rope": {"theta": spec.rope.theta, "scaling": spec.rope.scaling},
        "max_position_embeddings": spec.max_position_embeddings,
        "layer_types": dict(Counter(spec.layer_types)),
        "sliding_window": spec.sliding_window,
    }


def _sizes(headers: Iterable[TensorHeader]) -> dict[str, Any]:
    """Counts over tensors; those that only training needs are left out of a drafter's."""
    headers = list(headers)
    return {
        "tensors": len(headers),
        "values": sum(header.num_values for header in headers),
        "bytes": sum(header.num_bytes for header in headers),
        "dtypes": dict(Counter(header.dtype for header in headers)),
        "files": sorted({header.file.name for header in headers}),
    }


def _describe_gguf(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    from slipstream.models.gguf import GGUFFile  # brings numpy, which the other reports do without
    from slipstream.models.gguf_container import TYPES

    with GGUFFile(path) as file:
        spec, entries = file.spec(), list(file.entries.values())
        check_target(spec, file.stored(), str(path))
        return describe_target(spec) | {
            "tensors": len(entries),
            "values": sum(math.prod(entry.shape) for entry in entries),
            "bytes": sum(entry.num_bytes for entry in entries),
            "dtypes": dict(Counter(TYPES[entry.kind][0] for entry in entries)),
            "files": [path.name],
        }
