"""The engines that `verify_exact` puts to the test: one for each mode and rule, at a price under which every drafter is pruned.

Widths drawn at random are a policy of their own. Knows nothing of checks.
"""

from dataclasses import replace
from typing import Literal

import numpy as np

from slipstream.backends import Adapt
from slipstream.config import Signal
from slipstream.decide.cost import CostModel, DraftTimes, LinearCost, TableCost
from slipstream.decide.make import cost_model_follows
from slipstream.decide.policy import Adaptive, Float32s, Policy, WaitsFor
from slipstream.decide.survival import SurvivalModel
from slipstream.draft.base import Drafter
from slipstream.lab.measure import sizes, token_ids
from slipstream.lab.verify_exact_options import RANDOM, ExactOptions
from slipstream.llm import LLM
from slipstream.load import Models
from slipstream.plan import Decision, DraftReport, StepPlan, StepResult
from slipstream.prompts import read_prompts, user

LAW_TAIL = 4  # tokens behind the last that is tested, or the end of the answer would cap the drafts for it


def prompts_of(models: Models, options: ExactOptions) -> list[tuple[int, ...]]:
    """Token ids, through the chat template."""
    texts = read_prompts(options.prompts, limit=options.requests)
    return [tuple(token_ids(models.tokenizer, user(text))) for text in texts]


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
    with cost_model_follows():
        llm = LLM(models, speculative=config, policy=policy, **given)
    if scripted and isinstance(llm.engine.policy, Adaptive):
        linear = bool(config.adaptive_speculative_min_gain)
        llm.engine.policy.cost = price(options.concurrency, llm.engine.scheduler.limits.max_drafts, linear=linear)
    return llm


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
