"""Is a pair served exactly? Texts with drafts against texts without, and sampled tokens against the target's own law.

Three checks in every mode. `greedy` (both rules of acceptance) and `seeded` (coupled): token ids equal plain decoding's.
`law` (rejection; of coupled plain decoding alone, since its modes emit the same ids): chi-square of what is sampled, see
`verify_exact_law`. A check in which nothing was drafted, accepted, rejected or, where the mode prunes, pruned could not
have failed, and is inconclusive. Called by `slipstream verify-exact`; which figures mean what is decided here, the table
is made by `verify_exact_report`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from slipstream.backends import Adapt
from slipstream.config import SamplingParams, Signal
from slipstream.decide.cost import CostModel, DraftTimes, LinearCost, TableCost
from slipstream.decide.policy import NO_COST_MODEL, Adaptive, Float32s, Policy, WaitsFor
from slipstream.decide.policy import log as policy_log
from slipstream.decide.survival import SurvivalModel
from slipstream.draft.base import Drafter
from slipstream.errors import EngineError
from slipstream.lab import machine
from slipstream.lab.measure import load, sizes, token_ids
from slipstream.lab.verify_exact_law import LawTest, law_tests, perturbed_gap, visible
from slipstream.lab.verify_exact_options import RANDOM, ExactOptions
from slipstream.llm import LLM
from slipstream.load import Models
from slipstream.metrics import SpecCounters
from slipstream.plan import Decision, DraftReport, StepPlan, StepResult
from slipstream.prompts import prompts_name, read_prompts, user

Verdict = Literal["exact", "differs", "inconclusive"]
Say: TypeAlias = Callable[[str], None]
Advance: TypeAlias = Callable[[int, int], None]  # requests answered so far, and in all
Start: TypeAlias = Callable[[str, str], LLM]  # (mode, rule) -> an engine

FALSE_ALARM = 1e-3  # odds that a run calls a right engine wrong, over all of its chi-squares
NEAR_TIE = 2e-4  # top-2 gap, noise included, below which another order of summation in fp32 may choose the other token
ROUNDING = 1.0  # the same in 16 bits: no proof of a fault below, one above
MAX_LAW_PROMPTS, LAW_SAMPLES_EACH = 4, 200  # more prompts would spread the samples too thin for their rarer tokens
LAW_TAIL = 4  # tokens behind the last that is tested, or the end of the answer would cap the drafts for it
_OWN_SEEDS = 1_000_000  # between the seeds of one sample and the next, which must be independent


# ---------------------------------------------------------------------------------------------------------------- engines


class RandomWidths:
    """Drafts S, and verifies a number drawn at random for every sequence and step. It looks at nothing, so nothing leaks."""

    waits_for: WaitsFor = "nothing"
    signal: Signal | Literal["none"] = "none"

    def __init__(self, seed: int = 0) -> None:
        self._draws = np.random.default_rng(seed)

    @property
    def calibration_np(self) -> Float32s:
        return SurvivalModel(1).calibration_np  # for budgets, of which this makes none

    def draft_length(self, plan: StepPlan) -> int:
        return plan.draft_length if plan.num_decode else 0

    def decide(self, plan: StepPlan) -> Decision:
        caps = np.minimum(plan.caps_np, np.int32(plan.draft_length))
        caps[plan.num_decode :] = 0
        return Decision(widths_np=self._draws.integers(0, caps + 1, dtype=np.int32), budget=None, caps_np=caps)

    def observe(self, plan: StepPlan, report: DraftReport) -> None:
        pass

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        pass

    def times(self, plan: StepPlan) -> bool:
        return False

    def timed(self, plan: StepPlan, decision: Decision, measured_ms: float) -> None:
        pass


def start(
    models: Models, options: ExactOptions, mode: str, rule: str, *, policy: Policy | None = None,
    drafter: Drafter | None = None, adapt: Adapt | None = None,
) -> LLM:  # fmt: skip
    """An engine for one mode and rule. The last three are for who puts a part of his own to the test."""
    longest = max(options.sampling.max_tokens, max(options.positions) + LAW_TAIL)
    served = {"prefix_caching": True, **options.engine}  # as everywhere but in measurements
    room = sizes(models, prompts_of(models, options), longest, served)
    given = {**room, "max_num_seqs": options.concurrency, "drafter": drafter, "adapt": adapt}
    if mode == "off" and rule == "coupled":  # the plain decoder, as anybody has it
        return LLM(models, **{**given, "drafter": None})
    if mode == "off":  # its sampler under the other rule, which needs a drafter to be configured
        return LLM(models, speculative=options.config_of("static", rule), policy=_Plain(), **given)
    config = options.config_of(mode, rule)
    if mode == RANDOM:
        policy = policy or RandomWidths(options.seed)
    scripted = policy is None and config.enable_adaptive_speculative_decode and config.cost_model == "auto"
    config = replace(config, cost_model="none") if scripted else config  # nothing is measured at start
    with _unsaid(NO_COST_MODEL):  # it gets one below
        llm = LLM(models, speculative=config, policy=policy, **given)
    if scripted and isinstance(llm.engine.policy, Adaptive):
        linear = bool(config.adaptive_speculative_min_gain)
        llm.engine.policy.cost = price(options.concurrency, llm.engine.scheduler.limits.max_drafts, linear=linear)
    return llm


@contextmanager
def _unsaid(text: str) -> Iterator[None]:
    """Warnings of a policy that hold this text are left out."""

    def other(record: logging.LogRecord) -> bool:
        return text not in record.getMessage()

    policy_log.addFilter(other)
    try:
        yield
    finally:
        policy_log.removeFilter(other)


class _Plain(RandomWidths):
    """Nothing is drafted."""

    def draft_length(self, plan: StepPlan) -> int:
        return 0


def price(concurrency: int, num_drafts: int, *, linear: bool = False) -> CostModel:
    """A price under which a draft pays when it is accepted about once in three times, so that every drafter is pruned.

    Exactness must hold under any price. A staircase, because its rules (hull, best of all budgets) are those that serve
    on a GPU; never corrected, so that a run can be repeated.
    """
    if linear:
        return CostModel(LinearCost(2.0 * concurrency, 1.0), DraftTimes.constant(0.1), corrects=False)
    step = max(1, concurrency // 4)
    rows = tuple(range(step, concurrency * (num_drafts + 1) + step, step))
    table = TableCost(rows, tuple(2.0 * concurrency + count for count in rows))
    return CostModel(table, DraftTimes.constant(0.1), corrects=False)


class Watch:
    """Counts the drafts that a policy leaves out: below the caps, which the end of an answer lowers in every mode."""

    def __init__(self, llm: LLM) -> None:
        self.num_pruned = 0
        self._decide = llm.engine.policy.decide
        llm.engine.policy.decide = self.decide  # type: ignore[method-assign]

    def decide(self, plan: StepPlan) -> Decision:
        decision = self._decide(plan)
        self.num_pruned += int(decision.caps_np.sum()) - decision.num_draft_rows
        return decision


# ----------------------------------------------------------------------------------------------------------------- a run


def run(options: ExactOptions, say: Say, advance: Advance = lambda done, total: None) -> dict[str, Any]:
    """The report that `--json` prints."""
    speculative = {"draft_layout": "auto", **options.speculative}
    models = load(options.model, options.draft, options.engine, speculative)
    return verify(models, options, say, advance)


def verify(
    models: Models, options: ExactOptions, say: Say = lambda line: None,
    advance: Advance = lambda done, total: None, begin: Start | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The report on models that are loaded. `begin` makes the engines, where they are not to be the engine's own."""
    plan = Plan(options, models, prompts_of(models, options))
    begin = begin or partial(start, models, options)
    checks: list[dict[str, Any]] = []
    counter = _Counter(advance, plan.num_answers)
    for rule in options.rules:
        checks += list(_checks_of(plan, rule, begin, counter, say))
    return {
        **machine.provenance(models.device),
        "model": options.model,
        "draft": options.draft,
        "verdict": overall(checks),
        "conditions": plan.conditions(),
        "checks": checks,
    }


def prompts_of(models: Models, options: ExactOptions) -> list[tuple[int, ...]]:
    """Token ids, through the chat template."""
    texts = read_prompts(options.prompts, limit=options.requests)
    return [tuple(token_ids(models.tokenizer, user(text))) for text in texts]


def overall(checks: Sequence[Mapping[str, Any]]) -> Verdict:
    """The worst of all."""
    found = {check["verdict"] for check in checks}
    return "differs" if "differs" in found else "inconclusive" if "inconclusive" in found else "exact"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of every engine."""

    options: ExactOptions
    models: Models
    prompts: Sequence[tuple[int, ...]]

    @property
    def samples(self) -> int:
        asked = self.options.samples
        return asked if asked is not None else 4000 if self.models.device.type == "cuda" else 400

    @property
    def law_prompts(self) -> Sequence[tuple[int, ...]]:
        return self.prompts[: max(1, min(MAX_LAW_PROMPTS, self.samples // LAW_SAMPLES_EACH))]

    @property
    def num_law_checks(self) -> int:
        """Plain decoding under either rule, and every mode under rejection."""
        return len(self.options.rules) + (len(self.options.modes) if "rejection" in self.options.rules else 0)

    @property
    def num_tests(self) -> int:
        return self.num_law_checks * (len(self.options.positions) + (max(self.options.positions) > 1))

    @property
    def num_answers(self) -> int:
        rules, modes = self.options.rules, len(self.options.modes)
        texts = len(self.prompts) * (modes + 1) * (len(rules) + ("coupled" in rules))
        return texts + self.num_law_checks * self.samples

    @property
    def exact_sums(self) -> bool:
        """Whether two orders of summation differ by little enough to compare texts."""
        return self.models.dtype in (torch.float32, torch.float64)

    @property
    def deterministic(self) -> bool:
        """Whether not even rounding excuses a text that differs."""
        return bool(self.options.engine.get("deterministic"))

    def greedy(self) -> list[SamplingParams]:
        return [replace(self.options.sampling, temperature=0.0)] * len(self.prompts)

    def seeded(self) -> list[SamplingParams]:
        return [replace(self.options.sampling, seed=self.options.seed + i) for i in range(len(self.prompts))]

    def sampled(self, stream: int) -> tuple[list[tuple[int, ...]], list[SamplingParams]]:
        """The whole sample, prompts taking turns; another stream has no seed in common."""
        first, length = self.options.seed + _OWN_SEEDS * (stream + 1), max(self.options.positions) + LAW_TAIL
        law = replace(self.options.sampling, max_tokens=length, ignore_eos=True)
        prompts = [self.law_prompts[i % len(self.law_prompts)] for i in range(self.samples)]
        return prompts, [replace(law, seed=first + i) for i in range(self.samples)]

    def conditions(self) -> dict[str, Any]:
        options, sampling = self.options, self.options.sampling
        return {
            "dtype": str(self.models.dtype).removeprefix("torch."), "deterministic": self.deterministic,
            "prompts": prompts_name(options.prompts), "requests": len(self.prompts), "max_tokens": sampling.max_tokens,
            "concurrency": options.concurrency, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "top_k": sampling.top_k, "seed": options.seed, "samples": self.samples,
            "law_prompts": len(self.law_prompts), "positions": list(options.positions),
            "speculative": dict(options.speculative), "false_alarm": FALSE_ALARM, "tests": self.num_tests,
            "odds_per_test": FALSE_ALARM / self.num_tests,
        }  # fmt: skip


class _Counter:
    def __init__(self, advance: Advance, total: int) -> None:
        self._advance, self._total, self._done = advance, total, 0

    def add(self, count: int) -> None:
        self._done += count
        self._advance(self._done, self._total)


def _checks_of(plan: Plan, rule: str, begin: Start, counter: _Counter, say: Say) -> Iterator[dict[str, Any]]:
    """All checks under one rule; engines come and go one at a time."""
    say(f"{rule}: plain decoding")
    serve = Serving(begin("off", rule), counter)
    greedy = serve(plan.prompts, plan.greedy())
    seeded = serve(plan.prompts, plan.seeded()) if rule == "coupled" else None
    yield law_check(plan, "off", rule, serve(*plan.sampled(0)))
    for index, mode in enumerate(plan.options.modes):
        say(f"{rule}: {mode}")
        serve = Serving(begin(mode, rule), counter)
        yield text_check(plan, "greedy", mode, rule, plan.greedy(), greedy, serve(plan.prompts, plan.greedy()))
        if seeded is not None:
            yield text_check(plan, "seeded", mode, rule, plan.seeded(), seeded, serve(plan.prompts, plan.seeded()))
        if rule == "rejection":
            yield law_check(plan, mode, rule, serve(*plan.sampled(index + 1)))


# --------------------------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True)
class Answers:
    token_ids: list[tuple[int, ...]]
    counts: SpecCounters
    num_pruned: int

    @property
    def num_rejected(self) -> int:
        """Drafts behind the end of an answer are none."""
        return sum(self.counts.reached_at.values()) - sum(self.counts.accepted_at.values())


class Serving:
    """An engine, and what it did for one check."""

    def __init__(self, llm: LLM, counter: _Counter) -> None:
        self._llm, self._counter, self._watch = llm, counter, Watch(llm)

    def __call__(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Answers:
        """In portions, so that a bar can move."""
        portion = max(64, 4 * self._llm.engine.scheduler.limits.max_num_seqs)
        found, counts, before = [], SpecCounters(), self._watch.num_pruned
        for first in range(0, len(prompts), portion):
            part = slice(first, first + portion)
            for completion in self._llm.generate([list(prompt) for prompt in prompts[part]], params[part]):
                if completion.error:
                    raise EngineError(completion.error)
                found.append(tuple(completion.token_ids))
                counts.merge(completion.spec)
            self._counter.add(len(prompts[part]))
        return Answers(found, counts, self._watch.num_pruned - before)


def _row(check: str, mode: str, rule: str, answers: Answers) -> dict[str, Any]:
    counts = answers.counts
    return {
        "check": check, "acceptance": rule, "mode": mode, "verdict": "exact", "why": "", "drafted": counts.drafted,
        "accepted": counts.accepted, "rejected": answers.num_rejected, "pruned": answers.num_pruned,
        "steps": counts.steps, "widths": _histogram(counts.width_histogram),
    }  # fmt: skip


def _unless_vacuous(row: dict[str, Any]) -> dict[str, Any]:
    """A check that found nothing wrong counts only if it could have."""
    if row["mode"] == "off":
        return row
    needed = ("drafted", "accepted", "rejected") + (() if row["mode"] == "static" else ("pruned",))
    missing = [name for name in needed if row[name] == 0]
    if row["verdict"] == "exact" and missing:
        return {**row, "verdict": "inconclusive", "why": f"{', '.join(missing)} 0: it could not have failed"}
    return row


def _histogram(widths: Counter[int]) -> dict[str, int]:
    return {str(width): count for width, count in sorted(widths.items())}


# ---------------------------------------------------------------------------------------------------------------- checks


def text_check(
    plan: Plan, check: str, mode: str, rule: str, params: Sequence[SamplingParams], plain: Answers, other: Answers
) -> dict[str, Any]:
    """Token ids equal plain decoding's, but for near ties in one request of a hundred."""
    partings = [
        _parting(plan, index, a, b, params[index])
        for index, (a, b) in enumerate(zip(plain.token_ids, other.token_ids, strict=True)) if a != b
    ]  # fmt: skip
    tied = sum(parting["gap"] < NEAR_TIE for parting in partings)
    row = _row(check, mode, rule, other)
    row |= {"requests": len(params), "equal": len(params) - len(partings), "near_ties": tied, "partings": partings}
    if not partings:
        return _unless_vacuous(row)
    widest = max(parting["gap"] for parting in partings)
    if plan.deterministic:
        return {
            **row,
            "verdict": "differs",
            "why": f"texts part (top-2 gap {widest:.1e}), which deterministic rules out",
        }
    if plan.exact_sums:
        if tied == len(partings) <= max(1, len(params) // 100):
            row["why"] = f"{tied} near tie, which fp32 may decide either way"
            return _unless_vacuous(row)
        return {**row, "verdict": "differs", "why": f"texts part where the top-2 gap is {widest:.1e}"}
    if widest >= ROUNDING:
        return {**row, "verdict": "differs", "why": f"texts part where the top-2 gap is {widest:.2f}, beyond rounding"}
    why = f"texts part at top-2 gaps of at most {widest:.2f}, which rounding explains; that proves nothing: use float32"
    return {**row, "verdict": "inconclusive", "why": why}


def _parting(
    plan: Plan, index: int, plain: Sequence[int], other: Sequence[int], params: SamplingParams
) -> dict[str, Any]:
    """Where two answers part, and by how much the target prefers its token there."""
    ends = min(len(plain), len(other))
    first = next((i for i in range(ends) if plain[i] != other[i]), ends)
    gap = perturbed_gap(plan.models, [*plan.prompts[index], *plain[:first]], params)
    return {"request": index, "token": first + 1, "gap": gap}


def law_check(plan: Plan, mode: str, rule: str, answers: Answers) -> dict[str, Any]:
    """What was sampled against the target's own law. In 16 bits that law is known to rounding only."""
    prompts, tokens = plan.law_prompts, torch.tensor(answers.token_ids)[:, : max(plan.options.positions)]
    by_prompt = [(prompt, tokens[i :: len(prompts)]) for i, prompt in enumerate(prompts)]
    tests = law_tests(plan.models, by_prompt, plan.options.positions, plan.options.sampling)
    odds = FALSE_ALARM / plan.num_tests
    row = _row("law", mode, rule, answers)
    row["tests"] = [_with_power(test, odds) for test in tests]
    varied = [test for test in tests if test.p_value is not None]
    if not varied:
        return {**row, "verdict": "inconclusive", "why": "nothing varies: sample more, or at a higher temperature"}
    worst = min(varied, key=lambda test: test.p_value or 0.0)
    row |= {"worst": worst.where, "p_value": worst.p_value, "bias": worst.bias, "chance": worst.chance}
    if worst.p_value is not None and worst.p_value < odds:
        if plan.exact_sums:
            return {**row, "verdict": "differs", "why": f"{worst.where}: odds of {worst.p_value:.0e} if it were right"}
        why = f"{worst.where}: p = {worst.p_value:.0e}, but in 16 bits the law is known to rounding only; use float32"
        return {**row, "verdict": "inconclusive", "why": why}
    return _unless_vacuous(row)


def _with_power(test: LawTest, odds: float) -> dict[str, Any]:
    """`visible`: see `verify_exact_law`."""
    return {**test.as_dict(), "visible": visible(test.samples, test.degrees, odds) if test.degrees else None}
