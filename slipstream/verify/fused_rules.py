"""Stage `accept` in Triton, under either rule, over padded rows. `CoupledRule` and `RejectionRule` are the references.

Both go by device values and shapes alone, so they can be captured: coupled acceptance with filters, penalties and edits,
rejection without them, which finds what drafts were drawn from in buffers of the engine; its filters are torch's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from slipstream.device.batch import Batch
from slipstream.device.shapes import VerifyShape
from slipstream.device.state import PlanOnDevice, SlotState
from slipstream.device.triton import StepBuffers, TiledBatch
from slipstream.kernels.accept import accept_coupled, deterministic_tile_size
from slipstream.kernels.filters import cut_rows
from slipstream.kernels.reject import KeptLaw, accept_rejection
from slipstream.kernels.shape_logits import Shaper, shape_logits
from slipstream.ops.noise import CounterSource, gumbel
from slipstream.ops.reject import DraftLaw, draft_sample
from slipstream.ops.sample import coupled_targets
from slipstream.plan import StepPlan
from slipstream.verify.accept import Asked, Verdict, above_zero, filtered


@dataclass(frozen=True, slots=True, eq=False)
class FusedCoupledRule:
    """`CoupledRule` by kernels, over padded rows. deterministic: near ties fall the same way whatever shares the step."""

    sample_drafts: bool
    buffers: StepBuffers
    shaper: Shaper
    deterministic: bool = False
    captures: ClassVar[bool] = True
    captures_wishes: ClassVar[bool] = True

    def begin(self, state: SlotState, loaded: PlanOnDevice, plan: StepPlan, vocab_size: int) -> "FusedCoupledStep":
        return FusedCoupledStep(
            state, loaded, vocab_size, self.sample_drafts, self.buffers, self.shaper, self.deterministic
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class FusedCoupledStep:
    state: SlotState
    loaded: PlanOnDevice
    vocab_size: int
    sample_drafts: bool
    buffers: StepBuffers
    shaper: Shaper
    deterministic: bool
    shares_noise: ClassVar[bool] = True

    def reading_temperature(self, count: int) -> Tensor:
        return above_zero(self.state.temperature[self.loaded.slots[:count]])

    def draw(self, logits: Tensor, offset: int, token_ids: Tensor | None) -> tuple[Tensor, None]:
        """For drafters that draw one token at a time; block drafters have `kernels.draft.draft_chain`."""
        slots = self.loaded.slots[: len(logits)]
        temperature = self.state.temperature[slots]
        if not self.sample_drafts:
            temperature = torch.zeros_like(temperature)
        position = self.state.context[slots] + 1 + offset
        noise = gumbel(self.state.seed[slots], position, self.vocab_size)
        noise = noise if token_ids is None else noise.index_select(1, token_ids)
        scaled = logits / above_zero(temperature)[:, None]
        columns = coupled_targets(scaled, temperature, noise[:, : logits.shape[1]])
        return (columns if token_ids is None else token_ids[columns]), None

    def judge(
        self, batch: Batch, logits: Tensor, drafts: Tensor | None, draft_law: DraftLaw | None, shape: VerifyShape
    ) -> Verdict:
        """Filters read a row several times: with them, penalties and edits are applied in a copy."""
        assert isinstance(batch, TiledBatch)
        shaper, cut, state = self.shaper if shape.shaped and not shape.filtered else None, None, self.state
        if shape.filtered:
            logits = _shaped(self.shaper, batch, logits, state, self.buffers, self.vocab_size, shape)
            cut = cut_rows(
                logits, self.vocab_size, output_sequence=batch.output_sequence, slots=batch.slots,
                temperature=state.temperature, top_k=state.top_k, top_p=state.top_p, min_p=state.min_p,
            )  # fmt: skip
        block = deterministic_tile_size(self.vocab_size) if self.deterministic else None
        accept = partial(accept_coupled, block=block, shaper=shaper, cut=cut)
        return _judge(accept, batch, logits, self.vocab_size, self.state, self.buffers, shape)


@dataclass(frozen=True, slots=True, eq=False)
class FusedRejectionRule:
    """`RejectionRule` by kernels, over padded rows: neither p nor q is laid out.

    law: where the drafter leaves what its drafts were drawn from. None: drafts are certain, or (`draws`) of a drafter
    of the caller's own, which brings new tensors in every step, and then nothing is recorded.
    """

    sample_drafts: bool
    buffers: StepBuffers
    shaper: Shaper
    law: KeptLaw | None
    draws: bool = False
    captures_wishes: ClassVar[bool] = False

    @property
    def captures(self) -> bool:
        return self.law is not None or not self.draws

    def begin(self, state: SlotState, loaded: PlanOnDevice, plan: StepPlan, vocab_size: int) -> "FusedRejectionStep":
        return FusedRejectionStep(
            state, loaded, vocab_size, self.sample_drafts, self.buffers, self.shaper, Asked.of(plan), self.law
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class FusedRejectionStep:
    state: SlotState
    loaded: PlanOnDevice
    vocab_size: int
    sample_drafts: bool
    buffers: StepBuffers
    shaper: Shaper
    asked: Asked
    law: KeptLaw | None
    shares_noise: ClassVar[bool] = False

    def reading_temperature(self, count: int) -> Tensor:
        return above_zero(self.state.temperature[self.loaded.slots[:count]])

    def draw(self, logits: Tensor, offset: int, token_ids: Tensor | None) -> tuple[Tensor, DraftLaw | None]:
        """For drafters that draw one token at a time; block drafters have `kernels.draft.draft_chain`."""
        state, slots = self.state, self.loaded.slots[: len(logits)]
        return draft_sample(
            logits, state.temperature[slots], state.seed[slots], state.context[slots], offset, CounterSource(),
            sample=self.sample_drafts, token_ids=token_ids,
        )  # fmt: skip

    def judge(
        self, batch: Batch, logits: Tensor, drafts: Tensor | None, draft_law: DraftLaw | None, shape: VerifyShape
    ) -> Verdict:
        assert isinstance(batch, TiledBatch)
        changes = shape.filtered or shape.shaped
        if changes:
            logits = _shaped(self.shaper, batch, logits, self.state, self.buffers, self.vocab_size, shape)
            logits = filtered(logits, self.state, self.asked, batch.output_slots)
        law = self.law
        if draft_law is not None and self.sample_drafts:  # what was taken is certain
            law = KeptLaw.of(draft_law, self.vocab_size)
        accept = partial(accept_rejection, law=law, is_filtered=changes)
        return _judge(accept, batch, logits, self.vocab_size, self.state, self.buffers, shape)


def _judge(
    accept: Callable[..., None], batch: TiledBatch, logits: Tensor, vocab_size: int, state: SlotState,
    buffers: StepBuffers, shape: VerifyShape,
) -> Verdict:  # fmt: skip
    """The verdict of an acceptance kernel; drafts are where they were held, not an argument."""
    result = buffers.result[: shape.num_sequences]
    accept(
        logits, vocab_size, output_sequence=batch.output_sequence, output_offset=batch.output_offset,
        cu_outputs=batch.cu_outputs, widths=batch.widths, emits=batch.emits, drafts=buffers.drafts, slots=batch.slots,
        num_given=batch.num_given, context=state.context, temperature=state.temperature, seed=state.seed, result=result,
    )  # fmt: skip
    return Verdict(result)


def _shaped(
    shaper: Shaper, batch: TiledBatch, logits: Tensor, state: SlotState, buffers: StepBuffers, vocab_size: int,
    shape: VerifyShape,
) -> Tensor:  # fmt: skip
    """logits [O, V] after penalties and edits, if somebody asks for any; of padding rows anything."""
    if not shape.shaped:
        return logits
    return shape_logits(
        logits, vocab_size, shaper, output_sequence=batch.output_sequence, output_offset=batch.output_offset,
        slots=batch.slots, num_given=batch.num_given, emits=batch.emits, context=state.context, drafts=buffers.drafts,
    )  # fmt: skip
