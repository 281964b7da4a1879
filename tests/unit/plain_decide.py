"""Decision arithmetic written plainly: the frozen references that the fast code must equal to the last bit.

Nothing here is fast, shares state with the package, or takes a shortcut. Where sums are made over rows, they are made
as the fast code makes them (numpy's order along memory), for an order is part of a floating sum.
"""

import math

import numpy as np

from slipstream.decide import going_rate, lessons, pace
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
    base_kv_ms = cost.kv_ms(float(given @ kv), float(kv.sum()))
    rates = {}
    for length, draft_ms in draft_ms_by_length.items():
        best = num_emitting / max(draft_ms + base_ms, MIN_MS)
        tokens, kv_ms, count = 0.0, 0.0, 0
        for value, position, sequence in zip(values, positions, sequences, strict=True):
            if position < length:
                tokens, kv_ms, count = tokens + value, kv_ms + cost.c2 * float(kv[sequence]), count + 1
                ms = (curve[count] + base_kv_ms) + kv_ms
                best = max(best, (num_emitting + tokens) / max(draft_ms + ms, MIN_MS))
        rates[length] = float(best)
    return rates


class Store:
    """A dict by slot: who wrote, when, and what."""

    def __init__(self):
        self.rows = {}

    def put(self, plan, values):
        for i in range(plan.num_decode if values.shape[1] else 0):
            slot, generation = int(plan.slots_np[i]), int(plan.generations_np[i])
            if generation >= self.rows.get(slot, (-1,))[0]:
                steps = int(plan.decode_steps_np[i])
                self.rows[slot] = (generation, int(plan.uids_np[i]), steps + 1, values[i].copy())

    def read(self, plan, steps_later):
        """[(known, stale, values)] of the sequences that decode."""
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
        self.seen, self.steps = {}, 0

    def observe(self, rows, measured_ms, kv_rows, kv, draft_length, num_sequences, steps=1):
        model = self.model
        self.steps += steps
        target = model.fitted.parts(rows, kv_rows, kv)
        fitted = np.append(target, model.fitted_draft.at(draft_length, num_sequences))
        seen = self.seen.setdefault((int(np.argmax(target[:-1])), rows.bit_length(), draft_length), [])
        seen.append(math.log(measured_ms / float(fitted.sum())))
        if len(seen) < 3:
            return
        parts = fitted * np.exp(self.log[:-1] + self.log[-1])
        predicted = float(parts.sum())
        error = float(np.median(seen[-3:])) - math.log(predicted / float(fitted.sum()))
        error = float(np.clip(error, -model.MAX_ERROR, model.MAX_ERROR))
        weight, kept = np.append(parts / predicted, 1.0), (1 - model.FORGET) ** self.steps
        self.steps = 0
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
        minus_logit = np.log((1 - kept) / kept) * scale[labels] - shift[labels]
        return np.where(raw == 0.0, 0.0, 1 / (1 + np.exp(minus_logit)))

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

    def teach_survival(self, fresh, lagged, lengths, labels, teaches, step_of=None):
        """`step_of` [n]: which step each row is of, in a lesson of several; what is learned fades once for each."""
        step_of = np.zeros(len(labels), int) if step_of is None else step_of
        for label in (0, 1):
            rows = np.flatnonzero((labels == label) & teaches)
            if len(rows):
                self._teach_prior(label, fresh[rows], faded(step_of[rows]))
                for j in range(fresh.shape[1]):
                    paired = lengths[rows] > j
                    fades = faded(step_of[rows][paired])
                    self._teach_pair(label, j, lagged[rows, j], fresh[rows, j], paired, fades)

    def _teach_prior(self, label, fresh, fades):
        count, length = fresh.shape
        self.prior_weight[label, :length] = self.prior_weight[label, :length] * fades + count
        mean, share = self.prior_mean[label, :length], count / self.prior_weight[label, :length]
        self.prior_mean[label, :length] = mean + (fresh.mean(axis=0) - mean) * share

    def _teach_pair(self, label, j, x, y, paired, fades):
        count = int(paired.sum())
        if count == 0:
            return
        at = (label, j)
        mean_x, mean_y = (np.where(paired, v, 0.0).sum() / count for v in (x, y))
        dx, dy = (np.where(paired, v - m, 0.0) for v, m in ((x, mean_x), (y, mean_y)))
        old = self.weight[at] * fades
        new, off_x, off_y = old + count, mean_x - self.mean_x[at], mean_y - self.mean_y[at]
        between = old * count / new
        self.sum_xx[at] = self.sum_xx[at] * fades + (dx * dx).sum() + between * off_x * off_x
        self.sum_xy[at] = self.sum_xy[at] * fades + (dx * dy).sum() + between * off_x * off_y
        self.mean_x[at] += off_x * (count / new)
        self.mean_y[at] += off_y * (count / new)
        self.weight[at] = new
        self.start_weight[at] *= fades

    def teach_outcomes(self, confidence, widths, accepted, labels, teaches, step_of=None):
        step_of = np.zeros(len(labels), int) if step_of is None else step_of
        position = np.arange(confidence.shape[1])
        counts = (position < widths[:, None]) & (position <= accepted[:, None]) & teaches[:, None] & (confidence > 0)
        for label in (0, 1):
            trials = counts & (labels == label)[:, None]
            if trials.any():
                error = np.where(trials, (position < accepted[:, None]) - confidence, 0.0).sum(axis=0)
                information = np.where(trials, confidence * (1 - confidence), 0.0).sum(axis=0)
                self._move_shift(label, error, information, faded(step_of[trials.any(axis=1)]))

    def _move_shift(self, label, error, information, fades):
        at = (label, slice(0, len(error)))
        self.information[at] = self.information[at] * fades + information
        pull = (1 - fades) * constants.SHIFT_INFORMATION * self.shift[at]
        step = (error - pull) / (self.information[at] + constants.SHIFT_INFORMATION)
        step = np.clip(step, -constants.MAX_SHIFT_STEP, constants.MAX_SHIFT_STEP)
        self.shift[at] = np.clip(self.shift[at] + step, -constants.MAX_SHIFT, constants.MAX_SHIFT)


def faded(step_of):
    """What is left of a weight after the steps that are named."""
    return np.power(constants.DECAY, len(set(step_of.tolist())))


class Amortised:
    """`Adaptive` up to the decision: what it knows, when it learns, which draft length it chooses, when it times.

    Prices are the policy's own (`Filter` is their plain rule).
    """

    def __init__(self, num_drafts, cost, looks_at_all):
        self.size, self.cost, self.store, self.looks_at_all = num_drafts, cost, Store(), looks_at_all
        self.survival = Survival(num_drafts, np.ones((2, num_drafts)))
        self.outcomes, self.reports = [], {}  # reports by step, with the result still to come
        self.num_taught = self.num_waited = 0
        self.lengths = []  # (length, why, drafts allowed)
        self.decoded = []  # sequences that decode, by step
        self.num_timed, self.latest = 0, 0
        self.priced, self.brought = {}, []  # ms by step; (sequences, tokens, ms) of the steps whose result is known
        self.is_free = False  # in the last decision drafts cost next to nothing

    # what is known

    def expected(self, plan):
        """[D, S]"""
        found, labels = self.store.read(plan, 0), plan.sampled_np.astype(int)
        lagged, lengths = self._padded(found)
        known = np.array([known for known, _, _ in found])
        survival = self.survival.extend(lagged, lengths, labels)
        return np.where(known[:, None], self.survival.predict(survival, labels), self.survival.prior(labels))

    def _padded(self, found):
        survival = np.zeros((len(found), self.size))
        lengths = np.array([len(values) if known else 0 for known, _, values in found])
        for i, (known, _, values) in enumerate(found):
            survival[i, : lengths[i]] = values if known else ()
        return survival, lengths

    # the rate to beat

    def decided(self, plan, decision):
        kv, widths = plan.context_upper_bound_np.sum(), decision.num_draft_rows
        kv_ms = self.cost.step.kv_ms(kv * (1 + widths / plan.num_decode), kv)
        draft_ms = self.cost.draft_ms(plan.draft_length, plan.num_decode)
        self.priced[plan.step] = draft_ms + self.cost.step.ms_of_rows(plan.num_decode + widths) + kv_ms
        step, caps = self.cost.step, plan.caps_np.astype(float)
        none_ms, all_ms = (step.ms_of_rows(int(plan.num_given_np.sum() + rows)) for rows in (0, caps.sum()))
        kv_ms = step.c2 * (caps * plan.context_upper_bound_np).sum()
        self.is_free = caps.any() and all_ms - none_ms + kv_ms <= pace.FREE_MS

    def past(self, plan):
        """(tokens, ms) of all steps, the newest in full, each as if as many sequences had decoded as in `plan`."""
        kept = [going_rate.GoingRate.KEPT**age for age in range(len(self.brought))][::-1]
        tokens = sum(k * n * plan.num_decode / d for k, (d, n, _) in zip(kept, self.brought, strict=True))
        return tokens, sum(k * ms for k, (_, _, ms) in zip(kept, self.brought, strict=True))

    # when it learns

    def observe(self, plan, report):
        if report.signal_np.size and self.looks_at(plan):
            confidence = self.survival.confidence(report.signal_np, plan.sampled_np.astype(int))
            sighting = {"plan": plan, "confidence": confidence, "lagged": self._padded(self.store.read(plan, 0))}
            self.store.put(plan, np.cumprod(confidence, axis=1))
            self.reports[plan.step] = sighting

    def looks_at(self, plan):
        return self.looks_at_all or not self.is_free or plan.step % pace.FREE_EVERY in range(pace.FREE_SEEN)

    def learn(self, plan, result):
        if plan.teaches_np.any() and math.modf(plan.step * pace.TURN)[0] < going_rate.COUNTED:
            tokens = plan.num_decode * (1 + result.num_accepted_np[plan.teaches_np].mean())
            self.brought.append((plan.num_decode, tokens, self.priced[plan.step]))
        if plan.step in self.reports and self.looks_at(plan):
            self.outcomes.append((self.reports.pop(plan.step), result))
        if not self.outcomes:
            return
        self.num_waited += 1
        if self.num_taught < lessons.EARLY or self.num_waited >= lessons.STEPS:
            self._teach()

    def _teach(self):
        for alike in by_length(self.outcomes):
            labels, teaches, step_of = rows_of([s["plan"] for s, _ in alike])
            confidence, lagged, lengths, widths, accepted, invalid = (
                np.concatenate([of(s, result)[taught(s["plan"])] for s, result in alike])
                for of in (
                    lambda s, _: s["confidence"],
                    lambda s, _: s["lagged"][0],
                    lambda s, _: s["lagged"][1],
                    lambda _, result: result.widths_np,
                    lambda _, result: result.num_accepted_np,
                    lambda _, result: result.invalid_np,
                )
            )
            self.survival.teach_survival(np.cumprod(confidence, axis=1), lagged, lengths, labels, teaches, step_of)
            self.survival.teach_outcomes(confidence, widths, accepted, labels, teaches & ~invalid, step_of)
        self.num_taught += len(self.outcomes)
        self.outcomes, self.num_waited = [], 0

    # which draft length

    def draft_length(self, plan):
        allowed = int(plan.caps_np.sum())
        self.decoded.append(plan.num_decode)
        if self._probes():
            length, why = self.size, "probe"
        elif self._keeps(allowed):
            length, why = self.lengths[-1][0], "kept"
        else:
            length, why = self._best(plan), "chosen"
        self.lengths.append((length, why, allowed))
        return length

    def _probes(self):
        """A large change since the last full draft, unless one came just before or all are full anyway; or it is time."""
        lengths = [length for length, _, _ in self.lengths]
        full = [step for step, length in enumerate(lengths) if length == self.size]
        if sum(self.decoded[step] for step in full) < pace.WARM_UP:
            return True
        since_full = self.decoded[full[-1] :]
        probes = [step for step, (_, why, _) in enumerate(self.lengths) if why == "probe"]
        chosen = [length for length, why, _ in self.lengths if why == "chosen"]
        far = any(abs(n - since_full[0]) > since_full[0] * pace.CHANGE for n in since_full)
        changed = far and chosen[-1:] != [self.size]
        due = changed and len(lengths) - 1 - probes[-1] >= pace.PROBE_SPACING
        drafted = [step for step, length in enumerate(lengths) if length]
        skipped, shortened = len(lengths) - 1 - drafted[-1], len(lengths) - 1 - full[-1]
        return due or skipped >= pace.SKIPS_BEFORE_PROBE or shortened >= pace.SHORTS_BEFORE_PROBE

    def _keeps(self, allowed):
        *_, choice = (step for step, (_, why, _) in enumerate(self.lengths) if why != "kept")
        _, why, allowed_then = self.lengths[choice]
        recent = len(self.lengths) - choice < min(pace.CHOICE_SPACING, pace.FEW_SPACING + self.decoded[-1])
        return why == "chosen" and recent and abs(allowed - allowed_then) <= allowed_then * pace.MUCH

    def _best(self, plan):
        draft_ms = {n: self.cost.draft_ms(n, plan.num_decode) for n in pace.draft_lengths(self.size)}
        kv, given, caps = (v.astype(int) for v in (plan.context_upper_bound_np, plan.num_given_np, plan.caps_np))
        tokens, ms = self.past(plan)
        tokens, draft_ms = tokens + int(plan.emits_np.sum()), {n: ms + draft for n, draft in draft_ms.items()}
        rates = best_rate_by_length(self.expected(plan), caps, kv, given, tokens, self.cost.step, draft_ms)
        return min(rates, key=lambda length: (-rates[length], length))

    # when it times

    def steps_if_timed(self):
        """Steps since the last one that was; 0: this one is not."""
        self.num_timed += 1
        if self.num_timed > pace.TIMED_EARLY and math.modf(self.num_timed * pace.TURN)[0] >= pace.TIMED_SHARE:
            return 0
        steps, self.latest = self.num_timed - self.latest, self.num_timed
        return steps


def by_length(outcomes):
    """Those of one draft length together, lengths in the order of their first."""
    lengths = [s["confidence"].shape[1] for s, _ in outcomes]
    return [[o for o, n in zip(outcomes, lengths, strict=True) if n == length] for length in dict.fromkeys(lengths)]


def taught(plan):
    """The rows that teach: all, or of more than `ROWS` every k-th."""
    every = math.ceil(plan.num_decode / lessons.ROWS)
    first = math.floor(math.modf(plan.step * pace.TURN)[0] * every)
    return [i for i in range(plan.num_decode) if i % every == first]


def rows_of(plans):
    """Classes, whether they teach, and the number of the step, of the rows of some plans that teach."""
    labels = np.concatenate([plan.sampled_np[taught(plan)] for plan in plans]).astype(int)
    teaches = np.concatenate([(plan.teaches_np & (plan.caps_np > 0))[taught(plan)] for plan in plans])
    return labels, teaches, np.concatenate([np.full(len(taught(plan)), i) for i, plan in enumerate(plans)])
