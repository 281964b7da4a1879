"""Counters and clocks: stored counts, derived figures, no division by zero."""

import pytest

from slipstream.metrics import SpecCounters, Timing


def test_counts_are_kept_apart():
    counters = SpecCounters(mode="lag")
    counters.count_step(drafted=7, width=3, accepted=2, emitted=3)
    counters.count_step(drafted=7, width=0, accepted=0, emitted=1)
    counters.count_step(drafted=0, width=0, accepted=0, emitted=1)
    assert counters.as_dict() == {
        "mode": "lag", "steps": 3, "drafted": 14, "verified": 3, "accepted": 2, "emitted": 5,
        "acceptance_rate": 2 / 3, "mean_accepted_length": 5 / 3, "width_histogram": {"0": 2, "3": 1},
    }  # fmt: skip
    assert counters.wasted_share == 1 / 3
    assert (counters.verified_at, counters.accepted_at) == ({1: 1, 2: 1, 3: 1}, {1: 1, 2: 1})


def test_acceptance_at_a_position_is_of_the_times_that_it_was_reached():
    """Position 2 was verified four times and reached twice: a lost first draft and the end of the answer say nothing of it."""
    counters = SpecCounters()
    for width, accepted in ((3, 2), (3, 0), (1, 1), (2, 1)):
        counters.count_step(4, width, accepted, accepted + 1)
    counters.count_step(4, 3, 1, 1)  # the answer ended with an accepted draft
    assert counters.reached_at == {1: 5, 2: 2, 3: 1}
    assert counters.acceptance_at == [4 / 5, 1 / 2, 0.0]
    twice = SpecCounters()
    twice.merge(counters)
    twice.merge(counters)
    assert twice.acceptance_at == counters.acceptance_at
    assert SpecCounters().acceptance_at == []


def test_the_token_after_a_rejection_is_no_accepted_draft():
    counters = SpecCounters()
    counters.count_step(drafted=4, width=4, accepted=0, emitted=1)
    assert (counters.acceptance_rate, counters.mean_accepted_length, counters.wasted_share) == (0.0, 1.0, 1.0)


def test_nothing_divided_by_nothing_is_null():
    counters = SpecCounters()
    assert counters.acceptance_rate is counters.mean_accepted_length is counters.wasted_share is None
    counters.count_step(drafted=0, width=0, accepted=0, emitted=1)
    assert counters.acceptance_rate is counters.wasted_share is None
    assert counters.mean_accepted_length == 1.0


def test_a_step_cut_before_its_first_token_counts():
    counters = SpecCounters()
    counters.count_step(drafted=3, width=3, accepted=0, emitted=0)
    assert counters.mean_accepted_length == 0.0


@pytest.mark.parametrize(
    ("drafted", "width", "accepted", "emitted"), [(3, 4, 0, 1), (3, 2, 3, 3), (3, 2, -1, 1), (3, 2, 2, 4)]
)
def test_counts_that_cannot_be_are_refused(drafted, width, accepted, emitted):
    with pytest.raises(AssertionError):
        SpecCounters().count_step(drafted, width, accepted, emitted)


def test_many_steps_count_like_as_many_single_ones():
    """Kept whole: every step emits its accepted drafts and one token."""
    steps = [(7, 7), (7, 3), (4, 4), (4, 0), (0, 0), (1, 1), (1, 0), (7, 3)]
    single, many = SpecCounters(mode="lag"), SpecCounters(mode="lag")
    histograms = [[0] * 8 for _ in range(3)]
    for width, accepted in steps:
        single.count_step(7, width, accepted, accepted + 1)
        for histogram, value in zip(histograms, (width, min(accepted + 1, width), accepted), strict=True):
            histogram[value] += 1
    many.count_steps(7 * len(steps), *histograms)
    assert many == single


def test_merging_adds():
    total, other = SpecCounters(), SpecCounters()
    total.count_step(7, 3, 2, 3)
    other.count_step(7, 3, 1, 2)
    other.count_step(7, 1, 1, 2)
    total.merge(other)
    assert (total.steps, total.drafted, total.verified, total.accepted, total.emitted) == (3, 21, 7, 4, 7)
    assert total.width_histogram == {3: 2, 1: 1}
    assert total.verified_at == {1: 3, 2: 2, 3: 2}
    assert total.accepted_at == {1: 3, 2: 1}
    assert other.steps == 2


def test_clocks():
    timing = Timing(submitted_s=10.0, first_token_s=10.5, last_token_s=12.5, num_tokens=5)
    assert timing.as_dict() == {"ttft_ms": 500.0, "tpot_ms": 500.0, "tok_per_s": 2.0}


def test_clocks_of_short_answers():
    one = Timing(submitted_s=1.0, first_token_s=2.0, last_token_s=2.0, num_tokens=1)
    assert (one.ttft_ms, one.tpot_ms, one.tok_per_s) == (1000.0, None, 1.0)
    none = Timing(submitted_s=1.0, first_token_s=0.0, last_token_s=0.0, num_tokens=0)  # ended by an error
    assert (none.ttft_ms, none.tpot_ms, none.tok_per_s) == (None, None, None)
