"""What may stand at each place of a block: against the definition, token by token, for automata and markers."""

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.constraint import Constraint, Marker, num_words
from slipstream.testing import TableMatcher

VOCAB, EOS = 40, 1
# "<" and ">" in many company, so that a marker begins, breaks off and ends within tokens.
PIECES = [b"", b"</s>", b"<", b"/", b"t", b">", b"</", b"/t", b"t>", b"</t>", b"a", b"<<", b"></t", b">a", b"</t>a", b"t>t>",
          b"x</t>", b" ", b"/t>", b"/t>b"]  # fmt: skip
PIECES += [b"y%d" % i for i in range(VOCAB - len(PIECES))]
MARK = "</t>"


def automaton(seed: int, num_states: int = 5) -> tuple[np.ndarray, set[int]]:
    draw = np.random.default_rng(seed)
    after = draw.integers(-2, num_states, (num_states, VOCAB))
    after[:, EOS] = -1
    return after, {num_states - 1}


def definition(after: np.ndarray, final: set[int], output: list[int], after_text: str | None) -> np.ndarray | None:
    """[V] what may come after an output without an end; None: the output itself is against it."""
    state = 0 if after_text is None else None
    text = b""
    for token in output:
        if state is not None:
            state = int(after[state, token])
            if state < 0:
                return None
            continue
        before, text = text, text + PIECES[token]
        if MARK.encode() in text:
            if not text.endswith(MARK.encode()) or MARK.encode() in text[:-1]:
                return None
            assert MARK.encode() not in before
            state = 0
    if state is not None:
        allowed = after[state] >= 0
        allowed[EOS] = state in final
        return allowed
    return np.array([MARK.encode() not in (text + piece)[:-1] for piece in PIECES])


def tokens_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]).tolist()


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 5000), st.booleans(), st.randoms(use_true_random=False))
def test_masks_are_those_of_the_definition(seed: int, marked: bool, draw: random.Random) -> None:
    """A long answer, read in blocks; between them drafts that follow it, and others, and every place is checked."""
    after, final = automaton(seed)
    ends = frozenset([EOS])
    mark = MARK if marked else None
    held = Constraint(TableMatcher(after, final, ends), ends, VOCAB, Marker(MARK, PIECES) if marked else None)
    output: list[int] = []
    for _ in range(12):
        drafts = [draw.choice(range(2, 10) if marked and draw.random() < 0.7 else range(VOCAB)) for _ in range(5)]
        masks = np.zeros((6, num_words(VOCAB)), np.int32)
        reason = held.fill(drafts, masks)
        for place in range(6):
            allowed = definition(after, final, output + drafts[:place], mark)
            if allowed is None or EOS in drafts[:place]:
                assert (masks[place] == -1).all(), "a place that is never reached"
            else:
                assert tokens_of(masks[place]) == np.flatnonzero(allowed).tolist(), (output, drafts[:place])
        allowed = definition(after, final, output, mark)
        assert allowed is not None and (reason is None) == bool(allowed.any())
        allowed[EOS] = False
        if not allowed.any():
            return
        new: list[int] = []
        for _ in range(draw.randrange(1, 4)):
            allowed = definition(after, final, output + new, mark)
            allowed[EOS] = False
            if allowed.any():
                likely = [token for token in np.flatnonzero(allowed) if token < 10] or np.flatnonzero(allowed).tolist()
                new.append(int(draw.choice(likely)))
        held.read(new)
        output += new
        assert held.num_read == len(output)


def test_the_marker_may_be_met_in_every_way() -> None:
    """Whole, in parts, after a false start; a token that goes on behind it is not allowed where it would."""
    marker = Marker(MARK, PIECES)

    def follow(*tokens: int) -> int:
        state = 0
        for token in tokens:
            state = marker.follow(state, token)
        return state

    piece = {text: token for token, text in enumerate(PIECES)}
    for way in ([b"</t>"], [b"<", b"/", b"t", b">"], [b"<<", b"/t", b">"], [b"</", b"</", b"t>"], [b"x</t>"]):
        assert follow(*(piece[text] for text in way)) == len(MARK), way
    assert follow(piece[b"</"], piece[b"a"], piece[b"t"]) == 0

    def allows(state: int, text: bytes) -> bool:
        return bool(marker.mask_np(state)[piece[text] // 32] >> piece[text] % 32 & 1)

    assert not any(allows(state, b"</t>a") for state in range(len(MARK)))
    assert [allows(state, b">a") for state in range(len(MARK))] == [True, True, True, False]
    assert [allows(state, b"/t>b") for state in range(len(MARK))] == [True, False, True, True]
    assert allows(0, b"></t") and not allows(3, b"></t")


class Costly(TableMatcher):
    """Every call takes a while."""

    def __init__(self, accept_s: float, look_s: float) -> None:
        super().__init__(np.zeros((1, VOCAB), np.int64), {0}, [EOS])
        self._accept_s, self._look_s = accept_s, look_s

    def accept(self, token_id: int) -> bool:
        work_for(self._accept_s)
        return super().accept(token_id)

    def look_ahead(self, drafts, masks_np) -> None:  # type: ignore[no-untyped-def]
        work_for(self._look_s)
        super().look_ahead(drafts, masks_np)


def work_for(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@settings(max_examples=100, deadline=None)
@given(st.text("ab", min_size=1, max_size=9), st.text("abc", max_size=20))
def test_the_marker_keeps_the_longest_beginning(text: str, stream: str) -> None:
    marker, state = Marker(text, [b"a", b"b", b"c"]), 0
    for end, char in enumerate(stream, 1):
        state = marker.follow(state, "abc".index(char))
        assert state == next(k for k in range(len(text), -1, -1) if stream[:end].endswith(text[:k]))
        if state == len(text):
            return


@pytest.mark.parametrize("costs", [(0.08, 0.0), (0.0, 0.08), (0.05, 0.05)])
def test_a_grammar_that_goes_on_taking_too_long_ends_its_request(costs: tuple[float, float]) -> None:
    held = Constraint(Costly(*costs), frozenset([EOS]), VOCAB, patience=0.1)
    masks, reasons = np.zeros((3, num_words(VOCAB)), np.int32), []
    for _ in range(8):
        reasons.append(held.fill([4, 5], masks))
        held.read([4])
    assert reasons[0] is None and "takes too long" in str(reasons[-1]) and held.failed
    assert not masks[0].any()


def test_a_grammar_may_take_what_a_step_has() -> None:
    held = Constraint(Costly(0.0, 0.01), frozenset([EOS]), VOCAB, patience=0.1)
    masks = np.zeros((1, num_words(VOCAB)), np.int32)
    assert [held.fill([], masks) for _ in range(10)] == [None] * 10


@pytest.mark.parametrize("name", ["accept", "look_ahead"])
def test_what_a_matcher_raises_ends_its_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("the library is confused")

    held = Constraint(Costly(0.0, 0.0), frozenset([EOS]), VOCAB)
    monkeypatch.setattr(Costly, name, fails)
    masks = np.zeros((1, num_words(VOCAB)), np.int32)
    held.read([4])
    assert held.fill([], masks) == "its grammar failed: the library is confused"
    assert not masks[0].any()
    assert held.num_read == 1


def test_a_token_that_the_grammar_forbids_was_never_emitted() -> None:
    after, final = automaton(3)
    held = Constraint(TableMatcher(after, final, [EOS]), frozenset([EOS]), VOCAB)
    forbidden = int(np.flatnonzero(after[0] < 0)[0])
    held.read([forbidden])
    assert "where the grammar forbids it" in str(held.fill([], np.zeros((1, num_words(VOCAB)), np.int32)))
