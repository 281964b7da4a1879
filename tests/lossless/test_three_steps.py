"""Three steps in a row keep the law of plain decoding under rejection, exactly, whatever drafts: every kind of drafter,
drafts drawn and drafts taken, everything that a request may ask of its logits, and every mode.

Real networks and the engine's own stages in all worlds of three steps: `three_steps`. What a mode adds is the width;
that of two sequences that compete for rows is enumerated in test_enumeration.py. The faulty variants live here only.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.config import SamplingParams
from slipstream.constraint import Constraint
from slipstream.decide.controller import Problem, Rule, decide_budget, decide_widths
from slipstream.decide.cost import LinearCost, StepCost, TableCost
from slipstream.decide.survival import SurvivalModel
from slipstream.models.drafters import BlockDrafter
from slipstream.ops.noise import Purpose
from slipstream.ops.rank import rank
from slipstream.ops.reject import DraftLaw, draft_sample, reject
from slipstream.ops.shape_logits import Histories
from slipstream.structured import StructuredOutput
from tests.lossless.laws import law_from
from tests.lossless.test_enumeration import EXACT, _one_hot_residual, _only_drawn
from tests.lossless.three_steps import DRAFTERS, Outcomes, S, States, Tally, V, Walk, Widths, plain_joint

VISIBLE = 1e-3  # total variation of the joint law; exact variants are at 1e-15

# -------------------------------------------------------------------------------------------------------------- modes


def _linear(row_ms: float) -> StepCost:
    return LinearCost(0.2, row_ms)


def _table(row_ms: float) -> StepCost:
    return TableCost((1, 2, 3), (1.9, 1.9 + row_ms, 1.9 + 2.2 * row_ms))


STAIRS = TableCost((1, 2, 3), (2.0, 4.4, 4.5))  # not convex: two drafts may pay where the first alone does not
ONE = np.ones(1, dtype=np.int64)
SURVIVAL = SurvivalModel(S, learns=False)


def _problem(rule: Rule, survival: np.ndarray, cost: StepCost, unknown: bool = False) -> Problem:
    return Problem(
        rule=rule, survival_np=survival, unknown_np=np.array([unknown]), caps_np=S * ONE, kv_np=ONE, given_np=ONE,
        num_emitting=1, cost=cost, draft_ms=0.5,
    )  # fmt: skip


def _each(decide: Callable[[np.ndarray], int], *columns: Tensor) -> Tensor:
    """decide(row) for every row [R] of the columns side by side; once for those that are equal."""
    rows = torch.cat([column.double().view(len(column), -1) for column in columns], dim=1)
    distinct, index = torch.unique(rows, dim=0, return_inverse=True)
    return torch.tensor([decide(row) for row in distinct.numpy()])[index]


class Static:
    """Every draft, whatever was said of it."""

    signal, num_stored = "none", 1

    def draft_length(self, step: int) -> int:
        return S

    def widths(self, step: int, states: States, signal: Tensor) -> Tensor:
        return torch.full((len(signal),), signal.shape[1])

    def stored(self, signal: Tensor) -> Tensor:
        return torch.zeros(len(signal), dtype=torch.int64)


class Trace(Static):
    """Draft lengths drawn by step, widths by step and by what was emitted before it."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._lengths = [S, *(1 + torch.randint(S, (2,), generator=generator)).tolist()]
        self._widths = torch.randint(S + 1, (3, 2000), generator=generator)
        self._widths[0, 0] = 1 + seed % S  # of one state alone, which should do something

    def draft_length(self, step: int) -> int:
        return self._lengths[step]

    def widths(self, step: int, states: States, signal: Tensor) -> Tensor:
        return self._widths[step, states.number].clamp(max=signal.shape[1])


@dataclass
class Adaptive(Static):
    """By this step's confidence."""

    rule: Rule
    cost: StepCost
    signal: str = "head"

    def widths(self, step: int, states: States, signal: Tensor) -> Tensor:
        return _each(lambda row: decide_widths(_problem(self.rule, _fresh(row), self.cost))[0], signal)


@dataclass
class Lag(Static):
    """By the confidence of the step before: what it decides is stored."""

    rule: Rule
    cost: StepCost
    signal: str = "drawn"
    num_stored = S + 2  # 0: nothing is known yet

    def widths(self, step: int, states: States, signal: Tensor) -> Tensor:
        return torch.where(states.stored > 0, states.stored - 1, self._decided(SURVIVAL.prior(ONE), unknown=True))

    def stored(self, signal: Tensor) -> Tensor:
        return 1 + _each(lambda row: self._decided(SURVIVAL.predict(_fresh(row), ONE)), signal)

    def _decided(self, survival: np.ndarray, unknown: bool = False) -> int:
        return int(decide_widths(_problem(self.rule, survival, self.cost, unknown))[0])


@dataclass
class LagBudget(Lag):
    """A total by the confidence of the step before, handed out by this one's: here to one sequence."""

    signal: str = "head"

    def widths(self, step: int, states: States, signal: Tensor) -> Tensor:
        total = super().widths(step, states, signal)
        return _each(
            lambda row: int(rank(torch.tensor(_fresh(row[1:])), torch.full((1,), S), int(row[0]))), total, signal
        )

    def _decided(self, survival: np.ndarray, unknown: bool = False) -> int:
        return decide_budget(_problem("budget", survival, self.cost, unknown))


def _fresh(signal: np.ndarray) -> np.ndarray:
    """[S] -> survival [1, S]"""
    return SURVIVAL.fresh(signal[None], ONE)


MODES: dict[str, Callable[[float], Widths]] = {  # by what a row costs
    "static": lambda _: Static(),
    "widths drawn": lambda row_ms: Trace(int(row_ms * 1000)),
    "adaptive, linear": lambda row_ms: Adaptive("greedy", _linear(row_ms)),
    "adaptive, table": lambda row_ms: Adaptive("hull", _table(row_ms)),
    "lag, linear": lambda row_ms: Lag("greedy", _linear(row_ms)),
    "lag, table": lambda row_ms: Lag("widths", _table(row_ms)),
    "lag-budget": lambda row_ms: LagBudget("budget", _table(row_ms)),
}
WISHES: dict[str, dict[str, Any]] = {  # in numbers that fp32, which the device keeps them in, holds exactly
    "plain": {},
    "top-p": {"top_p": 0.875},
    "top-k": {"top_k": 2},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.375, "presence_penalty": 0.5},
    "bias": {"logit_bias": {0: 0.75, 1: -0.5}},
    "grammar": {"structured": StructuredOutput(grammar="root ::= [a-c]+")},  # the automaton of `three_steps`
    "all": {
        "temperature": 1.5, "top_p": 0.984375, "repetition_penalty": 1.25, "frequency_penalty": 0.25, "min_tokens": 2,
        "presence_penalty": -0.5, "logit_bias": {1: 0.5}, "min_p": 0.015625,
    },
}  # fmt: skip
DRAWS = {"drawn": True, "taken": False}


def asked(wish: str) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **WISHES[wish]})


def says(widths: Widths, drafter: str) -> Widths:
    """With the confidence that there is: DFlash has no head, look-up nothing else."""
    if drafter == "ngram" and widths.signal != "none":
        widths.signal = "head"
    elif drafter == "dflash" and widths.signal == "head":
        widths.signal = "peak"
    return widths


def _cases() -> list[Any]:
    """All of them are slow together; the quick ones have every drafter, wish and mode at least once."""
    drafters, draws, wishes, modes = list(DRAFTERS), list(DRAWS), list(WISHES), list(MODES)
    turns = [(n % 6, (n + n // 6) % 2, (n + 3 * (n // 6)) % len(wishes), n % len(modes)) for n in range(21)]
    quick = {(drafters[a], draws[b], wishes[c], modes[d]) for a, b, c, d in turns}
    cases = [case for case in product(DRAFTERS, DRAWS, WISHES, MODES) if case[:2] != ("ngram", "drawn")]
    return [pytest.param(*case, id="-".join(case), marks=[] if case in quick else [pytest.mark.slow]) for case in cases]


def _is_conclusive(mode: str, tally: Tally) -> bool:
    if not tally.accepted or not tally.rejected:
        return False
    return mode == "static" or (tally.pruned > 0 and len(tally.widths) > 1)


@pytest.mark.parametrize(("drafter", "draws", "wish", "mode"), _cases())
def test_every_drafter_and_mode_emits_the_law_of_plain_decoding(drafter: str, draws: str, wish: str, mode: str) -> None:
    """At every price that is tried, until one lets this drafter's confidence decide."""
    low, row_ms, high = 0.05, 0.7, 50.0
    for _ in range(12):
        walk = Walk(drafter, asked(wish), says(MODES[mode](row_ms), drafter), sample_drafts=DRAWS[draws])
        assert float((walk.law() - plain_joint(asked(wish))).abs().max()) < EXACT
        if _is_conclusive(mode, walk.tally):
            return
        low, high = (low, row_ms) if walk.tally.pruned else (row_ms, high)
        row_ms = (low * high) ** 0.5
    pytest.fail(f"inconclusive: {walk.tally}")


@pytest.mark.parametrize("drafter", ["dflash", "vanilla", "rnn", "reduced"])
def test_laws_in_bf16_are_exact_as_well(drafter: str) -> None:
    """Drafts are drawn from the logits that are kept, as they were rounded, Markov bias and all."""
    base_logits = BlockDrafter.base_logits
    walk = Walk(drafter, asked("plain"), says(Static(), drafter))
    with patch.object(BlockDrafter, "base_logits", lambda *given: base_logits(*given).bfloat16()):
        assert float((walk.law() - plain_joint(asked("plain"))).abs().max()) < EXACT
    assert walk.tally.accepted and walk.tally.rejected
    assert walk.law_dtypes == {torch.bfloat16}


# ---------------------------------------------------------------------------------------------------------- faults


def _in_place_of(name: str, fault: Callable[..., Any]) -> AbstractContextManager[Any]:
    return patch(f"slipstream.verify.accept.{name}", fault)


def _scored_at_another_temperature(logits: Tensor, heat: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, DraftLaw]:
    drawn, _ = draft_sample(logits, heat, *rest, **options)
    return drawn, law_from((logits / (2 * heat[:, None])).softmax(-1)[:, None])


def _taken_but_scored_as_drawn(logits: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, DraftLaw]:
    drawn, law = draft_sample(logits, *rest, **{**options, "sample": False})
    return drawn, replace(law, is_drawn=torch.ones_like(law.is_drawn))


def _scored_in_draft_ids(logits: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, DraftLaw]:
    """The columns of a reduced vocabulary stand where they are, not at the ids that they stand for."""
    drawn, _ = draft_sample(logits, *rest, **options)
    return drawn, law_from(
        torch.cat([logits.softmax(-1), logits.new_zeros(len(logits), V - logits.shape[1])], dim=1)[:, None]
    )


def _scored_unrounded(logits: Tensor, heat: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, DraftLaw]:
    """Draws from rounded logits (to halves, so that it shows), and keeps those that they were rounded from."""
    drawn, _ = draft_sample((2 * logits).round() / 2, heat, *rest, **options)
    return drawn, law_from((logits / heat[:, None]).softmax(-1)[:, None])


def _uncertain(drafts: Tensor, law: None, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Look-up scored as if its drafts were drawn evenly from all tokens."""
    assert law is None
    return reject(drafts, law_from(torch.full((*drafts.shape, V), 1 / V, dtype=target.dtype)), target, *rest)


def _sees(num_drafts: int) -> Callable[..., Histories]:
    """Rows that see other drafts than those before them."""
    return lambda *known: Histories(*known[:-1], torch.full_like(known[-1], num_drafts))


def _one_noise(purpose: Purpose, anchor: Tensor, offset: Tensor) -> tuple[Purpose, Tensor, Tensor]:
    return Purpose.ACCEPT, anchor, offset


@dataclass(frozen=True)
class Fault:
    drafter: str
    mode: Callable[[], Widths] = Static
    wish: str = "plain"
    draws: str = "drawn"
    patch: tuple[str, Callable[..., Any]] | None = None  # of the module that accepts
    outcomes: Callable[[], Outcomes] = Outcomes

    def error(self) -> float:
        """Total variation from the law of plain decoding."""
        params = asked(self.wish)
        walk = Walk(
            self.drafter, params, says(self.mode(), self.drafter), sample_drafts=DRAWS[self.draws],
            outcomes=self.outcomes(),
        )  # fmt: skip
        with nullcontext() if self.patch is None else _in_place_of(*self.patch):
            return float((walk.law() - plain_joint(params)).abs().sum() / 2)


FAULTS = {
    "one-hot residual for drawn drafts": Fault("vanilla", patch=("reject", _one_hot_residual)),
    "only q of the drawn token kept": Fault("gated", patch=("reject", _only_drawn)),
    "drafts scored at another temperature": Fault(
        "rnn", patch=("draft_sample", _scored_at_another_temperature), wish="penalties"
    ),
    "drafts taken, but scored as drawn": Fault("dflash", patch=("draft_sample", _taken_but_scored_as_drawn)),
    "drawn from rounded logits, scored by others": Fault("vanilla", patch=("draft_sample", _scored_unrounded)),
    "q of a reduced vocabulary in draft ids": Fault("reduced", patch=("draft_sample", _scored_in_draft_ids)),
    "looked up, but scored as drawn": Fault("ngram", draws="taken", patch=("reject", _uncertain)),
    "one noise for draft, acceptance and residual": Fault("vanilla", outcomes=lambda: Outcomes(_one_noise)),
    "widths from this step's drawn": Fault("rnn", mode=lambda: Adaptive("greedy", _linear(0.7), "drawn")),
    "widths on the hull from this step's drawn": Fault("gated", mode=lambda: Adaptive("hull", _table(0.7), "drawn")),
    "the best of all budgets of this step": Fault("gated", mode=lambda: Adaptive("widths", STAIRS)),
    "penalties that see no drafts": Fault("vanilla", wish="penalties", patch=("Histories", _sees(0))),
    "penalties that see all drafts": Fault("ngram", wish="penalties", draws="taken", patch=("Histories", _sees(S))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_seen(fault: str) -> None:
    assert FAULTS[fault].error() > VISIBLE


def test_a_draw_that_another_step_could_name_is_an_error() -> None:
    """Drafts named by the position that they are for: what a step throws away, the next one would draw again."""
    fault = Fault(
        "vanilla", outcomes=lambda: Outcomes(lambda purpose, anchor, offset: (purpose, anchor + offset, offset))
    )
    with pytest.raises(AssertionError, match="another step"):
        fault.error()


def _without_drafts(constraint: Constraint, drafts: Sequence[int], masks_np: np.ndarray) -> None:
    """Every place has the mask of the first."""
    CORRECT_FILL(constraint, [], masks_np)
    masks_np[:] = masks_np[0]


def _one_late(constraint: Constraint, drafts: Sequence[int], masks_np: np.ndarray) -> None:
    CORRECT_FILL(constraint, drafts, masks_np)
    masks_np[1:] = masks_np[:-1].copy()


CORRECT_FILL = Constraint.fill


@pytest.mark.parametrize("fault", [_without_drafts, _one_late])
def test_masks_that_do_not_follow_the_drafts_are_seen(fault: Callable[..., None]) -> None:
    """They let something through; the next step finds it in the answer, and the request fails in place of a draw."""
    with (
        patch.object(Constraint, "fill", fault),
        pytest.raises(AssertionError, match="a draw is missing, or not a law"),
    ):
        Fault("vanilla", wish="grammar").error()
