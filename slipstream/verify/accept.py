"""Which drafts stand and what is emitted: stage `accept`, under one of two rules. The arithmetic is in `ops`.

Coupled: the target's token of every verified row is what plain decoding would emit (Gumbel-max with noise keyed by seed
and position); drafts stand as long as they equal it. Rejection: speculative rejection sampling against all of what a
draft was drawn from. A rule is made once for the engine; `begin` makes the step's view of it, which also draws the drafts.
Letters in shapes: B sequences, D of them decode, d drafts, O output rows, V token ids, W + 1 the columns of `emitted`.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from slipstream.device.batch import Batch, pad_outputs
from slipstream.device.shapes import VerifyShape
from slipstream.device.state import PlanOnDevice, SlotState
from slipstream.ops.noise import CounterSource, RandomSource, gumbel
from slipstream.ops.reject import DraftLaw, count_accepted_coupled, draft_sample, reject
from slipstream.ops.sample import coupled_targets, filter_logits, invalid_rows, probabilities
from slipstream.ops.shape_logits import Histories, shape_logits
from slipstream.plan import IS_INVALID, NUM_ACCEPTED, WIDTH, StepPlan

FILTERED_AT_ONCE = 1 << 25  # rows times vocabulary that are filtered together: about 1.3 GB of what is made meanwhile


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """One matrix, so that one copy takes it to the host."""

    result: Tensor  # [B, NUM_VERDICT_COLUMNS + W + 1] int32, see `plan`

    @classmethod
    def of(cls, widths: Tensor, num_accepted: Tensor, invalid: Tensor, emitted: Tensor) -> "Verdict":
        """[B], [B] drafts only, [B] bool: a row of the target was not finite, [B, W + 1]."""
        heads = torch.stack([widths, num_accepted, invalid], dim=1)  # WIDTH, NUM_ACCEPTED, IS_INVALID
        return cls(torch.cat([heads, emitted], dim=1).to(torch.int32))

    @property
    def widths(self) -> Tensor:
        return self.result[:, WIDTH].long()

    @property
    def num_accepted(self) -> Tensor:
        return self.result[:, NUM_ACCEPTED].long()

    @property
    def invalid(self) -> Tensor:
        return self.result[:, IS_INVALID] > 0


@dataclass(frozen=True, slots=True)
class Asked:
    """What the host knows of the requests of a step: where nobody asks for a thing, none of its work is done."""

    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    any_penalty: bool
    any_edit: bool

    @classmethod
    def of(cls, plan: StepPlan) -> "Asked":
        return cls(plan.any_top_k, plan.any_top_p, plan.any_min_p, plan.any_penalty, plan.any_edit)


def law_of(logits: Tensor, state: SlotState, asked: Asked, histories: Histories) -> Tensor:
    """logits [O, V] as the target gave them -> those to choose tokens by, fp32 at least.

    Penalties and edits (`ops.shape_logits`), each row after the drafts before it; then temperature and filters
    (`filtered`). Slots own the histories.
    """
    if asked.any_penalty or asked.any_edit:
        flags = {"any_penalty": asked.any_penalty, "any_edit": asked.any_edit}
        logits = shape_logits(logits, state.shaping, histories, **flags)
    return filtered(logits, state, asked, histories.owner)


def filtered(logits: Tensor, state: SlotState, asked: Asked, slots: Tensor) -> Tensor:
    """logits [O, V] of the slots [O] after temperature and filters.

    Filters take ten times what a row does, so that many rows go through one part after another.
    """
    count, at_once = len(logits), max(FILTERED_AT_ONCE // logits.shape[1], 1)
    if count <= at_once:
        return _filtered(logits, state, asked, slots)
    wide = logits.dtype if logits.dtype in (torch.float32, torch.float64) else torch.float32
    law = torch.empty(logits.shape, dtype=wide, device=logits.device)
    for first in range(0, count, at_once):
        rows = slice(first, first + at_once)
        law[rows] = _filtered(logits[rows], state, asked, slots[rows])
    return law


def _filtered(logits: Tensor, state: SlotState, asked: Asked, slots: Tensor) -> Tensor:
    return filter_logits(
        logits, state.temperature[slots], state.top_k[slots], state.top_p[slots],
        min_p=state.min_p[slots] if asked.any_min_p else None, any_top_k=asked.any_top_k, any_top_p=asked.any_top_p,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SamplingView:
    """Sampling parameters of the step's sequences, gathered from slot state, and what the host knows of them."""

    state: SlotState
    slots: Tensor  # [B]
    temperature: Tensor  # [B]
    seed: Tensor  # [B]
    first_position: Tensor  # [B] position of the first token that may be emitted: context + given
    num_decode: int
    draft_length: int
    any_sampled: bool
    asked: Asked
    max_known: int  # known tokens of a sequence at most; 0 where nobody looks at them

    def law(self, batch: Batch, logits: Tensor, drafts: Tensor) -> Tensor:
        """logits [O, V] of the output rows, drafts [D, d] -> see `law_of`."""
        rows = batch.output_sequence
        histories = Histories(
            self.state.token_ids, self.max_known, self.slots[rows], self.first_position[rows], drafts, rows,
            batch.output_offset,
        )  # fmt: skip
        return law_of(logits, self.state, self.asked, histories)


def view_sampling(state: SlotState, loaded: PlanOnDevice, plan: StepPlan) -> SamplingView:
    count = plan.num_sequences
    slots = loaded.slots[:count]
    max_known = int((plan.context_upper_bound_np + plan.num_given_np).max()) if plan.any_penalty else 0
    return SamplingView(
        state, slots, state.temperature[slots], state.seed[slots], state.context[slots] + loaded.num_given[:count],
        plan.num_decode, plan.draft_length, plan.any_sampled, Asked.of(plan), max_known,
    )  # fmt: skip


class StepRule(Protocol):
    """An acceptance rule in one step. It is the drafter's `Sampler` too."""

    @property
    def sample_drafts(self) -> bool: ...

    @property
    def shares_noise(self) -> bool: ...

    def reading_temperature(self, count: int) -> Tensor: ...

    def draw(self, logits: Tensor, offset: int, token_ids: Tensor | None) -> tuple[Tensor, DraftLaw | None]: ...

    def judge(
        self, batch: Batch, logits: Tensor, drafts: Tensor | None, draft_law: DraftLaw | None, shape: VerifyShape
    ) -> Verdict:
        """logits [O, V] of the output rows; drafts [D, d], if any, and what `draw` gave beside them."""


class Rule(Protocol):
    @property
    def captures(self) -> bool:
        """Verdicts may be recorded in a CUDA graph, and padding does not disturb them."""

    @property
    def captures_wishes(self) -> bool:
        """Those after penalties and edits, and those under filters, as well."""

    def begin(self, state: SlotState, loaded: PlanOnDevice, plan: StepPlan, vocab_size: int) -> StepRule: ...


@dataclass(frozen=True, slots=True)
class CoupledRule:
    """Drafter and target share their noise, so no policy can bias the output, whatever it looks at."""

    sample_drafts: bool
    captures: ClassVar[bool] = False
    captures_wishes: ClassVar[bool] = False

    def begin(self, state: SlotState, loaded: PlanOnDevice, plan: StepPlan, vocab_size: int) -> "CoupledStep":
        view = view_sampling(state, loaded, plan)
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
    shares_noise: ClassVar[bool] = True

    def reading_temperature(self, count: int) -> Tensor:
        return above_zero(self.view.temperature[:count])

    def draw(self, logits: Tensor, offset: int, token_ids: Tensor | None) -> tuple[Tensor, None]:
        if self.noise is None or not self.sample_drafts:
            columns = logits.argmax(-1)
        else:
            places = self.view.draft_length + 1
            noise = self.noise[offset : len(logits) * places : places]
            noise = noise if token_ids is None else noise.index_select(1, token_ids)
            temperature = self.view.temperature[: len(logits)]
            columns = coupled_targets(logits / above_zero(temperature)[:, None], temperature, noise)
        return (columns if token_ids is None else token_ids[columns]), None

    def judge(
        self, batch: Batch, logits: Tensor, drafts: Tensor | None, draft_law: DraftLaw | None, shape: VerifyShape
    ) -> Verdict:
        batch, logits = _exact(batch, logits, shape)
        if not len(logits):
            return silent_verdict(batch)
        rows, places = batch.output_sequence, self.view.draft_length + 1
        noise = self.noise
        if noise is not None:
            decode_row = rows * places + batch.output_offset
            other_row = self.view.num_decode * places + rows - self.view.num_decode
            noise = noise.index_select(0, torch.where(rows < self.view.num_decode, decode_row, other_row))
        drafts = _drafts(drafts, self.view)
        law = self.view.law(batch, logits, drafts)
        emitted = pad_outputs(batch, coupled_targets(law, self.view.temperature[rows], noise), places)
        drafts = _for_all(drafts, len(batch.widths))
        num_accepted = count_accepted_coupled(drafts, emitted, batch.widths)
        return Verdict.of(batch.widths, num_accepted, _any_invalid(batch, law, num_accepted), emitted)


@dataclass(frozen=True, slots=True)
class RejectionRule:
    """Highest acceptance; exact only with policies that do not look at a draft when they decide on it."""

    sample_drafts: bool
    source: RandomSource = field(default_factory=CounterSource)
    captures: ClassVar[bool] = False
    captures_wishes: ClassVar[bool] = False

    def begin(self, state: SlotState, loaded: PlanOnDevice, plan: StepPlan, vocab_size: int) -> "RejectionStep":
        view = view_sampling(state, loaded, plan)
        return RejectionStep(view, vocab_size, self.sample_drafts, self.source)


@dataclass(frozen=True, slots=True, eq=False)
class RejectionStep:
    view: SamplingView
    vocab_size: int
    sample_drafts: bool
    source: RandomSource
    shares_noise: ClassVar[bool] = False

    def reading_temperature(self, count: int) -> Tensor:
        return above_zero(self.view.temperature[:count])

    def draw(self, logits: Tensor, offset: int, token_ids: Tensor | None) -> tuple[Tensor, DraftLaw | None]:
        count = self.view.num_decode
        return draft_sample(
            logits, self.view.temperature[:count], self.view.seed[:count], self._anchor[:count], offset, self.source,
            sample=self.sample_drafts, token_ids=token_ids,
        )  # fmt: skip

    def judge(
        self, batch: Batch, logits: Tensor, drafts: Tensor | None, draft_law: DraftLaw | None, shape: VerifyShape
    ) -> Verdict:
        batch, logits = _exact(batch, logits, shape)
        if not len(logits):
            return silent_verdict(batch)
        rows, num_sequences = batch.output_sequence, len(batch.widths)
        drafts = _drafts(drafts, self.view)
        law = self.view.law(batch, logits, drafts)
        target = probabilities(law, self.view.temperature[rows])
        target = pad_outputs(batch, target, self.view.draft_length + 1)
        drafts = _for_all(drafts, num_sequences)
        num_accepted, following = reject(
            drafts, draft_law, target, batch.widths, self.view.seed, self._anchor, self.source
        )
        emitted = torch.cat([drafts, drafts.new_zeros(num_sequences, 1)], dim=1)
        emitted = emitted.scatter(1, num_accepted[:, None], following[:, None])
        return Verdict.of(batch.widths, num_accepted, _any_invalid(batch, law, num_accepted), emitted)

    @property
    def _anchor(self) -> Tensor:
        return self.view.first_position - 1


def silent_verdict(batch: Batch) -> Verdict:
    """Of a step in which nobody emits: prefill chunks only."""
    zeros = torch.zeros_like(batch.widths)
    return Verdict.of(zeros, zeros, zeros, zeros[:, None])


def _exact(batch: Batch, logits: Tensor, shape: VerifyShape) -> tuple[Batch, Tensor]:
    """Without padding, and in fp32."""
    num_sequences, num_outputs = shape.exact
    return batch.exact(num_sequences, num_outputs), logits[:num_outputs].float()


def _drafts(drafts: Tensor | None, view: SamplingView) -> Tensor:
    """[D, d], with d = 0 where nothing was drafted."""
    return view.seed.new_zeros(view.num_decode, 0) if drafts is None else drafts


def above_zero(temperature: Tensor) -> Tensor:
    """To divide by: 1 where greedy."""
    return torch.where(temperature > 0, temperature, 1.0)


def _for_all(values: Tensor, num_sequences: int) -> Tensor:
    """[D, ...] -> [B, ...], zeros for the sequences that do not decode."""
    missing = num_sequences - len(values)
    return torch.cat([values, values.new_zeros(missing, *values.shape[1:])]) if missing else values


def _any_invalid(batch: Batch, law: Tensor, num_accepted: Tensor) -> Tensor:
    """[B] bool: a row that a token was taken from held NaN or infinity, or leaves no token to take."""
    used = batch.output_offset <= num_accepted[batch.output_sequence]
    flags = (invalid_rows(law) & used).to(torch.int64)
    return torch.zeros_like(batch.widths).index_add_(0, batch.output_sequence, flags) > 0
