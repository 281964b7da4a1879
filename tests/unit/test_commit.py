"""From results to tokens: where answers end, what is counted, and which results belong to nobody any more."""

import pytest

from slipstream.answers import Answers
from slipstream.commit import commit
from slipstream.metrics import SpecCounters
from slipstream.plan import StepPlan
from slipstream.request import TextStop
from tests.unit.scheduling import (
    EOS,
    PaperDevice,
    check_invariants,
    full,
    is_prefilling,
    make_request,
    make_scheduler,
    numbers,
    rejected,
)

K = 4


def decoding(*requests, **limits):
    paper = PaperDevice(make_scheduler(drafts=K, **limits))
    paper.add(*requests)
    while any(is_prefilling(paper.scheduler, request) for request in requests):
        paper.step()
    return paper


def tokens(*values, first):
    """What the target says at positions first, first + 1, ..."""
    return lambda position: values[position - first] if 0 <= position - first < len(values) else 9


def test_a_step_brings_the_accepted_drafts_and_one_token():
    request = make_request(0, prompt=5)
    paper = decoding(request)
    (delta,) = paper.step(lambda row, cap: (3, 2), tokens(11, 12, 13, 14, first=6))
    assert delta.token_ids == (11, 12, 13)
    assert delta.accepted == (True, True, False)
    assert (delta.width, delta.finish_reason) == (3, None)
    assert request.output_ids == [9, 11, 12, 13]
    assert request.accepted == [False, True, True, False]
    assert numbers(paper.scheduler, request)[0] == 8  # all but the newest token, the next anchor
    counters = paper.scheduler.counters_of(request)
    assert (counters.steps, counters.drafted, counters.verified) == (1, K, 3)
    assert (counters.accepted, counters.emitted) == (2, 3)
    assert (counters.verified_at, counters.accepted_at) == ({1: 1, 2: 1, 3: 1}, {1: 1, 2: 1})


def test_a_delta_says_what_was_drafted_for_it():
    """Nothing where a prompt gave the token, in the middle of an answer too: after a preemption it is read anew."""
    request, other = make_request(0, prompt=5), make_request(1, prompt=5)
    paper = PaperDevice(make_scheduler(drafts=K))
    paper.add(request, other)
    said = {0: [], 1: []}
    for number in range(8):
        if number == 4:
            paper.scheduler._preempt(request)
        for delta in paper.step(rejected):
            said[delta.request.uid].append(delta.drafted)
    assert said == {0: [0, K, K, K, 0, K, K, K], 1: [0, K, K, K, K, K, K, K]}


def test_the_token_of_a_prefill_is_no_decode_step():
    request = make_request(0, prompt=5)
    paper = PaperDevice(make_scheduler(tokens=3))
    paper.add(request)
    assert [paper.step()[0].token_ids for _ in range(2)] == [(), (9,)]
    counters = paper.scheduler.counters_of(request)
    assert counters.steps == counters.emitted == 0
    assert numbers(paper.scheduler, request)[0] == 5
    assert request.first_token_s == request.last_token_s > request.submitted_s


@pytest.mark.parametrize("kind", ["eos", "stop token"])
@pytest.mark.parametrize("place", range(K + 1))
def test_an_answer_ends_at_a_stop_token_in_any_place_of_a_block(place, kind):
    request = make_request(0, prompt=5, stop_token_ids=(33,))
    paper = decoding(request)
    block = [11, 12, 13, 14, 15]
    block[place] = EOS if kind == "eos" else 33
    (delta,) = paper.step(full, tokens(*block, first=6))
    assert delta.finish_reason == request.finish_reason == "stop"
    assert list(delta.token_ids) == block[: place + 1]
    assert request.stop_reason == block[place]
    assert list(delta.accepted) == [j < K for j in range(place + 1)]
    counters = request.counters
    assert (counters.emitted, counters.verified) == (place + 1, K)
    assert counters.accepted == min(place + 1, K)
    assert paper.scheduler.pages.num_used == 0 and not paper.scheduler.has_work


def test_a_stop_in_the_middle_of_an_accepted_block():
    """Fault 28: [d1, d2, EOS, d4, d5], all accepted by the target; three were emitted."""
    request = make_request(0, prompt=5)
    paper = PaperDevice(make_scheduler(drafts=5))
    paper.add(request)
    paper.step()
    paper.step(full, tokens(11, 12, EOS, 14, 15, 16, first=6))
    counters = request.counters
    assert (counters.drafted, counters.verified, counters.accepted, counters.emitted) == (5, 5, 3, 3)
    assert counters.mean_accepted_length == 3.0
    assert request.output_ids == [9, 11, 12, EOS]


def test_a_stop_token_that_was_rejected_stops_nothing():
    request = make_request(0, prompt=5)
    paper = decoding(request)
    (delta,) = paper.step(lambda row, cap: (4, 1), tokens(11, 12, EOS, EOS, EOS, first=6))
    assert (delta.token_ids, delta.finish_reason) == ((11, 12), None)


def watching(stop, **params):
    """A request whose watcher ends it at a token, as a stop string would, and the tokens that it has read."""
    read = []

    def watcher(token_ids):
        end = token_ids.index(stop) + 1 if stop in token_ids else None
        read.extend(token_ids[:end])
        return None if end is None else TextStop(end, "text")

    request = make_request(0, prompt=5, **params)
    request.watcher = watcher
    return request, read


@pytest.mark.parametrize("place", range(K + 1))
def test_a_watcher_ends_an_answer_in_any_place_of_a_block(place):
    request, read = watching(33)
    paper = decoding(request)
    block = [11, 12, 13, 14, 15]
    block[place] = 33
    (delta,) = paper.step(full, tokens(*block, first=6))
    assert delta.finish_reason == request.finish_reason == "stop"
    assert request.stop_reason == "text"
    assert list(delta.token_ids) == block[: place + 1]
    assert request.output_ids == read == [9, *block[: place + 1]]
    assert (request.counters.emitted, request.counters.accepted) == (place + 1, min(place + 1, K))
    assert paper.scheduler.ledger.answers.num_watched == 0


@pytest.mark.parametrize("text_at", range(K + 1))
@pytest.mark.parametrize("id_at", range(K + 1))
def test_of_a_stop_id_and_a_text_the_first_ends_the_answer(id_at, text_at):
    """On one token the id does."""
    request, _ = watching(33 if text_at != id_at else EOS)
    paper = decoding(request)
    block = [11, 12, 13, 14, 15]
    block[text_at], block[id_at] = 33, EOS
    (delta,) = paper.step(full, tokens(*block, first=6))
    assert (len(delta.token_ids), delta.finish_reason) == (min(id_at, text_at) + 1, "stop")
    assert request.stop_reason == (EOS if id_at <= text_at else "text")


def test_a_text_goes_before_length():
    request, _ = watching(33, max_tokens=3)
    (delta,) = decoding(request).step(full, tokens(11, 33, 33, first=6))
    assert (delta.token_ids, delta.finish_reason, request.stop_reason) == ((11, 33), "stop", "text")
    request, _ = watching(33, max_tokens=2)
    (delta,) = decoding(request).step(full, tokens(11, 33, first=6))
    assert (delta.token_ids, delta.finish_reason, request.stop_reason) == ((11,), "length", None)


def test_a_watcher_reads_every_token_of_the_answer_once():
    """Chunks of the prompt bring none; rejected, late and recomputed tokens are not read; neighbours are not."""
    request, read = watching(33, max_tokens=40)
    paper = PaperDevice(make_scheduler(drafts=K, tokens=3, slots=3))
    paper.add(request, make_request(1, prompt=5))
    for step in range(14):
        paper.step(lambda row, cap: (cap, min(cap, 2)), lambda position: 100 + position)
        if step in (5, 9):
            paper.scheduler._preempt(request)
    assert read == request.output_ids and len(read) > 10
    paper.launch(full)
    paper.abort(0)
    paper.collect()
    assert read == request.output_ids


def test_a_request_that_is_not_finite_has_no_stop():
    request, read = watching(33)
    paper = decoding(request)
    paper.launch(full, tokens(33, first=6))
    (delta,) = paper.collect(invalid=[0])
    assert (delta.finish_reason, request.stop_reason, read) == ("error", None, [9])


def test_ignored_eos_is_a_token_like_others_and_a_stop_token_is_not():
    request = make_request(0, prompt=5, ignore_eos=True, stop_token_ids=(33,))
    paper = decoding(request)
    paper.step(full, tokens(EOS, EOS, 12, EOS, 13, first=6))
    assert request.output_ids == [9, EOS, EOS, 12, EOS, 13]
    (delta,) = paper.step(full, tokens(EOS, 33, first=11))
    assert (delta.token_ids, delta.finish_reason) == ((EOS, 33), "stop")


@pytest.mark.parametrize("more", range(1, K + 2))
def test_max_tokens_ends_an_answer_in_any_place_of_a_block(more):
    """Caps keep blocks shorter than what is wanted, so only a result larger than planned shows the cut."""
    request = make_request(0, prompt=5)
    paper = decoding(request)
    paper.launch(full, tokens(11, 12, 13, 14, 15, first=6))
    paper.scheduler.ledger.full_context[request.slot] = 5 + more
    (delta,) = paper.collect()
    assert delta.finish_reason == "length"
    assert delta.token_ids == (11, 12, 13, 14, 15)[:more]
    assert request.counters.accepted == min(more, K)


def test_stop_goes_before_length():
    request = make_request(0, prompt=5, max_tokens=3)
    paper = decoding(request)
    (delta,) = paper.step(full, tokens(11, EOS, first=6))
    assert (delta.token_ids, delta.finish_reason) == ((11, EOS), "stop")


def test_the_end_of_the_context_is_a_length():
    request = make_request(0, prompt=5)
    paper = decoding(request, max_len=9)
    (delta,) = paper.step(full, tokens(11, 12, 13, first=6))
    assert delta.finish_reason == "length"
    assert request.num_known == 9


def test_a_row_that_is_not_finite_ends_its_request_only():
    bad, good = make_request(0, prompt=5), make_request(1, prompt=5)
    paper = decoding(bad, good)
    paper.launch(full)
    paper.launch(full)
    first, second = paper.collect(invalid=[0])
    assert (first.request, first.finish_reason, first.token_ids) == (bad, "error", ())
    assert "not finite" in bad.error
    assert (second.request, len(second.token_ids)) == (good, K + 1)
    assert [delta.request for delta in paper.collect()] == [good]  # the later step of the failed one is dropped
    check_invariants(paper.scheduler)


def test_a_result_that_comes_late_is_dropped_even_for_the_same_id():
    """Fault 18: aborted with two steps in flight, and sent again at once under the same id."""
    old = make_request(5, prompt=5)
    paper = decoding(old, slots=1)
    paper.launch(full)
    paper.launch(full)
    paper.abort(5)
    new = make_request(5, prompt=7)
    paper.add(new)
    assert paper.collect() == []  # not admitted yet
    plan = paper.launch(rejected)
    assert plan.slots_np.tolist() == [0] and plan.generations_np.tolist() == [1]
    assert paper.collect() == []  # the slot is the same, its generation is not
    assert new.output_ids == [] and numbers(paper.scheduler, new) == (0, 7, 1)
    (delta,) = paper.collect()
    assert (delta.request, delta.token_ids) == (new, (9,))
    assert old.output_ids == [9]
    assert paper.scheduler.counters_of(new).steps == 0


def test_late_results_of_a_chunk_are_dropped_too():
    old = make_request(5, prompt=9)
    paper = PaperDevice(make_scheduler(tokens=4, slots=1))
    paper.add(old)
    paper.launch()
    paper.launch()
    paper.abort(5)
    new = make_request(5, prompt=3)
    paper.add(new)
    paper.launch()
    assert [paper.collect() for _ in range(2)] == [[], []]
    assert numbers(paper.scheduler, new) == (0, 3, 1)
    assert len(paper.collect()) == 1


def test_counts_of_a_running_request_are_those_that_it_ends_with():
    """Steps are added up at once only now and then; an answer's last step may be cut, and a preemption keeps counts."""
    request = make_request(0, prompt=5, max_tokens=300)
    paper = decoding(request, max_len=400)
    outcomes = [(4, 4), (3, 1), (0, 0), (4, 0)] * 40
    steps = iter(outcomes)
    expected = SpecCounters()
    while not request.is_finished:
        known = len(request.output_ids)
        plan = paper.launch(lambda row, cap: tuple(min(value, cap) for value in next(steps)))
        width, accepted = (
            int(part[0]) for part in (paper.in_flight[0][1].widths_np, paper.in_flight[0][1].num_accepted_np)
        )
        paper.collect()
        if plan.num_decode:
            expected.count_step(K, width, accepted, len(request.output_ids) - known)
        assert paper.scheduler.counters_of(request) == expected
        if known in (50, 51):
            paper.scheduler._preempt(request)
            assert request.counters == paper.scheduler.counters_of(request) == expected
    assert request.counters == expected
    assert expected.steps > 64


def test_deltas_are_a_sequence():
    first, second = make_request(0, prompt=5), make_request(1, prompt=5)
    paper = decoding(first, second)
    plan = paper.launch(full, tokens(11, EOS, first=6))
    gains = commit(plan, paper.in_flight.popleft()[1], paper.scheduler)
    assert [delta.request for delta in gains] == [first, second] == gains.ended
    assert gains[-1] == gains[1] == gains[:][1]
    assert (gains[1].token_ids, gains[1].accepted, gains[1].finish_reason) == ((11, EOS), (True, True), "stop")
    with pytest.raises(IndexError):
        gains[2]


def test_counts_never_fall_below_zero_whatever_ends_when():
    request, other = make_request(0, prompt=5, max_tokens=7), make_request(1, prompt=5, max_tokens=9)
    paper = decoding(request, other)
    while paper.scheduler.has_work:
        plan = paper.launch(lambda row, cap: (cap, cap // 2))
        assert not isinstance(plan, StepPlan) or (plan.caps_np >= 0).all()
        if len(paper.in_flight) == 2 or not isinstance(plan, StepPlan):
            paper.collect()
        ledger, slots = paper.scheduler.ledger, [each.slot for each in paper.scheduler.running]
        assert (ledger.context[slots] >= 0).all()
        assert (ledger.context_lower_bound[slots] <= ledger.full_context[slots]).all()
    while paper.in_flight:
        assert paper.collect() == []
    assert (len(request.output_ids), len(other.output_ids)) == (7, 9)


def test_an_answer_can_be_read_while_it_is_made_and_survives_a_preemption():
    request = make_request(0, prompt=5, max_tokens=60)
    paper = decoding(request, slots=1)
    expected, flags = [9], [False]
    for step in range(6):
        (delta,) = paper.step(lambda row, cap: (cap, min(cap, 2)), lambda position: 100 + position)
        expected, flags = [*expected, *delta.token_ids], [*flags, *delta.accepted]
        assert (request.output_ids, request.accepted, request.num_known) == (expected, flags, 5 + len(expected))
        if step == 2:
            last_token_s = request.last_token_s
            paper.scheduler._preempt(request)
            assert (request.output_ids, request.accepted, request.last_token_s) == (expected, flags, last_token_s)
    paper.abort(0)
    assert (request.output_ids, request.accepted) == (expected, flags)
    assert expected == [9, *range(106, 105 + len(expected))] and True in flags
    assert request.last_token_s > last_token_s > request.first_token_s


def test_the_next_tenant_of_a_slot_starts_with_an_empty_answer():
    old, new = make_request(0, prompt=5, stop_token_ids=(33,)), make_request(1, prompt=5)
    paper = decoding(old, slots=1)
    paper.add(new)
    (delta,) = paper.step(full, tokens(11, 12, 33, first=6))
    kept = list(old.output_ids)
    assert delta.finish_reason == "stop" and kept == [9, 11, 12, 33]
    paper.step()
    assert (new.slot, new.output_ids, new.accepted) == (0, [9], [False])
    (delta,) = paper.step(full, tokens(33, 33, first=6))  # a stop of the former tenant
    assert (delta.finish_reason, new.output_ids[:3]) == (None, [9, 33, 33])
    assert old.output_ids == kept


def test_what_was_accepted_of_an_answer_says_nothing_of_the_next_in_that_slot():
    old, new = make_request(0, prompt=5, max_tokens=12), make_request(1, prompt=5, max_tokens=12)
    paper = decoding(old, slots=1)
    paper.add(new)
    while not old.is_finished:
        paper.step(rejected)
    paper.step()
    while not new.is_finished:
        paper.step(full)
    assert old.accepted == [False] * 12
    assert new.accepted == [False, True, True, True, True, False, True, True, True, True, False, False]


@pytest.mark.parametrize("token", [33 + Answers.STOP_CLASSES, 33 + 2 * Answers.STOP_CLASSES])
def test_a_token_that_only_resembles_a_stop_stops_nothing(token):
    request = make_request(0, prompt=5, stop_token_ids=(33, 2**40))
    paper = decoding(request)
    (delta,) = paper.step(full, tokens(token, 33, first=6))
    assert (delta.token_ids, delta.finish_reason) == ((token, 33), "stop")


def test_a_delta_can_be_read_later():
    """Steps after it write over the ledger, not over what it says."""
    request = make_request(0, prompt=5)
    paper = decoding(request)
    plan = paper.launch(full, tokens(11, 12, 13, 14, 15, first=6))
    gains = commit(plan, paper.in_flight.popleft()[1], paper.scheduler)
    paper.step(full, tokens(21, 22, 23, EOS, first=11))
    assert (gains[0].token_ids, gains[0].finish_reason) == ((11, 12, 13, 14, 15), None)
    assert request.output_ids == [9, 11, 12, 13, 14, 15, 21, 22, 23, EOS]
