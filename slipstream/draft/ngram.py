"""The n-gram drafter (`--draft ngram`): no weights, drafts are what followed the same tokens earlier in the sequence.

It reads the token history in slot state and nothing else. Its confidence is the share of such drafts that were accepted
so far, by the length of the match and the position of the draft, for greedy and for sampled requests: a table on the
device that `settle` teaches after each step. Drafts are never drawn at random, so greedy and sampled requests get the same
ones, and no confidence can bias what rejection emits. Letters in shapes: D sequences, d drafts, S positions, M match
lengths.
"""

import torch
from torch import Tensor

from slipstream.draft.base import Draft, DraftView, Sampler
from slipstream.ops.lookup import lookup

MAX_DRAFTS = 16
# Tokens of the suffix that are compared. Tokens per step over greedy answers of SmolLM2 to five prompt sets, S = 7: 1.982
# with 1, 2.122 with 2, 2.156 with 4, 2.164 with 8, 2.169 with 16. Beyond 4 it is the confidence that gains: a long match
# is mostly a loop (bench/results/ngram-match.json, by bench/ngram.py; the priors below are from there too).
MAX_MATCH = 8
DECAY = 0.999  # per step: what was learned fades over about a thousand steps
PRIOR_WEIGHT = 8.0  # drafts that the prior of an entry counts for, for good
# Share accepted before anything is learned, by match length: of the first draft, and of later ones.
PRIOR_FIRST = (0.01, 0.25, 0.5, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
PRIOR_LATER = (0.1, 0.7, 0.7, 0.8, 0.8, 0.85, 0.85, 0.9, 0.95)


class NGramDraft:
    max_draft_tokens = MAX_DRAFTS
    max_position = 1 << 30  # none of its own
    tap_layers: tuple[int, ...] = ()
    has_confidence_head = True  # running acceptance is an estimate of acceptance, as a head is, and the only one

    def __init__(self, device: torch.device) -> None:
        self._accepted = _RunningAcceptance(device)

    def propose(self, view: DraftView, num_drafts: int, sampler: Sampler, signal: str) -> Draft:
        """`signal` is head, or none: then nothing is learned from this block either."""
        token_ids, length = lookup(view.history, view.slots, view.context, view.max_context, num_drafts, MAX_MATCH)
        if signal == "none":
            return Draft(token_ids, torch.zeros_like(token_ids, dtype=torch.float32), None)
        entry = view.sampled.long() * (MAX_MATCH + 1) + length
        return Draft(token_ids, self._accepted.share(entry, num_drafts), None, evidence=entry)

    def absorb(self, features: Tensor, positions: Tensor, kv_slots: Tensor) -> None:
        raise AssertionError("a drafter without taps absorbs nothing")

    def settle(self, draft: Draft, widths: Tensor, num_accepted: Tensor, teaches: Tensor) -> None:
        if draft.evidence is not None:
            self._accepted.teach(draft.evidence, draft.token_ids.shape[1], widths, num_accepted, teaches)


class _RunningAcceptance:
    """Counts by entry (class and match length) and position of drafts that were tried and that were accepted."""

    def __init__(self, device: torch.device) -> None:
        first, later = torch.tensor(PRIOR_FIRST), torch.tensor(PRIOR_LATER)
        share = torch.cat([first[:, None], later[:, None].expand(-1, MAX_DRAFTS - 1)], dim=1).repeat(2, 1)
        self._prior = (torch.stack([torch.ones_like(share), share], dim=-1) * PRIOR_WEIGHT).to(device)
        self._counts = torch.zeros_like(self._prior)  # [2 * (M + 1), S, 2] tried, accepted

    def share(self, entry: Tensor, num_drafts: int) -> Tensor:
        """entry [D] -> [D, d] P(draft j accepted | drafts before j accepted)."""
        tried, accepted = (self._counts + self._prior)[entry, :num_drafts].unbind(-1)
        return accepted / tried

    def teach(self, entry: Tensor, num_drafts: int, widths: Tensor, num_accepted: Tensor, teaches: Tensor) -> None:
        """One step. A draft was tried only if it was verified and all before it were accepted: never a censored one."""
        position = torch.arange(num_drafts, device=entry.device)
        tried = (position < widths[:, None]) & (position <= num_accepted[:, None]) & teaches[:, None]
        accepted = tried & (position < num_accepted[:, None])
        self._counts.mul_(DECAY)
        self._counts[:, :num_drafts].index_add_(0, entry, torch.stack([tried, accepted], dim=-1).float())
