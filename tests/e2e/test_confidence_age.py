"""Which confidence a decision uses, end to end: known and unknown, age one step in lag and none in adaptive.

Confidence is scripted, and learning is off where a width must follow from it exactly: confidence 1 is worth verifying at
any price, confidence 0 at none.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from slipstream.testing import assert_nothing_left
from tests.e2e.engines import (
    ScriptedDrafter,
    Spy,
    asks_for,
    check_batch,
    constant,
    greedy,
    known,
    make_llm,
    models_with,
    never,
    plain_answers,
    pool_bytes,
    prompts_of,
)

K = 4
LOOPS = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])


def by_context(width):
    """A request asks for a width that depends on how far it is."""
    return asks_for(lambda view: (view.context * 7 + width) % (K + 1))


def run(llm, prompts, params):
    spy = Spy(llm)
    answers = [answer.token_ids for answer in llm.generate(prompts, params)]
    assert_nothing_left(llm.engine)
    return answers, spy


# ------------------------------------------------------------------------------------------------------- age (fault 3)


@LOOPS
@pytest.mark.parametrize("mode", ["lag", "adaptive"])
def test_fault_3_the_age_of_the_confidence(mode, overlap):
    """At step t the draft asks for t mod (k + 1); lag verifies what step t - 1 asked for, adaptive what t does."""
    prompts, params = prompts_of(3, 4), greedy(30)
    scripted = ScriptedDrafter(
        known(prompts, params), confidence=asks_for(lambda view: view.step % (K + 1)), wrong=never
    )
    answers, spy = run(make_llm(mode, scripted, overlap=overlap), prompts, params)
    assert answers == plain_answers(prompts, params)
    seen = set()
    for uid in (1, 2):
        steps = [(step, row) for step, row in spy.of(uid) if step.draft is not None]
        for (before, _), (step, row) in itertools.pairwise(steps):
            age = 0 if mode == "adaptive" else step.plan.step - before.plan.step
            assert age == (0 if mode == "adaptive" else 1)
            asked = (step.plan.step - age) % (K + 1)
            assert step.widths[row] == min(asked, step.plan.caps_np[row])
            seen.add(asked)
    assert seen == set(range(K + 1))
    for step in spy.steps:
        if step.plan.num_decode:
            check_batch(step)


@LOOPS
def test_a_budget_is_one_step_old_and_handed_out_fresh(overlap):
    """K is what the last step asked for; it goes to those who look best now."""
    prompts, params = prompts_of(3, 4), greedy(30)
    # Odd steps: the first sequence asks for 4 and the second for 1; even ones the other way round.
    flip = asks_for(lambda view: torch.where((view.slots + view.step) % 2 == 0, 1, 4))
    scripted = ScriptedDrafter(known(prompts, params), confidence=flip, wrong=never)
    answers, spy = run(make_llm("lag-budget", scripted, overlap=overlap), prompts, params)
    assert answers == plain_answers(prompts, params)
    steps = [step for step in spy.steps if step.draft is not None and step.plan.caps_np.tolist() == [K, K]]
    assert len(steps) > 5
    for step in steps[1:]:
        assert step.decision.budget == 5
        fresh = [1 if (slot + step.plan.step) % 2 == 0 else 4 for slot in step.plan.slots_np]
        assert step.widths == fresh
        check_batch(step)


# ------------------------------------------------------------------------------------------------------------- unknown


@LOOPS
def test_the_first_step_verifies_all(overlap):
    prompts, params = prompts_of(5, 3), greedy(10)
    scripted = ScriptedDrafter(known(prompts, params), confidence=constant(*[0.0] * K), wrong=never)
    _, spy = run(make_llm("lag", scripted, overlap=overlap), prompts, params)
    for uid in (1, 2):
        assert spy.widths_of(uid) == [K, *[0] * 8]


@pytest.mark.parametrize("mode", ["adaptive", "lag-budget"])
def test_the_first_step_of_the_other_modes(mode):
    """Adaptive knows its own draft at once; a budget prices what it does not know with the prior."""
    prompts, params = prompts_of(5), greedy(10)
    scripted = ScriptedDrafter(known(prompts, params), confidence=constant(*[0.0] * K), wrong=never)
    _, spy = run(make_llm(mode, scripted), prompts, params)
    first, *rest = spy.widths_of(1)
    assert (first == 0) if mode == "adaptive" else (0 < first < K)
    assert rest == [0] * 8


@LOOPS
@pytest.mark.parametrize("mode", ["lag", "lag-budget"])
def test_fault_1_a_reused_slot_with_a_late_value(mode, overlap):
    """One slot: the last confidence of the first request arrives when the second has the slot already."""
    first, second = prompts_of(5, 9)
    params = greedy(14)
    sequences = known([first, second], params)

    def confidence(view, d):
        """.01 for the first request, the script for the second."""
        own = by_context(2)(view, d)
        return torch.where((fields["engine"].state.token_ids[view.slots, 0] == first[0])[:, None], 0.01, own)

    def widths(prompts):
        scripted = ScriptedDrafter(sequences, confidence=confidence, wrong=never)
        llm = make_llm(mode, scripted, overlap=overlap, max_num_seqs=1)
        fields["engine"] = llm.engine
        answers, spy = run(llm, prompts, params)
        assert answers[-1] == plain_answers([second], params)[0]
        assert len({int(slot) for step in spy.steps for slot in step.plan.slots_np}) == 1
        return spy.widths_of(len(prompts))

    fields = {}
    fresh = widths([second])
    assert fresh[0] == K or mode == "lag-budget"
    assert len(set(fresh)) > 2
    assert widths([first, second]) == fresh


@LOOPS
@pytest.mark.parametrize("mode", ["lag", "adaptive", "lag-budget"])
def test_preempted_and_resumed_is_unknown(mode, overlap):
    """Two requests in a pool for one and a half: the newer one goes, and comes back without confidence."""
    prompts, params = prompts_of(6, 6), greedy(30)
    scripted = ScriptedDrafter(known(prompts, params), confidence=constant(*[0.0] * K), wrong=never)
    llm = make_llm(mode, scripted, overlap=overlap)
    llm = make_llm(mode, scripted, overlap=overlap, kv_memory=pool_bytes(7, llm), max_num_seqs=2)
    answers, spy = run(llm, prompts, params)
    assert llm.engine.scheduler.num_preemptions
    assert answers == plain_answers(prompts, params)
    firsts = [(step, row) for step, row in spy.of(2) if step.plan.decode_steps_np[row] == 0]
    assert len(firsts) > 1  # admitted more than once
    for step, row in firsts:
        full = {"lag": min(K, step.plan.caps_np[row]), "adaptive": 0}.get(mode)
        assert full is None or step.widths[row] == full
    if mode == "lag":
        assert [w for step, row in spy.of(1) if step.plan.decode_steps_np[row] for w in [step.widths[row]]] == [0] * 28


# -------------------------------------------------------------------------------------------------- what stays known


@pytest.mark.parametrize(
    ("algorithm", "mode", "overlap"),
    [*itertools.product(["dspark"], ["static", "adaptive", "lag"], [True, False]), ("dflash", "lag", True)],
)
def test_a_prefill_in_the_step_changes_nobody_else(algorithm, mode, overlap):
    """Drafts of a real network, widths that depend on the request alone: all of it stays as it was without company."""
    alone, company = prompts_of(7)[0], [11, *range(3, 19)] * 3
    params = greedy(24)

    def run_with(later):
        llm = make_llm(mode, models=models_with(algorithm), overlap=overlap, max_num_batched_tokens=9)
        propose = llm.engine.drafter.propose

        def scripted(view, num_drafts, sampler, signal):
            draft = propose(view, num_drafts, sampler, signal)
            return dataclasses.replace(draft, signal=by_context(3)(view, num_drafts))

        llm.engine.drafter.propose = scripted
        spy = Spy(llm)
        stream = llm.stream(alone, params)
        tokens = [*next(stream).token_ids]
        for count, chunk in enumerate(stream):
            if later and count == 3:
                llm.engine.add(llm._request(company, greedy(2)))
            tokens += chunk.token_ids
        assert_nothing_left(llm.engine)
        return tokens, spy

    tokens, spy = run_with(later=False)
    again, mixed = run_with(later=True)
    beside = [step for step in mixed.steps if step.row(1) is not None and step.plan.num_sequences > 1]
    assert sum(bool(step.plan.num_given_np[-1] > 1) for step in beside) >= 3  # chunks in steps where it decoded
    assert again == tokens == list(plain_answers([alone], params)[0])
    assert mixed.widths_of(1) == spy.widths_of(1)
    assert {k: v[0] for k, v in mixed.drafts_by_context(1).items()} == {
        k: v[0] for k, v in spy.drafts_by_context(1).items()
    }


@LOOPS
def test_a_request_that_was_skipped_keeps_its_confidence(overlap):
    """The scheduler passes over a request in every third step; others go on."""
    prompts, params = prompts_of(5, 3), greedy(24)
    scripted = ScriptedDrafter(known(prompts, params), confidence=by_context(1), wrong=never)
    llm = make_llm("lag", scripted, overlap=overlap)
    scheduler = llm.engine.scheduler
    decode_rows = scheduler._decode_rows

    def without_the_first():
        slots, caps = decode_rows()
        passes = scheduler.next_step % 3 == 0 and len(scheduler.running) == 2
        others = np.array([not passes or scheduler.ledger.uids[slot] != 1 for slot in slots], np.bool_)
        return slots[others], caps[others]

    scheduler._decode_rows = without_the_first
    answers, spy = run(llm, prompts, params)
    assert answers == plain_answers(prompts, params)
    skipped = 0
    for (before, row_before), (step, row) in itertools.pairwise(spy.of(1)):
        if step.draft is not None:
            asked = (int(before.batch.context[row_before]) * 7 + 1) % (K + 1)
            assert step.widths[row] == min(asked, step.plan.caps_np[row])
            skipped += step.plan.step - before.plan.step > 1
    assert skipped > 5


@LOOPS
def test_a_request_that_verified_nothing_keeps_its_confidence(overlap):
    """Widths follow the last step after a step of width 0 as after any other."""
    prompts, params = prompts_of(4), greedy(24)
    pattern = torch.tensor([0, 0, 3, 0, 4, 0, 0, 0, 1])
    script = asks_for(lambda view: pattern[view.step % len(pattern)])
    scripted = ScriptedDrafter(known(prompts, params), confidence=script, wrong=never)
    answers, spy = run(make_llm("lag", scripted, overlap=overlap), prompts, params)
    assert answers == plain_answers(prompts, params)
    steps = [step for step, _ in spy.of(1) if step.draft is not None]
    for before, step in itertools.pairwise(steps):
        assert step.widths == [min(pattern[before.plan.step % len(pattern)], step.plan.caps_np[0])]
    assert sum(step.widths == [0] for step in steps) > 8


# ------------------------------------------------------------------------------------------- bypassed steps (fault 2)


@LOOPS
@pytest.mark.parametrize("mode", ["adaptive", "lag", "lag-budget"])
def test_fault_2_a_bypassed_step_stores_nothing(mode, overlap):
    """Drafts in two of three steps, confidence .9 and .1 in turn: each outcome meets its own proposal."""
    prompts, params = prompts_of(4, 6), greedy(30)
    script = lambda view, d: torch.full((len(view.context), d), 0.9 if view.step % 2 else 0.1)  # noqa: E731
    scripted = ScriptedDrafter(known(prompts, params), confidence=script, wrong=lambda position: position % 4 == 0)
    llm = make_llm(mode, scripted, overlap=overlap)
    policy = llm.engine.policy
    policy.draft_length = lambda plan: K if plan.num_decode and plan.step % 3 else 0
    policy._going_rate.past = lambda num_decode: (0.0, 0.0)  # each step for itself
    taught = []
    policy.survival.teach_outcomes = lambda *args: taught.append(args)
    answers, spy = run(llm, prompts, params)
    assert answers == plain_answers(prompts, params)
    drafted = [step for step in spy.steps if step.draft is not None]
    assert len(taught) >= len(drafted) - 2 > 3
    for (confidence, widths, accepted, *_), step in zip(taught, drafted, strict=False):
        np.testing.assert_allclose(confidence, 0.9 if step.plan.step % 2 else 0.1, atol=1e-6)
        assert widths.tolist() == step.result.widths_np[: step.plan.num_decode].tolist()
        assert accepted.tolist() == step.result.num_accepted_np[: step.plan.num_decode].tolist()
    if mode == "lag":  # nothing is known after a step without a draft: the prior decides, the same whatever was said
        after = [step for step in drafted if step.plan.step % 3 == 1 and step.plan.step > 3]
        assert len(after) > 3
        assert {width for step in after for width in step.widths} == {1}


# ------------------------------------------------------------------------------------------------------ what is learned


@LOOPS
@pytest.mark.parametrize("mode", ["adaptive", "lag", "lag-budget"])
def test_the_lag_map_sees_every_draft_and_the_controller_falling_survivals(mode, overlap):
    """Fresh survival of all drafted positions, verified or not, beside what was known one step before."""
    prompts, params = prompts_of(4, 6), greedy(24)
    script = lambda view, d: 0.1 + 0.8 * ((view.context[:, None] * 7 + torch.arange(d) * 3) % 11) / 10  # noqa: E731
    scripted = ScriptedDrafter(known(prompts, params), confidence=script, wrong=lambda position: position % 3 == 0)
    llm = make_llm(mode, scripted, overlap=overlap, learns=True)
    policy, records, lessons = llm.engine.policy, [], []
    policy._on_record = records.append
    teach = policy.survival.teach_survival

    def taught(fresh, lagged, lengths, *rest):
        lessons.append((fresh.copy(), lagged.copy(), lengths.copy()))
        teach(fresh, lagged, lengths, *rest)

    policy.survival.teach_survival = taught
    policy.survival._shift_np = np.zeros_like(policy.survival._shift_np)
    policy.survival.teach_outcomes = lambda *args: None  # so that fresh survival stays the product of the script
    answers, spy = run(llm, prompts, params)
    assert answers == plain_answers(prompts, params)
    drafted = [step for step in spy.steps if step.draft is not None]
    assert any(0 in step.widths for step in drafted)
    assert len(lessons) >= len(drafted) - 2 > 5
    for (fresh, lagged, lengths), step in zip(lessons, drafted, strict=False):
        np.testing.assert_allclose(fresh, step.draft.signal.double().cumprod(1), rtol=1e-5)
        for row, uid in enumerate(step.plan.uids_np[: step.plan.num_decode]):
            if step.plan.decode_steps_np[row] == 0:
                assert lengths[row] == 0
                continue
            before, row_before = [(b, r) for b, r in spy.of(int(uid)) if b.plan.step < step.plan.step][-1]
            assert lengths[row] == K
            np.testing.assert_allclose(lagged[row], before.draft.signal[row_before].double().cumprod(0), rtol=1e-5)
    assert len(records) > 5
    for record in records:
        survival = record.problem.survival_np
        assert ((survival >= 0) & (survival <= 1)).all() and (np.diff(survival, axis=1) <= 0).all()


# ------------------------------------------------------------------------------------------------- width 0 (fault 4)


@LOOPS
@pytest.mark.parametrize("mode", ["adaptive", "lag", "lag-budget"])
@pytest.mark.parametrize("widths", [(0, 0), (0, 3), (3, 0), (0, 3, K)], ids=str)
def test_fault_4_width_0_is_a_width(mode, widths, overlap):
    prompts, params = prompts_of(*range(4, 4 + len(widths))), greedy(16)
    by_slot = torch.tensor(widths)
    scripted = ScriptedDrafter(
        known(prompts, params), confidence=asks_for(lambda view: by_slot[view.slots]),
        wrong=lambda position: position % 5 == 0,
    )  # fmt: skip
    answers, spy = run(make_llm(mode, scripted, overlap=overlap), prompts, params)
    assert answers == plain_answers(prompts, params)
    steady = [step for step in spy.steps if step.draft is not None and (step.plan.decode_steps_np > 1).all()]
    uncut = [step for step in steady if (step.plan.caps_np == K).all() and step.plan.num_decode == len(widths)]
    assert uncut
    for step in uncut:
        assert step.widths == [widths[slot] for slot in step.plan.slots_np]
        assert len(step.token_ids) == sum(widths) + len(widths)


# ---------------------------------------------------------------------------------------------- pauses (fault 21)


@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
def test_fault_21_drafts_after_a_pause(algorithm):
    """Twenty steps without a draft, a prefill of another request among them: then drafts as if nothing had been."""
    prompt, company, params = prompts_of(9)[0], [12, 13, 14] * 5, greedy(40)

    def run_with(paused):
        llm = make_llm("static", models=models_with(algorithm))
        policy, count = llm.engine.policy, [0]

        def draft_length(plan):
            count[0] += 1
            return 0 if paused and 3 < count[0] <= 23 else K

        policy.draft_length = draft_length
        spy = Spy(llm)
        stream = llm.stream(prompt, params)
        tokens = [*next(stream).token_ids]
        for index, chunk in enumerate(stream):
            if paused and index == 8:
                llm.engine.add(llm._request(company, greedy(1)))
            tokens += chunk.token_ids
        return tokens, spy

    tokens, spy = run_with(paused=False)
    again, other = run_with(paused=True)
    assert again == tokens
    pauses = [step for step, _ in other.of(1) if step.draft is None]
    assert len(pauses) >= 20
    assert any(step.plan.num_sequences > 1 for step in pauses)
    before, after = spy.drafts_by_context(1), other.drafts_by_context(1)
    late = [context for context in after if context in before and context > 9 + 20]
    assert len(late) > 3
    for context in late:
        assert after[context][0] == before[context][0]
        np.testing.assert_allclose(after[context][1], before[context][1], atol=1e-5)
