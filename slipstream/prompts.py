"""Prompts from JSON-lines files, in the file's own order: `{"turns": ["first user turn", ...]}` a line.

The one reader of such files: bench, evaluate, calibrate and train take the first user turn of each line, so that two
runs, and two modes of one run, see the same requests. Blank lines are passed over. Knows nothing of tokens or chat
templates. Torch-free.
"""

import json
from importlib import resources
from pathlib import Path

from slipstream.errors import ConfigError

BUILT_IN = "gsm8k_sample"

Messages = list[dict[str, str]]


def read_prompts(path: Path | None, *, limit: int | None = None) -> list[str]:
    """The first `limit` prompts of a file, all without a limit; of the built-in sample when no file is named."""
    name, lines = prompts_name(path) if path is None else str(path), _text(path).split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]  # splitlines() cuts at U+2028
    if not numbered:
        raise ConfigError(f"prompts file {name} holds no prompts; name another one")
    return [_first_turn(line, f"prompts file {name}, line {number}") for number, line in numbered[:limit]]


def user(text: str) -> Messages:
    """A conversation of one user turn."""
    return [{"role": "user", "content": text}]


def prompts_name(path: Path | None) -> str:
    """What a set of prompts is called in reports."""
    return BUILT_IN if path is None else path.stem


def _text(path: Path | None) -> str:
    if path is None:
        return (resources.files("slipstream") / f"assets/prompts/{BUILT_IN}.jsonl").read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts file {path} cannot be read: {error}") from error


def _first_turn(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    turns = value.get("turns") if isinstance(value, dict) else None
    if not isinstance(turns, list) or not turns:
        raise ConfigError(f'{where}: expected {{"turns": ["..."]}}, found {line[:60]!r}')
    turn = turns[0]
    if not isinstance(turn, str) or not turn.strip():
        raise ConfigError(f"{where}: the first turn is {turn!r}; it must be a text that is not empty")
    if not turn.isascii() and any("\ud800" <= character <= "\udfff" for character in turn):
        raise ConfigError(f"{where}: the first turn holds half of a surrogate pair, which is no character; remove it")
    return turn
