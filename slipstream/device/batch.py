"""The target's ragged batch, built on the device from slot state and widths: stages `layout` and `fill` in plain torch.

Every row is a given token or a draft token; the rows of a sequence stand side by side, given rows first. Prefill is
many given rows, decoding one given row and w drafts. The host supplies totals and bounds only, never a per-row vector.
Letters in shapes: B sequences, R rows, O output rows (rows whose logits are wanted), D decoding sequences, d drafts.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.device.state import PlanOnDevice, SlotState


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    widths: Tensor  # [B] drafts to verify
    num_given: Tensor  # [B]
    positions: Tensor  # [R]
    kv_slots: Tensor  # [R] where each row's KV goes
    token_ids: Tensor  # [R]; of draft rows only after `fill`
    output_rows: Tensor  # [O] rows of the batch
    output_sequence: Tensor  # [O]
    output_offset: Tensor  # [O] 0 for the row of the last given token, j for the row of draft j
    cu_outputs: Tensor  # [B + 1]

    def exact(self, num_sequences: int, num_outputs: int) -> "Batch":
        """What acceptance looks at, without padding."""
        changed = {
            name: getattr(self, name)[:num_outputs] for name in ("output_rows", "output_sequence", "output_offset")
        }
        changed |= {name: getattr(self, name)[:num_sequences] for name in ("widths", "num_given")}
        return replace(self, cu_outputs=self.cu_outputs[: num_sequences + 1], **changed)


@dataclass(frozen=True, slots=True, eq=False)
class RaggedBatch(Batch):
    """What attention in plain torch goes by."""

    cu_rows: Tensor  # [B + 1] first row of each sequence
    context: Tensor  # [B] KV tokens before the rows
    page_table: Tensor  # [B, P]
    row_sequence: Tensor  # [R]
    row_offset: Tensor  # [R] place within the sequence's rows


def layout(
    state: SlotState, plan: PlanOnDevice, widths: Tensor, num_rows: int, num_outputs: int, page_size: int
) -> RaggedBatch:
    """Widths [B] to rows. num_rows = given + drafts and num_outputs = emitting + drafts are known to the host."""
    rows = plan.num_given + widths
    cu_rows = _starts(rows)
    row_sequence, row_offset = _expand(cu_rows, num_rows)
    slots = plan.slots[row_sequence]
    context = state.context[plan.slots]
    positions = context[row_sequence] + row_offset
    page_table = state.page_table[plan.slots]
    pages = page_table[row_sequence, positions // page_size]
    outputs = torch.where(plan.emits, widths + 1, 0)
    cu_outputs = _starts(outputs)
    output_sequence, output_offset = _expand(cu_outputs, num_outputs)
    return RaggedBatch(
        widths=widths,
        cu_rows=cu_rows,
        context=context,
        page_table=page_table,
        row_sequence=row_sequence,
        row_offset=row_offset,
        positions=positions,
        kv_slots=pages * page_size + positions % page_size,
        token_ids=state.token_ids[slots, positions].long(),
        num_given=plan.num_given,
        output_rows=(cu_rows[:-1] + plan.num_given - 1)[output_sequence] + output_offset,
        output_sequence=output_sequence,
        output_offset=output_offset,
        cu_outputs=cu_outputs,
    )


def fill(batch: RaggedBatch, draft_token_ids: Tensor) -> Tensor:
    """The batch's token ids with the drafts [D, d] in their rows. The first stage that needs this step's draft."""
    num_sequences, draft_length = draft_token_ids.shape
    offset = batch.row_offset - batch.num_given[batch.row_sequence]
    sequence = batch.row_sequence.clamp(max=num_sequences - 1)
    drafts = draft_token_ids[sequence, offset.clamp(0, draft_length - 1)]
    return torch.where(offset >= 0, drafts, batch.token_ids)


def pad_outputs(batch: Batch, values: Tensor, columns: int) -> Tensor:
    """Values of output rows [O, ...] as [B, columns, ...]; places beyond a sequence's outputs repeat its last one."""
    steps = torch.arange(columns, device=values.device)
    index = batch.cu_outputs[:-1, None] + torch.minimum(steps, batch.widths[:, None])
    return values[index.clamp(max=max(values.shape[0] - 1, 0))]


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _expand(starts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Owner and place within its owner of each of `total` rows."""
    index = torch.arange(total, device=starts.device)
    owner = torch.searchsorted(starts[1:], index, right=True)
    return owner, index - starts[owner]
