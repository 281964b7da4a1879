"""Prefixes in the cache against rules: what is found, who has to wait for it, what is kept and what goes first.

That pages hold what they are found for is checked by the paper device, here and in test_pages.py.
"""

import numpy as np
import pytest

from slipstream.cache.shared import SharedPages, page_keys
from slipstream.config import SamplingParams
from slipstream.request import Request
from tests.unit.scheduling import PAGE_SIZE, PaperDevice, check_invariants, make_scheduler


def device(**limits: int) -> PaperDevice:
    return PaperDevice(make_scheduler(**{"drafts": 0, "shares": True, **limits}))


def request(uid: int, *tokens: int, max_tokens: int = 1, **params: object) -> Request:
    return Request(uid=uid, prompt_ids=tokens, params=SamplingParams(max_tokens=max_tokens, **params), seed=uid)


def serve(paper: PaperDevice, *requests: Request) -> int:
    """Serve them to the end; how many rows that took."""
    before = paper.num_rows
    paper.add(*requests)
    while paper.scheduler.has_work:
        paper.step()
        check_invariants(paper.scheduler)
    return paper.num_rows - before


LONG = tuple(range(2, 15))  # 13 tokens: three pages and one token


# ------------------------------------------------------------------------------------------------------------- keys


def test_a_key_stands_for_all_tokens_up_to_its_page():
    keys = page_keys(np.arange(12, dtype=np.int32), 4)
    assert len(keys) == len(set(keys)) == 3
    assert page_keys(np.arange(11, dtype=np.int32), 4) == keys[:2]
    assert page_keys(np.arange(4, 12, dtype=np.int32), 4, keys[0]) == keys[1:]
    other = page_keys(np.array([9, *range(1, 12)], np.int32), 4)
    assert not {*keys} & {*other}


# ------------------------------------------------------------------------------------------------------ what is found


def test_a_prompt_seen_before_costs_its_last_token():
    paper = device()
    assert serve(paper, request(1, *LONG)) == 13
    again = request(2, *LONG)
    assert serve(paper, again) == 1
    assert again.num_cached == 12
    assert (paper.scheduler.prefixes.num_queried, paper.scheduler.prefixes.num_hits) == (26, 12)


def test_the_last_token_is_computed_even_where_its_page_is_known():
    paper = device()
    serve(paper, request(1, *LONG))
    assert serve(paper, request(2, *LONG[:12])) == 4


def test_a_prompt_that_parts_from_another_shares_what_lies_before():
    paper = device()
    serve(paper, request(1, *LONG))
    assert serve(paper, request(2, *LONG[:9], 99, 98, 97, 96, 95)) == 14 - 8
    assert serve(paper, request(3, 99, *LONG[1:])) == 13


def test_an_answer_is_found_by_the_next_turn():
    paper = device()
    first = request(1, *LONG, max_tokens=8)
    serve(paper, first)
    turn = (*LONG, *first.output_ids, 50, 51)  # of the answer's last token no KV was ever made
    assert serve(paper, request(2, *turn)) == len(turn) - 20


def test_an_aborted_answer_leaves_what_was_committed():
    paper = device()
    paper.add(request(1, *LONG, max_tokens=20))
    for _ in range(4):
        paper.step()
    paper.launch()
    paper.abort(1)
    paper.collect()  # the step in flight, of which nothing counts
    assert serve(paper, request(2, *LONG, 9, 9, 9, 9, 9)) == 18 - 16


def test_whose_prompt_is_to_be_reported_computes_it():
    paper = device()
    serve(paper, request(1, *LONG))
    assert serve(paper, request(2, *LONG, prompt_logprobs=0)) == 13


def test_without_sharing_nothing_is_found():
    paper = device(shares=False)
    assert [serve(paper, request(uid, *LONG)) for uid in (1, 2)] == [13, 13]
    assert paper.scheduler.prefixes.num_hits == 0


# ------------------------------------------------------------------------------------------------------ many at once


def test_who_comes_together_computes_a_prefix_once():
    """The first computes it; the others wait for that step to be launched, not for its result."""
    paper = device(slots=8, tokens=1000, max_len=100)
    prefix = tuple(range(2, 42))
    paper.add(*(request(uid, *prefix, 50 + uid, max_tokens=3) for uid in range(8)))
    assert paper.launch().num_given_np.tolist() == [41]
    second = paper.launch()
    assert (second.num_decode, second.num_given_np.tolist()) == (1, [1] * 8)
    while paper.in_flight:
        paper.collect()


def test_a_prefix_in_chunks_is_waited_for_to_its_end():
    paper = device(slots=3, tokens=16, max_len=100)
    prefix = tuple(range(2, 42))
    assert serve(paper, *(request(uid, *prefix, 50 + uid) for uid in range(3))) == 41 + 1 + 1


def test_nobody_waits_for_a_page_that_has_to_be_computed_anyway():
    paper = device(slots=3, tokens=64)
    serve(paper, request(0, *LONG[:8], 99))
    paper.add(request(1, *LONG[:12]), request(2, *LONG[:12]))
    assert paper.launch().uids_np.tolist() == [1, 2]


def test_who_shares_nothing_does_not_wait():
    paper = device(slots=3, tokens=64)
    paper.add(request(1, *LONG), request(2, 99, *LONG), request(3, *LONG))
    assert paper.launch().uids_np.tolist() == [1, 2]


# ---------------------------------------------------------------------------------------------- when memory is short


def test_what_was_not_used_for_longest_goes_first_and_ends_go_before_beginnings():
    paper = device(pages=9, max_len=20)
    serve(paper, request(1, *LONG))
    serve(paper, request(2, *range(60, 73)))
    serve(paper, request(3, *LONG))  # used again: the other one is older
    serve(paper, request(4, *range(80, 93)))  # needs 4 pages where 3 are blank
    assert len(paper.scheduler.prefixes.pages_for(request(5, *range(60, 73)))) == 2
    assert len(paper.scheduler.prefixes.pages_for(request(6, *LONG))) == 3


def test_known_pages_count_as_free_but_not_twice():
    """What is found needs no new page, and gives none away either."""
    paper = device(pages=5, slots=2, max_len=20)
    serve(paper, request(1, *LONG))
    assert paper.scheduler.pages.num_free == 5
    paper.add(request(2, *LONG, max_tokens=2), request(3, *range(60, 68)))
    assert paper.launch().uids_np.tolist() == [2]  # 3 + 1 pages; the other one wants 3 of the single one left
    paper.collect()
    while paper.scheduler.has_work:
        paper.step()
        check_invariants(paper.scheduler)


def test_a_preempted_request_finds_its_own_pages():
    paper = device(pages=12, slots=2, max_len=40)
    paper.add(request(1, *LONG, max_tokens=12), request(2, *range(60, 73), max_tokens=12))
    while not paper.scheduler.num_preemptions and paper.scheduler.has_work:
        paper.step()
        if len(paper.scheduler.running) == 2 and not paper.scheduler.num_preemptions:
            paper.scheduler._preempt(paper.scheduler.running[-1])
    plan = paper.launch()
    assert plan.admissions[0].num_cached == 12 and plan.num_given_np.tolist() == [1, 2]
    paper.collect()
    while paper.scheduler.has_work:
        paper.step()
        check_invariants(paper.scheduler)


def test_its_own_pages_are_none_that_it_found():
    """It is thrown out in the middle of its prompt, with a page that others had computed and one of its own."""
    paper = device(tokens=4, slots=2)
    serve(paper, request(1, *LONG[:5]))
    again = request(2, *LONG)
    paper.add(again)
    paper.step()
    paper.scheduler._preempt(again)
    assert paper.launch().admissions[0].num_cached == 8
    paper.collect()
    while paper.scheduler.has_work:
        paper.step()
    assert again.num_cached == 4


# ------------------------------------------------------------------------------------------------- what is not kept


def test_pages_of_a_request_that_failed_are_not_found():
    paper = device()
    paper.add(request(1, *LONG, max_tokens=5))
    paper.launch()
    paper.collect(invalid=[0])
    check_invariants(paper.scheduler)
    assert serve(paper, request(2, *LONG)) == 13


def test_after_a_step_that_failed_nothing_is_found():
    paper = device()
    serve(paper, request(1, *LONG))
    paper.add(request(2, *range(60, 73), max_tokens=5))
    paper.scheduler.schedule()  # and the launch fails
    paper.scheduler.flights.clear()
    paper.scheduler.prefixes.discard_all()
    paper.requests[2].error = "a step failed"
    paper.scheduler.finish(paper.requests.pop(2), "error")
    check_invariants(paper.scheduler)
    assert serve(paper, request(3, *LONG)) == 13
    assert serve(paper, request(4, *range(60, 73))) == 13


def test_a_page_that_is_shared_can_be_withdrawn():
    pages = SharedPages(10, PAGE_SIZE)
    (page,) = pages.take(1)
    pages.publish([page], [b"key"])
    pages.share(pages.find([b"key"]))
    pages.withdraw([page])
    assert pages.find([b"key"]) == []
    pages.give([page])
    assert pages.num_used == 1
    pages.give([page])
    assert pages.num_used == 0
    with pytest.raises(AssertionError, match="given back twice"):
        pages.give([page])
