"""Is a pair served exactly? Texts with drafts against texts without, and sampled tokens against the target's own law.

Three checks in every mode. `greedy` (both rules of acceptance) and `seeded` (coupled): token ids equal plain decoding's.
`law` (rejection; of coupled plain decoding alone, since its modes emit the same ids): chi-square of what is sampled, see
`verify_exact_law`. A check in which nothing was drafted, accepted, rejected or, where the mode prunes, pruned could not
have failed, and is inconclusive. Called by `slipstream verify-exact`; which figures mean what is decided here, the table
is made by `verify_exact_report`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from typing import Any, Literal, TypeAlias

import torch

from slipstream.config import SamplingParams
from slipstream.errors import EngineError
from slipstream.grammars import Grammars
from slipstream.lab import machine
from slipstream.lab.measure import load
from slipstream.lab.verify_exact_choice import hangs_on_drafts, perturbed_gap
from slipstream.lab.verify_exact_engines import LAW_TAIL, Watch, prompts_of, start
from slipstream.lab.verify_exact_law import LawTest, law_tests, visible
from slipstream.lab.verify_exact_options import ExactOptions
from slipstream.lab.verify_exact_shape import FIELDS, Shape, grammars_of
from slipstream.llm import LLM
from slipstream.load import Models
from slipstream.metrics import SpecCounters
from slipstream.prompts import prompts_name

Verdict = Literal["exact", "differs", "inconclusive"]
Say: TypeAlias = Callable[[str], None]
Advance: TypeAlias = Callable[[int, int], None]  # requests answered so far, and in all
Start: TypeAlias = Callable[[str, str], LLM]  # (mode, rule) -> an engine

FALSE_ALARM = 1e-3  # odds that a run calls a right engine wrong, over all of its chi-squares
NEAR_TIE = 2e-4  # top-2 gap, noise included, below which another order of summation in fp32 may choose the other token
ROUNDING = 1.0  # the same in 16 bits: no proof of a fault below, one above
MAX_LAW_PROMPTS, LAW_SAMPLES_EACH = 4, 200  # more prompts would spread the samples too thin for their rarer tokens
ENOUGH_HANGING = 16  # texts that hang on the drafts in their blocks; more are not looked for
_OWN_SEEDS = 1_000_000  # between the seeds of one sample and the next, which must be independent


# ----------------------------------------------------------------------------------------------------------------- a run


def run(options: ExactOptions, say: Say, advance: Advance = lambda done, total: None) -> dict[str, Any]:
    """The report that `--json` prints."""
    speculative = {"draft_layout": "auto", **options.speculative}
    models = load(options.model, options.draft, options.engine, speculative)
    return verify(models, options, say, advance)


def verify(
    models: Models, options: ExactOptions, say: Say = lambda line: None,
    advance: Advance = lambda done, total: None, begin: Start | None = None, grammars: Grammars | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The report on models that are loaded. `begin` makes the engines, where they are not to be the engine's own."""
    plan = Plan(options, models, prompts_of(models, options), grammars or grammars_of(models))
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
    grammars: Grammars | None = None  # None: those of the model
    shape: Shape = field(init=False)  # what is asked besides temperature and filters

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", Shape(self.models, self.options.sampling, self.grammars))

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
        ends = self.options.sampling.structured is not None  # where answers have a form, they end with it
        law = replace(self.options.sampling, max_tokens=length, ignore_eos=not ends)
        prompts = [self.law_prompts[i % len(self.law_prompts)] for i in range(self.samples)]
        return prompts, [replace(law, seed=first + i) for i in range(self.samples)]

    def conditions(self) -> dict[str, Any]:
        options, sampling = self.options, self.options.sampling
        return {
            "dtype": str(self.models.dtype).removeprefix("torch."), "deterministic": self.deterministic,
            "prompts": prompts_name(options.prompts), "requests": len(self.prompts), "max_tokens": sampling.max_tokens,
            "concurrency": options.concurrency, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "top_k": sampling.top_k, "min_p": sampling.min_p, "shape": self._shape_asked(), "seed": options.seed, "samples": self.samples,
            "law_prompts": len(self.law_prompts), "positions": list(options.positions),
            "speculative": dict(options.speculative), "false_alarm": FALSE_ALARM, "tests": self.num_tests,
            "odds_per_test": FALSE_ALARM / self.num_tests,
        }  # fmt: skip

    def _shape_asked(self) -> dict[str, Any]:
        """What the request asks of its logits, as JSON has it."""
        sampling, defaults = self.options.sampling, SamplingParams()
        asked = {name: getattr(sampling, name) for name in sorted(FIELDS)}
        asked = {name: value for name, value in asked.items() if value != getattr(defaults, name)}
        form = asked.get("structured")
        if form is not None:
            named = {each.name: getattr(form, each.name) for each in fields(form)}
            asked["structured"] = {name: value for name, value in named.items() if value is not None}
        return asked


class _Counter:
    def __init__(self, advance: Advance, total: int) -> None:
        self._advance, self._total, self._done = advance, total, 0

    def add(self, count: int) -> None:
        self._done += count
        self._advance(self._done, self._total)


def _checks_of(plan: Plan, rule: str, begin: Start, counter: _Counter, say: Say) -> Iterator[dict[str, Any]]:
    """All checks under one rule; engines come and go one at a time."""
    say(f"{rule}: plain decoding")
    serve = Serving(_with_grammars(plan, begin("off", rule)), counter)
    greedy = serve(plan.prompts, plan.greedy())
    seeded = serve(plan.prompts, plan.seeded()) if rule == "coupled" else None
    for error in (*greedy.errors, *(seeded.errors if seeded else ())):
        raise EngineError(error)  # there is nothing to compare with
    yield law_check(plan, "off", rule, serve(*plan.sampled(0)))
    for index, mode in enumerate(plan.options.modes):
        say(f"{rule}: {mode}")
        serve = Serving(_with_grammars(plan, begin(mode, rule)), counter)
        yield text_check(plan, "greedy", mode, rule, plan.greedy(), greedy, serve(plan.prompts, plan.greedy()))
        if seeded is not None:
            yield text_check(plan, "seeded", mode, rule, plan.seeded(), seeded, serve(plan.prompts, plan.seeded()))
        if rule == "rejection":
            yield law_check(plan, mode, rule, serve(*plan.sampled(index + 1)))


def _with_grammars(plan: Plan, llm: LLM) -> LLM:
    """All engines share what was compiled."""
    if plan.grammars is not None:
        llm.grammars = plan.grammars
    return llm


# --------------------------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True)
class Answers:
    token_ids: list[tuple[int, ...]]
    accepted: list[tuple[bool, ...]]  # which of them were drafts
    counts: SpecCounters
    num_pruned: int
    errors: tuple[str, ...] = ()  # of requests that an error ended

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
        found, accepted, errors = list[tuple[int, ...]](), list[tuple[bool, ...]](), list[str]()
        counts, before = SpecCounters(), self._watch.num_pruned
        for first in range(0, len(prompts), portion):
            part = slice(first, first + portion)
            for completion in self._llm.generate([list(prompt) for prompt in prompts[part]], params[part]):
                errors += [completion.error] if completion.error else []
                found.append(tuple(completion.token_ids))
                accepted.append(completion.accepted)
                counts.merge(completion.spec)
            self._counter.add(len(prompts[part]))
        return Answers(found, accepted, counts, self._watch.num_pruned - before, tuple(errors))


def _row(check: str, mode: str, rule: str, answers: Answers) -> dict[str, Any]:
    counts = answers.counts
    return {
        "check": check, "acceptance": rule, "mode": mode, "verdict": "exact", "why": "", "drafted": counts.drafted,
        "accepted": counts.accepted, "rejected": answers.num_rejected, "pruned": answers.num_pruned,
        "steps": counts.steps, "widths": _histogram(counts.width_histogram),
    }  # fmt: skip


def _broken(plan: Plan, answers: Answers) -> str | None:
    """What no engine that is right does, whatever the check."""
    if answers.errors:
        return f"{len(answers.errors)} requests ended with an error: {answers.errors[0]}"
    broken = sum(map(plan.shape.breaks, answers.token_ids))
    return f"{broken} answers have not the form that was asked for" if broken else None


def _unless_vacuous(row: dict[str, Any]) -> dict[str, Any]:
    """A check that found nothing wrong counts only if it could have."""
    if row["mode"] == "off":
        return row
    needed = ("drafted", "accepted", "rejected") + (() if row["mode"] == "static" else ("pruned",))
    missing = [name for name in needed if row[name] == 0]
    if row["verdict"] == "exact" and missing:
        return {**row, "verdict": "inconclusive", "why": f"{', '.join(missing)} 0: it could not have failed"}
    return row


def _unless_blind(
    row: dict[str, Any], plan: Plan, params: Sequence[SamplingParams], answers: Answers
) -> dict[str, Any]:
    """Where rows go by the tokens before them, a text must hang on the drafts in its blocks, or nothing had to see them."""
    if not plan.shape.follows_output:
        return row
    hanging = (
        hangs_on_drafts(plan.models, plan.prompts[index], tokens, answers.accepted[index], params[index], plan.shape)
        for index, tokens in enumerate(answers.token_ids)
    )
    row = {**row, "hangs": sum(islice(filter(None, hanging), ENOUGH_HANGING))}
    if row["verdict"] == "exact" and not row["hangs"]:
        why = "no text hangs on whether drafts are seen by what was asked for: ask for more (--requests)"
        return {**row, "verdict": "inconclusive", "why": why}
    return row


def _histogram(widths: Counter[int]) -> dict[str, int]:
    return {str(width): count for width, count in sorted(widths.items())}


# ---------------------------------------------------------------------------------------------------------------- checks


def text_check(
    plan: Plan, check: str, mode: str, rule: str, params: Sequence[SamplingParams], plain: Answers, other: Answers
) -> dict[str, Any]:
    """Token ids equal plain decoding's, but for near ties in one request of a hundred."""
    row = _row(check, mode, rule, other)
    if broken := _broken(plan, other):
        return {**row, "requests": len(params), "equal": 0, "verdict": "differs", "why": broken}
    partings = [
        _parting(plan, index, a, b, params[index])
        for index, (a, b) in enumerate(zip(plain.token_ids, other.token_ids, strict=True)) if a != b
    ]  # fmt: skip
    tied = sum(parting["gap"] < NEAR_TIE for parting in partings)
    row |= {"requests": len(params), "equal": len(params) - len(partings), "near_ties": tied, "partings": partings}
    if not partings:
        return _unless_blind(_unless_vacuous(row), plan, params, other)
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
            return _unless_blind(_unless_vacuous(row), plan, params, other)
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
    gap = perturbed_gap(plan.models, plan.prompts[index], plain[:first], params, plan.shape)
    return {"request": index, "token": first + 1, "gap": gap}


def law_check(plan: Plan, mode: str, rule: str, answers: Answers) -> dict[str, Any]:
    """What was sampled against the target's own law. In 16 bits that law is known to rounding only."""
    row, prompts = _row("law", mode, rule, answers), plan.law_prompts
    if broken := _broken(plan, answers):
        return {**row, "tests": [], "verdict": "differs", "why": broken}
    by_prompt = [(prompt, answers.token_ids[i :: len(prompts)]) for i, prompt in enumerate(prompts)]
    tests = law_tests(plan.models, by_prompt, plan.options.positions, plan.options.sampling, plan.shape)
    odds = FALSE_ALARM / plan.num_tests
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
