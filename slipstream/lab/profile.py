"""What a step costs on this machine: rehearsed steps of many shapes, and the cost model fitted to them.

The steps are the engine's own, on made-up requests: same layout, same kernels or graphs, same output rows as in service,
the draft timed apart. Steps in which somebody prefills as well have a price of their own. Points are taken in order of use
until the time is spent; some are held out from the fits and tell how far off these are. Called by `slipstream profile`,
and at start when no profile is stored.
"""

import time
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from rich.table import Table

from slipstream.decide.cost import (
    CostProfile,
    DraftTimes,
    ProfileKey,
    Samples,
    StepCost,
    SurveyFacts,
    TableCost,
    fit_error,
    fit_table,
    make_profile,
)
from slipstream.decide.pace import draft_lengths
from slipstream.engine import Engine
from slipstream.errors import CapacityError
from slipstream.lab.machine import device_label, versions
from slipstream.rehearse import time_step

BASE_CONTEXT = 192  # tokens; a short conversation
LONG_CONTEXTS = (1024, 4096)
SEQUENCES = (1, 8, 4, 2, 16, 32, 64, 128, 256)  # in order of use
LENGTHS = (7, 3, 1, 16)  # draft lengths beside the engine's most
ROUNDS = 3
MAX_ROUNDS = 12  # where others disturb
DISTURBED = 1.3  # a plain step that takes so many times a quiet one
QUIET_RANK = 10
MAX_REPEATS = 3  # of a point in one round
# Where steps are padded, on a GPU: one that multiplies for long lowers its clock.
SUSTAINED_ROUNDS, SUSTAINED_S = 2, 0.08
MIN_MS = 1e-3  # of a step without its KV terms
POINT_SHARE = 0.2  # of the budget that one point may cost
NUM_NEEDED = 2  # first points, timed whatever they cost: without a plain step and one of S drafts there is no model
NEEDED_ROWS = 64  # a stored profile that was measured up to here serves any engine that does not pad
START_BUDGET_S = 10.0  # when no profile is stored
HELD_OUT_SEQUENCES = (1, 3, 6, 12, 24)
MIXED_ROWS = (64, 128, 256, 512)  # of steps with a prompt, where they are not padded
MOST_MIXED_ROWS = 1280  # where they are: every padded row count up to this; beyond, time grows evenly
HELD_OUT_MIXED_ROWS = (96, 200, 400)


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """One shape of a step; `width` drafts are made and all of them verified."""

    num_sequences: int  # that decode
    width: int
    context: int
    chunk: int = 0  # rows of a prompt that is prefilled beside them

    @property
    def rows(self) -> int:
        return self.num_sequences * (self.width + 1) + self.chunk

    @property
    def kv_rows(self) -> int:
        """Sum of (given + w) * kv; a prompt has no context yet."""
        return (self.rows - self.chunk) * self.context

    @property
    def kv(self) -> int:
        return self.num_sequences * self.context

    def within(self, other: "Point") -> bool:
        """Whether the other has at least as many sequences, and as many rows."""
        return self.num_sequences <= other.num_sequences and self.rows <= other.rows


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

    def as_dict(self) -> dict[str, Any]:
        samples = [(t, False) for t in self.timed] + [(t, True) for t in self.held_out]
        return {
            **self.profile.to_dict(),
            "samples": [
                {
                    **asdict(t.point),
                    "rows": t.point.rows,
                    "draft_ms": t.draft_ms,
                    "verify_ms": t.verify_ms,
                    "held_out": h,
                }
                for t, h in samples
            ],
        }


def profile_key(
    target: str, drafter: str, device: torch.device, dtype: torch.dtype, *, deterministic: bool = False
) -> ProfileKey:
    """What a profile of this pair on this machine is filed under; a deterministic engine has other kernels, and prices."""
    kind = str(dtype).removeprefix("torch.") + (" deterministic" if deterministic else "")
    return ProfileKey(device=device_label(device), target=target, drafter=drafter, dtype=kind)


def stored_profile(key: ProfileKey, engine: Engine) -> CostProfile | None:
    """The profile kept for `key`, unless it was measured on shapes far smaller than this engine's, and not for want of
    time: a survey at start would get no further then."""
    if not key.path().is_file():
        return None
    profile = CostProfile.load(key.path())
    limits, padded = engine.scheduler.limits, bool(engine.backend.row_buckets)
    if padded and not (profile.table.staircase and (profile.mixed or not mixed_points(engine))):
        return None
    most = limits.max_num_seqs * (limits.max_drafts + 1)
    if not padded:
        most = min(most, NEEDED_ROWS)  # beyond it steps grow evenly
    covers = profile.table.rows[-1] >= most and profile.draft.lengths[-1] >= limits.max_drafts
    facts = profile.survey
    tried = (
        facts is not None
        and facts.budget_s >= START_BUDGET_S
        and facts.num_drafts >= limits.max_drafts
        and facts.num_sequences * (facts.num_drafts + 1) >= most
    )
    return profile if covers or tried else None


def measure(engine: Engine, key: ProfileKey, budget_s: float = START_BUDGET_S) -> CostProfile:
    """A profile made within about `budget_s` seconds. The engine must be idle."""
    return survey(engine, key, budget_s).profile


def with_plain(profile: CostProfile, engine: Engine, budget_s: float) -> CostProfile:
    """The profile with what plain decoding costs. engine: one without a drafter, idle; the prices serve comparisons alone."""
    return replace(profile, plain=measure(engine, replace(profile.key, drafter="none"), budget_s))


def survey(engine: Engine, key: ProfileKey, budget_s: float) -> Survey:
    """Time the points, fit to most of them, and see how far off the fit is on the others.

    Of an engine without drafts the prices of plain decoding, and a draft costs nothing.
    """
    limits = engine.scheduler.limits
    wanted = points(engine)
    held_out = {*held_out_points(engine), *held_out_mixed_points(engine)} - set(wanted)
    found = _time(engine, with_held_out(wanted, held_out), wanted[:NUM_NEEDED], budget_s)
    timed = tuple(t for t in found if t.point not in held_out)
    if not timed:
        raise CapacityError("not a single step fits in the KV memory; raise kv_memory or lower max_num_seqs")
    edges = engine.backend.row_buckets
    decode = [t for t in timed if not t.point.chunk]
    drafted = [t for t in decode if _drafted(engine, t.point.width) == t.point.width]
    profile = make_profile(
        key, samples(decode), draft_times(drafted), staircase=bool(edges), versions=versions(), edges=edges
    )
    profile = replace(profile, mixed=mixed_price(profile.step, timed, engine.backend.mixed_row_buckets))
    # Beyond what was fitted nothing is promised.
    apart = tuple(t for t in found if t.point in held_out and any(t.point.within(other.point) for other in timed))
    facts = SurveyFacts(
        num_sequences=limits.max_num_seqs,
        num_drafts=limits.max_drafts,
        budget_s=budget_s,
        held_out_linear_error=_error(profile.linear, [t for t in apart if not t.point.chunk]),
        held_out_table_error=_error(profile.table, [t for t in apart if not t.point.chunk]),
        held_out_mixed_error=_error(profile.mixed, [t for t in apart if t.point.chunk]),
        num_held_out=len(apart),
    )
    return Survey(profile=replace(profile, survey=facts), timed=timed, held_out=apart)


def _error(cost: StepCost | None, timed: Sequence[Timed]) -> float | None:
    return fit_error(cost, samples(timed)) if timed and cost else None


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
    found += edge_points(engine.backend.row_buckets, found, limits.max_num_seqs, limits.max_drafts)
    found += mixed_points(engine)
    found += [Point(n, w, c) for c, n, w in product(contexts, rest, (0, limits.max_drafts))]
    return list(dict.fromkeys(found))


def edge_points(edges: Sequence[int], known: Sequence[Point], max_num_seqs: int, max_drafts: int) -> list[Point]:
    """A step for every padded row count that no known one runs at: a stair is measured, not drawn between its neighbours."""
    rows, found = {point.rows for point in known}, []
    for below, edge in pairwise((0, *edges)):
        counts = [(min(max_num_seqs, edge // (w + 1)), w) for w in range(max_drafts + 1)]
        shapes = [Point(n, w, known[0].context) for n, w in counts if below < n * (w + 1) <= edge]
        if shapes and not any(below < n <= edge for n in rows):
            found.append(
                max(shapes, key=lambda p: (p.rows, -abs(p.width - max_drafts // 2)))
            )  # as steps are when pruned
    return found


def mixed_points(engine: Engine) -> list[Point]:
    """Steps with one prompt among their rows, for each padded row count: half of these are of decoding requests that
    verify half of their drafts, where there are as many slots."""
    padded, width = engine.backend.mixed_row_buckets, engine.scheduler.limits.max_drafts // 2
    row_counts = [n for n in padded if n <= MOST_MIXED_ROWS] or MIXED_ROWS
    return _with_prompt(engine, [(rows // (2 * (width + 1)), width, rows) for rows in row_counts])


def held_out_mixed_points(engine: Engine) -> list[Point]:
    """With other shares of the rows."""
    width = engine.scheduler.limits.max_drafts
    return _with_prompt(engine, [(rows // (4 * (width + 1)), width, rows) for rows in HELD_OUT_MIXED_ROWS])


def _with_prompt(engine: Engine, shapes: Iterable[tuple[int, int, int]]) -> list[Point]:
    """(sequences that decode, width, rows of the step) as points, if the engine can run them."""
    limits, found = engine.scheduler.limits, []
    context = min(BASE_CONTEXT, max(1, limits.max_model_len - limits.max_drafts - 1))
    for wanted, width, rows in shapes:
        count = min(limits.max_num_seqs - 1, max(1, wanted))
        chunk = rows - count * (width + 1)
        if count and 0 < chunk < min(limits.max_num_batched_tokens - count, limits.max_model_len):
            found.append(Point(count, width, context, chunk))
    return found


def mixed_price(decode: StepCost, timed: Iterable[Timed], edges: Sequence[int]) -> TableCost | None:
    """By row counts, the KV terms as in other steps; None where no such step was timed."""
    mixed = [t for t in timed if t.point.chunk]
    if not mixed:
        return None
    rest = [max(t.verify_ms - decode.kv_ms(t.point.kv_rows, t.point.kv), MIN_MS) for t in mixed]
    table = fit_table(Samples.of([t.point.rows for t in mixed], rest), staircase=bool(edges), edges=edges)
    return replace(table, c2=decode.c2, c3=decode.c3)


def held_out_points(engine: Engine) -> list[Point]:
    """Shapes between those that are fitted, in rows, sequences and context."""
    limits = engine.scheduler.limits
    context = min(2 * BASE_CONTEXT, max(1, limits.max_model_len - limits.max_drafts - 1))
    widths = sorted({limits.max_drafts // 3, limits.max_drafts // 2, max(0, limits.max_drafts - 1)})
    counts = [n for n in HELD_OUT_SEQUENCES if n <= limits.max_num_seqs]
    return [Point(n, w, context) for n, w in product(counts, widths)]


def with_held_out(wanted: Sequence[Point], held_out: Iterable[Point]) -> list[Point]:
    """Each of the others after the first that is as large: a slow minute must not meet one kind only."""
    left, order = sorted(held_out), []
    for point in wanted:
        order.append(point)
        order += [other for other in left if other.within(point)]
        left = [other for other in left if not other.within(point)]
    return order


def samples(timed: Iterable[Timed]) -> Samples:
    """Target steps as the fits want them."""
    timed = list(timed)
    return Samples.of(
        rows=[t.point.rows for t in timed],
        ms=[t.verify_ms for t in timed],
        kv_rows=[t.point.kv_rows for t in timed],
        kv=[t.point.kv for t in timed],
    )


def draft_times(timed: Iterable[Timed]) -> DraftTimes:
    """Draft time by length and sequences, at the shortest context.

    Lengths that were not timed for a number of sequences go with those that were: by as much as these take longer than
    for the smallest number, which is timed at most lengths.
    """
    drafting = [t for t in timed if t.point.width > 0]
    shortest = min((t.point.context for t in drafting), default=0)
    found: dict[int, dict[int, float]] = {}  # sequences -> length -> ms
    for t in drafting:
        if t.point.context == shortest:
            found.setdefault(t.point.num_sequences, {})[t.point.width] = t.draft_ms
    if not found:
        return DraftTimes.constant(0.0)
    fewest, counts = found[min(found)], sorted(found)
    lengths = sorted(fewest)
    columns = [_completed(found[n], fewest) for n in counts]
    return DraftTimes(tuple(lengths), tuple(counts), tuple(tuple(c[w] for c in columns) for w in lengths))


def _completed(ms: Mapping[int, float], fewest: Mapping[int, float]) -> dict[int, float]:
    """`ms` at every length of `fewest`: the ratio of the two, linear between the lengths that both have."""
    both = sorted(ms.keys() & fewest.keys())
    ratios = [ms[w] / max(fewest[w], 1e-6) for w in both] or [1.0]
    return {w: ms.get(w, fewest[w] * float(np.interp(w, both or [w], ratios))) for w in fewest}


def survey_table(survey: Survey) -> Table:
    """Step times for eyes, and how far the two models are off on shapes they were not fitted to."""
    profile = survey.profile
    table = Table(title=f"{profile.key.target} + {profile.key.drafter} on {profile.key.device}", title_justify="left")
    for name in (
        "sequences",
        "width",
        "context",
        "prompt",
        "rows",
        "draft ms",
        "verify ms",
        "linear ms",
        "table ms",
        "held out",
    ):
        table.add_column(name, justify="right")
    for timed in (*survey.timed, *survey.held_out):
        point = timed.point
        counts = np.full(point.num_sequences, 1), np.full(point.num_sequences, point.context)
        widths = np.full(point.num_sequences, point.width)
        predicted = [f"{cost.step_ms(*counts, widths):.2f}" for cost in (profile.linear, profile.table)]
        shape = [str(n) for n in (point.num_sequences, point.width, point.context, point.chunk, point.rows)]
        mark = "yes" if timed in survey.held_out else ""
        table.add_row(*shape, f"{timed.draft_ms:.2f}", f"{timed.verify_ms:.2f}", *predicted, mark)
    table.caption = _caption(profile.survey)
    return table


def _caption(facts: SurveyFacts | None) -> str:
    if facts is None or not facts.num_held_out:
        return "no time was left for shapes to be held out"
    errors = {
        "linear": facts.held_out_linear_error,
        "table": facts.held_out_table_error,
        "with a prompt": facts.held_out_mixed_error,
    }
    shown = ", ".join(f"{name} {error:.1%}" for name, error in errors.items() if error is not None)
    return f"mean error on the {facts.num_held_out} shapes held out: {shown}"


class _Clock:
    """How much of the budget is left."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self._start = time.perf_counter()

    def left_s(self) -> float:
        return self.budget_s - (time.perf_counter() - self._start)


@dataclass(frozen=True, slots=True)
class _Try:
    timed: Timed
    reference_ms: float  # a plain step just before or after, the slower one; 0 where nothing disturbs


def _time(engine: Engine, wanted: Sequence[Point], needed: Sequence[Point], budget_s: float) -> list[Timed]:
    """Time points until the budget is spent; one that would cost too much of it, or does not fit, is left out. Those
    that are needed are timed at any cost.

    All points are gone through several times and each keeps its shortest time: what else the machine does only adds.
    On a CPU others may halve its speed for seconds, so a plain step is timed between any two points; what was timed
    while that took long is tried again, and left out in the end.
    """
    tries: dict[Point, list[_Try]] = {}
    too_large: set[Point] = set()
    clock, watch = _Clock(budget_s), _Watch(engine, wanted[0])
    padded = bool(engine.backend.row_buckets)
    rounds = SUSTAINED_ROUNDS if padded else ROUNDS
    for _, point in product(range(MAX_ROUNDS), wanted):
        if point in too_large or sum(map(watch.is_quiet, tries.get(point, ()))) >= rounds:
            continue
        repeats = _affordable_repeats(point, [t.timed for found in tries.values() for t in found], clock, padded)
        if point in needed and point not in tries:
            repeats = max(1, repeats)
        if repeats < 1:
            continue
        try:
            step = time_step(
                engine, num_sequences=point.num_sequences, width=point.width, context=point.context, chunk=point.chunk,
                draft_length=_drafted(engine, point.width), repeats=repeats,
            )  # fmt: skip
        except CapacityError:
            too_large.add(point)
            continue
        tries.setdefault(point, []).append(_Try(Timed(point, step.draft_ms, step.verify_ms), watch.look()))
    keep = _last if padded else _shortest
    best = {point: keep(_quiet(found, watch, point in needed)) for point, found in tries.items()}
    if wanted[0] in best and watch.looks:
        best[wanted[0]] = Timed(wanted[0], 0.0, watch.quiet_ms)
    return [timed for point in wanted if (timed := best.get(point)) is not None]


def _drafted(engine: Engine, width: int) -> int:
    """The draft length that `width` is timed with. Where drafts are recorded, lengths between those that a policy may
    choose are not, and a device that waits for the launches of such a draft would seem slow."""
    if not engine.backend.row_buckets:
        return width
    return min(length for length in draft_lengths(engine.scheduler.limits.max_drafts) if length >= width)


def _quiet(tries: Sequence[_Try], watch: "_Watch", needed: bool) -> list[Timed]:
    return [t.timed for t in tries if watch.is_quiet(t)] or [t.timed for t in tries if needed]


def _shortest(tries: Sequence[Timed]) -> Timed | None:
    if not tries:
        return None
    return Timed(tries[0].point, min(t.draft_ms for t in tries), min(t.verify_ms for t in tries))


def _last(tries: Sequence[Timed]) -> Timed | None:
    """By then it was known how often it has to run."""
    return tries[-1] if tries else None


class _Watch:
    """How fast the machine is at the moment, by a plain step. Where steps are padded they run on a GPU of their own."""

    def __init__(self, engine: Engine, plain: Point) -> None:
        self.looks: list[float] = []  # rising; empty: nobody watches
        self._engine = None if engine.backend.row_buckets else engine
        self._plain = plain
        self._latest_ms = 0.0
        self.look()

    def look(self) -> float:
        """Time of a plain step: now or when it was last looked, the longer one."""
        if self._engine is None:
            return 0.0
        plain, before_ms = self._plain, self._latest_ms
        try:
            step = time_step(self._engine, num_sequences=1, width=plain.width, context=plain.context, repeats=1)
        except CapacityError:
            self._engine = None
            return 0.0
        insort(self.looks, step.verify_ms)
        self._latest_ms = step.verify_ms
        return max(before_ms, step.verify_ms)

    @property
    def quiet_ms(self) -> float:
        """A plain step when nothing disturbs: not the very best, which may be luck, but one in QUIET_RANK is as good."""
        return self.looks[len(self.looks) // QUIET_RANK] if self.looks else 0.0

    def is_quiet(self, one: _Try) -> bool:
        """By all that was seen so far."""
        return one.reference_ms <= DISTURBED * self.quiet_ms


def _affordable_repeats(point: Point, timed: Sequence[Timed], clock: _Clock, sustained: bool) -> int:
    """How often the point may run, beside the run that is not counted; 0 if it costs too much.

    sustained: for SUSTAINED_S, if that is more often than otherwise.
    """
    left_s = clock.left_s()
    if left_s <= 0:
        return 0
    # Time grows at most as fast as rows do, so every timed point bounds this one from above.
    bounds = ((t.draft_ms + t.verify_ms) * max(1.0, point.rows / t.point.rows) for t in timed)
    expected_s = 1e-3 * min(bounds, default=0.0)
    if expected_s == 0.0:
        return MAX_REPEATS
    most = max(MAX_REPEATS, int(SUSTAINED_S / expected_s)) if sustained else MAX_REPEATS
    return min(most, int(min(POINT_SHARE * clock.budget_s, left_s) / expected_s) - 1)
