"""The stages' device half in Triton: padded shapes, fixed addresses, and replays of what was captured.

Everything that one stage leaves for the next, or for the next step, lies in buffers that are made once, as large as any
step needs; a shape takes their leading part. Padding sequences read the slot beyond the last and have no rows; padding
rows belong to nobody and write to the scratch page. Same promises as `device.backend`, which see.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.device.batch import Batch
from slipstream.device.graphs import Branch, Graphs
from slipstream.device.reports import OutputReports
from slipstream.device.shapes import Buckets, DraftShape, Stage, VerifyShape
from slipstream.device.staging import Exporter, Mailbox, Uploader
from slipstream.device.state import PlanOnDevice, SlotState, packed_edits
from slipstream.kernels import accept, logprobs, rank
from slipstream.kernels import batch as batch_kernels
from slipstream.kernels.attention import Tiles, choose_splits
from slipstream.logprobs import Wanted
from slipstream.plan import NUM_VERDICT_COLUMNS, Decision, Float32s, StepPlan

# What stages write that is exported.
FENCES: dict[Stage, str] = {"draft": "confidence", "accept": "result", "report": "logprobs"}
PREFILL_BLOCK_Q = 16  # query rows of an attention tile where somebody prefills
# Of every tile of an engine that is deterministic: with 7 drafts, what is the best for verification.
DETERMINISTIC_BLOCK_Q = 8
# `rank` writes the widths of its own padded shape; `layout` may read more of them, which must be 0 as all padding's.
_NO_WIDTHS = np.zeros(0, np.int64)


def decode_block_q(num_drafts: int) -> int:
    """Query rows of a decoding sequence's tile, a power of two: room for its given row and all drafts."""
    return 1 << num_drafts.bit_length()


@dataclass(frozen=True, slots=True, eq=False)
class TiledBatch(Batch):
    """What fused attention and acceptance go by; every field is the leading part of a buffer of its own."""

    slots: Tensor  # [B]
    emits: Tensor  # [B] bool
    draft_index: Tensor  # [R] where each draft row finds its token, -1 for all others
    tiles: Tiles

    @property
    def output_slots(self) -> Tensor:
        """[O], of padding rows anybody's."""
        return self.slots[self.output_sequence.clamp(min=0)]


@dataclass(frozen=True, slots=True, eq=False)
class StepBuffers:
    """What stages and steps hand to each other."""

    drafts: Tensor  # [N, S] int64, target ids
    previous: Tensor  # [N, S] int64, the token before each draft
    signal: Tensor  # [N * S] fp32; a draft of length d has its confidences in the first D * d, as [D, d]
    result: Tensor  # [N, NUM_VERDICT_COLUMNS + S + 1] int32, see `Verdict`

    @classmethod
    def make(cls, num_slots: int, num_drafts: int, device: torch.device) -> "StepBuffers":
        width = max(num_drafts, 1)
        ids = torch.zeros(2, num_slots, width, dtype=torch.int64, device=device)
        signal = torch.zeros(num_slots * width, dtype=torch.float32, device=device)
        result = torch.zeros(num_slots, NUM_VERDICT_COLUMNS + num_drafts + 1, dtype=torch.int32, device=device)
        return cls(ids[0], ids[1], signal, result)

    def signal_of(self, num_sequences: int, draft_length: int) -> Tensor:
        return self.signal[: num_sequences * draft_length].view(num_sequences, draft_length)


class TritonBackend:
    """Stages by kernels over buffers at fixed addresses, replayed where their padded shape was captured.

    Without `graphs` nothing is captured and every stage is launched as it is: so it runs in Triton's interpreter.
    """

    def __init__(
        self, state: SlotState, *, page_size: int, num_kv_heads: int, buckets: Buckets, max_rows: int, num_drafts: int,
        pads_drafts: bool, graphs: Graphs | None, deterministic: bool = False,
    ) -> None:  # fmt: skip
        """max_rows: rows of any step, bucketed or not. pads_drafts: the drafter takes padded sequences.

        deterministic: attention is cut by positions alone, not by how many rows or sequences a step has.
        """
        device, num_slots = state.context.device, state.padding_slot
        self.state = state
        self.buckets = buckets
        self.buffers = StepBuffers.make(num_slots, num_drafts, device)
        self.graphs = graphs
        self.captures = graphs is not None
        self._branch = Branch(device if self.captures else None)
        self._deterministic = deterministic
        self.row_buckets = buckets.rows
        self.mixed_row_buckets = buckets.prefill_rows
        self._page_size = page_size
        self._num_kv_heads = num_kv_heads
        self._num_drafts = num_drafts
        self.pads_drafts = pads_drafts
        max_outputs = num_slots * (num_drafts + 1)
        self._rows = batch_kernels.make_rows(
            num_sequences=num_slots, num_rows=max_rows, num_outputs=max_outputs, num_tiles=max_rows, device=device
        )
        self._reports = OutputReports(num_slots, num_drafts, device)
        self._uploader = Uploader(device)
        self._most_writes = 4 * num_slots + 64
        self._padding = {"slots": num_slots, "num_given": 0, "emits": 0, "teaches": 0, "writes": -1}
        self._plan = Mailbox(
            {"slots": ((num_slots,), np.int64), "num_given": ((num_slots,), np.int64), "emits": ((num_slots,), np.bool_),
             "teaches": ((num_slots,), np.bool_), "writes": ((self._most_writes, 3), np.int64)}, device,
        )  # fmt: skip
        self._decision = Mailbox(
            {"widths": ((num_slots,), np.int64), "caps": ((num_slots,), np.int64), "budget": ((1,), np.int64),
             "calibration": ((2, max(num_drafts, 1), 2), np.float32)}, device, beside=num_drafts > 0,
        )  # fmt: skip
        self.no_widths = self._decision.received["widths"]  # where widths arrive; none are there yet
        self._loaded = PlanOnDevice(*(self._plan.received[name] for name in ("slots", "num_given", "emits", "teaches")))
        # What arrived last and is still there: a copy before a graph costs the device 7 to 10 us.
        self._members_np: dict[str, NDArray[Any]] = {}
        self._widths_np: NDArray[Any] | None = _NO_WIDTHS  # None: `rank` has written over them

    # ------------------------------------------------------------------ what a plan and a decision become

    def load(self, plan: StepPlan) -> PlanOnDevice:
        if plan.admissions:
            self._admit(plan)
        writes = plan.page_writes_np
        if len(writes) > self._most_writes:  # of a step in which many begin
            moved = self._uploader.upload({"writes": writes.astype(np.int64)})
            batch_kernels.write_pages(self.state.page_table, moved["writes"])
            writes = writes[:0]
        self._decision.free()  # the step before is launched; this one's decision goes down while its drafts are made
        members = {"slots": plan.slots_np, "num_given": plan.num_given_np, "emits": plan.emits_np,
                   "teaches": plan.teaches_np}  # fmt: skip
        if len(writes) or any(self._members_np.get(name) is not array for name, array in members.items()):
            self._plan.post({**members, "writes": writes}, self._padding)
            self._members_np = members
        if len(writes):
            (self.replay("load", None) or self.load_stage)()
        return self._loaded

    def load_stage(self) -> None:
        """Pages that arrived with the plan enter page tables; a slot below 0 is padding."""
        batch_kernels.write_pages(self.state.page_table, self._plan.received["writes"])

    def _admit(self, plan: StepPlan) -> None:
        new = plan.admissions
        starts = np.cumsum([0, *(len(a.token_ids_np) for a in new)])
        moved = self._uploader.upload({
            "slots": np.array([a.slot for a in new], np.int64),
            "cu_tokens": starts.astype(np.int64),
            "tokens": np.concatenate([a.token_ids_np for a in new]).astype(np.int32),
            "context": np.array([a.num_cached for a in new], np.int64),
            "temperature": np.array([a.temperature for a in new], np.float32),
            "top_k": np.array([a.top_k for a in new], np.int64),
            "top_p": np.array([a.top_p for a in new], np.float32),
            "min_p": np.array([a.min_p for a in new], np.float32),
            "seed": np.array([a.seed for a in new], np.int64),
            "repetition": np.array([a.repetition_penalty for a in new], np.float32),
            "frequency": np.array([a.frequency_penalty for a in new], np.float32),
            "presence": np.array([a.presence_penalty for a in new], np.float32),
            "num_prompt": np.array([a.num_prompt for a in new], np.int64),
            **packed_edits(new),
        })  # fmt: skip
        state = self.state
        batch_kernels.admit(
            batch_kernels.Admissions(**moved), token_ids=state.token_ids, context=state.context,
            page_table=state.page_table, temperature=state.temperature, top_k=state.top_k, top_p=state.top_p,
            min_p=state.min_p, seed=state.seed, shaping=state.shaping,
        )  # fmt: skip

    def place(self, decision: Decision) -> Tensor:
        assert decision.widths_np is not None
        if not _equal_widths(decision.widths_np, self._widths_np):
            self._decision.post({"widths": decision.widths_np}, {"widths": 0})
            self._widths_np = decision.widths_np.copy()
        return self._decision.received["widths"]

    def rank(self, plan: StepPlan, decision: Decision, signal: Tensor, calibration_np: Float32s) -> Tensor:
        """The signal is where `hold` left it: a captured stage has no argument."""
        assert decision.budget is not None
        self._widths_np = None
        # A step in which somebody prefills may be padded to more sequences than are ranked: those have no widths.
        self._decision.post(
            {"widths": _NO_WIDTHS, "caps": decision.caps_np, "budget": np.array([decision.budget]),
             "calibration": calibration_np}, {"widths": 0, "caps": 0},
        )  # fmt: skip
        shape = DraftShape(self.buckets.pad_sequences(plan.num_sequences), plan.draft_length, 0)
        replay = self.replay("rank", shape)
        if replay is None:
            return self.rank_stage(shape)
        replay()
        return self._decision.received["widths"]

    def rank_stage(self, shape: DraftShape) -> Tensor:
        """What stands in the rows of sequences with cap 0 does not matter."""
        moved, count = self._decision.received, shape.num_sequences
        signal = self.buffers.signal_of(count, shape.draft_length)
        rank.rank(
            signal, shape.draft_length, moved["calibration"], self._loaded.slots[:count], self.state.temperature,
            moved["caps"][:count], moved["budget"], moved["widths"][:count],
        )  # fmt: skip
        return moved["widths"]

    # ------------------------------------------------------------------ shapes and replays

    def draft_shape(self, plan: StepPlan) -> DraftShape:
        if self.pads_drafts:
            return self.buckets.draft(plan.num_decode, plan.draft_length)
        count = plan.num_decode
        return DraftShape(count, plan.draft_length, int(plan.context_upper_bound_np[:count].max()))

    def verify_shape(self, plan: StepPlan, decision: Decision) -> VerifyShape:
        num_drafts = decision.num_draft_rows
        return self.buckets.verify(
            plan.num_sequences,
            plan.num_given + num_drafts,
            plan.num_emitting + num_drafts,
            decode_only=plan.num_decode == plan.num_sequences,
            filtered=plan.any_filtered,
            shaped=plan.any_shaped,
            struck=plan.any_constrained,
        )

    def replay(self, stage: Stage, shape: DraftShape | VerifyShape | None) -> Callable[[], object] | None:
        if stage == "verify" and isinstance(shape, VerifyShape) and (shape.filtered or shape.shaped or shape.struck):
            shape = replace(shape, filtered=False, shaped=False, struck=False)  # logits are changed afterwards
        captured = self.graphs.find((stage, shape)) if self.graphs else None
        return None if captured is None else captured.replay

    def beside(self, function: Callable[[], object]) -> AbstractContextManager[None]:
        return self._branch.beside(function)

    def before(self, stage: Stage, exporter: Exporter) -> None:
        exporter.fence(FENCES[stage])

    # ------------------------------------------------------------------ stages

    def hold(self, drafts: Tensor, signal: Tensor) -> None:
        if drafts.data_ptr() != self.buffers.drafts.data_ptr():
            self.buffers.drafts[: len(drafts), : drafts.shape[1]].copy_(drafts)
        if signal.data_ptr() != self.buffers.signal.data_ptr():
            self.buffers.signal_of(*signal.shape).copy_(signal)

    def layout(self, loaded: PlanOnDevice, widths: Tensor, shape: VerifyShape) -> TiledBatch:
        count = shape.num_sequences
        tiles = self._tiles(shape)
        rows, whole = {}, self._rows
        for name, size in (
            ("cu_outputs", count + 1), ("positions", shape.num_rows), ("kv_slots", shape.num_rows),
            ("token_ids", shape.num_rows), ("draft_index", shape.num_rows), ("output_rows", shape.num_outputs),
            ("output_sequence", shape.num_outputs), ("output_offset", shape.num_outputs),
        ):  # fmt: skip
            rows[name] = getattr(whole, name)[:size]
        slots, num_given, emits = (x[:count] for x in (loaded.slots, loaded.num_given, loaded.emits))
        batch_kernels.layout(
            slots, num_given, emits, widths[:count], context=self.state.context, page_table=self.state.page_table,
            token_ids=self.state.token_ids, page_size=self._page_size, block_q=tiles.block_q,
            draft_stride=self.buffers.drafts.shape[1], out=batch_kernels.Rows(**rows, tiles=tiles.records),
        )  # fmt: skip
        return TiledBatch(
            widths=widths[:count], num_given=num_given, slots=slots, emits=emits, tiles=tiles, **rows
        )  # fmt: skip

    def _tiles(self, shape: VerifyShape) -> Tiles:
        """Decoding sequences have one tile each, with room for the most rows that one may have, if that size is free."""
        if self._deterministic:
            block_q = DETERMINISTIC_BLOCK_Q
        else:
            block_q = decode_block_q(self._num_drafts) if shape.decode_only else PREFILL_BLOCK_Q
        if shape.decode_only and self._num_drafts < block_q:
            count = shape.num_sequences
        else:
            count = batch_kernels.max_tiles(shape.num_sequences, shape.num_rows, block_q)
        splits = 1 if self._deterministic else choose_splits(count, self._num_kv_heads, self.state.max_len)
        return Tiles(self._rows.tiles[:count], block_q, splits)

    def fill(self, batch: Batch, drafts: Tensor | None) -> Tensor:
        """Drafts are where `hold` left them: a captured stage has no argument."""
        assert isinstance(batch, TiledBatch)
        batch_kernels.fill(batch.token_ids, batch.draft_index, self.buffers.drafts)
        return batch.token_ids

    def send(self, arrays: dict[str, NDArray[Any]]) -> dict[str, Tensor]:
        return self._uploader.upload(arrays)

    def report(self, logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
        return logprobs.report(logits, rows, token_ids, num_top)

    def report_outputs(
        self, wanted: Wanted, decision: Decision, batch: Batch, logits: Tensor, result: Tensor
    ) -> Tensor:
        reports, (count, vocab_size) = self._reports, (len(result), logits.shape[1])
        reports.ask(wanted, count, vocab_size)
        captured = self.graphs.find(("report", count)) if self.graphs else None
        if captured is not None and reports.are_recorded(logits, result):
            captured.replay()
        else:
            reports.stage(logits, batch.cu_outputs, result)
        return reports.sent(wanted, vocab_size)

    def report_stage(self, num_sequences: int, logits: Tensor, result: Tensor) -> None:
        """To be captured: of what any step with so many sequences emits. logits, result: what every step has, or parts."""
        self._reports.record(logits, result)
        self._reports.stage(logits, self._rows.cu_outputs[: num_sequences + 1], result[:num_sequences])

    def apply(self, loaded: PlanOnDevice, result: Tensor) -> None:
        count = len(result)
        accept.apply(
            result, slots=loaded.slots[:count], num_given=loaded.num_given[:count], emits=loaded.emits[:count],
            context=self.state.context, token_ids=self.state.token_ids,
        )  # fmt: skip


def _equal_widths(widths_np: NDArray[Any], placed_np: NDArray[Any] | None) -> bool:
    """Whether the widths that were placed are these; behind the last of either are zeros."""
    if placed_np is None:
        return False
    count = min(len(widths_np), len(placed_np))
    same = np.array_equal(widths_np[:count], placed_np[:count])
    return same and not widths_np[count:].any() and not placed_np[count:].any()
