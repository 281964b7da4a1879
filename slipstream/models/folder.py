"""What may be read of a model folder: its own files, of bounded size, and JSON that is bounded in memory too.

A folder may come from a stranger. A link that leads out of it is not followed, save into the blobs of the hub's cache
that the folder is part of; a file is not read beyond a size that no real one has; JSON that would take far more memory
than it has bytes is refused before it is parsed, and so is a key that stands twice and says two things. Torch-free.
Called by whatever reads configs, tokenizers, templates, headers and calibrations.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError

MAX_JSON_BYTES = 4_000_000  # a config's; an index of shards and a tokenizer are larger
SLACK_BYTES = 1 << 25  # that parsing may take however small the file is
_BYTES_PER_VALUE = 128  # of memory, about, and at most: an object, a list, a key, a short text


def member(folder: Path, name: str) -> Path:
    """The path of a file that a folder may have. CheckpointError for a link that leads out of the folder."""
    path = folder / name
    if not path.is_symlink():
        return path
    try:
        real, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError):  # a loop of links: no file, as whoever asks will see
        return path
    if home not in real.parents and real.parent not in _hub_blobs(home):
        raise CheckpointError(
            f"{path} is a link to {real}, which is outside of its folder and is not read; copy that file into the folder"
        )
    return path


def _hub_blobs(home: Path) -> list[Path]:
    """Where the files of a snapshot in a hub's cache lie: REPOSITORY/snapshots/REVISION links to REPOSITORY/blobs."""
    return [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """What is wrong with a model says whose it is: a CheckpointError that does not name `path` is raised with it."""
    try:
        yield
    except CheckpointError as error:
        if str(path) in str(error):
            raise
        raise CheckpointError(f"{path}: {error}") from error


def read_text(path: Path, most: int = MAX_JSON_BYTES) -> str:
    """The text of a file, or a CheckpointError that names the file."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; a model folder needs {path.name}")
    try:
        return bounded_text(path, most)
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; fetch it again") from error


def read_json(path: Path, most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON object from a file, or a CheckpointError that names the file."""
    text = read_text(path, most)
    try:
        value = parse_json(text, len(text))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; fetch it again, or mend it") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}; an object is needed")
    return value


def bounded_text(path: Path, most: int = MAX_JSON_BYTES) -> str:
    """The text of a file; ValueError for one that is no text in UTF-8 or has more bytes, OSError as reading has it."""
    with path.open("rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise ValueError(f"it has more than {most} bytes, too large for {path.name}")
    return raw.decode("utf-8")


def parse_json(text: str, file_bytes: int) -> Any:
    """The value of a JSON text in a file of that size, in at most twice its memory and a little; else a ValueError."""
    num_values = sum(map(text.count, "[{,:"))
    if num_values * _BYTES_PER_VALUE > 2 * file_bytes + SLACK_BYTES:
        raise ValueError(f"it has some {num_values} values, more than such a file can need")
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    for key, value in pairs:
        if found[key] != value:
            raise ValueError(f"{key!r} stands twice in one object, with different values")
    return found
