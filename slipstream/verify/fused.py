"""Stages `verify` and `accept` in Triton: the target's forward over padded rows, and coupled acceptance of its logits.

Both go by device values and shapes alone, so they can be captured. `Target` and `CoupledRule` are the references.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slipstream.cache.pool import KVPool
from slipstream.device.batch import Batch
from slipstream.device.shapes import VerifyShape
from slipstream.device.state import PlanOnDevice, SlotState
from slipstream.device.triton import StepBuffers, TiledBatch
from slipstream.kernels.accept import accept_coupled
from slipstream.kernels.attention import Workspace, paged_attention
from slipstream.kernels.linear import fused_linear
from slipstream.kernels.rope import rope_and_store
from slipstream.models.decoder import Decoder
from slipstream.models.fused import FusedDecoder
from slipstream.ops.noise import gumbel
from slipstream.ops.sample import coupled_targets, filter_logits
from slipstream.plan import StepPlan
from slipstream.verify.accept import Verdict


class FusedTarget:
    """`verify.target.Target` on a GPU. What it returns lies in buffers of its own."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, taps: tuple[int, ...], num_token_ids: int, state: SlotState,
        workspace: Workspace, max_rows: int, max_outputs: int,
    ) -> None:  # fmt: skip
        spec, device, dtype = decoder.spec, pool.keys.device, pool.keys.dtype
        self.pool = pool
        self._forward = FusedDecoder(decoder, fused_linear)
        self._spec, self._state, self._workspace, self._taps = spec, state, workspace, taps
        self._num_token_ids = num_token_ids
        self._norms = [self._forward.head_norms(layer) for layer in range(spec.num_layers)]
        self._logits = torch.empty(max_outputs, spec.vocab_size, dtype=dtype, device=device)
        self._features = torch.empty(max_rows, len(taps), spec.hidden_size, dtype=dtype, device=device)

    def verify(self, batch: Batch, token_ids: Tensor, shape: VerifyShape) -> tuple[Tensor, Tensor | None]:
        assert isinstance(batch, TiledBatch)
        features = self._features[: shape.num_rows]
        taps = {layer: features[:, i] for i, layer in enumerate(self._taps)}

        def attend(layer: int, qkv: Tensor) -> Tensor:
            return self._attend(batch, layer, qkv)

        x = self._forward.forward(token_ids, attend, taps)
        if not shape.decode_only:
            x = x.index_select(0, batch.output_rows)
        logits = self._forward.logits(x, self._logits[: shape.num_outputs])
        return logits[:, : self._num_token_ids], features.flatten(1) if taps else None

    def _attend(self, batch: TiledBatch, layer: int, qkv: Tensor) -> Tensor:
        spec, pages = self._spec, self.pool.by_page[layer]
        cos_sin = self._forward.cos_sin
        rope_and_store(
            qkv,
            batch.positions,
            cos_sin,
            *self._norms[layer],
            spec.rms_norm_eps,
            *pages,
            batch.kv_slots,
            spec.num_heads,
        )
        q = qkv[:, : spec.num_q_dims].view(len(qkv), spec.num_heads, spec.head_dim)
        return paged_attention(
            q, *pages, batch.tiles, self._state.page_table, spec.head_dim**-0.5, spec.window(layer), self._workspace,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class FusedCoupledRule:
    """`CoupledRule` by kernels, over padded rows."""

    sample_drafts: bool
    buffers: StepBuffers
    captures: ClassVar[bool] = True

    def begin(self, state: SlotState, loaded: PlanOnDevice, plan: StepPlan, vocab_size: int) -> "FusedCoupledStep":
        return FusedCoupledStep(state, loaded, vocab_size, self.sample_drafts, self.buffers)


@dataclass(frozen=True, slots=True, eq=False)
class FusedCoupledStep:
    state: SlotState
    loaded: PlanOnDevice
    vocab_size: int
    sample_drafts: bool
    buffers: StepBuffers
    shares_noise: ClassVar[bool] = True

    def reading_temperature(self, count: int) -> Tensor:
        temperature = self.state.temperature[self.loaded.slots[:count]]
        return torch.where(temperature > 0, temperature, 1.0)

    def draw(self, logits: Tensor, offset: int, token_ids: Tensor | None) -> tuple[Tensor, None]:
        """For drafters that draw one token at a time; block drafters have `kernels.draft.draft_chain`."""
        slots = self.loaded.slots[: len(logits)]
        temperature = self.state.temperature[slots]
        if not self.sample_drafts:
            temperature = torch.zeros_like(temperature)
        position = self.state.context[slots] + 1 + offset
        noise = gumbel(self.state.seed[slots], position, self.vocab_size)
        noise = noise if token_ids is None else noise.index_select(1, token_ids)
        scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
        columns = coupled_targets(scaled, temperature, noise[:, : logits.shape[1]])
        return (columns if token_ids is None else token_ids[columns]), None

    def certain(self, token_ids: Tensor) -> None:
        return None

    def judge(
        self, batch: Batch, logits: Tensor, drafts: Tensor | None, draft_prob: Tensor | None, shape: VerifyShape
    ) -> Verdict:
        assert isinstance(batch, TiledBatch)
        result, state = self.buffers.result[: shape.num_sequences], self.state
        if shape.filtered:
            logits = self._filtered(batch, logits)
        accept_coupled(
            logits, self.vocab_size, output_sequence=batch.output_sequence, output_offset=batch.output_offset,
            cu_outputs=batch.cu_outputs, widths=batch.widths, emits=batch.emits, drafts=self.buffers.drafts,
            slots=batch.slots, num_given=batch.num_given, context=state.context, temperature=state.temperature,
            seed=state.seed, result=result, is_filtered=shape.filtered,
        )  # fmt: skip
        return Verdict(result)

    def _filtered(self, batch: TiledBatch, logits: Tensor) -> Tensor:
        slots = batch.slots[batch.output_sequence.clamp(min=0)]
        return filter_logits(logits, self.state.temperature[slots], self.state.top_k[slots], self.state.top_p[slots])
