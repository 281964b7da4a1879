"""Which tokens a request may emit next, where a grammar says so: the host's side of structured output.

A `Constraint` belongs to one answer, not to a slot. It reads the answer's committed tokens, and says which tokens may
stand at each place of a block of drafts. What a grammar is, a `Matcher` knows (`grammars` makes them); with a `Marker`
everything is free until the answer's bytes hold a text. Torch-free.

Masks are bits: token t is allowed where bit t % 32 of word t // 32 is set. Letters: V token ids, P places.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from slipstream.plan import Int32s

# Seconds of this thread's work that an answer's grammar may take: so many at once, and so many more with each step.
# With an ambiguous grammar every token costs more than the last one, by a power of their number.
MOST_MASK_SECONDS = 2.0
MASK_SECONDS_A_STEP = 0.02


def num_words(vocab_size: int) -> int:
    """Of a mask of so many tokens."""
    return -(-vocab_size // 32)


class Matcher(Protocol):
    """A place in a grammar."""

    def accept(self, token_id: int) -> bool:
        """Move on by a token. False: the grammar has none of it here, and the place is what it was."""

    def look_ahead(self, drafts: Sequence[int], masks_np: Int32s) -> None:
        """Write what may come after the first j drafts, masks_np[j], j = 0 .. len(drafts), [len(drafts) + 1, words].

        Ends are among it where the grammar is complete; no draft is one. Rows behind a draft that is forbidden stay what
        they were. The place does not move.
        """


class Marker:
    """A text in a stream of tokens, found by bytes. State k: the longest end of the stream that the text begins with.

    Tokens that would go on behind the text are not allowed: what comes after it begins with a token of its own.
    """

    def __init__(self, text: str, pieces: Sequence[bytes]) -> None:
        """pieces [V]: the bytes of each token."""
        whole = text.encode()
        self.length = len(whole)
        self._pieces = pieces
        self._next = _next_states(whole)
        self._masks = np.full((self.length, num_words(len(pieces))), -1, np.int32)
        for token, piece in enumerate(pieces):
            for state in _completed_within(whole, piece):
                self._masks.view(np.uint32)[state, token // 32] &= ~np.uint32(1 << token % 32)

    def mask_np(self, state: int) -> Int32s:
        mask_np: Int32s = self._masks[state]
        return mask_np

    def follow(self, state: int, token_id: int) -> int:
        """The state after an allowed token; `length`: the text is complete."""
        for byte in self._pieces[token_id]:
            state = self._next[state][byte]
        return state


def _next_states(text: bytes) -> list[list[int]]:
    """[state][byte]: as Knuth, Morris and Pratt build it. `shorter`: the state without the text's first byte."""
    states, shorter = [[0] * 256], 0
    states[0][text[0]] = 1
    for state in range(1, len(text)):
        states.append(list(states[shorter]))
        states[state][text[state]] = state + 1
        shorter = states[shorter][text[state]]
    return states


def _completed_within(text: bytes, piece: bytes) -> set[int]:
    """States in which a token with these bytes completes the text and goes on."""
    states: set[int] = set()
    end = piece.find(text[-1:])
    while 0 <= end < len(piece) - 1:
        head = piece[: end + 1]
        if text.endswith(head) or head.endswith(text):
            states |= {state for state in range(len(text)) if (text[:state] + head).endswith(text)}
        end = piece.find(text[-1:], end + 1)
    return states


class Constraint:
    """Of one answer. What goes wrong in its matcher, or takes too long there, is an end of this answer and no other."""

    def __init__(
        self, matcher: Matcher, ends: frozenset[int], vocab_size: int, marker: Marker | None = None,
        patience: float | None = None,
    ) -> None:  # fmt: skip
        """ends: tokens after which nothing comes. patience: in place of MOST_MASK_SECONDS."""
        self._matcher, self._ends, self._marker = matcher, ends, marker  # no marker: it was found, or is none
        self._state = 0  # of the marker
        self._last_word = np.int32(np.uint32((1 << (vocab_size - 1) % 32 + 1) - 1).view(np.int32))  # its bits below V
        self._most = self._left = MOST_MASK_SECONDS if patience is None else patience
        self.num_read = 0
        self.failed: str | None = None  # why no mask can be made any more

    def read(self, token_ids: Sequence[int]) -> None:
        """Committed tokens, each once and in order; none of them ends the answer. `failed` says what went wrong."""
        for token in token_ids:
            if self._marker is None:
                self._guard(partial(self._accept, token))
            else:
                self._state = self._marker.follow(self._state, token)
                if self._state == self._marker.length:
                    self._marker = None
            self.num_read += 1

    def fill(self, drafts: Sequence[int], masks_np: Int32s) -> str | None:
        """Write masks_np [P, words], P > len(drafts): what may stand after the first j drafts, j = 0, 1, ...

        Places after a draft that is forbidden, or ends the answer, are never reached: there everything stays allowed.
        Returns why nothing can come next, where that is so.
        """
        self._left = min(self._left + MASK_SECONDS_A_STEP, self._most)
        drafts = drafts[: next((place for place, draft in enumerate(drafts) if draft in self._ends), len(drafts))]
        masks_np[:] = -1
        first = self._fill_free(drafts, masks_np)
        if first <= len(drafts):
            self._guard(partial(self._matcher.look_ahead, drafts[first:], masks_np[first : len(drafts) + 1]))
        if self.failed:
            masks_np[0] = 0
            return self.failed
        masks_np[0, -1] &= self._last_word
        return (
            None
            if masks_np[0].any()
            else "no token of the vocabulary continues what structured asks for: allow other texts there"
        )

    def _accept(self, token: int) -> None:
        if not self._matcher.accept(token):
            raise ValueError(f"token {token} was emitted at {self.num_read}, where the grammar forbids it")

    def _guard(self, work: Callable[[], None]) -> None:
        """Let the matcher work, unless it has failed; it may raise whatever its library raises."""
        if self.failed:
            return
        begun = time.thread_time()
        try:
            work()
        except Exception as error:
            self.failed = f"its grammar failed: {error}"
        self._left -= time.thread_time() - begun
        if self._left < 0 and not self.failed:
            self.failed = (
                "its grammar takes too long for a step: write one that is less ambiguous, or repeats less often"
            )

    def _fill_free(self, drafts: Sequence[int], masks_np: Int32s) -> int:
        """Places ahead of the marker's end; returns the first one behind it, beyond all where there is none."""
        if self._marker is None:
            return 0
        state = self._state
        for place, draft in enumerate(drafts):
            masks_np[place] = self._marker.mask_np(state)
            if not allows(masks_np[place], draft):
                return len(drafts) + 1
            state = self._marker.follow(state, draft)
            if state == self._marker.length:
                return place + 1
        masks_np[len(drafts)] = self._marker.mask_np(state)
        return len(drafts) + 1


def allows(mask_np: Int32s, token_id: int) -> bool:
    return bool(mask_np[token_id // 32] >> (token_id % 32) & 1)
