"""Host time of the policies per step: what lies between a confidence and its decision, and what does not.

    python bench/policy.py --sequences 1 32 256 --drafts 7 16 --out runs/policy.json

A loop without a device hands plans, made-up confidence and outcomes to each policy in the engine's order. `path` is
observe + draft_length + decide, from a confidence to its decision (adaptive decides the draft length before it waits);
`off` is learn + timed, which no decision waits for. Microseconds per step, beside the time of one small numpy call,
of which steps of few sequences mostly consist. What is done every few steps is spread over them: a figure is the median
over blocks of sixteen steps of a block's mean; `max` columns are the median of a block's longest step. Steps in which a
fresh engine learns at once are left out; `early` is what they take in all.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.config import SpeculativeConfig
from slipstream.decide.cost import CostModel, DraftTimes, LinearCost, StepCost, TableCost
from slipstream.decide.make import make_policy
from slipstream.decide.policy import Policy
from slipstream.plan import Decision, DraftReport, StepPlan, StepResult

STAGES = ("observe", "draft_length", "decide", "learn", "timed")
PATH, OFF = STAGES[:3], STAGES[3:]
BLOCK = 16  # steps in which everything that is done now and then is done
EARLY = 48  # steps at the start, without the first ones, in which nothing waits
WARM_UP = 80
EDGES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 4608)
LINEAR = LinearCost(0.85, 0.0006, 1e-9, 1e-7)
STAIRS = TableCost(rows=EDGES, ms=tuple(0.85 + 0.0006 * rows for rows in EDGES), c2=1e-9, c3=1e-7)
STAIRS_WITHOUT_KV = replace(STAIRS, c2=0.0, c3=0.0)


@dataclass(frozen=True, slots=True)
class Case:
    """A policy under a cost model."""

    name: str
    mode: str
    cost: StepCost
    acceptance: str = "coupled"


CASES = (
    Case("adaptive, linear", "adaptive", LINEAR),
    Case("adaptive, table", "adaptive", STAIRS),
    Case("adaptive, hull", "adaptive", STAIRS, "rejection"),
    Case("lag, linear", "lag", LINEAR),
    Case("lag, table", "lag", STAIRS),
    Case("lag-budget, linear", "lag-budget", LINEAR),
    Case("lag-budget, table", "lag-budget", STAIRS),
    Case("lag-budget, no kv", "lag-budget", STAIRS_WITHOUT_KV),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 32, 256], help="D, sequences that decode")
    parser.add_argument("--drafts", nargs="+", type=int, default=[7, 16], help="S")
    parser.add_argument("--steps", type=int, default=640, help="timed steps per case, after the early ones")
    parser.add_argument("--mixed", action="store_true", help="every other request is sampled, instead of none")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    return parser.parse_args()


class Script:
    """Plans, confidence and outcomes of D requests that decode side by side for ever."""

    def __init__(self, num_sequences: int, num_drafts: int, mixed: bool) -> None:
        self.num_drafts = num_drafts
        self._rng = np.random.default_rng(0)
        self._state = self._rng.normal(size=num_sequences)
        self._sampled = np.arange(num_sequences) % 2 == 1 if mixed else np.zeros(num_sequences, dtype=np.bool_)
        self._context = self._rng.integers(100, 500, num_sequences).astype(np.int32)
        self._slots, self._ones = np.arange(num_sequences, dtype=np.int32), np.ones(num_sequences, dtype=np.int32)
        self._uids, self._all = np.arange(num_sequences), np.ones(num_sequences, dtype=np.bool_)

    def plan(self, step: int) -> StepPlan:
        """With the arrays of the plan before where they are alike, as the scheduler's."""
        context = self._context + np.int32(step)
        return StepPlan(
            step=step,
            num_decode=len(self._state),
            draft_length=self.num_drafts,
            slots_np=self._slots,
            generations_np=self._ones,
            uids_np=self._uids,
            decode_steps_np=np.full_like(self._slots, step),
            num_given_np=self._ones,
            emits_np=self._all,
            caps_np=np.full_like(self._slots, self.num_drafts),
            context_np=context,
            context_upper_bound_np=context,
            sampled_np=self._sampled,
            teaches_np=self._all,
            admissions=(),
            page_writes_np=np.zeros((0, 3), dtype=np.int32),
            any_sampled=bool(self._sampled.any()),
            any_top_k=False,
            any_top_p=False,
        )

    def confidence(self, length: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """[D, d], correlated from step to step; about one in six is 1, as a peak of an easy token is."""
        count = len(self._state)
        self._state = 0.75 * self._state + 0.66 * self._rng.normal(size=count)
        logit = np.linspace(3.0, 0.5, self.num_drafts) + 1.5 * self._state[:, None]
        confidence = 1 / (1 + np.exp(-logit - self._rng.normal(size=(count, self.num_drafts))))
        return np.where(confidence > 0.98, 1.0, confidence).astype(np.float32)[:, :length]

    def result(self, plan: StepPlan, decision: Decision) -> StepResult:
        widths = decision.widths_np
        if widths is None:
            widths = np.full_like(plan.slots_np, decision.num_draft_rows // plan.num_sequences)
        accepted = (self._rng.random(len(widths)) * (widths + 1)).astype(np.int32)
        nothing = np.zeros((len(widths), 1), dtype=np.int32)
        return StepResult(
            step=plan.step,
            widths_np=widths,
            num_accepted_np=accepted,
            token_ids_np=nothing,
            invalid_np=np.zeros(len(widths), dtype=np.bool_),
        )


class Clock:
    """Nanoseconds per stage, one entry a step."""

    def __init__(self) -> None:
        self.spent: dict[str, list[int]] = {stage: [] for stage in STAGES}
        self.step: dict[str, int] = {}

    def run(self, stage: str, call: Callable[..., Any], *values: Any) -> Any:
        start = time.perf_counter_ns()
        answer = call(*values)
        self.step[stage] = self.step.get(stage, 0) + time.perf_counter_ns() - start
        return answer

    def close_step(self) -> None:
        for stage in STAGES:
            self.spent[stage].append(self.step.get(stage, 0))
        self.step = {}


def serve(policy: Policy, script: Script, steps: int) -> dict[str, list[int]]:
    """`steps` steps of the overlapped loop after the early ones; ns per stage and step, of all."""
    clock, rng = Clock(), np.random.default_rng(1)
    previous: tuple[StepPlan, DraftReport, Decision, StepResult] | None = None
    lagged = policy.waits_for == "lagged"

    def collect() -> None:
        if previous is not None:
            plan, _, decision, result = previous
            ms = 0.8 + 0.0005 * (plan.num_given + decision.num_draft_rows)
            clock.run("learn", policy.learn, plan, result)
            if clock.run("timed", policy.times, plan):
                clock.run("timed", policy.timed, plan, decision, ms * rng.lognormal(0, 0.05))

    for number in range(WARM_UP + steps):
        plan = script.plan(number)
        if lagged and previous is not None:
            clock.run("observe", policy.observe, previous[0], previous[1])
        length = clock.run("draft_length", policy.draft_length, plan)
        plan = replace(plan, draft_length=length, caps_np=np.minimum(plan.caps_np, np.int32(length)))
        report = DraftReport(step=number, signal_np=script.confidence(length))
        if not lagged:
            collect()
            clock.run("observe", policy.observe, plan, report)
        decision = clock.run("decide", policy.decide, plan)
        if lagged:
            collect()
        previous = plan, report, decision, script.result(plan, decision)
        clock.close_step()
    return clock.spent


def measure(case: Case, num_sequences: int, num_drafts: int, steps: int, mixed: bool) -> dict[str, Any]:
    """One row of the table, in microseconds."""
    config = SpeculativeConfig.for_mode(case.mode, draft_model="scripted", acceptance=case.acceptance)
    cost = CostModel(case.cost, DraftTimes((1, num_drafts), (1, 256), ((0.05, 0.1), (0.1, 0.3))))
    policy, _ = make_policy(config, num_drafts=num_drafts, cost=cost)
    spent = serve(policy, Script(num_sequences, num_drafts, mixed), steps)
    us = {stage: np.asarray(values) / 1e3 for stage, values in spent.items()}
    us["path"], us["off"] = (np.sum([us[stage] for stage in stages], axis=0) for stages in (PATH, OFF))
    us["all"] = us["path"] + us["off"]
    early = {name: np.median(values[8 : 8 + EARLY]) for name, values in us.items()}
    blocks = {name: values[WARM_UP:][: steps // BLOCK * BLOCK].reshape(-1, BLOCK) for name, values in us.items()}
    return {
        "case": case.name,
        "sequences": num_sequences,
        "drafts": num_drafts,
        **{f"{name}_us": float(np.median(blocks[name].mean(axis=1))) for name in ("all", "path", "off")},
        **{f"{name}_max_us": float(np.median(blocks[name].max(axis=1))) for name in ("path", "off")},
        "early_us": float(early["all"]),
        **{f"{stage}_us": float(np.median(blocks[stage].mean(axis=1))) for stage in STAGES},
    }


def small_call_us() -> float:
    """Median time of adding seven numbers to seven numbers."""
    values, clock = np.ones(7), Clock()
    for _ in range(2000):
        clock.run("decide", np.add, values, values)
        clock.close_step()
    return float(np.median(clock.spent["decide"])) / 1e3


def table(rows: list[dict[str, Any]]) -> str:
    totals = ("all_us", "path_us", "off_us", "path_max_us", "off_max_us", "early_us")
    columns = (*totals, *(f"{stage}_us" for stage in STAGES))
    head = f"{'case':20}{'D':>5}{'S':>4}" + "".join(f"{name.removesuffix('_us'):>13}" for name in columns)
    lines = [
        f"{row['case']:20}{row['sequences']:5}{row['drafts']:4}" + "".join(f"{row[name]:13.1f}" for name in columns)
        for row in rows
    ]
    return "\n".join([head, *lines])


def main() -> None:
    options = arguments()
    cases = [case for case in CASES if options.only in case.name]
    rows = [
        measure(case, sequences, drafts, options.steps, options.mixed)
        for sequences in options.sequences
        for drafts in options.drafts
        for case in cases
    ]
    unit = small_call_us()
    print(table(rows))
    print(f"a small numpy call: {unit:.2f} us")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        about = {"python": platform.python_version(), "numpy": np.__version__, "small_call_us": unit}
        conditions = {"steps": options.steps, "mixed": options.mixed}
        options.out.write_text(json.dumps({**about, **conditions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
