"""The large shape: plain decoding and verify steps against the linear layers alone, and the critical path of every mode.

Weights are random, so drafts are never accepted: policies are pinned to draft S tokens each step, and what they decide is
timed, not how well. Prompts are random ids of one length, answers have a fixed length.
"""

import statistics
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch.nn.functional as F

from bench.gpu_parts.goals import Goal, Report, at_least, at_most, ratio, reported
from bench.gpu_parts.scale import Scale, chosen
from bench.gpu_parts.session import PRUNING, Clock, Served, Session, row, serve, tokens
from slipstream.lab.ceilings import ceilings, linear_ms, linear_weights
from slipstream.lab.report import ceiling_line, row_key
from slipstream.rehearse import StepTime, time_step

# Output tok/s of vLLM 0.26 on an H200, prompt 128, output 128, measured for issue 4: concurrency -> figure.
VLLM = {1: 188.0, 32: 5010.0, 256: 14950.0}


def start(session: Session, scale: Scale, clock: Clock) -> Report:
    """From nothing but imports to an engine of the mode that needs most: weights, kernels, profile and graphs."""
    session.llm("lag", scale.drafts[0], scale.large_slots)
    return {"seconds": dict(session.seconds)}, [
        at_most(f"{session.pair.name}: start in s, imports left out", sum(session.seconds.values()), 60)
    ]


def run(session: Session, scale: Scale, clock: Clock) -> Report:
    found = ceilings(session.models.target, scale.rows)
    session.say(f"{session.pair.name}: {ceiling_line(found)}")
    rows, goals = plain(session, scale, clock, found)
    steps, step_goals = verify_steps(session, scale)
    probed, probe_goals = probes(session, scale, clock)
    report = {"ceilings": found, "rows": rows + probed, "steps": steps, "start_seconds": dict(session.seconds)}
    return report, goals + step_goals + probe_goals


def plain(
    session: Session, scale: Scale, clock: Clock, found: dict[str, float]
) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Plain decoding: long answers against the ceiling, short ones beside vLLM's figures."""
    llm = session.llm("off", 0, max(scale.large_at))
    lengths = {at: [scale.output_tokens] if at <= scale.verify_at else [] for at in scale.large_at}
    cases = [(at, length) for at in scale.large_at for length in [*lengths[at], scale.table_tokens]]
    waves: dict[tuple[int, int], list[Served]] = {case: [] for case in cases}
    for number in range(scale.waves):
        for at, length in cases:
            if number == 0 or clock.allows(f"plain at {at}, wave {number + 1}", 0.7):
                waves[at, length].append(serve(llm, session.pair.prompts(session.models, at), tokens(length), at))
    rows = [row(session, "off", 0, at, waves[at, n], output_tokens_each=n) for at, n in cases]
    return rows, [goal for case in rows for goal in plain_goals(case, scale, found)]


def plain_goals(case: dict[str, Any], scale: Scale, found: dict[str, float]) -> list[Goal]:
    name, at, length = case["model"], case["concurrency"], case["output_tokens_each"]
    if length == scale.table_tokens:
        limit = VLLM.get(at)
        what = f"{name}: off at {at}, output {length}: tok/s"
        return [reported(what, case["tok_per_s"]) if limit is None else at_least(what, case["tok_per_s"], limit)]
    over = ratio(case["tpot_ms"], found.get(f"linear_ms_{row_key(at)}"))
    return [at_most(f"{name}: off at {at}: step / linear layers of {at} rows", over, 1.15)]


def verify_steps(session: Session, scale: Scale) -> tuple[dict[str, Any], list[Goal]]:
    """Steps of several widths beside the linear layers and a plain step: does time follow the rows that are verified?"""
    name, count, most, context = session.pair.name, scale.verify_at, scale.drafts[0], session.pair.max_model_len // 2
    drafting = session.llm("lag", most, scale.large_slots).engine
    plain_engine = session.llm("off", 0, max(scale.large_at)).engine
    widths = sorted({1, most // 2} - {0, most})
    shape = {"num_sequences": count, "context": context}
    weights, rows = linear_weights(session.models.target), count * (most + 1)

    def drafted(width: int) -> StepTime:
        return time_step(drafting, **shape, width=width, draft_length=most)

    def floor() -> StepTime:
        return StepTime(0.0, linear_ms(weights, rows, F.linear))

    # What is set against each other takes turns, with nothing between: a chip slows down for a while after large products.
    widest, linear = in_turn(scale.waves, lambda: drafted(most), floor)
    none, plain = in_turn(scale.waves, lambda: drafted(0), lambda: time_step(plain_engine, **shape, width=0))
    times = {w: median_of([drafted(w) for _ in range(scale.waves)]) for w in widths} | {0: none, most: widest}
    report = {
        "sequences": count, "context": context, "plain_ms": plain.verify_ms,
        f"linear_ms_{row_key(rows)}": linear.verify_ms,
        "by_width": {str(w): {"draft_ms": t.draft_ms, "verify_ms": t.verify_ms} for w, t in sorted(times.items())},
    }  # fmt: skip
    return report, [
        at_most(
            f"{name}: verify of {count} x w={most} / linear layers", ratio(widest.verify_ms, linear.verify_ms), 1.15
        ),
        at_most(f"{name}: widths all 0 / plain step, at {count}", ratio(none.verify_ms, plain.verify_ms), 1.05),
        reported(f"{name}: draft call / verify w={most}, at {count}", ratio(widest.draft_ms, widest.verify_ms)),
    ]


def in_turn(waves: int, first: Callable[[], StepTime], second: Callable[[], StepTime]) -> tuple[StepTime, StepTime]:
    """Medians of both; each goes before the other as often as behind it. The first turn is not counted."""
    times: tuple[list[StepTime], list[StepTime]] = [], []
    for number in range(2 * waves + 1):
        for which, measure in ((0, first), (1, second))[:: 1 if number % 2 else -1]:
            times[which].append(measure())
    return median_of(times[0][1:]), median_of(times[1][1:])


def median_of(times: list[StepTime]) -> StepTime:
    return StepTime(*(statistics.median(ms) for ms in zip(*map(astuple, times), strict=True)))


def probes(session: Session, scale: Scale, clock: Clock) -> tuple[list[dict[str, Any]], list[Goal]]:
    """The critical path of every mode, by S and concurrency. The static mode at one S and concurrency only."""
    usual = chosen(scale.probed_at, scale.verify_at)
    cases = [("off", 0, usual), ("static", scale.drafts[0], usual)]
    # The most telling ones first, and one engine after the other.
    cases += [
        (mode, drafts, at)
        for drafts in scale.drafts
        for at in sorted(scale.probed_at, key=lambda at: at != usual)
        for mode in PRUNING
    ]
    rows = []
    for mode, drafts, at in cases:
        if rows and not clock.allows(f"probe of {mode} S={drafts} at {at}", 2.0):
            continue
        slots = max(scale.large_at) if mode == "off" else scale.large_slots
        llm = session.llm(mode, drafts, slots, pinned=True)
        prompts, params = session.pair.prompts(session.models, at), tokens(scale.probe_tokens)
        served = serve(llm, prompts, params, at, probe=True)
        rows.append(row(session, mode, drafts, at, [served], probed=True, pinned=mode in PRUNING))
        session.say(probe_line(rows[-1]))
    return rows, path_goals(rows, usual, busy=0.97)


def probe_line(case: dict[str, Any]) -> str:
    wanted = {"decide_us": ".0f", "build_us": ".0f", "gap_us": ".0f", "host_us": ".0f", "draft_ms": ".3f",
              "verify_ms": ".3f", "accept_ms": ".3f", "device_busy": ".1%"}  # fmt: skip
    figures = [f"{name} {case[name]:{spec}}" for name, spec in wanted.items() if case[name] is not None]
    return f"{label(case)}: {', '.join(figures)}"


def label(case: dict[str, Any]) -> str:
    drafts = "" if case["num_speculative_tokens"] is None else f" S={case['num_speculative_tokens']}"
    return f"{case['model']}: {case['mode']}{drafts} at {case['concurrency']}"


def path_goals(rows: list[dict[str, Any]], usual: int, busy: float) -> list[Goal]:
    """device_busy at the usual concurrency; the worst gap and decision of the lag modes, and how far they move."""
    goals = [
        at_least(f"{label(case)}: device_busy", case["device_busy"], busy)
        for case in rows
        if case["concurrency"] == usual and case["mode"] in ("static", "lag", "lag-budget")
    ]
    for mode in PRUNING:
        cases = [case for case in rows if case["mode"] == mode]
        for what, limit, figures in (
            ("gap_us", 20, [case["gap_us"] for case in cases]),
            ("decide_us + build_us", 30, [on_path(case) for case in cases]),
        ):
            goals += worst_and_spread(f"{rows[0]['model']}: {mode}: {what}", figures, limit, mode)
    return goals


def worst_and_spread(what: str, figures: list[float | None], limit: float, mode: str) -> list[Goal]:
    """The largest figure; over several S and concurrencies, also its distance from the median: within 10% or 5 us."""
    known = [figure for figure in figures if figure is not None]
    if not known:
        return []
    if mode == "adaptive":  # waits for this step's confidence, so it decides while the device has nothing to do
        return [reported(f"{what}, most", max(known))]
    middle = statistics.median(known)
    spread = max(abs(figure - middle) for figure in known)
    equal = [at_most(f"{what}, furthest from the median", spread, max(5.0, round(0.1 * middle, 1)))]
    return [at_most(f"{what}, most", max(known), limit), *(equal if len(known) > 1 else [])]


def on_path(case: dict[str, Any]) -> float | None:
    if case["decide_us"] is None or case["build_us"] is None:
        return None
    return case["decide_us"] + case["build_us"]
