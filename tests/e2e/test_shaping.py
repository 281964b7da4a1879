"""Penalties, biases, bans and min-p through whole engines: scripted drafts, scripted widths, scripted logits.

Random rows are in tests/ops/test_shape_logits.py, identity over all modes and parameters in tests/lossless.
"""

import dataclasses
import itertools
import json

import pytest
import torch

from slipstream.config import MAX_BANS, MAX_BIASES, SamplingParams
from slipstream.errors import RequestError
from slipstream.options import gather
from slipstream.testing import assert_nothing_left, tiny_models, tiny_spec
from slipstream.verify import accept
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
    plain_answers,
    pool_bytes,
    prompts_of,
)

LOOPS = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
RULES = pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
PENALTIES = {"repetition_penalty": 1.5, "frequency_penalty": 0.6, "presence_penalty": 0.9}


def ids(completions):
    return [completion.token_ids for completion in completions]


def says(llm, logits):
    """The target says the same after whatever comes before: logits [V]."""
    verify = llm.engine.target.verify

    def scripted(batch, token_ids, segments):
        out, *rest = verify(batch, token_ids, segments)
        return torch.tensor(logits).expand_as(out), *rest

    llm.engine.target.verify = scripted


def keep_laws(monkeypatch):
    """Every row that a token was chosen by, as the engine made it."""
    laws, law_of = [], accept.law_of

    def kept(logits, state, asked, histories):
        laws.append((histories, law_of(logits, state, asked, histories)))
        return laws[-1][1]

    monkeypatch.setattr(accept, "law_of", kept)
    return laws


# ------------------------------------------------------------------------------------------- 13: history inside a block


X, A, B, C, D = 15, 10, 11, 12, 13
LADDER = [-90.0] * VOCAB
for place, token in enumerate((X, A, B, C, D)):
    LADDER[token] = -10.0 * (place + 1)


@LOOPS
@RULES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", SPECULATING)
def test_fault_13_the_drafts_before_a_row_are_its_history(mode, temperature, acceptance, overlap, monkeypatch):
    """The target wants X, A, B, C, D in this order and nothing twice; drafts are A, B, A, C: the second A falls."""
    params = greedy(12, temperature=temperature, seed=5, repetition_penalty=1000.0)
    scripted = ScriptedDrafter([[3, 4, X, A, B, A, C, D]])
    llm = make_llm(mode, scripted, overlap=overlap, acceptance=acceptance)
    says(llm, LADDER)
    laws, spy = keep_laws(monkeypatch), Spy(llm)
    (answer,) = llm.generate([[3, 4]], params)
    assert answer.token_ids[:5] == (X, A, B, C, D)
    assert len(set(answer.token_ids)) == 12
    step = next(step for step in spy.steps if step.draft is not None)
    assert step.draft.token_ids.tolist() == [[A, B, A, C]]
    (width,) = step.widths
    assert width == 4 or mode == "lag-budget"  # whose first budget is a guess
    assert step.result.num_accepted_np.tolist() == [min(width, 2)]
    histories, law = laws[1]
    assert histories.num_drafts.tolist() == [0, 1, 2, 3, 4][: width + 1]
    # After [X], [X A], [X A B], [X A B A], [X A B A C]: prompt, output and drafts before the row.
    assert law.argmax(1).tolist() == [A, B, C, C, D][: width + 1]
    assert_nothing_left(llm.engine)


@RULES
@pytest.mark.parametrize("mode", SPECULATING)
def test_fault_13_each_draft_counts_once(mode, acceptance, monkeypatch):
    """Frequency penalty 1: row after A, B, A is down by 2 for A and by 1 for B; no row counts what comes after it."""
    params = SamplingParams(frequency_penalty=1.0, max_tokens=9)
    llm = make_llm(mode, ScriptedDrafter([[3, 4, X, A, B, A, C, D]]), acceptance=acceptance)
    says(llm, LADDER)
    laws = keep_laws(monkeypatch)
    assert llm.generate([[3, 4]], params)[0].token_ids == (X,) * 9
    law = laws[1][1] - torch.tensor(LADDER)
    assert len(law) == 5 or mode == "lag-budget"
    expected = [
        [0, 0, -1, 0, 0, 0],
        [0, 0, -1, -1, 0, 0],
        [0, 0, -1, -1, -1, 0],
        [0, 0, -1, -2, -1, 0],
        [0, 0, -1, -2, -1, -1],
    ]
    assert law[:, [3, 4, X, A, B, C]].tolist() == expected[: len(law)]


# --------------------------------------------------------------------------------------------------------- 4: widths


def scheduled(widths):
    """Decode step t asks for widths[t % n], the same for everybody, or for each slot its own."""
    return asks_for(lambda view: torch.tensor(widths)[view.slots] if isinstance(widths, list) else widths)


@LOOPS
@pytest.mark.parametrize("widths", [(0, 0, 0), (0, 3, 3), (3, 0, 0), (0, 3, 7)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", PRUNING)
def test_fault_4_width_0_with_penalties(mode, temperature, widths, overlap):
    prompts = prompts_of(4, 9, 6)
    params = [greedy(30, temperature=temperature, seed=i, **PENALTIES) for i in range(3)]
    script = scheduled(list(widths))
    scripted = ScriptedDrafter(known(prompts, params), confidence=script, wrong=lambda position: position % 5 == 0)
    llm = make_llm(mode, scripted, num_drafts=7, overlap=overlap)
    spy = Spy(llm)
    assert ids(llm.generate(prompts, params)) == plain_answers(prompts, params)
    seen = {tuple(step.widths) for step in spy.steps if step.plan.caps_np.tolist() == [7] * 3}
    assert any(width[slot] == 0 for width in seen for slot in range(3) if widths[slot] == 0)
    assert_nothing_left(llm.engine)


# ------------------------------------------------------------------------------------------------ every field has effect


EFFECTS = {  # field -> two values, and what the scripted target then emits
    "temperature": (0.0, 5.0),
    "top_k": (0, 1),
    "top_p": (1.0, 0.01),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1.0, 1000.0),
    "frequency_penalty": (0.0, 2.0),
    "presence_penalty": (0.0, 2.0),
    "logit_bias": ({}, {7: 100.0}),
    "min_tokens": (0, 3),
    "seed": (1, 2),
    "max_tokens": (4, 3),
    "stop_token_ids": ((), (5,)),
    "ignore_eos": (True, False),
}


@pytest.mark.parametrize("mode", ["off", "static", "lag-budget"])
@pytest.mark.parametrize("name", EFFECTS)
def test_every_field_changes_an_answer(name, mode):
    """Token 5 first, then 1 (the model's EOS), then the others, close to each other."""
    logits = [-3.0 - 0.1 * token for token in range(VOCAB)]
    logits[5], logits[1] = -1.0, -1.5
    heat = 3.0 if name in ("top_k", "top_p", "min_p", "seed") else 0.0
    base = {"temperature": heat, "seed": 1, "max_tokens": 6, "ignore_eos": True}
    if name == "ignore_eos":
        base["presence_penalty"] = 2.0
    if name == "min_tokens":
        base["stop_token_ids"] = (5,)
    answers = []
    for value in EFFECTS[name]:
        llm = make_llm(mode, None if mode == "off" else ScriptedDrafter([[3, *[5] * 40]]))
        says(llm, logits)
        answers += ids(llm.generate([[3]], SamplingParams(**{**base, name: value})))
        assert_nothing_left(llm.engine)
    assert answers[0] != answers[1]


def test_min_tokens_holds_back_every_end():
    """The target wants to end at once: by EOS, or by a stop id; ignored ends are no ends."""
    logits = [-3.0 - 0.1 * token for token in range(VOCAB)]
    logits[1], logits[5] = -1.0, -1.5

    def answer(**fields):
        llm = make_llm("static", ScriptedDrafter([[3, *[1] * 40]]))
        says(llm, logits)
        (completion,) = llm.generate([[3]], SamplingParams(max_tokens=8, **fields))
        return completion.token_ids, completion.finish_reason

    assert answer() == ((1,), "stop")
    assert answer(min_tokens=3) == ((5, 5, 5, 1), "stop")
    assert answer(min_tokens=3, stop_token_ids=(5,)) == ((0, 0, 0, 1), "stop")
    assert answer(min_tokens=3, stop_token_ids=(5,), ignore_eos=True) == ((1,) * 8, "length")
    assert answer(min_tokens=8) == ((5,) * 8, "length")


# -------------------------------------------------------------------------------------------- neighbours and former owners


@LOOPS
@pytest.mark.parametrize("mode", ["off", *SPECULATING])
def test_a_slot_forgets_what_its_former_owner_asked_for(mode, overlap):
    """One slot: shaped, plain, shaped otherwise, plain; each answers as it does alone."""
    prompts = prompts_of(6, 5, 7, 4)
    wishes = [{**PENALTIES, "logit_bias": {5: 9.0, 9: -9.0}}, {}, {"min_tokens": 9, "stop_token_ids": (3, 4, 5)}, {}]
    params = [SamplingParams(max_tokens=12, **wish) for wish in wishes]
    alone = [plain_answers([p], each)[0] for p, each in zip(prompts, params, strict=True)]
    scripted = ScriptedDrafter([[*p, *a] for p, a in zip(prompts, alone, strict=True)])
    llm = make_llm(mode, None if mode == "off" else scripted, overlap=overlap, max_num_seqs=1)
    assert ids(llm.generate(prompts, params)) == alone
    assert len(set(alone)) == 4
    assert_nothing_left(llm.engine)


@LOOPS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["off", *SPECULATING])
def test_fault_17_a_preempted_request_knows_prompt_from_output(mode, temperature, overlap):
    prompts = prompts_of(9, 6, 11)
    wish = {"frequency_penalty": 0.5, "presence_penalty": 1.5, "min_tokens": 20, "stop_token_ids": (4, 6, 8)}
    params = [SamplingParams(max_tokens=26, temperature=temperature, seed=i, **wish) for i in range(3)]
    plain = plain_answers(prompts, params)
    assert all(len(answer) >= 20 for answer in plain)

    def llm_with(**options):
        scripted = ScriptedDrafter(known(prompts, params), wrong=lambda position: position % 4 == 0)
        return make_llm(mode, None if mode == "off" else scripted, overlap=overlap, **options)

    llm = llm_with(kv_memory=pool_bytes(9, llm_with()), max_num_seqs=3)
    assert ids(llm.generate(prompts, params)) == plain
    assert llm.engine.scheduler.num_preemptions >= 1
    assert_nothing_left(llm.engine)


@pytest.mark.parametrize("budget", [100, 33, 2])
def test_fault_22_chunks_of_the_prompt_change_nothing(budget):
    prompts, params = prompts_of(70, 9), greedy(10, **PENALTIES, logit_bias={4: 2.0})
    llm = make_llm("static", ScriptedDrafter(known(prompts, params)), max_num_batched_tokens=budget, max_num_seqs=2)
    assert ids(llm.generate(prompts, params)) == plain_answers(prompts, params)


@RULES
def test_rows_that_are_filtered_in_parts_give_the_same(acceptance, monkeypatch):
    """So does a step of so many rows that they would take too much memory together."""
    prompts, filters = prompts_of(9, 6, 11, 4), {"top_p": 0.8, "top_k": 7, "min_p": 0.01, "logit_bias": {4: 1.0}}
    params = [greedy(12, temperature=1.0, seed=i, **PENALTIES, **filters) for i in range(4)]
    sizes, answers, inner = {}, {}, accept.filter_logits
    for at_once in (accept.FILTERED_AT_ONCE, 3 * VOCAB):
        monkeypatch.setattr(accept, "FILTERED_AT_ONCE", at_once)
        found = sizes[at_once] = []

        def counted(logits, *args, found=found, **options):
            found.append(len(logits))
            return inner(logits, *args, **options)

        monkeypatch.setattr(accept, "filter_logits", counted)
        llm = make_llm("static", models=models_with("dspark"), acceptance=acceptance, num_drafts=3)
        answers[at_once] = ids(llm.generate(prompts, params))
    whole, parts = sizes.values()
    assert len({str(each) for each in answers.values()}) == 1
    assert max(parts) == 3 < max(whole) and sum(parts) == sum(whole)


def test_a_batch_that_asks_for_nothing_shapes_nothing(monkeypatch):
    """The op is not called, and steps are marked neither as shaped nor as filtered: they keep their graphs."""
    monkeypatch.setattr(accept, "shape_logits", None)
    llm = make_llm("static", models=models_with("dspark"))
    spy = Spy(llm)
    llm.generate(prompts_of(4, 5), [greedy(8), greedy(8, temperature=1.0, seed=1, min_p=0.0, logit_bias={})])
    assert not any(step.plan.any_shaped or step.plan.any_filtered for step in spy.steps)
    llm.generate(prompts_of(4, 5), [greedy(8, temperature=0.0, min_p=0.5, top_k=4), greedy(8, min_tokens=4)])
    assert not any(step.plan.any_shaped or step.plan.any_filtered for step in spy.steps), "none of these has an effect"
    llm.generate(prompts_of(4, 5), [greedy(8), greedy(8, temperature=1.0, seed=1, min_p=0.5)])
    assert any(step.plan.any_filtered and step.plan.any_min_p for step in spy.steps)
    assert not any(step.plan.any_shaped for step in spy.steps)


def test_fault_14_a_request_whose_every_token_is_banned_fails_alone():
    """Nothing is left to choose from: an error, not a token that was banned."""
    prompts = prompts_of(4, 5)
    banned = SamplingParams(max_tokens=6, min_tokens=3, stop_token_ids=tuple(range(VOCAB)))
    for acceptance, temperature in itertools.product(("coupled", "rejection"), (0.0, 1.0)):
        llm = make_llm("static", models=models_with("dspark"), acceptance=acceptance)
        bad, good = llm.generate(prompts, [dataclasses.replace(banned, temperature=temperature), greedy(6)])
        assert (bad.finish_reason, bad.token_ids) == ("error", ())
        assert good.token_ids == plain_answers(prompts, greedy(6))[1]


# ---------------------------------------------------------------------------------------------------------- 30: refusals


NAN, INF = float("nan"), float("inf")
REFUSED = [
    *(("min_p", value) for value in (-0.1, 1.1, NAN, INF, "0.1", None, True)),
    *(("repetition_penalty", value) for value in (0, 0.0, -1.0, 1e-4, 1001.0, NAN, INF, "1", None, False)),
    *((f"{kind}_penalty", v) for kind in ("frequency", "presence") for v in (-2.1, 2.1, NAN, INF, "1", None, True)),
    *(("min_tokens", value) for value in (-1, 1.5, 257, "1", None, True)),
    *(("logit_bias", value) for value in (
        None, 5, "x", [1], {-1: 1.0}, {1.5: 1.0}, {"a": 1.0}, {"-1": 1.0}, {"": 1.0}, {True: 1.0}, {2**31: 1.0},
        {1: NAN}, {1: INF}, {1: -INF}, {1: 100.1}, {1: -100.1}, {1: "1"}, {1: None}, {1: True}, {1: 1.0, "1": 2.0},
        {"9" * 5000: 1.0}, dict.fromkeys(range(MAX_BIASES + 1), 1.0),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_fault_30_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def test_fault_30_a_bias_for_a_token_that_is_not_there_is_refused():
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASES), 1.0)).logit_bias) == MAX_BIASES
    with pytest.raises(RequestError, match="logit_bias names token 20"):
        make_llm("off", max_num_seqs=1).generate([[3, 4]], SamplingParams(logit_bias={20: 1.0}))


@pytest.mark.parametrize(
    "fields",
    [
        {"min_p": 0}, {"min_p": 1}, {"repetition_penalty": 1e-3}, {"repetition_penalty": 1000}, {"min_tokens": 3},
        {"frequency_penalty": -2}, {"frequency_penalty": 2}, {"presence_penalty": -2}, {"presence_penalty": 2},
        {"logit_bias": {i: 100 if i % 2 else -100 for i in range(20)}}, {"logit_bias": {"7": 5, 19: -5}},
    ],
)  # fmt: skip
def test_the_ends_of_the_ranges_run(fields):
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=temperature, seed=1, **fields)
        assert hash(params) == hash(dataclasses.replace(params)) and params == dataclasses.replace(params)
        llm = make_llm("off", max_num_seqs=1)
        assert len(llm.generate([[3, 4]], params)[0].token_ids) == 3
        assert_nothing_left(llm.engine)


def test_a_bias_is_a_copy_with_numbers_for_keys():
    given = {"7": 5, 3: -1}
    params = SamplingParams(logit_bias=given)
    given[4] = 1.0
    assert params.logit_bias == {7: 5.0, 3: -1.0}


def test_a_bias_for_a_token_that_is_none_is_refused():
    params = SamplingParams(logit_bias={VOCAB - 1: 1.0, VOCAB: 1.0})
    params.check_token_ids(VOCAB + 1)
    with pytest.raises(RequestError, match=f"logit_bias names token {VOCAB}; .* below {VOCAB}"):
        params.check_token_ids(VOCAB)


def test_more_ends_than_a_slot_has_room_for_are_refused():
    llm = make_llm("off", models=tiny_models(spec=tiny_spec(vocab_size=MAX_BANS + 2)))
    ends = tuple(range(2, MAX_BANS + 1))  # and EOS
    llm.generate([[3]], SamplingParams(min_tokens=1, max_tokens=1, stop_token_ids=(*range(2, 19), *ends[17:])))
    with pytest.raises(RequestError, match=f"min_tokens keeps at most {MAX_BANS}"):
        llm.generate([[3]], SamplingParams(min_tokens=1, stop_token_ids=(*ends, MAX_BANS + 1)))
    assert_nothing_left(llm.engine)


def test_a_config_file_may_name_them_all(tmp_path):
    """JSON has texts for keys; `generate --config` reads them."""
    fields = {
        "min_p": 0.1, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.5, "min_tokens": 2,
        "logit_bias": {"5": 3},
    }  # fmt: skip
    path = tmp_path / "options.json"
    path.write_text(json.dumps(fields))
    assert gather({}, path).sampling_params() == SamplingParams(**{**fields, "logit_bias": {5: 3.0}})
    path = tmp_path / "options.toml"
    path.write_text("repetition_penalty = 1.2\n[logit_bias]\n5 = 3\n")
    assert gather({}, path).sampling_params() == SamplingParams(repetition_penalty=1.2, logit_bias={5: 3.0})
