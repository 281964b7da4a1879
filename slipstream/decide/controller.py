"""The controller: from survivals to widths or a budget.

Pure: numpy in, integers out; no clock, no device, no randomness, no memory of earlier steps. It does not know where a
survival comes from or how old it is; `policy` prepares a `Problem`, and a `DecisionRecord` keeps one as a JSON line
that `replay` decides again. Survivals must be clean (within [0, 1], not rising along a row): `survival` sees to that.

Every rule maximises (B + A) / (draft + cost): tokens per millisecond, B sequences that emit one token anyway, A the sum
of the survivals of the drafts that are verified. Letters in shapes: B sequences of the step, S draft positions.
"""

import json
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from slipstream.decide.cost import LinearCost, StepCost, TableCost, step_cost_from_dict
from slipstream.errors import ConfigError

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

# greedy: one draft at a time while the rate rises (linear cost)
# widths: the K largest survivals, K the best of all budgets; unknown rows in full
# hull:   drafts in order of survival on the convex hull of the cost, up to the first that does not raise the rate
# budget: only K; unknown rows compete with their prior
Rule: TypeAlias = Literal["greedy", "widths", "hull", "budget"]
MIN_MS = 1e-6  # a time is never taken as less than this, so that rates stay finite
MARGIN = 1e-7  # relative; far above what rounding does to a rate
SMALL = 1e-9  # a survival that a sum of tokens may not even notice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """All that a decision depends on."""

    rule: Rule
    survival_np: Floats  # [B, S] P(drafts 1..j all accepted); rows of unknown sequences hold the prior
    unknown_np: Bools  # [B]
    caps_np: Ints  # [B] most drafts per sequence; 0 in prefill
    kv_np: Ints  # [B] context length that a row of the sequence attends to
    given_np: Ints  # [B] rows that are certain
    num_emitting: int  # sequences that emit a token in this step
    cost: StepCost
    draft_ms: float
    min_gain: float = 0.0  # greedy only


def decide_widths(problem: Problem) -> Ints:
    """[B] width per sequence, for every rule but `budget`."""
    if problem.rule == "greedy":
        return _greedy(problem)
    if problem.rule == "hull":
        return _on_hull(problem)
    assert problem.rule == "widths", problem.rule
    base = _full_width_of_unknown(problem)
    candidates = _candidates(problem, base)
    best = int(np.argmax(_rates(problem, base, candidates)))
    return base + candidates.widths_of_first(best)


def decide_budget(problem: Problem) -> int:
    """K, the number of drafts to verify in the whole step, unknown rows among them with their prior."""
    assert problem.rule == "budget", problem.rule
    base = np.zeros_like(problem.caps_np)
    return int(np.argmax(_rates(problem, base, _candidates(problem, base))))


def widths_of_largest(survival_np: Floats, caps_np: Ints, budget: int) -> Ints:
    """[B] the widths that hand `budget` drafts to the largest survivals; ties go by (position, sequence)."""
    return _sort_candidates(survival_np, caps_np).widths_of_first(budget)


def best_rate_by_length(
    survival_np: Floats,
    caps_np: Ints,
    kv_np: Ints,
    given_np: Ints,
    num_emitting: int,
    cost: StepCost,
    draft_ms_by_length: dict[int, float],
) -> dict[int, float]:
    """For each draft length: the rate at its best budget, when every row is cut to that length. One sort serves all."""
    lengths = np.array(list(draft_ms_by_length))
    draft_ms = np.array(list(draft_ms_by_length.values()))[:, None]
    candidates = _sort_candidates(survival_np, caps_np)
    base_ms = cost.step_ms(given_np, kv_np, np.zeros_like(caps_np))
    within = candidates.position_np < lengths[:, None]  # [lengths, N]
    tokens = num_emitting + np.cumsum(within * candidates.survival_np, axis=1)
    curve = cost.curve(int(given_np.sum()), len(candidates.survival_np) + 1)
    ms = base_ms + (curve - curve[0])[np.cumsum(within, axis=1)]
    if cost.c2:
        ms += np.cumsum(within * (cost.c2 * kv_np[candidates.sequence_np]), axis=1)
    none = num_emitting / np.maximum(draft_ms + base_ms, MIN_MS)
    rates = np.concatenate([none, tokens / np.maximum(draft_ms + ms, MIN_MS)], axis=1).max(axis=1)
    return dict(zip(draft_ms_by_length, rates.tolist(), strict=True))


# ---------------------------------------------------------------------------------------------------------- candidates


@dataclass(frozen=True, slots=True, eq=False)
class _Candidates:
    """Drafts that may be verified, in order of survival descending, position ascending, sequence ascending."""

    survival_np: Floats  # [N]
    position_np: Ints  # [N] 0-based
    sequence_np: Ints  # [N]
    shape: tuple[int, int]  # B, S

    def widths_of_first(self, count: int) -> Ints:
        # survivals do not rise along a row, so the first `count` always form prefixes
        return np.bincount(self.sequence_np[:count], minlength=self.shape[0]).astype(np.int64)


def _sort_candidates(survival_np: Floats, caps_np: Ints) -> _Candidates:
    num_sequences, num_positions = survival_np.shape
    by_position = np.ascontiguousarray(survival_np.T)  # [S, B]: flat order is (position, sequence), as ties want it
    allowed = np.arange(num_positions)[:, None] < caps_np
    flat = np.flatnonzero(allowed)
    values = by_position.reshape(-1)[flat]
    order = np.argsort(-values, kind="stable")
    flat = flat[order]
    position = flat // max(num_sequences, 1)
    return _Candidates(values[order], position, flat - position * num_sequences, survival_np.shape)


def _full_width_of_unknown(problem: Problem) -> Ints:
    return np.where(problem.unknown_np, np.minimum(problem.caps_np, problem.survival_np.shape[1]), 0)


def _candidates(problem: Problem, base: Ints) -> _Candidates:
    """Candidates of the sequences that `base` does not decide already."""
    return _sort_candidates(problem.survival_np, np.where(base > 0, 0, problem.caps_np))


def _accepted_in(problem: Problem, base: Ints) -> float:
    """Sum of the survivals of the drafts in `base`."""
    inside = np.arange(problem.survival_np.shape[1]) < base[:, None]
    return float(np.sum(problem.survival_np, where=inside))


def _running_sum(start: float, terms: Floats) -> Floats:
    """[N + 1] start, start + terms[0], ...; summed strictly from left to right, as a loop would."""
    total = np.empty(len(terms) + 1)
    total[0] = start
    total[1:] = terms
    return np.cumsum(total, out=total)


# --------------------------------------------------------------------------------------------------------------- rules


def _times(problem: Problem, base: Ints, candidates: _Candidates, cost: StepCost) -> Floats:
    """[N + 1] step time when the first k candidates are verified on top of `base`, without the draft."""
    base_ms = cost.step_ms(problem.given_np, problem.kv_np, base)
    curve = cost.curve(int(problem.given_np.sum() + base.sum()), len(candidates.survival_np) + 1)
    times: Floats = base_ms + (curve - curve[0])
    if cost.c2:
        times += _running_sum(0.0, cost.c2 * problem.kv_np[candidates.sequence_np].astype(np.float64))
    return times


def _rates(problem: Problem, base: Ints, candidates: _Candidates, cost: StepCost | None = None) -> Floats:
    """[N + 1] expected tokens per ms when the first k candidates are verified on top of `base`."""
    times = _times(problem, base, candidates, cost or problem.cost)
    tokens = problem.num_emitting + _running_sum(_accepted_in(problem, base), candidates.survival_np)
    return tokens / (max(problem.draft_ms, MIN_MS) + np.maximum(times, MIN_MS))


def _on_hull(problem: Problem) -> Ints:
    """Each draft is decided from earlier ones only, which sampled drafts under rejection need to stay exact.

    On the convex hull the rate has one peak, so that stopping at the first draft that does not raise it loses little.
    """
    base = _full_width_of_unknown(problem)
    candidates = _candidates(problem, base)
    rates = _rates(problem, base, candidates, problem.cost.hull())
    stops = np.flatnonzero(rates[1:] <= rates[:-1])
    return base + candidates.widths_of_first(int(stops[0]) if len(stops) else len(rates) - 1)


def _greedy(problem: Problem) -> Ints:
    """Extend, in order of survival, every sequence whose next draft raises the rate; one that does not is passed over.

    Most candidates are settled without an order, see `_settle`; the rest are decided as a loop over them would do it.
    """
    assert isinstance(problem.cost, LinearCost), type(problem.cost)
    base = _full_width_of_unknown(problem)
    accepted = _accepted_in(problem, base)
    base_ms = problem.cost.step_ms(problem.given_np, problem.kv_np, base)
    price = problem.cost.c1 + problem.cost.c2 * problem.kv_np.astype(np.float64)  # [B] of a draft of the sequence
    num_positions = problem.survival_np.shape[1]
    candidates = np.arange(num_positions)[:, None] < np.where(base > 0, 0, problem.caps_np)  # [S, B]
    survival = np.where(candidates, problem.survival_np.T, 0.0)
    sure, open_ = _settle(problem, survival, price, accepted, base_ms)
    if open_.any():
        sure = _in_order(problem, survival, price, accepted, base_ms, sure | open_, sure)
    widths: Ints = base + sure.sum(axis=0)
    return widths


def _settle(problem: Problem, survival: Floats, price: Floats, accepted: float, base_ms: float) -> tuple[Bools, Bools]:
    """([S, B] surely taken, [S, B] open); what is in neither is surely not taken.

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
        before = sure & (survival > survival[open_].max())
        rate = (tokens + float(survival[before].sum())) / (time + float(before.sum(axis=0) @ price))
        open_ &= survival > gain * (1 - MARGIN) * rate * price
        if np.count_nonzero(open_) == num_open:
            break
    return sure, open_


def _best_rate(survival: Floats, price: Floats, tokens: float, time: float) -> float:
    """The highest rate of any set of candidates, which is {survival / price > that rate} (Dinkelbach's iteration)."""
    rate = tokens / time
    while True:
        better = survival > rate * price
        total = tokens + float(np.vdot(survival, better))
        new_rate = total / (time + float(better.sum(axis=0) @ price))
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


# ------------------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecisionRecord:
    """A decision with all its inputs. As JSON it is one line, and floats survive the way there and back."""

    step: int
    problem: Problem
    widths_np: Ints | None  # [B]; exactly one of widths and budget is set
    budget: int | None

    def to_json(self) -> str:
        p = self.problem
        return json.dumps(
            {
                "step": self.step,
                "rule": p.rule,
                "survival": p.survival_np.tolist(),
                "unknown": p.unknown_np.tolist(),
                "caps": p.caps_np.tolist(),
                "kv": p.kv_np.tolist(),
                "given": p.given_np.tolist(),
                "num_emitting": p.num_emitting,
                "cost": p.cost.to_dict(),
                "draft_ms": p.draft_ms,
                "min_gain": p.min_gain,
                "widths": None if self.widths_np is None else self.widths_np.tolist(),
                "budget": self.budget,
            }
        )

    @classmethod
    def from_json(cls, line: str) -> "DecisionRecord":
        try:
            fields = json.loads(line)
            problem = _problem_from(fields)
            widths = fields["widths"]
            return cls(
                step=int(fields["step"]),
                problem=problem,
                widths_np=None if widths is None else np.asarray(widths, dtype=np.int64),
                budget=fields["budget"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"decision record: {type(error).__name__}: {error}; expected a line of a decision log"
            ) from error


def _problem_from(fields: dict[str, Any]) -> Problem:
    rule = fields["rule"]
    if rule not in get_args(Rule):
        raise ValueError(f"rule is {rule!r}")
    caps = np.asarray(fields["caps"], dtype=np.int64)
    return Problem(
        rule=rule,
        survival_np=np.asarray(fields["survival"], dtype=np.float64).reshape(len(caps), -1),
        unknown_np=np.asarray(fields["unknown"], dtype=np.bool_),
        caps_np=caps,
        kv_np=np.asarray(fields["kv"], dtype=np.int64),
        given_np=np.asarray(fields["given"], dtype=np.int64),
        num_emitting=int(fields["num_emitting"]),
        cost=step_cost_from_dict(fields["cost"], "cost"),
        draft_ms=float(fields["draft_ms"]),
        min_gain=float(fields["min_gain"]),
    )


def decide(step: int, problem: Problem) -> DecisionRecord:
    """The decision for `problem`, with its inputs kept."""
    if problem.rule == "budget":
        return DecisionRecord(step=step, problem=problem, widths_np=None, budget=decide_budget(problem))
    return DecisionRecord(step=step, problem=problem, widths_np=decide_widths(problem), budget=None)


def replay(record: DecisionRecord, cost: StepCost | None = None) -> DecisionRecord:
    """The same problem decided again; with `cost`, what another machine would have decided."""
    problem = record.problem if cost is None else replace(record.problem, cost=cost)
    return decide(record.step, problem)


def rule_for(cost: StepCost, *, budget: bool, causal: bool) -> Rule:
    """Which rule decides under `cost`. `causal`: a draft's fate may not depend on later drafts of this step."""
    if budget:
        return "budget"
    if isinstance(cost, TableCost):
        return "hull" if causal else "widths"
    return "greedy"
