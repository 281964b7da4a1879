"""Temperatures that make survivals better: sequential temperature scaling. Numpy only.

For k = 1..S in order, T_k is chosen so that prod_{j<=k} sigmoid(logit_j / T_j) foretells "drafts 1..k were all accepted",
earlier temperatures fixed. Works on arrays of a trace; it knows no engine, files or drafters. Called by `calibrate`.

Letters in shapes: n rows (steps whose drafts were verified), S positions.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.decide.survival import clean
from slipstream.lab.quality import Bools, Floats, Ints, outcomes
from slipstream.plan import EDGE

Float32s: TypeAlias = NDArray[np.float32]

TEMPERATURES = np.geomspace(0.25, 8.0, 141)  # 2.5% from one to the next
PRIOR_PRECISION = 16.0  # of ln(T_k / T_{k-1}), whose deviation is taken to be a quarter


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
