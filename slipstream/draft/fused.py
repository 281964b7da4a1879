"""DFlash and DSpark on a GPU: the block's forward in fused kernels, and one launch for each draft drawn.

By device values and shapes alone, so that a draft can be captured. What drafts were drawn from, where rejection asks for
it, is left in buffers of the engine. `draft.block.BlockDraft` is the reference, and what a Markov head with more than a
table takes for its serial draw.
"""

from dataclasses import replace

from torch import Tensor

from slipstream.cache.pool import KVPool
from slipstream.device.state import SlotState
from slipstream.device.triton import StepBuffers
from slipstream.draft.base import Draft, DraftView, Sampler
from slipstream.draft.block import BlockDraft
from slipstream.kernels.attention import Tiles, Workspace, choose_splits
from slipstream.kernels.batch import draft_inputs
from slipstream.kernels.draft import ConfidenceHead, draft_chain, draft_workspace
from slipstream.kernels.linear import FUSED
from slipstream.kernels.own_attention import block_attention
from slipstream.kernels.reject import KeptLaw
from slipstream.kernels.rope import store_context
from slipstream.models.drafters import BlockDrafter
from slipstream.models.fused import FusedDrafter


class FusedBlockDraft(BlockDraft):
    def __init__(
        self, network: BlockDrafter, pool: KVPool, num_token_ids: int, state: SlotState, workspace: Workspace,
        buffers: StepBuffers, law: KeptLaw | None = None,
    ) -> None:  # fmt: skip
        """law: for what drafts are drawn from, if rejection is to judge drawn drafts."""
        super().__init__(network, pool, num_token_ids)
        self._forward = FusedDrafter(network, FUSED)
        self._state, self._workspace, self._buffers, self._law = state, workspace, buffers, law
        markov = network.markov_head
        self._chains = markov is None or markov.kind == "vanilla"
        self._markov = (markov.markov_w1.weight, markov.markov_w2.weight) if markov is not None else (None, None)
        self._draws = draft_workspace(state.padding_slot, network.spec.max_draft_tokens, pool.keys.device)
        self._all_positions = self.max_position >= state.max_len

    def propose(self, view: DraftView, num_drafts: int, sampler: Sampler, signal: str) -> Draft:
        count, num_rows = len(view.slots), self.network.spec.rows(num_drafts)
        input_ids, anchors, blocks = draft_inputs(
            view.slots, self._state.context, self._state.token_ids, self.network.spec.mask_token_id, num_rows
        )
        flat = self._hidden(blocks, input_ids)
        hidden = flat.view(count, num_rows, -1)
        draft_rows = hidden[:, num_rows - num_drafts :]  # fill-in: row 0 predicts nothing
        logits = self._forward.base_logits(draft_rows.reshape(count * num_drafts, -1)).view(count, num_drafts, -1)
        if not self._chains:
            return self._held(self._draw(hidden, logits, anchors, sampler, signal))
        return self._chain(view.slots, draft_rows, logits, anchors, sampler, signal)

    def absorb(self, features: Tensor, positions: Tensor, kv_slots: Tensor) -> None:
        if not self._all_positions:
            positions = positions.clamp(max=self.max_position - 1)  # beyond it nothing is drafted
        forward = self._forward
        store_context(
            forward.context_kv(features), positions, forward.cos_sin, forward.k_norms, forward.eps, self.pool.keys,
            self.pool.values, kv_slots,
        )  # fmt: skip

    def _hidden(self, blocks: Tensor, input_ids: Tensor) -> Tensor:
        """blocks [D, 4] and input_ids [D, n], as `draft_inputs` makes them -> [D * n, H]."""
        spec, (count, num_rows) = self.network.spec, input_ids.shape
        tiles = Tiles(blocks, num_rows, choose_splits(count, spec.num_kv_heads, self._state.max_len))
        forward = self._forward

        def attend(layer: int, qkv: Tensor) -> Tensor:
            return block_attention(
                qkv, *self.pool.by_page[layer], tiles, self._state.page_table, forward.cos_sin,
                *forward.head_norms(layer), forward.eps, self._scale, spec.window(layer), self._workspace,
            )  # fmt: skip

        return forward.hidden(input_ids.flatten(), attend)

    def _held(self, draft: Draft) -> Draft:
        """With its law in the buffers, where acceptance looks: of a captured stage nothing else stays."""
        if self._law is not None and draft.law is not None:
            self._law.hold(draft.law)
        return replace(draft, law=None)

    def _chain(
        self, slots: Tensor, draft_rows: Tensor, logits: Tensor, anchors: Tensor, sampler: Sampler, signal: str
    ) -> Draft:
        count, num_drafts = logits.shape[:2]
        state, buffers = self._state, self._buffers
        drafts, previous = buffers.drafts[:count, :num_drafts], buffers.previous[:count, :num_drafts]
        probability = buffers.signal_of(count, num_drafts)
        w1, w2 = self._markov
        head: ConfidenceHead | None = None
        if signal == "head":
            assert self.network.confidence_head is not None
            proj = self.network.confidence_head.proj
            head = ConfidenceHead(draft_rows, proj.weight, proj.bias, self.network.spec.confidence_with_markov)
        draft_chain(
            logits, w1, w2, anchors=anchors, token_ids=self._token_ids, num_columns=self._num_columns,
            slots=slots, context=state.context, temperature=state.temperature, seed=state.seed,
            sample=sampler.sample_drafts, signal=signal, drafts=drafts, prob=probability, previous=previous,
            workspace=self._draws, head=head, law=self._law,
        )  # fmt: skip
        return Draft(drafts, probability, None)

    @property
    def _num_columns(self) -> int:
        """Draft ids from here on are padding."""
        return self._num_token_ids if self._token_ids is None else len(self._token_ids)
