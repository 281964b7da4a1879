"""Policies, driven as the engine drives them, with scripted confidence and outcomes.

`Drive` is the loop of an engine without a device: it makes plans for requests in slots, hands reports and results to the
policy in the order of the overlapped or the plain loop, and writes down what was decided.
"""

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from slipstream.config import SpeculativeConfig
from slipstream.decide import lessons, pace
from slipstream.decide import policy as policies
from slipstream.decide.calibration import Calibration
from slipstream.decide.cost import CostModel, DraftTimes, LinearCost, TableCost
from slipstream.decide.make import make_policy, resolve_signal
from slipstream.decide.policy import Adaptive, FullWidth
from slipstream.decide.record import DecisionRecord, replay
from slipstream.errors import ConfigError
from slipstream.lab.variants import Late, variant
from slipstream.plan import DraftReport, StepPlan, StepResult

S = 4
LINEAR = LinearCost(2.0, 0.8)
STAIRS = TableCost(rows=(4, 8, 16, 64), ms=(2.0, 2.2, 3.0, 9.0))
ADAPTIVE_MODES = ("adaptive", "lag", "lag-budget")


def made(mode, cost=LINEAR, *, num_drafts=S, draft_ms=0.0, learns=False, fixed_length=True, **other):
    names = set(SpeculativeConfig.__dataclass_fields__) & set(other)
    config = SpeculativeConfig.for_mode(mode, draft_model="scripted", **{name: other.pop(name) for name in names})
    model = None if cost is None else CostModel(cost, DraftTimes.constant(draft_ms))
    policy, _ = make_policy(config, num_drafts=num_drafts, cost=model, learns=learns, **other)
    if fixed_length and isinstance(policy, Adaptive):
        drafts_only(policy, num_drafts)
        policy._lengths._seen = pace.WARM_UP
    return policy


def drafts_only(policy, length):
    """From the next step on there is one draft length to choose."""
    policy._lengths.sizes = [length]
    policy._lengths._age = pace.CHOICE_SPACING


@dataclass
class Row:
    """A request in its slot."""

    slot: int
    uid: int
    generation: int = 1
    decode_steps: int = 0
    sampled: bool = False
    cap: int = 99
    given: int = 1
    prefill: bool = False
    kv: int = 100
    emits: bool = True
    teaches: bool = True


def plan_of(step, rows, draft_length=S):
    """A plan over `rows`, those that decode first."""
    assert [r.prefill for r in rows] == sorted(r.prefill for r in rows)
    column = lambda name, dtype: np.array([getattr(r, name) for r in rows], dtype=dtype)  # noqa: E731
    return StepPlan(
        step=step,
        num_decode=sum(not r.prefill for r in rows),
        draft_length=draft_length,
        slots_np=column("slot", np.int32),
        generations_np=column("generation", np.int32),
        uids_np=column("uid", np.int64),
        decode_steps_np=column("decode_steps", np.int32),
        num_given_np=column("given", np.int32),
        emits_np=column("emits", np.bool_),
        caps_np=np.array([0 if r.prefill else min(r.cap, draft_length) for r in rows], dtype=np.int32),
        context_np=column("kv", np.int32),
        context_upper_bound_np=column("kv", np.int32),
        sampled_np=column("sampled", np.bool_),
        teaches_np=column("teaches", np.bool_),
        admissions=(),
        page_writes_np=np.zeros((0, 3), np.int32),
        any_sampled=any(r.sampled for r in rows),
        any_top_k=False,
        any_top_p=False,
    )


def report_of(plan, confidence):
    """`confidence` broadcasts to [D, d]."""
    shape = (plan.num_decode, plan.draft_length)
    values = np.broadcast_to(np.asarray(confidence, dtype=np.float32), shape) if plan.num_decode else np.zeros(shape)
    return DraftReport(step=plan.step, signal_np=values.astype(np.float32))


def result_of(plan, widths, accepted):
    count = plan.num_sequences
    return StepResult(
        step=plan.step,
        widths_np=np.asarray(widths, dtype=np.int32),
        num_accepted_np=np.broadcast_to(np.asarray(accepted, dtype=np.int32), (count,)).copy(),
        token_ids_np=np.zeros((count, 1), np.int32),
        invalid_np=np.zeros(count, np.bool_),
    )


@dataclass
class Drive:
    """One turn of the loop per call of `step`, in the order of the overlapped loop, or of the plain one."""

    policy: object
    overlap: bool = True
    number: int = 0
    decisions: list = field(default_factory=list)
    lengths: list = field(default_factory=list)
    _previous: tuple | None = None  # plan, report, result of the step in flight

    def step(self, rows, confidence, accepts=lambda widths: 0):
        """`confidence` [D, S] or a function of the draft length; `accepts` makes accepted counts from widths."""
        plan = plan_of(self.number, rows, self.policy.num_drafts)
        lagged, fresh = self.policy.waits_for == "lagged", self.policy.waits_for == "fresh"
        if lagged:
            self._observe(self._previous)
        length = self.policy.draft_length(plan) if plan.num_decode else 0
        plan = replace(plan, draft_length=length, caps_np=np.minimum(plan.caps_np, length))
        confidence = np.broadcast_to(confidence, (plan.num_decode, self.policy.num_drafts))
        report = report_of(plan, confidence[:, :length]) if length else None
        flight = [plan, report, None]
        if fresh:
            self._collect(self._previous if self.overlap else None)
            self._observe(flight)
        decision = self.policy.decide(plan)
        widths = decision.widths_np if decision.widths_np is not None else np.zeros(len(rows), int)
        flight[2] = result_of(plan, widths, accepts(widths))
        if not self.overlap:
            self._collect(flight)
        elif not fresh:
            self._collect(self._previous)
        self._previous = flight
        for row in rows:
            row.decode_steps += not row.prefill
        self.number += 1
        self.lengths.append(length)
        self.decisions.append(decision)
        return decision

    def widths(self, rows, confidence, **other):
        return self.step(rows, confidence, **other).widths_np.tolist()

    def _observe(self, flight):
        if flight and flight[1] is not None:
            self.policy.observe(flight[0], flight[1])

    def _collect(self, flight):
        if flight:
            self.policy.learn(flight[0], flight[2])


def asks_for(width, length=S):
    """Confidence that any sensible price turns into just this width."""
    return np.where(np.arange(length) < width, 1.0, 0.0)


# ------------------------------------------------------------------------------------------------------------ fixed ones


def test_full_width_verifies_what_it_may():
    policy = made("static")
    assert isinstance(policy, FullWidth)
    assert policy.waits_for == "nothing"
    rows = [Row(0, 1), Row(1, 2, cap=2), Row(2, 3, prefill=True, given=9)]
    assert Drive(policy).widths(rows, 0.0) == [S, 2, 0]
    assert policy.calibration_np.shape == (2, S, 2)


def test_off_drafts_nothing():
    policy, reasons = make_policy(SpeculativeConfig(), num_drafts=0)
    drive = Drive(policy)
    assert drive.widths([Row(0, 1), Row(1, 2)], np.zeros((2, 0))) == [0, 0]
    assert drive.lengths == [0]
    assert reasons == []


@pytest.mark.parametrize("mode", ADAPTIVE_MODES)
def test_without_a_cost_model_nothing_is_pruned_and_it_is_said(mode, caplog):
    config = SpeculativeConfig.for_mode(mode, draft_model="scripted", cost_model="none")
    policy, reasons = make_policy(config, num_drafts=S)
    drive = Drive(policy)
    for _ in range(20):
        decision = drive.step([Row(0, 1), Row(1, 2, cap=1)], np.zeros((2, S)))
        assert decision.widths_np.tolist() == [S, 1]
        assert decision.reason == policies.NO_COST_MODEL
    assert ("cost_model", None, policies.NO_COST_MODEL) in reasons
    assert f"{policies.NO_COST_MODEL}; mode {mode}" in caplog.text
    assert drive.lengths == [S] * 20


def test_modes_wait_for_what_their_name_says():
    assert [made(mode).waits_for for mode in ADAPTIVE_MODES] == ["fresh", "lagged", "lagged"]


# -------------------------------------------------------------------------------------------------------- fresh, lagged


def test_adaptive_decides_from_this_step():
    drive, rows = Drive(made("adaptive")), [Row(0, 1), Row(1, 2)]
    for wanted in ([1, 3], [4, 0], [2, 2]):
        assert drive.widths(rows, [asks_for(w) for w in wanted]) == wanted


@pytest.mark.parametrize("overlap", [True, False])
def test_lag_decides_from_the_last_step(overlap):
    drive, rows = Drive(made("lag"), overlap=overlap), [Row(0, 1), Row(1, 2)]
    asked = [[1, 3], [4, 0], [2, 2], [0, 1]]
    got = [drive.widths(rows, [asks_for(w) for w in wanted]) for wanted in asked]
    assert got == [[S, S], *asked[:-1]]  # the first step knows nothing


def test_budget_is_a_lagged_total_within_caps():
    drive, rows = Drive(made("lag-budget")), [Row(0, 1), Row(1, 2)]
    drive.step(rows, [asks_for(1), asks_for(3)])
    for now, budget in (([4, 4], 4), ([0, 0], 8), ([2, 1], 0), ([0, 0], 3)):
        decision = drive.step(rows, [asks_for(w) for w in now])
        assert decision.num_draft_rows == budget
        if budget == 2 * S:  # nothing to hand out
            assert decision.widths_np.tolist() == [S, S]
        else:
            assert (decision.widths_np, decision.budget) == (None, budget)
        assert decision.caps_np.tolist() == [S, S]
    drive.step(rows, [asks_for(4)] * 2)
    rows[0].cap = rows[1].cap = 1
    assert drive.step(rows, [asks_for(4)] * 2).widths_np.tolist() == [1, 1]


def test_one_request_alone_takes_the_first_drafts_of_a_budget():
    """Which ones the device would pick is known, so it need not rank: also beside requests that may have none."""
    for others in ([], [Row(1, 2, cap=0)]):
        drive, rows = Drive(made("lag-budget", LinearCost(2.0, 0.3))), [Row(0, 1), *others]
        seen = []
        for survival in (1.0, 0.0, 0.5, 0.9):
            drive.step(rows, survival)
            decision = drive.step(rows, survival)
            assert decision.budget is None and decision.widths_np[1:].tolist() == [0] * len(others)
            seen.append(decision.num_draft_rows)
        assert seen[0] == S and 0 in seen and set(seen) - {0, S}


def test_unknown_rows_enter_a_budget_with_their_prior():
    policy = made("lag-budget", LinearCost(2.0, 0.3))
    # prior .5, .25, .125: 1 / 2.3 < 1.5 / 2.6 < 1.75 / 2.9 > 1.875 / 3.2
    assert Drive(policy).step([Row(0, 1)], 0.0).widths_np.tolist() == [2]
    policy = made("lag-budget", LinearCost(2.0, 0.0))
    assert Drive(policy).step([Row(0, 1), Row(1, 2)], 0.0).num_draft_rows == 2 * S


@pytest.mark.parametrize("cost", [LINEAR, STAIRS])
@pytest.mark.parametrize("mode", ["adaptive", "lag"])
def test_caps_bound_widths(mode, cost):
    drive, rng = Drive(made(mode, cost)), np.random.default_rng(0)
    rows = [Row(slot, slot) for slot in range(5)]
    for _ in range(30):
        for row in rows:
            row.cap = int(rng.integers(0, S + 2))
        decision = drive.step(rows, rng.random((5, S)))
        caps = [min(r.cap, S) for r in rows]
        assert (decision.widths_np <= caps).all()
        assert decision.caps_np.tolist() == caps


def test_a_prefill_in_the_step_changes_no_other_confidence():
    alone, beside = (Drive(made("lag")) for _ in range(2))
    rows, same_rows = ([Row(0, 1), Row(1, 2)] for _ in range(2))
    for wanted in ([1, 3], [4, 0], [2, 2], [0, 1]):
        confidence = [asks_for(w) for w in wanted]
        newcomer = Row(2, 3, prefill=True, given=64, emits=False)
        assert beside.widths([*same_rows, newcomer], confidence) == [*alone.widths(rows, confidence), 0]


def test_prefill_rows_are_priced():
    """Beside a large prefill a draft row costs relatively little, so that more are verified."""
    rows = lambda: [Row(0, 1), Row(1, 2, prefill=True, given=100, emits=False)]  # noqa: E731
    confidence = [0.4, 0.4, 0.4, 0.4]
    alone, beside = Drive(made("adaptive")), Drive(made("adaptive"))
    assert alone.widths(rows()[:1], confidence) == [1]
    assert beside.widths(rows(), confidence) == [S, 0]


def test_a_step_with_a_prompt_goes_by_its_own_price():
    """Rows that are free there, padded as it is anyway, are dear in a step without."""
    rows = lambda: [Row(0, 1), Row(1, 2, prefill=True, given=100, emits=False)]  # noqa: E731
    drive = Drive(made("adaptive", LinearCost(1.0, 10.0)))
    drive.policy.cost = CostModel(LinearCost(1.0, 10.0), DraftTimes.constant(0.0), mixed=LinearCost(1.0, 0.0))
    drafts_only(drive.policy, S)
    assert drive.widths(rows()[:1], [0.4, 0.4, 0.4, 0.4]) == [0]
    assert drive.widths(rows(), [0.4, 0.4, 0.4, 0.4]) == [S, 0]


def test_the_time_of_a_step_with_a_prompt_corrects_the_price_of_such_steps():
    policy = made("lag")
    told = []
    policy.cost.observe = lambda rows, ms, **rest: told.append((rows, rest["mixed"]))
    for rows in ([Row(0, 1)], [Row(0, 1), Row(1, 2, prefill=True, given=100)]):
        plan = plan_of(0, rows)
        policy.timed(plan, policy.decide(plan), 3.0)
    assert told == [(1 + S, False), (1 + S + 100, True)]


@pytest.mark.parametrize("overlap", [False, True])
def test_lag_asked_late_decides_what_lag_decides(overlap):
    """The engine waits for this step's confidence, which may be anything: it is not looked at before the next step."""
    rng, rows = np.random.default_rng(3), [Row(0, 1), Row(1, 2), Row(2, 3)]
    confidence = rng.uniform(0.2, 1.0, (40, 3, S))
    lag, late = (made("lag", STAIRS, learns=True) for _ in range(2))
    early = Drive(lag, overlap)
    widths = [early.widths(rows, said, accepts=lambda w: np.minimum(w, 2)) for said in confidence]
    for row in rows:
        row.decode_steps = 0
    asked_late = Drive(Late(late), overlap)
    assert asked_late.policy.waits_for == "fresh"
    asked_late.policy.num_drafts = S
    assert [asked_late.widths(rows, said, accepts=lambda w: np.minimum(w, 2)) for said in confidence] == widths
    assert len({tuple(w) for w in widths}) > 3
    with pytest.raises(ConfigError, match="last step"):
        Late(made("adaptive"))


def test_variants_of_lag_are_policies_of_their_own():
    lag = made("lag")
    fixed, late = variant("fixed:2", lag, S), variant("lag-late", lag, S)
    assert Drive(fixed).widths([Row(0, 1), Row(1, 2, cap=1)], [1.0] * S) == [2, 1]
    assert fixed.signal == late.signal == lag.signal  # what the engine's draft was recorded with
    assert late._lagged is not lag
    with pytest.raises(ConfigError, match="fixed:5"):
        variant("fixed:5", lag, S)


def test_skipped_and_verified_0_keep_what_is_known():
    drive = Drive(made("lag"))
    a, b = Row(0, 1), Row(1, 2)
    drive.step([a, b], [asks_for(0), asks_for(2)])
    drive.step([a], asks_for(0))  # b is skipped
    assert drive.widths([a, b], [asks_for(3), asks_for(1)]) == [0, 2]  # a verified 0 and is known all the same
    assert drive.widths([a, b], [asks_for(3), asks_for(1)]) == [3, 1]


def test_preempted_and_resumed_is_unknown():
    drive = Drive(made("lag"))
    a, b = Row(0, 1), Row(1, 2)
    drive.step([a, b], [asks_for(1), asks_for(1)])
    b.generation, b.slot = 4, 2
    assert drive.widths([a, b], [asks_for(1), asks_for(1)]) == [1, S]


# ------------------------------------------------------------------------------------------------------ faults by number


def test_fault_1_slot_reuse_with_a_late_value():
    """B takes A's slot while A's last report, confidence .01, is still to come; B decides as in a fresh engine."""
    drive, fresh = Drive(made("lag")), Drive(made("lag"))
    a, b = Row(0, uid=1, generation=1), Row(0, uid=2, generation=2)
    drive.step([a], [0.01] * S)
    drive.step([a], [0.01] * S)  # in flight when A ends; observed at the top of B's first step
    twin = Row(0, uid=2, generation=1)
    script = [asks_for(2), asks_for(3), asks_for(1)]
    got = [drive.widths([b], confidence) for confidence in script]
    assert got == [fresh.widths([twin], confidence) for confidence in script]
    assert got[0] == [S]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", ["adaptive", "lag"])
def test_fault_2_each_outcome_is_paired_with_its_own_proposal(mode, overlap, monkeypatch):
    """Drafts on even steps only; confidence .9 and .1 in turn, and the outcome always agrees with its own."""
    monkeypatch.setattr(policies, "FREE_MS", -1.0)  # every step is looked at, though every draft is verified
    policy = made(mode, LinearCost(1.0, 0.0), learns=True)
    drive, rows, taught = Drive(policy, overlap=overlap), [Row(0, 1)], []
    teach = policy.survival.teach_outcomes

    def spy(confidence, widths, accepted, *rest):
        taught.append((float(confidence[0, 0]), int(widths[0]), int(accepted[0])))
        return teach(confidence, widths, accepted, *rest)

    policy.survival.teach_outcomes = spy
    for step in range(40):
        drafts_only(policy, S if step % 2 == 0 else 0)
        policy._lengths._changed = False
        policy._lengths._skipped = 0
        sure = step % 4 == 0
        before = drive.number
        drive.step(rows, [0.9 if sure else 0.1] * S, accepts=lambda w, sure=sure: np.where(sure, w, 0))
        if before % 2:
            assert drive.decisions[-1].widths_np.tolist() == [0]
            assert not policy.store.lookup(plan_of(99, rows)).known_np.any()  # bypassed: the old value went invalid
    assert len(taught) >= 18
    for confidence, width, accepted in taught:
        assert width == S
        assert accepted == (S if confidence > 0.5 else 0)


@pytest.mark.parametrize("overlap", [True, False])
def test_fault_3_the_age_of_the_signal_is_one_step(overlap):
    drive, rows = Drive(made("lag", num_drafts=S), overlap=overlap), [Row(0, 1)]
    log = [drive.widths(rows, asks_for(t % (S + 1)))[0] for t in range(3 * (S + 1))]
    assert log == [S, *(t % (S + 1) for t in range(3 * (S + 1) - 1))]


def test_fault_3_adaptive_has_age_0():
    drive, rows = Drive(made("adaptive", num_drafts=S)), [Row(0, 1)]
    log = [drive.widths(rows, asks_for(t % (S + 1)))[0] for t in range(3 * (S + 1))]
    assert log == [t % (S + 1) for t in range(3 * (S + 1))]


def test_fault_4_width_0_is_a_width():
    drive, rows = Drive(made("lag")), [Row(slot, slot) for slot in range(4)]
    for wanted in ([0, 0, 0, 0], [0, 3, 0, 0], [3, 0, 3, 0], [0, 3, 4, 0], [1, 1, 1, 1]):
        drive.step(rows, [asks_for(w) for w in wanted])
    assert [d.widths_np.tolist() for d in drive.decisions[1:]] == [[0] * 4, [0, 3, 0, 0], [3, 0, 3, 0], [0, 3, 4, 0]]


@pytest.mark.parametrize("mode", ADAPTIVE_MODES)
@pytest.mark.parametrize("cost", [LinearCost(5.0, 0.0), TableCost(rows=(64,), ms=(5.0,))])
def test_fault_5_a_constant_cost_verifies_everything(mode, cost):
    drive, rows = Drive(made(mode, cost)), [Row(0, 1), Row(1, 2)]
    for _ in range(3):
        assert drive.step(rows, [0.5] * S).num_draft_rows == 2 * S


@pytest.mark.parametrize("mode", ADAPTIVE_MODES)
def test_where_drafts_are_nearly_free_nothing_is_chosen_and_a_part_of_the_steps_is_looked_at(mode, monkeypatch):
    """As with one request of a small model on a GPU: choosing would cost the host more than pruning saves the device."""
    drive, looked_at = Drive(made(mode, LinearCost(5.0, 0.001))), []
    put = drive.policy.store.put
    monkeypatch.setattr(
        drive.policy.store, "put", lambda plan, values: (looked_at.append(plan.step), put(plan, values))
    )
    few = [Row(0, 1), Row(1, 2)]
    for _ in range(32):
        decision = drive.step(few, np.zeros(S))
        assert (decision.num_draft_rows, decision.reason) == (2 * S, policies.NEARLY_FREE)
    if mode == "adaptive":  # it may choose again in the very step that it sees
        assert looked_at == list(range(32))
    else:  # two that follow each other, for the map from one to the next
        seen = [step for step in range(32) if step % pace.FREE_EVERY < pace.FREE_SEEN]
        assert looked_at == seen
    many = [*few, *(Row(slot, slot + 1) for slot in range(2, 64))]
    totals = [drive.step(many, np.zeros(S)).num_draft_rows for _ in range(4)]
    assert totals[-1] == 0, totals
    assert drive.step(few, np.zeros(S)).num_draft_rows == 2 * S


@pytest.mark.parametrize("cost", [LinearCost(5.0, 0.1, 0.0), LinearCost(5.0, 0.001, 1e-3)])
def test_drafts_are_not_free_that_cost_more_than_a_decision(cost):
    """By rows, or by the context that each of them reads."""
    drive, rows = Drive(made("lag", cost)), [Row(0, 1), Row(1, 2)]
    for _ in range(3):
        last = drive.step(rows, np.zeros(S))
    assert last.num_draft_rows == 0


def test_fault_6_confidence_0_saves_target_rows():
    drive, rows = Drive(made("lag")), [Row(slot, slot) for slot in range(3)]
    total = [3 + drive.step(rows, np.zeros((3, S))).num_draft_rows for _ in range(5)]
    assert total == [3 + 3 * S, 3, 3, 3, 3]


def test_fault_10_ranks_follow_one_decision():
    """Rank 1's confidence, off by 1e-3 near a tie, would decide otherwise; what it gets is rank 0's record."""
    sent = []
    rank_0 = Drive(made("lag", on_record=lambda record: sent.append(record.to_json())))
    rank_1 = Drive(made("lag"))
    rows = [[Row(0, 1), Row(1, 2)] for _ in range(2)]
    near_tie = LINEAR.c1 * 2 / LINEAR.step_ms(np.ones(2, int), np.zeros(2, int), np.zeros(2, int))
    for drive, each, off in ((rank_0, rows[0], 5e-4), (rank_1, rows[1], -5e-4)):
        for _ in range(2):
            drive.step(each, [near_tie + off, 0, 0, 0])
    mine, its_own = (d.decisions[-1].widths_np.tolist() for d in (rank_0, rank_1))
    assert mine != its_own
    assert replay(DecisionRecord.from_json(sent[-1])).widths_np.tolist() == mine


def test_fault_14_confidence_that_is_not_finite_hurts_only_its_own_row():
    for mode in ("adaptive", "lag"):
        clean_run, dirty = Drive(made(mode)), Drive(made(mode))
        rows, same = ([Row(0, 1), Row(1, 2)] for _ in range(2))
        for _ in range(3):
            clean_run.step(rows, [asks_for(0), asks_for(3)])
            dirty.step(same, [[np.nan, 1, 1, 1], asks_for(3)])
        assert dirty.decisions[-1].widths_np.tolist() == clean_run.decisions[-1].widths_np.tolist() == [0, 3]


def test_fault_32_a_constrained_request_moves_nobody_else():
    def run(constrain):
        policy = made("lag", learns=True)
        rng = np.random.default_rng(0)
        log = []
        rows = [Row(0, 1), Row(1, 2, teaches=False)]
        for step in range(60):
            confidence = rng.uniform(0.4, 0.9, (2, S))
            plan = plan_of(step, rows)
            decision = policy.decide(plan)
            log.append(int(decision.widths_np[0]))
            policy.observe(plan, report_of(plan, confidence))
            result = result_of(plan, decision.widths_np, np.minimum(decision.widths_np, [2, 0 if constrain else S]))
            policy.learn(plan, result)
            for row in rows:
                row.decode_steps += 1
        return log, policy.survival.calibration_np, policy.survival.prior(np.array([0]))

    free, constrained = run(False), run(True)
    assert free[0] == constrained[0]
    np.testing.assert_array_equal(free[1], constrained[1])
    np.testing.assert_array_equal(free[2], constrained[2])


# ------------------------------------------------------------------------------------------------------------- learning


def test_a_sequence_past_the_drafters_last_position_teaches_nothing():
    def prior(confidence):
        policy = made("lag", learns=True)
        rows = [Row(0, 1), Row(1, 2, cap=0)]
        for step in range(20):
            plan = plan_of(step, rows)
            policy.observe(plan, report_of(plan, [[0.8] * S, [confidence] * S]))
            policy.learn(plan, result_of(plan, policy.decide(plan).widths_np, [0, 0]))
            for row in rows:
                row.decode_steps += 1
        return policy.survival.prior(np.array([0]))

    np.testing.assert_array_equal(prior(0.1), prior(0.9))


def served(mode, overlap, steps=400, seed=0, true=0.9, told=0.5):
    """A policy after serving 8 requests whose drafts are accepted with `true` while the drafter says `told`."""
    policy = made(mode, LinearCost(4.0, 0.19), learns=True)
    drive, rng, rows = Drive(policy, overlap=overlap), np.random.default_rng(seed), [Row(s, s) for s in range(8)]

    def accepts(widths):
        hits = np.logical_and.accumulate(rng.random((8, S)) < true, axis=1)
        return np.minimum(hits.sum(axis=1), widths)

    for _ in range(steps):
        drive.step(rows, np.full((8, S), told), accepts=accepts)
    return policy, drive


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", ["adaptive", "lag"])
def test_what_is_verified_corrects_the_confidence(mode, overlap):
    policy, drive = served(mode, overlap)
    told = np.full((1, S), 0.5, dtype=np.float32)
    assert policy.survival.confidence(told, np.array([0]))[0, 0] == pytest.approx(0.9, abs=0.04)
    np.testing.assert_allclose(policy.survival.confidence(told, np.array([1])), 0.5)
    assert drive.decisions[-1].widths_np.mean() > drive.decisions[3].widths_np.mean()
    assert len(policy._lessons._unpaired) <= 2


def test_width_does_not_ratchet_down():
    """Nothing of what was pruned counts as rejected: after a spell of bad drafts, good ones are verified in full again."""
    policy = made("lag", LinearCost(2.0, 0.2), learns=True)
    drive, rows = Drive(policy), [Row(s, s) for s in range(8)]
    for _ in range(300):
        drive.step(rows, np.full((8, S), 0.02), accepts=lambda w: np.zeros_like(w))
    assert drive.decisions[-1].widths_np.max() == 0
    for _ in range(100):
        drive.step(rows, np.full((8, S), 0.97), accepts=lambda w: w)
    assert drive.decisions[-1].widths_np.tolist() == [S] * 8


def test_no_decision_depends_on_its_own_step_through_what_is_learned():
    """Adaptive, rejection: teaching from this step's report waits until the step has been decided."""
    policy = made("adaptive", learns=True)
    plan = plan_of(0, [Row(0, 1)])
    before = policy.survival.prior(np.array([0])).copy()
    policy.observe(plan, report_of(plan, 0.9))
    policy.decide(plan)
    np.testing.assert_array_equal(policy.survival.prior(np.array([0])), before)
    policy.learn(plan, result_of(plan, [1], 1))
    assert (policy.survival.prior(np.array([0])) > before).all()


@pytest.mark.parametrize("count", [8, 3 * lessons.ROWS])
def test_lessons_wait_a_few_steps_but_not_at_the_start(count):
    policy = made("lag", learns=True)
    drive, rows, versions = Drive(policy), [Row(s, s) for s in range(count)], []
    for _ in range(lessons.EARLY + 3 * lessons.STEPS):
        versions.append(policy.survival.version)
        drive.step(rows, np.full((count, S), 0.6), accepts=lambda w: w)
    taught = np.flatnonzero(np.diff(versions))
    early = taught[taught <= lessons.EARLY]
    assert len(early) == lessons.EARLY
    assert set(np.diff(taught[taught > lessons.EARLY])) == {lessons.STEPS}


@pytest.mark.parametrize("rhythm", [1, 2, 3, 4, 5, 8, 16, 33])
@pytest.mark.parametrize("count", [1, lessons.ROWS, lessons.ROWS + 1, 100, 256])
def test_of_many_rows_a_part_teaches_and_all_alike_whatever_the_rhythm_of_steps(count, rhythm):
    times, steps, rows = np.zeros(count), 2000, [Row(s, s) for s in range(count)]
    plan, nothing = plan_of(0, rows), np.zeros((count, S))
    for step in range(0, steps * rhythm, rhythm):
        taught = np.arange(count)[lessons.Sighting(replace(plan, step=step), nothing, nothing, None).rows]
        assert min(count, lessons.ROWS // 2) <= len(taught) <= lessons.ROWS
        times[taught] += 1
    assert times.min() > 0.9 * times.mean()
    assert times.max() < 1.1 * times.mean()


def test_rows_that_do_not_teach_in_a_step_teach_in_another():
    """Of 256 requests every eighth drafts badly: the prior knows it as an average over all of them would."""
    policy = made("lag", LinearCost(2.0, 1000.0), learns=True)  # nothing is verified, so confidence stays what was said
    drive, rows = Drive(policy), [Row(s, s) for s in range(256)]
    confidence = np.full((256, S), 1.0)
    confidence[::8] = 0.2
    for _ in range(400):
        drive.step(rows, confidence, accepts=lambda w: np.where(confidence[:, 0] == 1.0, w, 0))
    assert policy.survival.prior(np.array([0]))[0, 0] == pytest.approx(0.9, abs=0.02)


def test_what_waits_is_taught_though_drafting_has_stopped():
    policy = made("lag", learns=True)
    drive, rows = Drive(policy), [Row(s, s) for s in range(8)]
    for _ in range(lessons.EARLY + 3):
        drive.step(rows, np.full((8, S), 0.6), accepts=lambda w: w)
    assert policy._lessons._outcomes
    drafts_only(policy, 0)
    for _ in range(lessons.STEPS):
        drive.step(rows, np.full((8, S), 0.6), accepts=lambda w: w)
    assert not policy._lessons._outcomes


@pytest.mark.parametrize("mode", ADAPTIVE_MODES)
def test_waiting_lessons_are_never_taught_between_a_draft_and_its_decision(mode):
    """However many wait; `learn` alone teaches."""
    policy = made(mode, learns=True)
    drive, rows, seen = Drive(policy), [Row(s, s) for s in range(4)], []
    for name in ("draft_length", "observe", "decide"):

        def spied(*args, call=getattr(policy, name)):  # noqa: B008
            before = policy.survival.version
            answer = call(*args)
            seen.append(policy.survival.version - before)
            return answer

        setattr(policy, name, spied)
    for _ in range(lessons.EARLY + 30):
        drive.step(rows, np.full((4, S), 0.6), accepts=lambda w: w)
    assert policy.survival.version > lessons.EARLY
    assert set(seen) == {0}


def test_halves_that_never_meet_are_dropped():
    policy = made("lag", learns=True)
    for step in range(50):
        plan = plan_of(step, [Row(0, 1, decode_steps=step)])
        policy.observe(plan, report_of(plan, 0.5))
    assert len(policy._lessons._unpaired) <= lessons.MAX_UNPAIRED


def test_calibration_reaches_decisions_and_the_device(tmp_path):
    path = tmp_path / "calibration.json"
    Calibration(temperatures={("peak", "greedy"): (0.25,)}).save(path)
    config = SpeculativeConfig.for_mode("adaptive", draft_model="scripted")
    policy, reasons = make_policy(config, num_drafts=S, cost=CostModel(LINEAR), calibration=path, learns=False)
    np.testing.assert_allclose(policy.calibration_np[0, :, 0], 4.0)
    np.testing.assert_allclose(policy.calibration_np[1], [[1.0, 0.0]] * S)
    plain = made("adaptive")
    confidence = [0.6, 0.6, 0.6, 0.6]
    for each in (policy, plain):
        drafts_only(each, S)
    assert sum(Drive(policy).widths([Row(0, 1)], confidence)) > sum(Drive(plain).widths([Row(0, 1)], confidence))
    greedy, sampled = Row(0, 1), Row(1, 2, sampled=True)
    widths = Drive(policy).widths([greedy, sampled], [confidence, confidence])
    assert widths[0] > widths[1]
    assert ("calibration", str(path), "as found") in reasons


# --------------------------------------------------------------------------------------------------------- draft length


def lengths_of(policy, steps, confidence, rows=None):
    drive, rows = Drive(policy), rows or [Row(0, 1)]
    for _ in range(steps):
        drive.step(rows, confidence, accepts=lambda w: w)
    return drive.lengths


def test_draft_lengths_are_powers_of_two_and_s():
    for num_drafts, sizes in ((1, [0, 1]), (4, [0, 1, 2, 4]), (7, [0, 1, 2, 4, 7]), (16, [0, 1, 2, 4, 8, 16])):
        policy = made("lag", num_drafts=num_drafts, fixed_length=False)
        assert policy._lengths.sizes == sizes


@pytest.mark.parametrize("mode", ADAPTIVE_MODES)
def test_good_drafts_are_drafted_in_full(mode):
    policy = made(mode, LinearCost(2.0, 0.01), draft_ms=0.1, fixed_length=False)
    assert lengths_of(policy, 10, [0.95] * S) == [S] * 10


@pytest.mark.parametrize("mode", ADAPTIVE_MODES)
def test_where_speculation_does_not_pay_it_is_skipped_and_probed(mode):
    policy = made(mode, LinearCost(2.0, 3.0), draft_ms=2.0, fixed_length=False, learns=True)
    lengths = lengths_of(policy, 100 + pace.WARM_UP, [0.05] * S)
    assert set(lengths) == {0, S}
    assert lengths[: pace.WARM_UP] == [S] * pace.WARM_UP
    lengths = lengths[pace.WARM_UP - 1 :]
    probes = [step for step, length in enumerate(lengths) if length]
    assert all(b - a == pace.SKIPS_BEFORE_PROBE + 1 for a, b in itertools.pairwise(probes))
    assert 5 <= len(probes) <= 9


def test_a_change_of_batch_size_is_probed():
    policy = made("lag", LinearCost(2.0, 3.0), draft_ms=2.0, fixed_length=False)
    policy._lengths._seen = pace.WARM_UP
    drive, rows = Drive(policy), [Row(0, 1), Row(1, 2), Row(2, 3)]
    for _ in range(8):
        drive.step(rows, np.full((3, S), 0.05))
    assert drive.lengths[-1] == 0
    drive.step(rows[:2], np.full((2, S), 0.05))
    assert drive.lengths[-1] == S
    for count in (1, 2, 1, 2, 1, 2, 1, 2, 1, 2):  # a change in every step is not probed in every step
        drive.step(rows[:count], np.full((count, S), 0.05))
    assert 1 <= drive.lengths[9:].count(S) <= 3


def test_short_drafts_where_later_positions_do_not_pay():
    cost = CostModel(LinearCost(2.0, 0.05), DraftTimes.by_length({1: 0.2, 2: 0.8, 4: 2.4}))
    config = SpeculativeConfig.for_mode("lag", draft_model="scripted")
    policy, _ = make_policy(config, num_drafts=S, cost=cost)
    lengths = lengths_of(policy, 200, [0.9, 0.1, 0.1, 0.1])
    assert lengths[20:].count(1) > 150
    assert lengths[20:].count(S) >= 3  # what longer drafts would bring is looked at now and then


def test_a_draft_length_is_kept_for_a_few_steps_unless_much_changes():
    """Of many sequences every sixteenth step, and at once where many more or fewer drafts may be verified, or a probe said more."""
    policy = made("lag", LinearCost(2.0, 0.01), draft_ms=0.1, fixed_length=False)
    best, chosen = policy._best_length, []
    policy._best_length = lambda plan, cost: chosen.append(plan.step) or best(plan, cost)
    drive, rows = Drive(policy), [Row(s, s) for s in range(32)]
    policy._lengths._seen = pace.WARM_UP
    for _ in range(36):
        drive.step(rows, np.full((32, S), 0.9))
    assert chosen == [1, 17, 33]  # the first step of 32 requests is a probe
    rows[0].cap = 1  # three drafts of 128 fewer
    drive.step(rows, np.full((32, S), 0.9))
    assert chosen[3:] == []
    for row in rows[:16]:
        row.cap = 1
    for _ in range(4):
        drive.step(rows, np.full((32, S), 0.9))
    assert chosen[3:] == [37]
    drive.step(rows[:20], np.full((20, S), 0.9))  # no probe of another number of requests: all S were drafted anyway
    drive.step(rows[:20], np.full((20, S), 0.9))
    assert chosen[4:] == [41]


@pytest.mark.parametrize(("count", "every"), [(1, 5), (3, 7), (12, 16), (100, 16)])
def test_a_choice_that_few_sequences_made_is_kept_for_less(count, every):
    policy = made("lag", LinearCost(2.0, 0.01), draft_ms=0.1, fixed_length=False)
    best, chosen = policy._best_length, []
    policy._best_length = lambda plan, cost: chosen.append(plan.step) or best(plan, cost)
    drive, rows = Drive(policy), [Row(s, s) for s in range(count)]
    for _ in range(pace.WARM_UP + 3 * pace.CHOICE_SPACING + 2):
        drive.step(rows, np.full((count, S), 0.9), accepts=lambda w: w)
    assert set(np.diff(chosen)) == {every}


def test_draft_length_counts_only_steps_that_decode():
    policy = made("lag", fixed_length=False)
    drive = Drive(policy)
    drive.step([Row(0, 1, prefill=True, given=30)], np.zeros((0, S)))
    assert drive.lengths == [0]
    assert drive.decisions[0].widths_np.tolist() == [0]
    drive.step([Row(0, 1)], [0.9] * S)
    assert drive.lengths == [0, S]


def test_after_a_step_without_a_draft_the_prior_decides():
    policy = made("lag", LinearCost(2.0, 0.5), learns=False)
    drive, rows = Drive(policy), [Row(0, 1)]
    drive.step(rows, asks_for(2))
    drafts_only(policy, 0)
    drive.step(rows, asks_for(2))
    assert drive.decisions[-1].widths_np.tolist() == [0]
    drafts_only(policy, S)
    drive.step([*rows, Row(1, 2)], asks_for(2))
    # not 2, what was said two steps ago; not S, as for the newcomer; prior .5 pays and .25 does not
    assert drive.decisions[-1].widths_np.tolist() == [1, S]


# ------------------------------------------------------------------------------------------------------ making, options


def config(mode="adaptive", **fields):
    return SpeculativeConfig.for_mode(mode, draft_model="scripted", **fields)


def test_signal_resolution():
    assert resolve_signal("auto", has_head=True)[0] == "head"
    assert resolve_signal("auto", has_head=False)[0] == "peak"
    assert resolve_signal("peak", has_head=True)[0] == "peak"
    assert [resolve_signal("drawn", has_head=True, drawn_biases=b)[0] for b in (False, True)] == ["drawn", "peak"]
    with pytest.raises(ConfigError, match="confidence_signal"):
        resolve_signal("head", has_head=False)


@pytest.mark.parametrize(
    ("mode", "acceptance", "drafts_sampled", "signal"),
    [
        ("adaptive", "rejection", True, "peak"),
        ("lag-budget", "rejection", True, "peak"),
        ("lag", "rejection", True, "drawn"),
        ("adaptive", "rejection", False, "drawn"),
        ("adaptive", "coupled", True, "drawn"),
        ("lag-budget", "coupled", True, "drawn"),
    ],
)
def test_drawn_is_replaced_where_it_would_bias_and_it_is_said(mode, acceptance, drafts_sampled, signal):
    policy, reasons = make_policy(
        config(mode, confidence_signal="drawn", acceptance=acceptance),
        num_drafts=S,
        has_head=True,
        drafts_sampled=drafts_sampled,
        cost=CostModel(LINEAR),
    )
    assert policy.signal == signal
    (_, value, why), *_ = reasons
    assert value == signal
    assert ("bias" in why) == (signal == "peak")


def test_rules_follow_cost_and_acceptance():
    seen = []
    rows = [Row(0, 1, sampled=True)]
    for mode, cost, acceptance, rule in [
        ("adaptive", LINEAR, "rejection", "greedy"),
        ("adaptive", STAIRS, "rejection", "hull"),
        ("adaptive", STAIRS, "coupled", "widths"),
        ("lag", STAIRS, "rejection", "widths"),
        ("lag", LINEAR, "coupled", "greedy"),
        ("lag-budget", LINEAR, "coupled", "budget"),
        ("lag-budget", STAIRS, "rejection", "budget"),
    ]:
        drive = Drive(made(mode, cost, acceptance=acceptance, on_record=seen.append))
        drive.step(rows, [0.5] * S)
        assert seen[-1].problem.rule == rule, (mode, cost, acceptance)
    drive = Drive(made("adaptive", STAIRS, acceptance="rejection", on_record=seen.append))
    drive.step([Row(0, 1)], [0.5] * S)
    assert seen[-1].problem.rule == "widths"  # a greedy request's drafts are no draws


def test_min_gain_is_refused_with_a_table():
    with pytest.raises(ConfigError, match="adaptive_speculative_min_gain"):
        make_policy(config(adaptive_speculative_min_gain=0.1), num_drafts=S, cost=CostModel(STAIRS))
    policy = made("adaptive", LinearCost(5.0, 0.9), draft_ms=10, adaptive_speculative_min_gain=0.1)
    plain = made("adaptive", LinearCost(5.0, 0.9), draft_ms=10)
    rows = [Row(s, s, kv=500) for s in range(8)]
    x13 = np.tile([0.8, 0.6, 0.45, 0.3], (8, 1))
    assert Drive(policy).widths(rows, x13) == [1] * 8
    assert Drive(plain).widths(rows, x13) == [2] * 8


def test_a_calibration_without_the_signal_is_said(tmp_path):
    path = tmp_path / "calibration.json"
    Calibration(temperatures={("head", "greedy"): (0.5,)}).save(path)
    policy, reasons = make_policy(config(), num_drafts=S, cost=CostModel(LINEAR), calibration=path)
    assert ("calibration", str(path), "it has nothing on signal 'peak'") in reasons
    np.testing.assert_allclose(policy.calibration_np[..., 0], 1.0)


@pytest.mark.parametrize("mode", ADAPTIVE_MODES)
def test_measured_times_correct_the_price(mode):
    policy = made(mode, LinearCost(4.0, 0.02), fixed_length=False)
    rng = np.random.default_rng(0)
    rows = [Row(s, s) for s in range(4)]
    for step in range(3000):
        plan = plan_of(step, rows)
        if step % 2:
            plan = replace(plan, draft_length=0, caps_np=np.zeros(4, np.int32))
        decision = policies._in_full(policies._caps(plan))
        if policy.times(plan):
            policy.timed(plan, decision, 4.0 + 0.04 * (4 + decision.num_draft_rows) * rng.lognormal(0, 0.05))
    step_cost = policy.cost.step
    assert step_cost.c1 / step_cost.c0 > 1.5 * 0.02 / 4.0
    policy.timed(plan_of(0, rows), Drive(policy).step(rows, 0.5), 5.0)


def test_an_eighth_of_the_steps_is_timed_whatever_their_rhythm_and_all_are_counted():
    timing = pace.Timing()
    steps = [timing.steps_since() if timing.is_due() else 0 for _ in range(pace.TIMED_EARLY + 8000)]
    assert steps[: pace.TIMED_EARLY] == [1] * pace.TIMED_EARLY
    due = np.flatnonzero(steps)
    assert sum(steps) == due[-1] + 1
    later = due[pace.TIMED_EARLY :]
    assert len(later) == pytest.approx(1000, abs=20)
    assert max(steps) <= 8 + 5
    for rhythm in (2, 3, 4, 5, 8, 16, 17, 33):
        each = np.bincount(later % rhythm, minlength=rhythm)
        assert each.min() > 0.8 * each.mean(), rhythm


@pytest.mark.parametrize("mode", ADAPTIVE_MODES)
@pytest.mark.parametrize("cost", [LinearCost(2.0, 0.2, 1e-4, 1e-5), STAIRS])
def test_random_serving_keeps_every_promise(mode, cost):
    """Requests come, go, are skipped, prefill beside others; decisions stay within caps and replay."""
    records = []
    policy = made(mode, cost, num_drafts=7, draft_ms=0.5, learns=True, fixed_length=False, on_record=records.append)
    drive, rng = Drive(policy), np.random.default_rng(7)
    live = {slot: Row(slot, uid=slot) for slot in range(6)}
    uid = 100
    for _ in range(150):
        rows = []
        for slot, row in live.items():
            if rng.random() < 0.1:
                uid += 1
                live[slot] = row = Row(slot, uid, row.generation + 1, sampled=bool(rng.random() < 0.5))
                row.prefill, row.given = True, int(rng.integers(1, 50))
            elif row.prefill:
                row.prefill, row.given = False, 1
            row.cap, row.kv = int(rng.integers(0, 9)), int(rng.integers(10, 2000))
            if rng.random() < 0.8:
                rows.append(row)
        rows.sort(key=lambda r: r.prefill)
        confidence = rng.choice([0.0, 0.3, 0.9, 1.0, np.nan], (sum(not r.prefill for r in rows), 7))
        plan_caps = np.array([0 if r.prefill else min(r.cap, 7) for r in rows], dtype=int)
        decision = drive.step(rows, confidence, accepts=lambda w: rng.integers(0, w + 1))
        length = drive.lengths[-1]
        if decision.widths_np is not None:
            assert (decision.widths_np <= np.minimum(plan_caps, length)).all()
        else:
            assert decision.budget <= np.minimum(plan_caps, length).sum()
            assert decision.budget <= decision.caps_np.sum()
    assert len(set(drive.lengths)) > 1
    assert len(records) > 50
    for record in records[::10]:
        again = replay(DecisionRecord.from_json(record.to_json()))
        assert again.budget == record.budget
        np.testing.assert_array_equal(again.widths_np, record.widths_np)


# ---------------------------------------------------------------------------------------------------------------- worth


def tokens_per_ms(policy, cost, static=None, steps=250, count=16, num_drafts=7):
    """Serve drafts whose quality drifts per request (correlation .75 from step to step); the signal is calibrated."""
    rng, drive = np.random.default_rng(11), Drive(policy)
    rows = [Row(slot, slot) for slot in range(count)]
    state, tokens, ms = rng.normal(size=count), 0, 0.0
    for _ in range(steps):
        state = 0.75 * state + np.sqrt(1 - 0.75**2) * rng.normal(size=count)
        logit = np.linspace(1.6, 0.6, num_drafts) + 1.2 * state[:, None] + 0.6 * rng.normal(size=(count, num_drafts))
        confidence = 1 / (1 + np.exp(-logit))
        run = np.logical_and.accumulate(rng.random((count, num_drafts)) < confidence, axis=1).sum(axis=1)
        decision = drive.step(rows, confidence, accepts=lambda w, run=run: np.minimum(run, w))
        widths = decision.widths_np if static is None else np.full(count, static)
        tokens += count + np.minimum(run, widths).sum()
        given_rows = np.ones(count, dtype=np.int64)
        ms += cost.step.step_ms(given_rows, 100 * given_rows, widths) + cost.draft_ms(drive.lengths[-1], count)
    return tokens / ms


@pytest.mark.parametrize(("step", "worth"), [(LinearCost(3.0, 0.05), 1.02), (LinearCost(20.0, 40.0), 0.97)])
def test_lag_is_worth_it_where_drafts_pay_and_costs_little_where_they_do_not(step, worth):
    """Against the best fixed width of eight, the draft being free in this comparison where the width is 0."""
    cost = CostModel(step, DraftTimes.by_length({1: 0.3, 7: 0.6}), corrects=False)
    free = CostModel(step, corrects=False)
    best = max(tokens_per_ms(FullWidth(7), cost if width else free, width) for width in range(8))
    lag, adaptive = (tokens_per_ms(made(mode, step, num_drafts=7, learns=True, fixed_length=False), cost)
                     for mode in ("lag", "adaptive"))  # fmt: skip
    assert lag > worth * best
    assert adaptive > worth * best
