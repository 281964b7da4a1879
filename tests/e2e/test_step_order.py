"""The order of a step's stages in every mode and loop, and that nothing reads the device between them.

Orders are asserted from recorded spans. A guard raises on hidden reads (item, tolist, numpy, bool, nonzero, ...) while
a step is launched; in the lag modes it stays up from the launch of the draft to the launch of verify, decision included.
"""

import contextlib
import itertools
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from slipstream.decide.confidence import ConfidenceStore
from slipstream.decide.survival import SurvivalModel, _LagMap
from slipstream.device.staging import Uploader
from slipstream.engine import Engine
from slipstream.testing import HiddenRead, assert_nothing_left, forbid_hidden_reads
from tests.e2e.engines import (
    PRUNING,
    SPECULATING,
    ScriptedDrafter,
    Spy,
    greedy,
    make_llm,
    models_with,
    plain_answers,
    prompts_of,
)  # fmt: skip

PROMPTS = prompts_of(5, 9, 7)
VERIFY = ("layout", "fill", "verify", "accept", "apply", "export")


def drafter(params=None, **fields):
    answers = plain_answers(PROMPTS, params or greedy(24))
    known = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    return ScriptedDrafter(known, wrong=lambda position: position % 3 == 0, **fields)


def recorded(llm, params=None):
    """(answers, spans) of the three requests."""
    recorder = llm.record()
    answers = [answer.token_ids for answer in llm.generate(PROMPTS, params or greedy(24))]
    assert_nothing_left(llm.engine)
    return answers, recorder.spans


def order(spans):
    return [(span.step, span.name) for span in spans]


def expected(mode, overlap, step, ranks):
    """One turn of the loop in the middle of a run: step `step` is launched. ranks: a budget is less than all drafts."""

    def before(*names):
        return [(step - 1, name) for name in names]

    def now(*names):
        return [(step, name) for name in names]

    speculates, lagged = mode != "off", mode in ("lag", "lag-budget")
    collected = (before if overlap else now)("collect", "commit")
    turn = now("schedule")
    if lagged:
        turn += before("take_confidence")
    turn += now("load")
    if speculates:
        turn += now("draft")
    if mode in PRUNING:
        turn += now("export_confidence")
    if mode == "adaptive":
        turn += (collected if overlap else []) + now("take_confidence")
    turn += now("decide")
    if ranks:
        turn += now("rank")
    turn += now(*VERIFY)
    return turn + ([] if mode == "adaptive" and overlap else collected)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("mode", ["off", *SPECULATING])
def test_the_order_of_stages(mode, overlap):
    llm = make_llm(mode, None if mode == "off" else drafter(), overlap=overlap)
    answers, spans = recorded(llm)
    assert answers == plain_answers(PROMPTS, greedy(24))
    events = order(spans)
    starts = [index for index, (_, name) in enumerate(events) if name == "schedule"]
    turns = [events[a:b] for a, b in itertools.pairwise(starts)]
    needed = "verify" if mode == "off" else "draft"
    steady = [turn for turn in turns if all((turn[0][0] - age, needed) in events for age in (0, 1))]
    assert len(steady) > 5
    for turn in steady:
        if turn[0][0] > 1:  # until then some prefill
            assert turn == expected(mode, overlap, turn[0][0], ranks=(turn[0][0], "rank") in turn)
    assert any(name == "rank" for _, name in events) == (mode == "lag-budget")


@pytest.mark.parametrize("mode", ["off", *SPECULATING])
def test_logprobs_are_read_after_acceptance_in_steps_that_want_them_only(mode):
    llm = make_llm(mode, None if mode == "off" else drafter())
    spy = Spy(llm)
    _, spans = recorded(llm, [greedy(4), greedy(24, logprobs=1), greedy(24, prompt_logprobs=1)])
    of_step = {step: [name for at, name in order(spans) if at == step] for step, _ in order(spans)}
    wanting = {step.plan.step for step in spy.steps if step.plan.logprobs is not None}
    for step in spy.steps:
        names = [name for name in of_step[step.plan.step] if name in (*VERIFY, "report", "export_logprobs")]
        extra = ("report", "export_logprobs") if step.plan.step in wanting else ()
        assert names == [*VERIFY[:-1], *extra, VERIFY[-1]]
    assert wanting
    silent = make_llm(mode, None if mode == "off" else drafter())
    spy = Spy(silent)
    recorded(silent)
    assert all(step.plan.logprobs is None for step in spy.steps)
    assert spy.steps[-1].plan.step > 0


@pytest.mark.parametrize("mode", ["off", *SPECULATING])
def test_two_copies_go_down_per_step(mode, monkeypatch):
    """However many requests are admitted: a third would wait for the first, which is queued behind the last step."""
    llm = make_llm(mode, None if mode == "off" else drafter())
    upload, copies = Uploader.upload, []
    monkeypatch.setattr(Uploader, "upload", lambda self, arrays: copies.append(1) or upload(self, arrays))
    _, spans = recorded(llm)
    assert len(copies) == 2 * sum(span.name == "load" for span in spans) > 0


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("mode", SPECULATING)
def test_what_waits_between_the_draft_and_verify(mode, overlap):
    _, spans = recorded(make_llm(mode, drafter(), overlap=overlap))
    last = max(span.step for span in spans)
    seen = 0
    for step in range(last + 1):
        names = [index for index, span in enumerate(spans) if span.step == step and span.name == "draft"]
        if not names:
            continue
        (end,) = [index for index, span in enumerate(spans) if span.step == step and span.name == "verify"]
        waits = [(span.step - step, span.name) for span in spans[names[0] : end] if span.kind == "wait"]
        allowed = []
        if mode == "adaptive":
            allowed = [(-1, "collect"), (0, "take_confidence")] if overlap else [(0, "take_confidence")]
        assert waits == allowed
        seen += 1
    assert seen > 3


@pytest.mark.parametrize("mode", SPECULATING)
def test_confidence_is_taken_once_and_in_order(mode):
    _, spans = recorded(make_llm(mode, drafter()))
    drafted = [span.step for span in spans if span.name == "draft"]
    taken = [span.step for span in spans if span.name == "take_confidence"]
    if mode == "static":
        assert not taken
    elif mode == "adaptive":
        assert taken == drafted
    else:  # nobody asks for the confidence of the last steps
        assert taken == drafted[: len(taken)]
        assert len(drafted) - len(taken) <= 2


# ----------------------------------------------------------------------------------------------------- hidden reads


def guarded(llm, through_decision):
    """The engine with the guard up while it launches, in the lag modes from the first launch to the second."""
    engine = llm.engine
    launch_draft, launch_verify = engine.launch_draft, engine.launch_verify
    stack = ExitStack()

    def first(plan, timed):
        stack.enter_context(forbid_hidden_reads())
        try:
            return launch_draft(plan, timed)
        finally:
            if not through_decision:
                stack.close()

    def second(drafted, decision):
        if not through_decision:
            stack.enter_context(forbid_hidden_reads())
        try:
            return launch_verify(drafted, decision)
        finally:
            stack.close()

    engine.launch_draft, engine.launch_verify = first, second
    return stack


SAMPLING = {
    "greedy": lambda i: greedy(5),
    "sampled": lambda i: greedy(5, temperature=1.0, top_p=0.9, top_k=12, seed=i),
    "mixed": lambda i: greedy(5, temperature=float(i % 2), top_p=0.9 if i == 1 else 1.0, seed=i),
    "reported": lambda i: greedy(5, temperature=float(i % 2), seed=i, logprobs=2, prompt_logprobs=3 if i else None),
}


WAYS = [
    ("off", "dspark", "coupled", "mixed"),
    *itertools.product(SPECULATING, ["dspark"], ["coupled"], SAMPLING),
    *itertools.product(SPECULATING, ["dspark"], ["rejection"], ["sampled", "mixed", "reported"]),
    *itertools.product(["static", "lag-budget"], ["dflash"], ["coupled", "rejection"], ["mixed"]),
]


@pytest.mark.parametrize(("mode", "algorithm", "acceptance", "sampling"), WAYS)
def test_no_hidden_reads(mode, algorithm, acceptance, sampling):
    """Prompts are prefilled in chunks beside others that decode already."""
    prompts = prompts_of(3, 20, 1)
    params = [SAMPLING[sampling](i) for i in range(len(prompts))]
    llm = make_llm(
        mode, models=models_with(algorithm), acceptance=acceptance, max_num_batched_tokens=12, learns=True,
        full_length=False, max_num_seqs=2,
    )  # fmt: skip
    spy = Spy(llm)
    stack = guarded(llm, mode in ("static", "lag", "lag-budget"))
    try:
        answers = llm.generate(prompts, params)
    finally:
        stack.close()
    assert [len(answer.token_ids) for answer in answers] == [5] * 3
    assert any(step.plan.num_decode and step.plan.num_decode < step.plan.num_sequences for step in spy.steps)
    assert_nothing_left(llm.engine)


READS = {
    "item": lambda t: t[0].item(),
    "bool": lambda t: bool(t[0] > 3),
    "int": lambda t: int(t[0]),
    "index": lambda t: [0, 1, 2, 3][t[0]],
    "range": lambda t: range(t[0]),
    "in": lambda t: 7 in t,
    "text": lambda t: f"{t[0]}",
    "tolist": lambda t: t.tolist(),
    "array": np.asarray,
    "dlpack": np.from_dlpack,
    "cpu": lambda t: t.cpu(),
    "nonzero": lambda t: (t > 1).nonzero(),
    "where": lambda t: torch.where(t > 1),
    "mask": lambda t: t[t > 1],
    "masked write": lambda t: t.clone().__setitem__(t > 1, t[:2]),
    "unique": torch.unique,
    "bincount": torch.bincount,
    "repeats": lambda t: t.repeat_interleave(t),
    "equal": lambda t: torch.equal(t, t),
    "allclose": lambda t: torch.allclose(t, t),
    "slice": lambda t: t[: t[0]],
}


@pytest.mark.parametrize("read", READS)
def test_the_guard_catches(read):
    tensor = torch.tensor([1, 2, 3])
    with contextlib.suppress(HiddenRead), forbid_hidden_reads():
        READS[read](tensor)
        pytest.fail("the read went through")
    assert tensor.tolist() == [1, 2, 3]  # and outside all is as before


def test_the_guard_lets_pass_what_stays_on_the_device():
    tensor = torch.tensor([1, 2, 3])
    with forbid_hidden_reads():
        torch.where(tensor > 1, tensor, 0).cumsum(0)
        tensor.repeat_interleave(2)
        tensor.masked_fill(tensor > 1, 0)
        tensor[tensor - 1], tensor[0], tensor[1:]


@pytest.mark.parametrize("read", [lambda t: t[0].item(), lambda t: bool((t > 3).any()), lambda t: t[t > 3]])
@pytest.mark.parametrize("mode", SPECULATING)
def test_a_hidden_read_is_caught(mode, read):
    class Reading(ScriptedDrafter):
        def propose(self, view, *rest):
            read(view.context)
            return super().propose(view, *rest)

    reading = Reading([[*prompt] for prompt in PROMPTS])
    llm = make_llm(mode, reading)
    assert len(llm.generate(PROMPTS, greedy(4))) == 3  # unguarded it runs
    stack = guarded(llm, mode != "adaptive")
    with stack, pytest.raises(HiddenRead):
        llm.generate(PROMPTS, greedy(4))
    assert_nothing_left(llm.engine)


# ------------------------------------------------------------------------------------------------------------ lag off


def unreachable(*args, **kwargs):
    raise AssertionError("code of the lag modes was reached")


CONFIDENCE = [
    *[(ConfidenceStore, name) for name in ("put", "lookup", "own")],
    *[(_LagMap, name) for name in ("apply", "teach")],
    *[(SurvivalModel, name) for name in ("fresh", "predict", "extend", "prior", "teach_survival", "teach_outcomes")],
    (Engine, "take_confidence"),
]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("mode", ["off", "static"])
def test_without_adaptive_no_confidence_code_is_reached(mode, overlap, monkeypatch):
    """Order and output are those of a build that lacks it."""
    scripted = None if mode == "off" else drafter()
    answers, spans = recorded(make_llm(mode, scripted, overlap=overlap))
    for owner, name in CONFIDENCE:
        if (owner, name) != (Engine, "take_confidence"):
            monkeypatch.setattr(owner, name, unreachable)
    monkeypatch.setattr(Engine, "take_confidence", unreachable)
    again, again_spans = recorded(make_llm(mode, scripted, overlap=overlap))
    assert again == answers
    assert order(again_spans) == order(spans)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
def test_adaptive_without_lag_decides_without_lagged_confidence(overlap, monkeypatch):
    """Lagged data choose the draft length, and the map that this needs is taught; widths come from this step alone."""

    def run():
        llm = make_llm("adaptive", drafter(), overlap=overlap, learns=True)  # at a draft length that is fixed
        spy = Spy(llm)
        answers, spans = recorded(llm)
        return answers, order(spans), [step.widths for step in spy.steps]

    before = run()
    assert len({width for widths in before[2] for width in widths}) > 1
    monkeypatch.setattr(SurvivalModel, "predict", unreachable)
    monkeypatch.setattr(SurvivalModel, "extend", unreachable)
    monkeypatch.setattr(_LagMap, "apply", unreachable)
    decide = Engine.decide

    def without_lookup(self, drafted):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ConfidenceStore, "lookup", unreachable)
            return decide(self, drafted)

    monkeypatch.setattr(Engine, "decide", without_lookup)
    assert run() == before


def test_the_unreachable_code_is_what_the_lag_modes_use(monkeypatch):
    """Or the two tests above would show nothing."""
    for owner, name in [(ConfidenceStore, "lookup"), (SurvivalModel, "predict")]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, unreachable)
            for mode in ("lag", "lag-budget"):
                with pytest.raises(AssertionError, match="lag modes was reached"):
                    recorded(make_llm(mode, drafter(), learns=True))
