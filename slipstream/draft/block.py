"""DFlash and DSpark as the engine serves them: one forward over the block, then the serial draw from left to right.

The block's own KV never enters the cache: it is concatenated to the context for the call. Context KV shares page
numbers with the target's and is written by `absorb`, after verification, from the target's features.
"""

import torch
from torch import Tensor

from slipstream.cache.pool import KVPool
from slipstream.draft.base import Draft, DraftView, Sampler
from slipstream.models.drafters import BlockDrafter
from slipstream.ops.attention import block_attention, plan_block
from slipstream.ops.reject import DraftLaw


class BlockDraft:
    def __init__(self, network: BlockDrafter, pool: KVPool, num_token_ids: int) -> None:
        """num_token_ids: ids from this one on are padding of the target's vocabulary and are never drafted."""
        spec = network.spec
        self.network = network
        self.pool = pool
        self.max_draft_tokens = spec.max_draft_tokens
        self.max_position = spec.max_position_embeddings
        self.tap_layers = spec.target_layer_ids
        self.has_confidence_head = network.confidence_head is not None
        self._windows = frozenset(spec.window(layer) for layer in range(spec.num_layers))
        self._scale = spec.head_dim**-0.5
        self._num_token_ids = num_token_ids
        # None: draft ids are target ids
        self._token_ids = None if spec.draft_vocab_size is None else network.draft_token_ids

    def propose(self, view: DraftView, num_drafts: int, sampler: Sampler, signal: str) -> Draft:
        hidden = self._block_hidden(view, num_drafts)
        draft_rows = hidden[:, hidden.shape[1] - num_drafts :]  # fill-in: row 0 predicts nothing
        return self._draw(hidden, self.network.base_logits(draft_rows), view.anchor_ids, sampler, signal)

    def _draw(self, hidden: Tensor, logits: Tensor, anchors: Tensor, sampler: Sampler, signal: str) -> Draft:
        """One token after the other: hidden [D, n, H], base logits [D, d, Vd] (overwritten), anchors [D].

        Where what is drawn from is kept, it is in the dtype of the logits: a bias is rounded to it before the draw.
        """
        logits = logits.float() if sampler.shares_noise else logits
        num_drafts = logits.shape[1]
        draft_rows = hidden[:, hidden.shape[1] - num_drafts :]
        state = self.network.markov_start(hidden, anchors)
        previous, laws = [anchors], list[DraftLaw]()
        for j in range(num_drafts):
            if self.network.markov_head is not None:
                bias, state = self.network.markov_step(state, previous[-1], draft_rows[:, j])
                logits[:, j] += bias
            drawn, law = sampler.draw(self._known(logits[:, j]), j, self._token_ids)
            previous.append(drawn)
            laws += [] if law is None else [law]
        token_ids, before = torch.stack(previous[1:], dim=1), torch.stack(previous[:-1], dim=1)
        whole = DraftLaw.join(laws) if laws else None
        if whole is not None and signal in ("peak", "drawn"):
            return Draft(token_ids, 1 / whole.mass if signal == "peak" else whole.read(token_ids), whole)
        return Draft(token_ids, self._signal(signal, logits, token_ids, draft_rows, before, sampler), whole)

    def absorb(self, features: Tensor, positions: Tensor, kv_slots: Tensor) -> None:
        positions = positions.clamp(max=self.max_position - 1)  # beyond it nothing is drafted
        for layer, (keys, values) in enumerate(self.network.context_kv(features, positions)):
            self.pool.write(layer, kv_slots, keys, values)

    def settle(self, draft: Draft, widths: Tensor, num_accepted: Tensor, teaches: Tensor) -> None:
        pass  # the network learns nothing in service

    def _block_hidden(self, view: DraftView, num_drafts: int) -> Tensor:
        """[D, n, H] of the block [anchor, mask, ...]."""
        num_rows = self.network.spec.rows(num_drafts)
        context, anchors = view.context, view.anchor_ids
        steps = torch.arange(num_rows, device=context.device)
        positions = (context[:, None] + steps).clamp(max=self.max_position - 1)
        masks = anchors.new_full((len(anchors), num_rows - 1), self.network.spec.mask_token_id)
        embeds = self.network.embed(torch.cat([anchors[:, None], masks], dim=1))
        plan = plan_block(
            context, view.page_table, positions, view.max_context, self.pool.page_size, self._windows, embeds.dtype
        )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            window = self.network.spec.window(layer)
            return block_attention(q, k, v, *self.pool.by_page[layer], plan, self._scale, window)

        return self.network.hidden(embeds, positions, attend)

    def _known(self, logits: Tensor) -> Tensor:
        return logits if self._token_ids is not None else logits[..., : self._num_token_ids]

    def _signal(
        self, name: str, logits: Tensor, drawn: Tensor, hidden: Tensor, previous: Tensor, sampler: Sampler
    ) -> Tensor:
        """Raw confidence [D, d] as a probability."""
        if name == "none":
            return torch.zeros_like(drawn, dtype=torch.float32)
        if name == "head":
            return self.network.confidence(hidden, previous).sigmoid()
        scaled = self._known(logits) / sampler.reading_temperature(len(drawn))[:, None, None]
        columns = drawn if self._token_ids is None else torch.searchsorted(self._token_ids, drawn)
        best = scaled.amax(-1) if name == "peak" else scaled.gather(-1, columns[..., None]).squeeze(-1)
        return (best - scaled.logsumexp(-1)).exp()
