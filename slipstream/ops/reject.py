"""Acceptance: how many drafts stand, and which token follows them.

`count_accepted_coupled` compares drafts with the tokens the target would have emitted itself. `reject` is
speculative rejection sampling: accept draft x with probability min(1, p(x) / q(x)), on rejection draw from the
residual max(p - q, 0), after a full pass draw from p. It is exact only if q is the very distribution that the draft
was drawn from, which is why `draft_sample` returns both at once, and only if every draw has a name of its own:
(seed, anchor, offset, purpose). Both look at the first `width` drafts of a sequence only. Row-wise, no host reads.
Called by verify; knows nothing of how drafts or widths were chosen.

Shapes: B sequences, S drafts each, V token ids.
"""

import torch
from torch import Tensor

from slipstream.ops.noise import Purpose, RandomSource
from slipstream.ops.sample import probabilities


def count_accepted_coupled(drafts: Tensor, targets: Tensor, widths: Tensor) -> Tensor:
    """drafts [B, S], targets [B, S + 1] (or [B, S]), widths [B] -> accepted drafts [B] int64.

    The step emits targets[b, : n + 1]: what plain decoding would have emitted, whatever the drafts are.
    """
    matches = drafts == targets[:, : drafts.shape[1]]
    return _leading(matches & _within(widths, drafts.shape[1]))


def reject(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    widths: Tensor,
    seed: Tensor,
    anchor: Tensor,
    source: RandomSource,
) -> tuple[Tensor, Tensor]:
    """Accepted drafts n [B] and the token after them [B], both int64.

    draft_tokens [B, S]; draft_probs [B, S, V], dense, one-hot for a draft that was not drawn; target_probs
    [B, S + 1, V], one-hot for greedy requests, rows past the width ignored; widths, seed, anchor [B].
    """
    size, num_drafts = draft_tokens.shape
    drafted = draft_tokens[..., None]
    target_prob = target_probs[:, :num_drafts].gather(2, drafted)[..., 0]
    draft_prob = draft_probs.gather(2, drafted)[..., 0]
    offsets = torch.arange(num_drafts, device=draft_tokens.device).expand(size, num_drafts)
    # min(1, p / q) without a division by 0: a draft that its own distribution excludes has no right to pass.
    ratio = (target_prob / draft_prob).clamp(max=1)
    prob = torch.where(_within(widths, num_drafts) & (draft_prob > 0), ratio, 0)
    spread = (prob.reshape(-1), _per_draft(seed, num_drafts), _per_draft(anchor, num_drafts), offsets.reshape(-1))
    accepted = _leading(source.bernoulli(*spread, Purpose.ACCEPT).view(size, num_drafts))
    following = _next_probs(accepted, draft_probs, target_probs, widths)
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
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """One draft position under rejection: tokens [B] and the dense distribution [B, V] they were drawn from.

    logits [B, Vd] of the drafter; seed, anchor, temperature [B]. Rows of temperature 0, and all rows if not
    `sample`, take the argmax and a one-hot distribution. Under a reduced draft vocabulary `token_ids` [Vd] names
    the target id of each column and `vocab_size` is V; tokens are target ids always.
    """
    logits = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    heat = temperature if sample else torch.zeros_like(temperature)
    divisor = torch.where(heat > 0, heat, 1)[:, None].to(logits.dtype)
    probs = probabilities((logits - logits.amax(-1, keepdim=True)) / divisor, heat)
    if token_ids is not None:
        assert vocab_size is not None, "token_ids needs vocab_size"
        probs = probs.new_zeros(probs.shape[0], vocab_size).index_copy_(1, token_ids, probs)
    offsets = torch.full_like(anchor, offset)
    return source.categorical(probs, seed, anchor, offsets, Purpose.DRAFT), probs


def _next_probs(accepted: Tensor, draft_probs: Tensor, target_probs: Tensor, widths: Tensor) -> Tensor:
    """[B, V]: p at the row after the last accepted draft, less q there if a draft was rejected at it."""
    size, num_drafts, vocab = draft_probs.shape
    row = accepted.view(size, 1, 1).expand(size, 1, vocab)
    target_prob = target_probs.gather(1, row)[:, 0]
    if num_drafts == 0:
        return target_prob
    draft_prob = draft_probs.gather(1, row.clamp(max=num_drafts - 1))[:, 0]
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
