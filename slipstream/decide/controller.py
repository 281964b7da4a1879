"""The controller: from survivals to widths or a budget.

Pure: numpy in, integers out; no clock, no device, no randomness, no memory of earlier steps. It does not know where a
survival comes from or how old it is; `policy` prepares a `Problem`, and `record` decides it and keeps what was decided.
Survivals must be clean (within [0, 1], not rising along a row): `survival` sees to that.

Every rule maximises (B + A) / (draft + cost): tokens per millisecond, B sequences that emit one token anyway, A the sum
of the survivals of the drafts that are verified. To B and draft `policy` adds the tokens and times of the last steps, so
that all of them together are fast (`going_rate`). Letters in shapes: B sequences of the step, S draft positions.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.decide.cost import LinearCost, StepCost, TableCost

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
AnyInts: TypeAlias = NDArray[np.signedinteger[Any]]
Bools: TypeAlias = NDArray[np.bool_]
Pairs: TypeAlias = NDArray[np.complex128]  # two sums that run side by side

# greedy: one draft at a time while the rate rises (linear cost)
# widths: the K largest survivals, K the best of all budgets; unknown rows in full
# hull:   drafts in order of survival on the convex hull of the cost, up to the first that does not raise the rate
# budget: only K; unknown rows compete with their prior
Rule: TypeAlias = Literal["greedy", "widths", "hull", "budget"]
MIN_MS = 1e-6  # a time is never taken as less than this, so that rates stay finite
MARGIN = 1e-7  # relative; far above what rounding does to a rate
SMALL = 1e-9  # a survival that a sum of tokens may not even notice
FEW = 24  # candidates that a plain loop settles sooner than vectors do
WIDE = 512  # candidates up to which many sums in one call are faster than fewer sums in more calls
MANY = 128  # candidates from which a coarse order is made first
COARSE = 32767  # steps of the coarse order


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """All that a decision depends on."""

    rule: Rule
    survival_np: Floats  # [B, S] P(drafts 1..j all accepted); rows of unknown sequences hold the prior
    unknown_np: Bools  # [B]
    caps_np: AnyInts  # [B] most drafts per sequence; 0 in prefill
    kv_np: Ints  # [B] context length that a row of the sequence attends to
    given_np: AnyInts  # [B] rows that are certain
    # Tokens that come anyway: one of each sequence that emits in this step, and those of steps that the rate is taken with.
    num_emitting: float
    cost: StepCost
    draft_ms: float  # time that passes anyway: of the draft, and of those steps
    min_gain: float = 0.0  # greedy only


def decide_widths(problem: Problem, order: "Candidates | None" = None) -> Ints:
    """[B] width per sequence, for every rule but `budget`. `order`: see `record.decide`."""
    if problem.rule == "greedy":
        return _greedy(problem)
    base = _full_width_of_unknown(problem)
    if problem.survival_np.size <= FEW:
        return _first_of_few(problem, base)
    candidates = _candidates(problem, base, order)
    if problem.rule == "hull":
        return base + candidates.widths_of_first(_on_hull(problem, base, candidates))
    assert problem.rule == "widths", problem.rule
    return base + candidates.widths_of_first(int(_rates(problem, base, candidates).argmax()))


def decide_budget(problem: Problem, order: "Candidates | None" = None) -> int:
    """K, the number of drafts to verify in the whole step, unknown rows among them with their prior."""
    assert problem.rule == "budget", problem.rule
    base = np.zeros(len(problem.caps_np), dtype=np.int64)
    if problem.survival_np.size <= FEW:
        return int(np.add.reduce(_first_of_few(problem, base)))
    return int(_rates(problem, base, order or rank_candidates(problem.survival_np, problem.caps_np)).argmax())


def widths_of_largest(survival_np: Floats, caps_np: AnyInts, budget: int) -> Ints:
    """[B] the widths that hand `budget` drafts to the largest survivals; ties go by (position, sequence)."""
    return rank_candidates(survival_np, caps_np).widths_of_first(budget)


def best_rate_by_length(
    candidates: "Candidates",  # of the longest length
    kv_np: Ints,
    given_np: AnyInts,
    num_emitting: float,
    cost: StepCost,
    draft_ms_by_length: dict[int, float],
) -> dict[int, float]:
    """For each draft length, rising: the rate at its best budget, when every row is cut to that length."""
    curve = cost.curve(int(np.add.reduce(given_np)), len(candidates.survival_np) + 1)
    ms_of_count = curve + _kv_ms(cost, given_np, kv_np)
    base_ms = float(ms_of_count[0])
    gains = candidates.gains(cost, kv_np)
    best = _best_of_few if len(gains) <= FEW else _best_side_by_side if len(gains) <= WIDE else _best_in_turn
    # Candidates within a length are those of a flat index below a limit.
    limits = {length * candidates.shape[0]: draft_ms for length, draft_ms in draft_ms_by_length.items()}
    rates = best(candidates.flat_np, gains, ms_of_count, num_emitting, limits)
    none = [num_emitting / max(draft_ms + base_ms, MIN_MS) for draft_ms in draft_ms_by_length.values()]
    return dict(zip(draft_ms_by_length, map(max, none, rates), strict=True))


def _best_of_few(
    flat: Ints, gains: Pairs, ms_of_count: Floats, num_emitting: float, draft_ms: dict[int, float]
) -> list[float]:
    """The best rate with candidates below each limit, by a loop over them."""
    candidates, ms_of = list(zip(flat.tolist(), gains.tolist(), strict=True)), ms_of_count.tolist()
    best = dict.fromkeys(draft_ms, 0.0)
    for limit, draft in draft_ms.items():
        sums, count = 0j, 0
        for place, gain in candidates:
            if place < limit:
                sums, count = sums + gain, count + 1
                rate = (num_emitting + sums.real) / max(draft + (ms_of[count] + sums.imag), MIN_MS)
                best[limit] = max(best[limit], rate)
    return list(best.values())


def _best_side_by_side(
    flat: Ints, gains: Pairs, ms_of_count: Floats, num_emitting: float, draft_ms: dict[int, float]
) -> list[float]:
    """The same, all limits at once, what they cut off being 0: fewest calls."""
    within = flat < np.array(list(draft_ms))[:, None]  # [limits, N]
    sums = np.add.accumulate(within * gains, axis=1)
    ms = ms_of_count.take(np.add.accumulate(within, axis=1, dtype=np.int64)) + sums.imag
    rates = (num_emitting + sums.real) / np.maximum(np.array(list(draft_ms.values()))[:, None] + ms, MIN_MS)
    best: list[float] = np.maximum.reduce(rates, axis=1, initial=0.0).tolist()
    return best


def _best_in_turn(
    flat: Ints, gains: Pairs, ms_of_count: Floats, num_emitting: float, draft_ms: dict[int, float]
) -> list[float]:
    """The same, the highest limit first, what it cuts off being left out of lower ones: fewest sums."""
    best = dict.fromkeys(draft_ms, 0.0)
    for limit in sorted(filter(None, draft_ms), reverse=True):
        kept = np.flatnonzero(flat < limit)
        if len(kept) < len(flat):
            flat, gains = flat.take(kept), gains.take(kept)
        sums = np.add.accumulate(gains)
        ms = ms_of_count[1 : len(flat) + 1] + sums.imag
        rates = (num_emitting + sums.real) / np.maximum(draft_ms[limit] + ms, MIN_MS)
        best[limit] = float(np.maximum.reduce(rates, initial=0.0))
    return list(best.values())


# ---------------------------------------------------------------------------------------------------------- candidates


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Drafts that may be verified, in order of survival descending, position ascending, sequence ascending."""

    survival_np: Floats  # [N]
    flat_np: Ints  # [N] position * B + sequence, both from 0
    shape: tuple[int, int]  # B, S

    @property
    def sequence_np(self) -> Ints:
        """[N]"""
        return _sequences(self.shape).take(self.flat_np)

    def gains(self, cost: StepCost, kv_np: Ints) -> Pairs:
        """[N] what each adds: tokens as the real part, its KV time in ms as the imaginary one.

        One pass over complex numbers sums both, strictly from left to right as a loop would, in the time of one.
        """
        gains = np.zeros(len(self.survival_np), dtype=np.complex128)
        self._write_gains(gains, cost, kv_np)
        return gains

    def _write_gains(self, gains: Pairs, cost: StepCost, kv_np: Ints) -> None:
        gains.real = self.survival_np
        if cost.c2:
            gains.imag = (cost.c2 * kv_np).take(self.sequence_np)

    def sums(self, cost: StepCost, kv_np: Ints, tokens: float, kv_ms: float) -> "tuple[Floats, Floats | float]":
        """[N + 1] tokens and KV time with the first k of them, on top of what there is before."""
        if not cost.c2:
            return _running_sum(tokens, self.survival_np), kv_ms
        sums = np.empty(len(self.survival_np) + 1, dtype=np.complex128)
        sums[0] = complex(tokens, kv_ms)
        self._write_gains(sums[1:], cost, kv_np)
        np.add.accumulate(sums, out=sums)
        return sums.real, sums.imag

    def taken(self, which_np: Bools) -> "Candidates":
        """Those that the mask [N] names, in the same order."""
        kept = np.flatnonzero(which_np)
        return Candidates(self.survival_np.take(kept), self.flat_np.take(kept), self.shape)

    def cut(self, length: int) -> "Candidates":
        """As they would be if every row ended after `length` drafts."""
        return self if length >= self.shape[1] else self.taken(self.flat_np < length * self.shape[0])

    def widths_of_first(self, count: int) -> Ints:
        # survivals do not rise along a row, so the first `count` always form prefixes
        widths: Ints = np.bincount(_sequences(self.shape).take(self.flat_np[:count]), minlength=self.shape[0])
        return widths


@lru_cache(maxsize=64)
def _sequences(shape: tuple[int, int]) -> Ints:
    """[B * S] the sequence of every flat index."""
    sequences = np.arange(shape[0] * shape[1]) % max(shape[0], 1)
    sequences.flags.writeable = False
    return sequences


def rank_candidates(survival_np: Floats, caps_np: AnyInts) -> Candidates:
    """All drafts within the caps [B], of survivals [B, S]."""
    num_sequences, num_positions = survival_np.shape
    values = survival_np.T.reshape(-1)  # flat order is (position, sequence), as ties want it
    cap = int(caps_np[0]) if num_sequences else 0
    if not np.count_nonzero(caps_np != cap):  # all alike: nothing to pick
        values = values[: max(cap, 0) * num_sequences]
        order = _descending(values)
        return Candidates(values.take(order), order, survival_np.shape)
    flat = np.flatnonzero(np.arange(num_positions)[:, None] < caps_np)
    values = values.take(flat)
    order = _descending(values)
    return Candidates(values.take(order), flat.take(order), survival_np.shape)


def _descending(values: Floats) -> Ints:
    """What np.argsort(-values, kind="stable") gives, for values in [0, 1].

    numpy sorts 16-bit keys by radix, several times faster than floats, and floats that are nearly sorted much faster
    than others. A key that depends on the value alone leaves equal values in their order, so two stable passes are one.
    """
    if len(values) < MANY:
        return (-values).argsort(kind="stable")
    order = (-COARSE * values).astype(np.int16).argsort(kind="stable")
    return order.take((-values.take(order)).argsort(kind="stable"))


def _full_width_of_unknown(problem: Problem) -> Ints:
    if not np.count_nonzero(problem.unknown_np):
        return np.zeros(len(problem.caps_np), dtype=np.int64)
    return np.where(problem.unknown_np, np.minimum(problem.caps_np, problem.survival_np.shape[1]), 0)


def _candidates(problem: Problem, base: Ints, order: Candidates | None) -> Candidates:
    """Candidates of the sequences that `base` does not decide already."""
    if not np.count_nonzero(base):
        return order or rank_candidates(problem.survival_np, problem.caps_np)
    if order is None:
        return rank_candidates(problem.survival_np, np.where(base > 0, 0, problem.caps_np))
    return order.taken((base == 0)[order.sequence_np])


def _accepted_in(problem: Problem, base: Ints) -> float:
    """Sum of the survivals of the drafts in `base`."""
    if not np.count_nonzero(base):
        return 0.0
    inside = np.arange(problem.survival_np.shape[1]) < base[:, None]
    return float(np.sum(problem.survival_np, where=inside))


def _running_sum(start: float, terms: Floats) -> Floats:
    """[N + 1] start, start + terms[0], ...; summed strictly from left to right, as a loop would."""
    total = np.empty(len(terms) + 1)
    total[0] = start
    total[1:] = terms
    return np.add.accumulate(total, out=total)


# --------------------------------------------------------------------------------------------------------------- rules


def _kv_ms(cost: StepCost, rows_np: AnyInts, kv_np: Ints) -> float:
    if not (cost.c2 or cost.c3):
        return 0.0
    return cost.kv_ms(float(rows_np @ kv_np), float(np.add.reduce(kv_np)))


def _rates(problem: Problem, base: Ints, candidates: Candidates, cost: StepCost | None = None) -> Floats:
    """[N + 1] expected tokens per ms when the first k candidates are verified on top of `base`."""
    cost = cost or problem.cost
    rows_np = problem.given_np + base
    times = cost.curve(int(np.add.reduce(rows_np)), len(candidates.survival_np) + 1)
    tokens, kv_ms = problem.num_emitting + _accepted_in(problem, base), _kv_ms(cost, rows_np, problem.kv_np)
    sums, kv_times = candidates.sums(cost, problem.kv_np, tokens, kv_ms)
    rates: Floats = sums / (max(problem.draft_ms, MIN_MS) + np.maximum(times + kv_times, MIN_MS))
    return rates


def _on_hull(problem: Problem, base: Ints, candidates: Candidates) -> int:
    """How many candidates are taken, each decided from earlier ones only: sampled drafts under rejection need that.

    On the convex hull the rate has one peak, so that stopping at the first draft that does not raise it loses little.
    """
    rates = _rates(problem, base, candidates, problem.cost.hull())
    stops = np.flatnonzero(rates[1:] <= rates[:-1])
    return int(stops[0]) if len(stops) else len(rates) - 1


def _greedy(problem: Problem) -> Ints:
    """Extend, in order of survival, every sequence whose next draft raises the rate; one that does not is passed over.

    Most candidates are settled without an order, see `_settle`; the rest are decided as a loop over them would do it.
    """
    assert isinstance(problem.cost, LinearCost), type(problem.cost)
    base = _full_width_of_unknown(problem)
    accepted = _accepted_in(problem, base)
    base_ms = problem.cost.step_ms(problem.given_np, problem.kv_np, base)
    # [B] of a draft of the sequence
    price: Floats = problem.cost.c1 + problem.cost.c2 * problem.kv_np.astype(np.float64)
    if problem.survival_np.size <= FEW:
        return _one_by_one(problem, base, price, accepted, base_ms)
    num_positions = problem.survival_np.shape[1]
    candidates = np.arange(num_positions)[:, None] < np.where(base > 0, 0, problem.caps_np)  # [S, B]
    survival = candidates * problem.survival_np.T
    prices = price[None].repeat(num_positions, axis=0)
    sure, open_ = _settle(problem, survival.reshape(-1), prices.reshape(-1), accepted, base_ms)
    sure, open_ = sure.reshape(survival.shape), open_.reshape(survival.shape)
    if np.count_nonzero(open_):
        sure = _in_order(problem, survival, price, accepted, base_ms, sure | open_, sure)
    widths: Ints = base + np.add.reduce(sure, axis=0, dtype=np.int64)
    return widths


def _few_in_order(problem: Problem, base: list[int]) -> list[tuple[float, int, int]]:
    """(-survival, position, sequence) of the candidates of the sequences that `base` does not decide already."""
    rows = enumerate(zip(problem.survival_np.tolist(), problem.caps_np.tolist(), strict=True))
    return sorted((-a, j, i) for i, (row, cap) in rows if not base[i] for j, a in enumerate(row[: max(cap, 0)]))


def _first_of_few(problem: Problem, base: Ints) -> Ints:
    """[B] widths by the rules other than `greedy`: as `_rates` and what follows it, by a loop over the candidates."""
    widths, hull = base.tolist(), problem.rule == "hull"
    cost, candidates = problem.cost.hull() if hull else problem.cost, _few_in_order(problem, widths)
    rows_np = problem.given_np + base
    curve: list[float] = cost.curve(int(np.add.reduce(rows_np)), len(candidates) + 1).tolist()
    price, draft_ms = [cost.c2 * kv for kv in problem.kv_np.tolist()], max(problem.draft_ms, MIN_MS)
    tokens, kv_ms = problem.num_emitting + _accepted_in(problem, base), _kv_ms(cost, rows_np, problem.kv_np)
    best, best_rate = 0, 0.0
    for count, ms in enumerate(curve):
        if count:
            minus_survival, _, i = candidates[count - 1]
            tokens, kv_ms = tokens - minus_survival, kv_ms + price[i]
        rate = tokens / (draft_ms + max(ms + kv_ms, MIN_MS))
        if count == 0 or rate > best_rate:
            best, best_rate = count, rate
        elif hull:
            break
    for _, _, i in candidates[:best]:
        widths[i] += 1
    return np.array(widths, dtype=np.int64)


def _one_by_one(problem: Problem, base: Ints, price: Floats, accepted: float, base_ms: float) -> Ints:
    """[B] widths by the rule as it is defined: one candidate after the other."""
    widths, prices = base.tolist(), price.tolist()
    draft_ms, time_ms, emitting = max(problem.draft_ms, MIN_MS), base_ms, problem.num_emitting
    rate = (emitting + accepted) / (draft_ms + max(time_ms, MIN_MS))
    for minus_survival, position, i in _few_in_order(problem, widths):
        if position != widths[i]:
            continue
        tokens, ms = emitting + (accepted - minus_survival), time_ms + prices[i]
        new_rate = tokens / (draft_ms + max(ms, MIN_MS))
        gain = -minus_survival * (problem.draft_ms + time_ms)
        enough = problem.min_gain <= 0 or gain > (1 + problem.min_gain) * (emitting + accepted) * prices[i]
        if new_rate > rate and enough:
            widths[i], accepted, time_ms, rate = position + 1, accepted - minus_survival, ms, new_rate
    return np.array(widths, dtype=np.int64)


def _settle(problem: Problem, survival: Floats, price: Floats, accepted: float, base_ms: float) -> tuple[Bools, Bools]:
    """([S * B] surely taken, [S * B] open), of survivals and prices [S * B]; what is in neither is surely not taken.

    A candidate is taken if its survival per ms beats the rate when its turn comes. That rate never falls, so it is at
    least the one at the start, and at least the one after the sure candidates of higher survival than any open one; and
    it is at most the best that any set of candidates has. `MARGIN` and `SMALL` cover rounding. With contexts of one length nothing
    stays open but a tie.
    """
    draft_ms = max(problem.draft_ms, MIN_MS)
    if base_ms < MIN_MS:  # MIN_MS would replace the time, and the rate could fall
        return np.zeros_like(survival, dtype=np.bool_), survival > 0
    tokens, time = problem.num_emitting + accepted, draft_ms + base_ms
    gain = 1 + problem.min_gain
    best = _best_rate(survival, price, tokens, time)
    sure = survival > gain * (1 + MARGIN) * best * price + SMALL
    open_ = (survival > gain * (1 - MARGIN) * (tokens / time) * price) & ~sure
    while num_open := int(np.count_nonzero(open_)):
        rate = _rate_with(sure & (survival > survival[open_].max()), survival, price, tokens, time)
        open_ &= survival > gain * (1 - MARGIN) * rate * price
        if np.count_nonzero(open_) == num_open:
            break
    return sure, open_


def _rate_with(taken: Bools, survival: Floats, price: Floats, tokens: float, time: float) -> float:
    """The rate when the candidates of a mask are taken too."""
    share = taken.astype(np.float64)
    return (tokens + float(share @ survival)) / (time + float(share @ price))


def _best_rate(survival: Floats, price: Floats, tokens: float, time: float) -> float:
    """The highest rate of any set of candidates, which is {survival / price > that rate} (Dinkelbach's iteration)."""
    rate = tokens / time
    while True:
        new_rate = _rate_with(survival > rate * price, survival, price, tokens, time)
        if new_rate <= rate * (1 + 1e-12):
            return rate
        rate = new_rate


def _in_order(
    problem: Problem, survival: Floats, price: Floats, accepted: float, base_ms: float, among: Bools, guess: Bools
) -> Bools:
    """[S, B] what the sequential rule takes of the candidates `among`; no others can be taken.

    The sequential rule is a loop over candidates that carries (A, v), what was taken so far and its time. Whether
    candidate i is taken depends only on those before it, so the mask of taken candidates is the one fixed point of
    "sum what the mask takes, test every candidate against the sums before it": each round settles at least one more
    candidate for good, and from a good guess two or three rounds settle all. Sums run in the loop's order, so that the
    result is the loop's to the last bit.
    """
    flat = np.flatnonzero(among)  # in order of (position, sequence), as ties want it
    flat = flat[np.argsort(-survival.reshape(-1)[flat], kind="stable")]
    value, cost = survival.reshape(-1)[flat], price[flat % len(price)]
    draft_ms = max(problem.draft_ms, MIN_MS)
    taken = guess.reshape(-1)[flat]
    while True:
        sum_before = _running_sum(accepted, value * taken)[:-1]
        time_before = _running_sum(base_ms, cost * taken)[:-1]
        tokens = problem.num_emitting + sum_before
        rate_before = tokens / (draft_ms + np.maximum(time_before, MIN_MS))
        rate_after = (problem.num_emitting + (sum_before + value)) / (draft_ms + np.maximum(time_before + cost, MIN_MS))
        rises = rate_after > rate_before
        if problem.min_gain > 0:
            rises &= value * (problem.draft_ms + time_before) > (1 + problem.min_gain) * tokens * cost
        grid = np.zeros_like(among)
        grid.reshape(-1)[flat] = rises
        np.logical_and.accumulate(grid, axis=0, out=grid)  # a draft is tried only at width + 1
        rises = grid.reshape(-1)[flat]
        if np.array_equal(rises, taken):
            return grid
        taken = rises


def rule_for(cost: StepCost, *, budget: bool, causal: bool) -> Rule:
    """Which rule decides under `cost`. `causal`: a draft's fate may not depend on later drafts of this step."""
    if budget:
        return "budget"
    if isinstance(cost, TableCost):
        return "hull" if causal else "widths"
    return "greedy"
