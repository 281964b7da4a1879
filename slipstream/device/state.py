"""Slot state: what the device knows of every running request, at fixed addresses.

The host never reads it. `load` writes a plan into it, `apply_verdict` moves it forward after acceptance; everything
else only gathers. Letters in shapes: N slots, L positions per request, P pages per request, B sequences of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.cache.pages import NULL_PAGE
from slipstream.cache.pool import KVPool
from slipstream.device.staging import Uploader
from slipstream.ops.shape_logits import Shaping
from slipstream.plan import MAX_EDITS, Admission, Int32s, StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class SlotState:
    token_ids: Tensor  # [N + 1, L + 1] int32: every known token of the request; column L takes writes that nobody wants
    context: Tensor  # [N + 1] int64: tokens whose KV is in the cache = position of the anchor
    page_table: Tensor  # [N + 1, P] int64
    temperature: Tensor  # [N + 1] float32
    top_k: Tensor  # [N + 1] int64, 0 = off
    top_p: Tensor  # [N + 1] float32
    min_p: Tensor  # [N + 1] float32, 0 = off
    seed: Tensor  # [N + 1] int64
    shaping: Shaping  # of N + 1 histories, the rows of token_ids

    @property
    def padding_slot(self) -> int:
        return len(self.context) - 1

    @property
    def max_len(self) -> int:
        return self.token_ids.shape[1] - 1


def make_slot_state(num_slots: int, max_len: int, page_size: int, device: torch.device) -> SlotState:
    """Empty slots, and one beyond them that padding sequences use: it is read, nothing that counts is written to it."""
    max_pages = -(-max_len // page_size)
    num_slots += 1
    return SlotState(
        token_ids=torch.zeros(num_slots, max_len + 1, dtype=torch.int32, device=device),
        context=torch.zeros(num_slots, dtype=torch.int64, device=device),
        page_table=torch.full((num_slots, max_pages), NULL_PAGE, dtype=torch.int64, device=device),
        temperature=torch.zeros(num_slots, dtype=torch.float32, device=device),
        top_k=torch.zeros(num_slots, dtype=torch.int64, device=device),
        top_p=torch.ones(num_slots, dtype=torch.float32, device=device),
        min_p=torch.zeros(num_slots, dtype=torch.float32, device=device),
        seed=torch.zeros(num_slots, dtype=torch.int64, device=device),
        shaping=Shaping.neutral(num_slots, MAX_EDITS, device),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PlanOnDevice:
    """The per-sequence part of a StepPlan as device tensors."""

    slots: Tensor  # [B] int64
    num_given: Tensor  # [B] int64
    emits: Tensor  # [B] bool
    teaches: Tensor  # [B] bool


def load(state: SlotState, plan: StepPlan, uploader: Uploader, pools: tuple[KVPool, ...]) -> PlanOnDevice:
    """Write admissions and page reservations of the plan into the slots; return its per-sequence vectors."""
    arrays = {
        "slots": plan.slots_np.astype(np.int64),
        "num_given": plan.num_given_np.astype(np.int64),
        "emits": plan.emits_np,
        "teaches": plan.teaches_np,
        "page_writes": plan.page_writes_np.astype(np.int64).reshape(-1, 3),
        "new_pages": _new_pages(plan, pools).astype(np.int64),
    }
    # One copy for all: with one per admission, the uploader would run out of free buffers and wait for the device.
    prompts = {f"prompt_{a.slot}": a.token_ids_np.astype(np.int32) for a in plan.admissions}
    edits = packed_edits(plan.admissions)
    moved = uploader.upload(arrays | prompts | edits)
    for admission, start in zip(plan.admissions, edits["cu_edits"].tolist(), strict=False):
        _admit(state, admission, moved[f"prompt_{admission.slot}"])
        if admission.edits:
            _admit_edits(state.shaping, admission.slot, moved, slice(start, start + len(admission.edits)))
    if len(plan.page_writes_np):
        slot, index, page = moved["page_writes"].unbind(1)
        state.page_table.index_put_((slot, index), page)
        for pool in pools:
            pool.clear(moved["new_pages"])
    return PlanOnDevice(moved["slots"], moved["num_given"], moved["emits"], moved["teaches"])


def _new_pages(plan: StepPlan, pools: tuple[KVPool, ...]) -> Int32s:
    """[n] those of the plan's page writes that bring no KV with them."""
    slots, index, pages = plan.page_writes_np.reshape(-1, 3).T
    is_new = np.ones(len(pages), np.bool_)
    for admission in plan.admissions:
        if admission.num_cached:
            is_new &= (slots != admission.slot) | (index >= admission.num_cached // pools[0].page_size)
    return pages[is_new]


def _admit(state: SlotState, admission: Admission, token_ids: Tensor) -> None:
    slot = admission.slot
    state.token_ids[slot, : len(token_ids)].copy_(token_ids)
    state.context[slot].fill_(admission.num_cached)
    state.page_table[slot].fill_(NULL_PAGE)
    state.temperature[slot].fill_(admission.temperature)
    state.top_k[slot].fill_(admission.top_k)
    state.top_p[slot].fill_(admission.top_p)
    state.min_p[slot].fill_(admission.min_p)
    state.seed[slot].fill_(admission.seed)
    shaping = state.shaping
    shaping.repetition[slot].fill_(admission.repetition_penalty)
    shaping.frequency[slot].fill_(admission.frequency_penalty)
    shaping.presence[slot].fill_(admission.presence_penalty)
    shaping.num_prompt[slot].fill_(admission.num_prompt)
    shaping.num_edits[slot].fill_(len(admission.edits))


def _admit_edits(shaping: Shaping, slot: int, packed: dict[str, Tensor], part: slice) -> None:
    for name in ("edit_ids", "edit_values", "edit_until"):
        edits = packed[name][part]
        getattr(shaping, name)[slot, : len(edits)].copy_(edits)


def packed_edits(admissions: Sequence[Admission]) -> dict[str, NDArray[Any]]:
    """Edits of all, one after another: cu_edits [A + 1] int64; edit_ids, edit_until int64 and edit_values fp32 [n]."""
    edits = [edit for admission in admissions for edit in admission.edits]
    return {
        "cu_edits": np.cumsum([0, *(len(a.edits) for a in admissions)]).astype(np.int64),
        "edit_ids": np.array([edit.token_id for edit in edits], np.int64),
        "edit_values": np.array([edit.value for edit in edits], np.float32),
        "edit_until": np.array([edit.until for edit in edits], np.int64),
    }


def apply_verdict(state: SlotState, plan: PlanOnDevice, num_accepted: Tensor, emitted: Tensor) -> None:
    """Move the slots forward: num_accepted n [B] (0 where nothing is emitted), emitted [B, w + 1] ids, valid up to n.

    The tokens y_0..y_n become known at positions s + given .. s + given + n; the newest of them is the next anchor.
    """
    start = state.context[plan.slots] + plan.num_given  # [B] position of y_0
    steps = torch.arange(emitted.shape[1], device=start.device)
    wanted = plan.emits[:, None] & (steps <= num_accepted[:, None])
    columns = torch.where(wanted, start[:, None] + steps, state.max_len)
    state.token_ids.index_put_((plan.slots[:, None].expand_as(columns), columns), emitted.to(torch.int32))
    state.context.index_copy_(0, plan.slots, start + num_accepted)
