"""Policies: how a step's draft length and verify widths are chosen. One object per engine, made by `make_policy`.

The engine calls, per step and in this order, `draft_length`, `times`, `observe` (once the step's confidence is on the
host), `decide`, `learn` (once its result is) and perhaps `timed`; `waits_for` tells it whether `decide` needs this step's
confidence, the last step's, or none. What need not happen in every step does not: lessons, the draft length and the
correction of the cost model wait a few steps each. Nothing here knows a clock or a device, and the engine never asks which
mode a policy is. Text does not depend on any of it. Letters in shapes: B sequences, D of them decode, S positions, d the
draft length.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipstream.config import Signal
from slipstream.decide import controller, record
from slipstream.decide.confidence import Confidence, ConfidenceStore
from slipstream.decide.controller import AnyInts, Candidates, Problem
from slipstream.decide.cost import CostModel, StepCost
from slipstream.decide.going_rate import GoingRate
from slipstream.decide.lessons import Lessons, Sighting
from slipstream.decide.pace import FREE_EVERY, FREE_MS, FREE_SEEN, DraftLengths, Timing
from slipstream.decide.record import DecisionRecord
from slipstream.decide.survival import ALL_GREEDY, Classes, SurvivalModel, survival_of
from slipstream.plan import Decision, DraftReport, Int32s, StepPlan, StepResult

Floats: TypeAlias = NDArray[np.float64]
Float32s: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]
Number = TypeVar("Number", bound=np.generic)
WaitsFor: TypeAlias = Literal["nothing", "lagged", "fresh"]

NO_COST_MODEL = "no cost model: every draft is verified"
NEARLY_FREE = "drafts are nearly free: every one is verified"


class Policy(Protocol):
    """One of the engine's seams."""

    @property
    def waits_for(self) -> WaitsFor:
        """Which confidence `decide` needs: none, the previous step's, or this step's."""

    @property
    def signal(self) -> Signal | Literal["none"]:
        """What the drafter must report as confidence; "none" where nobody reads it."""

    @property
    def calibration_np(self) -> Float32s:
        """[2 classes, S, 2] (scale, shift) for the device, see `SurvivalModel.calibration_np`."""

    def draft_length(self, plan: StepPlan) -> int:
        """d for the step, before its draft is launched; `plan.draft_length` is S then. Called once per step in which
        somebody may have a draft."""

    def observe(self, plan: StepPlan, report: DraftReport) -> None:
        """Take in the confidence of `plan`'s draft. Rows outside `plan.teaches_np` teach nothing."""

    def decide(self, plan: StepPlan) -> Decision:
        """What the target verifies in this step."""

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        """Take in what became of the drafts of `plan`. Rows outside `plan.teaches_np` teach nothing."""

    def times(self, plan: StepPlan) -> bool:
        """Whether `timed` is wanted for this step. Called once per step, before its draft."""

    def timed(self, plan: StepPlan, decision: Decision, measured_ms: float) -> None:
        """Take in how long the whole step took, draft included."""


def with_draft_length(plan: StepPlan, policy: Policy) -> StepPlan:
    """The plan with this step's draft length d, which lagged data chose, and caps within it; 0 where nobody may have any."""
    length = policy.draft_length(plan) if plan.caps_np.any() else 0
    if length == plan.draft_length:  # S, which caps never exceed
        return plan
    return replace(plan, draft_length=length, caps_np=np.minimum(plan.caps_np, np.int32(length)))


class FullWidth:
    """Verifies every draft (static); with S = 0 there are none (off)."""

    waits_for: WaitsFor = "nothing"

    def __init__(self, num_drafts: int, signal: Signal | Literal["none"] = "none") -> None:
        """signal: what is drafted along though nobody reads it here, as the policy that comes after this one will."""
        self.num_drafts = num_drafts
        self.signal = signal
        self._calibration_np = SurvivalModel(num_drafts).calibration_np

    @property
    def calibration_np(self) -> Float32s:
        return self._calibration_np

    def draft_length(self, plan: StepPlan) -> int:
        return self.num_drafts if plan.num_decode else 0

    def observe(self, plan: StepPlan, report: DraftReport) -> None:
        pass

    def decide(self, plan: StepPlan) -> Decision:
        return _in_full(_caps(plan))

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        pass

    def times(self, plan: StepPlan) -> bool:
        return False

    def timed(self, plan: StepPlan, decision: Decision, measured_ms: float) -> None:
        pass


class Adaptive:
    """Prunes widths by confidence under a cost model: from this step's confidence, the last one's, or as a budget."""

    def __init__(
        self,
        *,
        num_drafts: int,
        waits_for: Literal["lagged", "fresh"],
        budget: bool,
        signal: Signal,
        cost: CostModel | None,
        survival: SurvivalModel,
        causal: bool = False,
        min_gain: float = 0.0,
        on_record: Callable[[DecisionRecord], None] | None = None,
    ) -> None:
        self.num_drafts = num_drafts  # S
        self.cost = cost
        self.survival = survival
        self.store = ConfidenceStore(num_drafts)
        self._waits_for: WaitsFor = waits_for
        self._budget = budget
        self._signal = signal
        self._causal = causal
        self._min_gain = min_gain
        self._on_record = on_record
        self._lengths = DraftLengths(num_drafts)
        self._going_rate = GoingRate()
        self._expected: _Expected | None = None  # memo of `_expect`, until more is known
        self._lessons = Lessons()
        self._timing = Timing()
        self._is_free = False  # nothing was chosen in the last decision, because all drafts cost next to nothing

    @property
    def waits_for(self) -> WaitsFor:
        return self._waits_for

    @property
    def signal(self) -> Signal:
        return self._signal

    @property
    def calibration_np(self) -> Float32s:
        return self.survival.calibration_np

    # ------------------------------------------------------------------------------------------------------ deciding

    def draft_length(self, plan: StepPlan) -> int:
        if plan.num_decode == 0:
            return 0
        if self.cost is None:
            return self.num_drafts
        lengths, allowed = self._lengths, int(np.add.reduce(plan.caps_np))
        if lengths.probes(plan.num_decode):
            return lengths.probed()
        return lengths.kept() if lengths.keeps(allowed) else lengths.chosen(self._best_length(plan, self.cost), allowed)

    def _best_length(self, plan: StepPlan, cost: CostModel) -> int:
        """The size with the best expected rate, each at its own best budget, as far as the last step lets one see."""
        expected = self._expect(plan)
        past_tokens, past_ms = self._going_rate.past(plan.num_decode)
        rates = controller.best_rate_by_length(
            expected.rank(np.minimum(plan.caps_np, np.int32(self.num_drafts))),
            expected.kv_np,
            expected.given_np,
            expected.num_emitting + past_tokens,
            step_cost(plan, cost),
            {size: past_ms + cost.draft_ms(size, plan.num_decode) for size in self._lengths.sizes},
        )
        return max(rates, key=rates.__getitem__)  # of equals the shortest

    def decide(self, plan: StepPlan) -> Decision:
        caps = _caps(plan)
        if self.cost is None:
            return _in_full(caps, NO_COST_MODEL)
        may_draft = bool(np.count_nonzero(caps))
        self._is_free = may_draft and are_nearly_free(plan, caps, self.cost)
        if self._is_free:
            decision = _in_full(caps, NEARLY_FREE)
        else:
            decision = self._decided(plan, caps, self.cost) if may_draft else _in_full(caps)
        if plan.num_decode and self._going_rate.counts(plan.step):
            self._going_rate.price(plan, expected_ms(plan, decision, self.cost))
        return decision

    def _decided(self, plan: StepPlan, caps: Int32s, cost: CostModel) -> Decision:
        fresh = self._waits_for == "fresh"
        expected = self._see(plan) if fresh else self._expect(plan)
        price = step_cost(plan, cost)
        past_tokens, past_ms = self._going_rate.past(plan.num_decode)
        causal = self._causal and fresh and plan.any_sampled
        rule = controller.rule_for(price, budget=self._budget, causal=causal)
        decided = record.decide(
            plan.step,
            Problem(
                rule=rule,
                survival_np=expected.survival_np,
                unknown_np=expected.unknown_np,
                caps_np=caps,
                kv_np=expected.kv_np,
                given_np=expected.given_np,
                num_emitting=expected.num_emitting + past_tokens,
                cost=price,
                draft_ms=past_ms + cost.draft_ms(plan.draft_length, plan.num_decode),
                min_gain=self._min_gain,
            ),
            None if rule == "greedy" else expected.ranked_within(caps, plan.draft_length),
        )
        if self._on_record:
            self._on_record(decided)
        if decided.widths_np is not None:
            return Decision(widths_np=decided.widths_np.astype(np.int32), budget=None, caps_np=caps)
        assert decided.budget is not None
        if decided.budget == np.add.reduce(caps):  # nothing is left to hand out: the device need not rank
            return _in_full(caps)
        if np.count_nonzero(caps) == 1:  # nobody to rank against: its first drafts
            return Decision(widths_np=np.minimum(caps, np.int32(decided.budget)), budget=None, caps_np=caps)
        return Decision(widths_np=None, budget=decided.budget, caps_np=caps)

    def _expect(self, plan: StepPlan) -> "_Expected":
        """What the last step says of this one's `plan.draft_length` drafts, the prior where it says nothing.

        Nothing is known of a request that is new to its slot, and it verifies all. After steps without a draft nothing
        is known of anyone, yet the engine knows why it skipped: there the prior decides like any other survival, or a
        probing step would verify S drafts of every sequence just where that does not pay.
        """
        expected, model = self._expected, self.survival
        if expected is None or not expected.serves(plan, model.version):
            lagged, classes = self.store.lookup(plan), _classes(plan)
            survival = lagged.values_np
            if lagged.same_length is None or lagged.same_length < plan.draft_length:
                survival = model.extend(survival, lagged.same_length or lagged.lengths_np, classes)
            survival = model.predict(survival[:, : plan.draft_length], classes)
            survival = self._with_prior(plan, survival, lagged, classes)
            unknown = _over_all(plan, ~(lagged.known_np | lagged.stale_np))
            expected = self._expected = _Expected.of(plan, survival, unknown, lagged, model.version)
        return expected

    def _see(self, plan: StepPlan) -> "_Expected":
        """What the draft of this very step says; nothing is unknown once its report was observed."""
        own, classes = self.store.own(plan), _classes(plan)
        survival = self._with_prior(plan, own.values_np[:, : plan.draft_length], own, classes)
        return _Expected.of(plan, survival, _over_all(plan, ~own.known_np), own, self.survival.version)

    def _with_prior(self, plan: StepPlan, survival: Floats, found: Confidence, classes: Classes) -> Floats:
        """[B, d], 0 in prefill."""
        if found.same_length is None:
            prior = self.survival.prior(classes)[:, : plan.draft_length]
            survival = np.where(found.known_np[:, None], survival, prior)
        return _over_all(plan, survival)

    # ------------------------------------------------------------------------------------------------------ learning

    def observe(self, plan: StepPlan, report: DraftReport) -> None:
        """Makes survivals of what was said, for this decision or the next, and for lessons: they are made once.

        Teaching is left to `learn`, which is off the path from a draft to its decision. So no decision depends on its
        own step through what is learned, either.
        """
        if report.signal_np.size == 0 or not self._looks_at(plan):
            return
        expected, self._expected = self._expected, None
        lagged = expected.confidence if expected and expected.plan.is_same_step(plan) else self.store.lookup(plan)
        confidence = self.survival.confidence(report.signal_np, _classes(plan))
        survival = survival_of(confidence)
        self.store.put(plan, survival)
        self._lessons.see(Sighting(plan, confidence, survival, lagged))

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        """Teaches every few steps, see `lessons`; early ones at once."""
        if plan.num_decode:
            self._going_rate.count(plan, result)
            if plan.draft_length and self._looks_at(plan):
                self._lessons.hear(result)
        self._lessons.teach_when_due(self.survival)

    def _looks_at(self, plan: StepPlan) -> bool:
        """Whether the step is taken in: where nothing is chosen a part of them keeps what was learned up to date.

        Whoever decides by fresh confidence may choose again in this very step, and takes in all.
        """
        return not self._is_free or self._waits_for == "fresh" or plan.step % FREE_EVERY < FREE_SEEN

    def times(self, plan: StepPlan) -> bool:
        """A part of the steps corrects the cost model; not those in which the device may wait for the host."""
        return self.cost is not None and not plan.any_constrained and self._timing.is_due()

    def timed(self, plan: StepPlan, decision: Decision, measured_ms: float) -> None:
        """How many steps went by is told with it."""
        if self.cost is None:
            return
        kv = plan.context_upper_bound_np.astype(np.float64)
        rows = plan.num_given_np.astype(np.float64)
        if decision.widths_np is not None:
            rows += decision.widths_np
            kv_rows, num_rows = float(rows @ kv), int(np.add.reduce(rows))
        else:  # the device hands the budget out: take the mean context of those that may get some
            can = decision.caps_np > 0
            kv_rows = float(rows @ kv) + decision.num_draft_rows * (float(kv[can].mean()) if can.any() else 0.0)
            num_rows = int(np.add.reduce(rows)) + decision.num_draft_rows
        self.cost.observe(
            num_rows,
            measured_ms,
            kv_rows=kv_rows,
            kv=float(np.add.reduce(kv)),
            draft_length=plan.draft_length,
            num_sequences=plan.num_decode,
            mixed=plan.num_decode < plan.num_sequences,
            steps=self._timing.steps_since(),
        )
        if self._causal and not self._budget and plan.any_sampled:
            step_cost(plan, self.cost).hull()  # kept by the price; made here, a decision need not wait for it


@dataclass(slots=True, eq=False)
class _Expected:
    """Survivals that a plan is decided by, and what they were made of."""

    plan: StepPlan
    survival_np: Floats  # [B, plan.draft_length]
    unknown_np: Bools  # [B]
    confidence: Confidence
    version: int  # of the survival model
    kv_np: Ints  # [B]
    given_np: AnyInts  # [B]
    num_emitting: int
    _ranked: tuple[AnyInts, Candidates] | None = None  # with the caps [B] that they were ranked within

    @classmethod
    def of(
        cls, plan: StepPlan, survival_np: Floats, unknown_np: Bools, confidence: Confidence, version: int
    ) -> "_Expected":
        kv = plan.context_upper_bound_np.astype(np.int64)
        return cls(plan, survival_np, unknown_np, confidence, version, kv, plan.num_given_np, plan.num_emitting)

    def serves(self, plan: StepPlan, version: int) -> bool:
        """Whether it is of the same step, of as many drafts at least, and by all that is known now."""
        return self.plan.is_same_step(plan) and self.plan.draft_length >= plan.draft_length and self.version == version

    def rank(self, caps_np: AnyInts) -> Candidates:
        ranked = controller.rank_candidates(self.survival_np, caps_np)
        self._ranked = caps_np, ranked
        return ranked

    def ranked_within(self, caps_np: AnyInts, length: int) -> Candidates | None:
        """What is left of the ranking under caps that were cut to `length`; None if there is none, or other caps."""
        if self._ranked is None or np.count_nonzero(np.minimum(self._ranked[0], length) != caps_np):
            return None
        return self._ranked[1].cut(length)


def _over_all(plan: StepPlan, values: NDArray[Number]) -> NDArray[Number]:
    """[B, ...] from values of those that decode; nothing, 0, in prefill."""
    if plan.num_decode == plan.num_sequences:
        return values
    rows = np.zeros((plan.num_sequences, *values.shape[1:]), dtype=values.dtype)
    rows[: plan.num_decode] = values
    return rows


def _caps(plan: StepPlan) -> Int32s:
    """[B] most drafts per sequence; never more than were drafted, and none in prefill."""
    caps = np.minimum(plan.caps_np, np.int32(plan.draft_length))
    if plan.num_decode < plan.num_sequences:
        caps[plan.num_decode :] = 0
    return caps


def step_cost(plan: StepPlan, cost: CostModel) -> StepCost:
    """What the plan's rows are priced by."""
    return cost.step if plan.num_decode == plan.num_sequences else cost.mixed


def are_nearly_free(plan: StepPlan, caps_np: Int32s, cost: CostModel) -> bool:
    """Whether all drafts that may be verified lengthen the step by so little that the host had better not think of it."""
    price, given = step_cost(plan, cost), int(np.add.reduce(plan.num_given_np))
    extra_ms = price.ms_of_rows(given + int(np.add.reduce(caps_np))) - price.ms_of_rows(given)
    if price.c2:
        extra_ms += price.kv_ms(float(caps_np @ plan.context_upper_bound_np.astype(np.float64)), 0.0)
    return bool(extra_ms <= FREE_MS)


def expected_ms(plan: StepPlan, decision: Decision, cost: CostModel) -> float:
    """Of the step without the prompts in it; the drafts are priced at the mean context."""
    num_decode, step = plan.num_decode, cost.step
    ms = cost.draft_ms(plan.draft_length, num_decode) + step.ms_of_rows(num_decode + decision.num_draft_rows)
    if step.c2 or step.c3:
        kv = float(np.add.reduce(plan.context_upper_bound_np[:num_decode], dtype=np.int64))
        ms += step.kv_ms(kv * (1 + decision.num_draft_rows / num_decode), kv)
    return ms


def _classes(plan: StepPlan) -> Classes:
    """Of the sequences that decode."""
    if not plan.any_sampled:
        return ALL_GREEDY
    return plan.sampled_np[: plan.num_decode].astype(np.int64)


def _in_full(caps: Int32s, reason: str = "") -> Decision:
    return Decision(widths_np=caps, budget=None, caps_np=caps, reason=reason)
