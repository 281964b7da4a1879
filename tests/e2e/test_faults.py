"""How systems of this kind break, one scenario each, with the number it has in docs/faults.md.

Those about confidence are in test_confidence_age.py, stop strings (16) in test_endings.py, the harness's own (15) in
tests/lossless/test_harness.py.
"""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from slipstream.cache.pages import NULL_PAGE
from slipstream.testing import assert_nothing_left, tiny_models, tiny_spec
from tests.e2e.engines import (
    PRUNING,
    SPECULATING,
    VOCAB,
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

LOOPS = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
MODES = pytest.mark.parametrize("mode", SPECULATING)


def every(n):
    """Wrong at every n-th position."""
    return lambda position: position % n == 0


def by_slot(*widths):
    return asks_for(lambda view: torch.tensor(widths)[view.slots])


def ids(completions):
    return [completion.token_ids for completion in completions]


# ----------------------------------------------------------------------------------------------- 6, 7, 9: the layout


@LOOPS
@pytest.mark.parametrize("mode", PRUNING)
def test_fault_6_what_is_not_verified_costs_no_target_rows(mode, overlap):
    prompts, params = prompts_of(4, 5, 6, 7), greedy(16)
    scripted = ScriptedDrafter(known(prompts, params), confidence=constant(0.0, 0.0, 0.0, 0.0), wrong=never)
    llm = make_llm(mode, scripted, overlap=overlap)
    spy = Spy(llm)
    assert ids(llm.generate(prompts, params)) == plain_answers(prompts, params)
    for step in spy.steps:
        rows = int(step.plan.num_given_np.sum()) + sum(step.widths)
        assert len(step.token_ids) == len(step.batch.positions) == rows
    late = [step for step in spy.steps if step.plan.num_decode and (step.plan.decode_steps_np > 0).all()]
    assert len(late) > 10
    assert all(len(step.token_ids) == step.plan.num_decode for step in late)


@pytest.mark.parametrize("mode", ["adaptive", "lag", "lag-budget"])
def test_fault_7_a_pruned_row_emits_its_width_and_one(mode):
    """Drafts are the target's own tokens: whatever is verified is accepted, and the bonus is the next of them."""
    prompts, params = prompts_of(4, 5, 6), greedy(40)
    widths = (0, 3, 7)
    scripted = ScriptedDrafter(known(prompts, greedy(60)), confidence=by_slot(*widths))
    llm = make_llm(mode, scripted, num_drafts=7)
    spy = Spy(llm)
    assert ids(llm.generate(prompts, params)) == plain_answers(prompts, params)
    uncut = [
        step for step in spy.steps
        if step.draft is not None and (step.plan.decode_steps_np > 0).all() and step.plan.caps_np.tolist() == [7] * 3
    ]  # fmt: skip
    assert len(uncut) >= 2
    for step in uncut:
        assert step.result.widths_np.tolist() == list(widths)
        assert step.result.num_accepted_np.tolist() == list(widths)
    for step in spy.steps:
        decode = slice(0, step.plan.num_decode)
        assert (step.result.num_accepted_np[decode] == step.result.widths_np[decode]).all()


@LOOPS
def test_fault_9_bounds_are_the_devices_own(overlap):
    """The host plans 8 drafts for 4 sequences; the device makes of it {0, 1, 2, 5}."""
    prompts, params = prompts_of(4, 9, 6, 13), greedy(24)
    final = [0, 1, 2, 5]
    scripted = ScriptedDrafter(known(prompts, params), confidence=by_slot(*final), wrong=every(3))
    llm = make_llm("lag-budget", scripted, num_drafts=5, overlap=overlap)
    spy = Spy(llm)
    assert ids(llm.generate(prompts, params)) == plain_answers(prompts, params)
    seen = 0
    for step in spy.steps:
        if step.decision.budget is not None and step.plan.caps_np.tolist() == [5] * 4:
            assert step.decision.widths_np is None
            if (step.plan.decode_steps_np > 0).all():
                assert step.decision.budget == 8
                assert step.widths == [final[slot] for slot in step.plan.slots_np]
                seen += 1
        check_batch(step)
    assert seen >= 3


# --------------------------------------------------------------------------------------------------- 14: not finite


POISON = 19


def poisoned(algorithm=None):
    """Models in which one token makes everything after it NaN; nothing else reads that token."""
    spec = tiny_spec(vocab_size=VOCAB, tie_word_embeddings=False)
    models = tiny_models(algorithm, spec=spec)
    with torch.no_grad():
        models.target.embed_tokens.weight[POISON] = torch.nan
        models.target.head_weight[POISON] = 0.0
    return models


def poison_prompts():
    first, second, third, fourth = prompts_of(6, 9, 5, 8)
    clean = [[min(token, 18) for token in prompt] for prompt in (first, second, third, fourth)]
    clean[1][4] = POISON
    return clean


@LOOPS
@pytest.mark.parametrize("mode", ["off", *SPECULATING])
def test_fault_14_a_poisoned_request_fails_alone(mode, overlap):
    models, prompts, params = poisoned("dspark"), poison_prompts(), greedy(10)
    good = [0, 2, 3]
    plain = plain_answers([prompts[i] for i in good], params, models)
    assert POISON not in {token for answer in plain for token in answer}
    llm = make_llm(mode, models=models, overlap=overlap, learns=True)
    pages = pool_bytes(8, llm)
    llm = make_llm(mode, models=models, overlap=overlap, learns=True, kv_memory=pages)
    answers = llm.generate(prompts, params)
    assert (answers[1].finish_reason, answers[1].token_ids) == ("error", ())
    assert "not finite" in answers[1].error
    assert [answers[i].token_ids for i in good] == plain
    assert all(answers[i].error is None for i in good)
    # The pool is small: these get the pages that held NaN.
    again = llm.generate([prompts[i] for i in good] * 2, params)
    assert ids(again) == plain * 2
    assert_nothing_left(llm.engine)


@LOOPS
def test_fault_14_pages_of_a_former_owner_are_not_even_masked(overlap):
    """A short request in the slot of a long one, whose pages now hold NaN: its page table must not reach them."""
    models, params = poisoned(), greedy(12)
    long, gone, short, bad = ([token, *[5, 9, 3, 7] * 15] for token in (3, 4, 6, 8))
    bad[1], short = POISON, short[:4]
    plain = plain_answers([long, short], params, models)
    options = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 12,
        "prefix_caching": False,
    }  # its pages change hands at once
    llm = make_llm("off", models=models, overlap=overlap, **options)
    engine, requests = llm.engine, [llm._request(prompt, params) for prompt in (long, gone, short, bad)]
    beside, former, heir, poisonous = requests
    engine.add(beside)
    engine.add(former)
    while not former.output_ids:
        engine.step()
    slot, pages = former.slot, set(engine.scheduler.pages_of(former))
    engine.abort(former.uid)
    engine.add(heir)
    engine.add(poisonous)
    engine.step()
    assert heir.slot == slot
    assert pages & set(engine.scheduler.pages_of(poisonous))
    while engine.has_work:
        engine.step()
    engine.drain()
    assert [tuple(beside.output_ids), tuple(heir.output_ids)] == plain
    assert poisonous.finish_reason == "error"


ROWS = [*itertools.product(SPECULATING, [torch.nan], [0.0, 1.0], ["coupled", "rejection"])]


@pytest.mark.parametrize(("mode", "value", "temperature", "acceptance"), [*ROWS, ("lag", torch.inf, 1.0, "coupled")])
def test_fault_14_one_target_row(mode, value, temperature, acceptance):
    """Logits of one request turn bad at one position: it ends with what it had, the others do not notice."""
    prompts = prompts_of(5, 7, 6)
    params = [greedy(14, temperature=temperature, seed=i) for i in range(3)]
    sequences = known(prompts, params)

    def answers(spoil):
        llm = make_llm(mode, ScriptedDrafter(sequences, wrong=every(4)), acceptance=acceptance)
        verify = llm.engine.target.verify

        def spoiled(batch, token_ids, segments):
            logits, *rest = verify(batch, token_ids, segments)
            first = llm.engine.state.token_ids[:, 0][spoil_slots(llm)]
            bad = (batch.positions[batch.output_rows] == 13) & (first == prompts[1][0])[batch.output_sequence]
            return torch.where(bad[:, None], value, logits), *rest

        def spoil_slots(llm):
            return torch.as_tensor(spy.steps[-1].plan.slots_np.astype(np.int64))

        if spoil:
            llm.engine.target.verify = spoiled
        spy = Spy(llm)
        completions = llm.generate(prompts, params)
        for step in spy.steps:
            kept = torch.as_tensor(step.result.token_ids_np)
            assert ((kept >= 0) & (kept < VOCAB)).all()
        assert_nothing_left(llm.engine)
        return completions

    clean, spoiled = answers(spoil=False), answers(spoil=True)
    assert spoiled[1].finish_reason == "error"
    kept = spoiled[1].token_ids
    assert kept == clean[1].token_ids[: len(kept)]
    assert 13 - 7 - 4 <= len(kept) <= 13 - 7 + 1
    for i in (0, 2):
        if acceptance == "coupled" or temperature == 0.0 or mode == "static":
            assert spoiled[i].token_ids == clean[i].token_ids
        assert spoiled[i].finish_reason == "length"


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@MODES
def test_fault_14_rows_behind_a_rejected_draft_do_not_count(mode, acceptance):
    """Every fourth draft is wrong; what the target says after it is NaN, and nobody looks."""
    prompts, params = prompts_of(5, 7), greedy(14)
    llm = make_llm(mode, ScriptedDrafter(known(prompts, params), wrong=every(4)), acceptance=acceptance)
    verify, spoiled_rows = llm.engine.target.verify, []

    def spoiled(batch, token_ids, segments):
        logits, *rest = verify(batch, token_ids, segments)
        bad = (batch.positions[batch.output_rows] % 4 == 0) & (batch.output_offset > 0)
        spoiled_rows.append(int(bad.sum()))
        return torch.where(bad[:, None], torch.nan, logits), *rest

    llm.engine.target.verify = spoiled
    answers = llm.generate(prompts, params)
    assert ids(answers) == plain_answers(prompts, params)
    assert sum(spoiled_rows) > 3


DRAFTS = [*itertools.product(SPECULATING, ["dspark"], [0.0, 1.0], ["coupled", "rejection"])]


@pytest.mark.parametrize(
    ("mode", "algorithm", "temperature", "acceptance"), [*DRAFTS, ("adaptive", "dflash", 1.0, "rejection")]
)
def test_fault_14_draft_logits(mode, algorithm, temperature, acceptance):
    """Drafts from NaN are ids like others, and are rejected or stand as such; confidence of them counts as 0."""
    prompts = prompts_of(5, 7, 6)
    params = [greedy(8, temperature=temperature, seed=i) for i in range(3)]
    llm = make_llm(mode, models=models_with(algorithm), acceptance=acceptance, learns=True)
    network = llm.engine.drafter.network
    base_logits = network.base_logits
    spoiled = lambda hidden: base_logits(hidden).index_fill(0, torch.tensor([1]), torch.nan)  # noqa: E731
    spy = Spy(llm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            network, "base_logits", lambda hidden: spoiled(hidden) if len(hidden) > 1 else base_logits(hidden)
        )
        completions = llm.generate(prompts, params)
    assert all(len(completion.token_ids) == 8 for completion in completions)
    if acceptance == "coupled" or temperature == 0.0:
        assert ids(completions) == plain_answers(prompts, params)
    drafts = torch.cat([step.draft.token_ids.flatten() for step in spy.steps if step.draft is not None])
    assert ((drafts >= 0) & (drafts < VOCAB)).all()
    assert_nothing_left(llm.engine)


@pytest.mark.parametrize("mode", ["adaptive", "lag", "lag-budget"])
@pytest.mark.parametrize(("value", "overlap"), [(torch.nan, True), (torch.nan, False), (torch.inf, True)])
def test_fault_14_confidence(mode, value, overlap):
    """One that is not finite counts as 0 from there on; widths of the others are what they would be."""
    prompts, params = prompts_of(4, 5, 6), greedy(16)
    sequences = known(prompts, params)

    def widths(bad):
        def script(view, d):
            asked = by_slot(3, 3, 2)(view, d)
            return torch.where((view.slots == 1)[:, None] & (torch.arange(d) >= 1), bad, asked)

        llm = make_llm(mode, ScriptedDrafter(sequences, confidence=script, wrong=never), overlap=overlap)
        spy = Spy(llm)
        assert ids(llm.generate(prompts, params)) == plain_answers(prompts, params)
        return [spy.widths_of(uid) for uid in (1, 2, 3)]

    clean, spoiled = widths(0.0), widths(value)
    assert spoiled == clean
    assert spoiled[0][2:6] == [3] * 4 and spoiled[1][2:6] == [1] * 4


# ----------------------------------------------------------------------------------------------------- 16: stopping


@MODES
def test_fault_16_a_stop_in_any_place_of_a_block(mode):
    """Each token of the first block in turn ends the answer, as it does without drafts."""
    prompts = prompts_of(5, 8)
    plain = plain_answers(prompts, greedy(20))
    scripted = ScriptedDrafter([[*p, *a] for p, a in zip(prompts, plain, strict=True)])
    reference = make_llm("off")
    llm = make_llm(mode, scripted)
    for place in range(6):
        params = [greedy(20, stop_token_ids=(answer[place],)) for answer in plain]
        expected, found = reference.generate(prompts, params), llm.generate(prompts, params)
        for a, b in zip(expected, found, strict=True):
            assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
            assert a.finish_reason == "stop" and len(a.token_ids) <= place + 1
            assert b.spec.emitted == len(b.token_ids) - 1  # the first is the prefill's
            assert b.spec.accepted == sum(b.accepted) <= b.spec.verified
        chunks = list(llm.stream(prompts[0], params[0]))
        assert "".join(chunk.text for chunk in chunks) == expected[0].text
        assert tuple(t for chunk in chunks for t in chunk.token_ids) == expected[0].token_ids
        assert_nothing_left(llm.engine)


def test_fault_16_eos_of_the_model():
    """Token 1 ends an answer unless it is ignored; max_tokens ends it anywhere in a block."""
    prompts = prompts_of(*range(3, 15))
    plain = make_llm("off")
    stopping = dataclasses.replace(greedy(40), ignore_eos=False)
    expected = plain.generate(prompts, stopping)
    assert {answer.finish_reason for answer in expected} == {"stop", "length"}
    llm = make_llm("static", ScriptedDrafter(known(prompts, greedy(60))))
    for a, b in zip(expected, llm.generate(prompts, stopping), strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
    for most in range(1, 8):
        assert ids(llm.generate(prompts, greedy(most))) == [a[:most] for a in plain_answers(prompts, greedy(8))]


# --------------------------------------------------------------------------------------- 17, 18: preemption and abort


@LOOPS
@pytest.mark.parametrize(("algorithm", "temperature"), [(None, 0.0), (None, 1.0), ("dspark", 1.0)])
@pytest.mark.parametrize("mode", ["off", *SPECULATING])
def test_fault_17_preemption_leaves_no_trace(mode, algorithm, temperature, overlap):
    """A pool for two of three requests: text equals that of an engine with pages for all."""
    prompts = prompts_of(9, 6, 11)
    params = [greedy(26, temperature=temperature, top_p=0.95, seed=i) for i in range(3)]
    plain = plain_answers(prompts, params)

    def llm_with(**options):
        scripted = None
        if algorithm is None and mode != "off":
            scripted = ScriptedDrafter([[*p, *a] for p, a in zip(prompts, plain, strict=True)], wrong=every(4))
        return make_llm(mode, scripted, models=models_with(algorithm), overlap=overlap, learns=True, **options)

    llm = llm_with(kv_memory=pool_bytes(10, llm_with()), max_num_seqs=3)
    answers = llm.generate(prompts, params)
    assert llm.engine.scheduler.num_preemptions >= 1
    assert ids(answers) == plain
    assert [answer.spec.emitted for answer in answers] <= [25] * 3
    assert_nothing_left(llm.engine)


@MODES
@LOOPS
@pytest.mark.parametrize("when", ["queued", "prefilling", "in flight", "decoding"])
def test_fault_18_an_abort_and_the_same_id_again(mode, when, overlap):
    """What comes late of the first is dropped; the second starts clean, in the same slot."""
    prompts, params = prompts_of(30, 6), greedy(12)
    plain = plain_answers(prompts, params)
    scripted = ScriptedDrafter([[*p, *a] for p, a in zip(prompts, plain, strict=True)], wrong=every(4))
    llm = make_llm(mode, scripted, overlap=overlap, max_num_seqs=1, max_num_batched_tokens=12)
    engine = llm.engine
    steps = {"queued": 0, "prefilling": 1, "in flight": 4, "decoding": 6}[when]
    old, new = llm._request(prompts[0], params), llm._request(prompts[1], params)
    new.uid = old.uid
    engine.add(old)
    for _ in range(steps):
        engine.step()
    kept = list(old.output_ids)
    assert (when in ("queued", "prefilling")) == (not kept)
    assert bool(engine.scheduler.flights) == (overlap and steps > 0)
    engine.abort(old.uid)
    engine.abort(old.uid)  # a second time is no error
    engine.abort(12345)
    assert old.finish_reason == "abort"
    engine.add(new)
    while engine.has_work:
        assert all(delta.request is new for delta in engine.step())
    engine.drain()
    assert tuple(new.output_ids) == plain[1]
    assert old.output_ids == kept
    for counters in (old.counters, new.counters, engine.totals):
        assert 0 <= counters.accepted <= counters.verified <= counters.drafted
        assert counters.acceptance_rate is None or 0 <= counters.acceptance_rate <= 1
    assert new.counters.emitted == 11
    assert_nothing_left(engine)


# -------------------------------------------------------------------------------------------------- 19: write windows


@LOOPS
@MODES
def test_fault_19_every_write_lands_in_a_page_of_its_own(mode, overlap):
    """Page 16, context 13, 7 drafts, and a pool in which one of four gets no second page at first."""
    prompts, params = prompts_of(13, 13, 13, 13), greedy(14)
    models = models_with("dspark")
    options = {"models": models, "num_drafts": 7, "page_size": 16, "overlap": overlap, "max_num_batched_tokens": 64}
    llm = make_llm(mode, **options)
    llm = make_llm(mode, kv_memory=pool_bytes(7, llm), learns=True, **options)
    spy = Spy(llm)
    assert ids(llm.generate(prompts, params)) == plain_answers(prompts, params)
    first = next(step for step in spy.steps if step.plan.num_decode == 4)
    assert first.plan.caps_np.tolist() == [7, 7, 7, 2]  # up to the end of the page
    for step in spy.steps:
        check_batch(step, page_size=16)
        pages = (step.batch.kv_slots // 16).tolist()
        for row, sequence in enumerate(step.batch.row_sequence.tolist()):
            assert pages[row] in step.owned[int(step.plan.uids_np[sequence])]
        assert torch.equal(step.absorbed, step.batch.kv_slots)  # the draft context lies where the target's does
        owners = [page for pages in step.owned.values() for page in pages]
        assert len(owners) == len(set(owners))
    pool = llm.engine.target.pool
    assert not pool.keys[:, NULL_PAGE].any() and not pool.values[:, NULL_PAGE].any()
    assert_nothing_left(llm.engine)


@LOOPS
@MODES
def test_fault_19_who_shares_a_prefix_writes_behind_it(mode, overlap):
    """Eight requests over one cached prefix of two pages, each drafting right after its prompt."""
    prefix, params = prompts_of(17)[0], greedy(14)
    prompts = [[*prefix, 3 + i] for i in range(8)]
    options = {"models": models_with("dspark"), "num_drafts": 7, "overlap": overlap, "max_num_batched_tokens": 64}
    llm = make_llm(mode, learns=True, **options)
    spy = Spy(llm)
    assert ids(llm.generate([prefix], params)) == plain_answers([prefix], params)
    assert ids(llm.generate(prompts, params)) == plain_answers(prompts, params)
    assert llm.engine.scheduler.prefixes.num_hits == 8 * 16
    together = [step for step in spy.steps if len(step.owned) == 8]
    assert together
    for step in together:
        check_batch(step)
        owners = Counter(page for pages in step.owned.values() for page in pages)
        assert sorted(owners.values())[-2:] == [8, 8]  # the prefix
        assert all(owners[page] == 1 for page in (step.batch.kv_slots // 8).tolist())
    assert_nothing_left(llm.engine)


# ---------------------------------------------------------------------------------------- 20, 22: the draft's context


def draft_contexts(llm):
    """Context length -> (drafts, keys and values of the draft context) of the only request, at each of its drafts."""
    drafter, found = llm.engine.drafter, {}
    propose = drafter.propose

    def watched(view, num_drafts, sampler, signal):
        draft = propose(view, num_drafts, sampler, signal)
        context = int(view.context[0])
        kv = [
            pool[:, view.page_table[0]].flatten(1, 2)[:, :context] for pool in (drafter.pool.keys, drafter.pool.values)
        ]
        found[context] = (draft.token_ids[0].tolist(), torch.stack(kv))
        return draft

    drafter.propose = watched
    return found


@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
def test_fault_22_chunks_of_a_prompt(algorithm):
    """100 tokens at once, in chunks of 33, one by one: the same draft context and the same first drafts."""
    prompt, params, seen = prompts_of(100)[0], greedy(4), []
    for chunk in (100, 33, 1):
        llm = make_llm("static", models=models_with(algorithm), max_num_batched_tokens=chunk, max_num_seqs=1)
        found = draft_contexts(llm)
        assert ids(llm.generate([prompt], params)) == plain_answers([prompt], params)
        seen.append(found[100])
    for drafts, kv in seen[1:]:
        assert drafts == seen[0][0]
        torch.testing.assert_close(kv, seen[0][1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
def test_fault_20_what_was_recomputed_is_as_it_was(algorithm):
    """A request that is thrown out and comes back drafts what it would have drafted."""
    prompt, params = prompts_of(9)[0], greedy(30)

    def run(preempts):
        llm = make_llm("static", models=models_with(algorithm), prefix_caching=False)
        found = draft_contexts(llm)
        request = llm._request(prompt, params)
        llm.engine.add(request)
        for count in itertools.count():
            if request.is_finished:
                break
            llm.engine.step()
            if preempts and count in (5, 11, 12) and not request.is_finished:
                llm.engine.collect(llm.engine._previous)
                llm.engine._previous = None
                llm.engine.scheduler._preempt(request)
        llm.engine.drain()
        assert_nothing_left(llm.engine)
        return request.output_ids, found

    (tokens, cold), (again, resumed) = run(False), run(True)
    assert again == tokens
    both = set(cold) & set(resumed)
    assert len(both) > 15
    for context in both:
        assert resumed[context][0] == cold[context][0]
        torch.testing.assert_close(resumed[context][1], cold[context][1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
def test_fault_20_what_was_found_is_as_it_was_computed(algorithm):
    """The cache is warm with X; X + Y and X + Z come together and draft what they would have drafted alone."""
    prefix, params = prompts_of(33)[0], greedy(20)
    prompts = [[*prefix, 5, 6, 7], [*prefix, 9]]

    def run(llm, *together):
        spy, before = Spy(llm), len(llm.engine.requests)
        requests = [llm._request(prompt, params) for prompt in together]
        for request in requests:
            llm.engine.add(request)
        while llm.engine.has_work:
            llm.engine.step()
        llm.engine.drain()
        assert before == len(llm.engine.requests)
        return [(request.output_ids, spy.drafts_by_context(request.uid)) for request in requests]

    warm = make_llm("static", models=models_with(algorithm))
    run(warm, prefix)
    found = run(warm, *prompts)
    assert warm.engine.scheduler.prefixes.num_hits == 2 * 32
    for prompt, (tokens, drafts) in zip(prompts, found, strict=True):
        ((cold_tokens, cold),) = run(make_llm("static", models=models_with(algorithm)), prompt)
        assert tokens == cold_tokens and len(cold) > 5 and drafts.keys() == cold.keys()
        for context, (block, signal) in cold.items():
            assert drafts[context][0] == block
            assert drafts[context][1] == pytest.approx(signal, abs=1e-4)
    assert_nothing_left(warm.engine)


# --------------------------------------------------------------------------------------------------- 28, 33: counters


def test_fault_28_counts_of_a_request_that_got_nowhere():
    prompts, params = prompts_of(30, 6), greedy(12)
    llm = make_llm("lag", ScriptedDrafter(known(prompts, params)), max_num_batched_tokens=8)
    stream = llm.stream(prompts[0], params)
    llm.engine.add(request := llm._request(prompts[1], params))
    llm.engine.step()
    llm.engine.abort(request.uid)
    assert request.counters.as_dict()["acceptance_rate"] is None
    assert request.counters.mean_accepted_length is None
    stream.close()
    llm.engine.drain()
    assert llm.engine.totals.as_dict()["acceptance_rate"] is None
    assert_nothing_left(llm.engine)


@pytest.mark.parametrize("mode", ["adaptive", "lag", "lag-budget"])
def test_fault_33_any_number_of_drafts_and_any_width(mode):
    """Drafts from 1 to 16, widths from 0 to all of them, at two sequences."""
    prompts, params = prompts_of(5, 7), greedy(28)
    sequences = known(prompts, params)
    for k in range(1, 17):
        script = asks_for(lambda view, k=k: (k + 1 - view.step + view.slots * 8) % (k + 1))
        llm = make_llm(mode, ScriptedDrafter(sequences, confidence=script, wrong=every(2)), num_drafts=k)
        spy = Spy(llm)
        answers = ids(llm.generate(prompts, params))
        assert [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)] == sequences
        widths = {width for step in spy.steps if step.draft is not None for width in step.widths}
        assert widths <= set(range(k + 1))
        assert mode == "lag-budget" or (len(widths) > k - 3 and {0, k} <= widths)


# ------------------------------------------------------------------------------------------ 32: who teaches estimators


@LOOPS
@pytest.mark.parametrize("mode", PRUNING)
def test_fault_32_a_constrained_request_moves_nobody_elses_widths(mode, overlap):
    """Beside A, whose drafts are all right, B's are all right or all wrong. What B brings does not reach A's widths while
    B is constrained; without that it does, or the test would show nothing."""
    prompts, (short, long) = prompts_of(4, 5), (greedy(60), greedy(110))
    told = 0.7 if mode == "adaptive" else 0.8  # where a little more or less of it changes widths
    right = known(prompts, long)
    wrong = [right[0], [right[1][0], *((token + 1) % VOCAB for token in right[1][1:])]]

    def widths_of_a(answers, constrained):
        scripted = ScriptedDrafter(answers, 4, confidence=constant(told, told, told, told))
        llm = make_llm(mode, scripted, learns=True, overlap=overlap)
        spy = Spy(llm)
        a, b = llm._request(prompts[0], short), llm._request(prompts[1], long)
        b.constrained = constrained
        llm._run([a, b])
        assert b.counters.accepted == 0 if answers is wrong else b.counters.accepted > 0
        return spy.widths_of(a.uid)

    alone, beside = widths_of_a(right, constrained=True), widths_of_a(wrong, constrained=True)
    assert alone == beside
    assert max(alone) > 0
    assert widths_of_a(right, constrained=False) != widths_of_a(wrong, constrained=False)
