"""A run on disk: OUT/checkpoint holds tensors and a JSON file that points to them, written so that a cut loses nothing.

The tensors come first, under a new name; then the JSON is replaced; then the tensors before are removed. Nothing is
pickled. Called by the trainer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import CheckpointError, ConfigError
from slipstream.files import replace, replace_text


@dataclass(frozen=True, slots=True, eq=False)
class RunState:
    """Where a run stands."""

    step: int
    seconds: float  # of training so far
    options: Mapping[str, Any]  # what a resumed run must have in common with it
    answers: str  # digest of what it is trained on, likewise
    tensors: Mapping[str, Tensor]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{self.step:07d}.safetensors"
        tensors = {key: tensor.contiguous().cpu() for key, tensor in self.tensors.items()}
        replace(folder / name, lambda temporary: save_file(tensors, temporary))
        state = {
            "step": self.step, "seconds": self.seconds, "tensors": name, "answers": self.answers,
            "options": dict(self.options),
        }  # fmt: skip
        replace_text(folder / "state.json", json.dumps(state, indent=2) + "\n")
        for stale in folder.glob("step-*.safetensors"):
            if stale.name != name:
                stale.unlink()

    @classmethod
    def load(cls, folder: Path, options: Mapping[str, Any], answers: str, like: Mapping[str, Tensor]) -> "RunState":
        """Raises if there is no whole checkpoint, with tensors `like` these, or if it is of another run."""
        path = folder / "state.json"
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"nothing to resume in {folder}: {error}; start without resume") from error
        for name, kinds in _KEYS.items():
            if not isinstance(state, dict) or type(state.get(name)) not in kinds:
                raise CheckpointError(f"{path} has no {name} as a run writes it; start without resume")
        try:
            tensors = load_file(folder / state["tensors"])
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"nothing to resume in {folder}: {error}; start without resume") from error
        check_same(_flat(options), _flat(state["options"]), "the run to resume was started with")
        if state.get("answers", answers) != answers:  # runs of before this was kept do not say
            raise ConfigError(
                "answers: these are not the ones that the run to resume was started with; name the same files in the "
                "same order"
            )
        _check_tensors(tensors, like, folder / state["tensors"])
        return cls(state["step"], state["seconds"], state["options"], answers, tensors)


_KEYS: Mapping[str, tuple[type, ...]] = {"step": (int,), "seconds": (int, float), "tensors": (str,), "options": (dict,)}


def _check_tensors(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor], path: Path) -> None:
    for name, wanted in like.items():
        found = tensors.get(name)
        if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
            is_now = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise CheckpointError(
                f"{path}: {name} is {is_now}, this run has {wanted.dtype} {list(wanted.shape)}; start without resume"
            )


def check_same(ours: Mapping[str, Any], theirs: Mapping[str, Any], whose: str) -> None:
    """ConfigError that names the first of our options which differs from theirs, and both values."""
    for name, value in ours.items():
        if name not in theirs or theirs[name] != value:
            raise ConfigError(
                f"{name} is {value}, {whose} {theirs.get(name)}; set it back, or start anew in another folder"
            )


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Tables as `recipe.losses.gamma`."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
