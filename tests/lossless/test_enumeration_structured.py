"""Rejection sampling keeps the law of plain decoding where a grammar forbids tokens, exactly.

As test_enumeration_shaped.py, with masks as the engine makes them: `Constraint` walks the drafts of each row's sequence
and `ops.allowed` strikes the rows. By definition a token is forbidden where the automaton says so after the output before
it. A mask that does not walk the drafts must change the law visibly.
"""

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.config import SamplingParams
from slipstream.constraint import Constraint
from slipstream.ops.allowed import strike
from slipstream.testing import TableMatcher
from tests.lossless.enumeration import S, Sequence, Tally, Toy, Variant, emitted_law, target_joint
from tests.lossless.test_enumeration import EXACT, MODES, THREE, TWO, VISIBLE

START = (Sequence(0), Sequence(1))
Automaton = NDArray[np.int64]

# [state, token] -> state, -1: forbidden. A grammar that goes on for ever: whatever ends an answer lies outside of the toy.
NEVER_THRICE: Automaton = np.array([[1, 3], [2, 3], [-1, 3], [1, 4], [1, -1]])  # of two ids, none three times in a row
PAIRS: Automaton = np.array([[1, 2], [0, -1], [-1, 0]])  # each id twice
ALTERNATING_THREE: Automaton = np.array([[1, 2, 3], [-1, 2, 3], [1, -1, 3], [1, 2, -1]])  # of three, none twice
UPWARDS: Automaton = np.array([[0, 1, 2], [-1, 1, 2], [0, -1, 2]])


def _asked(*wishes: dict[str, object], temperature: tuple[float, float] = (1.0, 1.0)) -> dict[str, Any]:
    both = wishes if len(wishes) == 2 else wishes * 2
    params = [SamplingParams(temperature=t, **wish) for t, wish in zip(temperature, both, strict=True)]  # type: ignore[arg-type]
    return {"asked": tuple(params), "temperature": temperature}


@dataclass(frozen=True, eq=False)
class Structured(Toy):
    grammars: tuple[Automaton | None, Automaton | None] = (None, None)  # of the two sequences
    fill: Callable[[Constraint, Tokens[int], NDArray[np.int32]], object] = Constraint.fill

    def logits_of(self, sequences: tuple[Sequence, Sequence], context: Tensor) -> Tensor:
        logits = super().logits_of(sequences, context)
        masks, rows = [], [row for row in range(len(context)) if self.grammars[row % 2] is not None]
        for row in rows:
            table = self.grammars[row % 2]
            assert table is not None
            masks.append(np.full((context.shape[1], 1), -1, np.int32))
            output = sequences[row % 2].known[1:]
            if _state(table, output) < 0:
                continue  # a faulty mask let it through: from there on everything goes
            constraint = Constraint(TableMatcher(table, (), ()), frozenset(), self.vocab_size)
            constraint.read(output)
            self.fill(constraint, context[row, 1:].tolist(), masks[-1])
        count = context.shape[1]
        struck = strike(
            logits.flatten(0, 1), torch.from_numpy(np.array(masks)), torch.tensor(rows),
            cu_outputs=torch.arange(len(context) + 1) * count, widths=torch.full((len(context),), count - 1),
        )  # fmt: skip
        return struck.view_as(logits)

    def plain_logits(self, index: int, start: int, before: tuple[int, ...]) -> Tensor:
        logits, table = super().plain_logits(index, start, before), self.grammars[index]
        if table is None or (state := _state(table, before)) < 0:
            return logits  # of a text that has probability 0, any law will do
        return logits.masked_fill(torch.from_numpy(table[state] < 0), -torch.inf)


def _state(table: Automaton, output: Tokens[int]) -> int:
    """After an output; below 0: it is forbidden."""
    state = 0
    for token in output:
        state = int(table[state, token]) if state >= 0 else -1
    return state


def _structured(toy: Toy, **fields: Any) -> Structured:
    given = {name: getattr(toy, name) for name in ("target", "drafter", "head", "sample_drafts")}
    return Structured(**{**given, **_asked({}), **fields})


PENALTIES: dict[str, object] = {"repetition_penalty": 1.3, "frequency_penalty": 0.35, "presence_penalty": 0.6}
CASES: dict[str, dict[str, Any]] = {
    "both": {"grammars": (NEVER_THRICE, PAIRS)},
    "one beside a free one": {"grammars": (NEVER_THRICE, None)},
    "with penalties and bias": {
        "grammars": (None, NEVER_THRICE), **_asked({"logit_bias": {0: 0.4}}, {**PENALTIES, "logit_bias": {1: -0.7}}),
    },
    "at T = 0 and at 0.6": {"grammars": (NEVER_THRICE, NEVER_THRICE), **_asked({}, temperature=(0.0, 0.6))},
}  # fmt: skip


def _error(toy: Toy, variant: Variant, tally: Tally | None = None) -> float:
    return float((emitted_law(toy, variant, START, tally) - target_joint(toy, START)).abs().max())


def _check(toy: Toy, mode: str) -> None:
    variant, tally = MODES[mode][0], Tally()
    assert _error(toy, variant, tally) < EXACT
    if mode != "off":
        assert tally.accepted > 0
        assert tally.rejected > 0
    if mode not in ("off", "static"):
        assert tally.pruned > 0, "inconclusive: every draft was verified"


def _cases() -> list[Any]:
    quick = {("static", "both"), ("lag, linear", "one beside a free one"), ("lag-budget, table", "both")}
    quick |= {
        ("adaptive, linear", "with penalties and bias"),
        ("adaptive, table", "at T = 0 and at 0.6"),
        ("off", "both"),
    }
    return [
        pytest.param(*case, id="-".join(case), marks=[] if case in quick else [pytest.mark.slow])
        for case in product(MODES, CASES)
    ]


@pytest.mark.parametrize(("mode", "case"), _cases())
def test_every_mode_emits_the_law_of_plain_decoding(mode: str, case: str) -> None:
    _check(_structured(TWO, **CASES[case]), mode)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_greedy_drafts(case: str) -> None:
    _check(replace(_structured(TWO, **CASES[case]), sample_drafts=False), "static")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("wish", [{}, {"top_k": 2}, {"top_p": 0.75, **PENALTIES}, {"min_p": 0.6}])
def test_three_ids_and_filters(wish: dict[str, object]) -> None:
    """Filters come after the mask: the two likeliest are two of those that are allowed."""
    _check(_structured(THREE, grammars=(ALTERNATING_THREE, UPWARDS), **_asked(wish, {})), "static")


# ---------------------------------------------------------------------------------------------------------- faults


def _without_drafts(constraint: Constraint, drafts: Tokens[int], masks_np: NDArray[np.int32]) -> None:
    """Every place has the mask of the first."""
    constraint.fill([], masks_np)
    masks_np[:] = masks_np[0]


def _one_late(constraint: Constraint, drafts: Tokens[int], masks_np: NDArray[np.int32]) -> None:
    """Every place has the mask of the one before."""
    constraint.fill(drafts, masks_np)
    masks_np[1:] = masks_np[:-1].copy()


def _nothing(constraint: Constraint, drafts: Tokens[int], masks_np: NDArray[np.int32]) -> None:
    masks_np[:] = -1


@pytest.mark.parametrize("fault", [_without_drafts, _one_late, _nothing])
def test_masks_that_do_not_follow_the_drafts_are_noticed(fault: Any) -> None:
    toy = _structured(TWO, grammars=(NEVER_THRICE, NEVER_THRICE))
    assert _error(toy, MODES["static"][0]) < EXACT
    assert _error(replace(toy, fill=fault), MODES["static"][0]) > VISIBLE


def test_the_toy_looks_ahead() -> None:
    """S drafts reach beyond what one mask could say."""
    assert S == 2
    constraint = Constraint(TableMatcher(NEVER_THRICE, (), ()), frozenset(), 2)
    masks = np.zeros((S + 1, 1), np.int32)
    constraint.fill([0, 0], masks)
    assert [int(mask[0] & 3) for mask in masks] == [3, 3, 2]
