"""How good survivals are, and the temperatures that make them better: sequential temperature scaling.

For k = 1..S in order, T_k is chosen so that prod_{j<=k} sigmoid(logit_j / T_j) foretells "drafts 1..k were all accepted",
earlier temperatures fixed. Works on arrays of a trace; it knows no engine, files or drafters. Called by
`lab/calibrate` and `lab/evaluate`.

Letters in shapes: n rows (drafts that were verified), S positions. A draft that was not verified counts nowhere.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.decide.survival import EDGE, clean

Floats: TypeAlias = NDArray[np.float64]
Float32s: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

BINS = 20  # of equal width, over predicted survival
TEMPERATURES = np.geomspace(0.25, 8.0, 141)  # 2.5% from one to the next
PRIOR_PRECISION = 16.0  # of ln(T_k / T_{k-1}), whose deviation is taken to be a quarter


def outcomes(accepted_np: Ints, widths_np: Ints, num_drafts: int) -> tuple[Bools, Bools]:
    """[n, S] drafts 1..j were all accepted, and [n, S] whether that counts: j was verified.

    That a draft behind a rejected one failed is known without verifying it. To count it would be wrong: those behind an
    accepted run of the same width are not known, and failures alone would be left.
    """
    position = np.arange(num_drafts)
    return position < accepted_np[:, None], position < widths_np[:, None]


# ------------------------------------------------------------------------------------------------------------- measures


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """One line of a reliability table: predictions between two edges."""

    predicted: float  # mean
    outcome: float  # share that came true
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How far predicted survivals can be trusted. A value is None where nothing was there to compute it from."""

    ece: float | None  # all positions in one table, as DeepSpec's evaluator has it
    ece_noise: float | None  # what a perfect predictor would show on so few outcomes, were they independent
    auroc: float | None
    brier: float | None
    ece_at: tuple[float | None, ...]  # [S] a table for each position: never less, in the mean, than `ece`
    auroc_at: tuple[float | None, ...]  # [S]
    num: int  # outcomes


def quality(survival_np: Floats, survived_np: Bools, known_np: Bools) -> Quality:
    """All measures of survivals [n, S] against the flags [n, S], where those are known."""
    columns = [(survival_np[known, j], survived_np[known, j]) for j, known in enumerate(known_np.T)]
    predicted, outcome = survival_np[known_np], survived_np[known_np]
    return Quality(
        ece=expected_calibration_error(predicted, outcome),
        ece_noise=calibration_noise(predicted),
        auroc=auroc(predicted, outcome),
        brier=brier(predicted, outcome),
        ece_at=tuple(expected_calibration_error(*column) for column in columns),
        auroc_at=tuple(auroc(*column) for column in columns),
        num=len(predicted),
    )


def reliability(predicted_np: Floats, outcome_np: Bools, bins: int = BINS) -> list[Bin]:
    """Predictions [n] and what came of them, by bins of equal width; bins that hold nothing are left out."""
    which = _bins_of(predicted_np, bins)
    count = np.bincount(which, minlength=bins)
    predicted = np.bincount(which, weights=predicted_np, minlength=bins)
    outcome = np.bincount(which, weights=outcome_np, minlength=bins)
    return [
        Bin(predicted=float(predicted[b] / count[b]), outcome=float(outcome[b] / count[b]), count=int(count[b]))
        for b in np.flatnonzero(count)
    ]


def expected_calibration_error(predicted_np: Floats, outcome_np: Bools, bins: int = BINS) -> float | None:
    """Mean distance between predicted and observed frequency, weighted by count."""
    if not len(predicted_np):
        return None
    excess = np.bincount(_bins_of(predicted_np, bins), weights=predicted_np - outcome_np, minlength=bins)
    return float(np.abs(excess).sum() / len(predicted_np))


def calibration_noise(predicted_np: Floats, bins: int = BINS) -> float | None:
    """The expected calibration error that is to be expected where every prediction is right: sqrt(2 var / pi) a bin."""
    if not len(predicted_np):
        return None
    variance = np.bincount(_bins_of(predicted_np, bins), weights=predicted_np * (1 - predicted_np), minlength=bins)
    return float(np.sqrt(2 / np.pi * variance).sum() / len(predicted_np))


def brier(predicted_np: Floats, outcome_np: Bools) -> float | None:
    """Mean squared error."""
    return float(np.square(predicted_np - outcome_np).mean()) if len(predicted_np) else None


def auroc(predicted_np: Floats, outcome_np: Bools) -> float | None:
    """P(a draft that survived was given more than one that did not), ties counting half; exact, by ranks."""
    num_true = int(outcome_np.sum())
    num_false = len(outcome_np) - num_true
    if not num_true or not num_false:
        return None
    _, inverse, counts = np.unique(predicted_np, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # of equals, the mean
    return float((rank[outcome_np].sum() - num_true * (num_true + 1) / 2) / (num_true * num_false))


def _bins_of(predicted_np: Floats, bins: int) -> NDArray[np.intp]:
    return np.minimum((predicted_np * bins).astype(np.intp), bins - 1)


# ------------------------------------------------------------------------------------------------------------ the fit


def scaled_confidence(confidence_np: Floats, temperatures: Floats | float) -> Floats:
    """sigmoid(logit(c) / T), as the engine scales; 0 stays 0."""
    kept = np.clip(confidence_np, EDGE, 1 - EDGE)
    scaled: Floats = 1 / (1 + np.exp(-np.log(kept / (1 - kept)) / temperatures))
    return np.where(confidence_np == 0.0, 0.0, scaled)


def fit_temperatures(confidence_np: Float32s, accepted_np: Ints, widths_np: Ints) -> tuple[float, ...]:
    """T_1..T_S from raw confidences [n, S], accepted runs [n] and verified widths [n] of one class of requests.

    Each T_k is the point of a logarithmic grid that minimises

        sum over rows that verified k of the log loss of the survival at k  +  PRIOR_PRECISION / 2 * ln(T_k / T_{k-1})^2

    with T_0 = 1. The paper minimises the calibration error itself, which is flat and jumps where rows change bins: it
    strays further from the truth where that is known (tests/unit/test_scaling.py holds the two side by side). The prior
    takes over at late positions, which few rows reach: the sum carries its own weight of evidence.
    """
    confidence = clean(confidence_np)
    num_drafts = confidence.shape[1]
    survived, known = outcomes(accepted_np, widths_np, num_drafts)
    prefix, chosen, found = np.ones(len(confidence)), 1.0, []
    for k in range(num_drafts):
        rows = known[:, k]
        loss = PRIOR_PRECISION / 2 * np.square(np.log(TEMPERATURES / chosen))
        loss += _log_loss(prefix[rows], confidence[rows, k], survived[rows, k])
        chosen = float(TEMPERATURES[np.argmin(loss)])
        prefix = prefix * scaled_confidence(confidence[:, k], chosen)
        found.append(round(chosen, 4))
    return tuple(found)


def _log_loss(prefix_np: Floats, confidence_np: Floats, survived_np: Bools) -> Floats:
    """[G] of the survival at one position, summed over rows, for every temperature of the grid."""
    survival = prefix_np * scaled_confidence(confidence_np, TEMPERATURES[:, None])  # [G, n]
    right = np.where(survived_np, survival, 1 - survival)
    loss: Floats = -np.log(np.maximum(right, EDGE)).sum(axis=1)
    return loss
