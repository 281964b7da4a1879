"""Decision arithmetic written plainly: the frozen references that the fast code must equal to the last bit.

Nothing here is fast, shares state with the package, or takes a shortcut. Where sums are made over rows, they are made
as the fast code makes them (numpy's order along memory), for an order is part of a floating sum.
"""

import math

import numpy as np

from slipstream.decide import survival as constants
from slipstream.decide.controller import MIN_MS


def rank(survival, caps):
    """([N] survival, position, sequence) by survival descending, position ascending, sequence ascending."""
    rows = [
        (-survival[i, j], j, i) for i in range(len(survival)) for j in range(min(max(caps[i], 0), survival.shape[1]))
    ]
    ordered = sorted(rows)
    return [-a for a, _, _ in ordered], [j for _, j, _ in ordered], [i for _, _, i in ordered]


def best_rate_by_length(survival, caps, kv, given, num_emitting, cost, draft_ms_by_length):
    """For each length, every budget by a loop."""
    values, positions, sequences = rank(survival, caps)
    base_ms = cost.step_ms(given, kv, np.zeros_like(caps))
    curve = cost.curve(int(given.sum()), len(values) + 1)
    rates = {}
    for length, draft_ms in draft_ms_by_length.items():
        best = num_emitting / max(draft_ms + base_ms, MIN_MS)
        tokens, kv_ms, count = 0.0, 0.0, 0
        for value, position, sequence in zip(values, positions, sequences, strict=True):
            if position < length:
                tokens, kv_ms, count = tokens + value, kv_ms + cost.c2 * float(kv[sequence]), count + 1
                ms = (base_ms + (curve[count] - curve[0])) + kv_ms
                best = max(best, (num_emitting + tokens) / max(draft_ms + ms, MIN_MS))
        rates[length] = float(best)
    return rates


class Store:
    """A dict by slot: who wrote, when, and what."""

    def __init__(self):
        self.rows = {}

    def put(self, plan, report):
        for i in range(plan.num_decode if report.signal_np.shape[1] else 0):
            slot, generation = int(plan.slots_np[i]), int(plan.generations_np[i])
            if generation >= self.rows.get(slot, (-1,))[0]:
                steps = int(plan.decode_steps_np[i])
                self.rows[slot] = (generation, int(plan.uids_np[i]), steps + 1, report.signal_np[i].copy())

    def read(self, plan, steps_later):
        """[(known, stale, signal)] of the sequences that decode."""
        found = []
        for i in range(plan.num_decode):
            generation, uid, step, signal = self.rows.get(int(plan.slots_np[i]), (-1, -1, -1, None))
            own = (generation, uid) == (plan.generations_np[i], plan.uids_np[i])
            now = plan.decode_steps_np[i] + steps_later
            found.append((own and step == now, own and step < now, signal))
        return found


class Filter:
    """`CostModel`'s correction in matrices."""

    def __init__(self, model):
        self.model = model
        num_parts = len(model.fitted.parts(1, 0.0, 0.0))
        self.prior = np.array([model.PART_VARIANCE] * (num_parts + 1) + [model.COMMON_VARIANCE])
        self.bound = np.array([model.PART_BOUND] * (num_parts + 1) + [model.COMMON_BOUND])
        self.log = np.zeros(num_parts + 2)
        self.covariance = np.diag(self.prior)

    def observe(self, rows, measured_ms, kv_rows, kv, draft_length, num_sequences):
        model = self.model
        draft = model.fitted_draft.at(draft_length, num_sequences)
        parts = np.append(model.fitted.parts(rows, kv_rows, kv), draft) * np.exp(self.log[:-1] + self.log[-1])
        predicted = float(parts.sum())
        error = float(np.clip(math.log(measured_ms / predicted), -model.MAX_ERROR, model.MAX_ERROR))
        weight, kept = np.append(parts / predicted, 1.0), 1 - model.FORGET
        self.log = self.log * kept
        self.covariance = self.covariance * (kept * kept)
        self.covariance[np.diag_indices_from(self.covariance)] += (1 - kept * kept) * self.prior
        spread = self.covariance @ weight
        gain = spread / (float(weight @ spread) + model.NOISE)
        self.log = np.clip(self.log + gain * error, -self.bound, self.bound)
        self.covariance = self.covariance - np.outer(gain, spread)


class Survival:
    """`SurvivalModel`, one class of requests and one rule at a time."""

    def __init__(self, num_drafts, scale):
        self.size = num_drafts
        self.scale, self.shift = scale.copy(), np.zeros((2, num_drafts))
        self.information = np.zeros((2, num_drafts))
        self.prior_mean = np.tile(0.5 ** np.arange(1, num_drafts + 1), (2, 1))
        self.prior_weight = np.full((2, num_drafts), constants.MEAN_WEIGHT)
        self.start, self.start_weight = self.prior_mean.copy(), np.full((2, num_drafts), constants.MEAN_WEIGHT)
        self.weight, self.mean_x, self.mean_y, self.sum_xx, self.sum_xy = np.zeros((5, 2, num_drafts))

    def confidence(self, signal, labels):
        raw = signal.astype(np.float64)
        finite = np.logical_and.accumulate(np.isfinite(raw), axis=1)
        raw = np.clip(np.where(finite, raw, 0.0), 0.0, 1.0)
        scale, shift = self.scale[:, : raw.shape[1]], self.shift[:, : raw.shape[1]]
        if not shift.any() and (scale == 1.0).all():
            return raw
        kept = np.clip(raw, constants.EDGE, 1 - constants.EDGE)
        logit = np.log(kept / (1 - kept)) * scale[labels] + shift[labels]
        return np.where(raw == 0.0, 0.0, 1 / (1 + np.exp(-logit)))

    def fresh(self, signal, labels):
        return np.cumprod(self.confidence(signal, labels), axis=1)

    def prior(self, labels):
        return np.minimum.accumulate(self.prior_mean, axis=1)[labels]

    def extend(self, survival, lengths, labels):
        prior, out = self.prior(labels), survival.copy()
        for i, length in enumerate(lengths):
            last, ratio = (survival[i, length - 1] if length else 1.0), 1.0
            for j in range(length, self.size):
                ratio = ratio * (prior[i, j] / max(prior[i, j - 1] if j else 1.0, constants.EDGE))
                out[i, j] = last * ratio
        return out

    def predict(self, lagged, labels):
        pull = constants.PRIOR_WEIGHT * constants.LAG_VARIANCE
        slope = (self.sum_xy + pull * constants.LAG_SLOPE) / (self.sum_xx + pull)
        total, start = self.weight + self.start_weight, self.start_weight * self.start
        mean_x, mean_y = ((self.weight * mean + start) / total for mean in (self.mean_x, self.mean_y))
        mapped = (mean_y - slope * mean_x)[labels] + slope[labels] * lagged
        return np.minimum.accumulate(np.clip(mapped, 0.0, 1.0), axis=1)

    def teach_survival(self, fresh, lagged, lengths, labels, teaches):
        for label in (0, 1):
            rows = np.flatnonzero((labels == label) & teaches)
            if len(rows):
                self._teach_prior(label, fresh[rows])
                for j in range(fresh.shape[1]):
                    self._teach_pair(label, j, lagged[rows, j], fresh[rows, j], lengths[rows] > j)

    def _teach_prior(self, label, fresh):
        count, length = fresh.shape
        self.prior_weight[label, :length] = self.prior_weight[label, :length] * constants.DECAY + count
        mean, share = self.prior_mean[label, :length], count / self.prior_weight[label, :length]
        self.prior_mean[label, :length] = mean + (fresh.mean(axis=0) - mean) * share

    def _teach_pair(self, label, j, x, y, paired):
        count = int(paired.sum())
        if count == 0:
            return
        at = (label, j)
        mean_x, mean_y = (np.where(paired, v, 0.0).sum() / count for v in (x, y))
        dx, dy = (np.where(paired, v - m, 0.0) for v, m in ((x, mean_x), (y, mean_y)))
        old = self.weight[at] * constants.DECAY
        new, off_x, off_y = old + count, mean_x - self.mean_x[at], mean_y - self.mean_y[at]
        between = old * count / new
        self.sum_xx[at] = self.sum_xx[at] * constants.DECAY + (dx * dx).sum() + between * off_x * off_x
        self.sum_xy[at] = self.sum_xy[at] * constants.DECAY + (dx * dy).sum() + between * off_x * off_y
        self.mean_x[at] += off_x * (count / new)
        self.mean_y[at] += off_y * (count / new)
        self.weight[at] = new
        self.start_weight[at] *= constants.DECAY

    def teach_outcomes(self, confidence, widths, accepted, labels, teaches):
        position = np.arange(confidence.shape[1])
        counts = (position < widths[:, None]) & (position <= accepted[:, None]) & teaches[:, None] & (confidence > 0)
        for label in (0, 1):
            trials = counts & (labels == label)[:, None]
            if trials.any():
                error = np.where(trials, (position < accepted[:, None]) - confidence, 0.0).sum(axis=0)
                self._move_shift(label, error, np.where(trials, confidence * (1 - confidence), 0.0).sum(axis=0))

    def _move_shift(self, label, error, information):
        at = (label, slice(0, len(error)))
        self.information[at] = self.information[at] * constants.DECAY + information
        pull = (1 - constants.DECAY) * constants.SHIFT_INFORMATION * self.shift[at]
        step = (error - pull) / (self.information[at] + constants.SHIFT_INFORMATION)
        step = np.clip(step, -constants.MAX_SHIFT_STEP, constants.MAX_SHIFT_STEP)
        self.shift[at] = np.clip(self.shift[at] + step, -constants.MAX_SHIFT, constants.MAX_SHIFT)
