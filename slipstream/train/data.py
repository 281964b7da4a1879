"""From answers to training rows: documents packed into rows of equal length, batches, anchors, the draft vocabulary.

Everything is a function of (answers, seed, step): a resumed run needs no more than its step number to see the same
batches and anchors. Nothing here knows a network. Called by the trainer; `walks` packs the answers that it validates on
with `pack` too.

Shapes: n packed rows, B of them in a batch, T tokens per row, A blocks (anchors) per row, Q block rows per row.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.train.answers import AnswerSet


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    """Whole documents side by side in rows of T tokens. Filled by `pack`; padding is a run of one-token documents."""

    token_ids: Tensor  # [n, T] int64
    positions: Tensor  # [n, T] int64, from 0 in each document
    starts: Tensor  # [n, T] int64, where in the row the token's document begins
    scored: Tensor  # [n, T] bool, tokens of answers

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    def take(self, index: Tensor | slice) -> "PackedRows":
        return PackedRows(
            token_ids=self.token_ids[index],
            positions=self.positions[index],
            starts=self.starts[index],
            scored=self.scored[index],
        )

    def to(self, device: torch.device | str) -> "PackedRows":
        return PackedRows(
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            starts=self.starts.to(device),
            scored=self.scored.to(device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where `pack` put each document: row, first column, and how many tokens were kept."""

    rows: NDArray[np.int64]  # [documents]
    columns: NDArray[np.int64]  # [documents]
    lengths: NDArray[np.int64]  # [documents]


def pack(answers: AnswerSet, row_tokens: int) -> tuple[PackedRows, Placement]:
    """Best-fit decreasing: longest documents first, each into the fullest row that still has room.

    Overlong ones are cut.
    """
    lengths = np.minimum(np.diff(answers.starts), row_tokens)
    rows, columns = np.zeros_like(lengths), np.zeros_like(lengths)
    room: list[list[int]] = [[] for _ in range(row_tokens + 1)]  # rows by free tokens
    num_rows = 0
    for document in np.argsort(-lengths, kind="stable"):
        length = int(lengths[document])
        free = next((size for size in range(length, row_tokens + 1) if room[size]), None)
        row = room[free].pop() if free is not None else num_rows
        num_rows += free is None
        free = row_tokens if free is None else free
        rows[document], columns[document] = row, row_tokens - free
        room[free - length].append(row)
    placement = Placement(rows=rows, columns=columns, lengths=lengths)
    return _filled(answers, placement, num_rows, row_tokens), placement


def _filled(answers: AnswerSet, placement: Placement, num_rows: int, row_tokens: int) -> PackedRows:
    token_ids_np = np.zeros((num_rows, row_tokens), dtype=np.int64)
    positions_np = np.zeros_like(token_ids_np)
    starts_np = np.tile(np.arange(row_tokens), (num_rows, 1))
    scored_np = np.zeros((num_rows, row_tokens), dtype=np.bool_)
    places = zip(placement.rows, placement.columns, placement.lengths, answers.prompt_lengths, strict=True)
    for document, (row, column, length, prompt) in enumerate(places):
        span = slice(column, column + length)
        token_ids_np[row, span] = answers.text(document)[:length]
        positions_np[row, span] = np.arange(length)
        starts_np[row, span] = column
        scored_np[row, column + prompt : column + length] = True
    return PackedRows(
        token_ids=torch.from_numpy(token_ids_np),
        positions=torch.from_numpy(positions_np),
        starts=torch.from_numpy(starts_np),
        scored=torch.from_numpy(scored_np),
    )


class BatchOrder:
    """Which packed rows step i sees: the rows in a new order each epoch, a function of (seed, step)."""

    def __init__(self, num_rows: int, batch_rows: int, seed: int) -> None:
        self.num_rows, self.batch_rows, self.seed = num_rows, batch_rows, seed
        self.epoch, self.order = -1, np.zeros(0, dtype=np.int64)

    def rows(self, step: int) -> NDArray[np.int64]:
        """[batch_rows] row numbers of step `step`, counted from 0."""
        return np.array([self._row(index) for index in range(step * self.batch_rows, (step + 1) * self.batch_rows)])

    def _row(self, index: int) -> int:
        epoch, place = divmod(index, self.num_rows)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)
        return int(self.order[place])


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The draft blocks of a batch of packed rows, side by side: row q belongs to block `block_of_row[q]`.

    Filled by `draw_blocks`.
    """

    anchors: Tensor  # [B, Q] int64, column of the anchor of the row's block
    offsets: Tensor  # [Q] int64, the row's place in its block, 0 = the anchor's own row
    block_of_row: Tensor  # [Q] int64
    live: Tensor  # [B, Q] bool; False for the blocks of a row that has fewer anchors than blocks

    def take(self, index: Tensor | slice) -> "Blocks":
        """The blocks of some of the packed rows."""
        return dataclasses.replace(self, anchors=self.anchors[index], live=self.live[index])


def block_rows(lengths: Sequence[int], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """block_of_row and offsets [Q] of blocks of the given lengths, side by side."""
    sizes = torch.tensor(lengths)
    block_of_row = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
    first = torch.cumsum(sizes, 0) - sizes
    return block_of_row.to(device), (torch.arange(int(sizes.sum())) - first[block_of_row]).to(device)


def anchor_candidates(rows: PackedRows) -> Tensor:
    """[B, T] columns that may be anchors: scored, and so is the next token of the same document."""
    follows = torch.zeros_like(rows.scored)
    follows[:, :-1] = rows.scored[:, 1:] & (rows.starts[:, 1:] == rows.starts[:, :-1])
    return rows.scored & follows


def scored_candidates(rows: PackedRows, block_size: int) -> Tensor:
    """[B, T] the same by the rule of speculators: scored, the last `block_size` columns of each packed row left out.

    An answer's last token may be an anchor then; nothing of its block counts.
    """
    columns = torch.arange(rows.scored.shape[1], device=rows.scored.device)
    return rows.scored & (columns < rows.scored.shape[1] - block_size)


def draw_blocks(rows: PackedRows, lengths: Sequence[int], seed: int, candidates: Tensor | None = None) -> Blocks:
    """Anchors drawn uniformly without replacement, ascending within each packed row (near blocks read near context).

    candidates [B, T]: columns that may be anchors, `anchor_candidates` if not given. Which length an anchor's block has
    is random too: the lengths are dealt out anew with `seed`.
    """
    device = rows.token_ids.device
    rng = torch.Generator(device).manual_seed(seed)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    block_of_row, offsets = block_rows([lengths[index] for index in order], device)
    candidates = anchor_candidates(rows) if candidates is None else candidates
    score = torch.rand(candidates.shape, generator=rng, device=device).masked_fill_(~candidates, -1.0)
    count = min(len(lengths), score.shape[1])
    best, columns = score.topk(count, dim=1)
    columns = torch.where(best >= 0, columns, score.shape[1])  # the missing ones last
    columns = torch.nn.functional.pad(columns.sort(dim=1).values, (0, len(lengths) - count), value=score.shape[1])
    live = columns < score.shape[1]
    return Blocks(
        anchors=columns.where(live, 0)[:, block_of_row],
        offsets=offsets,
        block_of_row=block_of_row,
        live=live[:, block_of_row],
    )


def draft_vocabulary(answers: AnswerSet, size: int, vocab_size: int, keep: Sequence[int]) -> NDArray[np.int64]:
    """The `size` most frequent tokens of the answers, ascending.

    Ties go to the smaller id, ids of `keep` are always in.
    """
    if size >= vocab_size:
        return np.arange(vocab_size)
    is_answer = np.ones(len(answers.token_ids), dtype=np.bool_)
    for start, prompt in zip(answers.starts[:-1], answers.prompt_lengths, strict=True):
        is_answer[start : start + prompt] = False
    counts = np.bincount(answers.token_ids[is_answer], minlength=vocab_size)
    counts[list(keep)] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-counts, kind="stable")[:size])
