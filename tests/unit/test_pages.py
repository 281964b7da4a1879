"""Pages and slots under any order of events: a state machine over scheduler and commit with two steps in flight."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipstream.cache.pages import NULL_PAGE, NUM_RESERVED_PAGES, SCRATCH_PAGE, PageAllocator, PageTable
from slipstream.errors import CapacityError
from slipstream.scheduler import NoPlan
from tests.unit.scheduling import EOS, PaperDevice, anything_in_flight, check_invariants, make_request, make_scheduler


def test_reserved_pages_are_never_handed_out():
    pages = PageAllocator(7, 16)
    taken = pages.take(5)
    assert sorted(taken) == [2, 3, 4, 5, 6]
    assert not {NULL_PAGE, SCRATCH_PAGE} & set(taken)
    assert (pages.num_free, pages.num_used) == (0, 5)


def test_pages_come_back_and_go_out_again():
    pages = PageAllocator(7, 16)
    first = pages.take(2)
    assert first == [2, 3]
    pages.give(first)
    assert pages.take(2) == first  # what was used last is warm
    assert pages.take(0) == []


def test_counts_in_pages():
    pages = PageAllocator(7, 16)
    assert [pages.pages_for(tokens) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_misuse_is_noticed():
    pages = PageAllocator(NUM_RESERVED_PAGES + 2, 4)
    with pytest.raises(AssertionError):
        pages.take(3)
    taken = pages.take(1)
    pages.give(taken)
    with pytest.raises(AssertionError, match="given back twice"):
        pages.give(taken)
    with pytest.raises(AssertionError):
        PageAllocator(NUM_RESERVED_PAGES, 4)


def arrays(slots, counts):
    return np.array(slots, np.int64), np.array(counts, np.int32)


def test_a_page_table_is_changed_for_several_slots_at_once():
    table = PageTable(num_slots=3, pages_per_slot=4, page_size=16)
    table.append(*arrays([2, 0], [3, 1]), [7, 8, 9, 5])
    assert [table.of(slot) for slot in range(3)] == [[5], [], [7, 8, 9]]
    assert table.capacity.tolist() == [16, 0, 48]
    assert table.take_writes().tolist() == [[0, 0, 5], [2, 0, 7], [2, 1, 8], [2, 2, 9]]
    assert table.take_writes().tolist() == []
    assert table.cut(*arrays([0, 2], [0, 1])) == [5, 8, 9]
    table.append(*arrays([2], [1]), [6])
    assert table.of(2) == [7, 6]
    assert table.take_writes().tolist() == [[0, 0, NULL_PAGE], [2, 1, 6], [2, 2, NULL_PAGE]]


def test_a_cleared_slot_has_nothing_to_tell():
    table = PageTable(num_slots=2, pages_per_slot=4, page_size=16)
    table.append(*arrays([0, 1], [1, 1]), [5, 6])
    assert table.clear(0) == [5]
    assert (table.of(0), table.capacity.tolist()) == ([], [0, 16])
    assert table.take_writes().tolist() == [[1, 0, 6]]


@given(st.lists(st.tuples(st.sampled_from(["append", "cut", "write"]), st.integers(0, 2), st.integers(0, 5))))
def test_the_device_learns_the_page_table_whatever_happens_between_two_plans(events):
    table, pages, device = PageTable(3, 5, 16), iter(range(2, 999)), np.zeros((3, 5), np.int32)
    for what, slot, number in [*events, ("write", 0, 0)]:
        held = len(table.of(slot))
        if what == "append" and held < number:
            count = number - held
            table.append(*arrays([slot], [count]), [next(pages) for _ in range(count)])
        elif what == "cut" and held > number:
            table.cut(*arrays([slot], [number]))
        elif what == "write":
            slots, index, page = table.take_writes().T
            assert len(set(zip(slots.tolist(), index.tolist(), strict=True))) == len(slots)
            device[slots, index] = page
    for slot in range(3):
        held = table.of(slot)
        assert device[slot].tolist() == held + [NULL_PAGE] * (5 - len(held))


class Serving(RuleBasedStateMachine):
    """Requests come and go, steps are launched up to two ahead, results say anything that the device could say."""

    shares = False

    def __init__(self):
        super().__init__()
        limits = {"pages": 12, "slots": 3, "tokens": 6, "max_len": 30, "drafts": 3, "draft_context": 26}
        self.paper = PaperDevice(make_scheduler(**limits, shares=self.shares))
        self.next_uid = 0
        self.seen = []

    @property
    def scheduler(self):
        return self.paper.scheduler

    @rule(prompt=st.integers(1, 12), max_tokens=st.integers(1, 30))
    def submit(self, prompt, max_tokens):
        request = make_request(self.next_uid, prompt, max_tokens)
        self.next_uid += 1
        try:
            self.paper.add(request)
        except CapacityError:
            assert self.scheduler.pages.pages_for(min(prompt + max_tokens, 30)) > 12
        else:
            self.seen.append(request)

    @precondition(lambda self: len(self.paper.in_flight) < 2)
    @rule(data=st.data())
    def launch(self, data):
        number = lambda most: data.draw(st.integers(0, most))  # noqa: E731

        def outcome(row, cap):
            width = number(cap)
            return width, number(width)

        plan = self.paper.launch(outcome, lambda position: data.draw(st.sampled_from([9, 9, 9, EOS])))
        if plan is NoPlan.DRAIN:
            assert anything_in_flight(self.scheduler)
        elif plan is NoPlan.IDLE:
            assert self.paper.in_flight or not self.scheduler.has_work
        else:
            assert plan.num_given_np[plan.num_decode :].sum() <= 6
            assert (plan.caps_np >= 0).all() and (plan.num_given_np > 0).all()

    @precondition(lambda self: self.paper.in_flight)
    @rule(fails=st.booleans(), row=st.integers(0, 9))
    def collect(self, fails, row):
        size = self.paper.in_flight[0][0].num_sequences
        self.paper.collect(invalid=[row % size] if fails and row < 2 else [])

    @precondition(lambda self: self.paper.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.paper.abort(data.draw(st.sampled_from(sorted(self.paper.requests))))

    @invariant()
    def everything_is_owned_once(self):
        check_invariants(self.scheduler)

    def teardown(self):
        """Whatever happened before, everybody ends and nothing stays behind."""
        for _ in range(2000):
            if not (self.scheduler.has_work or self.paper.in_flight):
                break
            if len(self.paper.in_flight) == 2 or isinstance(self.paper.launch(), NoPlan):
                self.paper.collect()
        assert not self.scheduler.has_work
        assert self.scheduler.pages.num_used == 0
        for request in self.seen:
            assert request.is_finished
            assert len(request.output_ids) <= request.params.max_tokens
            assert request.num_known <= 30


Serving.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestServing = Serving.TestCase


class SharingServing(Serving):
    """The same with pages that are found again: prompts are alike, answers mostly."""

    shares = True


SharingServing.TestCase.settings = Serving.TestCase.settings
TestSharingServing = SharingServing.TestCase
