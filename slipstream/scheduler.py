"""Who takes part in a step, with which rows, and which pages that may need. Torch-free; called by the engine only.

The scheduler runs ahead of the device: for a decoding request it knows the committed context and an upper bound, and
it reserves pages for the bound. What a bound had too much is given back when somebody asks for pages: as a rule, the
same request needs them again in the next step. When pages run short, caps of drafts go down first; only when the
requests cannot all get their one row is the newest one preempted, and never while something is in flight: `schedule`
then answers DRAIN, and the engine collects before it asks again.
Decoding requests are planned as columns of the ledger; Python per request is left for admissions and prefill.
"""

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np

from slipstream.cache.pages import PageAllocator, PageTable
from slipstream.config import MAX_BANS
from slipstream.errors import CapacityError, RequestError
from slipstream.ledger import CONSTRAINED, EDIT, MIN_P, PENALTY, SAMPLED, TOP_K, TOP_P, InFlight, Ledger, Members
from slipstream.metrics import SpecCounters
from slipstream.plan import FOREVER, Admission, Bools, Edit, Int32s, Int64s, StepPlan
from slipstream.prefixes import PrefixCache
from slipstream.request import FinishReason, Request

STEPS_UNTIL_GROWTH = 256  # after a step that found no memory, and again


class NoPlan(Enum):
    """Why there is no plan."""

    IDLE = "nothing can run before something in flight is collected, or there is no work"
    DRAIN = "a request must be preempted, and for that everything in flight must be collected first"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    max_num_seqs: int  # slots
    max_num_batched_tokens: int  # given rows per step
    max_model_len: int  # L: positions per request, its last emitted token included
    max_drafts: int  # S
    max_draft_context: int  # a block must end before this position


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A prefilling request's part of the plan that is being made."""

    slot: int
    num_given: int
    emits: bool


_Decode: TypeAlias = tuple[Int64s, Int32s]  # slots [D] in order of admission, most drafts of each [D]


def check(request: Request, limits: SchedulerLimits, page_size: int, num_pages: int) -> None:
    """CapacityError or RequestError for a request that could never run within these limits, in so many pages."""
    assert request.num_known < limits.max_model_len, (request.num_known, limits.max_model_len)
    if request.params.min_tokens and len(request.stop_ids) > MAX_BANS:
        raise RequestError(
            f"min_tokens keeps at most {MAX_BANS} ids from ending the answer and here {len(request.stop_ids)} would: "
            "list fewer stop_token_ids, or set min_tokens to 0"
        )
    longest = min(request.num_known + request.params.max_tokens, limits.max_model_len)
    need = -(-longest // page_size)
    if need > num_pages:
        raise CapacityError(
            f"the request may need {need} KV pages of {page_size} tokens and the pool has {num_pages}: "
            f"raise kv_memory, shorten the prompt or lower max_tokens"
        )


class Scheduler:
    def __init__(self, limits: SchedulerLimits, pages: PageAllocator) -> None:
        self.limits = limits
        self.pages = pages
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.ledger = Ledger(limits.max_num_seqs, limits.max_model_len, limits.max_drafts)
        self.num_preemptions = 0
        self.prefixes = PrefixCache(pages)
        self._most_given, self._most_running = limits.max_num_batched_tokens, limits.max_num_seqs  # see `shrink`
        self._grow_at = STEPS_UNTIL_GROWTH  # step
        self._table = PageTable(limits.max_num_seqs, pages.pages_for(limits.max_model_len), pages.page_size)
        self.flights: deque[InFlight] = deque()  # planned and not yet committed, oldest first
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._draft_context = limits.max_draft_context if limits.max_drafts else limits.max_model_len
        # Plans show parts of these three, which nobody writes to.
        self._most_drafts = np.full(limits.max_num_seqs, limits.max_drafts, np.int32)
        self._ones = np.ones(limits.max_num_seqs, np.int32)
        self._trues = np.ones(limits.max_num_seqs, np.bool_)
        self._decoding_slots: Int64s | None = None  # None: to be made again
        self._members: Members | None = None  # of the last step
        self._step = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def next_step(self) -> int:
        return self._step

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def pages_of(self, request: Request) -> list[int]:
        return [] if request.slot is None else self._table.of(request.slot)

    def counters_of(self, request: Request) -> SpecCounters:
        """What was counted of a request until now; `request.counters` has it once the request has ended."""
        counters = SpecCounters(mode=request.counters.mode)
        counters.merge(request.counters)
        if request.slot is not None:
            self.ledger.count_into(counters, request.slot)
        return counters

    def add(self, request: Request) -> None:
        self.check(request)
        self.waiting.append(request)

    def check(self, request: Request) -> None:
        """CapacityError or RequestError where it could never run. Reads nothing that changes: from any thread."""
        check(request, self.limits, self.pages.page_size, self.pages.num_usable)

    def schedule(self) -> StepPlan | NoPlan:
        """Plan the next step and book it as in flight."""
        if self._step == self._grow_at:
            self._grow()
        if self.waiting and self._free_slots:
            self._give_back()
        num_preempted = self.num_preemptions
        reserved = self._reserve_decode(*self._decode_rows())
        if reserved is None:
            return NoPlan.DRAIN
        decode_slots, caps = reserved
        may_admit = self.num_preemptions == num_preempted
        chunks, admissions = self._prefill_rows(self._most_given - len(decode_slots), may_admit)
        if not len(decode_slots) and not chunks:
            return NoPlan.IDLE
        return self._book(decode_slots, caps, chunks, admissions)

    def take_flight(self, step: int) -> InFlight:
        """A planned step has come back: what was booked of it. Steps before it that never came are forgotten."""
        flight = self.flights.popleft()
        while flight.step != step:
            assert flight.step < step, (flight.step, step)
            flight = self.flights.popleft()
        return flight

    def shrink(self) -> list[Request]:
        """The last step was too large for the memory: plan smaller ones for a while, with all that ran queued again.

        Fewer rows of prompts where it had any, else fewer requests. Returns the request whose single row was the whole
        step, if there was one: a smaller step cannot help it.
        """
        members = self.flights[-1].members
        num_given, any_chunk = int(members.num_given_np.sum()), bool((members.num_given_np > 1).any())
        alone = [request for request in members.requests if request.slot is not None] if num_given == 1 else []
        if any_chunk:
            self._most_given = num_given // 2
        elif not alone:
            self._most_running = max(1, len(self.running) // 2)
        self._grow_at = self._step + STEPS_UNTIL_GROWTH
        while self.running:
            self._preempt(self.running[-1])
        return alone

    def _grow(self) -> None:
        """So many steps went well: the next ones may be twice as large."""
        limits = self.limits
        self._most_given = min(2 * self._most_given, limits.max_num_batched_tokens)
        self._most_running = min(2 * self._most_running, limits.max_num_seqs)
        self._grow_at = self._step + STEPS_UNTIL_GROWTH

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Take a request out, wherever it is. What of it lies in flight is dropped later, by its generation."""
        request.finish_reason = reason
        if request.slot is not None:
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    # ------------------------------------------------------------------ decoding requests, all at once

    def _decode_rows(self) -> _Decode:
        """Who decodes, with as many drafts as may be verified; some must wait for a result first."""
        ledger, limits, slots = self.ledger, self.limits, self._decoding()
        bound, full = ledger.context_upper_bound[slots], ledger.full_context[slots]
        block_end = bound + limits.max_drafts
        if np.count_nonzero(block_end < np.minimum(full, self._draft_context)) == len(slots):  # nothing ends nearby
            return slots, self._most_drafts[: len(slots)]
        room = limits.max_model_len - 2 - bound  # the last emitted token may stand at max_model_len - 1
        wanted = full - ledger.context_lower_bound[slots] - 1  # one token is no draft
        caps = np.minimum(np.minimum(room, wanted), limits.max_drafts)
        ready = caps >= 0
        caps = caps * (block_end < self._draft_context)  # a block is drafted whole or not at all
        return (slots, caps) if np.count_nonzero(ready) == len(slots) else (slots[ready], caps[ready])

    def _reserve_decode(self, slots: Int64s, caps: Int32s) -> _Decode | None:
        """Pages for all rows, of those requests and with those caps that pages are there for. None: DRAIN."""
        beyond = self._rows_beyond_pages(slots, 1 + caps)
        growing = (beyond > 0).nonzero()[0]
        if not len(growing):
            return slots, caps
        counts = self._pages_for(beyond[growing])
        total = int(np.add.reduce(counts))
        if total > self.pages.num_free:
            return self._reserve_scarce(slots, caps)
        self._table.append(slots[growing], counts, self.pages.take(total))
        return slots, caps

    def _reserve_scarce(self, slots: Int64s, caps: Int32s) -> _Decode | None:
        """The same when there are not enough: one row for everybody, then drafts as far as pages last."""
        self._give_back()
        going_on = self._preempt_for_one_row(slots)
        if going_on is None:
            return None
        slots, caps = slots[going_on], caps[going_on]
        self._reserve(slots, self._missing_pages(slots, 1))
        caps, granted = self._within_free_pages(slots, caps)
        self._reserve(slots, granted)
        return slots, caps

    def _give_back(self) -> None:
        """Free the pages that the upper bound of each decoding request, and one row, leave empty."""
        slots = self._decoding()
        bound = self.ledger.context_upper_bound[slots]
        surplus = (self._table.capacity[slots] > bound + self.pages.page_size).nonzero()[0]
        if len(surplus):
            self.pages.give(self._table.cut(slots[surplus], self._pages_for(bound[surplus] + 1)))

    def _preempt_for_one_row(self, slots: Int64s) -> Bools | None:
        """Preempt the newest until every other request can have its one row; who of `slots` is left. None: DRAIN."""
        going_on = np.ones(len(slots), np.bool_)
        while self._missing_pages(slots[going_on], 1).sum() > self.pages.num_free:
            if any(self.ledger.still_there(flight).any() for flight in self.flights):
                return None
            going_on &= slots != self._preempt(self.running[-1])
        return going_on

    def _within_free_pages(self, slots: Int64s, caps: Int32s) -> tuple[Int32s, Int32s]:
        """Drafts as far as pages last, first come, first served: the caps, and the pages that each row then takes."""
        missing = self._missing_pages(slots, 1 + caps)
        asked_before = missing.cumsum() - missing
        granted = np.clip(self.pages.num_free - asked_before, 0, missing).astype(np.int32)
        beyond = self._rows_beyond_pages(slots, 1 + caps) - granted * self.pages.page_size
        return caps - np.maximum(beyond, 0), granted

    def _missing_pages(self, slots: Int64s, num_rows: Int32s | int) -> Int32s:
        return self._pages_for(np.maximum(self._rows_beyond_pages(slots, num_rows), 0))

    def _rows_beyond_pages(self, slots: Int64s, num_rows: Int32s | int) -> Int32s:
        """How many of so many rows the pages of each of `slots` have no room for; below 0: room is left."""
        beyond: Int32s = self.ledger.context_upper_bound[slots] + num_rows - self._table.capacity[slots]
        return beyond

    def _reserve(self, slots: Int64s, counts: Int32s) -> None:
        growing = counts.nonzero()[0]
        if len(growing):
            counts = counts[growing]
            self._table.append(slots[growing], counts, self.pages.take(int(counts.sum())))

    def _pages_for(self, num_tokens: Int32s) -> Int32s:
        pages: Int32s = (num_tokens + (self.pages.page_size - 1)) // self.pages.page_size
        return pages

    def _decoding(self) -> Int64s:
        """Slots whose known tokens are all computed or planned, in order of admission."""
        if self._decoding_slots is None:
            slots = np.array([request.slot for request in self.running], np.int64)
            self._decoding_slots = slots[self.ledger.unplanned[slots] == 0]
        return self._decoding_slots

    # ------------------------------------------------------------------ prefill, admission, the way out

    def _prefill_rows(self, budget: int, may_admit: bool) -> tuple[list[_Chunk], list[Admission]]:
        """Chunks of the requests being prefilled, then new ones, within the budget of given rows."""
        chunks, admissions = [], []
        for request in self.running if len(self._decoding()) < len(self.running) else ():
            if budget > 0 and self.ledger.unplanned[request.slot]:
                chunks.append(self._chunk(request, budget))
                budget -= chunks[-1].num_given
        while may_admit and budget > 0 and self.waiting and len(self.running) < self._most_running:
            cached = self.prefixes.pages_for(self.waiting[0])
            if self.prefixes.grows(self.waiting[0], cached) or not self._fits(self.waiting[0], cached):
                break
            request = self.waiting.popleft()
            admissions.append(self._admit(request, cached))
            chunks.append(self._chunk(request, budget))
            budget -= chunks[-1].num_given
        return chunks, admissions

    def _fits(self, request: Request, cached: list[int]) -> bool:
        """The whole prompt and the first token, so that a prefill never runs out of pages half-way.

        A page is left to everybody who runs: who gets the last ones is soon thrown out again, by those that grow.
        """
        new = self.pages.pages_for(request.num_known + 1) - len(cached)
        return new + self.pages.num_idle(cached) + len(self.running) <= self.pages.num_free

    def _chunk(self, request: Request, budget: int) -> _Chunk:
        assert request.slot is not None
        remaining = int(self.ledger.unplanned[request.slot])
        start, num_given = request.num_known - remaining, min(remaining, budget)
        self.prefixes.plan(request, self.pages_of(request), start, start + num_given)
        return _Chunk(request.slot, num_given, emits=remaining <= budget)

    def _admit(self, request: Request, cached: list[int]) -> Admission:
        request.slot = slot = self._free_slots.pop()
        token_ids = np.array((*request.prompt_ids, *request.output_ids), np.int32)
        num_cached = len(cached) * self.pages.page_size
        self.prefixes.count(len(token_ids), num_cached)
        if request.num_cached is None:
            request.num_cached = num_cached
        self.ledger.admit(slot, request, self.limits.max_model_len, num_cached)
        self.running.append(request)
        self.pages.share(cached)
        pages = cached + self.pages.take(self.pages.pages_for(len(token_ids) + 1) - len(cached))
        self._table.append(np.array([slot]), np.array([len(pages)], np.int32), pages)
        params = request.params
        seed = (request.seed + 2**63) % 2**64 - 2**63  # the same 64 bits, signed
        return Admission(
            slot=slot, token_ids_np=token_ids, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p,
            seed=seed, num_cached=num_cached, num_prompt=len(request.prompt_ids), min_p=params.min_p,
            repetition_penalty=params.repetition_penalty, frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty, edits=_edits_of(request),
        )  # fmt: skip

    def _preempt(self, request: Request) -> int:
        """Back to the head of the queue; its tokens are kept and recomputed, its drafts and confidence are not.

        Returns the slot that it had.
        """
        self.num_preemptions += 1
        slot = self._release(request)
        self.waiting.appendleft(request)
        return slot

    def _release(self, request: Request) -> int:
        slot = request.slot
        assert slot is not None
        pages = self._table.clear(slot)
        if request.error is None:
            self.prefixes.keep(request, pages, int(self.ledger.context[slot]))
        else:
            self.prefixes.discard(pages)
        self.pages.give(pages)
        self.ledger.release(slot)
        self._free_slots.append(slot)
        self.running.remove(request)
        self._decoding_slots = self._members = request.slot = None
        return slot

    # ------------------------------------------------------------------ the plan

    def _book(self, decode_slots: Int64s, caps: Int32s, chunks: list[_Chunk], admissions: list[Admission]) -> StepPlan:
        ledger, num_decode = self.ledger, len(decode_slots)
        if chunks:
            caps = np.append(caps, np.zeros(len(chunks), np.int32))
        if chunks or self._members is None or self._members.index_np is not decode_slots:
            self._members = self._members_of(decode_slots, chunks)
        members = self._members
        flight = InFlight(self._step, members, members.num_given_np + caps)
        plan = self._plan(flight, num_decode, caps, admissions)
        ledger.book(flight)
        ledger.decode_steps[decode_slots] += 1
        if chunks:
            ledger.unplanned[members.index_np[num_decode:]] -= members.num_given_np[num_decode:]
            self._decoding_slots = None
            self.prefixes.book()
        self.flights.append(flight)
        self._step += 1
        return plan

    def _members_of(self, decode_slots: Int64s, chunks: list[_Chunk]) -> Members:
        slots, num_decode = decode_slots, len(decode_slots)
        num_given, emits = self._ones[:num_decode], self._trues[:num_decode]
        if chunks:
            slots = np.append(slots, [chunk.slot for chunk in chunks])
            num_given = np.append(num_given, np.array([chunk.num_given for chunk in chunks], np.int32))
            emits = np.append(emits, [chunk.emits for chunk in chunks])
        return self.ledger.members(slots, num_given, emits)

    def _plan(self, flight: InFlight, num_decode: int, caps: Int32s, admissions: list[Admission]) -> StepPlan:
        ledger, members = self.ledger, flight.members
        slots, wishes = members.index_np, members.wishes
        return StepPlan(
            step=flight.step,
            num_decode=num_decode,
            draft_length=self.limits.max_drafts,
            slots_np=members.slots_np,
            generations_np=members.generations_np,
            uids_np=members.uids_np,
            decode_steps_np=ledger.decode_steps[slots],
            num_given_np=members.num_given_np,
            emits_np=members.emits_np,
            caps_np=caps,
            context_np=ledger.context[slots],
            context_upper_bound_np=ledger.context_upper_bound[slots],
            sampled_np=members.sampled_np,
            teaches_np=members.teaches_np,
            admissions=tuple(admissions),
            page_writes_np=self._table.take_writes(),
            any_sampled=bool(wishes & SAMPLED),
            any_top_k=bool(wishes & TOP_K),
            any_top_p=bool(wishes & TOP_P),
            any_min_p=bool(wishes & MIN_P),
            any_penalty=bool(wishes & PENALTY),
            any_edit=bool(wishes & EDIT),
            logprobs=members.logprobs,
            any_constrained=bool(wishes & CONSTRAINED),
        )


def _edits_of(request: Request) -> tuple[Edit, ...]:
    """Biases for ever, and bans of whatever would end the answer before min_tokens."""
    params = request.params
    biases = [Edit(token, bias, FOREVER) for token, bias in params.logit_bias.items()]
    bans = [Edit(token, -math.inf, params.min_tokens) for token in sorted(request.stop_ids) if params.min_tokens]
    return (*biases, *bans)
