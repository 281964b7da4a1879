"""Record an engine's stages as CUDA graphs, at every shape that its backend pads to.

What is captured is what a step runs, on a plan in which nobody takes part: all sequences are padding, so kernels do
their work on the scratch page and slot state stays as it is. Called once, by `build`, before the first request.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from slipstream.device.graphs import garbage_left_alone
from slipstream.device.shapes import DraftShape, VerifyShape
from slipstream.device.triton import TritonBackend
from slipstream.engine import Drafted, Engine
from slipstream.plan import StepPlan
from slipstream.verify.accept import Rule

Say = Callable[[int, int], None]  # stages recorded so far, and in all


@dataclass(frozen=True, slots=True)
class Shapes:
    """What an engine captures, each kind with its largest first: smaller ones fit into the memory that these took."""

    drafts: list[DraftShape]
    verifies: list[VerifyShape]
    reports: tuple[int, ...]  # sequences
    graphs_per_verify: int

    @classmethod
    def of(cls, engine: Engine, draft_lengths: Sequence[int]) -> "Shapes":
        backend = engine.backend
        assert isinstance(backend, TritonBackend), "this backend captures nothing"
        drafts = list(backend.buckets.draft_shapes(draft_lengths)) if backend.pads_drafts else []
        verifies, sizes = list(backend.buckets.verify_shapes()), backend.buckets.report_sizes()
        return cls(drafts, verifies, sizes, 1 + len(accept_shapes(engine.rule, verifies[0])))

    @property
    def num_graphs(self) -> int:
        return 1 + 2 * len(self.drafts) + len(self.verifies) * self.graphs_per_verify + len(self.reports)

    def __iter__(self) -> Iterator[DraftShape | VerifyShape | int]:
        """Reports last: they read what verification left."""
        yield from self.drafts
        yield from self.verifies
        yield from self.reports


@torch.inference_mode()
@garbage_left_alone()
def capture(engine: Engine, draft_lengths: Sequence[int], say: Say) -> int:
    """Capture drafts of these lengths and all padded shapes of the other stages; returns the number of graphs.

    Stages that go by numbers of the host (a drafter or a rule without kernels) are left as they are.
    """
    shapes, recording = Shapes.of(engine, draft_lengths), Recording(engine)
    for shape in shapes:
        recording.capture(shape)
        say(recording.count, shapes.num_graphs)
    return recording.count


class Recording:
    """Captures shapes of an engine one by one, in whatever order it is asked to, but reports after a verification."""

    def __init__(self, engine: Engine) -> None:
        backend = engine.backend
        assert isinstance(backend, TritonBackend) and backend.graphs is not None, "this backend captures nothing"
        self._engine, self._backend, self._graphs = engine, backend, backend.graphs
        plan = nobody()
        loaded = backend.load(plan)
        rule = engine.rule.begin(backend.state, loaded, plan, engine.vocab_size)
        self._drafted = Drafted(plan, loaded, rule)
        self._logits: torch.Tensor | None = None
        self._graphs.capture(("load", None), backend.load_stage)

    @property
    def count(self) -> int:
        return len(self._graphs)

    def capture(self, shape: DraftShape | VerifyShape | int) -> None:
        if isinstance(shape, DraftShape):
            self._capture_draft(shape)
        elif isinstance(shape, VerifyShape):
            self._capture_verify(shape)
        else:
            assert self._logits is not None, "reports come last"
            stage = partial(self._backend.report_stage, shape, self._logits, self._backend.buffers.result)
            self._graphs.capture(("report", shape), stage)

    def _capture_draft(self, shape: DraftShape) -> None:
        drafted = self._drafted
        stage = partial(self._engine.draft_stage, shape, drafted.loaded, drafted.rule, drafted.plan.step)
        self._graphs.capture(("draft", shape), stage)
        self._graphs.capture(("rank", shape), partial(self._backend.rank_stage, shape))

    def _capture_verify(self, shape: VerifyShape) -> None:
        engine, drafted = self._engine, self._drafted
        stages = partial(engine.verify_stages, shape, drafted, self._backend.no_widths)
        rows = self._graphs.capture(("verify", shape), stages)
        self._logits = rows.logits
        for each in accept_shapes(engine.rule, shape):
            self._graphs.capture(("accept", each), partial(engine.accept_stages, each, drafted, rows))


def accept_shapes(rule: Rule, shape: VerifyShape) -> Sequence[VerifyShape]:
    """Under what wishes acceptance is recorded: none, penalties and edits, filters.

    The latter two together need a copy of the logits, and a grammar changes them outside of graphs: such steps are launched.
    """
    if not rule.captures:
        return ()
    wishes = (replace(shape, shaped=True), replace(shape, filtered=True)) if rule.captures_wishes else ()
    return (shape, *wishes)


def nobody() -> StepPlan:
    """A plan without sequences."""
    none = np.zeros(0, np.int32)
    return StepPlan(
        step=-1, num_decode=0, draft_length=0, slots_np=none, generations_np=none, uids_np=none.astype(np.int64),
        decode_steps_np=none, num_given_np=none, emits_np=none.astype(np.bool_), caps_np=none, context_np=none,
        context_upper_bound_np=none, sampled_np=none.astype(np.bool_), teaches_np=none.astype(np.bool_), admissions=(),
        page_writes_np=np.zeros((0, 3), np.int32), any_sampled=False, any_top_k=False, any_top_p=False,
    )  # fmt: skip
