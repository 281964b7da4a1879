"""Laws of drafts as dense probabilities and back: what faults are made of, and what tests compare with."""

import torch
from torch import Tensor

from slipstream.ops.reject import DraftLaw


def law_from(prob: Tensor) -> DraftLaw:
    """That gives prob [B, S, V] for q, whatever it adds up to."""
    ones = torch.ones(prob.shape[:2], dtype=prob.dtype, device=prob.device)
    drawn = torch.ones(len(prob), dtype=torch.bool, device=prob.device)
    return DraftLaw(prob.log(), 0 * ones, ones, torch.ones(len(prob), dtype=prob.dtype, device=prob.device), drawn)


def dense(law: DraftLaw, drafts: Tensor, vocab_size: int) -> Tensor:
    """q of drafts [B, S] as [B, S, V]."""
    places = [torch.full_like(drafts[:, 0], j) for j in range(drafts.shape[1])]
    rows = [law.at(place, drafts, vocab_size) for place in places]
    return torch.stack(rows, dim=1) if rows else law.peak.new_zeros(len(drafts), 0, vocab_size)


def only_of(law: DraftLaw, rows: Tensor) -> DraftLaw:
    """Of some of its sequences."""
    return DraftLaw(
        law.logits[rows], law.peak[rows], law.mass[rows], law.divisor[rows], law.is_drawn[rows], law.token_ids
    )
