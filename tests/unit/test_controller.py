"""The controller: worked examples, the vectorised rules against plain loops, staircases, records."""

import json
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.decide import controller
from slipstream.decide.controller import (
    MIN_MS,
    Problem,
    decide_budget,
    decide_widths,
    widths_of_largest,
)
from slipstream.decide.cost import LinearCost, TableCost
from slipstream.decide.record import DecisionRecord, decide, replay
from slipstream.decide.survival import clean
from slipstream.errors import ConfigError


def problem(survival, cost, *, rule="greedy", kv=100, unknown=None, caps=None, given_rows=1, draft_ms=0.0, **other):
    survival = np.asarray(survival, dtype=np.float64)
    count, length = survival.shape
    return Problem(
        rule=rule,
        survival_np=survival,
        unknown_np=np.zeros(count, dtype=bool) if unknown is None else np.asarray(unknown),
        caps_np=np.full(count, length) if caps is None else np.asarray(caps, dtype=np.int64),
        kv_np=np.broadcast_to(np.asarray(kv, dtype=np.int64), (count,)).copy(),
        given_np=np.broadcast_to(np.asarray(given_rows, dtype=np.int64), (count,)).copy(),
        num_emitting=other.pop("num_emitting", count),
        cost=cost,
        draft_ms=draft_ms,
        **other,
    )


def survival_of(confidence):
    return np.cumprod(clean(np.asarray(confidence, dtype=np.float32).astype(np.float64)), axis=1)


X1 = [[0.95, 0.90, 0.20], [0.80, 0, 0.10]]
X12 = [[0.8, 0.6, 0.45, 0.3]] * 8
EXAMPLES = [
    ("X1", X1, 100, (1, 0.5, 0.001), 1, {}, [2, 1]),
    ("X2", [[0.0] * 3] * 2, 100, (1, 0.5, 0.001), 1, {}, [0, 0]),
    ("X3", [[0.99, 0.98], [0.90, 0]], 100, (1, 0.5, 0.001), 1, {}, [2, 1]),
    ("X4", X1, 100, (1, 0.5, 0.001), 0, {}, [2, 1]),
    ("X7", [[0.9, np.nan, 0.9], [2, -1, 0.5]], 10, (10, 0.1, 0), 0, {}, [1, 1]),
    ("X8", [[0.6] * 3] * 2, [100, 8000], (2, 0.2, 0.0002), 0, {}, [3, 0]),
    ("X11", [[0.9] * 7] * 32, 500, (20, 0.02, 1e-6), 0, {}, [7] * 32),
    ("X12, draft 0", X12, 500, (5, 0.9, 0), 0, {}, [1] * 8),
    ("X12, draft 10", X12, 500, (5, 0.9, 0), 10, {}, [2] * 8),
    ("X13, gain .05", X12, 500, (5, 0.9, 0), 10, {"min_gain": 0.05}, [2] * 8),
    ("X13, gain .1", X12, 500, (5, 0.9, 0), 10, {"min_gain": 0.1}, [1] * 8),
]


@pytest.mark.parametrize(("name", "confidence", "kv", "predictor", "draft_ms", "other", "widths"), EXAMPLES)
def test_worked_example(name, confidence, kv, predictor, draft_ms, other, widths):
    asked = problem(survival_of(confidence), LinearCost(*predictor), kv=kv, draft_ms=draft_ms, **other)
    assert decide_widths(asked).tolist() == widths


def test_x10_unknown_rows_take_full_width_and_are_priced_first():
    known = survival_of([[0.6, 0.5, 0.4]] * 2)
    prior = np.tile(0.5 ** np.arange(1, 4), (2, 1))
    asked = problem(np.concatenate([known, prior]), LinearCost(2, 0.8), unknown=[False, False, True, True])
    assert decide_widths(asked).tolist() == [1, 1, 3, 3]


T1 = [[0.9, 0.8, 0.7], [0.6, 0.5, 0.4], [0.95, 0.9, 0.9], [0.3, 0.3, 0.3]]
T1_TABLE = TableCost(rows=(8, 16, 32), ms=(5.0, 6.0, 9.0))


def test_t1_budget_on_a_staircase():
    asked = problem(survival_of(T1), T1_TABLE, rule="budget", draft_ms=1)
    assert decide_budget(asked) == 12
    ranked = controller.rank_candidates(asked.survival_np, asked.caps_np)
    rates = controller._rates(asked, np.zeros(4, dtype=np.int64), ranked)
    assert int(np.flatnonzero(rates[1:] <= rates[:-1])[0]) == 4  # where a stop at the first fall would have ended


# ---------------------------------------------------------------------------------- against loops, on random problems


def sequential_greedy(p):
    """The greedy rule as a loop, one candidate at a time."""
    count, length = p.survival_np.shape
    width = [min(int(p.caps_np[i]), length) if p.unknown_np[i] else 0 for i in range(count)]
    accepted = controller._accepted_in(p, np.asarray(width))
    time = p.cost.step_ms(p.given_np, p.kv_np, np.asarray(width))

    def score(a, v):
        return (p.num_emitting + a) / (max(p.draft_ms, MIN_MS) + max(v, MIN_MS))

    candidates = [(-p.survival_np[i, j], j, i) for i, j in product(range(count), range(length)) if not p.unknown_np[i]]
    for minus_survival, j, i in sorted(candidates):
        if j != width[i] or j >= p.caps_np[i]:
            continue
        a, price = -minus_survival, p.cost.c1 + p.cost.c2 * float(p.kv_np[i])
        rises = score(accepted + a, time + price) > score(accepted, time)
        gains = a * (p.draft_ms + time) > (1 + p.min_gain) * (p.num_emitting + accepted) * price
        if rises and (p.min_gain == 0 or gains):
            width[i], accepted, time = j + 1, accepted + a, time + price
    return width


@st.composite
def problems(draw, cost=None, rule="greedy", grid=None):
    count, length = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    value = st.floats(0, 1) if draw(st.booleans()) else st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 0.1, 0.3])
    confidence = draw(st.lists(st.lists(value, min_size=length, max_size=length), min_size=count, max_size=count))
    survival = np.cumprod(np.asarray(confidence), axis=1)
    ints = lambda low, high: st.lists(st.integers(low, high), min_size=count, max_size=count)  # noqa: E731
    coefficient = st.sampled_from([0.0, 1e-4, 0.01, 0.1, 0.5, 1.0, 3.0])
    if cost is None:
        c0 = draw(st.sampled_from([0.0, 1e-7, 0.5, 1.0, 10.0]))
        cost = LinearCost(c0, draw(coefficient), draw(coefficient) * 1e-2, draw(coefficient) * 1e-3)
    return problem(
        survival,
        cost,
        rule=rule,
        kv=draw(ints(0, 4000)),
        unknown=np.asarray(draw(st.lists(st.booleans(), min_size=count, max_size=count))),
        caps=draw(ints(0, length + 1)),
        given_rows=draw(ints(1, 3)),
        draft_ms=draw(st.sampled_from([0.0, 0.5, 2.0, 20.0])),
        num_emitting=draw(st.integers(0, count)),
        min_gain=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5])),
    )


@given(problems())
@settings(max_examples=400, deadline=None)
def test_greedy_equals_the_sequential_rule(p):
    wanted = sequential_greedy(p)
    for few in (0, 10**9):  # by vectors, and one by one
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(controller, "FEW", few)
            assert decide_widths(p).tolist() == wanted


@pytest.mark.parametrize("seed", range(12))
def test_greedy_equals_the_sequential_rule_on_large_steps(seed):
    rng = np.random.default_rng(seed)
    count, length = 96, 16
    survival = np.cumprod(rng.beta(4, 1.5, (count, length)), axis=1)
    cost = LinearCost(rng.uniform(0, 30), rng.uniform(0, 0.2), 10 ** rng.uniform(-7, -3), 1e-5)
    p = problem(survival, cost, kv=rng.integers(1, 30000, count), draft_ms=rng.uniform(0, 5),
                caps=rng.integers(0, length + 1, count), unknown=rng.random(count) < 0.1)  # fmt: skip
    widths = decide_widths(p)
    assert widths.tolist() == sequential_greedy(p)
    assert (widths <= p.caps_np).all()


def all_budgets(p, base):
    """[(rate, widths)] of every budget, by a loop."""
    taken = np.zeros_like(p.survival_np, dtype=bool)
    widths, found = base.copy(), []
    accepted = controller._accepted_in(p, base)
    order = sorted(
        (-p.survival_np[i, j], j, i)
        for i, j in product(*map(range, p.survival_np.shape))
        if base[i] == 0 and j < p.caps_np[i]
    )
    for entry in [None, *order]:
        if entry:
            minus_survival, j, i = entry
            taken[i, j] = True
            accepted -= minus_survival
            widths[i] += 1
        time = max(p.draft_ms, MIN_MS) + max(p.cost.step_ms(p.given_np, p.kv_np, widths), MIN_MS)
        found.append(((p.num_emitting + accepted) / time, widths.copy()))
    return found


STAIRCASE = TableCost(rows=(8, 16, 32), ms=(2.0, 2.5, 4.0), c2=1e-5, c3=1e-5)


@given(problems(cost=STAIRCASE, rule="budget"))
@settings(max_examples=150, deadline=None)
def test_budget_is_the_best_of_all_budgets(p):
    found = all_budgets(p, np.zeros_like(p.caps_np))
    budget = decide_budget(p)
    assert found[budget][0] >= max(rate for rate, _ in found) * (1 - 1e-9)
    assert budget <= np.minimum(p.caps_np, p.survival_np.shape[1]).sum()
    assert widths_of_largest(p.survival_np, p.caps_np, budget).tolist() == found[budget][1].tolist()


@given(problems(cost=STAIRCASE, rule="widths"))
@settings(max_examples=150, deadline=None)
def test_widths_on_a_table_are_those_of_the_best_budget_beside_unknown_rows(p):
    base = np.where(p.unknown_np, np.minimum(p.caps_np, p.survival_np.shape[1]), 0)
    found = {tuple(widths): rate for rate, widths in all_budgets(p, base)}
    widths = decide_widths(p)
    assert found[tuple(widths)] >= max(found.values()) * (1 - 1e-9)
    assert (widths[p.unknown_np] == base[p.unknown_np]).all()


@given(problems(cost=STAIRCASE, rule="hull"), st.data())
@settings(max_examples=200, deadline=None)
def test_on_the_hull_no_width_depends_on_later_drafts(p, data):
    """Lowering what comes after a draft (all that its own draw could change) never changes whether it is verified."""
    widths = decide_widths(p)
    row = data.draw(st.integers(0, len(widths) - 1))
    position = data.draw(st.integers(0, p.survival_np.shape[1] - 1))
    changed = p.survival_np.copy()
    changed[row, position + 1 :] *= data.draw(st.floats(0, 1))
    again = decide_widths(problem(changed, p.cost, rule="hull", kv=p.kv_np, unknown=p.unknown_np, caps=p.caps_np,
                                  given_rows=p.given_np, draft_ms=p.draft_ms, num_emitting=p.num_emitting))  # fmt: skip
    if not p.unknown_np[row]:
        assert (widths[row] > position) == (again[row] > position)


@given(problems(), st.data())
@settings(max_examples=200, deadline=None)
def test_in_the_greedy_rule_no_width_depends_on_later_drafts(p, data):
    row = data.draw(st.integers(0, len(p.caps_np) - 1))
    position = data.draw(st.integers(0, p.survival_np.shape[1] - 1))
    changed = p.survival_np.copy()
    changed[row, position + 1 :] *= data.draw(st.floats(0, 1))
    again = problem(changed, p.cost, kv=p.kv_np, unknown=p.unknown_np, caps=p.caps_np, given_rows=p.given_np,
                    draft_ms=p.draft_ms, num_emitting=p.num_emitting, min_gain=p.min_gain)  # fmt: skip
    if not p.unknown_np[row]:
        assert (decide_widths(p)[row] > position) == (decide_widths(again)[row] > position)


def test_an_argmax_does_depend_on_later_drafts():
    """The reason for the hull: what the budget rule gives to draft 1 changes with draft 2 of the same sequence."""
    table = TableCost(rows=(1, 3), ms=(1.0, 1.6))
    with_later = problem([[0.4, 0.4]], table, rule="widths")
    without = problem([[0.4, 0.0]], table, rule="widths")
    assert decide_widths(with_later).tolist() == [2]
    assert decide_widths(without).tolist() == [0]


@given(problems(), problems(cost=STAIRCASE, rule="widths"), problems(cost=STAIRCASE, rule="hull"))
@settings(max_examples=60, deadline=None)
def test_caps_bound_every_rule(linear, table, hull):
    for p in (linear, table, hull):
        widths = decide_widths(p)
        assert (widths >= 0).all()
        assert (widths <= p.caps_np).all()


# ---------------------------------------------------------------------------------------------------- fault 5, fault 10


@pytest.mark.parametrize("rule", ["widths", "hull"])
def test_fault_5_constant_table_gives_full_width(rule):
    asked = problem(survival_of(T1), TableCost(rows=(64,), ms=(5.0,)), rule=rule)
    assert decide_widths(asked).tolist() == [3, 3, 3, 3]


def test_fault_5_constant_linear_cost_gives_full_width():
    assert decide_widths(problem(survival_of(T1), LinearCost(5.0, 0.0))).tolist() == [3, 3, 3, 3]


def test_fault_5_staircase_equals_brute_force_where_a_stop_at_the_first_fall_does_not():
    rng = np.random.default_rng(5)
    table = TableCost(rows=(8, 16, 32), ms=(3.0, 3.2, 3.4))
    fell_short = 0
    for _ in range(50):
        p = problem(np.cumprod(rng.uniform(0.3, 1, (4, 7)), axis=1), table, rule="budget", draft_ms=0.5)
        found = [rate for rate, _ in all_budgets(p, np.zeros_like(p.caps_np))]
        assert decide_budget(p) == int(np.argmax(found))
        first_fall = next((k for k in range(len(found) - 1) if found[k + 1] <= found[k]), len(found) - 1)
        fell_short += first_fall < int(np.argmax(found))
    assert fell_short > 0


def test_fault_10_a_decision_made_elsewhere_is_the_record_not_a_second_opinion():
    """Rank 1's own confidence would decide otherwise near a tie; the record that rank 0 sends decides alike everywhere."""
    cost = LinearCost(2, 0.8)
    survival = np.array([[0.4, 0.1], [0.4, 0.1]])
    rank_0 = decide(7, problem(survival, cost))
    tie = rank_0.problem.num_emitting * cost.c1 / cost.step_ms(np.ones(2, int), np.zeros(2, int), np.zeros(2, int))
    near = decide(7, problem(survival * tie / 0.4 + 5e-4, cost))
    other = decide(7, problem(survival * tie / 0.4 - 5e-4, cost))
    assert near.widths_np.tolist() != other.widths_np.tolist()
    received = DecisionRecord.from_json(near.to_json())
    assert replay(received).widths_np.tolist() == near.widths_np.tolist()


# ---------------------------------------------------------------------------------------------------------------- rest


def test_prefill_rows_count_in_the_price_and_get_nothing():
    survival = np.array([[0.5], [0.0]])
    cheap = problem(survival, LinearCost(0.1, 1.0), caps=[1, 0], num_emitting=1)
    beside_prefill = problem(survival, LinearCost(0.1, 1.0), caps=[1, 0], given_rows=[1, 40], num_emitting=1)
    assert decide_widths(cheap).tolist() == [1, 0]  # 1 token in 2.1 ms; 1.5 in 3.1
    assert decide_widths(beside_prefill).tolist() == [1, 0]
    dear = problem([[0.3], [0.0]], LinearCost(0.1, 1.0), caps=[1, 0], num_emitting=1)
    fits_now = problem([[0.3], [0.0]], LinearCost(0.1, 1.0), caps=[1, 0], given_rows=[1, 40], num_emitting=1)
    assert decide_widths(dear).tolist() == [0, 0]
    assert decide_widths(fits_now).tolist() == [1, 0]  # one row more is little beside 41


def test_no_decoding_sequence():
    for cost, rule in [(LinearCost(1, 1), "greedy"), (T1_TABLE, "widths"), (T1_TABLE, "hull")]:
        asked = problem(np.zeros((2, 3)), cost, rule=rule, caps=[0, 0], num_emitting=0)
        assert decide_widths(asked).tolist() == [0, 0]
    assert decide_budget(problem(np.zeros((2, 3)), T1_TABLE, rule="budget", caps=[0, 0], num_emitting=0)) == 0


def test_ties_go_by_position_then_sequence():
    survival = np.array([[0.5, 0.5], [0.5, 0.5]])
    caps = np.array([2, 2])
    assert [widths_of_largest(survival, caps, k).tolist() for k in range(5)] == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]


@pytest.mark.parametrize("cost", [STAIRCASE, LinearCost(1.0, 0.1, 1e-4, 1e-5)])
def test_best_rate_by_length_cuts_rows_to_each_length(cost):
    survival, kv, caps = survival_of(T1), np.array([100, 2000, 30, 4]), np.array([3, 2, 3, 0])
    draft_ms = {0: 0.0, 1: 0.2, 2: 0.3, 3: 0.9}
    ranked = controller.rank_candidates(survival, caps)
    rates = controller.best_rate_by_length(ranked, kv, np.ones(4, dtype=np.int64), 4, cost, draft_ms)
    for length, ms in draft_ms.items():
        cut = problem(survival, cost, rule="budget", kv=kv, caps=np.minimum(caps, length), draft_ms=ms)
        found = all_budgets(cut, np.zeros(4, dtype=np.int64))
        assert rates[length] == pytest.approx(max(rate for rate, _ in found), rel=1e-5)


@given(problems(), problems(cost=STAIRCASE, rule="budget"), problems(cost=STAIRCASE.hull(), rule="widths"))
@settings(max_examples=60, deadline=None)
def test_a_record_survives_json_and_replays(linear, table, hull):
    for p in (linear, table, hull):
        record = decide(3, p)
        line = record.to_json()
        assert "\n" not in line
        assert json.loads(line)["rule"] == p.rule
        again = replay(DecisionRecord.from_json(line))
        assert again.budget == record.budget
        assert (again.widths_np is None) == (record.widths_np is None)
        if record.widths_np is not None:
            assert again.widths_np.tolist() == record.widths_np.tolist()
        assert again.to_json() == line


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"step": 1, "rule": "best"}'])
def test_a_line_that_is_no_record_is_refused(line):
    with pytest.raises(ConfigError, match="decision record"):
        DecisionRecord.from_json(line)


def test_rule_for():
    linear, table = LinearCost(1, 1), T1_TABLE
    assert controller.rule_for(linear, budget=False, causal=True) == "greedy"
    assert controller.rule_for(table, budget=False, causal=True) == "hull"
    assert controller.rule_for(table, budget=False, causal=False) == "widths"
    assert controller.rule_for(linear, budget=True, causal=True) == "budget"
