"""Traces are what the engine did, and a replay foretells what a serving engine would have foretold."""

import dataclasses

import numpy as np
import pytest

from slipstream.config import SamplingParams, SpeculativeConfig
from slipstream.decide.make import make_policy
from slipstream.decide.survival import SurvivalModel
from slipstream.errors import ConfigError
from slipstream.lab.traces import DraftTrace, TraceRecorder, collect_trace, replay
from slipstream.llm import LLM
from slipstream.metrics import SpecCounters
from slipstream.prompts import user
from slipstream.testing import assert_nothing_left
from tests.e2e.engines import ScriptedDrafter, Spy, known, models_with, plain_answers, pool_bytes, prompts_of

S = 4
STATIC = SpeculativeConfig(draft_model="scripted", num_speculative_tokens=S)
MANY = SamplingParams(max_tokens=40, ignore_eos=True)


def traced(prompts, params, *, drafter=None, **engine):
    """(trace, spy) of prompts as token ids on the tiny pair, or with a scripted drafter."""
    recorder = TraceRecorder("head")
    models = models_with(None if drafter else "dspark")
    options = {"max_model_len": 128, "page_size": 8, "max_num_seqs": 8, "seed": 1, **engine}
    llm = LLM(models, speculative=STATIC, drafter=drafter, policy=recorder, **options)
    if drafter:
        drafter.engine = llm.engine
    spy = Spy(llm)
    completions = llm.generate(prompts, params)
    assert_nothing_left(llm.engine)
    return recorder.trace(completions, S), spy


def starts_of(trace, spy):
    """For each row, the index in the answer of the first token that its step emits."""
    emitted, starts = {}, {}
    for step in spy.steps:
        for row, uid in enumerate(step.plan.uids_np.tolist()):
            if step.result is not None and step.plan.emits_np[row]:
                starts[step.plan.step, uid - 1] = emitted.get(uid, 0)
                emitted[uid] = emitted.get(uid, 0) + int(step.result.num_accepted_np[row]) + 1
    return [starts[key] for key in zip(trace.engine_step_np.tolist(), trace.request_np.tolist(), strict=True)]


def counters_of(trace):
    total = SpecCounters()
    for completion in trace.completions:
        total.merge(completion.spec)
    return total


def check_against(trace, spy):
    """Every row is a decode step of the spy's: same signal, and what it accepted stands in the answer."""
    steps = {step.plan.step: step for step in spy.steps}
    starts = starts_of(trace, spy)
    for row in range(len(trace)):
        step = steps[trace.engine_step_np[row]]
        i = step.row(int(trace.request_np[row]) + 1)
        assert trace.step_np[row] == step.plan.decode_steps_np[i]
        np.testing.assert_array_equal(trace.signal_np[row], step.draft.signal[i].numpy())
        assert trace.widths_np[row] <= step.widths[i]
        answer = trace.completions[trace.request_np[row]].token_ids
        start, accepted = starts[row], int(trace.accepted_np[row])
        assert answer[start : start + accepted] == tuple(step.draft.token_ids[i, :accepted].tolist())
        if trace.accepted_np[row] < trace.widths_np[row]:
            assert answer[start + accepted] != int(step.draft.token_ids[i, accepted])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_are_the_engines_steps(overlap, temperature):
    """In both loops, requests waiting for slots among them: signals, drafts and counts agree with a spy's."""
    params = dataclasses.replace(MANY, temperature=temperature)
    trace, spy = traced(prompts_of(3, 5, 4, 6, 3), params, overlap=overlap, max_num_seqs=3)
    check_against(trace, spy)
    counters = counters_of(trace)
    assert counters.accepted == trace.accepted_np.sum() > 0
    assert counters.steps == len(trace) - (trace.widths_np == 0).sum() + counters.width_histogram[0]
    at = {j + 1: int((trace.survived_np & trace.known_np)[:, j].sum()) for j in range(S)}
    assert {j: n for j, n in at.items() if n} == dict(counters.accepted_at)
    assert set(trace.sampled_np.tolist()) == {temperature > 0}
    assert (trace.previous_np >= 0).sum() == len(trace) - 5, "each request has one first step"


def test_an_answer_that_ends_inside_an_accepted_run_says_nothing_of_what_follows():
    """Each token of an answer in turn is the stop; the drafter is always right, so most ends lie inside a block."""
    prompts = prompts_of(3)
    (answer,) = plain_answers(prompts, MANY)
    num_cut = 0
    for index in range(1, 12):
        if answer[index] in answer[:index]:
            continue
        stopping = dataclasses.replace(MANY, stop_token_ids=(answer[index],))
        trace, spy = traced(prompts, stopping, drafter=ScriptedDrafter(known(prompts, MANY), S))
        check_against(trace, spy)
        cut = index == trace.accepted_np.sum() + len(trace) - 1  # its last token was a draft, no target's own
        assert cut or trace.accepted_np.sum() + len(trace) == index
        assert counters_of(trace).accepted == trace.accepted_np.sum()
        assert (trace.survived_np == trace.known_np).all(), "nothing was rejected, and what was cut off is not known"
        num_cut += int(cut)
    assert num_cut >= 3


def test_a_preempted_request_is_traced_as_two_stays():
    """A pool too small for all: places in the answers stay right, and nothing is lagged over the gap."""
    prompts = prompts_of(9, 9, 9)
    probe = LLM(models_with("dspark"), speculative=STATIC, max_model_len=128, page_size=8, max_num_seqs=8)
    trace, spy = traced(prompts, MANY, kv_memory=pool_bytes(14, probe))
    assert spy._engine.scheduler.num_preemptions > 0
    check_against(trace, spy)
    assert (trace.previous_np < 0).sum() >= (trace.step_np == 0).sum() > 3
    stays = np.bincount(trace.request_np[trace.step_np == 0])
    assert stays.max() > 1


def test_collecting_answers_conversations_and_chooses_the_signal():
    """The text is plain decoding's, `auto` takes the head; only full width is traced."""
    conversations = [user("t3 t4"), user("t5 t6 t7")]
    models = models_with("dspark")
    trace = collect_trace(models, STATIC, conversations, MANY, concurrency=1)
    assert trace.signal == "head"
    assert [c.token_ids for c in trace.completions] == [c.token_ids for c in LLM(models).chat(conversations, MANY)]
    peak = collect_trace(models, STATIC, conversations, MANY, signal="peak", concurrency=1)
    assert peak.signal == "peak"
    assert len(peak) == len(trace)
    assert not np.allclose(peak.signal_np[:1], trace.signal_np[:1])
    with pytest.raises(ConfigError, match="mode lag"):
        collect_trace(models, SpeculativeConfig.for_mode("lag", draft_model="scripted"), conversations, MANY)


# --------------------------------------------------------------------------------------------------------------- replay


def made_up(signal, widths, accepted, request, step, engine_step):
    as_ints = lambda values: np.array(values, dtype=np.int64)  # noqa: E731
    num = len(widths)
    return DraftTrace(
        signal="head", signal_np=np.array(signal, dtype=np.float32), widths_np=as_ints(widths),
        accepted_np=as_ints(accepted), request_np=as_ints(request),
        step_np=as_ints(step), engine_step_np=as_ints(engine_step),
        sampled_np=np.zeros(num, np.bool_), completions=(), num_drafts=len(signal[0]),
    )  # fmt: skip


def test_the_row_before_is_the_same_requests_latest_step():
    """Two requests side by side; one jumps over step 2 and starts anew after a preemption."""
    trace = made_up([[0.5]] * 7, [1] * 7, [0] * 7, [0, 1, 0, 1, 1, 1, 1], [0, 0, 1, 1, 3, 0, 1], [1, 1, 2, 2, 4, 6, 7])
    assert trace.previous_np.tolist() == [-1, -1, 0, 1, -1, -1, 5]


def test_without_learning_survivals_follow_signal_and_file_alone():
    """Fresh is the product of scaled confidences, lagged is the row before as it was, unknown the prior."""
    trace = made_up([[0.8, 0.5], [0.6, 0.5]], [2, 2], [1, 0], [0, 0], [0, 1], [1, 2])
    plain = replay(trace, learns=False)
    np.testing.assert_allclose(plain.fresh_np, [[0.8, 0.4], [0.6, 0.3]], atol=1e-6)
    np.testing.assert_allclose(plain.lagged_np, [[0.5, 0.25], [0.8, 0.4]], atol=1e-6)
    assert plain.lag_known_np.tolist() == [False, True]
    scaled = replay(trace, np.full((2, 2), 0.5), learns=False)
    np.testing.assert_allclose(scaled.fresh_np[0], [2 / 3, 1 / 3], atol=1e-6)  # logit(.8) / 2 = log(2)


def test_nothing_is_foretold_from_its_own_outcome():
    """What becomes of the last two steps changes no survival up to the last but one: the newest known is older."""
    rng = np.random.default_rng(0)
    signal = rng.uniform(0.2, 0.9, (30, 3))

    def made(accepted_at_last):
        accepted = np.minimum(rng_accepted, 3)
        accepted[-2:] = accepted_at_last
        return made_up(signal, [3] * 30, accepted, [0] * 30, range(30), range(30))

    rng_accepted = rng.integers(0, 4, 30)
    none, all_ = replay(made(0)), replay(made(3))
    np.testing.assert_array_equal(none.fresh_np, all_.fresh_np)
    np.testing.assert_array_equal(none.lagged_np, all_.lagged_np)
    longer = [made_up(np.vstack([signal, signal[:1]]), [3] * 31, [*rng_accepted[:28], n, n, 0], [0] * 31, range(31),
                      range(31)) for n in (0, 3)]  # fmt: skip
    assert not np.array_equal(replay(longer[0]).fresh_np[-1], replay(longer[1]).fresh_np[-1])


def test_a_replay_foretells_what_the_engine_foretold():
    """Mode lag, which verifies everything where it has no cost model, learning as it goes: bit for bit the same until
    the first request ends (after which the engine has rows in flight that belong to nobody)."""
    prompts = prompts_of(3, 5, 4)
    params = [dataclasses.replace(MANY, max_tokens=60, temperature=t, seed=i) for i, t in enumerate((0.0, 1.0, 0.0))]
    trace, _ = traced(prompts, params)
    scale = np.array([[0.7, 0.8, 0.9, 1.0], [1.5, 1.4, 1.3, 1.2]])

    config = SpeculativeConfig.for_mode("lag", draft_model="scripted", num_speculative_tokens=S, cost_model="none")
    policy, _ = make_policy(config, num_drafts=S, has_head=True)
    policy.survival = SurvivalModel(S, scale)
    foretold, decide = {}, policy.decide

    def deciding(plan):
        expected = policy._expect(plan)
        for row, uid in enumerate(plan.uids_np[: plan.num_decode].tolist()):
            foretold[plan.step, uid - 1] = expected.survival_np[row], not expected.unknown_np[row]
        return decide(plan)

    policy.decide = deciding
    options = {"max_model_len": 128, "page_size": 8, "max_num_seqs": 8, "seed": 1}
    LLM(models_with("dspark"), speculative=config, policy=policy, **options).generate(prompts, params)

    last_steps = [trace.engine_step_np[trace.request_np == request].max() for request in range(3)]
    whole = np.flatnonzero(trace.engine_step_np < min(last_steps))
    assert len(whole) > 30
    again = replay(trace, scale)
    for row in whole.tolist():
        survival, is_known = foretold[int(trace.engine_step_np[row]), int(trace.request_np[row])]
        np.testing.assert_array_equal(again.lagged_np[row], survival)
        assert again.lag_known_np[row] == is_known
