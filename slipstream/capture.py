"""Record an engine's stages as CUDA graphs, at every shape that its backend pads to.

What is captured is what a step runs, on a plan in which nobody takes part: all sequences are padding, so kernels do
their work on the scratch page and slot state stays as it is. Called once, by `build`, before the first request.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from slipstream.device.graphs import garbage_left_alone
from slipstream.device.triton import TritonBackend
from slipstream.engine import Drafted, Engine
from slipstream.plan import StepPlan

Say = Callable[[int, int], None]  # stages recorded so far, and in all


@torch.inference_mode()
@garbage_left_alone()
def capture(engine: Engine, draft_lengths: Sequence[int], say: Say) -> int:
    """Capture drafts of these lengths and all padded shapes of the other stages; returns the number of graphs.

    Stages that go by numbers of the host (a drafter or a rule without kernels) are left as they are.
    """
    backend = engine.backend
    assert isinstance(backend, TritonBackend) and backend.graphs is not None, "this backend captures nothing"
    graphs, plan = backend.graphs, nobody()
    loaded = backend.load(plan)
    rule = engine.rule.begin(backend.state, loaded, plan, engine.vocab_size)
    drafted = Drafted(plan, loaded, rule, None, None, None, None)
    drafts = list(backend.buckets.draft_shapes(draft_lengths)) if backend.pads_drafts else []
    verifies = list(backend.buckets.verify_shapes())
    graphs.capture(("load", None), backend.load_stage)
    sizes = backend.buckets.report_sizes()
    total = 1 + 2 * len(drafts) + len(verifies) * (1 + 2 * engine.rule.captures) + len(sizes)
    for draft_shape in drafts:
        graphs.capture(("draft", draft_shape), partial(engine.draft_stage, draft_shape, loaded, rule, plan.step))
        graphs.capture(("rank", draft_shape), partial(backend.rank_stage, draft_shape))
        say(len(graphs), total)
    for shape in verifies:
        rows = graphs.capture(("verify", shape), partial(engine.verify_stages, shape, drafted, backend.no_widths))
        if engine.rule.captures:
            for each in (shape, replace(shape, shaped=True)):  # without and with penalties and edits
                graphs.capture(("accept", each), partial(engine.accept_stages, each, drafted, rows))
        say(len(graphs), total)
    for size in sizes:
        stage = partial(backend.report_stage, size, rows.logits, backend.buffers.result)
        graphs.capture(("report", size), stage)
    say(len(graphs), total)
    return len(graphs)


def nobody() -> StepPlan:
    """A plan without sequences."""
    none = np.zeros(0, np.int32)
    return StepPlan(
        step=-1, num_decode=0, draft_length=0, slots_np=none, generations_np=none, uids_np=none.astype(np.int64),
        decode_steps_np=none, num_given_np=none, emits_np=none.astype(np.bool_), caps_np=none, context_np=none,
        context_upper_bound_np=none, sampled_np=none.astype(np.bool_), teaches_np=none.astype(np.bool_), admissions=(),
        page_writes_np=np.zeros((0, 3), np.int32), any_sampled=False, any_top_k=False, any_top_p=False,
    )  # fmt: skip
