"""Which drafts stand and what is emitted: stage `accept`, under one of two rules. The arithmetic is in `ops`.

Coupled: the target's token of every verified row is what plain decoding would emit (Gumbel-max with noise keyed by seed
and position); drafts stand as long as they equal it. Rejection: speculative rejection sampling against the dense draft
distribution. A rule is made once for the engine; `begin` makes the step's view of it, which also draws the drafts.
Letters in shapes: B sequences, D of them decode, d drafts, O output rows, V token ids, W + 1 the columns of `emitted`.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from slipstream.device.batch import Batch, pad_outputs
from slipstream.device.state import PlanOnDevice, SlotState
from slipstream.ops.noise import CounterSource, RandomSource, gumbel
from slipstream.ops.reject import count_accepted_coupled, draft_sample, reject
from slipstream.ops.sample import coupled_targets, filter_logits, invalid_rows, probabilities
from slipstream.plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    num_accepted: Tensor  # [B] int64, drafts only
    emitted: Tensor  # [B, W + 1] token ids; valid up to column num_accepted
    invalid: Tensor  # [B] bool: a row of the target was not finite


@dataclass(frozen=True, slots=True, eq=False)
class SamplingView:
    """Sampling parameters of the step's sequences, gathered from slot state, and what the host knows of them."""

    temperature: Tensor  # [B]
    top_k: Tensor  # [B]
    top_p: Tensor  # [B]
    seed: Tensor  # [B]
    first_position: Tensor  # [B] position of the first token that may be emitted: context + given
    num_decode: int
    draft_length: int
    any_sampled: bool
    any_top_k: bool
    any_top_p: bool

    def filtered(self, logits: Tensor, rows: Tensor) -> Tensor:
        """logits [O, V] of sequences rows [O] -> after temperature and filters, fp32 at least."""
        return filter_logits(
            logits, self.temperature[rows], self.top_k[rows], self.top_p[rows],
            any_top_k=self.any_top_k, any_top_p=self.any_top_p,
        )  # fmt: skip


def view_sampling(state: SlotState, on_device: PlanOnDevice, plan: StepPlan) -> SamplingView:
    slots = on_device.slots
    return SamplingView(
        state.temperature[slots], state.top_k[slots], state.top_p[slots], state.seed[slots],
        state.context[slots] + on_device.num_given, plan.num_decode, plan.draft_length,
        plan.any_sampled, plan.any_top_k, plan.any_top_p,
    )  # fmt: skip


class StepRule(Protocol):
    """An acceptance rule in one step. It is the drafter's `Sampler` too."""

    @property
    def temperature(self) -> Tensor: ...

    def draw(self, logits: Tensor, offset: int, token_ids: Tensor | None) -> tuple[Tensor, Tensor | None]: ...

    def certain(self, token_ids: Tensor) -> Tensor | None: ...

    def judge(self, batch: Batch, logits: Tensor, drafts: Tensor, draft_prob: Tensor | None) -> Verdict:
        """logits [O, V] of the output rows, drafts [D, d], draft_prob [D, d, V] if `draw` or `certain` made it."""


class Rule(Protocol):
    def begin(self, view: SamplingView, vocab_size: int) -> StepRule: ...


@dataclass(frozen=True, slots=True)
class CoupledRule:
    """Drafter and target share their noise, so no policy can bias the output, whatever it looks at."""

    sample_drafts: bool

    def begin(self, view: SamplingView, vocab_size: int) -> "CoupledStep":
        return CoupledStep(view, self._noise(view, vocab_size) if view.any_sampled else None, self.sample_drafts)

    @staticmethod
    def _noise(view: SamplingView, vocab_size: int) -> Tensor:
        """[D * (d + 1) + (B - D), V]: the positions that each decoding sequence may emit at, one for the others."""
        places = view.draft_length + 1
        steps = torch.arange(places, device=view.seed.device)
        decode = view.first_position[: view.num_decode, None] + steps
        positions = torch.cat([decode.flatten(), view.first_position[view.num_decode :]])
        seeds = torch.cat([view.seed[: view.num_decode].repeat_interleave(places), view.seed[view.num_decode :]])
        return gumbel(seeds, positions, vocab_size)


@dataclass(frozen=True, slots=True, eq=False)
class CoupledStep:
    view: SamplingView
    noise: Tensor | None
    sample_drafts: bool

    @property
    def temperature(self) -> Tensor:
        return _reading_temperature(self.view)

    def draw(self, logits: Tensor, offset: int, token_ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.noise is None or not self.sample_drafts:
            columns = logits.argmax(-1)
        else:
            places = self.view.draft_length + 1
            noise = self.noise[offset : len(logits) * places : places]
            noise = noise if token_ids is None else noise.index_select(1, token_ids)
            temperature = self.view.temperature[: len(logits)]
            columns = coupled_targets(logits / self.temperature[:, None], temperature, noise)
        return (columns if token_ids is None else token_ids[columns]), None

    def certain(self, token_ids: Tensor) -> None:
        return None

    def judge(self, batch: Batch, logits: Tensor, drafts: Tensor, draft_prob: Tensor | None) -> Verdict:
        rows, places, logits = batch.output_sequence, self.view.draft_length + 1, logits.float()
        noise = self.noise
        if noise is not None:
            decode_row = rows * places + batch.output_offset
            other_row = self.view.num_decode * places + rows - self.view.num_decode
            noise = noise.index_select(0, torch.where(rows < self.view.num_decode, decode_row, other_row))
        chosen = coupled_targets(self.view.filtered(logits, rows), self.view.temperature[rows], noise)
        emitted = pad_outputs(batch, chosen, places)
        num_accepted = count_accepted_coupled(_for_all(drafts, len(batch.widths)), emitted, batch.widths)
        return Verdict(num_accepted, emitted, _any_invalid(batch, logits, num_accepted))


@dataclass(frozen=True, slots=True)
class RejectionRule:
    """Highest acceptance; exact only with policies that do not look at a draft when they decide on it."""

    sample_drafts: bool
    source: RandomSource = field(default_factory=CounterSource)

    def begin(self, view: SamplingView, vocab_size: int) -> "RejectionStep":
        return RejectionStep(view, vocab_size, self.sample_drafts, self.source)


@dataclass(frozen=True, slots=True, eq=False)
class RejectionStep:
    view: SamplingView
    vocab_size: int
    sample_drafts: bool
    source: RandomSource

    @property
    def temperature(self) -> Tensor:
        return _reading_temperature(self.view)

    def draw(self, logits: Tensor, offset: int, token_ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        count = self.view.num_decode
        return draft_sample(
            logits, self.view.temperature[:count], self.view.seed[:count], self._anchor[:count], offset, self.source,
            sample=self.sample_drafts, token_ids=token_ids, vocab_size=self.vocab_size,
        )  # fmt: skip

    def certain(self, token_ids: Tensor) -> Tensor:
        prob = torch.zeros(*token_ids.shape, self.vocab_size, device=token_ids.device)
        return prob.scatter_(-1, token_ids[..., None], 1)

    def judge(self, batch: Batch, logits: Tensor, drafts: Tensor, draft_prob: Tensor | None) -> Verdict:
        rows, num_sequences, logits = batch.output_sequence, len(batch.widths), logits.float()
        target = probabilities(self.view.filtered(logits, rows), self.view.temperature[rows])
        target = pad_outputs(batch, target, self.view.draft_length + 1)
        drafts = _for_all(drafts, num_sequences)
        prob = target.new_zeros(num_sequences, 0, target.shape[-1]) if draft_prob is None else draft_prob
        num_accepted, following = reject(
            drafts, _for_all(prob, num_sequences), target, batch.widths, self.view.seed, self._anchor, self.source
        )
        emitted = torch.cat([drafts, drafts.new_zeros(num_sequences, 1)], dim=1)
        emitted = emitted.scatter(1, num_accepted[:, None], following[:, None])
        return Verdict(num_accepted, emitted, _any_invalid(batch, logits, num_accepted))

    @property
    def _anchor(self) -> Tensor:
        return self.view.first_position - 1


def silent_verdict(batch: Batch) -> Verdict:
    """Of a step in which nobody emits: prefill chunks only."""
    zeros = torch.zeros_like(batch.widths)
    return Verdict(zeros, zeros[:, None], zeros.bool())


def _reading_temperature(view: SamplingView) -> Tensor:
    temperature = view.temperature[: view.num_decode]
    return torch.where(temperature > 0, temperature, 1.0)


def _for_all(values: Tensor, num_sequences: int) -> Tensor:
    """[D, ...] -> [B, ...], zeros for the sequences that do not decode."""
    missing = num_sequences - len(values)
    return torch.cat([values, values.new_zeros(missing, *values.shape[1:])]) if missing else values


def _any_invalid(batch: Batch, logits: Tensor, num_accepted: Tensor) -> Tensor:
    """[B] bool: a row that a token was taken from holds NaN or infinity."""
    used = batch.output_offset <= num_accepted[batch.output_sequence]
    flags = (invalid_rows(logits) & used).to(torch.int64)
    return torch.zeros_like(batch.widths).index_add_(0, batch.output_sequence, flags) > 0
