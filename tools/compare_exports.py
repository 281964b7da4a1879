"""Our files in the hands of the packages that define the formats: z-lab's `dflash`, `speculators` and `specforge`.

    pip install --target /tmp/reference --no-deps dflash==0.1.0 speculators==0.9.0 specforge==0.2.0 hs-connectors ...
    PYTHONPATH=/tmp/reference:. python tools/compare_exports.py --out bench/results/compare-exports.json

Writes small random drafters, exports them, lets the reference load the folder and compares one block over one context:
hidden rows, Markov bias and confidence, in fp32. Then the reference saves what it loaded, and we read that. Neither
package is needed by anything else here, so this is run by hand; docs/formats.md quotes the file that comes out.
"""

import argparse
import dataclasses
import json
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.lab import machine
from slipstream.models.block_attend import DenseBlockAttend
from slipstream.models.checkpoint import DrafterSpec
from slipstream.models.decoder import Decoder
from slipstream.models.dialect_configs import layer_fields
from slipstream.models.drafters import BlockDrafter, load_drafter, save_drafter
from slipstream.models.export import ExportTarget, export_drafter
from slipstream.models.spec import FULL, SLIDING, RopeSpec
from slipstream.testing import tiny_spec
from tests.models.folders import write_target

CONTEXT, KEPT = 12, torch.arange(0, 64, 4)
SPEC = DrafterSpec(
    algorithm="dflash", layout="fill_in", layout_reason="made for a check", block_size=5, num_layers=2, hidden_size=32,
    intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(theta=5e4),
    max_position_embeddings=128, layer_types=(FULL,) * 2, target_layer_ids=(0, 2), num_target_layers=4,
    target_hidden_size=32, vocab_size=64, mask_token_id=3,
)  # fmt: skip
WINDOWS: dict[str, Any] = {"layer_types": (SLIDING, FULL), "sliding_window": 6}
DSPARK: dict[str, Any] = {
    "algorithm": "dspark", "layout": "anchor_first", "markov_rank": 6, "confidence_head": True,
    "confidence_with_markov": True, "draft_vocab_size": len(KEPT),
}  # fmt: skip
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("z-lab", {}),
    ("z-lab", {"attention_bias": True, "rope": RopeSpec(theta=1e4, scaling="linear", factor=2.0)}),
    ("z-lab", WINDOWS),
    ("speculators", {}),
    ("speculators", DSPARK),
    ("speculators", DSPARK | {"markov_head_type": "gated"}),
    ("speculators", DSPARK | {"markov_head_type": "rnn", "layout": "fill_in"}),
)


@torch.no_grad()
def ours(drafter: BlockDrafter, features: Tensor, block: Tensor, previous: Tensor) -> list[Tensor]:
    """Hidden rows, Markov bias, confidence logits of all rows of one block, previous tokens given."""
    places, anchor = torch.arange(CONTEXT), torch.tensor([CONTEXT])
    attend = DenseBlockAttend(drafter.spec, drafter.context_kv(features, places), places, anchor)
    hidden = drafter.hidden(drafter.embed(block), CONTEXT + torch.arange(block.shape[1])[None], attend)
    if drafter.markov_head is None:
        return [hidden]
    return [hidden, drafter.markov_bias(previous, hidden), drafter.confidence(hidden, previous)]


@torch.no_grad()
def z_labs(folder: Path, again: Path, embeds: Tensor, features: Tensor) -> list[Tensor]:
    from dflash.model import DFlashDraftModel  # type: ignore[import-not-found]

    model = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    model.save_pretrained(again)
    positions = torch.arange(CONTEXT + embeds.shape[1])[None]
    return [model(position_ids=positions, noise_embedding=embeds, target_hidden=features[None])]


@torch.no_grad()
def speculators(folder: Path, again: Path, embeds: Tensor, features: Tensor, previous: Tensor) -> list[Tensor]:
    from speculators import SpeculatorModel  # type: ignore[import-not-found]

    model = SpeculatorModel.from_pretrained(folder, dtype=torch.float32).eval()
    model.save_pretrained(again)
    model.config.transformer_layer_config._attn_implementation = "sdpa"
    context = model.hidden_norm(model.fc(features[None]))
    angles = model.rotary_emb(features, torch.arange(CONTEXT + embeds.shape[1])[None])
    hidden = embeds
    for layer in model.layers:
        hidden = layer(
            hidden_states=hidden, target_hidden=context, attention_mask=None, position_ids=None, use_cache=False,
            position_embeddings=angles,
        )  # fmt: skip
    hidden = model.norm(hidden)
    head = getattr(model, "markov_head", None)
    if head is None:
        return [hidden]
    inputs = torch.cat((hidden, head.prev_embeddings(previous)), dim=-1)
    bias = head.block_bias(prev_token_ids=previous, hidden_states=hidden)
    return [hidden, bias, model.confidence_head(inputs).reshape(previous.shape)]


@torch.no_grad()
def specforge(folder: Path, kind: str, embeds: Tensor, features: Tensor, previous: Tensor) -> list[Tensor]:
    """A random DSpark of SpecForge's, saved to the folder: it writes a dialect that we only read."""
    from specforge.modeling.draft.dspark import DSparkDraftModel  # type: ignore[import-not-found]
    from transformers import Qwen3Config

    config = Qwen3Config(
        **layer_fields(dataclasses.replace(SPEC, vocab_size=64)), architectures=["DSparkDraftModel"], block_size=5,
        num_target_layers=4, attn_implementation="eager", dflash_config={
            "target_layer_ids": [0, 2], "mask_token_id": 3, "markov_rank": 6, "markov_head_type": kind,
            "confidence_head_alpha": 1.0, "confidence_head_with_markov": True,
        },
    )  # fmt: skip
    model = DSparkDraftModel(config).float().eval()
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.3 + (1.0 if parameter.ndim == 1 else 0.0))
    model.save_pretrained(folder)
    positions = torch.arange(CONTEXT + embeds.shape[1])[None]
    hidden = model(position_ids=positions, noise_embedding=embeds, target_hidden=features[None])
    zeros = torch.zeros(*previous.shape, 64)
    bias = model.apply_logits_head(zeros, prev_token_ids=previous, hidden_states=hidden)
    return [hidden, bias, model.predict_confidence(hidden, prev_token_ids=previous)]


def largest_difference(got: list[Tensor], want: list[Tensor]) -> float:
    """Of each kind of value, relative to the largest of its kind."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))


def compare() -> list[dict[str, Any]]:
    """One row a drafter: the largest difference, and whether what they save again is the same network to us."""
    rows: list[dict[str, Any]] = []
    torch.manual_seed(0)
    features, previous = torch.randn(CONTEXT, 64), torch.tensor([[11, 5, 6, 7, 8]])
    block = torch.tensor([[11, 3, 3, 3, 3]])
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        target: Decoder = write_target(root / "target", tiny_spec(num_hidden_layers=4, tie_word_embeddings=False))
        for number, (dialect, changes) in enumerate(CASES):
            mine, out = root / f"mine{number}", root / f"out{number}"
            drafter = BlockDrafter(dataclasses.replace(SPEC, **changes), torch.float32).init_random(2, std=0.3)
            if drafter.spec.draft_vocab_size:
                drafter.set_draft_vocabulary(KEPT)
            drafter.share(target)
            save_drafter(drafter, mine, dtype=torch.float32)
            export_drafter(mine, out, dialect, ExportTarget.at(root / "target"))
            want = ours(load_drafter(out, target), features, block, previous)
            theirs, embeds = root / f"theirs{number}", target.embed(block)
            if dialect == "z-lab":
                got = z_labs(out, theirs, embeds, features)
            else:
                got = speculators(out, theirs, embeds, features, previous)
            read = ours(load_drafter(theirs, target), features, block, previous)
            same = all(torch.equal(a, b) for a, b in zip(read, want, strict=True))
            rows.append({
                "package": "dflash" if dialect == "z-lab" else "speculators", "drafter": str(changes or "plain"),
                "largest_difference": largest_difference(got, want), "saved_by_them_is_the_same": same,
            })  # fmt: skip

        for kind in ("vanilla", "gated", "rnn"):
            got = specforge(root / kind, kind, target.embed(block), features, previous)
            want = ours(load_drafter(root / kind, target), features, block, previous)
            difference = largest_difference(got, want)
            rows.append({"package": "specforge", "drafter": kind, "largest_difference": difference})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out, rows = parser.parse_args().out, compare()
    for row in rows:
        print(json.dumps(row))
    packages = {name: metadata.version(name) for name in ("dflash", "speculators", "specforge", "transformers")}
    report = {
        "git": machine.git_commit(),
        "versions": machine.versions() | packages,
        "device": machine.device_facts(torch.device("cpu")),
        "conditions": {"dtype": "float32", "drafters": "small and random"},
        "rows": rows,
    }
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
