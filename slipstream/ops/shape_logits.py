"""Logits that a request asked to be changed, before temperature and filters: penalties, biases, bans.

In this order, for every token v of a row with logit x, where the row's *history* is the prompt, the output so far and
the drafts before the row, and its *output* is the same without the prompt:
1. repetition penalty r: x / r if x > 0, else x * r, for every v in the history, however often it is there;
2. frequency penalty f: x - f for each time that v is in the output;
3. presence penalty p: x - p once, if v is in the output;
4. edits: x + value for every (v, value, until) while the output has fewer than `until` tokens. A bias is an edit for
   ever, a ban one of -inf: min_tokens bans the ids that would end the answer.
Temperature, top-k, top-p and min-p follow in `ops.sample.filter_logits`.

Row-wise: with neutral parameters a row passes bit for bit, whatever its neighbours ask. Work goes by the tokens of the
history, not by the vocabulary. No host reads. Called by verify (target rows only); knows nothing of acceptance.

Letters in shapes: N histories (slots), L positions, R rows, B sequences of the step, S drafts, V token ids, M edits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_ELEMENTS_AT_ONCE = 1 << 23  # of rows times history: what is made meanwhile stays below half a GiB


@dataclass(frozen=True, slots=True, eq=False)
class Shaping:
    """What the owner of each history asked for; the defaults of `neutral` change nothing."""

    repetition: Tensor  # [N] fp32 above 0, 1 = off
    frequency: Tensor  # [N] fp32, 0 = off
    presence: Tensor  # [N] fp32, 0 = off
    num_prompt: Tensor  # [N] int64: where the output begins
    num_edits: Tensor  # [N] int64: how many of the following M count
    edit_ids: Tensor  # [N, M] int64
    edit_values: Tensor  # [N, M] fp32
    edit_until: Tensor  # [N, M] int64

    @classmethod
    def neutral(cls, num: int, most_edits: int, device: torch.device) -> "Shaping":
        def full(value: float, dtype: torch.dtype, *more: int) -> Tensor:
            return torch.full((num, *more), value, dtype=dtype, device=device)

        return cls(
            full(1, torch.float32), full(0, torch.float32), full(0, torch.float32), full(0, torch.int64),
            full(0, torch.int64), full(0, torch.int64, most_edits), full(0, torch.float32, most_edits),
            full(0, torch.int64, most_edits),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Histories:
    """What stands before each row: known tokens of a history, then drafts of a sequence."""

    token_ids: Tensor  # [N, L] integers, all of them ids below V; column 0 of a history that is used is known
    max_known: int  # most known tokens of any row, or more; at least 1
    owner: Tensor  # [R] history that the row continues
    num_known: Tensor  # [R] int64: how many of its tokens are known
    drafts: Tensor  # [B, S] int64; any ids below V where nothing was drafted
    sequence: Tensor  # [R] row of `drafts`; any where num_drafts is 0
    num_drafts: Tensor  # [R] int64: how many of them stand before the row

    @property
    def num_columns(self) -> int:
        """Of `token_ids`, so many need be looked at."""
        return min(self.max_known, self.token_ids.shape[1])

    def part(self, rows: slice) -> "Histories":
        return Histories(
            self.token_ids, self.max_known, self.owner[rows], self.num_known[rows], self.drafts, self.sequence[rows],
            self.num_drafts[rows],
        )  # fmt: skip


def shape_logits(
    logits: Tensor, asked: Shaping, histories: Histories, *, any_penalty: bool = True, any_edit: bool = True
) -> Tensor:
    """logits [R, V] -> a new [R, V], at least fp32, after penalties and edits. The flags say on the host who asks.

    NaN and +inf stay what they are, or become NaN: a row that may not be used before may not be used after.
    """
    shaped = logits.clone() if logits.dtype in (torch.float32, torch.float64) else logits.float()
    if any_penalty:
        at_once = max(_ELEMENTS_AT_ONCE // (histories.num_columns + histories.drafts.shape[1]), 1)
        for first in range(0, len(shaped), at_once):
            rows = slice(first, first + at_once)
            _penalize(shaped[rows], asked, histories.part(rows))
    if any_edit:
        _edit(shaped, asked, histories)
    return shaped


def _penalize(logits: Tensor, asked: Shaping, histories: Histories) -> None:
    """In place. A token that stands in several columns gets one value several times, so their order does not matter.

    Columns that do not count repeat the token of one that does, for the same reason.
    """
    token_ids, is_before = _tokens_before(histories)
    owner, dtype = histories.owner, logits.dtype
    num_prompt = asked.num_prompt[owner][:, None]
    repetition, frequency, presence = (
        x[owner][:, None].to(dtype) for x in (asked.repetition, asked.frequency, asked.presence)
    )
    known = torch.where(is_before, token_ids, token_ids[:, :1])
    x = logits.gather(1, known)
    logits.scatter_(1, known, torch.where(x > 0, x / repetition, x * repetition))

    # Drafts stand in the last columns.
    column = torch.arange(token_ids.shape[1], device=logits.device)
    is_output = is_before & ((column >= num_prompt) | (column >= histories.num_columns))
    logits.scatter_add_(1, token_ids, torch.where(is_output, -frequency, 0))

    begun, some = is_output.to(torch.uint8).max(1, keepdim=True)
    output = torch.where(is_output, token_ids, token_ids.gather(1, some))
    logits.scatter_(1, output, logits.gather(1, output) - presence * begun)


def _tokens_before(histories: Histories) -> tuple[Tensor, Tensor]:
    """[R, num_columns + S] ids, and which of them stand before the row."""
    known = histories.token_ids[:, : histories.num_columns].index_select(0, histories.owner).long()
    step = torch.arange(histories.num_columns, device=known.device)
    is_known = step < histories.num_known[:, None]
    if not histories.drafts.numel():
        return known, is_known
    drafts = histories.drafts[histories.sequence.clamp(max=len(histories.drafts) - 1)]
    is_draft = torch.arange(drafts.shape[1], device=known.device) < histories.num_drafts[:, None]
    return torch.cat([known, drafts], dim=1), torch.cat([is_known, is_draft], dim=1)


def _edit(logits: Tensor, asked: Shaping, histories: Histories) -> None:
    """In place. An id has at most one bias and one ban, and any number of zeros are added to id 0."""
    owner = histories.owner
    num_output = histories.num_known + histories.num_drafts - asked.num_prompt[owner]
    token_ids = asked.edit_ids[owner]
    column = torch.arange(token_ids.shape[1], device=logits.device)
    counts = (column < asked.num_edits[owner][:, None]) & (num_output[:, None] < asked.edit_until[owner])
    counts &= token_ids < logits.shape[1]  # out of a padded vocabulary; requests with others are refused
    values = torch.where(counts, asked.edit_values[owner].to(logits.dtype), 0)
    logits.scatter_add_(1, torch.where(counts, token_ids, 0), values)
