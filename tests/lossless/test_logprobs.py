"""Log-probabilities mean the same in every mode: those of a dense forward over what was said, one entry per token.

Faults 4, 16 and 29 of docs/faults.md, for log-probabilities: widths of 0, blocks that a stop cuts, and rows of a ragged
batch. Drafters are right nowhere, here and there, and everywhere; widths are drawn or scripted.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.config import SamplingParams
from slipstream.llm import Completion
from slipstream.testing import TableDrafter, assert_nothing_left, next_token_table
from tests.e2e.engines import (
    PRUNING,
    SPECULATING,
    VOCAB,
    ScriptedDrafter,
    Spy,
    asks_for,
    greedy,
    known,
    make_llm,
    models_with,
    never,
    plain_answers,
    pool_bytes,
    prompts_of,
)
from tests.lossless.logprobs import NEAR, check_answer, check_prompt

LOOPS = pytest.mark.parametrize(
    "overlap", [pytest.param(True, id="overlapped"), pytest.param(False, id="plain", marks=pytest.mark.slow)]
)
WRONG = {"none": never, "some": lambda position: position % 3 == 0, "all": lambda position: position < 0}
CASES = pytest.mark.parametrize(("mode", "drafts"), [("off", "all"), *itertools.product(SPECULATING, WRONG)])
PROMPTS = prompts_of(5, 31, 1, 12)
SHAPED = {
    "repetition_penalty": 1.4, "presence_penalty": 1.1, "frequency_penalty": 0.5, "logit_bias": {3: 2.5, 8: -4.0},
    "min_p": 0.02, "top_p": 0.9, "top_k": 12, "min_tokens": 3, "stop_token_ids": (4,),
}  # fmt: skip


def asking(count: int | None = 3, prompt: int | None = None, **fields: object) -> SamplingParams:
    return greedy(14, logprobs=count, prompt_logprobs=prompt, **fields)


def mixed(temperature: float = 0.0, **fields: object) -> list[SamplingParams]:
    """Of the four requests one asks for nothing, and the others for different things."""
    wishes = [(3, None), (None, None), (0, 2), (20, 0)]
    return [asking(a, b, temperature=temperature, seed=7 + i, **fields) for i, (a, b) in enumerate(wishes)]


def llm_for(mode: str, drafts: str, params, acceptance: str = "coupled", widths=None, **options):
    drafter = None
    if mode != "off":
        confidence = None if widths is None else asks_for(widths)
        silent = [replace(p, logprobs=None, prompt_logprobs=None) for p in params]
        drafter = ScriptedDrafter(known(PROMPTS, silent), wrong=WRONG[drafts], confidence=confidence)
    return make_llm(mode, drafter, acceptance=acceptance, num_drafts=7, **options)


def check(llm, params, prompts=PROMPTS) -> list[Completion]:
    answers = llm.generate(prompts, params)
    for prompt, each, answer in zip(prompts, params, answers, strict=True):
        check_answer(llm.models, prompt, answer, each.logprobs)
        check_prompt(llm.models, prompt, answer, each.prompt_logprobs)
    assert_nothing_left(llm.engine)
    return answers


def no_entries(params) -> list[SamplingParams]:
    return [replace(p, logprobs=None, prompt_logprobs=None) for p in params]


# ------------------------------------------------------------------------------------------- 29: rows of a ragged batch


@LOOPS
@CASES
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_fault_29_entries_are_those_of_a_dense_forward(mode, drafts, overlap, temperature):
    params = mixed(temperature)
    answers = check(llm := llm_for(mode, drafts, params, overlap=overlap), params)
    assert [answer.token_ids for answer in answers] == plain_answers(PROMPTS, no_entries(params))
    totals = llm.engine.totals
    if mode != "off":
        assert totals.verified > 0
        if temperature == 0:
            assert (totals.accepted == 0) == (drafts == "none")
            assert (totals.accepted > 0.7 * totals.verified) >= (drafts == "all")  # the end of an answer cuts some


@pytest.mark.parametrize("mode", PRUNING)
@pytest.mark.parametrize("drafts", WRONG)
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_fault_29_widths_zero_three_seven(mode, drafts, acceptance):
    """Each sequence has its own width in every step."""
    wanted = torch.tensor([0, 3, 7, 0] * 8)
    params = [asking(3)] * 4
    llm = llm_for(mode, drafts, params, acceptance, lambda view: wanted[view.slots], overlap=False)
    spy = Spy(llm)
    check(llm, params)
    seen = {width for step in spy.steps[1:] for width in step.widths}
    assert {0, 3} <= seen and max(seen) > 3, seen


@CASES
def test_rejection_reports_the_target_and_not_the_residual(mode, drafts):
    params = mixed(1.0)
    check(llm_for(mode, drafts, params, "rejection"), params)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("mode", ["off", *SPECULATING])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_entries_are_before_everything_that_a_request_asks_of_its_logits(mode, acceptance, temperature):
    """Also: greedy speculation under penalties has the entries of plain decoding."""
    params = mixed(temperature, **SHAPED)
    answers = check(llm_for(mode, "some", params, acceptance), params)
    assert any(entry.rank > 1 for answer in answers for entry in answer.logprobs or ()), "nothing was changed"
    if acceptance == "coupled" or temperature == 0:
        assert [answer.token_ids for answer in answers] == plain_answers(PROMPTS, no_entries(params))


@pytest.mark.parametrize("drafter", ["dspark", "table"])
@pytest.mark.parametrize("mode", SPECULATING)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_networks_and_tables_draft(mode, drafter, temperature):
    params = mixed(temperature)
    answers = [[*p, *a] for p, a in zip(PROMPTS, plain_answers(PROMPTS, no_entries(params)), strict=True)]
    table = TableDrafter(next_token_table(answers, VOCAB), 7) if drafter == "table" else None
    llm = make_llm(mode, table and as_scripted(table), models=models_with("dspark" if table is None else None))
    check(llm, params)
    assert llm.engine.totals.verified > llm.engine.totals.accepted


def as_scripted(drafter: TableDrafter) -> TableDrafter:
    drafter.engine = None
    return drafter


# ------------------------------------------------------------------------------------------- 4: a width of 0 is a width


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("widths", [(0, 0, 0, 0), (0, 3, 0, 3), (3, 0, 3, 0), (0, 3, 7, 7)])
@pytest.mark.parametrize("mode", PRUNING)
def test_fault_4_with_penalties_and_entries(mode, widths, acceptance):
    params = mixed(0.0, presence_penalty=1.1, repetition_penalty=1.2)
    wanted = torch.tensor(widths * 8)
    answers = check(llm_for(mode, "some", params, acceptance, lambda view: wanted[view.slots]), params)
    assert [answer.token_ids for answer in answers] == plain_answers(PROMPTS, no_entries(params))


# ------------------------------------------------------------------------------------------- 16: a stop cuts entries too


@LOOPS
@CASES
def test_fault_16_one_entry_per_token_that_counts(mode, drafts, overlap):
    """Each token of an answer in turn is the last: it is declared to end it, completes a stop string, or is one too many."""
    whole = plain_answers(PROMPTS, greedy(14))
    llm = llm_for(mode, drafts, [greedy(14)] * 4, overlap=overlap)
    for place, token in enumerate(whole[0]):
        ends = ({"stop_token_ids": (token,)}, {"stop": f"t{token}"}, {"max_tokens": place + 1})
        params = [replace(asking(2), **ends[place % 3])] * 4
        answers = check(llm, params)
        assert answers[0].completion_tokens <= place + 1
        chunks = list(llm.stream(PROMPTS[0], params[0]))
        same([entry for chunk in chunks for entry in chunk.logprobs], answers[0].logprobs)
        assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)


def same(one, other) -> None:
    """Up to rounding, which widths may change."""
    assert [entry.token_id for entry in one] == [entry.token_id for entry in other]
    assert all(abs(a.logprob - b.logprob) < NEAR for a, b in zip(one, other, strict=True))


# ------------------------------------------------------------------------------------------- prompts


def steps_of(num_tokens: int) -> dict[str, int]:
    """Engine options: so many given tokens in a step, and no more requests."""
    return {"max_num_batched_tokens": num_tokens, "max_num_seqs": min(num_tokens, 8)}


@LOOPS
@pytest.mark.parametrize("mode", ["off", *SPECULATING])
@pytest.mark.parametrize("chunk", [1, 7, 13, 64])
def test_prompts_in_chunks_of_any_size(mode, chunk, overlap):
    params = [asking(1, 3), asking(None, 1), asking(0, 20), asking(None, None)]
    check(llm_for(mode, "some", params, overlap=overlap, **steps_of(chunk)), params)


def test_a_prompt_beside_requests_that_decode_and_draft():
    """The rows of a prompt stand behind all drafts of the step, whose number only the device hands out."""
    for mode in ("off", *SPECULATING):
        llm = llm_for(mode, "some", [asking(2, 2)] * 4, **steps_of(6))
        stream = llm.stream(PROMPTS[0], asking(2, 2))
        first = next(stream)
        answer = check(llm, [asking(2, 2)], PROMPTS[1:2])[0]
        chunks = [first, *stream]
        assert len(first.prompt_logprobs) == len(PROMPTS[0]) and first.prompt_logprobs[0] is None
        assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])
        assert len(answer.prompt_logprobs) == len(PROMPTS[1])
        assert sum(len(chunk.logprobs) for chunk in chunks) == 14


def test_a_stream_that_asks_for_nothing_has_none():
    llm = make_llm("off")
    assert {(chunk.logprobs, chunk.prompt_logprobs) for chunk in llm.stream(PROMPTS[0], greedy(4))} == {(None, None)}


def test_a_request_cannot_notice_that_another_asks():
    """Rows of other requests are not read, and texts do not change."""
    for mode in ("off", *SPECULATING):
        quiet = llm_for(mode, "some", [greedy(14)] * 4).generate(PROMPTS, greedy(14))
        beside = llm_for(mode, "some", [greedy(14)] * 4).generate(PROMPTS, mixed())
        assert [answer.token_ids for answer in quiet] == [answer.token_ids for answer in beside]


# ------------------------------------------------------------------------------------------- what can come in between


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", ["off", *SPECULATING])
def test_preempted_requests_have_each_entry_once(mode, overlap):
    """Recomputed prompts are not reported again, and a prompt that was half reported goes on."""
    prompts = prompts_of(17, 18, 19)
    params = [greedy(30, logprobs=2, prompt_logprobs=2)] * 3
    drafter = None
    if mode != "off":
        drafter = ScriptedDrafter(known(prompts, greedy(30)), wrong=WRONG["some"])
    llm = make_llm(mode, drafter, overlap=overlap, kv_memory=pool_bytes(13, make_llm("off")))
    check(llm, params, prompts)
    assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("mode", ["off", *SPECULATING])
def test_aborted_requests_take_their_entries_along(mode):
    llm = llm_for(mode, "some", [greedy(14)] * 4)
    for steps in range(1, 9):
        stream = llm.stream(PROMPTS[1], asking(2, 2))
        for _ in range(steps):
            next(stream, None)
        stream.close()
        check(llm, mixed())


def test_siblings_have_entries_of_their_own():
    params = asking(2, 1, temperature=2.0, n=3, seed=5)
    llm = llm_for("lag", "some", [asking()] * 4)
    answers = llm.generate([PROMPTS[0]], params)
    for answer in answers:
        check_answer(llm.models, PROMPTS[0], answer, 2)
        check_prompt(llm.models, PROMPTS[0], answer, 1)
    assert len({answer.token_ids for answer in answers}) > 1


def test_more_top_tokens_than_there_are():
    """All of them, then."""
    params = [asking(20, 20)]
    answer = check(make_llm("off"), params, PROMPTS[:1])[0]
    assert all(len(entry.top) == min(20, VOCAB) for entry in answer.logprobs)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_requests_in_any_mode(data):
    mode = data.draw(st.sampled_from(["off", *SPECULATING]))
    acceptance = data.draw(st.sampled_from(["coupled", "rejection"]))
    count = data.draw(st.integers(1, 4))
    optional = st.none() | st.integers(0, 20)
    prompts, params = PROMPTS[:count], []
    for i in range(count):
        shaped = data.draw(st.booleans())
        params.append(
            asking(
                data.draw(optional), data.draw(optional), temperature=data.draw(st.sampled_from([0.0, 1.0])), seed=i,
                **(SHAPED if shaped else {}),
            )
        )  # fmt: skip
    widths = data.draw(st.lists(st.integers(0, 7), min_size=64, max_size=64))
    table = torch.tensor(widths)
    drafter = None
    if mode != "off":
        sequences = known(prompts, no_entries(params))
        script = asks_for(lambda view: table[(view.slots * 17 + view.context) % 64])
        drafter = ScriptedDrafter(sequences, wrong=WRONG[data.draw(st.sampled_from(list(WRONG)))], confidence=script)
    llm = make_llm(
        mode, drafter, acceptance=acceptance, num_drafts=7, overlap=data.draw(st.booleans()),
        **steps_of(data.draw(st.sampled_from([4, 9, 64]))),
    )  # fmt: skip
    check(llm, params, prompts)
