"""Calibration, prior and lag map: what a survival is made of, and what it learns."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slipstream.decide.calibration import Calibration
from slipstream.decide.survival import MEAN_WEIGHT, PRIOR_WEIGHT, SurvivalModel, clean
from slipstream.errors import ConfigError

S = 5
GREEDY, SAMPLED = 0, 1
HALVES = 0.5 ** np.arange(1, S + 1)


def classes(count, label=GREEDY):
    return np.full(count, label)


def all_of(count):
    return np.ones(count, dtype=bool)


def signals(max_rows=6):
    rows = st.integers(1, max_rows)
    value = st.floats(-2, 3, width=32) | st.sampled_from([np.nan, np.inf, -np.inf, 0.0, 1.0])
    return rows.flatmap(lambda n: hnp.arrays(np.float32, (n, S), elements=value))


# ------------------------------------------------------------------------------------------------------------- cleaning


def test_x7_clamps_and_stops_at_what_is_not_finite():
    raw = np.array([[0.9, np.nan, 0.9], [2, -1, 0.5], [np.inf, 0.5, 0.5]], dtype=np.float32)
    np.testing.assert_array_equal(clean(raw), np.array([[np.float32(0.9), 0, 0], [1, 0, 0.5], [0, 0, 0]]))
    survival = SurvivalModel(3).fresh(raw, classes(3))
    np.testing.assert_array_equal(survival, np.array([[np.float32(0.9), 0, 0], [1, 0, 0], [0, 0, 0]]))


def test_cleaning_leaves_its_input_alone():
    raw = np.array([[0.9, np.nan, 3.0]], dtype=np.float32)
    before = raw.copy()
    clean(raw)
    np.testing.assert_array_equal(raw, before)


@given(signals(), st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_survivals_are_monotone_probabilities_whatever_was_learned(raw, seed):
    model, rng = SurvivalModel(S, rng_scale(seed)), np.random.default_rng(seed)
    teach_at_random(model, rng)
    labels = rng.integers(0, 2, len(raw))
    lengths = rng.integers(0, S + 1, len(raw))
    fresh = model.fresh(raw, labels)
    extended = model.extend(fresh, lengths, labels)
    for survival in (fresh, extended, model.predict(extended, labels), model.prior(labels)):
        assert survival.dtype == np.float64
        assert np.isfinite(survival).all()
        assert ((survival >= 0) & (survival <= 1)).all()
        assert (np.diff(survival, axis=1) <= 1e-15).all()


def rng_scale(seed):
    return np.random.default_rng(seed).uniform(0.3, 3, (2, S))


def teach_at_random(model, rng, rounds=5):
    for _ in range(rounds):
        count = int(rng.integers(1, 6))
        labels, length = rng.integers(0, 2, count), int(rng.integers(1, S + 1))
        fresh = np.cumprod(rng.uniform(0, 1, (count, length)), axis=1)
        lagged = np.cumprod(rng.uniform(0, 1, (count, S)), axis=1)
        model.teach_survival(fresh, lagged, rng.integers(0, S + 1, count), labels, all_of(count))
        widths = rng.integers(0, length + 1, count)
        model.teach_outcomes(fresh, widths, rng.integers(0, widths + 1), labels, all_of(count))


# ---------------------------------------------------------------------------------------------------------- calibration


def test_temperatures_scale_logits_per_position_and_class():
    scale = np.array([[1, 2, 1, 1, 1], [0.5] * S], dtype=float)
    model = SurvivalModel(S, scale)
    raw = np.full((2, S), 0.7, dtype=np.float32)
    found = model.confidence(raw, np.array([GREEDY, SAMPLED]))
    odds = 0.7 / 0.3
    np.testing.assert_allclose(found[0, :2], [0.7, odds**2 / (1 + odds**2)], rtol=1e-6)
    np.testing.assert_allclose(found[1], odds**0.5 / (1 + odds**0.5), rtol=1e-6)


def test_device_formula_agrees():
    """`calibration_np` is all that the device needs to rank by the same survival."""
    model, rng = SurvivalModel(S, rng_scale(3)), np.random.default_rng(3)
    teach_at_random(model, rng, rounds=40)
    pairs = model.calibration_np
    assert pairs.shape == (2, S, 2)
    assert pairs.dtype == np.float32
    assert (pairs[..., 1] != 0).any()
    raw = rng.uniform(0.01, 0.99, (6, S)).astype(np.float32)
    labels = rng.integers(0, 2, 6)
    kept = np.clip(raw, 1e-6, 1 - 1e-6)
    logit = np.log(kept / (1 - kept)) * pairs[labels, :, 0] + pairs[labels, :, 1]
    np.testing.assert_allclose(np.cumprod(1 / (1 + np.exp(-logit)), axis=1), model.fresh(raw, labels), atol=1e-5)


def outcomes(rng, count, true_confidence, widths):
    """Number accepted within `widths` when draft j is accepted with `true_confidence`, given those before it."""
    hits = np.logical_and.accumulate(rng.random((count, S)) < true_confidence, axis=1)
    return np.minimum(hits.sum(axis=1), widths)


@pytest.mark.parametrize("pattern", ["full", "one", "mixed"])
def test_shift_learns_the_true_confidence_whatever_was_verified(pattern):
    """Counts are conditional: pruning does not make a position look rejected."""
    rng = np.random.default_rng(0)
    model, told, true = SurvivalModel(S), 0.6, 0.85
    signal = np.full((32, S), told, dtype=np.float32)
    for _ in range(400):
        widths = {"full": np.full(32, S), "one": np.full(32, 1), "mixed": rng.integers(0, S + 1, 32)}[pattern]
        accepted = outcomes(rng, 32, true, widths)
        model.teach_outcomes(model.confidence(signal, classes(32)), widths, accepted, classes(32), all_of(32))
    learned = model.confidence(signal[:1], classes(1))[0]
    if pattern == "one":
        np.testing.assert_allclose(learned, [true, *[told] * (S - 1)], atol=0.04)  # unseen positions stay as they were
    else:
        np.testing.assert_allclose(learned, true, atol=0.04)
    sampled = model.confidence(signal[:1], classes(1, SAMPLED))[0]
    np.testing.assert_allclose(sampled, told, rtol=1e-6)  # the other class learned nothing


def test_a_few_outcomes_move_little_and_old_ones_fade():
    model = SurvivalModel(S)
    signal = np.full((1, S), 0.5, dtype=np.float32)

    def see(accepted, times):
        for _ in range(times):
            confidence = model.confidence(signal, classes(1))
            model.teach_outcomes(confidence, np.array([1]), np.array([accepted]), classes(1), all_of(1))

    see(1, 8)
    first = model.confidence(signal, classes(1))[0, 0]
    # 8 of 8, beside 64 pseudo-outcomes at one half: about (32 + 8) / (64 + 8)
    assert first == pytest.approx((PRIOR_WEIGHT / 2 + 8) / (PRIOR_WEIGHT + 8), abs=0.005)
    see(1, 3000)
    assert model.confidence(signal, classes(1))[0, 0] > 0.93
    see(0, 3000)
    assert model.confidence(signal, classes(1))[0, 0] < 0.1


def test_nothing_verified_teaches_nothing():
    model = SurvivalModel(S)
    confidence = np.full((3, S), 0.5)
    model.teach_outcomes(confidence, np.zeros(3, int), np.zeros(3, int), classes(3), all_of(3))
    assert not model.calibration_np[..., 1].any()


def test_a_signal_that_was_not_finite_teaches_nothing():
    model = SurvivalModel(S)
    confidence = model.confidence(np.full((4, S), np.nan, dtype=np.float32), classes(4))
    model.teach_outcomes(confidence, np.full(4, S), np.full(4, S), classes(4), all_of(4))
    assert not model.calibration_np[..., 1].any()


def test_a_surprising_batch_does_not_throw_the_shift_off():
    model = SurvivalModel(S)
    sure = np.full((256, S), 0.999, dtype=np.float32)
    for _ in range(3):
        confidence = model.confidence(sure, classes(256))
        model.teach_outcomes(confidence, np.full(256, S), np.zeros(256, int), classes(256), all_of(256))
    assert np.abs(model.calibration_np[..., 1]).max() <= 4.0


# ---------------------------------------------------------------------------------------------------------------- prior


def test_prior_starts_at_halves_and_averages_fresh_survival():
    model = SurvivalModel(S)
    np.testing.assert_allclose(model.prior(classes(1))[0], HALVES)
    fresh = np.tile(np.linspace(0.9, 0.7, S), (16, 1))
    none = np.zeros((16, S)), np.zeros(16, int)
    model.teach_survival(fresh, *none, classes(16), all_of(16))
    weight = MEAN_WEIGHT * 0.999
    np.testing.assert_allclose(model.prior(classes(1))[0], (HALVES * weight + fresh[0] * 16) / (weight + 16))
    np.testing.assert_allclose(model.prior(classes(1, SAMPLED))[0], HALVES)
    for _ in range(200):
        model.teach_survival(fresh, *none, classes(16), all_of(16))
    np.testing.assert_allclose(model.prior(classes(1))[0], fresh[0], atol=0.02)


def test_rows_are_carried_on_by_the_conditional_ratios_of_the_prior():
    model = SurvivalModel(S)
    survival = np.array([[0.8, 0.4, 9, 9, 9], [0.9, 0.8, 0.7, 0.6, 0.5], [9.0] * S])
    found = model.extend(survival, np.array([2, S, 0]), classes(3))
    np.testing.assert_allclose(found, [[0.8, 0.4, 0.2, 0.1, 0.05], [0.9, 0.8, 0.7, 0.6, 0.5], HALVES])


# -------------------------------------------------------------------------------------------------------------- lag map


def chain(rng, rows, mean, correlation, steps):
    """Survivals of consecutive steps, [rows, S] each, that forget their deviation from `mean`."""
    state = rng.normal(size=rows)
    while steps:
        state = correlation * state + np.sqrt(1 - correlation**2) * rng.normal(size=rows)
        yield np.clip(mean + 0.12 * state[:, None] * mean, 0, 1)
        steps -= 1


def test_lag_map_predicts_the_next_step_better_than_the_lagged_value_does():
    rng = np.random.default_rng(1)
    model, mean = SurvivalModel(S), np.array([0.8, 0.65, 0.5, 0.4, 0.3])
    errors = {"raw": [], "mapped": []}
    previous = None
    for step, fresh in enumerate(chain(rng, 8, mean, 0.5, 600)):
        if previous is not None:
            if step > 300:
                errors["raw"].append(np.mean((fresh - previous) ** 2))
                errors["mapped"].append(np.mean((fresh - model.predict(previous, classes(8))) ** 2))
            model.teach_survival(fresh, previous, np.full(8, S), classes(8), all_of(8))
        previous = fresh
    assert np.mean(errors["mapped"]) < 0.85 * np.mean(errors["raw"])
    np.testing.assert_allclose(model._lag.slope()[GREEDY], 0.5, atol=0.08)


def test_lag_map_starts_cautious():
    """Before anything is learned: half way between the lagged value and one half to the power of j."""
    model = SurvivalModel(S)
    lagged = np.full((1, S), 0.9)
    want = np.minimum.accumulate(HALVES + 0.5 * (0.9 - HALVES))
    np.testing.assert_allclose(model.predict(lagged, classes(1))[0], want)


def test_lag_map_is_learned_from_fresh_survival_whatever_the_widths():
    """Teaching takes no widths: a pruned position teaches as much as a verified one (no ratchet down)."""
    rng = np.random.default_rng(2)
    verified_all, verified_none = SurvivalModel(S), SurvivalModel(S)
    previous = None
    for fresh in chain(rng, 8, np.full(S, 0.7), 0.5, 50):
        for model, width in ((verified_all, S), (verified_none, 0)):
            if previous is not None:
                model.teach_survival(fresh, previous, np.full(8, S), classes(8), all_of(8))
            model.teach_outcomes(fresh, np.full(8, width), np.zeros(8, int), classes(8), ~all_of(8))
        previous = fresh
    np.testing.assert_array_equal(
        verified_all.predict(previous, classes(8)), verified_none.predict(previous, classes(8))
    )


def test_lag_map_in_batches_equals_a_weighted_regression():
    """Decayed sums kept from batch to batch are those of one regression over all pairs, weighted by age."""
    rng = np.random.default_rng(3)
    model = SurvivalModel(1)
    pairs = []
    for step in range(30):
        count = int(rng.integers(1, 9))
        x = rng.random((count, 1))
        y = np.clip(0.2 + 0.6 * x + rng.normal(0, 0.1, (count, 1)), 0, 1)
        model.teach_survival(y, x, np.ones(count, int), classes(count), all_of(count))
        pairs.append((step, x, y))
    age = np.concatenate([np.full(len(x), 29 - step) for step, x, _ in pairs])
    x, y = (np.concatenate([pair[i] for pair in pairs])[:, 0] for i in (1, 2))
    weight = 0.999**age
    center_x, center_y = np.average(x, weights=weight), np.average(y, weights=weight)
    pull = PRIOR_WEIGHT * 0.05
    over, under = np.sum(weight * (x - center_x) * (y - center_y)), np.sum(weight * (x - center_x) ** 2)
    slope = (over + pull * 0.5) / (under + pull)
    start = MEAN_WEIGHT * 0.999**30  # of the pair (.5, .5), for the means only
    total = weight.sum()
    mean_x, mean_y = ((start * 0.5 + total * m) / (start + total) for m in (center_x, center_y))
    assert model._lag.slope()[GREEDY, 0] == pytest.approx(slope)
    assert model.predict(np.array([[0.9]]), classes(1))[0, 0] == pytest.approx(mean_y + slope * (0.9 - mean_x))


def test_pairs_beyond_either_length_do_not_teach():
    model = SurvivalModel(S)
    before = model.predict(np.full((1, S), 0.9), classes(1))
    fresh, lagged = np.full((4, 2), 0.9), np.full((4, S), 0.9)
    model.teach_survival(fresh, lagged, np.zeros(4, int), classes(4), all_of(4))
    np.testing.assert_array_equal(model.predict(np.full((1, S), 0.9), classes(1)), before)
    for _ in range(100):
        model.teach_survival(fresh, lagged, np.array([1, 1, 1, 1]), classes(4), all_of(4))
    _, mean_y = model._lag.means()
    assert mean_y[GREEDY, 0] > 0.8
    np.testing.assert_allclose(mean_y[GREEDY, 1:], HALVES[1:])


# ------------------------------------------------------------------------------------------------------ several steps


def test_eight_steps_taught_at_once_are_eight_lessons():
    """But for the order within the eight: all estimates agree to about the weight of a step, long ago and now."""
    rng = np.random.default_rng(6)
    at_once, one_by_one = SurvivalModel(S), SurvivalModel(S)
    for _ in range(60):
        counts = rng.integers(1, 6, 8)
        starts, count = np.cumsum(counts) - counts, int(counts.sum())
        labels, teaches = rng.integers(0, 2, count), rng.random(count) < 0.9
        lagged = np.cumprod(rng.beta(4, 1, (count, S)), axis=1)
        fresh = 0.3 * np.cumprod(rng.beta(4, 1, (count, S)), axis=1) + 0.7 * lagged
        lengths, widths = np.where(rng.random(count) < 0.8, S, 2), rng.integers(0, S + 1, count)
        signal = rng.uniform(0.3, 0.9, (count, S)).astype(np.float32)
        accepted = outcomes(rng, count, 0.8, widths)
        survivals, rest = (fresh, lagged, lengths, labels, teaches), (widths, accepted, labels, teaches)
        for first, end in zip(starts, starts + counts, strict=True):
            one_by_one.teach_survival(*(values[first:end] for values in survivals))
            told = one_by_one.confidence(signal[first:end], labels[first:end])
            one_by_one.teach_outcomes(told, *(values[first:end] for values in rest))
        at_once.teach_survival(*survivals, starts)
        at_once.teach_outcomes(at_once.confidence(signal, labels), *rest, starts)
    for name in ("_prior_weight_np", "_information_np"):  # what counts, and so what is forgotten
        np.testing.assert_allclose(getattr(at_once, name), getattr(one_by_one, name), rtol=0.005)
    np.testing.assert_allclose(at_once._lag._weight_np, one_by_one._lag._weight_np, rtol=0.005)
    np.testing.assert_allclose(at_once._lag._start_weight_np, one_by_one._lag._start_weight_np)
    np.testing.assert_allclose(at_once._prior_np, one_by_one._prior_np, atol=0.001)
    np.testing.assert_allclose(at_once._lag.slope(), one_by_one._lag.slope(), atol=0.005)
    np.testing.assert_allclose(at_once._shift_np, one_by_one._shift_np, atol=0.02)
    assert np.abs(one_by_one._shift_np).min() > 0.1


# ------------------------------------------------------------------------------------------------- fault 32, no learning


def test_fault_32_requests_that_do_not_teach_move_nothing():
    rng = np.random.default_rng(4)
    with_constrained, alone = SurvivalModel(S), SurvivalModel(S)
    for _ in range(30):
        fresh, lagged = (np.cumprod(rng.uniform(0.2, 1, (4, S)), axis=1) for _ in range(2))
        fresh[3], lagged[3] = 0.0, 1.0  # the constrained one, far from the others
        widths, accepted = np.full(4, S), np.array([1, 2, 3, 0])
        teaches = np.array([True, True, True, False])
        with_constrained.teach_survival(fresh, lagged, np.full(4, S), classes(4), teaches)
        with_constrained.teach_outcomes(fresh, widths, accepted, classes(4), teaches)
        alone.teach_survival(fresh[:3], lagged[:3], np.full(3, S), classes(3), all_of(3))
        alone.teach_outcomes(fresh[:3], widths[:3], accepted[:3], classes(3), all_of(3))
    probe = np.cumprod(rng.uniform(0.2, 1, (5, S)), axis=1)
    np.testing.assert_allclose(with_constrained.predict(probe, classes(5)), alone.predict(probe, classes(5)))
    np.testing.assert_allclose(with_constrained.prior(classes(1)), alone.prior(classes(1)))
    np.testing.assert_allclose(with_constrained.calibration_np, alone.calibration_np)


def test_without_learning_nothing_moves():
    model, rng = SurvivalModel(S, learns=False), np.random.default_rng(5)
    teach_at_random(model, rng)
    lagged = np.cumprod(rng.random((3, S)), axis=1)
    np.testing.assert_array_equal(model.predict(lagged, classes(3)), lagged)
    np.testing.assert_allclose(model.prior(classes(1))[0], HALVES)
    np.testing.assert_array_equal(model.calibration_np, SurvivalModel(S).calibration_np)


# ----------------------------------------------------------------------------------------------------------------- file


def test_calibration_file(tmp_path):
    path = tmp_path / "calibration.json"
    table = Calibration(temperatures={("head", "greedy"): (0.5, 2.0), ("peak", "sampled"): (1.5,) * 9})
    table.save(path)
    loaded = Calibration.load(path)
    assert loaded == table
    np.testing.assert_allclose(loaded.scale_np("head", 4), [[2, 0.5, 0.5, 0.5], [1, 1, 1, 1]])
    np.testing.assert_allclose(loaded.scale_np("peak", 4), [[1] * 4, [1 / 1.5] * 4])
    np.testing.assert_allclose(loaded.scale_np("drawn", 4), np.ones((2, 4)))
    assert loaded.covers("head")
    assert not loaded.covers("drawn")


def test_a_calibration_knows_which_weights_it_is_of(tmp_path):
    """By entry; one without a digest, as older files have them, fits any weights."""
    path = tmp_path / "calibration.json"
    ones = {("head", "greedy"): (1.0,), ("head", "sampled"): (1.0,), ("peak", "greedy"): (1.0,)}
    Calibration(temperatures=ones, weights={("head", "greedy"): "a", ("head", "sampled"): "b"}).save(path)
    loaded = Calibration.load(path)
    assert loaded.about == {}
    assert loaded.of_other_weights("a") == [("head", "sampled")]
    assert loaded.of_other_weights(None) == []


GOOD = {"temperatures": [1.0, 0.9], "num_samples": 10, "ece_before": 0.05}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"signals": {}}, "version"),
        ({"version": 2, "signals": {}}, "version"),
        ([], "version"),
        ({"version": 1}, "signals must be an object"),
        ({"version": 1, "signals": {"nose": {}}}, r"signals\.nose"),
        ({"version": 1, "signals": {"head": {"warm": GOOD}}}, r"signals\.head\.warm"),
        ({"version": 1, "signals": {"head": {"greedy": []}}}, r"signals\.head\.greedy"),
        ({"version": 1, "signals": {"head": {"greedy": {"temperatures": []}}}}, r"greedy\.temperatures"),
        ({"version": 1, "signals": {"head": {"greedy": {"temperatures": [1, 0]}}}}, r"temperatures\[1\]"),
        ({"version": 1, "signals": {"head": {"greedy": {"temperatures": [float("nan")]}}}}, r"temperatures\[0\]"),
        ({"version": 1, "signals": {"head": {"greedy": {"temperatures": [10**400]}}}}, r"temperatures\[0\]"),
        ({"version": 1, "signals": {"head": {"greedy": {**GOOD, "weights": 5}}}}, r"greedy\.weights"),
    ],
)
def test_a_malformed_calibration_names_the_field(tmp_path, data, message):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=message) as caught:
        Calibration.load(path)
    assert str(path) in str(caught.value)


def test_calibration_that_is_no_json(tmp_path):
    path = tmp_path / "calibration.json"
    for text in ("{", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"calibration\.json"):
            Calibration.load(path)
