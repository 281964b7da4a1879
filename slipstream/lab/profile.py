"""What a step costs on this machine: rehearsed steps of many shapes, and the cost model fitted to them.

The steps are the engine's own, on made-up requests: same layout, same kernels, same output rows as in service. Points are
taken in order of use until the time is spent. Called by `slipstream profile`, and at start when no profile is stored.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from rich.table import Table

from slipstream.decide.cost import CostProfile, DraftTimes, ProfileKey, Samples, StepCost, fit_error, make_profile
from slipstream.engine import Engine
from slipstream.errors import CapacityError, ConfigError
from slipstream.lab.machine import device_label, versions
from slipstream.rehearse import time_step

BASE_CONTEXT = 192  # tokens; a short conversation
LONG_CONTEXTS = (1024, 4096)
SEQUENCES = (1, 8, 4, 2, 16, 32, 64, 128, 256)  # in order of use
LENGTHS = (7, 3, 1, 16)  # draft lengths beside the engine's most
ROUNDS = 3
MAX_REPEATS = 3  # of a point in one round
POINT_SHARE = 0.2  # of the budget that one point may cost
NEEDED_ROWS = 64  # a stored profile that was measured up to here serves any engine


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """One shape of a decode step; `width` drafts are made and all of them verified."""

    num_sequences: int
    width: int
    context: int

    @property
    def rows(self) -> int:
        return self.num_sequences * (self.width + 1)


@dataclass(frozen=True, slots=True)
class Timed:
    point: Point
    draft_ms: float
    verify_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A profile, and how well it predicts shapes that it was not fitted to."""

    profile: CostProfile
    timed: tuple[Timed, ...]
    held_out: tuple[Timed, ...]  # empty when time ran out

    def held_out_error(self, cost: StepCost) -> float | None:
        """Mean relative error of a step's time, on the shapes that no fit has seen."""
        return fit_error(cost, samples(self.held_out)) if self.held_out else None

    def as_dict(self) -> dict[str, Any]:
        profile = self.profile
        return {
            **profile.to_dict(),
            "held_out_error": {
                "linear": self.held_out_error(profile.linear),
                "table": self.held_out_error(profile.table),
                "num_samples": len(self.held_out),
            },
            "samples": [
                {**asdict(t.point), "rows": t.point.rows, "draft_ms": t.draft_ms, "verify_ms": t.verify_ms}
                for t in (*self.timed, *self.held_out)
            ],
        }


def profile_key(target: str, drafter: str, device: torch.device, dtype: torch.dtype) -> ProfileKey:
    """What a profile of this pair on this machine is filed under."""
    return ProfileKey(
        device=device_label(device), target=target, drafter=drafter, dtype=str(dtype).removeprefix("torch.")
    )


def stored_profile(key: ProfileKey, engine: Engine) -> CostProfile | None:
    """The profile kept for `key`, unless it was measured on shapes far smaller than this engine's."""
    if not key.path().is_file():
        return None
    profile = CostProfile.load(key.path())
    limits, padded = engine.scheduler.limits, bool(engine.backend.row_buckets)
    most = limits.max_num_seqs * (limits.max_drafts + 1)
    if not padded:
        most = min(most, NEEDED_ROWS)  # beyond it steps grow evenly
    elif not profile.table.staircase:
        return None
    covers = profile.table.rows[-1] >= most and profile.draft.lengths[-1] >= limits.max_drafts
    return profile if covers else None


def measure(engine: Engine, key: ProfileKey, budget_s: float = 10.0) -> CostProfile:
    """A profile made within about `budget_s` seconds. The engine must be idle."""
    return survey(engine, key, budget_s).profile


def survey(engine: Engine, key: ProfileKey, budget_s: float) -> Survey:
    """Time the points, fit, then time other points and see how far off the fit is."""
    limits = engine.scheduler.limits
    if limits.max_drafts < 1:
        raise ConfigError("a cost model prices drafts; name a drafter with --draft")
    clock = _Clock(budget_s)
    timed = _time(engine, points(engine), clock, until=0.85)
    if not timed:
        raise CapacityError("not a single step fits in the KV memory; raise kv_memory or lower max_num_seqs")
    edges = engine.backend.row_buckets
    profile = make_profile(
        key, samples(timed), draft_times(timed), staircase=bool(edges), versions=versions(), edges=edges
    )
    held_out = tuple(_time(engine, held_out_points(engine, timed), clock, until=1.0))
    return Survey(profile=profile, timed=tuple(timed), held_out=held_out)


def points(engine: Engine) -> list[Point]:
    """Shapes within the engine's limits, the most telling ones first."""
    limits = engine.scheduler.limits
    lengths = [limits.max_drafts, *(n for n in LENGTHS if n < limits.max_drafts)]
    counts = [n for n in SEQUENCES if n <= limits.max_num_seqs]
    if engine.backend.row_buckets:  # the largest step bounds what a staircase knows, and on a GPU it costs nothing
        counts = list(dict.fromkeys([counts[0], limits.max_num_seqs, *counts]))
    contexts = [c for c in LONG_CONTEXTS if c + limits.max_drafts < limits.max_model_len]
    base = min(BASE_CONTEXT, max(1, limits.max_model_len - limits.max_drafts - 1))
    first, rest = counts[:2], counts[2:]
    found = [Point(n, w, base) for n, w in product(first, [0, *lengths])]
    found += [Point(n, w, c) for c, n, w in product(contexts, first, (0, limits.max_drafts))]
    found += [Point(1, w, base) for w in range(limits.max_drafts)]
    found += [Point(n, w, base) for n, w in product(rest, [0, *lengths])]
    found += [Point(n, w, c) for c, n, w in product(contexts, rest, (0, limits.max_drafts))]
    return list(dict.fromkeys(found))


def held_out_points(engine: Engine, timed: Iterable[Timed]) -> list[Point]:
    """Shapes between those that were timed."""
    limits, known = engine.scheduler.limits, {t.point for t in timed}
    most = max(point.num_sequences for point in known)
    context = min(2 * BASE_CONTEXT, max(1, limits.max_model_len - limits.max_drafts - 1))
    widths = sorted({limits.max_drafts // 3, limits.max_drafts // 2, max(0, limits.max_drafts - 1)})
    counts = [n for n in (1, 3, 6, 12, 24) if n <= most]
    return [p for p in (Point(n, w, context) for n, w in product(counts, widths)) if p not in known]


def samples(timed: Iterable[Timed]) -> Samples:
    """Target steps as the fits want them."""
    timed = list(timed)
    return Samples.of(
        rows=[t.point.rows for t in timed],
        ms=[t.verify_ms for t in timed],
        kv_rows=[t.point.rows * t.point.context for t in timed],
        kv=[t.point.num_sequences * t.point.context for t in timed],
    )


def draft_times(timed: Iterable[Timed]) -> DraftTimes:
    """Draft time by length and sequences, at the shortest context; numbers of sequences with a gap are left out."""
    drafting = [t for t in timed if t.point.width > 0]
    shortest = min((t.point.context for t in drafting), default=0)
    found = {(t.point.width, t.point.num_sequences): t.draft_ms for t in drafting if t.point.context == shortest}
    if not found:
        return DraftTimes.constant(0.0)
    by_count = {n: {w for w, m in found if m == n} for _, n in found}
    lengths = sorted(set.intersection(*by_count.values())) or sorted(by_count[min(by_count)])
    counts = sorted(n for n, widths in by_count.items() if widths.issuperset(lengths))
    return DraftTimes(tuple(lengths), tuple(counts), tuple(tuple(found[w, n] for n in counts) for w in lengths))


def survey_table(survey: Survey) -> Table:
    """Step times for eyes, and how far the two models are off on shapes they were not fitted to."""
    profile = survey.profile
    table = Table(title=f"{profile.key.target} + {profile.key.drafter} on {profile.key.device}", title_justify="left")
    for name in ("sequences", "width", "context", "rows", "draft ms", "verify ms", "linear ms", "table ms", "held out"):
        table.add_column(name, justify="right")
    for timed in (*survey.timed, *survey.held_out):
        point = timed.point
        counts = np.full(point.num_sequences, 1), np.full(point.num_sequences, point.context)
        widths = np.full(point.num_sequences, point.width)
        predicted = [f"{cost.step_ms(*counts, widths):.2f}" for cost in (profile.linear, profile.table)]
        shape = [str(n) for n in (point.num_sequences, point.width, point.context, point.rows)]
        mark = "yes" if timed in survey.held_out else ""
        table.add_row(*shape, f"{timed.draft_ms:.2f}", f"{timed.verify_ms:.2f}", *predicted, mark)
    errors = [survey.held_out_error(cost) for cost in (profile.linear, profile.table)]
    table.caption = "held-out error " + ", ".join(
        f"{name} {'-' if error is None else format(error, '.1%')}"
        for name, error in zip(("linear", "table"), errors, strict=True)
    )
    return table


class _Clock:
    """How much of the budget is gone."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self._start = time.perf_counter()

    def share(self) -> float:
        return (time.perf_counter() - self._start) / self.budget_s


def _time(engine: Engine, wanted: list[Point], clock: _Clock, until: float) -> list[Timed]:
    """Time points until a share of the budget is spent; one that would cost too much of it, or does not fit, is left out.

    All points are gone through several times and each keeps its shortest time: what else the machine does only adds.
    """
    best: dict[Point, Timed] = {}
    too_large: set[Point] = set()
    for _, point in product(range(ROUNDS), wanted):
        if clock.share() >= until:
            break
        repeats = _affordable_repeats(point, best, clock, until)
        if repeats < 1 or point in too_large:
            continue
        try:
            step = time_step(
                engine, num_sequences=point.num_sequences, width=point.width, context=point.context, repeats=repeats
            )
        except CapacityError:
            too_large.add(point)
            continue
        before = best.get(point, Timed(point, step.draft_ms, step.verify_ms))
        best[point] = Timed(point, min(before.draft_ms, step.draft_ms), min(before.verify_ms, step.verify_ms))
    return [best[point] for point in wanted if point in best]


def _affordable_repeats(point: Point, timed: Mapping[Point, Timed], clock: _Clock, until: float) -> int:
    """How often the point may run, beside the run that is not counted; 0 if it costs too much."""
    # Time grows at most as fast as rows do, so every timed point bounds this one from above.
    bounds = ((t.draft_ms + t.verify_ms) * max(1.0, point.rows / t.point.rows) for t in timed.values())
    expected_s = 1e-3 * min(bounds, default=0.0)
    if expected_s == 0.0:
        return MAX_REPEATS
    left_s = (until - clock.share()) * clock.budget_s
    return min(MAX_REPEATS, int(min(POINT_SHARE * clock.budget_s, left_s) / expected_s) - 1)
