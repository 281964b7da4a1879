"""Who wants log-probabilities of which rows, and what becomes of the numbers that come back. No device."""

from itertools import pairwise

import numpy as np
import pytest

from slipstream.commit import commit
from slipstream.logprobs import NUM_REPORT_COLUMNS, Logbook, Reported, TokenLogprob, Wanted, entries
from slipstream.plan import StepPlan
from tests.unit.scheduling import PaperDevice, full, make_request, make_scheduler


def report_of(tokens: list[int], num_top: int) -> np.ndarray:
    """Token t has logprob -t and rank t + 1; its top tokens are t, t + 1, ... with the values -t - 0.5, ..."""
    rows = np.zeros((len(tokens), NUM_REPORT_COLUMNS + 2 * num_top), np.int32)
    values = rows.view(np.float32)
    for row, token in enumerate(tokens):
        rows[row, 0], values[row, 1] = token + 1, -token
        rows[row, NUM_REPORT_COLUMNS : NUM_REPORT_COLUMNS + num_top] = token + np.arange(num_top)
        values[row, NUM_REPORT_COLUMNS + num_top :] = -token - 0.5 - np.arange(num_top)
    return rows


def entry(token: int, num_top: int) -> TokenLogprob:
    return TokenLogprob(token, -token, token + 1, tuple((token + k, -token - 0.5 - k) for k in range(num_top)))


def reported(plan: StepPlan, token_ids: np.ndarray) -> Reported:
    """As the device would send it, with a vocabulary that is large enough."""
    wanted = plan.logprobs
    assert wanted is not None
    outputs = [report_of(token_ids[i].tolist(), wanted.num_top) for i in wanted.sequences_np.tolist()]
    prompts = [
        report_of([part.position + 3 + i for i in range(part.num_rows)], wanted.num_prompt_top)
        for part in wanted.prompts
    ]
    return Reported.of(wanted, np.concatenate([x.reshape(-1) for x in [*outputs, *prompts]]), 1000)


def test_entries_take_as_many_top_tokens_as_their_request_asked_for():
    """Others in the step may have asked for more."""
    for own in range(4):
        assert list(entries(iter([5, 7]), report_of([5, 7], 3), own)) == [entry(5, own), entry(7, own)]
    assert list(entries(iter([5]), report_of([5], 0), 4)) == [entry(5, 0)]


def test_a_logbook_joins_reports_of_different_sizes():
    book = Logbook()
    assert book.entries([], 2) == ()
    for tokens, most in (([4, 5], 2), ([], 5), ([9], 5)):
        book.add(report_of(tokens, most))
    assert book.num_tokens == 3
    assert book.entries([4, 5, 9], 2) == (entry(4, 2), entry(5, 2), entry(9, 2))


@pytest.mark.parametrize("num_top", [0, 3])
def test_what_is_sent_is_taken_apart_and_copied(num_top):
    wanted = Wanted(sequences_np=np.array([0, 2]), num_top=num_top, prompts=(), num_prompt_top=0)
    sent = np.concatenate([report_of([1, 2], num_top), report_of([3, 4], num_top)]).reshape(-1)
    found = Reported.of(wanted, sent, 1000)
    sent[:] = 0
    assert found.outputs_np.tolist() == [report_of([1, 2], num_top).tolist(), report_of([3, 4], num_top).tolist()]
    assert found.prompts == ()


def test_who_wants_nothing_is_in_no_plan():
    paper = PaperDevice(make_scheduler())
    paper.add(make_request(0), make_request(1))
    for _ in range(3):
        assert paper.launch().logprobs is None
    assert paper.scheduler.ledger.num_reporting == 0


def test_only_those_who_emit_and_ask():
    paper = PaperDevice(make_scheduler(tokens=8))
    paper.add(
        make_request(0), make_request(1, logprobs=0), make_request(2, logprobs=4), make_request(3, prompt_logprobs=2)
    )
    first = paper.launch()  # 5 tokens of the first prompt, 3 of the second
    assert first.logprobs is None
    second = paper.launch()
    places = second.uids_np.tolist()
    assert second.logprobs.sequences_np.tolist() == [places.index(1), places.index(2)]
    assert second.logprobs.num_top == 4 and second.logprobs.prompts == ()
    while (plan := paper.launch()).num_decode < 4:
        paper.collect()
    places = plan.uids_np.tolist()
    assert plan.logprobs.sequences_np.tolist() == [places.index(1), places.index(2)]
    assert plan.logprobs is paper.launch().logprobs, "made once for many steps"
    paper.abort(2)
    assert paper.launch().logprobs.num_top == 0
    paper.abort(1)
    assert paper.launch().logprobs is None
    paper.abort(3)
    assert paper.scheduler.ledger.num_reporting == 0


@pytest.mark.parametrize("tokens", [3, 4, 7, 64])
def test_rows_of_prompts_are_asked_for_once_and_in_order(tokens):
    """A row says what its next token is: the last one of a prompt has none, a prompt of one token has no row."""
    lengths = {0: 9, 1: 1, 2: 14}
    paper = PaperDevice(make_scheduler(tokens=tokens, slots=3))
    paper.add(*(make_request(uid, prompt=n, prompt_logprobs=1) for uid, n in lengths.items()))
    rows: dict[int, list[int]] = {uid: [] for uid in lengths}
    while isinstance(plan := paper.launch(), StepPlan):
        for part in plan.logprobs.prompts if plan.logprobs else ():
            place = plan.slots_np.tolist().index(part.slot)
            starts = np.cumsum(plan.num_given_np) - plan.num_given_np
            context = int(plan.context_upper_bound_np[place])
            assert part.row - starts[place] == part.position - context
            assert part.num_rows <= plan.num_given_np[place] and place >= plan.num_decode
            rows[int(plan.uids_np[place])] += range(part.position, part.position + part.num_rows)
        if len(paper.in_flight) == 2:
            finish(paper)
    assert rows == {uid: list(range(n - 1)) for uid, n in lengths.items()}


def finish(paper: PaperDevice) -> None:
    """Collect the oldest step, with what was wanted."""
    plan, result = paper.in_flight.popleft()
    commit(plan, result, paper.scheduler, None if plan.logprobs is None else reported(plan, result.token_ids_np))


def test_commit_keeps_one_report_per_token_that_counts():
    request = make_request(0, prompt=5, max_tokens=6, logprobs=1, prompt_logprobs=2)
    paper = PaperDevice(make_scheduler(drafts=3))
    paper.add(request, make_request(1))
    deltas = []
    while not request.is_finished:
        paper.launch(full, lambda position: position)
        plan, result = paper.in_flight.popleft()
        gains = commit(plan, result, paper.scheduler, plan.logprobs and reported(plan, result.token_ids_np))
        deltas += [delta for delta in gains if delta.request is request]
        assert all(delta.logprobs is None for delta in gains if delta.request is not request)
    assert request.output_ids == [5, 6, 7, 8, 9, 10]
    assert request.logprobs == tuple(entry(token, 1) for token in request.output_ids)
    assert request.prompt_logprobs == (None, *(entry(token, 2) for token in request.prompt_ids[1:]))
    assert tuple(each for delta in deltas for each in delta.logprobs) == request.logprobs
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    assert make_request(3).logprobs is None and make_request(3).prompt_logprobs is None


def test_late_reports_of_those_who_left_are_dropped():
    scheduler = make_scheduler(slots=1)
    paper = PaperDevice(scheduler)
    paper.add(make_request(0, logprobs=1, prompt_logprobs=1))
    paper.launch()
    paper.abort(0)
    heir = make_request(1, prompt=7, logprobs=1, prompt_logprobs=1)
    paper.add(heir)
    paper.launch()
    finish(paper)
    assert heir.logbook.num_tokens == heir.prompt_logbook.num_tokens == 0
    finish(paper)
    assert (heir.logbook.num_tokens, heir.prompt_logbook.num_tokens) == (1, 6)


def test_a_row_that_is_not_finite_reports_nothing():
    request = make_request(0, logprobs=1)
    paper = PaperDevice(make_scheduler())
    paper.add(request)
    paper.launch()
    paper.in_flight[0][1].invalid_np[0] = True
    finish(paper)
    assert request.finish_reason == "error" and request.logprobs == ()


def test_ranks_are_in_the_order_of_their_steps():
    """Entries of steps that were collected one after another stand in the order of the tokens."""
    request = make_request(0, max_tokens=20, logprobs=0)
    paper = PaperDevice(make_scheduler())
    paper.add(request)
    while not request.is_finished:
        paper.launch(full, lambda position: position)
        finish(paper)
    assert all(a.rank < b.rank for a, b in pairwise(request.logprobs))
