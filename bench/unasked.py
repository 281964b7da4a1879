"""What requests that ask for nothing pay for what others may ask: the engine beside one that has none of it.

    python -m bench.unasked --concurrency 8 --waves 12 --out runs/unasked.json

Two engines a mode over the same weights take turns wave by wave, and who begins changes: the one that everybody has, and
a bare one, in which nothing looks for filters, penalties, biases, bans, grammars or log-probabilities: not when members
of a step are found, not in plans, not at a launch, not when a step is collected. Both give the same texts. `x` is the
time per token beside the bare engine's in the same turn, its median over turns with the quartiles.
"""

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.requests import make_llm, params_of, prompts_of, wave, write
from slipstream.commit import Delta, commit
from slipstream.config import MODES
from slipstream.decide.policy import with_draft_length
from slipstream.engine import Drafted, Engine, Flight
from slipstream.lab.measure import load, warm_up
from slipstream.ledger import SAMPLED, InFlight, Ledger, Members
from slipstream.llm import LLM
from slipstream.plan import Admission, Bools, Decision, Int32s, Int64s, StepPlan, StepResult
from slipstream.request import Request
from slipstream.scheduler import Scheduler


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="target: name, folder, .gguf file or random:SHAPE")
    parser.add_argument("--draft", default="smollm2-135m-dspark", help="drafter of all modes but off")
    parser.add_argument("--modes", nargs="+", default=["off", "static", "lag"], choices=MODES)
    parser.add_argument("--acceptance", default="coupled")
    parser.add_argument("--prompts", type=Path, default=None, help="JSON lines with turns; default: built-in")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64, help="exact: nothing ends an answer before")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--waves", type=int, default=12, help="turns of both engines, per mode")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    return parser.parse_args()


# ----------------------------------------------------------------------------------------------------- the bare engine


class BareLedger(Ledger):
    def members(self, slots: Int64s, num_given: Int32s, emits: Bools) -> Members:
        sampled = (self.wishes[slots] & SAMPLED) > 0
        return Members(
            requests=self.tenants[slots].tolist(), index_np=slots, slots_np=slots.astype(np.int32),
            generations_np=self.generations[slots], uids_np=self.uids[slots], sampled_np=sampled, teaches_np=emits,
            num_given_np=num_given, emits_np=emits, wishes=SAMPLED * bool((sampled & emits).any()),
            num_departures=self.num_departures, logprobs=None,
        )  # fmt: skip

    def _admit_reports(self, slot: int, request: Request) -> None:
        pass


class BareScheduler(Scheduler):
    def _plan(self, flight: InFlight, num_decode: int, caps: Int32s, admissions: list[Admission]) -> StepPlan:
        ledger, members = self.ledger, flight.members
        slots = members.index_np
        return StepPlan(
            step=flight.step, num_decode=num_decode, draft_length=self.limits.max_drafts, slots_np=members.slots_np,
            generations_np=members.generations_np, uids_np=members.uids_np,
            decode_steps_np=ledger.decode_steps[slots], num_given_np=members.num_given_np, emits_np=members.emits_np,
            caps_np=caps, context_np=ledger.context[slots],
            context_upper_bound_np=ledger.context_upper_bound[slots], sampled_np=members.sampled_np,
            teaches_np=members.teaches_np, admissions=tuple(admissions), page_writes_np=self._table.take_writes(),
            any_sampled=members.wishes > 0, any_top_k=False, any_top_p=False,
        )  # fmt: skip


class BareEngine(Engine):
    """The launches and collections of the engine without a branch for what a request may ask."""

    def _step_overlapped(self) -> Any:
        plan = self._schedule()
        previous, self._previous = self._previous, None
        if self.policy.waits_for == "lagged":
            self.take_confidence(previous.drafted if previous else None)
        if plan is None:
            return self.collect(previous) if previous else self._stuck()
        drafted = self.launch_draft(with_draft_length(plan, self.policy), self.policy.times(plan))
        early = self.policy.waits_for == "fresh"
        deltas = self.collect(previous) if early else []
        if early:
            self.take_confidence(drafted)
        self._previous = self.launch_verify(drafted, self.decide(drafted))
        return deltas if early else self.collect(previous)

    def launch_verify(self, drafted: Drafted, decision: Decision) -> Flight:
        self._is_launching = True
        plan, step = drafted.plan, drafted.plan.step
        start = None if drafted.marks is None else self._stopwatch.mark()
        widths = self._widths(drafted, decision)
        shape = self.backend.verify_shape(plan, decision)
        rows = self._run("verify", shape, lambda: self.verify_stages(shape, drafted, widths), step)
        self.backend.before("accept", self._exporter)
        verdict = self._run("accept", shape, lambda: self.accept_stages(shape, drafted, rows), step)
        self._settle(drafted, verdict)
        marks = None if start is None else (start, self._stopwatch.mark())
        with self._span(step, "export", "copy"):
            result = self._exporter.start("result", verdict.result[: plan.num_sequences])
        self._is_launching = False
        return Flight(replace(drafted, draft=None), decision, result, None, marks)

    def collect(self, flight: Flight | None) -> Any:
        if flight is None:
            return list[Delta]()
        plan = flight.drafted.plan
        with self._span(plan.step, "collect", "wait"):
            result_np = flight.result.wait()
        result = StepResult.of(plan.step, result_np)
        with self._span(plan.step, "commit", "host"):
            self.policy.learn(plan, result)
            if (device_ms := flight.device_ms) is not None:
                self.policy.timed(plan, flight.decision, sum(device_ms))
            gains = commit(plan, result, self.scheduler, None)
        self._hand_out(gains)
        return gains


def bare(llm: LLM) -> LLM:
    """The same engine, stripped."""
    llm.engine.__class__ = BareEngine
    llm.engine.scheduler.__class__ = BareScheduler
    llm.engine.scheduler.ledger.__class__ = BareLedger
    return llm


# ------------------------------------------------------------------------------------------------------------- the turns


def main() -> None:
    options = arguments()
    models = load(options.model, options.draft, {"dtype": options.dtype}, {})
    prompts, length = prompts_of(options, models, options.requests)
    params = params_of(options, "nothing", len(prompts))
    rows = []
    for mode in options.modes:
        engines = {"whole": make_llm(options, mode, models, length)}
        engines["bare"] = bare(make_llm(options, mode, models, length))
        for llm in engines.values():
            warm_up(llm, [tuple(prompt) for prompt in prompts], params)
        waves: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for turn in range(options.waves):
            for name in sorted(engines, reverse=turn % 2 == 1):
                waves[name].append(wave(engines[name], prompts, params))
        rows.append(row_of(mode, waves))
    write(options, models, rows)


def row_of(mode: str, waves: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Printed as well."""
    speeds = {name: [each["tok_per_s"] for each in found] for name, found in waves.items()}
    ratios = np.array(speeds["bare"]) / np.array(speeds["whole"])
    low, middle, high = np.percentile(ratios, [25, 50, 75]).tolist()
    print(
        f"{mode:10} {np.median(speeds['whole']):10,.0f} tok/s, bare {np.median(speeds['bare']):10,.0f}"
        f"  x {middle:.4f} (quartiles {low:.4f} - {high:.4f}, {len(ratios)} turns)",
        flush=True,
    )
    steps = {name: [each["decode_steps"] for each in found] for name, found in waves.items()}
    return {"mode": mode, "x": middle, "quartiles": [low, high], "wave_tok_per_s": speeds, "decode_steps": steps}


if __name__ == "__main__":
    main()
