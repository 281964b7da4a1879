"""Who takes part in a step, with which rows, and which pages that may need. Torch-free; called by the engine only.

The scheduler runs ahead of the device: for a decoding request it knows the committed context and an upper bound, and
it reserves pages for the bound. `settle` (after a commit) gives back what the bound had too much. When pages run short,
caps of drafts go down first; only when the requests cannot all get their one row is the newest one preempted, and never
while something is in flight: `schedule` then answers DRAIN, and the engine collects before it asks again.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum

import numpy as np

from slipstream.cache.pages import NULL_PAGE, PageAllocator
from slipstream.errors import CapacityError
from slipstream.plan import Admission, StepPlan
from slipstream.request import FinishReason, InFlight, Request


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


@dataclass(slots=True)
class _Row:
    """One sequence's part of the plan that is being made."""

    request: Request
    num_given: int
    cap: int
    emits: bool


class Scheduler:
    def __init__(self, limits: SchedulerLimits, pages: PageAllocator) -> None:
        self.limits = limits
        self.pages = pages
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.num_preemptions = 0
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._generations = [-1] * limits.max_num_seqs
        # (slot, index) -> page since the last plan. Once per place: a device may do its writes in any order.
        self._page_writes: dict[tuple[int, int], int] = {}
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
        decoding = [row for request in self.running if (row := self._decode_row(request))]
        num_preempted = self.num_preemptions
        while self._shortage(decoding):
            if any(request.in_flight for request in self.running):
                return NoPlan.DRAIN
            victim = self.running[-1]
            self._preempt(victim)
            decoding = [row for row in decoding if row.request is not victim]
        self._reserve_decode(decoding)
        may_admit = self.num_preemptions == num_preempted
        prefilling, admissions = self._prefill_rows(self.limits.max_num_batched_tokens - len(decoding), may_admit)
        if not decoding and not prefilling:
            return NoPlan.IDLE
        return self._book(decoding, prefilling, admissions)

    def settle(self, request: Request) -> None:
        """After a commit: give back the pages that the upper bound had too much."""
        keep = self.pages.pages_for(max(request.context_upper_bound + 1, request.prefill_target))
        surplus = request.pages[keep:]
        if surplus:
            del request.pages[keep:]
            self.pages.give(surplus)
            assert request.slot is not None
            # The page table must not keep pointing at pages that others may own by then.
            self._page_writes |= {(request.slot, keep + i): NULL_PAGE for i in range(len(surplus))}

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Take a request out, wherever it is. What of it lies in flight is dropped later, by its generation."""
        request.finish_reason = reason
        if request in self.waiting:
            self.waiting.remove(request)
        if request.slot is not None:
            self._release(request)

    def _decode_row(self, request: Request) -> _Row | None:
        """A row with as many drafts as may be verified, or None where the request must wait for a result."""
        if request.is_prefilling:
            return None
        bound, limits = request.context_upper_bound, self.limits
        room = limits.max_model_len - 2 - bound  # the last emitted token may stand at max_model_len - 1
        wanted = request.params.max_tokens - request.num_output_lower_bound - 1
        if room < 0 or wanted < 0:
            return None
        may_draft = bound + limits.max_drafts + 1 <= limits.max_draft_context
        return _Row(request, 1, min(limits.max_drafts, room, wanted) if may_draft else 0, emits=True)

    def _missing_pages(self, row: _Row, num_rows: int) -> int:
        need = self.pages.pages_for(row.request.context_upper_bound + num_rows)
        return max(0, need - len(row.request.pages))

    def _shortage(self, rows: list[_Row]) -> bool:
        return sum(self._missing_pages(row, 1) for row in rows) > self.pages.num_free

    def _reserve_decode(self, rows: list[_Row]) -> None:
        """One row for everybody, then drafts as far as pages last, in order of admission."""
        for row in rows:
            self._reserve(row.request, self._missing_pages(row, 1))
        for row in rows:
            while self._missing_pages(row, 1 + row.cap) > self.pages.num_free:
                row.cap -= 1
            self._reserve(row.request, self._missing_pages(row, 1 + row.cap))

    def _reserve(self, request: Request, count: int) -> None:
        assert request.slot is not None
        for page in self.pages.take(count):
            self._page_writes[request.slot, len(request.pages)] = page
            request.pages.append(page)

    def _prefill_rows(self, budget: int, may_admit: bool) -> tuple[list[_Row], list[Admission]]:
        """Chunks of the requests being prefilled, then new ones, within the budget of given rows."""
        rows, admissions = [], []
        for request in self.running:
            if request.is_prefilling and budget > 0:
                rows.append(self._chunk(request, budget))
                budget -= rows[-1].num_given
        while may_admit and budget > 0 and self.waiting and self._free_slots and self._fits(self.waiting[0]):
            request = self.waiting.popleft()
            admissions.append(self._admit(request))
            rows.append(self._chunk(request, budget))
            budget -= rows[-1].num_given
        return rows, admissions

    def _fits(self, request: Request) -> bool:
        """The whole prompt and the first token, so that a prefill never runs out of pages half-way."""
        return self.pages.pages_for(request.num_known + 1) <= self.pages.num_free

    @staticmethod
    def _chunk(request: Request, budget: int) -> _Row:
        remaining = request.prefill_target - request.planned_prefill
        count = min(remaining, budget)
        return _Row(request, count, 0, emits=count == remaining)

    def _admit(self, request: Request) -> Admission:
        slot = self._free_slots.pop()
        self._generations[slot] += 1
        request.slot, request.generation = slot, self._generations[slot]
        request.context = request.planned_prefill = request.decode_steps = 0
        request.prefill_target = request.num_known
        request.in_flight.clear()
        self._reserve(request, self.pages.pages_for(request.num_known + 1))
        self.running.append(request)
        token_ids = np.fromiter((*request.prompt_ids, *request.output_ids), np.int32, request.num_known)
        params = request.params
        seed = (request.seed + 2**63) % 2**64 - 2**63  # the same 64 bits, signed
        return Admission(
            slot=slot, token_ids_np=token_ids, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p,
            seed=seed,
        )  # fmt: skip

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue; its tokens are kept and recomputed, its drafts and confidence are not."""
        self.num_preemptions += 1
        self._release(request)
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        assert request.slot is not None
        self._page_writes = {place: page for place, page in self._page_writes.items() if place[0] != request.slot}
        self.pages.give(request.pages)
        self._free_slots.append(request.slot)
        self.running.remove(request)
        request.slot, request.pages = None, []

    def _book(self, decoding: list[_Row], prefilling: list[_Row], admissions: list[Admission]) -> StepPlan:
        rows = decoding + prefilling
        plan = self._plan(rows, len(decoding), admissions)
        for row in rows:
            row.request.in_flight.append(InFlight(plan.step, row.num_given + row.cap, row.emits))
        for row in decoding:
            row.request.decode_steps += 1
        for row in prefilling:
            row.request.planned_prefill += row.num_given
        self._step += 1
        self._page_writes = {}
        return plan

    def _plan(self, rows: list[_Row], num_decode: int, admissions: list[Admission]) -> StepPlan:
        requests = [row.request for row in rows]
        sampled = [request.params.temperature > 0 for request in requests]
        writes = [(slot, index, page) for (slot, index), page in self._page_writes.items()]
        emitting = [request for request, row, s in zip(requests, rows, sampled, strict=True) if row.emits and s]
        return StepPlan(
            step=self._step,
            num_decode=num_decode,
            draft_length=self.limits.max_drafts,
            slots_np=np.array([request.slot for request in requests], np.int32),
            generations_np=np.array([request.generation for request in requests], np.int32),
            uids_np=np.array([request.uid for request in requests], np.int64),
            decode_steps_np=np.array([request.decode_steps for request in requests], np.int32),
            num_given_np=np.array([row.num_given for row in rows], np.int32),
            emits_np=np.array([row.emits for row in rows], np.bool_),
            caps_np=np.array([row.cap for row in rows], np.int32),
            context_np=np.array([request.context for request in requests], np.int32),
            context_upper_bound_np=np.array([request.context_upper_bound for request in requests], np.int32),
            sampled_np=np.array(sampled, np.bool_),
            teaches_np=np.array([not request.constrained for request in requests], np.bool_),
            admissions=tuple(admissions),
            page_writes_np=np.array(writes, np.int32).reshape(-1, 3),
            any_sampled=bool(emitting),
            any_top_k=any(request.params.top_k > 0 for request in emitting),
            any_top_p=any(request.params.top_p < 1 for request in emitting),
        )
