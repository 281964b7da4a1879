"""Steps on made-up plans: the engine runs them exactly as real ones, on requests that do not exist.

Used to measure step times: `slipstream profile`, and the cost model made at start. The engine must be idle; the pages
are as before when a rehearsal ends, and slot state holds nothing that an admission would not overwrite.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.engine import Engine
from slipstream.errors import CapacityError
from slipstream.plan import Admission, Decision, StepPlan


@dataclass(frozen=True, slots=True)
class StepTime:
    """Median device time of the two halves of a step."""

    draft_ms: float  # 0 without drafts
    verify_ms: float  # layout to export


@torch.inference_mode()
def time_step(
    engine: Engine, *, num_sequences: int, width: int, context: int, draft_length: int | None = None, repeats: int = 5
) -> StepTime:
    """Time a decode step of `num_sequences`, each with `context` tokens of KV and `width` drafts to verify.

    draft_length: drafts per sequence, at least `width` (default: equal to it). One step is run first and not counted.
    """
    length = width if draft_length is None else draft_length
    assert length >= width, (length, width)
    decision = Decision(
        widths_np=np.full(num_sequences, width, np.int32), budget=None, caps_np=np.full(num_sequences, width, np.int32)
    )
    flights = []
    with _made_up_requests(engine, num_sequences, context, length) as plan:
        for _ in range(repeats + 1):  # all launched before the first is waited for: a GPU must not wait for the host
            engine.state.context[:num_sequences].fill_(context)
            flights.append(engine.launch_verify(engine.launch_draft(plan, True), decision))
        flights[-1].result.wait()
    draft_ms, verify_ms = np.median(np.array([flight.device_ms for flight in flights[1:]]), axis=0).tolist()
    return StepTime(draft_ms if length else 0.0, verify_ms)


@contextmanager
def _made_up_requests(engine: Engine, count: int, context: int, draft_length: int) -> Iterator[StepPlan]:
    """A plan in which slots 0..count-1 decode at `context`; their pages are taken for the duration."""
    assert not engine.has_work, "a rehearsal needs an idle engine"
    pages, most = engine.scheduler.pages, engine.scheduler.limits.max_model_len
    if context + 1 + draft_length > most:
        raise CapacityError(f"a step at context {context} with {draft_length} drafts goes beyond max_model_len {most}")
    per_sequence = pages.pages_for(context + 1 + draft_length)
    if per_sequence * count > pages.num_free:
        raise CapacityError(f"a step of {count} sequences at context {context} needs {per_sequence * count} KV pages")
    taken = pages.take(per_sequence * count)
    writes = [(i // per_sequence, i % per_sequence, page) for i, page in enumerate(taken)]
    known = np.zeros(context + 1, np.int32)
    admissions = tuple(
        Admission(slot=slot, token_ids_np=known, temperature=0.0, top_k=0, top_p=1.0, seed=0) for slot in range(count)
    )
    try:
        setup = _plan(count, context, 0, admissions, np.array(writes, np.int32))
        engine.backend.load(setup)
        yield _plan(count, context, draft_length, (), np.zeros((0, 3), np.int32))
    finally:
        pages.give(taken)


def _plan(
    count: int, context: int, draft_length: int, admissions: tuple[Admission, ...], page_writes_np: "np.ndarray"
) -> StepPlan:
    ones = np.ones(count, np.int32)
    return StepPlan(
        step=-1, num_decode=count, draft_length=draft_length, slots_np=np.arange(count, dtype=np.int32),
        generations_np=-ones, uids_np=-ones.astype(np.int64), decode_steps_np=0 * ones, num_given_np=ones,
        emits_np=ones.astype(np.bool_), caps_np=draft_length * ones, context_np=context * ones,
        context_upper_bound_np=context * ones, sampled_np=np.zeros(count, np.bool_), teaches_np=np.zeros(count, np.bool_),
        admissions=admissions, page_writes_np=page_writes_np, any_sampled=False, any_top_k=False, any_top_p=False,
    )  # fmt: skip
