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


@dataclass(frozen=True, slots=True, eq=False)
class RunState:
    """Where a run stands."""

    step: int
    seconds: float  # of training so far
    options: Mapping[str, Any]  # what a resumed run must have in common with it
    tensors: Mapping[str, Tensor]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{self.step:07d}.safetensors"
        save_file({key: tensor.contiguous().cpu() for key, tensor in self.tensors.items()}, folder / name)
        state = {"step": self.step, "seconds": self.seconds, "tensors": name, "options": dict(self.options)}
        temporary = folder / "state.json.tmp"
        temporary.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        temporary.replace(folder / "state.json")
        for stale in folder.glob("step-*.safetensors"):
            if stale.name != name:
                stale.unlink()

    @classmethod
    def load(cls, folder: Path, options: Mapping[str, Any]) -> "RunState":
        """Raises if there is no whole checkpoint, or if it was made with other options."""
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            tensors = load_file(folder / state["tensors"])
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"nothing to resume in {folder}: {error}; start without resume") from error
        for name, value in options.items():
            if state["options"].get(name) != value:
                raise ConfigError(
                    f"{name} is {value}, the run to resume was started with {state['options'].get(name)}; "
                    "set it back, or start anew in another folder"
                )
        return cls(state["step"], state["seconds"], state["options"], tensors)
