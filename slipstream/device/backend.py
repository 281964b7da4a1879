"""The seam between the engine's stages and how a device does them; and plain torch, which does them anywhere.

A backend owns what a step needs on the device beside networks and caches: slot state, the places where plans and
decisions arrive, the ops of the stages `load`, `rank`, `layout`, `fill` and `apply`, and whether stages are run as they
are or replayed. `TorchBackend` keeps exact sizes and replays nothing. `TritonBackend` (device/triton.py) pads and captures.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.cache.pool import KVPool
from slipstream.device.batch import Batch, RaggedBatch, fill, layout
from slipstream.device.shapes import DraftShape, Stage, VerifyShape
from slipstream.device.staging import Exporter, Uploader
from slipstream.device.state import PlanOnDevice, SlotState, apply_verdict, load
from slipstream.logprobs import Wanted
from slipstream.ops.attention import Segment
from slipstream.ops.logprobs import report
from slipstream.ops.rank import rank
from slipstream.ops.survival import fresh_survival
from slipstream.plan import NUM_ACCEPTED, NUM_VERDICT_COLUMNS, Decision, Float32s, StepPlan


class Backend(Protocol):
    state: SlotState
    captures: bool  # stages can be recorded and replayed
    row_buckets: tuple[int, ...]  # what the rows of a decode step are padded up to; none: steps are exact
    mixed_row_buckets: tuple[int, ...]  # the same of steps with rows of prompts

    def load(self, plan: StepPlan) -> PlanOnDevice:
        """Stage `load`: the plan's admissions and pages enter slot state, its vectors arrive."""

    def draft_shape(self, plan: StepPlan) -> DraftShape: ...

    def verify_shape(self, plan: StepPlan, decision: Decision) -> VerifyShape: ...

    def replay(self, stage: Stage, shape: DraftShape | VerifyShape) -> "Callable[[], object] | None":
        """What stands for the stage at this shape if it was captured; it returns what the stage did then."""

    def place(self, decision: Decision) -> Tensor:
        """Widths [B] that the host chose arrive."""

    def rank(self, plan: StepPlan, decision: Decision, signal: Tensor, calibration_np: Float32s) -> Tensor:
        """Stage `rank`: widths [B] by this step's survival, from signal [D, d]; the host chose their sum."""

    def layout(self, loaded: PlanOnDevice, widths: Tensor, shape: VerifyShape) -> Batch:
        """Stage `layout`."""

    def fill(self, batch: Batch, drafts: Tensor | None) -> Tensor:
        """Stage `fill`: token ids [R], the drafts [D, d] in their rows."""

    def apply(self, loaded: PlanOnDevice, result: Tensor) -> None:
        """Stage `apply`: the verdict's result [B, NUM_VERDICT_COLUMNS + W + 1] moves slot state on."""

    def hold(self, drafts: Tensor, signal: Tensor) -> None:
        """Keep the drafts [D, d] and their confidences where captured stages look for them."""

    def send(self, arrays: dict[str, NDArray[Any]]) -> dict[str, Tensor]:
        """More than a plan and a decision bring, in steps that need it: by a copy of its own."""

    def report(self, logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
        """Stage `report`: see `ops.logprobs.report`."""

    def report_outputs(
        self, wanted: Wanted, decision: Decision, batch: Batch, logits: Tensor, result: Tensor
    ) -> Tensor:
        """The same of what a step emitted, as a vector [A * places * columns], places of each sequence side by side.

        Behind the last token that was emitted stands anything: `commit` does not look at it. result: the verdict's.
        """

    def beside(self, function: Callable[[], object]) -> AbstractContextManager[None]:
        """The function's launches before those of the block, or beside them: neither may read what the other writes."""

    def before(self, stage: Stage, exporter: Exporter) -> None:
        """Called ahead of `draft`, `accept` and `report`, whose outputs may still be on their way to the host."""


class TorchBackend:
    """Every stage at the step's exact sizes, on any device: what other backends are compared with."""

    captures = False
    row_buckets: tuple[int, ...] = ()
    mixed_row_buckets: tuple[int, ...] = ()

    def __init__(self, state: SlotState, page_size: int, pools: tuple[KVPool, ...], device: torch.device) -> None:
        self.state = state
        self._page_size = page_size
        self._pools = pools
        self._uploader = Uploader(device)

    def load(self, plan: StepPlan) -> PlanOnDevice:
        return load(self.state, plan, self._uploader, self._pools)

    def draft_shape(self, plan: StepPlan) -> DraftShape:
        count = plan.num_decode
        return DraftShape(count, plan.draft_length, int(plan.context_upper_bound_np[:count].max()))

    def verify_shape(self, plan: StepPlan, decision: Decision) -> VerifyShape:
        num_drafts = decision.num_draft_rows
        num_outputs = plan.num_emitting + num_drafts
        return VerifyShape(
            num_sequences=plan.num_sequences,
            num_rows=plan.num_given + num_drafts,
            num_outputs=num_outputs,
            decode_only=plan.num_decode == plan.num_sequences,
            draft_length=plan.draft_length,
            filtered=plan.any_filtered,
            shaped=plan.any_shaped,
            struck=plan.any_constrained,
            keeps_hidden=plan.reads_prompts,
            segments=_segments(plan, decision),
            exact=(plan.num_sequences, num_outputs),
        )

    def replay(self, stage: Stage, shape: DraftShape | VerifyShape) -> None:
        return None

    def hold(self, drafts: Tensor, signal: Tensor) -> None:
        pass

    @contextmanager
    def beside(self, function: Callable[[], object]) -> Iterator[None]:
        function()
        yield

    def before(self, stage: Stage, exporter: Exporter) -> None:
        pass

    def place(self, decision: Decision) -> Tensor:
        assert decision.widths_np is not None
        return self._uploader.upload({"widths": decision.widths_np.astype(np.int64)})["widths"]

    def rank(self, plan: StepPlan, decision: Decision, signal: Tensor, calibration_np: Float32s) -> Tensor:
        assert decision.budget is not None
        count = plan.num_decode
        moved = self._uploader.upload({
            "caps": decision.caps_np.astype(np.int64), "calibration": calibration_np, "sampled": plan.sampled_np[:count]
        })  # fmt: skip
        survival = fresh_survival(signal, moved["calibration"], moved["sampled"])
        widths = torch.zeros_like(moved["caps"])
        widths[:count] = rank(survival, moved["caps"][:count], decision.budget)
        return widths

    def send(self, arrays: dict[str, NDArray[Any]]) -> dict[str, Tensor]:
        return self._uploader.upload(arrays)

    def report(self, logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
        return report(logits, rows, token_ids, num_top)

    def report_outputs(
        self, wanted: Wanted, decision: Decision, batch: Batch, logits: Tensor, result: Tensor
    ) -> Tensor:
        sequences = self.send({"sequences": wanted.sequences_np})["sequences"]
        step = torch.arange(_places(wanted, decision), device=result.device)
        row = (batch.cu_outputs[sequences, None] + step).clamp_(max=len(logits) - 1)
        token_ids = result[sequences, NUM_VERDICT_COLUMNS : NUM_VERDICT_COLUMNS + len(step)].long()
        token_ids = token_ids.clamp_(0, logits.shape[1] - 1)
        return self.report(logits, row.flatten(), token_ids.flatten(), wanted.num_top).flatten()

    def layout(self, loaded: PlanOnDevice, widths: Tensor, shape: VerifyShape) -> RaggedBatch:
        return layout(self.state, loaded, widths, shape.num_rows, shape.num_outputs, self._page_size)

    def fill(self, batch: Batch, drafts: Tensor | None) -> Tensor:
        assert isinstance(batch, RaggedBatch)
        return batch.token_ids if drafts is None else fill(batch, drafts)

    def apply(self, loaded: PlanOnDevice, result: Tensor) -> None:
        apply_verdict(self.state, loaded, result[:, NUM_ACCEPTED].long(), result[:, NUM_VERDICT_COLUMNS:])


def _places(wanted: Wanted, decision: Decision) -> int:
    """Output rows that one of the sequences has at most: its row of the given token, and the drafts'."""
    sequences = wanted.sequences_np
    if decision.widths_np is not None:
        return 1 + int(decision.widths_np[sequences].max())
    return 1 + min(int(decision.caps_np[sequences].max()), int(decision.budget or 0))


def _segments(plan: StepPlan, decision: Decision) -> tuple[Segment, ...]:
    """Decoding sequences are attended together, every prefill chunk by itself; bounds the host knows."""
    drafts = decision.caps_np if decision.widths_np is None else decision.widths_np
    rows = plan.num_given_np + drafts
    kv = plan.context_upper_bound_np + rows
    count = plan.num_decode
    decode = [Segment(0, count, int(rows[:count].max()), int(kv[:count].max()))] if count else []
    chunks = [Segment(i, i + 1, int(rows[i]), int(kv[i])) for i in range(count, plan.num_sequences)]
    return tuple(decode + chunks)
