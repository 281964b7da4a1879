"""The small pair with real weights: plain decoding by itself, then every mode on the same prompts, taking turns.

Two kinds of waves. With answers of a fixed length the batch stays full: speed of plain decoding, and the critical path.
With answers that end where the model ends them: what speculation gains on real prompts.
"""

import statistics
from typing import Any

from bench.gpu_parts.goals import Goal, Report, at_least, at_most, ratio, reported
from bench.gpu_parts.large import path_goals, probe_line
from bench.gpu_parts.scale import Scale
from bench.gpu_parts.session import PRUNING, Clock, Served, Session, row, serve, slow_decisions, tokens
from slipstream.config import MODES
from slipstream.lab.ceilings import ceilings
from slipstream.lab.report import ceiling_line

PLAIN_TOK_PER_S = {1: 950.0, 32: 24_000.0, 256: 110_000.0}
LAG_GAIN = {1: 1.8, 32: 1.5}
BUDGET_GAIN = {256: 1.2}
PINNED_S = 60.0  # what the modes take, which come after these probes


def run(session: Session, scale: Scale, clock: Clock) -> Report:
    found = ceilings(session.models.target, scale.rows)
    session.say(f"{session.pair.name}: {ceiling_line(found)}")
    rows, goals = plain(session, scale, clock)
    probed, probe_goals = probes(session, scale, clock)
    ours, gain_goals = modes(session, scale, clock)
    delayed, delay_goals = delays(session, scale)
    report = {"ceilings": found, "rows": rows + probed + ours, "delayed_decisions": delayed,
              "start_seconds": dict(session.seconds)}  # fmt: skip
    return report, goals + gain_goals + probe_goals + delay_goals


def slots_for(scale: Scale, at: int) -> int:
    """One engine for one and a few requests at a time, one for many."""
    return at if at == max(scale.small_at) else sorted(scale.small_at)[-2]


def plain(session: Session, scale: Scale, clock: Clock) -> tuple[list[dict[str, Any]], list[Goal]]:
    rows, goals = [], []
    for at in scale.small_at:
        llm = session.llm("off", 0, slots_for(scale, at))
        prompts = session.pair.prompts(session.models, max(at, 2))
        served = [serve(llm, prompts, tokens(scale.output_tokens), at)]
        while len(served) < scale.waves and clock.allows(f"plain at {at}, wave {len(served) + 1}", 0.9):
            served.append(serve(llm, prompts, tokens(scale.output_tokens), at))
        case = row(session, "off", 0, at, served, output_tokens_each=scale.output_tokens)
        rows.append(case)
        goals.append(
            at_least(f"{session.pair.name}: off at {at}: tok/s", case["tok_per_s"], PLAIN_TOK_PER_S.get(at, 0.0))
        )
    return rows, goals


def modes(session: Session, scale: Scale, clock: Clock) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Every mode at every concurrency, wave by wave in turn."""
    drafts, rows = scale.drafts[0], []
    for at, requests in zip(scale.small_at, scale.requests, strict=True):
        prompts = session.pair.prompts(session.models, requests)
        served: dict[str, list[Served]] = {mode: [] for mode in MODES}
        for number in range(2 * scale.waves + 1):  # the first is where estimators settle
            if number > 1 and not clock.allows(f"modes at {at}, wave {number}", 0.5):
                break
            for mode in MODES:
                llm = session.llm(mode, drafts, slots_for(scale, at))
                served[mode].append(serve(llm, prompts, tokens(scale.output_tokens, ignore_eos=False), at))
        for mode in MODES:
            rows.append(row(session, mode, drafts, at, served[mode][1:], served["off"][1:]))
            session.say(
                f"{session.pair.name}: {mode} at {at}: {rows[-1]['tok_per_s']:,.0f} tok/s, x {rows[-1]['ratio_to_off']:.2f}"
            )
    return rows, gain_goals(rows)


def gain_goals(rows: list[dict[str, Any]]) -> list[Goal]:
    by_case = {(case["mode"], case["concurrency"]): case["ratio_to_off"] for case in rows}
    waves = {(case["mode"], case["concurrency"]): case["wave_tok_per_s"] for case in rows}
    goals = []
    for (mode, at), gain in by_case.items():
        limit = {"lag": LAG_GAIN, "lag-budget": BUDGET_GAIN}.get(mode, {}).get(at)
        what = f"{rows[0]['model']}: {mode} / off at {at}"
        goals.append(reported(what, gain) if limit is None else at_least(what, gain, limit))
        if mode == "lag-budget":
            static = waves["static", at]
            over = [ours / theirs for ours, theirs in zip(waves[mode, at], static, strict=True)]
            what = f"{rows[0]['model']}: lag-budget / static at {at}, wave by wave"
            # Less than static's waves lie apart from each other is no difference.
            goals.append(at_least(what, statistics.median(over), 1 - max(half_range(over), half_range(static))))
    return [goal for goal in goals if " off / off " not in goal.what]


def half_range(values: list[float]) -> float:
    """How far a median may move by chance, as a share of it; the largest and the smallest of many are left out."""
    kept = sorted(values)[len(values) // 6 : len(values) - len(values) // 6]
    return (kept[-1] - kept[0]) / (kept[-1] + kept[0])


def probes(session: Session, scale: Scale, clock: Clock) -> tuple[list[dict[str, Any]], list[Goal]]:
    """The critical path where the batch stays full; then, by S and concurrency, with every draft made."""
    drafts, rows, goals = scale.drafts[0], [], []
    for at in scale.small_at:
        for mode in MODES:
            llm = session.llm(mode, drafts, slots_for(scale, at))
            rows.append(probe(session, scale, llm, mode, drafts, at))
        ours = {case["mode"]: case for case in rows if case["concurrency"] == at}
        goals += stage_goals(session.pair.name, ours, at)
        if at > 1:
            goals += [goal for goal in path_goals(list(ours.values()), at, busy=0.9) if "device_busy" in goal.what]
    rows += pinned_probes(session, scale, clock)
    return rows, goals + path_goals(rows, 0, busy=0.9)


def stage_goals(name: str, by_mode: dict[str, dict[str, Any]], at: int) -> list[Goal]:
    """The draft call beside the target's step, and the host's work beside the device's."""
    off, static = by_mode["off"], by_mode["static"]
    detokenised = None if off["host_us"] is None else off["host_us"] + off["detokenise_us"]
    return [
        at_most(f"{name}: draft call / target step at {at}", ratio(static["draft_ms"], step_ms(static)), 0.25),
        at_most(
            f"{name}: off at {at}: host's work / device's step", ratio(detokenised, 1e3 * (step_ms(off) or 0.0)), 1.0
        ),
    ]


def step_ms(case: dict[str, Any]) -> float | None:
    """The target's part of a step on the device."""
    return None if case["verify_ms"] is None else case["verify_ms"] + (case["accept_ms"] or 0.0)


def pinned_probes(session: Session, scale: Scale, clock: Clock) -> list[dict[str, Any]]:
    slots, found = max(scale.probed_at), []
    for longest in scale.drafts:
        for at, mode in [(at, mode) for at in scale.probed_at for mode in PRUNING]:
            if clock.allows(f"pinned probe of {mode} S={longest} at {at}", PINNED_S):
                llm = session.llm(mode, longest, slots, pinned=True)
                found.append(probe(session, scale, llm, mode, longest, at, pinned=True))
    return found


def probe(
    session: Session, scale: Scale, llm: Any, mode: str, drafts: int, at: int, pinned: bool = False
) -> dict[str, Any]:
    prompts, params = session.pair.prompts(session.models, at), tokens(scale.output_tokens)
    serve(llm, prompts, params, at)  # a new policy learns from each of its first steps
    served = serve(llm, prompts, params, at, probe=True)
    case = row(session, mode, drafts, at, [served], probed=True, pinned=pinned)
    session.say(probe_line(case))
    return case


def delays(session: Session, scale: Scale) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Decisions made slow on purpose must show: on the critical path as far as the device has nothing else to do."""
    at, drafts, found, goals = scale.small_at[-2], scale.drafts[0], [], []
    for mode in PRUNING:
        llm = session.llm(mode, drafts, slots_for(scale, at))
        base = probe(session, scale, llm, mode, drafts, at)
        with slow_decisions(llm, scale.delay_s):
            slow = probe(session, scale, llm, mode, drafts, at)
        found.append({"mode": mode, "concurrency": at, "delay_us": 1e6 * scale.delay_s, "base": base, "slow": slow})
        goals += delay_goals(
            f"{session.pair.name}: {mode} at {at}, decisions 5 ms later", base, slow, 1e6 * scale.delay_s
        )
    return found, goals


def delay_goals(name: str, base: dict[str, Any], slow: dict[str, Any], delay_us: float) -> list[Goal]:
    """Fresh decisions hide behind nothing, lagged ones behind what is left of the step before."""
    share = 0.9 if base["mode"] == "adaptive" else 0.5
    shown, hidden = (
        None if slow[what] is None or base[what] is None else slow[what] - base[what]
        for what in ("decide_us", "decide_hidden_us")
    )
    whole = None if shown is None or hidden is None else shown + hidden
    return [
        at_least(f"{name}: us in decide_us", shown, share * delay_us),
        at_least(f"{name}: us in all", whole, 0.9 * delay_us),
    ]
