"""Is speculation lossless? Run the same requests with and without it, in fp32, and judge the difference.

A run counts only if it could have failed: some drafts were accepted and some rejected, and in the modes that prune some
were not verified. Anything else is inconclusive, which is a failure of the test that asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from slipstream.config import SamplingParams, SpeculativeConfig
from slipstream.decide.cost import CostModel, DraftTimes, LinearCost
from slipstream.decide.make import make_policy
from slipstream.draft.base import Drafter
from slipstream.grammars import Grammars
from slipstream.llm import LLM
from slipstream.load import Models
from slipstream.metrics import SpecCounters
from slipstream.models.layers import DenseAttend
from slipstream.ops.noise import gumbel
from slipstream.testing import assert_nothing_left
from tests.lossless.shaping import plain_law

GAP = 2e-4  # of the perturbed top 2, below which another order of summation may choose the other token
PRUNING = ("adaptive", "lag", "lag-budget")

Outcome = Literal["equal", "different", "inconclusive"]


@dataclass
class NearTies:
    """How many requests were excused over many runs: one in a hundred may be (and one in the first hundred)."""

    requests: int = 0
    excused: int = 0

    def count(self, requests: int, excused: int) -> None:
        self.requests += requests
        self.excused += excused

    @property
    def too_many(self) -> bool:
        return self.excused > max(1, self.requests // 100)


@dataclass(frozen=True)
class Run:
    answers: list[tuple[int, ...]]
    totals: SpecCounters


def on(device: str, models: Models) -> Models:
    """The same weights there."""
    target, network = models.target.to(device), models.network and models.network.to(device)
    if network is not None:
        network.share(target)
    return replace(models, target=target, network=network)


def scripted_cost(row_ms: float = 0.5, fixed_ms: float = 4.0) -> CostModel:
    """Verification dear enough that widths matter, drafting cheap enough that it is worth it."""
    return CostModel(LinearCost(fixed_ms, row_ms, 0.0, 0.0), DraftTimes.constant(0.05), corrects=False)


def run(
    models: Models, mode: str, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *,
    num_drafts: int = 7, concurrency: int = 8, drafter: Drafter | None = None, acceptance: str = "coupled",
    overlap: bool = True, cost: CostModel | None = None, grammars: Grammars | None = None,
    draft_sampling: str = "auto", **engine: object,
) -> Run:  # fmt: skip
    """All requests through one engine, at most `concurrency` at a time."""
    speculative, policy = SpeculativeConfig(), None
    if mode != "off":
        fields = {"draft_model": "scripted", "num_speculative_tokens": num_drafts, "acceptance": acceptance}
        speculative = SpeculativeConfig.for_mode(mode, **fields, draft_sampling=draft_sampling)
        head = drafter.has_confidence_head if drafter else models.network.confidence_head is not None
        policy, _ = make_policy(speculative, num_drafts=num_drafts, has_head=head, cost=cost or scripted_cost())
        if num_drafts == 1:
            # With one draft and one sequence, "draft it?" and "verify it?" are one question to lagged confidence: what
            # is not worth verifying is not drafted. Drafting it all the same leaves something to prune.
            policy.draft_length = lambda plan: 1  # type: ignore[method-assign]
    options = {"max_model_len": 128, "page_size": 8, "max_num_batched_tokens": 24, **engine}
    llm = LLM(
        models, speculative=speculative, drafter=drafter if mode != "off" else None, policy=policy,
        max_num_seqs=concurrency, overlap=overlap, **options,
    )  # fmt: skip
    if grammars is not None:
        llm.grammars = grammars
    completions = llm.generate([list(prompt) for prompt in prompts], list(params))
    assert_nothing_left(llm.engine)
    return Run([completion.token_ids for completion in completions], llm.engine.totals)


def judge(
    models: Models,
    mode: str,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    plain: Run,
    other: Run,
    near_ties: NearTies | None = None,
) -> tuple[Outcome, str]:
    """Compare a speculating run with the plain one; the text says what was found. `near_ties` counts over many runs."""
    near_ties = near_ties or NearTies()
    totals = other.totals
    counts = f"drafted {totals.drafted}, verified {totals.verified}, accepted {totals.accepted}"
    rejected = totals.verified - totals.accepted
    if not totals.accepted or not rejected or (mode in PRUNING and totals.verified >= totals.drafted):
        return "inconclusive", counts
    excused = 0
    for index, (a, b) in enumerate(zip(plain.answers, other.answers, strict=True)):
        if a == b:
            continue
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        gap = perturbed_gap(models, [*prompts[index], *a[:first]], params[index], len(prompts[index]))
        if gap >= GAP:
            return "different", f"request {index}, token {first}, top-2 gap {gap:.1e}: {a[first:]} or {b[first:]}"
        excused += 1
    near_ties.count(len(prompts), excused)
    if near_ties.too_many:
        return "different", f"{near_ties.excused} near ties in {near_ties.requests} requests, more than 1 in 100"
    return "equal", f"{counts}, {excused} excused near ties"


def perturbed_gap(
    models: Models, token_ids: Sequence[int], params: SamplingParams, num_prompt: int | None = None
) -> float:
    """Difference of the two best candidates for the token after `token_ids`, noise included."""
    best = scores_after(models, token_ids, params, num_prompt).topk(2).values
    return float(best[0] - best[1])


@torch.inference_mode()
def scores_after(
    models: Models, token_ids: Sequence[int], params: SamplingParams, num_prompt: int | None = None,
    allowed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[V], the largest is plain decoding's next token: by a dense forward and the definitions of the parameters.

    The first num_prompt of token_ids are the prompt; None: all of them. allowed [V] bool: what a grammar allows there.
    """
    rows, target = torch.tensor(token_ids), models.target
    hidden, _ = target(rows, torch.arange(len(rows)), DenseAttend(target.spec))
    logits = target.logits(hidden[-1:])[0, : models.vocab_size].float()
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else models.eos_token_ids)}
    count = len(token_ids) if num_prompt is None else num_prompt
    scores = plain_law(logits, token_ids[:count], token_ids[count:], params, sorted(ends))
    if params.temperature > 0:
        scores = scores + gumbel(torch.tensor([params.seed]), torch.tensor([len(rows)]), scores.shape[1])
    return scores[0]
