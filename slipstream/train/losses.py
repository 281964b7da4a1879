"""The training losses of block drafters, for both row layouts: cross entropy, L1 to the teacher, confidence.

    CE    = sum w (-log q[label])         / sum w
    L1    = sum w sum_v |q_v - t_v|       / sum w    the full L1, twice the total variation
    conf  = sum w BCE(sigmoid(logit), c)  / sum w    c = 1 - L1 / 2 of the row, detached: acceptance at T = 1

q is the drafter's softmax, t the target's, both at T = 1. With a reduced draft vocabulary t is the target's *full*
softmax at the kept tokens: what it gives to others counts as missed, so sum_v min(q, t) stays the acceptance
probability; a label outside the vocabulary has no CE term. Row weights: w_k = exp(-j / gamma) times the row mask, j the
number of drafts before the row's own. Pure functions of tensors. Called by the trainer. Formulas: DSpark, arXiv
2607.05147; DFlash, arXiv 2602.06036.

Shapes: M rows, V target vocabulary, Vd draft vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.train.options import LossOptions

Layout = Literal["anchor_first", "fill_in"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLosses:
    """Each term of every row, unweighted. Filled by `row_losses`."""

    ce: Tensor  # [M] fp32, 0 where the label is outside the draft vocabulary
    l1: Tensor  # [M] fp32
    confidence: Tensor | None  # [M] fp32
    overlap: Tensor  # [M] fp32, sum_v min(q, t): acceptance probability at T = 1, detached


def label_shift(layout: Layout) -> int:
    """Row k of a block at anchor p predicts the token at p + k + shift."""
    return 1 if layout == "anchor_first" else 0


def decay(offsets: Tensor, layout: Layout, gamma: float) -> Tensor:
    """Row weights [...] fp32 by place k in the block: exp(-k / gamma); fill-in: exp(-(k - 1) / gamma), 0 for row 0."""
    drafts_before = offsets.float() - (1 - label_shift(layout))
    return torch.where(drafts_before >= 0, torch.exp(-drafts_before / gamma), 0.0)


def row_mask(scored: Tensor, starts: Tensor, anchors: Tensor, labels: Tensor, cumulative: bool) -> Tensor:
    """Which rows count: their label lies in the anchor's document and in an answer; cumulative: so do all before it.

    scored [B, T] bool; starts [B, T], first column of each token's document; anchors, labels [B, Q] columns, labels may
    lie beyond the row's end -> [B, Q] bool. A fill-in row 0, whose label is the anchor itself, is masked out.
    """
    inside = labels < scored.shape[1]
    safe = labels.clamp(max=scored.shape[1] - 1)
    same_document = starts.gather(1, safe) == starts.gather(1, anchors)
    mask = inside & same_document & (labels > anchors)
    if not cumulative:
        return mask & scored.gather(1, safe)
    count = scored.long().cumsum(dim=1)
    return mask & (count.gather(1, safe) - count.gather(1, anchors) == labels - anchors)


def row_losses(logits: Tensor, teacher: Tensor, labels: Tensor, confidence: Tensor | None = None) -> RowLosses:
    """All terms of every row.

    logits [M, Vd], Markov bias included; teacher [M, Vd] probabilities of the kept tokens (their sum may be below 1);
    labels [M] draft ids, -1 outside the draft vocabulary; confidence [M] logits.
    """
    log_q = F.log_softmax(logits.float(), dim=-1)
    t = teacher.float()
    missed = 1.0 - t.sum(dim=-1)
    l1 = (log_q.exp() - t).abs().sum(dim=-1) + missed.clamp(min=0.0)
    overlap = (1.0 - 0.5 * l1.detach()).clamp(0.0, 1.0)
    label_log_q = log_q.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return RowLosses(
        ce=torch.where(labels >= 0, -label_log_q, 0.0),
        l1=l1,
        confidence=None
        if confidence is None
        else F.binary_cross_entropy_with_logits(confidence.float(), overlap, reduction="none"),
        overlap=overlap,
    )


def total_loss(
    rows: RowLosses, weights: Tensor, options: LossOptions, norm: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted mean of every term and their sum: weights [M] -> scalar, and the terms by name, detached.

    norm: the sum of weights to divide by, where these rows are a share of a larger batch (the shares then add up).
    """
    norm = (weights.sum() if norm is None else norm).clamp(min=1e-6)
    terms = {"ce": (rows.ce * weights).sum() / norm, "l1": (rows.l1 * weights).sum() / norm}
    loss = options.ce * terms["ce"] + options.l1 * terms["l1"]
    if rows.confidence is not None:
        terms["confidence"] = (rows.confidence * weights).sum() / norm
        loss = loss + options.confidence * terms["confidence"]
    return loss, {name: term.detach() for name, term in terms.items()}


def fused_rows(
    base: Tensor, bias: Tensor | None, table: Tensor, index: Tensor, labels: Tensor, confidence: Tensor | None
) -> RowLosses:
    """`row_losses` on the parts that the trainer has; compiled, it stores no [M, Vd] in fp32.

    base [M, Vd] and bias [M, Vd] | None in the drafter's dtype, added in fp32; table [tokens, Vd] teacher probabilities
    and index [M] its rows.
    """
    logits = base.float() if bias is None else base.float() + bias.float()
    return row_losses(logits, table[index], labels, confidence)
