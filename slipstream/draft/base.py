"""What a drafter is to the engine: it proposes blocks and absorbs the target's features. Stage `draft`.

Knows nothing of verification. `BlockDraft` (draft/block.py) serves DFlash and DSpark, `NGramDraft` (draft/ngram.py)
looks drafts up; tests script their own. Letters in shapes: N slots, L positions, D decoding sequences, d drafts,
V target vocabulary, R rows of the target's batch.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slipstream.device.state import SlotState
from slipstream.ops.reject import DraftLaw


@dataclass(frozen=True, slots=True, eq=False)
class DraftView:
    """The decoding sequences of this step. What is gathered from slot state is gathered when it is asked for."""

    slots: Tensor  # [D] int64
    state: SlotState
    max_context: int  # upper bound of context
    step: int

    @property
    def context(self) -> Tensor:
        """[D] int64 context length s = position of the anchor."""
        return self.state.context[self.slots]

    @property
    def anchor_ids(self) -> Tensor:
        """[D] int64."""
        return self.state.token_ids[self.slots, self.context].long()

    @property
    def page_table(self) -> Tensor:
        """[D, P] int64."""
        return self.state.page_table[self.slots]

    @property
    def sampled(self) -> Tensor:
        """[D] bool: temperature above 0."""
        return self.state.temperature[self.slots] > 0

    @property
    def history(self) -> Tensor:
        """[N + 1, L + 1] int32, slot state's own, not a copy: row slots[i] up to column context[i] is known."""
        return self.state.token_ids


class Sampler(Protocol):
    """How the acceptance rule wants the drafts of one step drawn."""

    @property
    def sample_drafts(self) -> bool:
        """False: sampled requests get the most likely drafts."""

    @property
    def shares_noise(self) -> bool:
        """A draft is the argmax of logits plus the noise of its position, and no distribution is kept: `ops.noise`."""

    def reading_temperature(self, count: int) -> Tensor:
        """[count] fp32 at which a draft's probability is read; 1 for greedy sequences."""

    def draw(self, logits: Tensor, offset: int, token_ids: Tensor | None) -> tuple[Tensor, DraftLaw | None]:
        """Draft number `offset` (0-based) of every sequence, from logits [D, Vd] of any dtype. They may be kept: nobody
        writes to them before the step ends.

        token_ids [Vd] are the target ids, ascending, that the columns stand for; None for the identity. Returns target
        ids [D] and, if the rule needs it, what they were drawn from, with S = 1: see `DraftLaw.join`.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    token_ids: Tensor  # [D, d] int64, target ids
    signal: Tensor  # [D, d] fp32: raw confidence, a probability
    law: DraftLaw | None  # what drafts were drawn from; None where nobody asks, all are certain, or it lies in buffers
    evidence: Tensor | None = None  # the drafter's own: what its `settle` needs of this block again, if it learns


class Drafter(Protocol):
    max_draft_tokens: int  # S at most
    max_position: int  # a block must end before this position
    tap_layers: tuple[int, ...]  # target layers whose features `absorb` reads
    has_confidence_head: bool

    def propose(self, view: DraftView, num_drafts: int, sampler: Sampler, signal: str) -> Draft:
        """A block of `num_drafts` (1..max_draft_tokens) drafts per sequence; `signal` is head, peak, drawn or none."""

    def absorb(self, features: Tensor, positions: Tensor, kv_slots: Tensor) -> None:
        """Features [R, K * H] at positions [R] become draft context at kv_slots [R].

        Rows that were rejected are among them: nobody reads beyond the context, and who gets there writes anew.
        """

    def settle(self, draft: Draft, widths: Tensor, num_accepted: Tensor, teaches: Tensor) -> None:
        """What became of a draft with evidence: widths [D] drafts were verified, num_accepted [D] of them stand.

        teaches [D] bool: False where nothing may be learned from a sequence, such as one with constrained outputs.
        Called after stage `apply`, outside any graph; never for a draft without evidence.
        """
