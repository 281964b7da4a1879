"""Prompts from a JSON-lines file, in the file's own order: `{"turns": ["first user turn", ...]}` a line.

The first N of a file are taken, so that two runs, and two modes of one run, see the same requests. Torch-free.
"""

import json
from importlib import resources
from pathlib import Path

from slipstream.errors import RequestError

BUILT_IN = "gsm8k_sample"

Messages = list[dict[str, str]]


def read_prompts(path: Path | None, count: int) -> list[Messages]:
    """The first turns of the first `count` lines as conversations; the built-in sample when no file is named."""
    if count < 1:
        raise RequestError(f"requests is {count}; ask for at least 1")
    lines = [line for line in _text(path).split("\n") if line.strip()]
    name = prompts_name(path)
    if len(lines) < count:
        raise RequestError(
            f"{name} has {len(lines)} prompts and {count} were asked for; name a longer file, or lower requests"
        )
    return [
        [{"role": "user", "content": _first_turn(line, f"{name}, line {n}")}] for n, line in enumerate(lines[:count], 1)
    ]


def prompts_name(path: Path | None) -> str:
    return BUILT_IN if path is None else path.stem


def _text(path: Path | None) -> str:
    if path is None:
        return (resources.files("slipstream") / f"assets/prompts/{BUILT_IN}.jsonl").read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"prompts file {path}: {error}") from error


def _first_turn(line: str, where: str) -> str:
    try:
        turn = json.loads(line)["turns"][0]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise RequestError(f'{where}: expected {{"turns": ["..."]}}, found {line[:60]!r}') from error
    if not isinstance(turn, str) or not turn.strip():
        raise RequestError(f"{where}: the first turn is {turn!r}; it must be a text that is not empty")
    return turn
