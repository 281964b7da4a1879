"""From what a request asks for (`StructuredOutput`) to constraints over the model's vocabulary.

A grammar is tried in another process first (`compiler`), which may be killed; here compiled grammars, and refusals, are
kept, and answers get their matchers.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, Protocol

from slipstream.compiler import Ask, Vocabulary, XMatcher, compiled_by, require_library, shared_trials
from slipstream.constraint import Constraint, Marker
from slipstream.errors import RequestError
from slipstream.models.tokenizer import Tokenizer
from slipstream.structured import StructuredOutput


class Grammars(Protocol):
    """What makes constraints for an LLM's requests."""

    def compile(
        self, asked: StructuredOutput, ends: frozenset[int], meanwhile: Callable[[], bool]
    ) -> Callable[[], Constraint | None]:
        """A maker of constraints, one for each answer, or of none where others make them.

        RequestError for what cannot be compiled, or begun with a token.

        `meanwhile` is called again and again while that takes time, and says whether it did something.
        """


def idle() -> bool:
    """Nothing is to be done meanwhile."""
    return False


MOST_KEPT, MOST_KEPT_BYTES = 128, 1 << 27  # by the library's own count, of which a grammar takes about twice as much


class Outcomes:
    """Compiled grammars, and why there are none: those that were asked for last, within a bound of memory."""

    def __init__(self, most: int = MOST_KEPT, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Ask, tuple[Any, int]] = OrderedDict()  # with their sizes
        self._num_bytes = 0

    def get(self, ask: Ask) -> Any:
        """None: it is not known."""
        with self._lock:
            if ask not in self._kept:
                return None
            self._kept.move_to_end(ask)
            return self._kept[ask][0]

    def put(self, ask: Ask, outcome: Any) -> None:
        size = sum(map(len, ask[1])) + getattr(outcome, "memory_size_bytes", 0)
        with self._lock:
            self._num_bytes += size - self._kept.pop(ask, (None, 0))[1]
            self._kept[ask] = outcome, size
            while len(self._kept) > 1 and (len(self._kept) > self._most or self._num_bytes > self._most_bytes):
                self._num_bytes -= self._kept.popitem(last=False)[1][1]


class XGrammars:
    """Over the tokens of one model; compiled grammars are kept, and refusals are. For any threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        *,
        tries: bool = True,
        makes: bool = True,
    ) -> None:
        """tries: grammars are tried first; else somebody has done that. makes: there will be constraints; else somebody
        makes them whose engine is elsewhere.
        """
        self._tries, self._makes = tries, makes
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = tuple(sorted(token for token in eos_token_ids if token < vocab_size))
        self._outcomes = Outcomes()  # what was asked for once will be asked for again
        self._marker = lru_cache(maxsize=32)(lambda text: Marker(text, self._pieces))

    def compile(
        self, asked: StructuredOutput, ends: frozenset[int], meanwhile: Callable[[], bool] = idle
    ) -> Callable[[], Constraint | None]:
        known = tuple(sorted(token for token in ends if token < self._vocab_size))
        if not known:
            raise RequestError(
                "structured needs a token that ends the answer, and this model names none: give stop_token_ids"
            )
        self._check_ends(ends)
        ask = asked.form, asked.texts, known
        outcome = self._outcomes.get(ask)
        if outcome is None:
            outcome = self._compile(ask, meanwhile)
            self._outcomes.put(ask, outcome)
        if isinstance(outcome, str):
            raise RequestError(outcome)
        if not self._makes:
            return lambda: None
        marker = None if asked.after is None else self._marker(asked.after)
        return lambda: Constraint(XMatcher(outcome, known), ends, self._vocab_size, marker)

    def _compile(self, ask: Ask, meanwhile: Callable[[], bool]) -> Any:
        """The library's grammar, or why there is none."""
        if self._makes:
            _ = self._compiler  # also says if there is no library
        require_library()
        try:
            if self._tries:
                shared_trials().run(self._vocabulary, ask, meanwhile)
        except RequestError as error:
            return str(error)
        return compiled_by(self._compiler, ask) if self._makes else True

    def _check_ends(self, ends: frozenset[int]) -> None:
        """A token of the text that ends the answer as well would end it anywhere, with the token in it."""
        special = self._tokenizer.special_ids
        for token in sorted(ends.difference(self._eos_token_ids)):
            if token < self._vocab_size and token not in special and self._pieces[token]:
                raise RequestError(
                    f"stop_token_ids has {token}, which writes {self._pieces[token].decode(errors='replace')!r}: beside "
                    "structured only special tokens can end an answer; leave it out, or put it into the form"
                )

    @cached_property
    def _pieces(self) -> list[bytes]:
        return self._tokenizer.pieces(self._vocab_size)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        special = self._tokenizer.special_ids
        pieces = tuple(b"" if token in special else piece for token, piece in enumerate(self._pieces))
        return Vocabulary(pieces, self._eos_token_ids)

    @cached_property
    def _compiler(self) -> Any:
        return self._vocabulary.compiler()
