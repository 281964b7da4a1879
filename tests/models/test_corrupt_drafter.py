"""Damaged drafters: their config and their tensors. The files' own damage is test_corrupt_safetensors' affair."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.models.decoder import Decoder
from slipstream.models.drafters import BlockDrafter, load_drafter, save_drafter
from slipstream.models.inspect import describe
from slipstream.testing import tiny_drafter_spec, tiny_target
from tests.models.test_corrupt_configs import variants

WIDE = "layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny_target()


@pytest.fixture(scope="module")
def whole(target: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter over half of the target's vocabulary."""
    folder = tmp_path_factory.mktemp("whole") / "drafter"
    drafter = BlockDrafter(tiny_drafter_spec(target.spec, draft_vocab_size=32))
    drafter.init_random(1)
    drafter.set_draft_vocabulary(torch.arange(32) * 2)
    drafter.share(target)
    save_drafter(drafter, folder, dtype=torch.float32)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    copy = tmp_path / "drafter"
    copy.mkdir()
    for file in whole.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def test_the_whole_drafter_loads(folder: Path, target: Decoder) -> None:
    assert load_drafter(folder, target).spec.num_draft_logits == 32


def test_anything_in_any_field_of_a_drafters_config(folder: Path) -> None:
    """Is refused by an error that names the folder, or is a drafter still."""
    more: dict[str, Any] = {
        "dflash_config": {"block_size": 8, "mask_token_id": 2, "swa_window_size": 4},
        "rope_parameters": None,
    }
    config = json.loads((folder / "config.json").read_text())
    for changed in variants(config | more, step=2):
        (folder / "config.json").write_text(json.dumps(changed))
        try:
            assert describe(folder)["kind"] in ("drafter", "target")
        except CheckpointError as error:
            assert str(folder) in str(error)  # noqa: PT017 (either will do)


def put(name: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    return change


def ids(*offsets: int) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["d2t"][: len(offsets)] = torch.tensor(offsets)

    return change


TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "NaN": (put(WIDE, torch.nan), f"{WIDE} holds 1 values that are not finite"),
    "infinity": (put("fc.weight", -torch.inf), "fc.weight holds 1 values that are not finite"),
    "NaN in a norm": (put("norm.weight", torch.nan), "norm.weight holds"),
    "NaN in the Markov head": (put("markov_head.markov_w1.weight", torch.nan), "markov_w1.weight holds"),
    "NaN in the confidence head": (put("confidence_head.proj.bias", torch.nan), "proj.bias holds"),
    "ids below 0": (ids(-1), "d2t maps to target ids -1"),
    "ids beyond": (ids(0, 2**40), "d2t maps to target ids"),
    "ids that wrap": (ids(0, 2**63 - 1), "d2t maps to target ids"),
    "ids twice": (ids(1, 0), "d2t must map to ascending"),
    "ids of nothing": (lambda tensors: tensors.update(d2t=torch.zeros(0, dtype=torch.int64)), "tensor d2t has shape"),
    "no ids": (lambda tensors: tensors.__delitem__("d2t"), "d2t is missing"),
    "ids that are floats": (lambda tensors: tensors.update(d2t=tensors["d2t"].float()), "d2t has type F32"),
    "another width": (lambda tensors: tensors.update({WIDE: torch.zeros(7, 32)}), rf"{WIDE} has shape \[7, 32\]"),
    "quantised": (lambda tensors: tensors.update({WIDE: tensors[WIDE].to(torch.int8)}), f"{WIDE} has type I8"),
    "a tensor of another network": (lambda tensors: tensors.update(mask_embedding=torch.zeros(1)), "mask_embedding is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_damaged_tensors_are_refused_by_name(case: str, folder: Path, target: Decoder) -> None:
    change, says = TENSORS[case]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=says) as caught:
        load_drafter(folder, target)
    assert str(folder) in str(caught.value)


def test_a_link_out_of_the_folder_is_not_followed(folder: Path, target: Decoder) -> None:
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(folder.parent / name)
        (folder / name).symlink_to(f"../{name}")
        with pytest.raises(CheckpointError, match=f"{name} is a link to"):
            load_drafter(folder, target)
        (folder / name).unlink()
        (folder.parent / name).rename(folder / name)
