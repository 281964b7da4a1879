"""From what a request asks for (`StructuredOutput`) to a matcher over the model's vocabulary, by the library xgrammar.

The library, and torch and transformers with it, are imported when the first grammar is compiled. Compiling is given a
time limit and tried on a few tokens, so that a grammar that explodes is refused before its request is queued.
"""

import random
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np

from slipstream.constraint import Constraint, Marker, allows, num_words
from slipstream.errors import ConfigError, RequestError
from slipstream.models.tokenizer import Tokenizer
from slipstream.plan import Int32s, Int64s
from slipstream.structured import StructuredOutput

MOST_SECONDS = 10.0  # for a grammar to be compiled and tried
MOST_WHITESPACE = 16  # characters between two parts of JSON: a model that likes blanks must get on
_CACHE_BYTES = 1 << 28
_TRIED_TOKENS = 24


class Grammars(Protocol):
    """What makes constraints for an LLM's requests."""

    def compile(self, asked: StructuredOutput, ends: frozenset[int]) -> Callable[[], Constraint]:
        """A maker of constraints, one for each answer. RequestError for what cannot be compiled, or has no end."""


class XGrammars:
    """Over the tokens of one model; compiled grammars are kept."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = sorted(token for token in eos_token_ids if token < vocab_size)
        # What was asked for once will be asked for again.
        self._compiled = lru_cache(maxsize=128)(self._compile)
        self._marker = lru_cache(maxsize=32)(lambda text: Marker(text, self._pieces))

    def compile(self, asked: StructuredOutput, ends: frozenset[int]) -> Callable[[], Constraint]:
        if not any(token < self._vocab_size for token in ends):
            raise RequestError(
                "structured needs a token that ends the answer, and this model names none: give stop_token_ids"
            )
        compiled = self._compiled(asked.form, asked.texts, ends)
        marker = None if asked.after is None else self._marker(asked.after)
        return lambda: Constraint(self._matcher(compiled, ends), ends, self._vocab_size, marker)

    def _compile(self, form: str, texts: tuple[str, ...], ends: frozenset[int]) -> Any:
        compiler = self._compiler  # outside the time limit: reading the vocabulary is the first request's business

        def make() -> Any:
            compiled = _COMPILE[form](compiler, texts)
            self._try(self._matcher(compiled, ends), ends)
            return compiled

        return _within(MOST_SECONDS, make, form)

    def _matcher(self, compiled: Any, ends: frozenset[int]) -> "_XMatcher":
        known = sorted(token for token in ends if token < self._vocab_size)
        return _XMatcher(_library().GrammarMatcher(compiled, override_stop_tokens=known))

    def _try(self, matcher: "_XMatcher", ends: frozenset[int]) -> None:
        """Walk a little way at random: what explodes does so here."""
        mask, draw = np.full((1, num_words(self._vocab_size)), -1, np.int32), random.Random(0)
        for _ in range(_TRIED_TOKENS):
            matcher.look_ahead([], mask)
            bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: self._vocab_size]
            allowed = [token for token in bits.nonzero()[0].tolist() if token not in ends]
            if not allowed or not matcher.accept(draw.choice(allowed)):
                break

    @cached_property
    def _pieces(self) -> list[bytes]:
        return self._tokenizer.pieces(self._vocab_size)

    @cached_property
    def _compiler(self) -> Any:
        xgrammar, special = _library(), self._tokenizer.special_ids
        pieces = [b"" if token in special else piece for token, piece in enumerate(self._pieces)]
        info = xgrammar.TokenizerInfo(
            pieces, xgrammar.VocabType.RAW, vocab_size=self._vocab_size,
            stop_token_ids=self._eos_token_ids,
        )  # fmt: skip
        return xgrammar.GrammarCompiler(info, cache_limit_bytes=_CACHE_BYTES)


class _XMatcher:
    """A `Matcher` by the library's."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def look_ahead(self, drafts: Sequence[int], masks_np: Int32s) -> None:
        """Drafts are a tree without branches to the library; a node that is forbidden gets an empty mask from it."""
        follower, sibling = _chain(len(drafts) + 1)
        self._matcher.traverse_draft_tree(follower, sibling, np.array([0, *drafts]), masks_np)
        for place, draft in enumerate(drafts):
            if not allows(masks_np[place], draft):
                masks_np[place + 1] = -1
                break


@lru_cache(maxsize=64)
def _chain(count: int) -> tuple[Int64s, Int64s]:
    """Of each of so many nodes the one that follows, and the one beside it; -1: none."""
    return np.append(np.arange(1, count), -1), np.full(count, -1)


def _compile_choice(compiler: Any, texts: tuple[str, ...]) -> Any:
    quoted = " | ".join('"' + "".join(map(_quoted, text)) + '"' for text in texts)
    return compiler.compile_grammar(f"root ::= {quoted}")


def _quoted(char: str) -> str:
    """A character within quotes of EBNF."""
    return char if char.isprintable() and char not in '"\\' else f"\\U{ord(char):08x}"


_COMPILE: dict[str, Callable[[Any, tuple[str, ...]], Any]] = {
    "json": lambda compiler, texts: compiler.compile_json_schema(texts[0], max_whitespace_cnt=MOST_WHITESPACE),
    "regex": lambda compiler, texts: compiler.compile_regex(texts[0]),
    "grammar": lambda compiler, texts: compiler.compile_grammar(texts[0]),
    "choice": _compile_choice,
}


def _within(seconds: float, make: Callable[[], Any], form: str) -> Any:
    """What `make` returns. RequestError where it fails or takes longer; it then goes on in the background."""
    made: list[Any] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            made.append(make())
        except Exception as error:  # the library raises RuntimeError for whatever it cannot read
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True, name="slipstream-grammar")
    thread.start()
    thread.join(seconds)
    if failed:
        reason = str(failed[0]).strip().partition(": ")[2] or repr(failed[0])
        raise RequestError(f"structured.{form} cannot be compiled: {reason}") from failed[0]
    if not made:
        raise RequestError(f"structured.{form} takes longer than {seconds:g} s to compile: make it smaller")
    return made[0]


def _library() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise ConfigError(
            f"structured output needs the library xgrammar ({error}): pip install 'slipstream[structured]'"
        ) from error
    return xgrammar
