"""The training losses of block drafters, for both row layouts: terms, the mask and weights of rows, normalisers.

    CE    = sum w (-log q[label])                 / norm    label: the data's token, or the teacher's most probable one
    L1    = sum w sum_v |q_v - t_v|               / norm    the full L1, twice the total variation
    KL    = sum w sum_v t_v log(t_v / (m q_v))    / norm    m = sum_v t_v, 1 with a full vocabulary
    conf  = sum w BCE(sigmoid(logit), c)          / norm    c = 1 - L1 / 2 of the row, detached: acceptance at T = 1

q is the drafter's softmax, t the target's, both at T = 1. With a reduced draft vocabulary t is the target's *full*
softmax at the kept tokens: what it gives to others counts as missed, so sum_v min(q, t) stays the acceptance
probability; a label outside the vocabulary has no CE term, and KL is that of the kept tokens times their mass m, which
has the gradient of a CE whose label is drawn from the teacher. norm: sum w, or the number of rows that count.

w is the row mask times exp(-j / gamma), j the number of drafts before the row's own, or times D-PACE's weight: how fast
the expected accepted length rises with the row's own label. Pure functions of tensors. Called by the trainer. Formulas:
DSpark, arXiv 2607.05147; DFlash, arXiv 2602.06036.

Shapes: M rows, V target vocabulary, Vd draft vocabulary, B packed rows of Q block rows each.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.train.options import LossOptions

Layout = Literal["anchor_first", "fill_in"]
TINY = 1e-30  # keeps the logarithm of a zero probability finite; multiplied by that zero it is gone


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLosses:
    """Each term of every row, unweighted. Filled by `row_losses`."""

    ce: Tensor  # [M] fp32, 0 where the label is outside the draft vocabulary
    l1: Tensor  # [M] fp32
    kl: Tensor | None  # [M] fp32; None: not asked for
    confidence: Tensor | None  # [M] fp32
    overlap: Tensor  # [M] fp32, sum_v min(q, t): acceptance probability at T = 1, detached
    label_prob: Tensor  # [M] fp32, q[label], 0 where the label is outside the draft vocabulary, detached


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


def dpace(label_prob: Tensor, mask: Tensor, offsets: Tensor, alpha: float, block_size: int) -> Tensor:
    """D-PACE row weights [B, Q] fp32: with s = (1 - alpha) q[label] + alpha, the sum over the block's rows from this
    one on of the product of s from the block's first row to that one.

    label_prob [B, Q], detached; mask [B, Q] bool, rows outside it neither count nor hold others back; offsets [Q].
    """
    prefix = torch.where(mask, (1 - alpha) * label_prob + alpha, 1.0)
    for k in range(1, block_size):
        prefix = torch.where(offsets == k, prefix * prefix.roll(1, dims=1), prefix)
    weights = prefix * mask
    inside = offsets.roll(-1) == offsets + 1  # the next row belongs to the same block
    for k in range(block_size - 2, -1, -1):
        weights = torch.where((offsets == k) & inside, weights + weights.roll(-1, dims=1), weights)
    return weights * mask


def normaliser(weights: Tensor, mask: Tensor, options: LossOptions) -> Tensor:
    """What sums over rows are divided by, a scalar: weights [B, Q], 0 where mask [B, Q] is False."""
    return weights.sum() if options.normalise == "weights" else mask.sum().to(weights.dtype)


def row_losses(
    logits: Tensor, teacher: Tensor, labels: Tensor, confidence: Tensor | None = None, *, with_kl: bool = False
) -> RowLosses:
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
        kl=_kl(log_q, t) if with_kl else None,
        confidence=None
        if confidence is None
        else F.binary_cross_entropy_with_logits(confidence.float(), overlap, reduction="none"),
        overlap=overlap,
        label_prob=torch.where(labels >= 0, label_log_q.detach().exp(), 0.0),
    )


def _kl(log_q: Tensor, teacher: Tensor) -> Tensor:
    """[M, Vd] both -> [M]; the teacher's sums may be below 1, and by rounding a little above."""
    mass = teacher.sum(dim=-1)
    own = (teacher * (teacher.clamp(min=TINY).log() - log_q)).sum(dim=-1)
    return own - mass * mass.clamp(min=TINY).log()


def total_loss(
    rows: RowLosses, weights: Tensor, options: LossOptions, norm: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted mean of every term and their sum: weights [M] -> scalar, and the terms by name, detached.

    norm: the `normaliser` of the whole batch, of which these rows may be a share (the shares then add up). A term of
    weight 0 is measured and has no gradient.
    """
    found = {"ce": rows.ce, "l1": rows.l1, "kl": rows.kl, "confidence": rows.confidence}
    norm = norm.clamp(min=1e-6)
    terms = {name: (term * weights).sum() / norm for name, term in found.items() if term is not None}
    scale = {"ce": options.ce, "l1": options.full_l1, "kl": options.kl, "confidence": options.confidence}
    loss = sum((scale[name] * term for name, term in terms.items() if scale[name]), torch.zeros_like(norm))
    return loss, {name: term.detach() for name, term in terms.items()}


def fused_rows(
    base: Tensor, bias: Tensor | None, table: Tensor, index: Tensor, labels: Tensor, confidence: Tensor | None,
    *, with_kl: bool = False,
) -> RowLosses:  # fmt: skip
    """`row_losses` on the parts that the trainer has; compiled, it stores no [M, Vd] in fp32.

    base [M, Vd] and bias [M, Vd] | None in the drafter's dtype, added in fp32; table [tokens, Vd] teacher probabilities
    and index [M] its rows.
    """
    logits = base.float() if bias is None else base.float() + bias.float()
    return row_losses(logits, table[index], labels, confidence, with_kl=with_kl)
