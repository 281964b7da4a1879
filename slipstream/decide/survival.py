"""From raw signal to the survivals that the controller sees.

    raw -> temperature scaling and learned shift, per position -> running product
        -> (lagged only) lag map -> running minimum

Everything is kept apart for the two classes of requests, greedy (0) and sampled (1). What is learned here changes
widths, never tokens. It does not know slots, plans or modes; `policy` asks it about rows of one step, and `lessons`
teaches it rows of one step or of a few at once. Letters in shapes: n rows, d positions of a draft, S positions at most.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.plan import EDGE

Floats: TypeAlias = NDArray[np.float64]
Float32s: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]
AnyInts: TypeAlias = NDArray[np.signedinteger[Any]]
Bools: TypeAlias = NDArray[np.bool_]
Classes: TypeAlias = "Ints | slice"  # [n] of the rows, or, where all are of one, its row in a table of two

CLASSES = ("greedy", "sampled")
ALL_GREEDY, ALL_SAMPLED = slice(0, 1), slice(1, 2)
DECAY = 0.999  # per step: what was learned fades over about a thousand steps
PRIOR_WEIGHT = 64.0  # observations that the prior of a shift or a slope counts for, for good
MEAN_WEIGHT = 16.0  # observations that 0.5^j counts for in a mean; fades like others
SHIFT_INFORMATION = 0.25 * PRIOR_WEIGHT  # of 64 outcomes at p = 1/2, pulling a learned shift to 0
MAX_SHIFT, MAX_SHIFT_STEP = 4.0, 1.0
LAG_SLOPE = 0.5  # of the lag map before anything is learned
LAG_VARIANCE = 0.05  # of a lagged survival, by which the prior slope is weighed
ONE_STEP: Ints = np.zeros(1, dtype=np.int64)  # first rows of the steps of a lesson that is of one step


def clean(signal_np: Float32s) -> Floats:
    """[n, d] probabilities in [0, 1]; a value that is not finite counts as 0, and so does everything after it."""
    signal = signal_np.astype(np.float64)
    lowest, highest = _extremes(signal)
    if lowest >= 0.0 and highest <= 1.0:  # neither holds where a value is no number
        return signal
    finite = np.isfinite(signal)
    if not finite.all():
        signal = np.where(np.logical_and.accumulate(finite, axis=1), signal, 0.0)
    return signal.clip(0.0, 1.0, out=signal)


def _extremes(values_np: Floats) -> tuple[float, float]:
    """The least and the greatest; (1, 0) of nothing."""
    if values_np.size == 0:
        return 1.0, 0.0
    return float(np.minimum.reduce(values_np, axis=None)), float(np.maximum.reduce(values_np, axis=None))


def _rows_of(class_np: Classes) -> Classes:
    """Index of a [2, d] table that gives [n or 1, d]: one row where all are of one class."""
    if isinstance(class_np, slice):
        return class_np
    num_sampled = int(np.add.reduce(class_np))
    if num_sampled == 0:
        return ALL_GREEDY
    return ALL_SAMPLED if num_sampled == len(class_np) else class_np


class SurvivalModel:
    """Calibration (from a file, corrected by outcomes), the prior, and the map from lagged to fresh survival.

    Tables that follow from what was learned are made when something is learned, which is off the path to a decision.
    """

    def __init__(self, num_drafts: int, scale_np: Floats | None = None, *, learns: bool = True) -> None:
        self.num_drafts = num_drafts  # S
        self.learns = learns
        self.version = 0  # grows whenever something is learned
        self._scale_np = np.ones((2, num_drafts)) if scale_np is None else np.asarray(scale_np, dtype=np.float64)
        assert self._scale_np.shape == (2, num_drafts), self._scale_np.shape
        self._shift_np = np.zeros((2, num_drafts))
        self._first_moved = num_drafts  # before this position, confidence is the raw signal
        self._information_np = np.zeros((2, num_drafts))
        halves = np.tile(0.5 ** np.arange(1, num_drafts + 1), (2, 1))
        self._prior_np = halves.copy()
        self._prior_weight_np = np.full((2, num_drafts), MEAN_WEIGHT)
        self._lag = _LagMap(halves)
        self._falling_prior_np, self._prior_ratio_np = np.empty_like(halves), np.empty_like(halves)
        self._tabulate_calibration()
        self._tabulate_prior()

    def _tabulate_calibration(self) -> None:
        self._calibration_np = np.empty((2, self.num_drafts, 2), dtype=np.float32)
        self._calibration_np[..., 0], self._calibration_np[..., 1] = self._scale_np, self._shift_np
        if self._first_moved or not self._shift_np[:, :1].any():
            moved = np.flatnonzero(((self._scale_np != 1.0) | (self._shift_np != 0.0)).any(axis=0))
            self._first_moved = int(moved[0]) if len(moved) else self.num_drafts

    def _tabulate_prior(self) -> None:
        np.minimum.accumulate(self._prior_np, axis=1, out=self._falling_prior_np)
        before = np.maximum(self._falling_prior_np[:, :-1], EDGE)
        np.divide(self._falling_prior_np[:, 1:], before, out=self._prior_ratio_np[:, 1:])
        self._prior_ratio_np[:, :1] = self._falling_prior_np[:, :1]

    # ------------------------------------------------------------------------------------------------------ reading

    @property
    def calibration_np(self) -> Float32s:
        """[2, S, 2] (scale, shift): confidence = sigmoid(logit(clip(raw, 1e-6, 1 - 1e-6)) * scale + shift).

        A new array whenever it changes.
        """
        return self._calibration_np

    def confidence(self, signal_np: Float32s, class_np: Classes) -> Floats:
        """[n, d] calibrated P(draft j accepted | drafts before j accepted). A raw value of 0 (or none) stays 0."""
        raw = clean(signal_np)
        length = raw.shape[1]
        if length <= self._first_moved:
            return raw
        rows = _rows_of(class_np)
        kept = raw.clip(EDGE, 1 - EDGE)
        calibrated = 1 - kept  # 1 / (1 + exp(-(logit * scale + shift))), in place
        calibrated /= kept
        np.log(calibrated, out=calibrated)
        calibrated *= self._scale_np[rows, :length]
        calibrated -= self._shift_np[rows, :length]
        np.exp(calibrated, out=calibrated)
        calibrated += 1
        np.divide(1, calibrated, out=calibrated)
        if np.count_nonzero(raw) < raw.size:
            calibrated[raw == 0.0] = 0.0
        return calibrated

    def fresh(self, signal_np: Float32s, class_np: Classes) -> Floats:
        """[n, d] survival of the drafts that the signal speaks of."""
        return survival_of(self.confidence(signal_np, class_np))

    def prior(self, class_np: Classes) -> Floats:
        """[n or 1, S] what is expected of a row about which nothing is known; not rising along the row."""
        return self._falling_prior_np[class_np]

    def extend(self, survival_np: Floats, lengths_np: "Ints | int", class_np: Classes) -> Floats:
        """[n, S] the rows carried on beyond their lengths as the prior would: a_j = a_{j-1} * prior_j / prior_{j-1}.

        Survivals are [n, S]. One length, above 0, may stand for all rows.
        """
        if isinstance(lengths_np, int):
            extended = survival_np.copy()
            onward = survival_of(self._prior_ratio_np[_rows_of(class_np), lengths_np:])
            np.multiply(survival_np[:, lengths_np - 1 : lengths_np], onward, out=extended[:, lengths_np:])
            return extended
        if (lengths_np == self.num_drafts).all():
            return survival_np
        covered = np.arange(self.num_drafts) < lengths_np[:, None]
        last = survival_np[np.arange(len(survival_np)), np.maximum(lengths_np - 1, 0)]
        last[lengths_np == 0] = 1.0
        onward = last[:, None] * survival_of(np.where(covered, 1.0, self._prior_ratio_np[_rows_of(class_np)]))
        return np.where(covered, survival_np, onward)

    def predict(self, lagged_np: Floats, class_np: Classes) -> Floats:
        """[n, d] this step's survival, expected from the last step's: lag map, clip, running minimum."""
        if not self.learns:
            return np.minimum.accumulate(lagged_np, axis=1)
        mapped = self._lag.apply(lagged_np, class_np)
        mapped.clip(0.0, 1.0, out=mapped)
        return np.minimum.accumulate(mapped, axis=1, out=mapped)

    # ----------------------------------------------------------------------------------------------------- learning

    # Rows of several steps may be taught at once: `starts_np` has the first row of each. What was learned before fades
    # once for every step, the rows of a lesson count alike.

    def teach_survival(
        self,
        fresh_np: Floats,
        lagged_np: Floats,
        lagged_lengths_np: Ints,
        class_np: Ints,
        teaches_np: Bools,
        starts_np: Ints = ONE_STEP,
    ) -> None:
        """Fresh survivals [n, d], with the lagged ones [n, d or more] of the same rows (length 0: none).

        Every drafted position is there, whatever was verified, so that nothing is learned from a censored outcome.
        """
        if not self.learns:
            return
        length = fresh_np.shape[1]
        pairs = np.arange(length) < lagged_lengths_np[:, None]
        for label, rows, members in _rows_by_class(class_np, teaches_np):
            self._teach_prior(label, fresh_np[rows], _num_steps(members, starts_np))
            paired = _num_steps(pairs & members[:, None], starts_np)
            self._lag.teach(label, lagged_np[rows, :length], fresh_np[rows], pairs[rows], paired)
        self._tabulate_prior()
        self.version += 1

    def _teach_prior(self, label: int, fresh_np: Floats, num_steps: "int | Ints") -> None:
        count, length = fresh_np.shape
        weight = self._prior_weight_np[label, :length]
        weight *= _faded(num_steps)
        weight += count
        prior = self._prior_np[label, :length]
        prior += (np.add.reduce(fresh_np, axis=0) / count - prior) * (count / weight)

    def teach_outcomes(
        self,
        confidence_np: Floats,
        widths_np: AnyInts,
        accepted_np: AnyInts,
        class_np: Ints,
        teaches_np: Bools,
        starts_np: Ints = ONE_STEP,
    ) -> None:
        """What became of drafts, with the confidences [n, d] they were given at the time.

        Position j counts only if it was verified and its prefix accepted; then it was accepted or not. The shift of a
        (class, position) is the maximum a posteriori of a logistic regression with one weight, followed from lesson to
        lesson by Newton's rule while old outcomes fade; the prior, PRIOR_WEIGHT outcomes at shift 0, does not.
        """
        if not self.learns:
            return
        position = np.arange(confidence_np.shape[1])
        last = np.where(teaches_np, np.minimum(widths_np - 1, accepted_np), -1)  # [n] the last position that counts
        counts = (position <= last[:, None]) & (confidence_np > 0)  # 0 also stands for a signal that was not finite
        error = (position < accepted_np[:, None]) - confidence_np
        information = confidence_np * (1 - confidence_np)
        rows = _rows_of(class_np)
        for label in (rows.start,) if isinstance(rows, slice) else (0, 1):
            trials = counts if isinstance(rows, slice) else counts & (class_np == label)[:, None]
            if trials.any():
                num_steps = _num_steps(np.logical_or.reduce(trials, axis=1), starts_np)
                self._move_shift(label, _sum_where(trials, error), _sum_where(trials, information), num_steps)
        self._tabulate_calibration()
        self.version += 1

    def _move_shift(self, label: int, error_np: Floats, information_np: Floats, num_steps: "int | Ints") -> None:
        """[d] sums over the outcomes of `num_steps` steps."""
        faded = _faded(num_steps)
        shift = self._shift_np[label, : len(error_np)]
        known = self._information_np[label, : len(error_np)]
        known *= faded
        known += information_np
        step = (error_np - (1 - faded) * SHIFT_INFORMATION * shift) / (known + SHIFT_INFORMATION)
        shift += np.minimum(np.maximum(step, -MAX_SHIFT_STEP), MAX_SHIFT_STEP)
        np.maximum(shift, -MAX_SHIFT, out=shift)
        np.minimum(shift, MAX_SHIFT, out=shift)


def survival_of(confidence_np: Floats) -> Floats:
    """[n, d] running products: what `SurvivalModel.fresh` makes of confidences."""
    survival: Floats = np.multiply.accumulate(confidence_np, axis=1)
    return survival


def _rows_by_class(class_np: Ints, teaches_np: Bools) -> "list[tuple[int, slice | Ints, Bools]]":
    """(class, index of its rows that teach, the same as a mask), of classes that have any."""
    rows = _rows_of(class_np)
    if isinstance(rows, slice) and teaches_np.all():
        return [(rows.start, slice(None), teaches_np)] if len(class_np) else []
    masks = [(label, (class_np == label) & teaches_np) for label in (0, 1)]
    return [(label, np.flatnonzero(mask), mask) for label, mask in masks if mask.any()]


def _num_steps(mask_np: Bools, starts_np: Ints) -> "int | Ints":
    """In how many steps the mask [n] or [n, d] holds anywhere, per column; in a lesson of one step it is 1."""
    if len(starts_np) == 1 or np.count_nonzero(mask_np) == mask_np.size:
        return len(starts_np)
    num_steps: Ints = np.add.reduce(np.logical_or.reduceat(mask_np, starts_np, axis=0), axis=0, dtype=np.int64)
    return num_steps


def _faded(num_steps: "int | Ints") -> "float | Floats":
    """What is left of a weight after so many steps; of the shape of `num_steps`."""
    faded: float | Floats = np.power(DECAY, num_steps)
    return faded


def _at(value: "float | Floats", positions: Ints) -> "float | Floats":
    """Of values per position, if they are."""
    return value[positions] if isinstance(value, np.ndarray) else value


def _sum_where(mask_np: Bools, values_np: Floats) -> Floats:
    """[d] sum over the rows, of what the mask [n, d] lets through."""
    total: Floats = np.add.reduce(np.where(mask_np, values_np, 0.0), axis=0)
    return total


class _LagMap:
    """Per (class, position): linear regression from lagged to fresh survival, forgetful, with a prior.

    The age is always one decode step, for older confidence is unknown; so there is one map, not one per age. The means
    are drawn to 0.5^j by MEAN_WEIGHT observations that fade; these do not enter the slope, which a start far from the
    truth would push to 1. The slope is shrunk for good towards LAG_SLOPE by PRIOR_WEIGHT observations of variance
    LAG_VARIANCE: where little is known, or little varies, the map is cautious.
    """

    def __init__(self, start_np: Floats) -> None:
        self._start_np = start_np
        self._start_weight_np = np.full_like(start_np, MEAN_WEIGHT)
        self._weight_np = np.zeros_like(start_np)
        self._mean_np = np.zeros((2, *start_np.shape))  # of x and y
        self._sum_np = np.zeros((2, *start_np.shape))  # of xx and xy, centred
        self._tabulate()

    def _tabulate(self) -> None:
        """The line of every class and position: y = base + slope * x."""
        mean_x, mean_y = self.means()
        self._slope_np = self.slope()
        self._base_np = mean_y - self._slope_np * mean_x

    def slope(self) -> Floats:
        prior = PRIOR_WEIGHT * LAG_VARIANCE
        slope: Floats = (self._sum_np[1] + prior * LAG_SLOPE) / (self._sum_np[0] + prior)
        return slope

    def means(self) -> tuple[Floats, Floats]:
        """Of lagged and of fresh survival, with their start."""
        total = self._weight_np + self._start_weight_np
        mean_x, mean_y = (self._weight_np * self._mean_np + self._start_weight_np * self._start_np) / total
        return mean_x, mean_y

    def apply(self, lagged_np: Floats, class_np: Classes) -> Floats:
        rows, length = _rows_of(class_np), lagged_np.shape[1]
        mapped: Floats = self._slope_np[rows, :length] * lagged_np
        mapped += self._base_np[rows, :length]
        return mapped

    def teach(self, label: int, lagged_np: Floats, fresh_np: Floats, pairs_np: Bools, num_steps: "int | Ints") -> None:
        """`pairs_np` [n, d]: where both survivals are there; `num_steps` [d]: in how many steps they are."""
        xy = np.empty((2, *fresh_np.T.shape))  # [2, d, n]: sums run along memory
        xy[0], xy[1] = lagged_np.T, fresh_np.T
        faded = _faded(num_steps)
        if np.count_nonzero(pairs_np) == pairs_np.size:
            mean = np.add.reduce(xy, axis=2) / len(pairs_np)
            off = xy - mean[:, :, None]
            self._merge(label, slice(0, xy.shape[1]), len(pairs_np), mean, np.add.reduce(off[0] * off, axis=2), faded)
            return
        pairs = np.ascontiguousarray(pairs_np.T)
        count = np.add.reduce(pairs, axis=1, dtype=np.int64)
        positions = np.flatnonzero(count)
        xy, pairs, count = xy[:, positions], pairs[positions], count[positions]
        mean = np.add.reduce(np.where(pairs, xy, 0.0), axis=2) / count
        off = np.where(pairs, xy - mean[:, :, None], 0.0)
        self._merge(label, positions, count, mean, np.add.reduce(off[0] * off, axis=2), _at(faded, positions))

    def _merge(
        self, label: int, at: "slice | Ints", count: "int | Ints", mean: Floats, total: Floats, faded: "float | Floats"
    ) -> None:
        """Add `count` pairs with their means [2, d] and centred sums [2, d] to what was seen before, which fades."""
        old = self._weight_np[label, at] * faded
        new = old + count
        off = mean - self._mean_np[:, label, at]
        self._sum_np[:, label, at] = self._sum_np[:, label, at] * faded + total + (old * count / new) * off[0] * off
        self._mean_np[:, label, at] += off * (count / new)
        self._weight_np[label, at] = new
        self._start_weight_np[label, at] *= faded
        self._tabulate()
