"""Files that appear whole or not at all: written beside, then renamed, so that a write that fails leaves the old one.

Knows nothing of what they hold. Called by whatever writes a file that somebody else reads: weights, configs,
calibrations, cost profiles, the state of a training run.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from slipstream.errors import ConfigError


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write to a path beside, then put what it wrote in the place of `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.chmod(0o666 & ~_umask())  # safetensors writes files that their owner alone may read
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    """Of this process; it can only be read by setting it."""
    umask = os.umask(0o022)
    os.umask(umask)
    return umask


def replace_text(path: Path, text: str) -> None:
    replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def check_writable(path: Path, option: str, hint: str = "") -> None:
    """Before minutes are spent on what goes there. Makes the folder that it is to be in."""
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        if path.is_file() or not path.exists():  # not a device such as /dev/null
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        raise ConfigError(
            f"{option} {path} cannot be written: {error}; name another file with --{option}{hint}"
        ) from error
