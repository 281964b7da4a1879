"""How well a drafter drafts: the walk that serving would take over known greedy answers, without serving them.

The target's features of a whole answer are computed once; then every position is an anchor from which the drafter
drafts S tokens greedily (its own drafts feed the Markov head), and the run that matches the answer is counted. A walk
starts at the answer's first token and jumps by run + 1; the mean of those jumps is the mean accepted length of greedy
serving, the target's own token included. Answers that end in a loop are easy to draft, so figures are given with and
without them. Called by the trainer for validation and by `bench/acceptance.py`.

Shapes: B packed rows, T tokens per row, A anchors per row and pass, S drafts, Vd draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.models.decoder import Decoder
from slipstream.models.drafters import BlockDrafter
from slipstream.train.answers import AnswerSet
from slipstream.train.attend import Dense, PackedAttend, PackedBlockAttend, packed_block_mask
from slipstream.train.data import Blocks, PackedRows, Placement, anchor_candidates, block_rows, pack

MAX_BLOCK_ROWS = 1024  # block rows per packed row and pass


@dataclass(frozen=True, kw_only=True, slots=True)
class WalkReport:
    """Acceptance over walks. Filled by `summarise`."""

    num_answers: int
    num_steps: int
    num_tokens: int  # emitted by those steps
    mean_accepted_length: float  # tokens per step, the target's own included
    acceptance_by_position: tuple[float, ...]  # [S] draft k accepted, given that those before it were
    survival_by_position: tuple[float, ...]  # [S] drafts 1..k accepted


@torch.no_grad()
def draft_greedily(drafter: BlockDrafter, hidden: Tensor, anchor_ids: Tensor, num_drafts: int) -> Tensor:
    """hidden [N, n, H] of all block rows, anchor_ids [N] -> target ids of the drafts [N, num_drafts]."""
    state, previous, drafts = drafter.markov_start(hidden, anchor_ids), anchor_ids, []
    base = drafter.base_logits(hidden[:, drafter.spec.draft_rows(num_drafts)]).float()
    for k, row in enumerate(range(*drafter.spec.draft_rows(num_drafts).indices(hidden.shape[1]))):
        logits = base[:, k]
        if drafter.markov_head is not None:
            bias, state = drafter.markov_step(state, previous, hidden[:, row])
            logits = logits + bias.float()
        previous = drafter.to_target(logits.argmax(dim=-1))
        drafts.append(previous)
    return torch.stack(drafts, dim=1)


@torch.no_grad()
def matching_runs(
    target: Decoder, drafter: BlockDrafter, answers: AnswerSet, num_drafts: int, *, scale: Tensor | None = None,
    row_tokens: int = 1024, batch_rows: int = 16,
) -> tuple[NDArray[np.int64], Placement]:  # fmt: skip
    """[n, T] how many of S drafts match the answer from every anchor, -1 elsewhere; and where each answer lies.

    scale [K * Ht]: what features are multiplied by before `fc`, for a drafter in training whose `fc` does not hold it
    yet.
    """
    packed, placement = pack(answers, row_tokens)
    runs = [
        _runs_of_batch(
            target, drafter, packed.take(torch.arange(first, min(first + batch_rows, len(packed)))), num_drafts, scale
        )
        for first in range(0, len(packed), batch_rows)
    ]
    return torch.cat(runs).numpy(), placement


def _runs_of_batch(
    target: Decoder, drafter: BlockDrafter, rows: PackedRows, num_drafts: int, scale: Tensor | None
) -> Tensor:
    rows = rows.to(drafter.device)
    positions = rows.positions.flatten()
    attend = PackedAttend(target, rows, Dense())
    _, features = target(rows.token_ids.flatten(), positions, attend, drafter.spec.target_layer_ids)
    assert features is not None
    context = drafter.context_kv(features if scale is None else features.float() * scale, positions)
    candidates = anchor_candidates(rows)
    per_pass = max(1, MAX_BLOCK_ROWS // drafter.spec.rows(num_drafts))
    most = int(candidates.sum(dim=1).max())
    # Candidates first and in order, the rest of the columns after them.
    columns = torch.argsort((~candidates).int(), dim=1, stable=True)[:, :most]
    runs = torch.full(candidates.shape, -1, dtype=torch.int64, device=drafter.device)
    for first in range(0, most, per_pass):  # not once where documents are cut before their answers
        chunk = columns[:, first : first + per_pass]
        runs.scatter_(1, chunk, _runs_of_anchors(drafter, rows, context, chunk, num_drafts))
    return runs.masked_fill(~candidates, -1).cpu()


def _runs_of_anchors(
    drafter: BlockDrafter, rows: PackedRows, context: list[tuple[Tensor, Tensor]], columns: Tensor, num_drafts: int
) -> Tensor:
    """columns [B, A] of anchors -> [B, A] matching runs."""
    spec, num_blocks = drafter.spec, columns.shape[1]
    block_of_row, offsets = block_rows([spec.rows(num_drafts)] * num_blocks, drafter.device)
    anchors = columns[:, block_of_row]  # [B, Q]
    blocks = Blocks(
        anchors=anchors, offsets=offsets, block_of_row=block_of_row, live=torch.ones_like(anchors, dtype=torch.bool)
    )
    hidden = drafter.hidden(
        drafter.embed(block_inputs(rows, blocks, spec.mask_token_id)),
        block_positions(rows, blocks, spec.max_position_embeddings),
        PackedBlockAttend(context, packed_block_mask(rows, blocks, Dense()), Dense()),
    )
    anchor_ids = rows.token_ids.gather(1, columns)
    drafts = draft_greedily(
        drafter, hidden.view(-1, spec.rows(num_drafts), hidden.shape[-1]), anchor_ids.flatten(), num_drafts
    )
    labels = columns[..., None] + torch.arange(1, num_drafts + 1, device=columns.device)  # [B, A, S]
    inside = labels < rows.token_ids.shape[1]
    safe = labels.clamp(max=rows.token_ids.shape[1] - 1).flatten(1)
    same = rows.starts.gather(1, safe) == rows.starts.gather(1, columns).repeat_interleave(num_drafts, dim=1)
    equal = drafts.view(safe.shape) == rows.token_ids.gather(1, safe)
    return (equal & same).view(labels.shape).logical_and(inside).long().cumprod(dim=-1).sum(dim=-1)


def block_inputs(rows: PackedRows, blocks: Blocks, mask_token_id: int) -> Tensor:
    """[B, Q] token ids: the anchor's in the first row of each block, the mask elsewhere."""
    return torch.where(blocks.offsets == 0, rows.token_ids.gather(1, blocks.anchors), mask_token_id)


def block_positions(rows: PackedRows, blocks: Blocks, max_position: int) -> Tensor:
    """[B, Q] positions in the document: the anchor's onwards."""
    return (rows.positions.gather(1, blocks.anchors) + blocks.offsets).clamp(max=max_position - 1)


def walk(runs: NDArray[np.int64], placement: Placement, answers: AnswerSet, document: int) -> list[tuple[int, int]]:
    """(run, emitted tokens) of each step over one answer, the first token (the prefill's) being given."""
    row, column, length = placement.rows[document], placement.columns[document], placement.lengths[document]
    at, last = int(column + answers.prompt_lengths[document]), int(column + length - 1)
    steps = []
    while at < last:
        run = int(runs[row, at])
        emitted = min(run + 1, last - at)
        steps.append((run, emitted))
        at += emitted
    return steps


def summarise(steps: Sequence[Sequence[tuple[int, int]]], num_drafts: int) -> WalkReport:
    """The figures of some walks."""
    flat = np.array([step for walked in steps for step in walked], dtype=np.int64).reshape(-1, 2)
    runs, emitted = flat[:, 0], flat[:, 1]
    reached = np.array([(runs >= k).sum() for k in range(num_drafts + 1)])
    return WalkReport(
        num_answers=len(steps),
        num_steps=len(flat),
        num_tokens=int(emitted.sum()),
        mean_accepted_length=round(float(emitted.sum() / max(1, len(flat))), 4),
        acceptance_by_position=tuple(np.round(reached[1:] / np.maximum(reached[:-1], 1), 4).tolist()),
        survival_by_position=tuple(np.round(reached[1:] / max(1, reached[0]), 4).tolist()),
    )


def evaluate(
    target: Decoder, drafter: BlockDrafter, answers: AnswerSet, num_drafts: int, *, scale: Tensor | None = None,
    row_tokens: int = 1024, batch_rows: int = 16,
) -> dict[str, Any]:  # fmt: skip
    """Walks over greedy answers: {"all": WalkReport as a dict, "no_loops": the same without looping answers, ...}."""
    runs, placement = matching_runs(
        target, drafter, answers, num_drafts, scale=scale, row_tokens=row_tokens, batch_rows=batch_rows
    )
    steps = [walk(runs, placement, answers, document) for document in range(len(answers))]
    straight = [walked for walked, looping in zip(steps, answers.looping, strict=True) if not looping]
    return {
        "num_drafts": num_drafts,
        "looping_share": round(float(answers.looping.mean()), 4) if len(answers) else 0.0,
        "all": asdict(summarise(steps, num_drafts)),
        "no_loops": asdict(summarise(straight, num_drafts)),
    }
