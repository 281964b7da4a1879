"""Who takes part in a step, with which rows, and which pages that may need. Torch-free; called by the engine only.

The scheduler runs ahead of the device: for a decoding request it knows the committed context and an upper bound, and
it reserves pages for the bound. `settle` (after a commit) gives back what the bound had too much. When pages run short,
caps of drafts go down first; only when the requests cannot all get their one row is the newest one preempted, and never
while something is in flight: `schedule` then answers DRAIN, and the engine collects before it asks again.
Decoding requests are planned as columns of the ledger; Python per request is left for admissions and prefill.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np

from slipstream.cache.pages import PageAllocator, PageTable
from slipstream.errors import CapacityError
from slipstream.ledger import SAMPLED, TOP_K, TOP_P, InFlight, Ledger
from slipstream.metrics import SpecCounters
from slipstream.plan import Admission, Bools, Int32s, Int64s, StepPlan
from slipstream.request import FinishReason, Request


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


class Scheduler:
    def __init__(self, limits: SchedulerLimits, pages: PageAllocator) -> None:
        self.limits = limits
        self.pages = pages
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.ledger = Ledger(limits.max_num_seqs, limits.max_drafts)
        self.num_preemptions = 0
        self._table = PageTable(limits.max_num_seqs, pages.pages_for(limits.max_model_len))
        self._flights: deque[InFlight] = deque()
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._running_slots: Int64s | None = None  # of `running`; None: to be made again
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
        longest = min(request.num_known + request.params.max_tokens, self.limits.max_model_len)
        need, room = self.pages.pages_for(longest), self.pages.num_free + self.pages.num_used
        if need > room:
            raise CapacityError(
                f"the request may need {need} KV pages of {self.pages.page_size} tokens and the pool has {room}: "
                f"raise kv_memory, shorten the prompt or lower max_tokens"
            )
        self.waiting.append(request)

    def schedule(self) -> StepPlan | NoPlan:
        """Plan the next step and book it as in flight."""
        num_preempted = self.num_preemptions
        reserved = self._reserve_decode(*self._decode_rows())
        if reserved is None:
            return NoPlan.DRAIN
        decode_slots, caps = reserved
        may_admit = self.num_preemptions == num_preempted
        chunks, admissions = self._prefill_rows(self.limits.max_num_batched_tokens - len(decode_slots), may_admit)
        if not len(decode_slots) and not chunks:
            return NoPlan.IDLE
        return self._book(decode_slots, caps, chunks, admissions)

    def take_flight(self, step: int) -> InFlight:
        """A planned step has come back: what was booked of it. Steps before it that never came are forgotten."""
        flight = self._flights.popleft()
        while flight.step != step:
            assert flight.step < step, (flight.step, step)
            flight = self._flights.popleft()
        return flight

    def settle(self, slots: Int64s) -> None:
        """After a commit: give back the pages that the upper bound of each of `slots` had too much."""
        keep = self._pages_for(self.ledger.context_upper_bound[slots] + 1)
        surplus = np.flatnonzero(self._table.num_pages[slots] > keep)
        if len(surplus):
            self.pages.give(self._table.cut(slots[surplus], keep[surplus]))

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
        ledger, limits, slots = self.ledger, self.limits, self._slots_in_order()
        bound = ledger.context_upper_bound[slots]
        room = limits.max_model_len - 2 - bound  # the last emitted token may stand at max_model_len - 1
        wanted = ledger.max_outputs[slots] - ledger.num_outputs_lower_bound[slots] - 1
        most = np.minimum(np.minimum(room, wanted), limits.max_drafts)
        ready = (most >= 0) & (ledger.unplanned[slots] == 0)
        caps = most * (bound < limits.max_draft_context - limits.max_drafts)  # a block is drafted whole or not at all
        return (slots, caps) if np.count_nonzero(ready) == len(slots) else (slots[ready], caps[ready])

    def _reserve_decode(self, slots: Int64s, caps: Int32s) -> _Decode | None:
        """Pages for all rows, of those requests and with those caps that pages are there for. None: DRAIN."""
        missing = self._missing_pages(slots, 1 + caps)
        if missing.sum() > self.pages.num_free:
            going_on = self._preempt_for_one_row(slots)
            if going_on is None:
                return None
            slots, caps = slots[going_on], caps[going_on]
            self._reserve(slots, self._missing_pages(slots, 1))
            caps, missing = self._within_free_pages(slots, caps)
        self._reserve(slots, missing)
        return slots, caps

    def _preempt_for_one_row(self, slots: Int64s) -> Bools | None:
        """Preempt the newest until every other request can have its one row; who of `slots` is left. None: DRAIN."""
        going_on = np.ones(len(slots), np.bool_)
        while self._missing_pages(slots[going_on], 1).sum() > self.pages.num_free:
            if self.ledger.steps_in_flight[self._slots_in_order()].any():
                return None
            going_on &= slots != self._preempt(self.running[-1])
        return going_on

    def _within_free_pages(self, slots: Int64s, caps: Int32s) -> tuple[Int32s, Int32s]:
        """Drafts as far as pages last, first come, first served: the caps, and the pages that each row then takes."""
        missing = self._missing_pages(slots, 1 + caps)
        asked_before = np.cumsum(missing) - missing
        granted = np.clip(self.pages.num_free - asked_before, 0, missing).astype(np.int32)
        num_tokens = (self._table.num_pages[slots] + granted) * self.pages.page_size
        return np.minimum(caps, num_tokens - self.ledger.context_upper_bound[slots] - 1), granted

    def _missing_pages(self, slots: Int64s, num_rows: Int32s | int) -> Int32s:
        need = self._pages_for(self.ledger.context_upper_bound[slots] + num_rows)
        return np.maximum(need - self._table.num_pages[slots], 0)

    def _reserve(self, slots: Int64s, counts: Int32s) -> None:
        growing = np.flatnonzero(counts)
        if len(growing):
            counts = counts[growing]
            self._table.append(slots[growing], counts, self.pages.take(int(counts.sum())))

    def _pages_for(self, num_tokens: Int32s) -> Int32s:
        pages: Int32s = (num_tokens + (self.pages.page_size - 1)) // self.pages.page_size
        return pages

    def _slots_in_order(self) -> Int64s:
        if self._running_slots is None:
            self._running_slots = np.array([request.slot for request in self.running], np.int64)
        return self._running_slots

    # ------------------------------------------------------------------ prefill, admission, the way out

    def _prefill_rows(self, budget: int, may_admit: bool) -> tuple[list[_Chunk], list[Admission]]:
        """Chunks of the requests being prefilled, then new ones, within the budget of given rows."""
        chunks, admissions = [], []
        for slot in self._prefilling():
            if budget > 0:
                chunks.append(self._chunk(slot, budget))
                budget -= chunks[-1].num_given
        while may_admit and budget > 0 and self.waiting and self._free_slots and self._fits(self.waiting[0]):
            admissions.append(self._admit(self.waiting.popleft()))
            chunks.append(self._chunk(admissions[-1].slot, budget))
            budget -= chunks[-1].num_given
        return chunks, admissions

    def _prefilling(self) -> list[int]:
        """Slots whose prompt is not planned to its end, in order of admission."""
        if not np.count_nonzero(self.ledger.unplanned):
            return []
        slots = self._slots_in_order()
        found: list[int] = slots[self.ledger.unplanned[slots] > 0].tolist()
        return found

    def _fits(self, request: Request) -> bool:
        """The whole prompt and the first token, so that a prefill never runs out of pages half-way."""
        return self.pages.pages_for(request.num_known + 1) <= self.pages.num_free

    def _chunk(self, slot: int, budget: int) -> _Chunk:
        remaining = int(self.ledger.unplanned[slot])
        return _Chunk(slot, min(remaining, budget), emits=remaining <= budget)

    def _admit(self, request: Request) -> Admission:
        request.slot = slot = self._free_slots.pop()
        self.ledger.admit(slot, request, self.limits.max_model_len)
        self.running.append(request)
        self._running_slots = None
        self._reserve(np.array([slot]), np.array([self.pages.pages_for(request.num_known + 1)], np.int32))
        token_ids = np.fromiter((*request.prompt_ids, *request.output_ids), np.int32, request.num_known)
        params = request.params
        seed = (request.seed + 2**63) % 2**64 - 2**63  # the same 64 bits, signed
        return Admission(
            slot=slot, token_ids_np=token_ids, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p,
            seed=seed,
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
        self.pages.give(self._table.clear(slot))
        self.ledger.release(slot)
        self._free_slots.append(slot)
        self.running.remove(request)
        self._running_slots = request.slot = None
        return slot

    # ------------------------------------------------------------------ the plan

    def _book(self, slots: Int64s, caps: Int32s, chunks: list[_Chunk], admissions: list[Admission]) -> StepPlan:
        ledger, num_decode = self.ledger, len(slots)
        num_given, emits = np.ones(num_decode + len(chunks), np.int32), np.ones(num_decode + len(chunks), np.bool_)
        if chunks:
            slots = np.concatenate((slots, np.array([chunk.slot for chunk in chunks], np.int64)))
            caps = np.concatenate((caps, np.zeros(len(chunks), np.int32)))
            num_given[num_decode:] = [chunk.num_given for chunk in chunks]
            emits[num_decode:] = [chunk.emits for chunk in chunks]
        flight = InFlight(self._step, slots, ledger.generations[slots], num_given + caps, emits)
        plan = self._plan(flight, num_decode, num_given, caps, admissions)
        ledger.book(flight)
        ledger.decode_steps[slots[:num_decode]] += 1
        ledger.unplanned[slots[num_decode:]] -= num_given[num_decode:]
        self._flights.append(flight)
        self._step += 1
        return plan

    def _plan(
        self, flight: InFlight, num_decode: int, num_given: Int32s, caps: Int32s, admissions: list[Admission]
    ) -> StepPlan:
        ledger, slots = self.ledger, flight.slots_np
        sampling = ledger.sampling[slots]
        emitting = int(np.bitwise_or.reduce(sampling * flight.emits_np))
        return StepPlan(
            step=flight.step,
            num_decode=num_decode,
            draft_length=self.limits.max_drafts,
            slots_np=slots.astype(np.int32),
            generations_np=flight.generations_np,
            uids_np=ledger.uids[slots],
            decode_steps_np=ledger.decode_steps[slots],
            num_given_np=num_given,
            emits_np=flight.emits_np,
            caps_np=caps,
            context_np=ledger.context[slots],
            context_upper_bound_np=ledger.context_upper_bound[slots],
            sampled_np=sampling > 0,
            teaches_np=ledger.teaches[slots],
            admissions=tuple(admissions),
            page_writes_np=self._table.take_writes(),
            any_sampled=bool(emitting & SAMPLED),
            any_top_k=bool(emitting & TOP_K),
            any_top_p=bool(emitting & TOP_P),
        )
