"""Prompts from JSON-lines files, in the file's own order: `{"turns": ["first user turn", ...]}` a line.

The one reader of such files: bench, evaluate, calibrate and train take the first user turn of each line, so that two
runs, and two modes of one run, see the same requests. Blank lines are passed over. A bench also takes prompts that are
made up, of an exact number of tokens (`MadeUp`). Knows nothing of tokenizers or chat templates. Torch-free.
"""

import json
import random
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TypeAlias

from slipstream.errors import ConfigError

BUILT_IN = "gsm8k_sample"
_MADE_UP = "random:"

Messages = list[dict[str, str]]
Prompt: TypeAlias = Messages | tuple[int, ...]  # a conversation, or token ids that are served as they are


@dataclass(frozen=True, slots=True)
class MadeUp:
    """Prompts of exactly `num_tokens` tokens drawn at random, in place of a file: `random:128`."""

    num_tokens: int

    def __post_init__(self) -> None:
        if type(self.num_tokens) is not int or self.num_tokens < 1:
            raise ConfigError(f"prompts {self}: a prompt has at least 1 token, as in random:128")

    def __str__(self) -> str:
        return f"{_MADE_UP}{self.num_tokens}"

    def draw(self, count: int, vocab_size: int) -> list[tuple[int, ...]]:
        """`count` prompts over ids 0 .. vocab_size - 1; the first ones are the same for every count."""
        ids = range(vocab_size)
        return [tuple(random.Random(index).choices(ids, k=self.num_tokens)) for index in range(count)]


PromptSource: TypeAlias = Path | MadeUp | None  # None: the built-in sample


def prompt_source(text: str) -> Path | MadeUp:
    """What a user names: a file, or random:N for prompts of N tokens. A file of such a name is ./random:N."""
    if not text.startswith(_MADE_UP):
        return Path(text)
    number = text.removeprefix(_MADE_UP)
    if not number.isdecimal():
        raise ConfigError(f"prompts is {text!r}; give a path, or random:N for prompts of N tokens, as in random:128")
    return MadeUp(int(number))


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


def prompts_name(source: PromptSource) -> str:
    """What a set of prompts is called in reports."""
    if isinstance(source, MadeUp):
        return str(source)
    return BUILT_IN if source is None else source.stem


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
