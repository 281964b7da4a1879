"""The rate that a step is to beat: what counts, what fades, and what it is good for."""

from dataclasses import replace

import numpy as np
import pytest

from slipstream.decide import controller
from slipstream.decide.controller import Problem
from slipstream.decide.cost import TableCost
from slipstream.decide.going_rate import GoingRate
from slipstream.plan import StepResult
from tests.unit.test_policy import Row, plan_of


def plan_and_result(step, accepted, teaches=True):
    rows = [Row(slot, slot, teaches=teaches) for slot in range(len(accepted))]
    plan = plan_of(step, rows)
    values = np.array(accepted, np.int32)
    nothing = np.zeros((len(accepted), 1), np.int32)
    return plan, StepResult(step=step, widths_np=values, num_accepted_np=values, token_ids_np=nothing,
                            invalid_np=np.zeros(len(accepted), np.bool_))  # fmt: skip


def told(rate, step, accepted, ms, teaches=True):
    plan, result = plan_and_result(step, accepted, teaches)
    rate.price(plan, ms)
    rate.count(plan, result)


def test_there_is_no_past_before_the_first_step():
    assert GoingRate().past(4) == (0.0, 0.0)


def test_older_steps_fade_and_tokens_go_by_the_number_of_sequences():
    rate = GoingRate()
    told(rate, 0, [3, 1], 10.0)
    assert rate.past(2) == (6.0, 10.0)
    assert rate.past(1) == (3.0, 10.0)
    told(rate, 1, [0, 0, 0, 0], 20.0)
    assert rate.past(4) == pytest.approx((GoingRate.KEPT * 12 + 4, GoingRate.KEPT * 10 + 20))


def test_a_row_that_teaches_nothing_is_counted_as_the_others_are():
    rate = GoingRate()
    plan, result = plan_and_result(0, [2, 0, 7])
    plan = replace(plan, teaches_np=np.array([True, True, False]))
    rate.price(plan, 5.0)
    rate.count(plan, result)
    assert rate.past(3) == (6.0, 5.0)
    told(rate, 1, [7], 5.0, teaches=False)
    assert rate.past(3) == (6.0, 5.0)


def test_a_step_without_a_price_does_not_count():
    rate = GoingRate()
    rate.count(*plan_and_result(0, [3]))
    assert rate.past(1) == (0.0, 0.0)


def test_half_of_the_steps_count():
    counted = [GoingRate().counts(step) for step in range(1000)]
    assert 490 < sum(counted) < 510
    assert 240 < sum(counted[::2]) < 260


def test_steps_decided_by_the_going_rate_make_more_tokens_in_the_same_time():
    """Rich and poor steps in turn: each at its own best rate is less than all at the best rate together."""
    rng, cost = np.random.default_rng(0), TableCost(rows=(1, 200), ms=(5.0, 15.0), staircase=False)
    steps = [np.cumprod(rng.uniform(*((0.9, 1.0) if i % 2 else (0.1, 0.9)), (16, 7)), axis=1) for i in range(200)]

    def speed(follows):
        rate, tokens, ms = GoingRate(), 0.0, 0.0
        for step, survival in enumerate(steps):
            past_tokens, past_ms = rate.past(16) if follows else (0.0, 0.0)
            ones = np.ones(16, dtype=np.int64)
            widths = controller.decide_widths(
                Problem(rule="widths", survival_np=survival, unknown_np=np.zeros(16, np.bool_), caps_np=7 * ones,
                        kv_np=ones, given_np=ones, num_emitting=16 + past_tokens, cost=cost, draft_ms=1.0 + past_ms)
            )  # fmt: skip
            expected = np.where(np.arange(7) < widths[:, None], survival, 0.0).sum()
            step_ms = 1.0 + cost.ms_of_rows(16 + int(widths.sum()))
            plan, result = plan_and_result(step, np.full(16, round(expected / 16)))
            rate.price(plan, step_ms)
            rate.count(plan, result)
            tokens, ms = tokens + 16 + expected, ms + step_ms
        return tokens / ms

    assert speed(True) > 1.005 * speed(False)
