"""How good survivals are: calibration error, AUROC, Brier score, reliability tables. Numpy only.

Works on arrays of a trace; it knows no engine, files or drafters. Called by `calibrate` and `evaluate`.
Letters in shapes: n rows (steps whose drafts were verified), S positions. A draft that was not verified counts nowhere.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

BINS = 20  # of equal width, over predicted survival


def outcomes(accepted_np: Ints, widths_np: Ints, num_drafts: int) -> tuple[Bools, Bools]:
    """[n, S] drafts 1..j were all accepted, and [n, S] whether that counts: j was verified.

    That a draft behind a rejected one failed is known without verifying it. To count it would be wrong: those behind an
    accepted run of the same width are not known, and failures alone would be left.
    """
    position = np.arange(num_drafts)
    return position < accepted_np[:, None], position < widths_np[:, None]


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
