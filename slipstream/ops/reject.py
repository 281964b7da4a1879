"""Acceptance: how many drafts stand, and which token follows them.

`count_accepted_coupled` compares drafts with the tokens the target would have emitted itself. `reject` is
speculative rejection sampling: accept draft x with probability min(1, p(x) / q(x)), on rejection draw from the
residual max(p - q, 0), after a full pass draw from p. It is exact only if q is the very distribution that the draft
was drawn from, which is why `draft_sample` returns both at once, and only if every draw has a name of its own:
(seed, anchor, offset, purpose). q of a block is kept as the logits that were drawn from, in their own dtype, with what
normalises them: all of q is made for one draft of a sequence only, the one that is refused. Both look at the first
`width` drafts of a sequence only. Row-wise, no host reads. Called by verify; knows nothing of how drafts or widths were
chosen.

Shapes: B sequences, S drafts each, V token ids, Vd columns of the drafter: V, or those of a reduced vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.ops.noise import Purpose, RandomSource


@dataclass(frozen=True, slots=True, eq=False)
class DraftLaw:
    """What drafts were drawn from: softmax(logits / divisor); or, where they were taken, the draft itself for certain.

    The logits are those that the draw saw, rounded as they are here, and peak and mass are the draw's own.
    """

    logits: Tensor  # [B, S, Vd] in the drafter's dtype
    peak: Tensor  # [B, S] the largest of each, fp32 at least
    mass: Tensor  # [B, S] sum of exp((logits - peak) / divisor), fp32 at least
    divisor: Tensor  # [B] the temperature, 1 where that is 0
    is_drawn: Tensor  # [B] bool
    token_ids: Tensor | None = None  # [Vd] ascending, the ids that columns stand for; None: the identity

    @classmethod
    def join(cls, laws: Sequence["DraftLaw"]) -> "DraftLaw":
        """Of blocks, from those of their drafts in order. Logits that lie side by side in one tensor are not copied."""
        peak, mass = torch.cat([law.peak for law in laws], dim=1), torch.cat([law.mass for law in laws], dim=1)
        return replace(laws[0], logits=_side_by_side([law.logits for law in laws]), peak=peak, mass=mass)

    def read(self, token_ids: Tensor) -> Tensor:
        """The softmax at token_ids [B, S], whether it was drawn from or not; 0 at ids that no column stands for."""
        if self.token_ids is None:
            return self._softmax(self.logits.gather(2, token_ids[..., None])[..., 0])
        columns = torch.searchsorted(self.token_ids, token_ids.contiguous()).clamp_(max=len(self.token_ids) - 1)
        prob = self._softmax(self.logits.gather(2, columns[..., None])[..., 0])
        return torch.where(self.token_ids[columns] == token_ids, prob, 0)

    def of(self, drafts: Tensor) -> Tensor:
        """q of drafts [B, S] -> [B, S]."""
        return torch.where(self.is_drawn[:, None], self.read(drafts), 1)

    def at(self, place: Tensor, drafts: Tensor, vocab_size: int) -> Tensor:
        """All of q at one place of each sequence [B], given drafts [B, S] -> [B, V]."""
        row = torch.arange(len(place), device=place.device)
        x, peak, mass = (values[row, place] for values in (self.logits, self.peak, self.mass))
        prob = (x.to(peak.dtype) - peak[:, None]).div_(self.divisor[:, None]).exp_().div_(mass[:, None])
        if self.token_ids is not None:
            prob = prob.new_zeros(len(prob), vocab_size).index_copy_(1, self.token_ids, prob)
        certain = torch.zeros_like(prob).scatter_(1, drafts.gather(1, place[:, None]), 1)
        return torch.where(self.is_drawn[:, None], prob, certain)

    def _softmax(self, x: Tensor) -> Tensor:
        """x [B, S], some of the logits."""
        return ((x.to(self.peak.dtype) - self.peak) / self.divisor[:, None]).exp() / self.mass


def count_accepted_coupled(drafts: Tensor, targets: Tensor, widths: Tensor) -> Tensor:
    """drafts [B, S], targets [B, S + 1] (or [B, S]), widths [B] -> accepted drafts [B] int64.

    The step emits targets[b, : n + 1]: what plain decoding would have emitted, whatever the drafts are.
    """
    matches = drafts == targets[:, : drafts.shape[1]]
    return _leading(matches & _within(widths, drafts.shape[1]))


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Tensors [B, 1, Vd] as one [B, S, Vd]: a view, if they are rows of one tensor, at equal distances."""
    first, last = parts[0], parts[-1]
    step = (last.storage_offset() - first.storage_offset()) // max(len(parts) - 1, 1)
    for j, part in enumerate(parts):
        is_row = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and step > 0
        if not is_row or part.stride() != first.stride() or part.storage_offset() != first.storage_offset() + j * step:
            return torch.cat(list(parts), dim=1)
    return first.as_strided((len(first), len(parts), first.shape[2]), (first.stride(0), step, first.stride(2)))


def reject(
    draft_tokens: Tensor,
    draft_law: DraftLaw | None,
    target_probs: Tensor,
    widths: Tensor,
    seed: Tensor,
    anchor: Tensor,
    source: RandomSource,
) -> tuple[Tensor, Tensor]:
    """Accepted drafts n [B] and the token after them [B], both int64.

    draft_tokens [B, S]; draft_law of the first sequences, all others have width 0, or None: every draft is certain;
    target_probs [B, S + 1, V], one-hot for greedy requests, rows past the width ignored; widths, seed, anchor [B].
    """
    size, num_drafts = draft_tokens.shape
    drafted = draft_tokens[..., None]
    target_prob = target_probs[:, :num_drafts].gather(2, drafted)[..., 0]
    draft_prob = torch.ones_like(target_prob)
    if draft_law is not None:
        count = len(draft_law.logits)
        draft_prob[:count] = draft_law.of(draft_tokens[:count]).to(draft_prob.dtype)
    offsets = torch.arange(num_drafts, device=draft_tokens.device).expand(size, num_drafts)
    # min(1, p / q) without a division by 0: a draft that its own distribution excludes has no right to pass.
    ratio = (target_prob / draft_prob).clamp(max=1)
    prob = torch.where(_within(widths, num_drafts) & (draft_prob > 0), ratio, 0)
    spread = (prob.reshape(-1), _per_draft(seed, num_drafts), _per_draft(anchor, num_drafts), offsets.reshape(-1))
    accepted = _leading(source.bernoulli(*spread, Purpose.ACCEPT).view(size, num_drafts))
    following = _next_probs(accepted, draft_tokens, draft_law, target_probs, widths)
    return accepted, source.categorical(following, seed, anchor, accepted, Purpose.RESIDUAL)


def draft_sample(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    anchor: Tensor,
    offset: int,
    source: RandomSource,
    *,
    sample: bool = True,
    token_ids: Tensor | None = None,
) -> tuple[Tensor, DraftLaw]:
    """One draft position under rejection: tokens [B], and the law (S = 1) that they were drawn from.

    logits [B, Vd] of the drafter, kept as they are: whoever wants them rounded rounds them before. seed, anchor,
    temperature [B]. Rows of temperature 0, and all rows if not `sample`, take the argmax. Under a reduced draft
    vocabulary `token_ids` [Vd] names the target id of each column; tokens are target ids always.
    """
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    is_drawn = (temperature > 0) & sample
    divisor = torch.where(temperature > 0, temperature, 1).to(wide.dtype)
    peak, best = wide.max(-1, keepdim=True)
    weight = (wide - peak).div_(divisor[:, None]).exp_()
    mass = weight.sum(-1, keepdim=True)
    certain = torch.zeros_like(weight).scatter_(-1, best, 1)
    prob = torch.where(is_drawn[:, None], weight.div_(mass), certain)
    columns = source.categorical(prob, seed, anchor, torch.full_like(anchor, offset), Purpose.DRAFT)
    tokens = columns if token_ids is None else token_ids[columns]
    return tokens, DraftLaw(logits[:, None], peak, mass, divisor, is_drawn, token_ids)


def _next_probs(
    accepted: Tensor, draft_tokens: Tensor, draft_law: DraftLaw | None, target_probs: Tensor, widths: Tensor
) -> Tensor:
    """[B, V]: p at the row after the last accepted draft, less q there if a draft was rejected at it."""
    (size, num_drafts), vocab = draft_tokens.shape, target_probs.shape[-1]
    target_prob = target_probs.gather(1, accepted.view(size, 1, 1).expand(size, 1, vocab))[:, 0]
    if num_drafts == 0:
        return target_prob
    place, draft_prob = accepted.clamp(max=num_drafts - 1), torch.zeros_like(target_prob)
    if draft_law is None:
        draft_prob.scatter_(1, draft_tokens.gather(1, place[:, None]), 1)
    else:
        count = len(draft_law.logits)
        draft_prob[:count] = draft_law.at(place[:count], draft_tokens[:count], vocab).to(draft_prob.dtype)
    residual = (target_prob - draft_prob).clamp(min=0)
    total = residual.sum(-1, keepdim=True)
    # Nothing is left only where p <= q everywhere, that is p = q up to rounding: p itself is right there.
    use_residual = (accepted < widths)[:, None] & (total > 0)
    return torch.where(use_residual, residual / torch.where(total > 0, total, 1), target_prob)


def _within(widths: Tensor, num_drafts: int) -> Tensor:
    """[B] -> [B, S] bool: the drafts that may be looked at."""
    return torch.arange(num_drafts, device=widths.device) < widths[:, None]


def _leading(passed: Tensor) -> Tensor:
    """[B, S] bool -> [B] int64: the length of the leading run of True."""
    return passed.long().cumprod(1).sum(1)


def _per_draft(values: Tensor, num_drafts: int) -> Tensor:
    """[B] -> [B * S], each value repeated S times."""
    return values[:, None].expand(-1, num_drafts).reshape(-1)
