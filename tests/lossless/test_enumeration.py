"""Rejection sampling keeps the target's joint law in every mode, exactly; and the check sees every known way to fail.

The ops, the controller and the ranking are the engine's own; `enumeration` runs them in all worlds of two steps. The
faulty variants live here only: each one breaks a rule that the engine keeps, and must change the law visibly.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.decide.controller import Problem, Rule, decide_budget, decide_widths
from slipstream.decide.cost import LinearCost, StepCost, TableCost
from slipstream.decide.survival import SurvivalModel
from slipstream.ops.noise import Purpose, RandomSource
from slipstream.ops.rank import rank
from slipstream.ops.reject import DraftLaw, reject
from slipstream.ops.survival import fresh_survival
from tests.lossless.enumeration import F64, Decide, S, Sequence, Signals, Tally, Toy, Variant, emitted_law, target_joint
from tests.lossless.laws import law_from

EXACT = 1e-9
VISIBLE = 1e-4  # the smallest effect of a fault on any one of the joint probabilities; exact variants are at 1e-16

LINEAR = LinearCost(1.2, 0.8)
TABLE = TableCost((2, 3, 4, 6), (2.0, 2.9, 3.6, 5.2))
STAIRS = TableCost((2, 4, 6), (2.0, 3.2, 4.1))  # not convex: the best budget may lie behind a worse one
CLIFF = TableCost((2, 6), (2.0, 4.5))  # all drafts or none
CLASSES = np.ones(2, dtype=np.int64)  # both sampled
SURVIVAL = SurvivalModel(S, learns=False)
IDENTITY = torch.tensor([1.0, 0.0], dtype=F64).expand(2, S, 2)  # calibration that changes nothing

# --------------------------------------------------------------------------------------------------------------- toys


def _rows(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=F64)


TWO = Toy(
    target=_rows((0.55, 0.45), (0.25, 0.75)),
    drafter=_rows((0.85, 0.15), (0.42, 0.58)),
    head=_rows((0.72, 0.56), (0.93, 0.41)),
)
THREE = Toy(
    target=_rows((0.3, 0.3, 0.4), (0.5, 0.2, 0.3), (0.1, 0.65, 0.25)),
    drafter=_rows((0.6, 0.3, 0.1), (0.15, 0.45, 0.4), (0.2, 0.1, 0.7)),
    head=_rows((0.75, 0.6, 0.5), (0.95, 0.4, 0.7)),
)
TOYS = {
    "V=2": TWO,
    "V=3": THREE,
    "V=2 greedy drafts": replace(TWO, sample_drafts=False),
    "V=3 greedy drafts": replace(THREE, sample_drafts=False),
    "V=2 one request at T=0, one at T=0.6": replace(TWO, temperature=(0.0, 0.6)),
    "V=3 drafter knows 2 ids": replace(
        THREE, drafter=THREE.drafter[:, [0, 2]].softmax(-1), token_ids=torch.tensor([0, 2])
    ),
}

# -------------------------------------------------------------------------------------------------------------- modes


def _survival(signals: NDArray[np.float64]) -> NDArray[np.float64]:
    return SURVIVAL.fresh(signals, CLASSES)


def _problem(rule: Rule, survival: NDArray[np.float64], unknown: NDArray[np.bool_], cost: StepCost) -> Problem:
    ones = np.ones(2, dtype=np.int64)
    return Problem(
        rule=rule, survival_np=survival, unknown_np=unknown, caps_np=S * ones, kv_np=ones, given_np=ones,
        num_emitting=2, cost=cost, draft_ms=0.5,
    )  # fmt: skip


def _lagged_survival(stored: tuple[Signals, Signals]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    unknown = np.array([s is None for s in stored])
    known = _survival(np.array([s or (0.0,) * S for s in stored]))
    return np.where(unknown[:, None], SURVIVAL.prior(CLASSES), SURVIVAL.predict(known, CLASSES)), unknown


def _static(stored: tuple[Signals, Signals], fresh: NDArray[np.float64]) -> tuple[int, int]:
    return S, S


def _adaptive(rule: Rule, cost: StepCost) -> Decide:
    def decide(stored: tuple[Signals, Signals], fresh: NDArray[np.float64]) -> tuple[int, int]:
        return tuple(decide_widths(_problem(rule, _survival(fresh), np.zeros(2, dtype=np.bool_), cost)).tolist())

    return decide


def _lag(rule: Rule, cost: StepCost) -> Decide:
    def decide(stored: tuple[Signals, Signals], fresh: NDArray[np.float64]) -> tuple[int, int]:
        return tuple(decide_widths(_problem(rule, *_lagged_survival(stored), cost)).tolist())

    return decide


def _lag_budget(cost: StepCost) -> Decide:
    def decide(stored: tuple[Signals, Signals], fresh: NDArray[np.float64]) -> tuple[int, int]:
        total = decide_budget(_problem("budget", *_lagged_survival(stored), cost))
        survival = fresh_survival(torch.from_numpy(fresh), IDENTITY, torch.ones(2, dtype=torch.bool))
        return tuple(rank(survival, torch.full((2,), S), total).tolist())

    return decide


MODES: dict[str, tuple[Variant, tuple[str, ...]]] = {  # with the signals that keep it exact when drafts are sampled
    "off": (Variant(None), ("head",)),
    "static": (Variant(_static), ("head",)),
    "adaptive, linear": (Variant(_adaptive("greedy", LINEAR)), ("head", "peak")),
    "adaptive, table": (Variant(_adaptive("hull", TABLE)), ("head", "peak")),
    "lag, linear": (Variant(_lag("greedy", LINEAR), lagged=True), ("head", "peak", "drawn")),
    "lag, table": (Variant(_lag("widths", TABLE), lagged=True), ("head", "peak", "drawn")),
    "lag-budget, linear": (Variant(_lag_budget(LINEAR), lagged=True), ("head", "peak")),
    "lag-budget, table": (Variant(_lag_budget(TABLE), lagged=True), ("head", "peak")),
}
FIRST_STEP = (Sequence(0), Sequence(1))
LATER_STEP = (Sequence(1, stored=(0.9, 0.5)), Sequence(0, stored=(0.6, 0.8)))


def _error(toy: Toy, variant: Variant, start: tuple[Sequence, Sequence], tally: Tally | None = None) -> float:
    return float((emitted_law(toy, variant, start, tally) - target_joint(toy, start)).abs().max())


def _cases() -> list[Any]:
    slow = {("lag, table", "V=3"), ("lag-budget, linear", "V=3")}  # seconds each, and near to their twins
    return [
        pytest.param(*case, id="-".join(case), marks=[pytest.mark.slow] if case in slow else [])
        for case in product(MODES, TOYS)
    ]


@pytest.mark.parametrize(("mode", "toy"), _cases())
def test_every_mode_emits_the_target_law(mode: str, toy: str) -> None:
    variant, signals = MODES[mode]
    starts = (FIRST_STEP, LATER_STEP) if variant.lagged else (FIRST_STEP,)
    if toy.startswith("V=3"):  # costly: one signal, and the start in which both steps prune
        signals, starts = signals[:1], starts[-1:]
    elif not TOYS[toy].sample_drafts:
        signals = ("head", "peak", "drawn")  # a draft that is not drawn cannot leak
    tally = Tally()
    for signal in signals:
        for start in starts:
            assert _error(TOYS[toy], replace(variant, signal=signal), start, tally) < EXACT, (signal, start)
    if mode != "off":
        assert tally.accepted > 0
        assert tally.rejected > 0
    if mode not in ("off", "static"):
        assert tally.pruned > 0, "inconclusive: every draft was verified"
        assert len(tally.widths) > 1, "inconclusive: the width never moved"


# ---------------------------------------------------------------------------------------------------------- faults


def _one_hot_residual(
    drafts: Tensor, law: DraftLaw, target: Tensor, widths: Tensor, seed: Tensor, anchor: Tensor, source: RandomSource
) -> tuple[Tensor, Tensor]:
    """Accepts by p / q, but draws the replacement as if the draft had been certain."""
    own = law.of(drafts).reshape(-1)

    class AcceptByRatio:
        categorical = staticmethod(source.categorical)

        @staticmethod
        def bernoulli(prob: Tensor, *name: Tensor) -> Tensor:
            return source.bernoulli((prob / own).clamp(max=1), *name)  # the op divided by 1

    return reject(drafts, None, target, widths, seed, anchor, AcceptByRatio())


def _only_drawn(drafts: Tensor, law: DraftLaw, target: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    """Keeps the probability of the drawn token and nothing else."""
    kept = torch.zeros(*drafts.shape, target.shape[-1], dtype=target.dtype)
    kept.scatter_(2, drafts[..., None], law.of(drafts)[..., None])
    return reject(drafts, law_from(kept), target, *rest)


class _DraftsKeyedByPosition:
    """Names a draft by the position it is for, whichever step draws it."""

    def __init__(self, source: RandomSource) -> None:
        self._source = source

    def bernoulli(self, prob: Tensor, seed: Tensor, anchor: Tensor, offset: Tensor, purpose: Purpose) -> Tensor:
        return self._source.bernoulli(prob, seed, anchor, offset, purpose)

    def categorical(self, prob: Tensor, seed: Tensor, anchor: Tensor, offset: Tensor, purpose: Purpose) -> Tensor:
        if purpose is Purpose.DRAFT:
            anchor, offset = anchor + offset, torch.zeros_like(offset)
        return self._source.categorical(prob, seed, anchor, offset, purpose)


def _budget_from_fresh(cost: StepCost) -> Decide:
    def decide(stored: tuple[Signals, Signals], fresh: NDArray[np.float64]) -> tuple[int, int]:
        survival = _survival(fresh)
        total = decide_budget(_problem("budget", survival, np.zeros(2, dtype=np.bool_), cost))
        return tuple(rank(torch.from_numpy(survival), torch.full((2,), S), total).tolist())

    return decide


LOOKS_BACK = Variant(_lag("widths", CLIFF), signal="drawn", lagged=True)
FAULTS: dict[str, tuple[Toy, Variant]] = {  # two ids leave a residual of one token, whatever it is made from
    "one-hot residual for sampled drafts": (THREE, Variant(_static, reject=_one_hot_residual)),
    "only q of the drawn token kept": (THREE, Variant(_static, reject=_only_drawn)),
    "adaptive selects by drawn": (TWO, Variant(_adaptive("greedy", LINEAR), signal="drawn")),
    "adaptive on the hull selects by drawn": (TWO, Variant(_adaptive("hull", TABLE), signal="drawn")),
    "lag-budget selects by drawn": (TWO, Variant(_lag_budget(LINEAR), signal="drawn", lagged=True)),
    "adaptive takes the best of all budgets": (TWO, Variant(_adaptive("widths", STAIRS))),
    "lag-budget takes its budget from fresh survivals": (TWO, Variant(_budget_from_fresh(STAIRS))),
    "lag with drafts keyed by position": (TWO, replace(LOOKS_BACK, wrap=_DraftsKeyedByPosition)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_seen(fault: str) -> None:
    toy, variant = FAULTS[fault]
    assert _error(toy, variant, FIRST_STEP) > VISIBLE


def test_keying_drafts_by_position_harms_only_where_the_width_looks_back() -> None:
    static = Variant(_static, signal="drawn", lagged=True, wrap=_DraftsKeyedByPosition)
    assert _error(TWO, static, FIRST_STEP) < EXACT
    assert _error(TWO, LOOKS_BACK, FIRST_STEP) < EXACT


def test_a_draft_distribution_cut_to_the_drawn_token_is_biased_as_predicted() -> None:
    """q = (.6, .3, .1), p = (.3, .3, .4): the first token would come out as (.300, .429, .271)."""
    toy = Toy(target=_rows((0.3, 0.3, 0.4)).repeat(3, 1), drafter=_rows((0.6, 0.3, 0.1)).repeat(3, 1), head=THREE.head)

    def first_token(variant: Variant) -> Tensor:
        return emitted_law(toy, variant, FIRST_STEP).sum(1).view(3, -1).sum(1)

    torch.testing.assert_close(first_token(Variant(_static)), _rows((0.3, 0.3, 0.4))[0])
    biased = _rows((0.3, 3 / 7, 19 / 70))[0]
    torch.testing.assert_close(first_token(Variant(_static, reject=_only_drawn)), biased)


def test_keeping_a_draft_for_its_own_probability_is_biased_as_predicted() -> None:
    """q = (.9, .1), p = (.5, .5), a draft is kept if its own q is at least .5: emits (.55, .45)."""
    toy = Toy(target=_rows((0.5, 0.5)).repeat(2, 1), drafter=_rows((0.9, 0.1)).repeat(2, 1), head=TWO.head)

    def keep(stored: tuple[Signals, Signals], fresh: NDArray[np.float64]) -> tuple[int, int]:
        one, two = (fresh[:, 0] >= 0.5).astype(int).tolist()
        return one, two

    first = emitted_law(toy, Variant(keep, signal="drawn"), FIRST_STEP).sum(1).view(2, -1).sum(1)
    torch.testing.assert_close(first, _rows((0.55, 0.45))[0])
