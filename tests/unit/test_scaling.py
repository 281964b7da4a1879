"""Measures of survival against hand-made tables, and temperatures against traces whose truth is known."""

import numpy as np
import pytest

from slipstream.decide.survival import SurvivalModel
from slipstream.lab.quality import (
    auroc,
    brier,
    calibration_noise,
    expected_calibration_error,
    outcomes,
    quality,
    reliability,
)
from slipstream.lab.scaling import TEMPERATURES, fit_temperatures, scaled_confidence

S = 5


def drafted(num, temperatures, seed=0, *, least_width=None):
    """Drafts whose acceptance is known: (raw confidence [n, S], accepted [n], widths [n], true confidence [n, S]).

    The raw confidence is the true one with its logit multiplied by T, so that dividing by T makes it right. Steps differ
    in how hard they are, so that positions of a row go together as they do in service.
    """
    rng = np.random.default_rng(seed)
    logit = rng.normal(0.8, 1.2, (num, 1)) + rng.normal(0.0, 1.2, (num, len(temperatures)))
    true = 1 / (1 + np.exp(-logit))
    raw = 1 / (1 + np.exp(-logit * np.array(temperatures)))
    hits = np.logical_and.accumulate(rng.random(true.shape) < true, axis=1).sum(axis=1)
    widths = np.full(num, len(temperatures)) if least_width is None else rng.integers(least_width, S + 1, num)
    return raw.astype(np.float32), np.minimum(hits, widths), widths, true


def survival(confidence, temperatures):
    return np.cumprod(scaled_confidence(confidence.astype(np.float64), np.array(temperatures)), axis=1)


# ------------------------------------------------------------------------------------------------------------- measures


def test_a_reliability_table_by_hand():
    """Bins of equal width; a prediction of 1 belongs to the last one; empty bins are left out."""
    predicted = np.array([0.05, 0.15, 0.9, 1.0])
    table = reliability(predicted, np.array([False, True, True, True]), bins=2)
    assert [(one.predicted, one.outcome, one.count) for one in table] == [
        (pytest.approx(0.1), 0.5, 2), (pytest.approx(0.95), 1.0, 2)
    ]  # fmt: skip
    assert expected_calibration_error(predicted, np.array([False, True, True, True]), bins=2) == pytest.approx(0.225)


def test_brier_and_auroc_by_hand():
    """AUROC counts pairs: of (.8, .3) x (.5, .3), three are in order and one is a tie."""
    predicted, outcome = np.array([0.8, 0.3, 0.5, 0.3]), np.array([True, True, False, False])
    assert auroc(predicted, outcome) == pytest.approx((1 + 1 + 0 + 0.5) / 4)
    assert brier(predicted, outcome) == pytest.approx((0.04 + 0.49 + 0.25 + 0.09) / 4)


def test_what_there_is_no_figure_for_is_none():
    """No outcome, no error; nothing rejected, no order to judge."""
    nothing, some = np.zeros(0), np.array([0.5])
    none = np.zeros(0, dtype=np.bool_)
    for measure in (expected_calibration_error, brier, auroc):
        assert measure(nothing, none) is None
    assert calibration_noise(nothing) is None
    assert auroc(some, np.array([True])) is None


def test_the_noise_is_what_a_perfect_predictor_shows():
    """Mean error of 300 draws by the truth itself; both are about .03, and agree within a tenth."""
    rng = np.random.default_rng(0)
    truth = rng.random(400)
    errors = [expected_calibration_error(truth, rng.random(400) < truth) for _ in range(300)]
    assert calibration_noise(truth) == pytest.approx(np.mean(errors), rel=0.1)


def test_what_was_not_verified_does_not_count():
    """Width 3: nothing is said of draft 4, neither behind a rejected draft nor behind accepted ones."""
    survived, known = outcomes(np.array([3, 1]), np.array([3, 3]), 4)
    assert survived.tolist() == [[True, True, True, False], [True, False, False, False]]
    assert known.tolist() == [[True, True, True, False]] * 2


def test_widths_that_have_nothing_to_do_with_outcomes_bias_nothing():
    """Steps cut short at random: the truth has no error but noise, .02 at the last position. (Were the drafts behind
    rejected ones counted, it would be .08 there.)"""
    _, accepted, widths, true = drafted(20_000, [1.0] * S, least_width=1)
    errors = quality(np.cumprod(true, axis=1), *outcomes(accepted, widths, S))
    assert max(errors.ece_at) < 0.03


def test_unknown_outcomes_count_nowhere():
    """Whatever stands at positions that were not verified, every figure and every temperature stays."""
    raw, accepted, widths, _ = drafted(400, [1.5] * S, least_width=0)
    survived, known = outcomes(accepted, widths, S)
    other = np.where(known, raw, 0.123).astype(np.float32)
    assert fit_temperatures(raw, accepted, widths) == fit_temperatures(other, accepted, widths)
    judged = quality(survival(raw, [1.0] * S), survived, known)
    assert judged == quality(survival(other, [1.0] * S), survived, known)
    assert judged == quality(survival(raw, [1.0] * S), survived ^ ~known, known)


# -------------------------------------------------------------------------------------------------------------- the fit


@pytest.mark.parametrize("true", [[2.0] * S, [0.6, 0.7, 0.8, 1.0, 1.2]], ids=["over-confident", "mixed"])
def test_known_temperatures_come_back(true):
    """From 6000 steps. Of 20 seeds none was off by more than 5%, 11%, 10%, 17%, 20% at positions 1 to 5."""
    raw, accepted, widths, _ = drafted(6000, true)
    error = np.abs(np.log(np.array(fit_temperatures(raw, accepted, widths)) / true))
    assert (error < [0.06, 0.13, 0.13, 0.2, 0.25]).all()


def test_over_confident_survivals_become_right_on_other_steps():
    """Twice too large logits: an error of about .1 falls to about the noise, on steps that were not fitted on."""
    true = [2.0] * S
    raw, accepted, widths, _ = drafted(4000, true)
    found = fit_temperatures(raw, accepted, widths)
    raw, accepted, widths, _ = drafted(4000, true, seed=1)
    survived, known = outcomes(accepted, widths, S)
    before = quality(survival(raw, [1.0] * S), survived, known)
    after = quality(survival(raw, found), survived, known)
    assert before.ece > 0.05
    assert after.ece < 0.02
    assert after.brier < before.brier
    assert max(after.ece_at) < 0.04


def test_calibrated_confidence_is_left_alone():
    """Where it is right already, within what 6000 steps can tell (see above)."""
    raw, accepted, widths, _ = drafted(6000, [1.0] * S)
    assert (np.abs(np.log(fit_temperatures(raw, accepted, widths))) < [0.06, 0.13, 0.13, 0.2, 0.25]).all()


def test_the_log_loss_is_nearer_to_the_truth_than_the_calibration_error():
    """1000 steps, ten seeds: the root mean square error of ln T_1..T_3, against the same grid search with ECE. It is
    .07 against .20."""

    def by_calibration_error(raw, accepted, widths):
        survived, _ = outcomes(accepted, widths, S)
        found, prefix = [], np.ones(len(raw))
        for k in range(3):
            each = [prefix * scaled_confidence(raw[:, k].astype(np.float64), t) for t in TEMPERATURES]
            best = int(np.argmin([expected_calibration_error(one, survived[:, k]) for one in each]))
            found.append(TEMPERATURES[best])
            prefix = each[best]
        return found

    errors = np.zeros(2)
    for seed in range(10):
        raw, accepted, widths, _ = drafted(1000, [2.0] * S, seed)
        fits = fit_temperatures(raw, accepted, widths)[:3], by_calibration_error(raw, accepted, widths)
        errors += [np.square(np.log(np.array(fit) / 2.0)).mean() for fit in fits]
    log_loss, calibration_error = np.sqrt(errors / 10)
    assert log_loss < 0.8 * calibration_error


def test_where_few_rows_arrive_the_temperature_before_goes_on():
    """Two of 300 steps verified more than 2 drafts: no temperature from noise."""
    raw, accepted, widths, _ = drafted(300, [2.0] * S)
    widths = np.where(np.arange(300) < 2, S, 2)
    found = fit_temperatures(raw, np.minimum(accepted, widths), widths)
    assert found[2:] == pytest.approx([found[1]] * 3, rel=0.1)
    assert fit_temperatures(raw[:0], accepted[:0], widths[:0]) == (1.0,) * S


def test_order_inside_a_position_never_changes():
    """Of two rows with the same drafts before, the one that was given more keeps more: T > 0 is monotone."""
    raw, accepted, widths, _ = drafted(500, [2.0] * S)
    found = fit_temperatures(raw, accepted, widths)
    assert min(found) > 0
    before, after = raw.astype(np.float64), scaled_confidence(raw.astype(np.float64), np.array(found))
    for position in range(S):
        order = np.argsort(before[:, position], kind="stable")
        assert (np.diff(after[order, position]) >= 0).all()
        # The same prefix, every confidence at this position: survivals in the order of the confidences.
        rows = np.repeat(raw[:1], len(raw), axis=0)
        rows[:, position] = raw[:, position]
        assert (np.diff(survival(rows, found)[order, position]) >= 0).all()


def test_it_scales_as_the_engine_does():
    """The fit and `SurvivalModel` are the same arithmetic, at the ends too; a value that is not finite is worth 0."""
    raw = np.array([[0.0, 0.3, 1.0], [0.9, np.nan, 0.9], [1e-9, 0.5, 0.99]], dtype=np.float32)
    temperatures = np.array([0.5, 2.0, 1.3])
    model = SurvivalModel(3, np.tile(1 / temperatures, (2, 1)), learns=False)
    kept = np.where(np.logical_and.accumulate(np.isfinite(raw), axis=1), raw, 0.0)
    np.testing.assert_allclose(survival(kept, temperatures), model.fresh(raw, np.zeros(3, dtype=np.int64)), atol=1e-12)
