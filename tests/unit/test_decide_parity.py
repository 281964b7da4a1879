"""What is decided and learned equals the plain rules of `plain_decide` to the last bit, at every size of step."""

from dataclasses import replace

import numpy as np
import pytest

from slipstream.config import SpeculativeConfig
from slipstream.decide import controller
from slipstream.decide.confidence import ConfidenceStore
from slipstream.decide.controller import Problem, rank_candidates
from slipstream.decide.cost import CostModel, DraftTimes, LinearCost, TableCost
from slipstream.decide.make import make_policy
from slipstream.decide.record import decide
from slipstream.decide.survival import SurvivalModel
from slipstream.plan import DraftReport, StepPlan, StepResult
from tests.unit import plain_decide as plain

EDGES = (1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 512, 1024, 2048)
STAIRS = TableCost(rows=EDGES, ms=tuple(0.9 + 0.002 * rows for rows in EDGES), c2=1e-6, c3=1e-7)
COSTS = [LinearCost(2.0, 0.05, 1e-5, 1e-6), LinearCost(2.0, 0.02), STAIRS, replace(STAIRS, c2=0.0, c3=0.0)]
SHAPES = [(1, 1), (1, 7), (1, 16), (5, 4), (32, 7), (33, 16), (100, 7), (160, 16)]


def survivals(rng, count, length, ties):
    confidence = rng.beta(4, 1.5, (count, length))
    if ties:
        confidence = np.round(confidence * 4) / 4
    return np.cumprod(confidence, axis=1)


def problems():
    """Random steps of every shape, with and without ties, uniform caps and unknown rows."""
    for seed, ((count, length), cost) in enumerate((s, c) for s in SHAPES for c in COSTS):
        rng = np.random.default_rng(seed)
        uniform = seed % 2 == 0
        yield Problem(
            rule="widths",
            survival_np=survivals(rng, count, length, ties=seed % 3 == 0),
            unknown_np=rng.random(count) < (0.0 if seed % 4 < 2 else 0.1),
            caps_np=np.full(count, length) if uniform else rng.integers(0, length + 2, count),
            kv_np=rng.integers(1, 3000, count),
            given_np=rng.integers(1, 3, count),
            num_emitting=int(rng.integers(0, count + 1)),
            cost=cost,
            draft_ms=float(rng.choice([0.0, 0.4])),
        )


@pytest.mark.parametrize("p", list(problems()))
def test_candidates_are_ranked_as_a_sort_of_triples_ranks_them(p):
    ranked = rank_candidates(p.survival_np, p.caps_np)
    values, positions, sequences = plain.rank(p.survival_np, p.caps_np)
    assert ranked.survival_np.tolist() == values
    assert (ranked.flat_np // len(p.caps_np)).tolist() == positions
    assert ranked.sequence_np.tolist() == sequences
    for length in (0, 1, p.survival_np.shape[1]):
        again = rank_candidates(p.survival_np, np.minimum(p.caps_np, length))
        assert ranked.cut(length).flat_np.tolist() == again.flat_np.tolist()


def test_a_coarse_order_is_finished_by_a_stable_one():
    """Values that share a 16-bit key, equal ones among them, keep the order of a stable sort."""
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.random(500) * 1e-4, np.full(300, 0.5), 0.5 + rng.random(500) * 1e-6, [0.0, 1.0, 0.0]])
    rng.shuffle(values)
    assert len(values) >= controller.MANY
    np.testing.assert_array_equal(controller._descending(values), np.argsort(-values, kind="stable"))


@pytest.mark.parametrize(("few", "wide"), [(0, 0), (0, 10**9), (controller.FEW, controller.WIDE), (10**9, 0)])
def test_best_rates_equal_those_of_a_loop_over_budgets(few, wide, monkeypatch):
    """All ways of summing, each at every size."""
    monkeypatch.setattr(controller, "FEW", few)
    monkeypatch.setattr(controller, "WIDE", wide)
    for p in problems():
        draft_ms = {n: 0.1 * n for n in sorted({0, 1, 2, p.survival_np.shape[1]})}
        rest = p.kv_np, p.given_np, p.num_emitting, p.cost, draft_ms
        fast = controller.best_rate_by_length(rank_candidates(p.survival_np, p.caps_np), *rest)
        assert fast == plain.best_rate_by_length(p.survival_np, p.caps_np, *rest)


def test_an_order_made_before_changes_no_decision():
    for p in problems():
        rules = ("budget",) if isinstance(p.cost, LinearCost) else ("budget", "widths", "hull")
        for rule, length in ((r, n) for r in rules for n in (1, p.survival_np.shape[1])):
            cut = replace(p, rule=rule, caps_np=np.minimum(p.caps_np, length))
            made_before = rank_candidates(p.survival_np, p.caps_np).cut(length)
            one, other = decide(0, cut), decide(0, cut, made_before)
            assert one.to_json() == other.to_json()


def test_few_candidates_are_decided_as_many_are(monkeypatch):
    """Loops and vectors, each at every size, under every rule."""
    for p in problems():
        rules = ("greedy", "budget") if isinstance(p.cost, LinearCost) else ("budget", "widths", "hull")
        for rule in rules:
            found = set()
            for few in (0, 10**9):
                monkeypatch.setattr(controller, "FEW", few)
                found.add(decide(0, replace(p, rule=rule)).to_json())
            assert len(found) == 1


@pytest.mark.parametrize("size", [1, 2, 7, 16])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_survivals_equal_the_plain_ones_whatever_was_learned(size, scaled, mixed):
    rng = np.random.default_rng(size)
    scale = rng.uniform(0.5, 2, (2, size)) if scaled else np.ones((2, size))
    fast, slow = SurvivalModel(size, scale), plain.Survival(size, scale)
    for step in range(40):
        count, length = int(rng.choice([1, 2, 9, 40])), size if step % 2 else int(rng.integers(1, size + 1))
        labels = rng.integers(0, 2, count) if mixed else np.full(count, step // 10 % 2)
        signal = rng.beta(3, 1, (count, size)).astype(np.float32)
        signal[rng.random(signal.shape) < 0.05] = rng.choice([0.0, 1.0, np.nan, np.inf, -1.0])
        lengths = np.full(count, size) if step % 3 else rng.integers(0, size + 1, count)
        lagged = [m.fresh(signal, labels) for m in (fast, slow)]
        confidence = [m.confidence(signal[:, :length], labels) for m in (fast, slow)]
        extended = [m.extend(survival, lengths, labels) for m, survival in zip((fast, slow), lagged, strict=True)]
        expected = [m.predict(survival, labels) for m, survival in zip((fast, slow), extended, strict=True)]
        for pair in (lagged, confidence, extended, expected, [m.prior(labels) for m in (fast, slow)]):
            np.testing.assert_array_equal(*pair)
        teaches = rng.random(count) < 0.9
        widths = rng.integers(0, length + 1, count)
        accepted = rng.integers(0, widths + 1)
        starts = np.flatnonzero(rng.random(count) < 0.3 * (step % 4 > 1))  # lessons of one step, and of several
        starts = np.unique(np.append(0, starts))
        step_of = np.searchsorted(starts, np.arange(count), side="right")
        for m, conf, old, steps in zip((fast, slow), confidence, lagged, (starts, step_of), strict=True):
            m.teach_survival(np.cumprod(conf, axis=1), old, lengths, labels, teaches, steps)
            m.teach_outcomes(conf, widths, accepted, labels, teaches, steps)
        np.testing.assert_array_equal(fast.calibration_np[..., 1], slow.shift.astype(np.float32))


@pytest.mark.parametrize("cost", COSTS)
def test_the_correction_equals_its_matrices(cost):
    model = CostModel(cost, DraftTimes((1, 7), (1, 64), ((0.1, 0.2), (0.3, 0.9))))
    slow, rng = plain.Filter(model), np.random.default_rng(0)
    for _ in range(400):
        rows, kv = int(rng.lognormal(4, 1.5)) + 1, float(rng.integers(1, 10**6))
        fields = {"kv_rows": 3 * kv, "kv": kv, "draft_length": int(rng.choice([0, 1, 7])), "num_sequences": 5}
        fields["steps"] = int(rng.choice([1, 3, 5]))
        ms = float(rng.lognormal(1, 1))
        model.observe(rows, ms, **fields)
        slow.observe(rows, ms, **fields)
        np.testing.assert_array_equal(model._log_np, slow.log)
        np.testing.assert_array_equal(model._covariance_np, slow.covariance)
    assert model.num_observed == 400
    assert sum(max(0, len(seen) - 2) for seen in slow.seen.values()) > 200


# ------------------------------------------------------------------------------------------------- store and whole policy


def plan_of(step, rows, num_drafts):
    """A plan of decoding rows (slot, uid, generation, decode steps)."""
    slots, uids, generations, steps = (np.array(column) for column in zip(*rows, strict=True))
    count = len(rows)
    return StepPlan(
        step=step, num_decode=count, draft_length=num_drafts,
        slots_np=slots.astype(np.int32), generations_np=generations.astype(np.int32), uids_np=uids.astype(np.int64),
        decode_steps_np=steps.astype(np.int32), num_given_np=np.ones(count, np.int32), emits_np=np.ones(count, np.bool_),
        caps_np=np.full(count, num_drafts, np.int32), context_np=np.full(count, 50, np.int32),
        context_upper_bound_np=50 + slots.astype(np.int32), sampled_np=slots % 3 == 0,
        teaches_np=np.ones(count, np.bool_), admissions=(), page_writes_np=np.zeros((0, 3), np.int32),
        any_sampled=bool((slots % 3 == 0).any()), any_top_k=False, any_top_p=False,
    )  # fmt: skip


def test_the_store_equals_a_dict_by_slot():
    """Slots change hands, reports come late and twice, requests pause: what is known is the same."""
    rng, fast, slow = np.random.default_rng(0), ConfidenceStore(4), plain.Store()
    seen = []
    for step in range(400):
        slots = rng.permutation(12 if step < 200 else 60)[: rng.integers(1, 9)]
        rows = [(s, *rng.integers(0, 3, 3)) for s in slots.tolist()]
        plan = plan_of(step, rows, 4)
        seen.append(plan)
        for steps_later, read in ((0, fast.lookup), (1, fast.own)):
            found, wanted = read(plan), slow.read(plan, steps_later)
            assert found.known_np.tolist() == [known for known, _, _ in wanted]
            assert found.stale_np.tolist() == [stale for _, stale, _ in wanted]
            for i, (known, _, signal) in enumerate(wanted):
                assert found.lengths_np[i] == (len(signal) if known else 0)
                if known:
                    assert found.values_np[i, : len(signal)].tolist() == signal.tolist()
        late = seen[int(rng.integers(max(0, len(seen) - 3), len(seen)))]
        length = int(rng.integers(0, 5))
        values = rng.random((late.num_decode, length))
        fast.put(late, values)
        slow.put(late, values)


@pytest.mark.parametrize("cost", [COSTS[0], STAIRS])
@pytest.mark.parametrize("mode", ["adaptive", "lag", "lag-budget"])
def test_what_draft_length_left_behind_changes_no_decision(mode, cost):
    """A policy that forgets its memo before every call decides alike; so the memo is one."""
    policies, num_drafts = [], 7
    for _ in range(2):
        config = SpeculativeConfig.for_mode(mode, draft_model="scripted")
        policies.append(make_policy(config, num_drafts=num_drafts, cost=CostModel(cost, DraftTimes.constant(0.2)))[0])
    rng, previous = np.random.default_rng(3), None
    rows = [(slot, slot, 1, 0) for slot in range(20)]
    for step in range(80):
        if step % 9 == 8:
            rows[step % 20] = (step % 20, 100 + step, rows[step % 20][2] + 1, 0)
        plan = plan_of(step, rows, num_drafts)
        report = DraftReport(step=step, signal_np=rng.beta(3, 1, (20, num_drafts)).astype(np.float32))
        accepted, early = rng.integers(0, 3, 20), step % 4 == 0
        decisions = []
        for forgets, policy in enumerate(policies):

            def call(name, *values, policy=policy, forgets=forgets):
                if forgets:
                    policy._expected = None
                return getattr(policy, name)(*values)

            if mode != "adaptive" and previous:
                call("observe", *previous[:2])
            length = call("draft_length", plan)
            short = replace(plan, draft_length=length, caps_np=np.minimum(plan.caps_np, length))
            told = replace(report, signal_np=report.signal_np[:, :length])
            if previous and (early or mode == "adaptive"):  # learning between the two must be heard by the second
                call("learn", previous[0], previous[2])
            if mode == "adaptive":
                call("observe", short, told)
            decision = call("decide", short)
            if previous and not (early or mode == "adaptive"):
                call("learn", previous[0], previous[2])
            decisions.append((short, told, decision))
        (plan, told, one), (_, _, other) = decisions
        assert plan.draft_length == decisions[1][0].draft_length
        assert one.budget == other.budget
        np.testing.assert_array_equal(one.widths_np, other.widths_np)
        widths = one.widths_np if one.widths_np is not None else np.minimum(one.caps_np, 2)
        result = StepResult(step=step, widths_np=widths, num_accepted_np=np.minimum(accepted, widths).astype(np.int32),
                            token_ids_np=np.zeros((20, 1), np.int32), invalid_np=np.zeros(20, np.bool_))  # fmt: skip
        previous = plan, told, result
        rows = [(slot, uid, generation, steps + 1) for slot, uid, generation, steps in rows]


@pytest.mark.parametrize("cost", [COSTS[0], STAIRS, LinearCost(2.0, 0.7)])
@pytest.mark.parametrize("mode", ["adaptive", "lag", "lag-budget"])
def test_what_waits_a_few_steps_waits_as_the_plain_rule_says(mode, cost):
    """Requests come and go, sampled ones among them, some teach nothing, caps fall: in every step the same draft length,
    the same survivals before the decision, the same estimates, and the same steps that are timed."""
    config = SpeculativeConfig.for_mode(mode, draft_model="scripted")
    model, records, timed = CostModel(cost, DraftTimes.by_length({1: 0.05, 7: 0.3})), [], []
    policy, _ = make_policy(config, num_drafts=7, cost=model, on_record=records.append)
    slow, rng, previous = plain.Amortised(7, model, mode == "adaptive"), np.random.default_rng(5), None
    observe, model.observe = (
        model.observe,
        lambda *args, **fields: (timed.append(fields["steps"]), observe(*args, **fields)),
    )
    live, uid, lag = {slot: [slot, 1, 0] for slot in range(8)}, 100, mode != "adaptive"
    for step in range(260):
        if rng.random() < 0.15:
            slot, uid = int(rng.integers(8)), uid + 1
            live[slot] = [uid, live[slot][1] + 1, 0]
        slots = [slot for slot in live if step < 100 or slot < (step // 20) % 8 + 1]
        plan = plan_of(step, [(slot, *live[slot]) for slot in slots], 7)
        if step % 5 == 4:
            caps = rng.integers(0, 8, len(slots)).astype(np.int32)
            caps[0] = 7
            plan = replace(plan, caps_np=caps, teaches_np=rng.random(len(slots)) < 0.7)
        if lag and previous:
            for each in (policy, slow):
                each.observe(*previous[:2])
        length = policy.draft_length(plan)
        assert length == slow.draft_length(plan), step
        expected = slow.expected(plan)
        plan = replace(plan, draft_length=length, caps_np=np.minimum(plan.caps_np, length))
        shares = rng.beta(3, 1 + step // 60, (len(slots), 7)).astype(np.float32)
        report = DraftReport(step=step, signal_np=shares[:, :length])
        if not lag:
            learn(policy, slow, previous, timed)
            for each in (policy, slow):
                each.observe(plan, report)
        known = len(records)
        decision = policy.decide(plan)
        slow.decided(plan, decision)
        if lag and len(records) > known:
            survival = records[-1].problem.survival_np  # of all drafts where a length was chosen
            assert survival.shape[1] in (length, 7)
            np.testing.assert_array_equal(survival, expected[:, : survival.shape[1]])
        if lag:
            learn(policy, slow, previous, timed)
        np.testing.assert_array_equal(policy.calibration_np[..., 1], slow.survival.shift.astype(np.float32))
        np.testing.assert_array_equal(policy.survival.prior(np.array([0, 1])), slow.survival.prior([0, 1]))
        half = np.full((2, 7), 0.5)
        np.testing.assert_array_equal(
            policy.survival.predict(half, np.array([0, 1])), slow.survival.predict(half, [0, 1])
        )
        widths = decision.widths_np if decision.widths_np is not None else np.minimum(decision.caps_np, 2)
        result = StepResult(step=step, widths_np=widths, num_accepted_np=rng.integers(0, widths + 1).astype(np.int32),
                            token_ids_np=np.zeros((len(slots), 1), np.int32), invalid_np=rng.random(len(slots)) < 0.02)  # fmt: skip
        previous = plan, report, result, decision
        for slot in slots:
            live[slot][2] += 1
    assert {why for _, why, _ in slow.lengths} == {"probe", "kept", "chosen"}
    assert slow.num_taught > 100


def learn(policy, slow, previous, timed):
    """Both learn from a step, and time it."""
    if previous is None:
        return
    plan, _, result, decision = previous
    timed.clear()
    policy.learn(plan, result)
    if policy.times(plan):
        policy.timed(plan, decision, 3.0 + 0.01 * plan.step % 1)
    slow.learn(plan, result)
    assert timed == ([steps] if (steps := slow.steps_if_timed()) else [])
