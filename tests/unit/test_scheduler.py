"""The scheduler against rules: who takes part, with how many rows, in which pages."""

import numpy as np
import pytest

from slipstream.cache.pages import NULL_PAGE
from slipstream.errors import CapacityError
from slipstream.plan import FOREVER, StepPlan
from slipstream.scheduler import NoPlan
from tests.unit.scheduling import (
    EOS,
    PaperDevice,
    anything_in_flight,
    check_invariants,
    full,
    is_prefilling,
    make_request,
    make_scheduler,
    numbers,
    rejected,
)


def device(**limits):
    return PaperDevice(make_scheduler(**limits))


def decoding(*requests, **limits):
    """A device on which the requests have been prefilled and nothing is in flight."""
    paper = device(**limits)
    paper.add(*requests)
    while any(is_prefilling(paper.scheduler, request) for request in requests):
        paper.step()
    return paper


# ------------------------------------------------------------------------------------------------------------ admission


def test_a_new_request_brings_its_slot_its_tokens_and_its_sampling():
    paper = device()
    request = make_request(7, prompt=5, temperature=0.5, top_p=0.9, top_k=4)
    request.seed = 2**64 - 1
    paper.add(request)
    plan = paper.launch()
    (admission,) = plan.admissions
    assert admission.token_ids_np.tolist() == [2, 3, 4, 5, 6]
    assert (admission.slot, admission.temperature, admission.top_p, admission.top_k) == (request.slot, 0.5, 0.9, 4)
    assert admission.seed == -1  # the same 64 bits, signed
    assert plan.uids_np.tolist() == [7]
    assert plan.num_decode == 0
    assert (plan.num_given_np.tolist(), plan.emits_np.tolist(), plan.caps_np.tolist()) == ([5], [True], [0])
    assert plan.any_sampled and plan.any_top_k and plan.any_top_p
    assert not (plan.any_min_p or plan.any_penalty or plan.any_edit)
    assert (admission.num_prompt, admission.edits, admission.repetition_penalty) == (5, (), 1.0)


def test_what_is_asked_of_logits_goes_down_and_the_plan_says_so():
    paper = device()
    first = make_request(7, prompt=5, logit_bias={4: -1.5}, min_tokens=3, stop_token_ids=(9,), presence_penalty=0.5)
    paper.add(first)
    (admission,) = paper.launch().admissions
    assert admission.edits == ((4, -1.5, FOREVER), (EOS, -np.inf, 3), (9, -np.inf, 3))
    assert (admission.presence_penalty, admission.frequency_penalty, admission.num_prompt) == (0.5, 0.0, 5)


@pytest.mark.parametrize(
    ("asked", "flags"),
    [
        ({}, ()), ({"min_tokens": 2}, ("any_edit",)), ({"min_tokens": 2, "ignore_eos": True}, ()),
        ({"logit_bias": {3: 0.0}}, ("any_edit",)), ({"repetition_penalty": 0.9}, ("any_penalty",)),
        ({"frequency_penalty": -1}, ("any_penalty",)), ({"presence_penalty": 1}, ("any_penalty",)),
        ({"min_p": 0.1}, ()), ({"min_p": 0.1, "temperature": 1.0}, ("any_sampled", "any_min_p")),
        ({"temperature": 1.0}, ("any_sampled",)),
    ],
)  # fmt: skip
def test_flags_of_the_plan(asked, flags):
    paper = device()
    paper.add(make_request(1, **asked))
    plan = paper.launch()
    names = ("any_sampled", "any_top_k", "any_top_p", "any_min_p", "any_penalty", "any_edit")
    assert tuple(name for name in names if getattr(plan, name)) == flags
    assert plan.any_shaped == bool(set(flags) & {"any_penalty", "any_edit"})
    assert plan.any_filtered == bool(set(flags) & {"any_top_k", "any_top_p", "any_min_p"})
    assert plan.sampled_np.tolist() == ["any_sampled" in flags]


def test_admission_wants_room_for_the_whole_prompt_and_one_token():
    paper = device(pages=4)
    paper.add(make_request(0, prompt=4, max_tokens=3))  # two pages: the prompt fills one
    assert paper.launch().page_writes_np.shape == (2, 3)
    paper.add(make_request(1, prompt=8, max_tokens=3))  # three pages, two are free
    assert paper.launch() is NoPlan.IDLE or paper.requests[1].slot is None
    paper.abort(0)
    assert paper.launch().admissions[0].token_ids_np.size == 8
    check_invariants(paper.scheduler)


def test_a_request_that_could_never_be_finished_is_refused():
    paper = device(pages=4, max_len=64)
    with pytest.raises(CapacityError, match="5 KV pages of 4 tokens and the pool has 4"):
        paper.add(make_request(0, prompt=10, max_tokens=7))
    assert not paper.scheduler.has_work
    paper.add(make_request(1, prompt=10, max_tokens=6))


def test_requests_are_admitted_in_order_as_slots_allow():
    paper = device(slots=2)
    requests = [make_request(uid) for uid in range(3)]
    paper.add(*requests)
    assert paper.launch().uids_np.tolist() == [0, 1]
    paper.collect()
    paper.abort(0)
    plan = paper.launch()
    assert plan.uids_np.tolist() == [1, 2]
    assert plan.generations_np.tolist() == [0, 1]  # the slot's second tenant
    assert requests[2].slot == plan.slots_np[1] != requests[1].slot
    check_invariants(paper.scheduler)


def test_nothing_to_do_is_idle():
    paper = device()
    assert paper.launch() is NoPlan.IDLE
    assert not paper.scheduler.has_work


# -------------------------------------------------------------------------------------------------------------- prefill


def test_a_prompt_is_cut_into_chunks_within_the_token_budget():
    paper = device(tokens=4)
    paper.add(make_request(0, prompt=10))
    plans = [paper.launch() for _ in range(3)]  # without a result in between: chunks need none
    assert [plan.num_given_np.tolist() for plan in plans] == [[4], [4], [2]]
    assert [plan.emits_np.tolist() for plan in plans] == [[False], [False], [True]]
    assert [plan.context_upper_bound_np.tolist() for plan in plans] == [[0], [4], [8]]
    assert [len(plan.admissions) for plan in plans] == [1, 0, 0]
    gained = [paper.collect()[0].token_ids for _ in plans]
    assert gained == [(), (), (9,)]


def test_decoding_rows_come_first_and_prefill_takes_what_the_budget_leaves():
    first, second, third = make_request(0, prompt=3), make_request(1, prompt=3), make_request(2, prompt=9)
    paper = decoding(first, second, tokens=6)
    paper.add(third, make_request(3, prompt=9))
    plan = paper.launch()
    assert plan.num_decode == 2
    assert plan.uids_np.tolist() == [0, 1, 2]
    assert plan.num_given_np.tolist() == [1, 1, 4]
    assert plan.caps_np.tolist() == [3, 3, 0]  # drafts are not given rows: the budget does not count them
    assert plan.num_emitting == 2
    paper.collect()
    assert paper.launch().num_given_np.tolist() == [1, 1, 4]
    plan = paper.launch()
    assert (plan.uids_np.tolist(), plan.num_given_np.tolist()) == ([0, 1, 2, 3], [1, 1, 1, 3])


def test_a_decoding_request_waits_for_no_prefill_result():
    """Its first token may still be in flight when it decodes: the anchor is on the device."""
    paper = device()
    paper.add(make_request(0, prompt=5))
    paper.launch()
    plan = paper.launch()
    assert plan.num_decode == 1
    assert (plan.context_np.tolist(), plan.context_upper_bound_np.tolist()) == ([0], [5])


# ------------------------------------------------------------------------------------------- upper bounds and give-back


def test_bounds_count_what_lies_in_flight_and_shrink_with_its_result():
    request = make_request(0, prompt=5)
    paper = decoding(request)
    scheduler = paper.scheduler
    assert numbers(scheduler, request) == (5, 5, 0)
    paper.launch(rejected)
    assert numbers(scheduler, request) == (5, 9, 1)
    assert paper.launch(rejected).context_upper_bound_np.tolist() == [9]
    assert numbers(scheduler, request) == (5, 13, 2)
    assert scheduler.ledger.context_lower_bound[request.slot] == 7
    paper.collect()
    assert numbers(scheduler, request) == (6, 10, 1)
    paper.collect()
    assert numbers(scheduler, request) == (7, 7, 0)


def test_pages_reserved_for_the_bound_are_kept_until_somebody_asks_for_pages():
    request, other = make_request(0, prompt=4, max_tokens=16), make_request(1, prompt=7, max_tokens=1)
    paper = decoding(request, drafts=10, pages=5)
    held = lambda: len(paper.scheduler.pages_of(request))  # noqa: E731
    assert held() == 2
    paper.launch(rejected)
    assert held() == 4  # context 4, 1 + 10 rows
    paper.collect()
    assert (numbers(paper.scheduler, request)[0], held()) == (5, 4)  # one page is free
    paper.scheduler.ledger.full_context[request.slot] = 6  # no drafts any more: one row
    paper.add(other)
    plan = paper.launch(rejected)
    assert plan.uids_np.tolist() == [0, 1]  # its two pages are there
    assert (held(), paper.scheduler.pages.num_free) == (2, 1)
    check_invariants(paper.scheduler)


def test_pages_given_back_go_to_whoever_lacks_its_one_row():
    """Nobody is preempted while others hold pages that their bounds do not need."""
    first, second = (make_request(uid, prompt=4, max_tokens=28) for uid in range(2))
    paper = decoding(first, second, drafts=10, pages=8)
    paper.launch(rejected)
    paper.collect()
    assert paper.scheduler.pages.num_free == 0
    paper.launch(lambda row, cap: (cap, cap if row == 0 else 0))
    paper.collect()
    plan = paper.launch(rejected)
    assert plan.num_decode == 2 and paper.scheduler.num_preemptions == 0
    assert plan.caps_np[0] > 0
    check_invariants(paper.scheduler)


def test_a_table_entry_given_back_points_nowhere():
    request = make_request(0, prompt=4)
    paper = decoding(request, drafts=10)
    paper.launch(rejected)
    paper.collect()
    surplus = {(request.slot, 2), (request.slot, 3)}
    other = make_request(1, prompt=30)
    paper.add(other)
    ledger = paper.scheduler.ledger
    ledger.full_context[request.slot] = ledger.context[request.slot] + 1  # no drafts any more: one row
    plan = paper.launch()
    assert plan.caps_np.tolist() == [0, 0]
    nulled = {(slot, index) for slot, index, page in plan.page_writes_np.tolist() if page == NULL_PAGE}
    assert nulled == surplus


def test_no_place_of_a_page_table_is_written_twice_by_one_plan():
    """Pages are given back and taken again between two plans; the device may do its writes in any order."""
    request = make_request(0, prompt=4)
    paper = decoding(request, drafts=10)
    for _ in range(4):
        paper.scheduler._give_back()
        plan = paper.launch(rejected)
        paper.collect()
        places = [tuple(place) for place in plan.page_writes_np[:, :2].tolist()]
        assert len(places) == len(set(places)) > 0


# ----------------------------------------------------------------------------------------------------------------- caps


def test_caps_end_with_the_context_of_the_model():
    request = make_request(0, prompt=5)
    paper = decoding(request, max_len=10, drafts=7)
    plan = paper.launch(full)
    # The anchor stands at 5, drafts may stand at 6, 7 and 8, and the token after them at 9, the last place.
    assert plan.caps_np.tolist() == [3]
    (delta,) = paper.collect()
    assert (delta.finish_reason, request.num_known) == ("length", 10)


def test_near_the_end_a_request_waits_for_its_results():
    request = make_request(0, prompt=5)
    paper = decoding(request, max_len=10, drafts=7)
    paper.launch(rejected)
    assert paper.launch() is NoPlan.IDLE  # all places may be taken already
    paper.collect()
    assert paper.launch(rejected).caps_np.tolist() == [2]


def test_a_prompt_one_shorter_than_the_context_gets_one_token():
    paper = device(max_len=10)
    request = make_request(0, prompt=9)
    paper.add(request)
    (delta,) = paper.step()
    assert (delta.finish_reason, len(request.output_ids)) == ("length", 1)
    assert not paper.scheduler.has_work


def test_caps_end_with_max_tokens_as_far_as_is_certain():
    request = make_request(0, max_tokens=6)
    paper = decoding(request, drafts=7)
    assert len(request.output_ids) == 1
    assert paper.launch(rejected).caps_np.tolist() == [4]  # 5 are missing, one of which is no draft
    assert paper.launch(rejected).caps_np.tolist() == [3]  # the step in flight brings at least one
    assert paper.launch(rejected).caps_np.tolist() == [2]
    for _ in range(3):
        paper.collect()
    assert len(request.output_ids) == 4
    assert paper.launch(rejected).caps_np.tolist() == [1]
    assert paper.launch(rejected).caps_np.tolist() == [0]
    assert paper.launch() is NoPlan.IDLE  # whatever comes, these two end it
    paper.collect()
    assert paper.collect()[0].finish_reason == "length"
    assert len(request.output_ids) == 6


def test_one_token_needs_no_decode_step():
    paper = device()
    paper.add(make_request(0, max_tokens=1))
    paper.launch()
    assert paper.launch() is NoPlan.IDLE
    assert paper.collect()[0].finish_reason == "length"


@pytest.mark.parametrize(("draft_context", "cap"), [(9, 3), (8, 0)])
def test_no_drafts_beyond_what_the_drafter_knows(draft_context, cap):
    """A block of anchor and 3 drafts at context 5 ends before position 9."""
    paper = decoding(make_request(0, prompt=5), draft_context=draft_context)
    plan = paper.launch()
    assert (plan.caps_np.tolist(), plan.num_given_np.tolist()) == ([cap], [1])


def test_without_drafts_a_drafters_limit_is_none():
    paper = decoding(make_request(0, prompt=5), drafts=0, draft_context=0)
    plan = paper.launch()
    assert (plan.num_decode, plan.caps_np.tolist()) == (1, [0])


def test_plans_share_what_stays_the_same_until_somebody_comes_or_goes():
    paper = decoding(make_request(0), make_request(1))
    first, second = paper.launch(rejected), paper.launch(rejected)
    shared = ("slots_np", "generations_np", "uids_np", "num_given_np", "emits_np", "sampled_np", "teaches_np")
    assert all(getattr(first, name) is getattr(second, name) for name in shared)
    assert (first.context_upper_bound_np < second.context_upper_bound_np).all()
    assert (first.decode_steps_np < second.decode_steps_np).all()
    paper.abort(0)
    assert [delta.request.uid for delta in paper.collect()] == [1]
    paper.add(make_request(2))
    plans = [paper.launch(rejected) for _ in range(2)]
    assert [plan.uids_np.tolist() for plan in plans] == [[1, 2], [1, 2]]
    assert [plan.num_decode for plan in plans] == [1, 2]
    assert [plan.generations_np.tolist() for plan in plans] == [[0, 1]] * 2
    assert first.uids_np.tolist() == [0, 1]


# ------------------------------------------------------------------------------------------------ pages run short


def test_caps_go_down_before_anyone_is_preempted():
    first, second = make_request(0, prompt=3), make_request(1, prompt=3)
    paper = decoding(first, second, pages=13, drafts=7, max_len=40)
    paper.scheduler.pages.take(8)  # three stay
    plan = paper.launch(rejected)
    assert plan.num_decode == 2
    assert plan.caps_np.tolist() == [7, 4]  # 11 tokens in 3 pages, 8 tokens in 2
    assert paper.scheduler.num_preemptions == 0


def test_without_a_free_page_drafts_stop_and_decoding_goes_on():
    first, second = make_request(0, prompt=4), make_request(1, prompt=4)
    paper = decoding(first, second, pages=30, drafts=3)
    paper.scheduler.pages.take(26)
    plan = paper.launch(rejected)
    assert plan.caps_np.tolist() == [3, 3]  # what is left of their second pages
    paper.collect()
    plan = paper.launch(rejected)
    assert plan.caps_np.tolist() == [2, 2]
    assert paper.scheduler.num_preemptions == 0


def test_the_newest_is_preempted_and_keeps_its_tokens():
    first, second = make_request(0, prompt=4, max_tokens=20), make_request(1, prompt=4, max_tokens=20)
    third = make_request(2, prompt=4, max_tokens=1)
    paper = decoding(first, second, pages=7, slots=2, drafts=0)
    paper.add(third)
    while not paper.scheduler.num_preemptions:
        plan = paper.launch()
        paper.collect()
        check_invariants(paper.scheduler)
    assert plan.uids_np.tolist() == [0]
    assert list(paper.scheduler.waiting) == [second, third]  # it goes first
    assert second.output_ids == [9] * len(second.output_ids) and second.output_ids
    kept = [*second.prompt_ids, *second.output_ids]
    while not first.is_finished:
        assert isinstance(paper.launch(), StepPlan)
        paper.collect()
    plan = paper.launch()
    assert plan.uids_np.tolist() == [1, 2]
    assert plan.admissions[0].token_ids_np.tolist() == kept
    assert plan.num_given_np.tolist() == [len(kept), 4]
    assert plan.decode_steps_np.tolist() == [0, 0]  # what was known of its drafts is not any more
    paper.collect()
    while not second.is_finished:
        paper.step()
    assert len(second.output_ids) == 20
    assert paper.scheduler.pages.num_used == 0


def test_who_is_admitted_leaves_a_page_to_everybody_who_runs():
    """Six tokens want two pages, of three that are free; the one that runs would soon throw the newcomer out again."""
    first, second = make_request(0, prompt=6, max_tokens=8), make_request(1, prompt=6, max_tokens=1)
    paper = decoding(first, pages=4, slots=2, drafts=0)
    paper.add(second)
    assert paper.scheduler.pages.num_free == 2
    assert paper.launch().uids_np.tolist() == [0]
    paper.collect()
    paper = decoding(first := make_request(0, prompt=6, max_tokens=8), pages=5, slots=2, drafts=0)
    paper.add(make_request(1, prompt=6, max_tokens=1))
    assert paper.launch().uids_np.tolist() == [0, 1]


def test_preemption_waits_for_what_is_in_flight():
    first, second = make_request(0, prompt=4, max_tokens=20), make_request(1, prompt=4, max_tokens=20)
    paper = decoding(first, second, pages=6, drafts=0)
    for _ in range(20):
        if paper.launch() is NoPlan.DRAIN:
            break
        if len(paper.in_flight) == 2:
            paper.collect()
    assert paper.in_flight
    assert paper.scheduler.num_preemptions == 0
    while paper.in_flight:
        assert paper.launch() is NoPlan.DRAIN  # and again, until everything is in
        paper.collect()
    assert paper.launch().uids_np.tolist() == [0]
    assert paper.scheduler.num_preemptions == 1
    check_invariants(paper.scheduler)


def test_drain_is_answered_only_with_something_in_flight():
    requests = [make_request(uid, prompt=4, max_tokens=24) for uid in range(3)]
    paper = device(pages=8, drafts=2)
    paper.add(*requests)
    rng = np.random.default_rng(0)
    drained = 0
    while paper.scheduler.has_work:
        plan = paper.launch(lambda row, cap: (cap, int(rng.integers(cap + 1))))
        if plan is NoPlan.DRAIN:
            drained += 1
            assert anything_in_flight(paper.scheduler)
        if plan is NoPlan.IDLE:
            assert paper.in_flight
        if len(paper.in_flight) == 2 or not isinstance(plan, StepPlan):
            paper.collect()
        check_invariants(paper.scheduler)
    assert drained
    assert paper.scheduler.num_preemptions
    assert [len(request.output_ids) for request in requests] == [24] * 3


# ------------------------------------------------------------------------------------------------------- taking out


@pytest.mark.parametrize("state", ["queued", "prefilling", "chunk in flight", "in flight", "decoding", "preempted"])
def test_finish_takes_a_request_out_of_every_state(state):
    request, other = make_request(0, prompt=8), make_request(1, prompt=4, max_tokens=30)
    paper = device(tokens=6, pages=20)
    if state == "queued":
        paper.add(request)
    elif state in ("prefilling", "chunk in flight"):
        paper.add(request)
        paper.launch()
        if state == "prefilling":
            paper.collect()
        assert is_prefilling(paper.scheduler, request)
    elif state in ("in flight", "decoding"):
        paper.add(other, request)
        for _ in range(4):
            paper.step(rejected)
        if state == "in flight":
            paper.launch()
            paper.launch()
    else:
        paper = decoding(other, request, pages=6, drafts=0, tokens=20, max_len=24)
        while not paper.scheduler.num_preemptions:
            paper.step()
        assert request.slot is None
    paper.abort(request.uid)
    assert request.finish_reason == "abort"
    assert request.slot is None and not paper.scheduler.pages_of(request)
    check_invariants(paper.scheduler)
    while paper.in_flight:
        assert request.uid not in [delta.request.uid for delta in paper.collect()]
        check_invariants(paper.scheduler)
    if other.uid in paper.requests:
        while not other.is_finished:
            paper.step()
    assert not paper.scheduler.has_work
    assert paper.scheduler.pages.num_used == 0
    assert EOS not in other.output_ids


def test_a_plan_that_was_never_launched_writes_no_page_of_an_ended_request():
    first = make_request(0)
    paper = decoding(first)
    paper.launch(rejected)
    paper.collect()  # leaves table entries to be nulled
    paper.abort(0)
    paper.add(make_request(1))
    plan = paper.launch()
    assert NULL_PAGE not in plan.page_writes_np[:, 2].tolist()
