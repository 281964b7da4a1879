"""Grammars through whole engines: scripted drafts, scripted widths, company, and requests that come and go.

Identity over random drafters and shaped requests is in tests/lossless/test_identity_structured.py; with the library and
a real tokenizer in test_structured_smollm2.py.
"""

import dataclasses
import itertools
from functools import cache

import numpy as np
import pytest

from slipstream import engine, masking
from slipstream.config import SamplingParams
from slipstream.constraint import Constraint
from slipstream.request import sibling_seed
from slipstream.testing import TableGrammars, assert_nothing_left
from tests.e2e.engines import (
    PRUNING,
    SPECULATING,
    VOCAB,
    ScriptedDrafter,
    Spy,
    asks_for,
    make_llm,
    models_with,
    never,
    pool_bytes,
    prompts_of,
)
from tests.e2e.grammars import ANY, EOS, allowed_after, automaton, grammars, plain_answer
from tests.lossless.harness import GAP, scores_after

LOOPS = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
MODES = pytest.mark.parametrize("mode", ["off", *SPECULATING])
RULES = pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
HEAT = pytest.mark.parametrize("temperature", [0.0, 1.0])
PROMPTS = prompts_of(4, 9, 6, 5)


def params_for(temperature: float, max_tokens: int = 20, **wish: object) -> list[SamplingParams]:
    """Constrained and free in turn; the free ones run into max_tokens."""
    base = {"temperature": temperature, "max_tokens": max_tokens, **wish}
    asks = {"structured": ANY}, {"ignore_eos": True}
    return [SamplingParams(**base, seed=10 + i, **asks[i % 2]) for i in range(len(PROMPTS))]


@cache
def _plain(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    if params.ignore_eos:
        return make_llm("off").generate([list(prompt)], params)[0].token_ids
    answer, gap = plain_answer(models_with(), prompt, params)
    assert gap > GAP, "a near tie: take another seed"
    return answer


def plain(params: list[SamplingParams], prompts=PROMPTS) -> list[tuple[int, ...]]:
    return [_plain(tuple(prompt), each) for prompt, each in zip(prompts, params, strict=True)]


def llm_for(mode: str, params: list[SamplingParams], prompts=PROMPTS, made=None, **options):
    scripted = None
    fields = {name: options.pop(name) for name in ("confidence", "wrong") if name in options}
    if mode != "off":
        answers = [[*p, *a] for p, a in zip(prompts, plain(params, prompts), strict=True)]
        scripted = ScriptedDrafter(answers, **fields)
    llm = make_llm(mode, scripted, **options)
    llm.grammars = made or grammars(VOCAB)
    return llm


def ids(answers):
    return [answer.token_ids for answer in answers]


# ------------------------------------------------------------------------------------------------- drafts and widths


WRONG = {"none": never, "some": lambda position: position % 3 == 0, "all": lambda position: position < 0}


@LOOPS
@HEAT
@pytest.mark.parametrize(("mode", "drafts"), [("off", "all"), *itertools.product(SPECULATING, WRONG)])
def test_drafts_that_hit_none_some_and_all(mode, drafts, temperature, overlap):
    params = params_for(temperature)
    llm = llm_for(mode, params, overlap=overlap, num_drafts=5, wrong=WRONG[drafts])
    answers = llm.generate(PROMPTS, params)
    assert ids(answers) == plain(params)
    assert [answer.finish_reason for answer in answers[1::2]] == ["length"] * 2
    assert [answer.finish_reason for answer in answers[::2]] == ["stop"] * 2
    if mode != "off":
        accepted = llm.engine.totals.accepted
        assert (accepted > 0) == (drafts != "none")
    assert_nothing_left(llm.engine)


@LOOPS
@HEAT
@pytest.mark.parametrize("widths", [(0, 0, 0, 0), (0, 3, 7, 2), (5, 0, 0, 7), (7, 7, 7, 7)])
@pytest.mark.parametrize("mode", PRUNING)
def test_fault_4_any_widths(mode, widths, temperature, overlap):
    """Constrained and free requests in one step, each with a width of its own, 0 among them."""
    params = params_for(temperature)
    script = asks_for(lambda view: np.array(widths)[view.slots.numpy()])
    wrong = WRONG["some"]
    llm = llm_for(mode, params, num_drafts=7, overlap=overlap, confidence=script, wrong=wrong, max_num_seqs=4)
    spy = Spy(llm)
    assert ids(llm.generate(PROMPTS, params)) == plain(params)
    assert any(step.plan.any_constrained and len(set(step.widths)) > 1 for step in spy.steps) or len(set(widths)) == 1
    assert_nothing_left(llm.engine)


@RULES
@pytest.mark.parametrize("mode", SPECULATING)
def test_forbidden_drafts_fall(mode, acceptance):
    """Drafts that the target likes and the grammar forbids: the answer stays within it, under both rules."""
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=18, structured=ANY) for i in range(len(PROMPTS))]
    free = [SamplingParams(temperature=1.0, seed=i, max_tokens=18, ignore_eos=True) for i in range(len(PROMPTS))]
    scripted = ScriptedDrafter([[*p, *a] for p, a in zip(PROMPTS, plain(free), strict=True)])
    llm = make_llm(mode, scripted, acceptance=acceptance)
    llm.grammars = grammars(VOCAB)
    answers = llm.generate(PROMPTS, params)
    for answer in answers:
        allowed_after([token for token in answer.token_ids if token != EOS], VOCAB)
    if acceptance == "coupled":
        assert ids(answers) == plain(params)
    assert llm.engine.totals.verified > llm.engine.totals.accepted
    assert_nothing_left(llm.engine)


@pytest.mark.parametrize("mode", SPECULATING)
def test_masks_that_do_not_follow_the_drafts_would_show(mode, monkeypatch):
    """The negative control of all of the above."""
    fill = Constraint.fill

    def first_mask_everywhere(self, drafts, masks_np):
        reason = fill(self, [], masks_np)
        masks_np[:] = masks_np[0]
        return reason

    params = params_for(1.0)
    llm = llm_for(mode, params, num_drafts=5)
    monkeypatch.setattr(Constraint, "fill", first_mask_everywhere)
    try:
        answers = ids(llm.generate(PROMPTS, params))
    except AssertionError as error:
        answers = [str(error)]
    assert answers != plain(params)


# ----------------------------------------------------------------------------------------------------- company, slots


@LOOPS
@MODES
def test_siblings_have_a_place_in_the_grammar_each(mode, overlap):
    params = SamplingParams(temperature=1.5, seed=21, max_tokens=16, structured=ANY, n=4)
    seeds = [(sibling_seed(21, i) + 2**63) % 2**64 - 2**63 for i in range(4)]  # the same 64 bits, signed
    each = [SamplingParams(temperature=1.5, seed=seed, max_tokens=16, structured=ANY) for seed in seeds]
    llm = llm_for(mode, each[:1], PROMPTS[:1], overlap=overlap)
    answers = ids(llm.generate(PROMPTS[:1], params))
    assert answers == plain(each, PROMPTS[:1] * 4)
    assert len(set(answers)) > 1
    assert_nothing_left(llm.engine)


@LOOPS
@HEAT
@MODES
def test_fault_17_preemption(mode, temperature, overlap):
    """The place in the grammar belongs to the request: it comes along to another slot."""
    params = params_for(temperature, max_tokens=34)
    small = llm_for(mode, params, overlap=overlap, wrong=WRONG["some"])
    memory = pool_bytes(8, small)
    llm = llm_for(mode, params, overlap=overlap, wrong=WRONG["some"], kv_memory=memory, max_num_seqs=4)
    assert ids(llm.generate(PROMPTS, params)) == plain(params)
    assert llm.engine.scheduler.num_preemptions >= 1
    assert_nothing_left(llm.engine)


@LOOPS
@MODES
def test_fault_18_a_stream_that_is_closed_leaves_its_slot_clean(mode, overlap):
    params = params_for(0.0)
    llm = llm_for(mode, params, overlap=overlap, max_num_seqs=1)
    for stop_after in (1, 2, 3):
        chunks = llm.stream(PROMPTS[0], params[0])
        for _ in range(stop_after):
            next(chunks)
        chunks.close()
        assert ids(llm.generate(PROMPTS[:2], params[:2])) == plain(params)[:2]
    assert_nothing_left(llm.engine)


@pytest.mark.parametrize("budget", [100, 33, 3])
def test_fault_22_chunks_of_the_prompt(budget):
    """One constrained request decodes while the prompt of another is read, which emits nothing yet."""
    prompts, params = [prompts_of(5)[0], *prompts_of(9, 70)[::-1]], [*params_for(1.0)[:1] * 2, params_for(1.0)[1]]
    llm = llm_for("static", params, prompts, max_num_batched_tokens=budget, max_num_seqs=3)
    spy = Spy(llm)
    assert ids(llm.generate(prompts, params)) == plain(params, prompts)
    silent = [step for step in spy.steps if step.plan.any_constrained and not step.plan.emits_np.all()]
    assert bool(silent) == (budget < 75)


@LOOPS
@MODES
def test_a_free_batch_does_none_of_the_work(mode, overlap, monkeypatch):
    """Nor does one whose constrained requests have left, or do not emit yet."""
    params = params_for(0.0)
    llm = llm_for(mode, params, overlap=overlap)
    llm.generate(PROMPTS, params)

    def unreachable(*args, **kwargs):
        raise AssertionError("work for grammars was done")

    for owner, name in ((engine, "struck"), (masking.Constrainer, "masks"), (engine.Engine, "take_drafts")):
        monkeypatch.setattr(owner, name, unreachable)
    spy = Spy(llm)
    assert ids(llm.generate(PROMPTS[1::2], params[1::2])) == plain(params)[1::2]
    assert not any(step.plan.any_filtered or step.plan.any_shaped for step in spy.steps)
    with pytest.raises(AssertionError, match="work for grammars"):
        llm.generate(PROMPTS, params)


@MODES
def test_fault_32_shared_estimators_learn_from_free_requests_alone(mode):
    params = params_for(0.0)
    llm = llm_for(mode, params)
    spy, seen = Spy(llm), set()
    llm.generate(PROMPTS, params)
    for step in spy.steps:
        seen |= {
            (int(uid) % 2, bool(teaches)) for uid, teaches in zip(step.plan.uids_np, step.plan.teaches_np, strict=True)
        }
    assert seen == {(1, False), (0, True)}  # ids begin with 1


# ---------------------------------------------------------------------------------------------------------- the steps


@LOOPS
@MODES
def test_the_order_of_a_step(mode, overlap):
    """Drafts are launched, the step before is collected, verify is launched; then the host asks for drafts and masks."""
    params = params_for(0.0)
    llm = llm_for(mode, params, overlap=overlap, wrong=WRONG["some"])
    recorder = llm.record()
    llm.generate(PROMPTS, params)
    names: dict[int, list[str]] = {}
    collected, constrained = {}, []
    for index, span in enumerate(recorder.spans):
        names.setdefault(span.step, []).append(span.name)
        if span.name == "collect":
            collected[span.step] = index
        if span.name == "constrain":
            constrained.append((span.step, index))
    assert len(constrained) > 3
    for step, index in constrained:
        order = [name for name in names[step] if name in ("draft", "verify", "take_drafts", "constrain", "accept")]
        drafts = ["draft"] if "draft" in order else []
        assert order == [*drafts, "verify", *(["take_drafts"] if drafts else []), "constrain", "accept"]
        verify = next(i for i, span in enumerate(recorder.spans) if (span.step, span.name) == (step, "verify"))
        assert step == 0 or collected[step - 1] < verify < index < collected[step]
    assert any("draft" in names[step] for step, _ in constrained) == (mode != "off")


def test_a_step_with_a_grammar_corrects_no_prices():
    """The device may wait for masks in it."""
    params = params_for(0.0, max_tokens=60)
    llm = llm_for("lag", params)
    policy, asked = llm.engine.policy, []
    policy._timing.is_due = lambda: asked.append(1) or False
    spy = Spy(llm)
    llm.generate(PROMPTS, params)
    free = sum(not step.plan.any_constrained for step in spy.steps)
    assert len(asked) == free < len(spy.steps)


# ----------------------------------------------------------------------------------------------------------- endings


@MODES
def test_streams_and_stop_strings(mode):
    """Words of the tiny tokenizer; one of them is a stop string that a constrained answer holds."""
    params = params_for(1.0)
    whole = plain(params)[0]
    stop = f"t{whole[3]}"
    stopping = SamplingParams(temperature=1.0, max_tokens=20, seed=10, structured=ANY, stop=(stop,))
    llm = llm_for(mode, params)
    (answer,) = llm.generate(PROMPTS[:1], stopping)
    end = next(place for place, token in enumerate(whole) if f"t{token}".startswith(stop))
    assert answer.token_ids == whole[: end + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    chunks = list(llm.stream(PROMPTS[0], stopping))
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == answer.token_ids
    assert_nothing_left(llm.engine)


@LOOPS
@MODES
def test_log_probabilities_are_the_targets_own(mode, overlap):
    """Read from rows that no mask has touched: what is forbidden is among the most probable ones."""
    params = params_for(1.0, logprobs=3)
    llm = llm_for(mode, params, overlap=overlap, num_drafts=5, wrong=WRONG["some"])
    free = params_for(1.0, logprobs=3)[1]
    answers, forbidden = llm.generate(PROMPTS, params), 0
    for prompt, each, answer in zip(PROMPTS, params, answers, strict=True):
        assert len(answer.logprobs) == len(answer.token_ids)
        for place, entry in enumerate(answer.logprobs):
            before = list(answer.token_ids[:place])
            scores = scores_after(models_with(), [*prompt, *before], dataclasses.replace(free, temperature=0.0))
            expected = scores.log_softmax(0)
            assert entry.token_id == answer.token_ids[place]
            assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-4)
            if each.structured is not None:
                allowed = allowed_after(before, VOCAB)
                forbidden += sum(not allowed[token] for token, _ in entry.top)
    assert forbidden > 10
    assert_nothing_left(llm.engine)


@LOOPS
@RULES
@HEAT
@MODES
def test_a_grammar_without_a_way_on_fails_alone(mode, temperature, acceptance, overlap):
    """After two tokens nothing is allowed, not even the end. What the failing step held is lost, as ever."""
    after = automaton(VOCAB)
    dead = np.full_like(after, -1)
    dead[0], dead[1] = np.where(after[0] >= 0, 1, -1), np.where(after[1] >= 0, 2, -1)
    params = params_for(temperature)
    llm = llm_for(mode, params, made=TableGrammars(dead, ()), overlap=overlap, acceptance=acceptance)
    answers = llm.generate(PROMPTS, params)
    for answer in answers[::2]:
        assert answer.finish_reason == "error"
        assert 1 <= len(answer.token_ids) <= 2
        assert "no token" in answer.error
    assert mode != "off" or "continues what structured asks for" in answers[0].error
    if acceptance == "coupled" or temperature == 0:
        assert ids(answers)[1::2] == plain(params)[1::2]
    assert_nothing_left(llm.engine)


@MODES
def test_the_form_may_begin_after_a_text(mode):
    """Free until token 7 was written as a whole; what was free is what a free request writes."""
    pieces = [b"", b"", b"", b"", *(bytes([97 + token]) for token in range(4, VOCAB))]
    marker = pieces[7].decode()
    asked = type(ANY)(grammar="root ::= [a-z]*", after=marker)
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=24, structured=asked) for i in range(len(PROMPTS))]
    free = [SamplingParams(temperature=1.0, seed=i, max_tokens=24, stop_token_ids=(7,)) for i in range(len(PROMPTS))]
    made = TableGrammars(automaton(VOCAB), {3}, pieces)
    known = make_llm("off").generate(
        PROMPTS, [SamplingParams(seed=i, temperature=1.0, max_tokens=24) for i in range(4)]
    )
    scripted = ScriptedDrafter([[*p, *a.token_ids] for p, a in zip(PROMPTS, known, strict=True)])
    llm = make_llm(mode, None if mode == "off" else scripted)
    llm.grammars = made
    plain_llm = make_llm("off")
    plain_llm.grammars = made
    answers = ids(llm.generate(PROMPTS, params))
    assert answers == ids(plain_llm.generate(PROMPTS, params))
    begun = 0
    for answer, before in zip(answers, ids(plain_llm.generate(PROMPTS, free)), strict=True):
        assert answer[: len(before)] == before
        if before[-1] == 7:
            begun += 1
            allowed_after([token for token in answer[len(before) :] if token != EOS], VOCAB)
    assert begun >= 2
    assert_nothing_left(llm.engine)
