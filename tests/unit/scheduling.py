"""A scheduler with a device that exists on paper only: it moves contexts and page tables as the real one does.

`PaperDevice.launch` takes a plan as the engine's `load` would, `collect` makes up what the step brought and commits it.
Every launch checks that each row's KV lands in a page that its request alone owns, and that KV which was not to be
computed is there: what stands for KV is all that it depends on, the tokens up to its own.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np

from slipstream.cache.pages import NUM_RESERVED_PAGES, PageAllocator
from slipstream.cache.shared import SharedPages
from slipstream.commit import Delta, commit
from slipstream.config import SamplingParams
from slipstream.plan import StepPlan, StepResult
from slipstream.request import Request
from slipstream.scheduler import NoPlan, Scheduler, SchedulerLimits

EOS = 1
PAGE_SIZE = 4

# (row of the plan, most drafts) -> (width, accepted)
Outcome = Callable[[int, int], tuple[int, int]]


def full(row: int, cap: int) -> tuple[int, int]:
    return cap, cap


def rejected(row: int, cap: int) -> tuple[int, int]:
    return cap, 0


def make_scheduler(
    *, pages: int = 100, slots: int = 4, tokens: int = 64, max_len: int = 64, drafts: int = 3, draft_context: int = 9999,
    shares: bool = False,
) -> Scheduler:  # fmt: skip
    """`pages` can be owned; the reserved ones come on top."""
    limits = SchedulerLimits(
        max_num_seqs=slots, max_num_batched_tokens=tokens, max_model_len=max_len, max_drafts=drafts,
        max_draft_context=draft_context,
    )  # fmt: skip
    return Scheduler(limits, (SharedPages if shares else PageAllocator)(pages + NUM_RESERVED_PAGES, PAGE_SIZE))


def make_request(uid: int, prompt: int = 5, max_tokens: int = 50, **params: object) -> Request:
    return Request(
        uid=uid, prompt_ids=tuple(range(2, 2 + prompt)), params=SamplingParams(max_tokens=max_tokens, **params), seed=uid,
        eos_token_ids=frozenset([EOS]),
    )  # fmt: skip


def check_invariants(scheduler: Scheduler) -> None:
    """Every page is free or has the owners it counts, every slot one; requests that hold nothing wait or have ended."""
    check_pages(scheduler)
    slots = [request.slot for request in scheduler.running]
    assert sorted(slots + scheduler._free_slots) == list(range(scheduler.limits.max_num_seqs))
    assert all(request.slot is None for request in scheduler.waiting)
    assert not any(request.is_finished for request in [*scheduler.running, *scheduler.waiting])
    tenants = [request for request in scheduler.ledger.tenants if request is not None]
    assert sorted(request.slot for request in tenants) == sorted(slots) and set(tenants) == set(scheduler.running)
    for request in scheduler.running:
        context, bound, _ = numbers(scheduler, request)
        assert context <= bound
        assert scheduler.pages.pages_for(bound) <= len(scheduler.pages_of(request))


def check_pages(scheduler: Scheduler) -> None:
    pages = scheduler.pages
    owned = Counter(page for request in scheduler.running for page in scheduler.pages_of(request))
    free, everything = list(pages._free), list(range(NUM_RESERVED_PAGES, pages.num_pages))
    if isinstance(pages, SharedPages):
        free += pages._idle
        assert {page: owned[page] for page in pages._num_owners} == pages._num_owners
        assert pages._key_of.keys() == {*pages._idle, *(page for page in pages._num_owners if page in pages._key_of)}
        assert {key: page for page, key in pages._key_of.items()} == pages._page_of
        owned.subtract({page: count - 1 for page, count in pages._num_owners.items()})
    assert sorted([*owned.elements(), *free]) == everything
    assert pages.num_free + pages.num_used == len(everything)


def numbers(scheduler: Scheduler, request: Request) -> tuple[int, int, int]:
    """Of a running request: its context, the upper bound of that, and how many steps of it are in flight."""
    ledger, slot = scheduler.ledger, request.slot
    flights = [flight.members.index_np[ledger.still_there(flight)] for flight in scheduler.flights]
    return int(ledger.context[slot]), int(ledger.context_upper_bound[slot]), sum(slot in slots for slots in flights)


def anything_in_flight(scheduler: Scheduler) -> bool:
    """Of requests that are still there."""
    return any(scheduler.ledger.still_there(flight).any() for flight in scheduler.flights)


def is_prefilling(scheduler: Scheduler, request: Request) -> bool:
    """It waits, or some of its prompt is in no plan yet."""
    return request.slot is None or bool(scheduler.ledger.unplanned[request.slot])


class PaperDevice:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.requests: dict[int, Request] = {}
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.context: dict[int, int] = {}  # by slot
        self.table: dict[tuple[int, int], int] = {}  # (slot, index) -> page
        self.tokens: dict[int, list[int]] = {}  # by slot
        self.kv: dict[tuple[int, int], object] = {}  # (page, offset) -> the tokens that it depends on
        self.num_rows = 0  # that were computed

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.requests[request.uid] = request

    def abort(self, uid: int) -> None:
        self.scheduler.finish(self.requests.pop(uid), "abort")

    def launch(self, outcome: Outcome = full, token: Callable[[int], int] = lambda position: 9) -> StepPlan | NoPlan:
        """Plan a step and run it; what it brought can be collected later."""
        plan = self.scheduler.schedule()
        if isinstance(plan, StepPlan):
            self.load(plan)
            self.in_flight.append((plan, self.run(plan, outcome, token)))
        return plan

    def load(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self.context[admission.slot] = admission.num_cached
            self.tokens[admission.slot] = admission.token_ids_np.tolist()
            self.table = {key: page for key, page in self.table.items() if key[0] != admission.slot}
        places = [(slot, index) for slot, index, _ in plan.page_writes_np.tolist()]
        assert len(places) == len(set(places)), "the order of two writes to one place is undefined on a device"
        self.table |= {(slot, index): page for slot, index, page in plan.page_writes_np.tolist()}
        for admission in plan.admissions:
            self._check_kv(admission.slot, admission.num_cached)

    def run(self, plan: StepPlan, outcome: Outcome, token: Callable[[int], int]) -> StepResult:
        widths, accepted = np.zeros((2, plan.num_sequences), np.int32)
        most = int(plan.caps_np.max(initial=0))
        token_ids = np.zeros((plan.num_sequences, most + 1), np.int32)
        for row, (slot, uid) in enumerate(zip(plan.slots_np.tolist(), plan.uids_np.tolist(), strict=True)):
            context, given, cap = self.context[slot], int(plan.num_given_np[row]), int(plan.caps_np[row])
            assert context <= plan.context_upper_bound_np[row]
            widths[row], accepted[row] = outcome(row, cap) if row < plan.num_decode else (0, 0)
            assert accepted[row] <= widths[row] <= cap
            self._check_write_window(uid, slot, context, context + given + int(widths[row]))
            first = context + given
            emitted = [token(first + j) for j in range(accepted[row] + 1)]
            token_ids[row, : accepted[row] + 1] = emitted
            if plan.emits_np[row]:
                self.tokens[slot][first:] = emitted
            self.context[slot] = first + int(accepted[row])
            self._write_kv(slot, context, self.context[slot], context + given + int(widths[row]))
            self.num_rows += given + int(widths[row])
        return StepResult(
            step=plan.step, widths_np=widths, num_accepted_np=accepted, token_ids_np=token_ids,
            invalid_np=np.zeros(plan.num_sequences, np.bool_),
        )  # fmt: skip

    def _check_write_window(self, uid: int, slot: int, start: int, end: int) -> None:
        request = self.requests.get(uid)
        if request is None or request.slot != slot:
            return  # it ended while the step lay in flight
        owned = self.scheduler.pages_of(request)
        for position in range(start, end):
            page = self.table[slot, position // PAGE_SIZE]
            assert page in owned, (uid, position)
            sharers = [other.uid for other in self.scheduler.running if page in self.scheduler.pages_of(other)]
            assert sharers == [uid], (page, sharers)

    def _write_kv(self, slot: int, start: int, context: int, end: int) -> None:
        for position in range(start, end):
            page = self.table[slot, position // PAGE_SIZE]
            right = tuple(self.tokens[slot][: position + 1]) if position < context else "a rejected draft"
            self.kv[page, position % PAGE_SIZE] = right

    def _check_kv(self, slot: int, num_tokens: int) -> None:
        for position in range(num_tokens):
            page = self.table[slot, position // PAGE_SIZE]
            assert self.kv[page, position % PAGE_SIZE] == tuple(self.tokens[slot][: position + 1]), (slot, position)

    def collect(self, invalid: Sequence[int] = ()) -> list[Delta]:
        """Commit the oldest step in flight; `invalid` are rows whose logits were not finite."""
        plan, result = self.in_flight.popleft()
        result.invalid_np[list(invalid)] = True
        deltas = list(commit(plan, result, self.scheduler))
        for delta in deltas:
            if delta.finish_reason is not None:
                del self.requests[delta.request.uid]
        return deltas

    def step(self, outcome: Outcome = full, token: Callable[[int], int] = lambda position: 9) -> list[Delta]:
        """The plain loop."""
        assert isinstance(self.launch(outcome, token), StepPlan)
        return self.collect()
