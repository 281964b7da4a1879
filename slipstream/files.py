"""Files that appear whole or not at all: written beside, then renamed, so that a write that fails leaves the old one.

Knows nothing of what they hold. Called by whatever writes a file that somebody else reads: weights, configs,
calibrations, cost profiles, the state of a training run.
"""

import os
from collections.abc import Callable
from pathlib import Path


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write to a path beside, then put what it wrote in the place of `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
