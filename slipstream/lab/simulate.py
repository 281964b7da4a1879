"""Policies replayed over a dense trace under the prices of a profile: what each would gain, without a device.

    for each load, S and policy: an engine of its own serves the trace's answers, wave by wave, and goes on learning

Steps are the engine's (`simulate_loop`), times are virtual: a profile's draft and step times, so that of a step's shape
only row count, contexts and draft length matter; plain decoding has prices of its own where they were measured. Figures
are called and counted as in `bench`. Torch-free; called by `slipstream simulate`. What is regretted is the rate that the
oracle would have had.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from slipstream.config import Signal
from slipstream.decide.calibration import Calibration, find_calibration
from slipstream.decide.cost import CostProfile
from slipstream.errors import CheckpointError, ConfigError
from slipstream.lab.dense import DenseTrace
from slipstream.lab.plots import LinePanel
from slipstream.lab.simulate_loop import Prices, VirtualEngine
from slipstream.lab.simulate_options import Load, SimulateOptions
from slipstream.lab.simulate_policies import Contestant, Setting, contestants
from slipstream.lab.tables import new_table, shown
from slipstream.lab.waves import Wave, median, speed, total
from slipstream.models.locate import resolve_drafter

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

BATCHED_TOKENS = {"cuda": 8192, "cpu": 512}  # given rows of a step at most, as engines have it; by the profile's device


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table."""

    contestant: Contestant
    num_drafts: int  # S of its group
    load: Load

    def __str__(self) -> str:
        signal = f" {self.contestant.signal}" if self.contestant.signal else ""
        return f"{self.contestant.name}{signal} S={self.num_drafts} {self.load}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What all cases share."""

    trace: DenseTrace
    profile: CostProfile
    calibration: Path | None
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    case: Case
    waves: tuple[Wave, ...]
    num_steps: int
    took_s: float  # really

    @property
    def tok_per_s(self) -> float:
        return median([wave.tok_per_s for wave in self.waves]) or 0.0


def run(options: SimulateOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """The report that `--json` prints; `say` gets a line for every case."""
    inputs = read(options)
    outcomes = []
    for case in inputs.cases:
        outcomes.append(simulate(case, inputs, options))
        rate = outcomes[-1].num_steps / outcomes[-1].took_s
        say(f"{case}: {outcomes[-1].tok_per_s:.1f} tok/s ({rate:.0f} steps/s simulated)")
    return {
        "trace": {"path": str(options.trace), "answers": inputs.trace.num_answers, **_about(inputs.trace)},
        "profile": {"path": str(options.profile), "device": inputs.profile.key.device, "use": inputs.profile.use},
        "calibration": str(inputs.calibration) if inputs.calibration else None,
        "max_tokens": options.max_tokens,
        "min_gain": options.min_gain,
        "exposed_ms": options.exposed(),
        "prefill": options.prefill,
        "seed": options.seed,
        "rows": rows(outcomes),
    }


def _about(trace: DenseTrace) -> dict[str, Any]:
    return {"sets": list(trace.set_names), "about": dict(trace.about)}


def read(options: SimulateOptions) -> Inputs:
    """Files and policies; everything that can be refused is refused here."""
    trace, profile = DenseTrace.load(options.trace), CostProfile.load(options.profile)
    trace = trace.of_sets(options.sets) if options.sets else trace
    for signal in options.signals:
        if signal not in trace.signals:
            raise ConfigError(f"signals: the trace has no {signal!r}; it has {', '.join(trace.signals)}")
    for num_drafts in options.num_speculative_tokens:
        if num_drafts > trace.num_drafts:
            raise ConfigError(f"num_speculative_tokens holds {num_drafts}; the trace drafts {trace.num_drafts}")
    if options.min_gain and profile.use == "table":
        raise ConfigError("min_gain works with a linear cost model only, and the profile's is a table; set it to 0")
    calibration = _calibration(options.calibration, trace)
    if calibration is not None:
        Calibration.load(calibration)
    return Inputs(trace=trace, profile=profile, calibration=calibration, cases=_cases(options, trace))


def _calibration(asked: str, trace: DenseTrace) -> Path | None:
    """The file, if any; auto: the one beside the drafter, as an engine would take it."""
    if asked == "none":
        return None
    if asked != "auto":
        return Path(asked)
    try:
        return find_calibration(None, resolve_drafter(str(trace.about.get("draft") or "")))
    except CheckpointError:  # it was traced elsewhere
        return None


def _cases(options: SimulateOptions, trace: DenseTrace) -> tuple[Case, ...]:
    """In the order of loads; plain decoding, which knows no S, once for each."""
    signals: Sequence[Any] = options.signals or tuple(trace.signals)
    groups = options.num_speculative_tokens or (trace.num_drafts,)
    found: dict[str, Case] = {}
    for load in options.loads():
        for num_drafts in groups:
            for one in contestants(options.policies, num_drafts, signals):
                case = Case(contestant=one, num_drafts=num_drafts if one.num_drafts else 0, load=load)
                found.setdefault(str(case), case)
    return tuple(found.values())


def simulate(case: Case, inputs: Inputs, options: SimulateOptions) -> Outcome:
    """All waves of one case."""
    contestant, load, profile = case.contestant, case.load, inputs.profile
    if contestant.num_drafts == 0 and profile.plain is not None:
        profile = profile.plain
    signal: Signal = contestant.signal or "peak"
    policy = contestant.make(
        Setting(
            num_drafts=contestant.num_drafts, signal=signal, concurrency=load.concurrency, profile=profile,
            min_gain=options.min_gain, calibration=inputs.calibration,
        )
    )  # fmt: skip
    exposed_ms, on_gpu = options.exposed()[policy.waits_for], profile.key.device.startswith("cuda")
    prices = Prices(
        step=profile.step, draft=profile.draft, mixed=profile.mixed, exposed_ms=exposed_ms, prefill=options.prefill
    )
    engine = VirtualEngine(
        inputs.trace, policy, prices, num_drafts=contestant.num_drafts, concurrency=load.concurrency,
        max_num_batched_tokens=BATCHED_TOKENS["cuda" if on_gpu else "cpu"], max_tokens=options.max_tokens,
        overlap=on_gpu,
    )  # fmt: skip
    start = time.perf_counter()
    waves = tuple(engine.serve(*wave) for wave in requests(load, options, inputs.trace))
    return Outcome(case=case, waves=waves, num_steps=engine.num_steps, took_s=time.perf_counter() - start)


def requests(load: Load, options: SimulateOptions, trace: DenseTrace) -> Iterator[tuple[Ints, Floats | None]]:
    """Answers [n] of each wave and when they come, in ms, None: at once. The same in every case of a load.

    Sets take turns, as in a bench that replays the trace, or all are shuffled.
    """
    rng, count = np.random.default_rng(options.seed or 0), options.num_requests(load)
    order = _in_turn(trace) if options.seed is None else rng.permutation(trace.num_answers)
    for _ in range(options.waves):
        gaps = None if load.arrivals is None else rng.exponential(1e3 / load.arrivals, count)
        yield order[np.arange(count) % len(order)], None if gaps is None else np.add.accumulate(gaps)


def _in_turn(trace: DenseTrace) -> Ints:
    """Answers, one of each set after the other."""
    turns = np.zeros(trace.num_answers, dtype=np.int64)
    for index in range(len(trace.set_names)):
        members = np.flatnonzero(trace.sets_np == index)
        turns[members] = np.arange(len(members))
    return np.lexsort((trace.sets_np, turns))


# -------------------------------------------------------------------------------------------------------------- figures


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One for each case, compared with plain decoding and with the oracle under the same load."""
    plain = {o.case.load: o.waves for o in outcomes if o.case.contestant.name == "off"}
    oracle: dict[tuple[Load, int], float] = {}
    for outcome in outcomes:
        if outcome.case.contestant.name == "oracle":
            for num_drafts in (0, outcome.case.num_drafts):  # plain decoding is held against the best of all S
                key = outcome.case.load, num_drafts
                oracle[key] = max(oracle.get(key, 0.0), outcome.tok_per_s)
    return [_row(o, plain.get(o.case.load, ()), oracle.get((o.case.load, o.case.num_drafts))) for o in outcomes]


def _row(outcome: Outcome, plain: Sequence[Wave], best: float | None) -> dict[str, Any]:
    case, waves = outcome.case, outcome.waves
    answers = [answer for wave in waves for answer in wave.answers]
    counters, timed = total(answers), speed(waves, plain)
    num_steps, speeds = sum(wave.num_steps for wave in waves), timed["wave_tok_per_s"]
    return {
        "policy": case.contestant.name,
        "signal": case.contestant.signal,
        "num_speculative_tokens": case.num_drafts or None,
        "concurrency": case.load.concurrency,
        "arrivals_per_s": case.load.arrivals,
        "requests": len(waves[0].answers),
        "waves": len(waves),
        "output_tokens": sum(wave.output_tokens for wave in waves),
        "wall_s": sum(wave.wall_s for wave in waves),
        "tok_per_s": timed["tok_per_s"],
        "tok_per_s_min": min(speeds),
        "tok_per_s_max": max(speeds),
        "ratio_to_off": timed["ratio_to_off"],
        "regret": None if best is None else 1 - timed["tok_per_s"] / best,
        "tpot_ms": median([answer.tpot_ms for answer in answers]),
        "ttft_ms": median([answer.ttft_ms for answer in answers]),
        "drafted": counters.drafted,
        "verified": counters.verified,
        "accepted": counters.accepted,
        "emitted": counters.emitted,
        "acceptance_rate": counters.acceptance_rate,
        "mean_accepted_length": counters.mean_accepted_length,
        "rows_per_step": (counters.verified + counters.steps) / num_steps if num_steps else None,
        "mean_draft_length": counters.drafted / counters.steps if counters.steps else None,
        "wave_tok_per_s": speeds,
        "width_histogram": {str(w): n for w, n in sorted(counters.width_histogram.items())},
        "acceptance_at": counters.acceptance_at,
        "steps": outcome.num_steps,
        "simulated_steps_per_s": outcome.num_steps / outcome.took_s,
    }


def rows_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """The report for eyes: loads one after the other, in each what was asked for."""
    heads = ("policy", "signal", "S", "at", "req/s", "tok/s", "x off", "regret", "tokens\n/step", "rows\n/step",
             "draft\nlength", "accep-\nted", "ttft\nms")  # fmt: skip
    arrive = any(row["arrivals_per_s"] is not None for row in rows)
    hidden = () if arrive else ("req/s", "ttft\nms")
    table = new_table(title, [head for head in heads if head not in hidden], ["policy", "signal"])
    table.columns[0].no_wrap = True
    for row in rows:
        cells = (
            row["policy"],
            row["signal"] or "",
            shown(row["num_speculative_tokens"], "d"),
            str(row["concurrency"]),
            shown(row["arrivals_per_s"], "g"),
            shown(row["tok_per_s"], ".1f"),
            shown(row["ratio_to_off"], ".3f"),
            shown(row["regret"], ".1%"),
            shown(row["mean_accepted_length"], ".2f"),
            shown(row["rows_per_step"], ".1f"),
            shown(row["mean_draft_length"], ".2f"),
            shown(row["acceptance_rate"], ".0%"),
            shown(row["ttft_ms"], ".1f"),
        )
        table.add_row(*(cell for cell, head in zip(cells, heads, strict=True) if head not in hidden))
    return table


def panels(rows: Sequence[Mapping[str, Any]]) -> list[list[LinePanel]]:
    """A line of three pictures for each S: speed, rows per step and regret over the load."""
    arrive = len({row["arrivals_per_s"] for row in rows}) > 1
    load, label = ("arrivals_per_s", "requests/s") if arrive else ("concurrency", "requests at a time")
    figures = (("tok_per_s", "tok/s"), ("rows_per_step", "rows per step"), ("regret", "regret"))
    found = []
    for num_drafts in sorted({row["num_speculative_tokens"] or 0 for row in rows} - {0}) or [0]:
        group = [row for row in rows if row["num_speculative_tokens"] in (None, num_drafts)]
        found.append([_panel(group, figure, load, f"S = {num_drafts}", label, name) for figure, name in figures])
    return found


def _panel(
    rows: Sequence[Mapping[str, Any]], figure: str, load: str, title: str, xlabel: str, ylabel: str
) -> LinePanel:
    lines: dict[str, dict[float, float]] = {}
    for row in _best_of_sweeps(rows, load):
        if row[figure] is not None:
            lines.setdefault(row["line"], {})[row[load]] = row[figure]
    series = tuple(
        (name, tuple(sorted(points)), tuple(points[x] for x in sorted(points))) for name, points in lines.items()
    )
    return LinePanel(title=title, xlabel=xlabel, ylabel=ylabel, series=series, doubling=figure != "regret")


def _best_of_sweeps(rows: Sequence[Mapping[str, Any]], load: str) -> list[dict[str, Any]]:
    """Rows with the name of their line. Of many widths only the fastest under each load is drawn, and named as such."""
    found: list[dict[str, Any]] = []
    for row in rows:
        kind = row["policy"].partition(":")[0]
        many = (
            kind in ("static", "fixed") and len({r["policy"] for r in rows if r["policy"].startswith(kind + ":")}) > 2
        )
        if many:
            rivals = [r["tok_per_s"] for r in rows if r["policy"].startswith(kind + ":") and r[load] == row[load]]
            if row["tok_per_s"] < max(rivals):
                continue
        name = f"best {kind}" if many else " ".join(filter(None, (row["policy"], row["signal"])))
        found.append({**row, "line": name})
    return found
