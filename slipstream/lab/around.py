"""A drafter inside a drafter: what measurements put around the one that serves, see `LLM(adapt=...)`.

Everything goes on to the inner one; a measurement changes what it came for. Nothing of this is ever part of an engine
that a bench or a trace did not ask for.
"""

from torch import Tensor

from slipstream.draft.base import Draft, Drafter, DraftView, Sampler


class AroundDrafter:
    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.max_draft_tokens = inner.max_draft_tokens
        self.max_position = inner.max_position
        self.tap_layers = inner.tap_layers
        self.has_confidence_head = inner.has_confidence_head

    def propose(self, view: DraftView, num_drafts: int, sampler: Sampler, signal: str) -> Draft:
        return self.inner.propose(view, num_drafts, sampler, signal)

    def absorb(self, features: Tensor, positions: Tensor, kv_slots: Tensor) -> None:
        self.inner.absorb(features, positions, kv_slots)

    def settle(self, draft: Draft, widths: Tensor, num_accepted: Tensor, teaches: Tensor) -> None:
        self.inner.settle(draft, widths, num_accepted, teaches)
