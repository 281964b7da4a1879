"""Steps on made-up plans: the engine runs them exactly as real ones, on requests that do not exist.

Used to measure step times (`slipstream profile`, and the cost model made at start), and to find out what memory the
largest steps take (`slipstream.peak`). The engine must be idle; pages are as before when a timed rehearsal ends, and
slot state holds nothing that an admission would not overwrite.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from slipstream.config import MAX_LOGPROBS
from slipstream.engine import Engine, Flight
from slipstream.errors import CapacityError
from slipstream.logprobs import PromptPart, Wanted
from slipstream.plan import Admission, Decision, Int32s, StepPlan

WORST_CONTEXT = 2048  # tokens before the rows of a largest step; where attention is fused they make no difference
# Steps full of prompts that are run, each beside more that decode: as many are served while a batch fills up, each a little
# larger than the one before, and what an allocator kept of that one is too small for it.
NUM_FILLING = 5


@dataclass(frozen=True, slots=True)
class StepTime:
    """Median device time of the two halves of a step."""

    draft_ms: float  # 0 without drafts
    verify_ms: float  # layout to export


@torch.inference_mode()
def time_step(
    engine: Engine, *, num_sequences: int, width: int, context: int, draft_length: int | None = None, chunk: int = 0,
    repeats: int = 5,
) -> StepTime:  # fmt: skip
    """Time a step in which `num_sequences` decode, each with `context` tokens of KV and `width` drafts to verify.

    draft_length: drafts per sequence, at least `width` (default: equal to it). chunk: rows of one more sequence, a whole
    prompt, which emits its first token. One step is run first and not counted.
    """
    length = width if draft_length is None else draft_length
    assert length >= width, (length, width)
    shape = _Shape(num_sequences, context, length, chunk)
    widths = np.minimum(shape.caps_np, np.int32(width))
    decision = Decision(widths_np=widths, budget=None, caps_np=widths)
    flights = []
    with _made_up_requests(engine, shape) as plan:
        for _ in range(repeats + 1):  # all launched before the first is waited for: a GPU must not wait for the host
            engine.state.context[:num_sequences].fill_(context)
            engine.state.context[num_sequences : plan.num_sequences].zero_()
            flights.append(engine.launch_verify(engine.launch_draft(plan, True), decision))
        flights[-1].result.wait()
    draft_ms, verify_ms = np.median(np.array([flight.device_ms for flight in flights[1:]]), axis=0).tolist()
    return StepTime(draft_ms if length else 0.0, verify_ms)


@torch.inference_mode()
def run_largest_steps(engine: Engine) -> list[StepPlan]:
    """The steps that take most memory, one in flight behind the other; returns their plans.

    All slots at S + 1 rows, and as many given rows of prompts beside drafts as a step may have, in steps that grow;
    everybody asks for all that costs memory: sampling, filters, penalties, log-probabilities. All rows lie on one page, so
    that the smallest pool will do; the engine is of no use for anything else afterwards.
    """
    limits, state = engine.scheduler.limits, engine.state
    count = limits.max_num_seqs
    context = max(0, min(WORST_CONTEXT, limits.max_model_len - limits.max_drafts - 2))
    state.page_table[:count].fill_(engine.scheduler.pages.take(1)[0])
    for column, value in ((state.temperature, 1.0), (state.top_k, 50), (state.top_p, 0.9), (state.min_p, 1e-3)):
        column[:count].fill_(value)
    for column, value in ((state.shaping.repetition, 1.1), (state.shaping.frequency, 0.1)):
        column[:count].fill_(value)
    plans = [_largest_step(engine, context, count, [])]
    plans += [_largest_step(engine, context, decoding, _chunks(engine, decoding)) for decoding in _filling(engine)]
    previous: Flight | None = None
    for plan in plans:
        state.context[: plan.num_decode].fill_(context)
        state.context[plan.num_decode : count].zero_()
        widths = plan.caps_np
        drafted = engine.launch_draft(plan, False)
        flight = engine.launch_verify(drafted, Decision(widths_np=widths, budget=None, caps_np=widths))
        if previous is not None:
            previous.result.wait()
        previous = flight
    assert previous is not None
    previous.result.wait()
    return plans


def _filling(engine: Engine) -> list[int]:
    """How many decode beside the prompts of each step: none at first, in the end as many as leave a step full."""
    limits = engine.scheduler.limits
    wanted = limits.max_num_batched_tokens
    fitting = (n for n in range(limits.max_num_seqs - 1, 0, -1) if n + sum(_chunks(engine, n)) == wanted)
    most = next(fitting, 0)
    return sorted({most * step // (NUM_FILLING - 1) for step in range(NUM_FILLING)})


def _chunks(engine: Engine, num_decode: int) -> list[int]:
    """Given rows of the prompts that fill a step beside so many that decode, in as few slots as possible."""
    limits, chunks = engine.scheduler.limits, list[int]()
    spare = limits.max_num_batched_tokens - num_decode
    while spare > 0 and num_decode + len(chunks) < limits.max_num_seqs:
        chunks.append(min(spare, limits.max_model_len - 1))
        spare -= chunks[-1]
    return chunks


def _largest_step(engine: Engine, context: int, num_decode: int, chunks: list[int]) -> StepPlan:
    limits, count = engine.scheduler.limits, num_decode + len(chunks)
    num_drafts = limits.max_drafts if engine.drafter is not None and num_decode else 0
    cap = min(num_drafts, limits.max_model_len - 2 - context)  # the token after the last draft has a position, too
    given = np.array([1] * num_decode + chunks, np.int32)
    starts = np.cumsum(given) - given
    prompts = tuple(PromptPart(slot, int(starts[slot]), 0, int(given[slot])) for slot in range(num_decode, count))
    whole = np.full(count, context, np.int32)
    whole[num_decode:] = 0
    return StepPlan(
        step=-1, num_decode=num_decode, draft_length=num_drafts, slots_np=np.arange(count, dtype=np.int32),
        generations_np=np.full(count, -1, np.int32), uids_np=np.full(count, -1, np.int64),
        decode_steps_np=np.zeros(count, np.int32), num_given_np=given, emits_np=np.ones(count, np.bool_),
        caps_np=np.array([cap] * num_decode + [0] * len(chunks), np.int32), context_np=whole,
        context_upper_bound_np=whole, sampled_np=np.ones(count, np.bool_), teaches_np=np.zeros(count, np.bool_),
        admissions=(), page_writes_np=np.zeros((0, 3), np.int32), any_sampled=True, any_top_k=True, any_top_p=True,
        any_min_p=True, any_penalty=True,
        logprobs=Wanted(
            sequences_np=np.arange(count, dtype=np.int64), num_top=MAX_LOGPROBS, prompts=prompts,
            num_prompt_top=MAX_LOGPROBS,
        ),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Shape:
    """Slots 0 .. num_decode - 1 decode, the one behind them prefills a chunk, if there is one."""

    num_decode: int
    context: int
    draft_length: int
    chunk: int

    def column(self, decode: int, prefill: int) -> Int32s:
        """[B] one value for those that decode, another for the chunk."""
        return np.array([decode] * self.num_decode + [prefill] * bool(self.chunk), np.int32)

    @property
    def caps_np(self) -> Int32s:
        return self.column(self.draft_length, 0)

    @property
    def num_positions(self) -> int:
        """Of the longest sequence, after the step."""
        return max(self.context + 1 + self.draft_length, self.chunk + 1)


@contextmanager
def _made_up_requests(engine: Engine, shape: _Shape) -> Iterator[StepPlan]:
    """A plan of that shape; the pages it needs are taken for the duration."""
    assert not engine.has_work, "a rehearsal needs an idle engine"
    pages, most = engine.scheduler.pages, engine.scheduler.limits.max_model_len
    if shape.num_positions > most:
        raise CapacityError(f"a step of {shape} goes beyond max_model_len {most}")
    count, per_sequence = len(shape.caps_np), pages.pages_for(shape.num_positions)
    if count > engine.scheduler.limits.max_num_seqs:
        raise CapacityError(f"a step of {shape} needs {count} slots; raise max_num_seqs")
    if per_sequence * count > pages.num_free:
        raise CapacityError(f"a step of {shape} needs {per_sequence * count} KV pages")
    taken = pages.take(per_sequence * count)
    writes = [(i // per_sequence, i % per_sequence, page) for i, page in enumerate(taken)]
    # Tokens that differ, as in service: where rows are all alike, a GPU draws less power and keeps a higher clock.
    known = np.random.default_rng(0).integers(engine.vocab_size, size=(count, shape.num_positions), dtype=np.int32)
    admissions = tuple(
        Admission(slot=slot, token_ids_np=known[slot], temperature=0.0, top_k=0, top_p=1.0, seed=0)
        for slot in range(count)
    )
    try:
        setup = _plan(replace(shape, draft_length=0), admissions, np.array(writes, np.int32))
        engine.backend.load(setup)
        yield _plan(shape, (), np.zeros((0, 3), np.int32))
    finally:
        pages.give(taken)


def _plan(shape: _Shape, admissions: tuple[Admission, ...], page_writes_np: Int32s) -> StepPlan:
    context = shape.column(shape.context, 0)
    count = len(context)
    ones = np.ones(count, np.int32)
    return StepPlan(
        step=-1, num_decode=shape.num_decode, draft_length=shape.draft_length, slots_np=np.arange(count, dtype=np.int32),
        generations_np=-ones, uids_np=-ones.astype(np.int64), decode_steps_np=0 * ones,
        num_given_np=shape.column(1, shape.chunk), emits_np=ones.astype(np.bool_), caps_np=shape.caps_np,
        context_np=context, context_upper_bound_np=context, sampled_np=np.zeros(count, np.bool_),
        teaches_np=np.zeros(count, np.bool_), admissions=admissions, page_writes_np=page_writes_np, any_sampled=False,
        any_top_k=False, any_top_p=False,
    )  # fmt: skip
