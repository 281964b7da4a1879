"""Replayed acceptance: an engine that runs everything for real and is told what its drafts are worth by a dense trace.

For models without weights: confidences, and which drafts stand, are those of the trace's pair, while every kernel runs
at the size of the model that is measured. Each request stands for one answer of the trace. Where that answer lies is in
the request's seed, which a greedy request has no other use for: seed + context is the trace's row of its anchor. So all
goes by slot state, on the device, and is captured like any stage. Only a bench puts this around an engine's parts
(`LLM(adapt=...)`); the engine knows nothing of it.

Letters in shapes: N anchors of the trace, S its drafts, D decoding sequences, B sequences, d drafts.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, zip_longest

import numpy as np
import torch
from torch import Tensor

from slipstream.backends import Adapt, Parts
from slipstream.config import SamplingParams
from slipstream.device.batch import Batch
from slipstream.device.shapes import VerifyShape
from slipstream.device.state import PlanOnDevice, SlotState
from slipstream.draft.base import Draft, Drafter, DraftView, Sampler
from slipstream.errors import ConfigError
from slipstream.lab.around import AroundDrafter
from slipstream.lab.dense import DenseTrace
from slipstream.ops.reject import DraftLaw
from slipstream.plan import IS_INVALID, NUM_ACCEPTED, WIDTH, StepPlan
from slipstream.verify.accept import Rule, StepRule, Verdict


def replay_requests(
    trace: DenseTrace, count: int, *, vocab_size: int, most_positions: int, max_tokens: int, sets: Sequence[str] = ()
) -> tuple[list[tuple[int, ...]], list[SamplingParams]]:
    """`count` prompts of random tokens, as long as the trace's, and what makes each request one of its answers.

    The sets of prompts take turns, those that are named or all; where they have fewer answers, they begin again. Answers
    are cut at `max_tokens`.
    """
    chosen = list(islice(cycle(_in_turn(trace, sets or trace.set_names)), count))
    starts, lengths = trace.starts_np[chosen].tolist(), trace.lengths_np[chosen].tolist()
    prompts, params = [], []
    for index, (start, length, num_given) in enumerate(
        zip(starts, lengths, trace.prompt_lengths_np[chosen].tolist(), strict=True)
    ):
        num_tokens = min(length, max_tokens)
        if num_given + num_tokens > most_positions:
            raise ConfigError(
                f"the trace has an answer of {num_tokens} tokens to a prompt of {num_given}, and the engine has "
                f"{most_positions} positions; lower max_tokens, or raise max_model_len"
            )
        prompts.append(tuple(random.Random(index).choices(range(vocab_size), k=num_given)))
        params.append(SamplingParams(seed=start - num_given, max_tokens=num_tokens, ignore_eos=True))
    return prompts, params


def _in_turn(trace: DenseTrace, sets: Sequence[str]) -> list[int]:
    """Answers, one of each set after the other."""
    of_sets = [np.flatnonzero(trace.sets_np == trace.set_index(name)).tolist() for name in sets]
    return [answer for turn in zip_longest(*of_sets) for answer in turn if answer is not None]


def replay(trace: DenseTrace) -> Adapt:
    """What makes an engine's parts go by the trace; plain decoding is left as it is."""

    def adapt(parts: Parts) -> Parts:
        if parts.drafter is None:
            return parts
        rows = TraceRows.of(trace, parts.backend.state)
        return replace(parts, drafter=ReplayedDrafter(parts.drafter, rows), rule=ReplayedRule(parts.rule, rows))

    return adapt


@dataclass(frozen=True, slots=True, eq=False)
class TraceRows:
    """A trace on the device, and where in it the requests of an engine stand."""

    state: SlotState
    runs: Tensor  # [N] int32
    signals: Mapping[str, Tensor]  # [N, S] fp32

    @classmethod
    def of(cls, trace: DenseTrace, state: SlotState) -> "TraceRows":
        device = state.context.device
        signals = {name: torch.from_numpy(np.array(v, np.float32)).to(device) for name, v in trace.signals.items()}
        return cls(state, torch.from_numpy(trace.runs_np.astype(np.int32)).to(device), signals)

    def at(self, slots: Tensor) -> Tensor:
        """Rows of the anchors of `slots`; of padding, prompts and requests that the trace knows nothing of any row."""
        return (self.state.seed[slots] + self.state.context[slots]).clamp(0, len(self.runs) - 1)

    def confidence(self, signal: str, slots: Tensor, num_drafts: int) -> Tensor:
        """[D, d]."""
        if signal not in self.signals:
            raise ConfigError(
                f"the trace has no confidence of kind {signal!r}; set confidence_signal to {' or '.join(self.signals)}"
            )
        values = self.signals[signal]
        if num_drafts > values.shape[1]:
            raise ConfigError(
                f"{num_drafts} drafts a step, and the trace was taken with {values.shape[1]}; lower num_speculative_tokens"
            )
        return values[self.at(slots), :num_drafts]


class ReplayedDrafter(AroundDrafter):
    """Drafts for real and says of its drafts what the trace says."""

    def __init__(self, inner: Drafter, rows: TraceRows) -> None:
        super().__init__(inner)
        self._rows = rows

    def propose(self, view: DraftView, num_drafts: int, sampler: Sampler, signal: str) -> Draft:
        """The confidence is overwritten where it is: later stages may know its address."""
        draft = self.inner.propose(view, num_drafts, sampler, signal)
        if signal != "none":
            draft.signal.copy_(self._rows.confidence(signal, view.slots, num_drafts))
        return draft


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedRule:
    """Judges for real and accepts as many drafts as the trace says."""

    inner: Rule
    rows: TraceRows

    @property
    def captures(self) -> bool:
        return self.inner.captures

    @property
    def captures_wishes(self) -> bool:
        return self.inner.captures_wishes

    def begin(self, state: SlotState, loaded: PlanOnDevice, plan: StepPlan, vocab_size: int) -> "ReplayedStep":
        return ReplayedStep(self.inner.begin(state, loaded, plan, vocab_size), self.rows, loaded)


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedStep:
    inner: StepRule
    rows: TraceRows
    loaded: PlanOnDevice

    @property
    def sample_drafts(self) -> bool:
        return self.inner.sample_drafts

    @property
    def shares_noise(self) -> bool:
        return self.inner.shares_noise

    def reading_temperature(self, count: int) -> Tensor:
        return self.inner.reading_temperature(count)

    def draw(self, logits: Tensor, offset: int, token_ids: Tensor | None) -> tuple[Tensor, DraftLaw | None]:
        return self.inner.draw(logits, offset, token_ids)

    def judge(
        self, batch: Batch, logits: Tensor, drafts: Tensor | None, draft_law: DraftLaw | None, shape: VerifyShape
    ) -> Verdict:
        """The target's tokens of all verified rows stand in the verdict, so any number of them can be emitted."""
        verdict = self.inner.judge(batch, logits, drafts, draft_law, shape)
        result = verdict.result
        runs = self.rows.runs[self.rows.at(self.loaded.slots[: len(result)])]
        result[:, NUM_ACCEPTED].copy_(torch.minimum(result[:, WIDTH], runs))
        result[:, IS_INVALID].zero_()
        return verdict
