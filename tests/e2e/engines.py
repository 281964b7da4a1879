"""Tiny engines for end-to-end tests: a drafter that says what a test wants, and a spy that writes down every step.

`ScriptedDrafter` knows the answers beforehand and is wrong only where it is told to be; its confidence is any function
of the step. It finds a sequence's answer by the first token of its prompt, on the device, so it reads nothing back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from slipstream.config import SamplingParams, SpeculativeConfig
from slipstream.decide.cost import CostModel, DraftTimes, LinearCost
from slipstream.decide.make import make_policy
from slipstream.decide.policy import Adaptive
from slipstream.device.batch import Batch
from slipstream.draft.base import Draft, DraftView, Sampler
from slipstream.engine import Engine
from slipstream.llm import LLM
from slipstream.load import Models
from slipstream.ops.reject import DraftLaw
from slipstream.plan import Decision, StepPlan, StepResult
from slipstream.testing import tiny_models, tiny_spec

VOCAB = 20
SPECULATING = ("static", "adaptive", "lag", "lag-budget")
PRUNING = SPECULATING[1:]

# (view, drafts) -> confidence [D, d]
Script = Callable[[DraftView, int], Tensor]


@cache
def models_with(algorithm: str | None = None) -> Models:
    return tiny_models(algorithm, spec=tiny_spec(vocab_size=VOCAB))


def prompts_of(*lengths: int) -> list[list[int]]:
    """Prompts that begin with tokens 3, 4, 5, ..."""
    return [[3 + i, *((5 * i + 3 * j) % 17 + 3 for j in range(length - 1))] for i, length in enumerate(lengths)]


def greedy(max_tokens: int = 12, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


def plain_answers(
    prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams], models: Models | None = None
) -> list[tuple[int, ...]]:
    """The answers of plain decoding; each is computed once."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    return list(_plain(tuple(map(tuple, prompts)), tuple(each), models or models_with()))


@cache
def _plain(
    prompts: tuple[tuple[int, ...], ...], params: tuple[SamplingParams, ...], models: Models
) -> tuple[tuple[int, ...], ...]:
    llm = LLM(models, max_model_len=128, page_size=8)
    return tuple(answer.token_ids for answer in llm.generate(prompts, params))


def constant(*confidence: float) -> Script:
    """The same confidence for every sequence."""
    return lambda view, d: torch.tensor(confidence)[:d].expand(len(view.context), -1)


def asks_for(width_of: Callable[[DraftView], Tensor | int]) -> Script:
    """Confidence 1 for the first so many drafts, 0 for the others: any sensible price turns it into that width."""

    def script(view: DraftView, d: int) -> Tensor:
        width = torch.as_tensor(width_of(view)).expand(len(view.context))
        return (torch.arange(d) < width[:, None]).float()

    return script


class ScriptedDrafter:
    """Drafts the continuation that `known` holds for a prompt's first token, wrong where `wrong(position)` is true."""

    max_position = 1 << 30
    tap_layers: tuple[int, ...] = ()
    has_confidence_head = True

    def __init__(
        self, known: Sequence[Sequence[int]], max_draft_tokens: int = 16, confidence: Script | None = None,
        wrong: Callable[[Tensor], Tensor] = lambda position: position < 0,
    ) -> None:  # fmt: skip
        """known: prompts with their answers."""
        self.max_draft_tokens = max_draft_tokens
        self.confidence = confidence or constant(*[0.9] * 16)
        self._wrong = wrong
        self._known = torch.zeros(VOCAB, 256, dtype=torch.int64)
        for sequence in known:
            self._known[sequence[0], : len(sequence)] = torch.tensor(sequence)
        self.engine: Engine | None = None  # set by `make_llm`

    def propose(self, view: DraftView, num_drafts: int, sampler: Sampler, signal: str) -> Draft:
        drafts, laws = [], []
        first = self.engine.state.token_ids[view.slots, 0].long()
        for j in range(num_drafts):
            position = view.context + 1 + j
            token = self._known[first, position]
            token = torch.where(self._wrong(position), (token + 1) % VOCAB, token)
            logits = torch.zeros(len(token), VOCAB).scatter_(1, token[:, None], 50.0)
            drawn, law = sampler.draw(logits, j, None)
            drafts.append(drawn)
            laws += [] if law is None else [law]
        confidence = self.confidence(view, num_drafts).float()
        return Draft(torch.stack(drafts, 1), confidence, DraftLaw.join(laws) if laws else None)

    def absorb(self, features: Tensor, positions: Tensor, kv_slots: Tensor) -> None:
        raise AssertionError("a drafter without taps absorbs nothing")

    def settle(self, draft: Draft, widths: Tensor, num_accepted: Tensor, teaches: Tensor) -> None:
        pass


def price() -> CostModel:
    """A draft that is sure to be accepted pays, one that is sure to be rejected does not; never corrected."""
    return CostModel(LinearCost(2.0, 0.8, 0.0, 0.0), DraftTimes.constant(0.1), corrects=False)


def make_llm(
    mode: str, drafter: ScriptedDrafter | None = None, *, models: Models | None = None, num_drafts: int = 4,
    learns: bool = False, full_length: bool = True, acceptance: str = "coupled", cost: CostModel | None = None,
    **options: object,
) -> LLM:  # fmt: skip
    """full_length: every step drafts all there is, so that widths alone are decided. Overlapped, as on a GPU."""
    models = models or models_with()
    speculative, policy = SpeculativeConfig(), None
    if mode != "off":
        speculative = SpeculativeConfig.for_mode(
            mode, draft_model="scripted", num_speculative_tokens=num_drafts, acceptance=acceptance
        )
        head = drafter.has_confidence_head if drafter else models.network.confidence_head is not None
        policy, _ = make_policy(speculative, num_drafts=num_drafts, has_head=head, cost=cost or price(), learns=learns)
        if full_length and isinstance(policy, Adaptive):
            policy.draft_length = lambda plan: num_drafts if plan.num_decode else 0
    options = {
        "max_model_len": 128,
        "page_size": 8,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 8,
        "overlap": True,
        **options,
    }
    llm = LLM(models, speculative=speculative, drafter=drafter if mode != "off" else None, policy=policy, **options)
    if drafter is not None:
        drafter.engine = llm.engine
    return llm


def known(
    prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams], models: Models | None = None
) -> list[list[int]]:
    """Prompts with the answers of plain decoding, as `ScriptedDrafter` wants them."""
    answers = plain_answers(prompts, params, models)
    return [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]


def never(position: Tensor) -> Tensor:
    """Right at no position."""
    return position >= 0


def pool_bytes(pages: int, llm: LLM) -> int:
    """`kv_memory` for so many pages that can be owned, of an engine like `llm`."""
    per_page = sum(pool.keys[:, :1].nbytes + pool.values[:, :1].nbytes for pool in llm.engine.backend._pools)
    return (pages + 2) * per_page


@dataclass
class Step:
    """What a spy saw of one step."""

    plan: StepPlan
    owned: dict[int, frozenset[int]]  # uid -> pages, when the step was launched
    draft: Draft | None = None
    decision: Decision | None = None
    batch: Batch | None = None
    token_ids: Tensor | None = None
    absorbed: Tensor | None = None  # KV slots that the drafter wrote
    result: StepResult | None = None

    @property
    def widths(self) -> list[int]:
        """Of the decoding sequences, as the device had them."""
        return self.batch.widths[: self.plan.num_decode].tolist()

    def row(self, uid: int) -> int | None:
        """The decoding row of a request."""
        rows = np.flatnonzero(self.plan.uids_np[: self.plan.num_decode] == uid)
        return int(rows[0]) if len(rows) else None


class Spy:
    """Keeps every step of an engine, in order of launch."""

    def __init__(self, llm: LLM) -> None:
        self.steps: list[Step] = []
        self._engine = engine = llm.engine
        self._launch_draft, self._launch_verify = engine.launch_draft, engine.launch_verify
        self._verify, self._learn = engine.target.verify, engine.policy.learn
        engine.launch_draft, engine.launch_verify = self._on_draft, self._on_verify
        engine.target.verify, engine.policy.learn = self._on_forward, self._on_result
        if engine.drafter is not None:
            self._absorb = engine.drafter.absorb
            engine.drafter.absorb = self._on_absorb

    def of(self, uid: int) -> list[tuple[Step, int]]:
        """The decode steps of a request, each with its row."""
        return [(step, row) for step in self.steps if (row := step.row(uid)) is not None]

    def widths_of(self, uid: int) -> list[int]:
        return [step.widths[row] for step, row in self.of(uid)]

    def drafts_by_context(self, uid: int) -> dict[int, tuple[list[int], list[float]]]:
        """Context length -> drafts and confidence."""
        found = {}
        for step, row in self.of(uid):
            if step.draft is not None:
                signal = step.draft.signal[row].tolist()
                found[int(step.batch.context[row])] = (step.draft.token_ids[row].tolist(), signal)
        return found

    def _on_draft(self, plan: StepPlan, timed: bool):
        scheduler, requests = self._engine.scheduler, self._engine.requests
        owned = {uid: frozenset(scheduler.pages_of(request)) for uid, request in requests.items()}
        self.steps.append(Step(plan, owned))
        drafted = self._launch_draft(plan, timed)
        self.steps[-1].draft = drafted.draft
        return drafted

    def _on_verify(self, drafted, decision: Decision):
        self.steps[-1].decision = decision
        return self._launch_verify(drafted, decision)

    def _on_forward(self, batch: Batch, token_ids: Tensor, segments):
        self.steps[-1].batch, self.steps[-1].token_ids = batch, token_ids
        return self._verify(batch, token_ids, segments)

    def _on_absorb(self, features: Tensor, positions: Tensor, kv_slots: Tensor) -> None:
        self.steps[-1].absorbed = kv_slots
        self._absorb(features, positions, kv_slots)

    def _on_result(self, plan: StepPlan, result: StepResult, *rest) -> None:
        (step,) = [step for step in self.steps if step.plan.step == plan.step]
        step.result = result
        self._learn(plan, result, *rest)


def check_batch(step: Step, page_size: int = 8) -> None:
    """Rows, positions, KV slots and token ids that the target saw are those of the device's widths."""
    batch, widths, given = step.batch, step.batch.widths, torch.as_tensor(step.plan.num_given_np)
    rows = (widths + given).tolist()
    assert batch.cu_rows.tolist() == [0, *np.cumsum(rows)]
    assert batch.row_sequence.tolist() == [i for i, count in enumerate(rows) for _ in range(count)]
    first = 0
    for i, count in enumerate(rows):
        mine = slice(first, first + count)
        positions = batch.positions[mine]
        assert positions.tolist() == list(range(int(batch.context[i]), int(batch.context[i]) + count))
        pages = batch.page_table[i, positions // page_size]
        assert batch.kv_slots[mine].tolist() == (pages * page_size + positions % page_size).tolist()
        if i < step.plan.num_decode and widths[i]:
            assert step.token_ids[mine][1:].tolist() == step.draft.token_ids[i, : widths[i]].tolist()
        first += count
    assert len(step.token_ids) == first
