"""The n-gram drafter through the whole engine: the plain text in every mode, drafts by definition, honest statistics."""

from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.config import SamplingParams, SpeculativeConfig
from slipstream.decide.cost import CostModel, DraftTimes, LinearCost
from slipstream.draft import ngram
from slipstream.draft.base import Draft
from slipstream.draft.ngram import NGramDraft
from slipstream.errors import ConfigError
from slipstream.llm import LLM
from slipstream.load import Models, load_models
from slipstream.models.layers import DenseAttend
from slipstream.ops.reject import reject
from slipstream.rehearse import time_step
from slipstream.testing import assert_nothing_left, tiny_models, tiny_spec
from slipstream.verify import accept
from tests.e2e.engines import (
    SPECULATING,
    VOCAB,
    Spy,
    greedy,
    make_llm,
    models_with,
    plain_answers,
    pool_bytes,
)
from tests.e2e.test_step_order import guarded
from tests.lossless.harness import NearTies, judge, run
from tests.lossless.laws import law_from
from tests.ops.test_lookup import by_definition

MODES = pytest.mark.parametrize("mode", SPECULATING)
CPU = torch.device("cpu")
# Some repeat themselves, so that look-ups hit from the first step on.
PROMPTS = [[3, 4, 5, 6] * 3, [7] * 9, [8, 9, 11, 8, 9, 12, 8, 9], [5], [(7 * j) % 17 + 3 for j in range(25)]]
# A start of the step so dear that most drafts are worth their rows.
CHEAP = CostModel(LinearCost(20.0, 0.5, 0.0, 0.0), DraftTimes.constant(0.1), corrects=False)
NEAR_TIES = NearTies()  # over the whole matrix


def ids(completions):
    return [completion.token_ids for completion in completions]


def make(mode, **fields):
    return make_llm(mode, NGramDraft(CPU), **{"learns": True, "cost": CHEAP, **fields})


def params_for(temperature, max_tokens=16):
    top_p = 0.9 if temperature else 1.0
    return [
        SamplingParams(temperature=temperature, top_p=top_p, seed=70 + i, max_tokens=max_tokens + i, ignore_eos=True)
        for i in range(2 * len(PROMPTS))
    ]


@cache
def plain_run(temperature):
    return run(models_with(), "off", 2 * PROMPTS, params_for(temperature))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("num_drafts", "concurrency"), [(1, 8), (7, 1), (16, 8)])
@MODES
def test_token_ids_equal_plain_decoding(mode, num_drafts, concurrency, temperature):
    """With some drafts accepted and some rejected, and in the modes that prune some not verified."""
    params, prompts = params_for(temperature), 2 * PROMPTS
    other = run(
        models_with(), mode, prompts, params, num_drafts=num_drafts, concurrency=concurrency, drafter=NGramDraft(CPU)
    )
    outcome, found = judge(models_with(), mode, prompts, params, plain_run(temperature), other, NEAR_TIES)
    assert outcome == "equal", found


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("mode", "pages"), [*product(SPECULATING, [None, 7])])
def test_drafts_are_those_of_the_definition(mode, pages, overlap):
    """Through chunked prefill, slots that are used again, and (with 7 pages) preemption: whatever stood there before."""
    fields = {} if pages is None else {"kv_memory": pool_bytes(pages, make(mode))}
    llm = make(mode, overlap=overlap, max_num_seqs=3, max_num_batched_tokens=12, **fields)
    spy = Spy(llm)
    answers = ids(llm.generate(PROMPTS, greedy(24)))
    assert answers == plain_answers(PROMPTS, greedy(24))
    assert (llm.engine.scheduler.num_preemptions > 0) == (pages is not None)
    matched = 0
    for uid, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True), 1):
        text = [*prompt, *answer]
        for context, (drafts, _) in spy.drafts_by_context(uid).items():
            if context < len(text):  # a step that was launched before the end was known may lie behind it
                expected, length = by_definition(text[: context + 1], len(drafts), ngram.MAX_MATCH)
                assert drafts == expected
                matched += length > 0
    assert matched > 20
    assert_nothing_left(llm.engine)


def test_a_loop_is_accepted_in_full():
    """Once a target repeats itself, every block is right to its last draft: 17 tokens a step with S = 16."""
    llm = make("static", num_drafts=16)
    verify = llm.engine.target.verify

    def counts_to_six(batch, token_ids, segments):
        logits, *rest = verify(batch, token_ids, segments)
        following = 3 + (token_ids[batch.output_rows] - 2) % 6
        return torch.zeros_like(logits).scatter_(1, following[:, None], 9.0), *rest

    llm.engine.target.verify = counts_to_six
    spy = Spy(llm)
    (answer,) = ids(llm.generate([[12, 15, 14]], greedy(60)))
    assert answer == tuple(3 + i % 6 for i in range(60))
    accepted = [int(step.result.num_accepted_np[row]) for step, row in spy.of(1)]
    assert accepted[:6] == [0, 0, 0, 0, 0, 0]  # the first round: all new
    assert accepted[6:8] == [16, 16]


# -------------------------------------------------------------------------------------------------------- its confidence


def shares(drafter, entry, num_drafts):
    return drafter._accepted.share(torch.tensor([entry]), num_drafts)[0]


def test_running_acceptance_is_counted_by_condition(monkeypatch):
    """Draft j counts only if it was verified and all before it stand; nothing counts of a sequence that must not teach."""
    monkeypatch.setattr(ngram, "DECAY", 0.5)
    drafter, before = NGramDraft(CPU), shares(NGramDraft(CPU), 2, 4)
    block = Draft(torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4), None, evidence=torch.tensor([2, 2, 2, 3]))
    widths, accepted = torch.tensor([4, 2, 4, 3]), torch.tensor([1, 2, 0, 3])
    drafter.settle(block, widths, accepted, torch.tensor([True, True, False, True]))
    weight, tried, stood = ngram.PRIOR_WEIGHT, torch.tensor([2, 2, 0, 0]), torch.tensor([2, 1, 0, 0])
    torch.testing.assert_close(shares(drafter, 2, 4), (stood + weight * before) / (tried + weight))
    drafter.settle(
        block, 0 * widths, 0 * accepted, torch.ones(4, dtype=torch.bool)
    )  # nothing verified: only time passes
    torch.testing.assert_close(shares(drafter, 2, 4), (stood / 2 + weight * before) / (tried / 2 + weight))
    assert shares(drafter, 3, 4)[:3].gt(shares(NGramDraft(CPU), 3, 4)[:3]).all()
    assert shares(drafter, 3, 4)[3] == shares(NGramDraft(CPU), 3, 4)[3]
    torch.testing.assert_close(shares(drafter, 4, 4), shares(NGramDraft(CPU), 4, 4))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", ["adaptive", "lag", "lag-budget"])
def test_the_table_holds_what_the_engine_saw(mode, overlap, monkeypatch):
    """Recounted from every step's widths and results, greedy and sampled apart, and reported as the next confidence."""
    monkeypatch.setattr(ngram, "DECAY", 1.0)
    llm = make(mode, overlap=overlap)
    spy = Spy(llm)
    llm.generate(PROMPTS, [greedy(30, temperature=float(i % 2), seed=i) for i in range(len(PROMPTS))])
    counted = torch.zeros_like(llm.engine.drafter._accepted._counts)
    prior = llm.engine.drafter._accepted._prior
    for step in spy.steps:
        if step.draft is None:
            continue
        known = (counted + prior)[step.draft.evidence, : step.draft.signal.shape[1]]
        torch.testing.assert_close(step.draft.signal, known[..., 1] / known[..., 0])
        for row, entry in enumerate(step.draft.evidence.tolist()):
            assert (entry > ngram.MAX_MATCH) == bool(step.plan.sampled_np[row])
            width, accepted = int(step.batch.widths[row]), int(step.result.num_accepted_np[row])
            for position in range(min(width, accepted + 1)):
                counted[entry, position] += torch.tensor([1.0, float(position < accepted)])
    assert counted[: ngram.MAX_MATCH + 1].sum() > 20
    assert counted[ngram.MAX_MATCH + 1 :].sum() > 20
    torch.testing.assert_close(llm.engine.drafter._accepted._counts, counted)


def test_fault_32_constrained_requests_and_rehearsals_teach_nothing():
    """Steps of made-up requests, and requests whose outputs something else decides, leave the table as it was."""
    llm = make("lag")
    time_step(llm.engine, num_sequences=2, width=4, context=40)
    request = llm._request([7] * 9, greedy(20))
    request.constrained = True
    llm._run([request])
    assert len(request.output_ids) == 20
    assert not llm.engine.drafter._accepted._counts.any()
    llm.generate([[7] * 9], greedy(20))
    assert llm.engine.drafter._accepted._counts.any()


def test_a_broken_row_teaches_nothing():
    """What is accepted where the target's logits are not finite says nothing of look-up."""
    llm = make("adaptive")
    verify = llm.engine.target.verify

    def spoiled(batch, token_ids, segments):
        logits, *rest = verify(batch, token_ids, segments)
        return torch.full_like(logits, torch.nan), *rest

    llm.engine.target.verify = spoiled
    assert [answer.finish_reason for answer in llm.generate(PROMPTS, greedy(8))] == ["error"] * len(PROMPTS)
    assert not llm.engine.drafter._accepted._counts.any()


# ------------------------------------------------------------------------------------------------------------- rejection


@MODES
def test_rejection_with_greedy_requests_gives_the_plain_text(mode):
    """Beside sampled ones; every draft is certain, and is the same for both kinds of requests."""
    params = [greedy(20, temperature=float(i % 2), seed=i) for i in range(len(PROMPTS))]
    llm = make(mode, acceptance="rejection")
    spy = Spy(llm)
    answers = ids(llm.generate(PROMPTS, params))
    assert answers[::2] == plain_answers(PROMPTS, greedy(20))[::2]
    assert all(step.draft is None or step.draft.law is None for step in spy.steps)


PROMPT = [*range(VOCAB)]  # whatever follows has been there
COUNT = 1200


@cache
def next_probs(prefix):
    """[V] by one dense forward."""
    target, tokens = models_with().target, torch.tensor([*PROMPT, *prefix])
    with torch.inference_mode():
        hidden, _ = target(tokens, torch.arange(len(tokens)), DenseAttend(target.spec))
        return target.logits(hidden[-1:])[0].softmax(-1).double().numpy()


@cache
def joint_law():
    """[V * V] of the second and the third token, which drafts may be accepted for."""
    first = next_probs(())
    second = np.stack([next_probs((a,)) for a in range(VOCAB)])
    third = np.stack([[next_probs((a, b)) for b in range(VOCAB)] for a in range(VOCAB)])
    return (first[:, None, None] * second[..., None] * third).sum(0).ravel()


def surplus(mode):
    """Chi-square of 1200 answers over the joint law, less what a right engine exceeds once in ten thousand runs."""
    params = [greedy(3, temperature=1.0, seed=seed) for seed in range(COUNT)]
    llm = make(
        mode, acceptance="rejection", num_drafts=2, max_num_seqs=128, max_num_batched_tokens=1024, page_size=16,
        max_model_len=32, cost=CostModel(LinearCost(200.0, 0.04, 0.0, 0.0), DraftTimes.constant(0.1), corrects=False),
    )  # fmt: skip
    answers = np.array(ids(llm.generate([PROMPT] * COUNT, params)))
    totals = llm.engine.totals
    assert 0 < totals.accepted < totals.verified
    assert mode == "static" or totals.verified < totals.drafted
    law, found = joint_law(), np.bincount(answers[:, 1] * VOCAB + answers[:, 2], minlength=VOCAB**2)
    often = law * COUNT >= 5
    expected = np.append(law[often], law[~often].sum()) * COUNT
    seen = np.append(found[often], found[~often].sum())
    degrees = len(expected) - 1
    assert degrees >= 10
    return ((seen - expected) ** 2 / expected).sum() - (degrees + 3.9 * np.sqrt(2 * degrees) + 9)


@MODES
def test_rejection_keeps_the_targets_law(mode):
    """The seeds are fixed, so that it passes or fails for good."""
    assert surplus(mode) < 0


def test_a_law_that_the_drafts_were_not_drawn_from_is_seen(monkeypatch):
    """Drafts passed off as drawn evenly are accepted too often: the check above would fail."""

    def uncertain(drafts, law, *rest):
        assert law is None
        return reject(drafts, law_from(torch.full((*drafts.shape, VOCAB), 1 / VOCAB)), *rest)

    monkeypatch.setattr(accept, "reject", uncertain)
    assert surplus("static") > 0


# --------------------------------------------------------------------------------------------------- order and the door


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@MODES
def test_no_hidden_reads(mode, acceptance):
    llm = make(mode, acceptance=acceptance, full_length=False, max_num_seqs=2, max_num_batched_tokens=12)
    stack = guarded(llm, mode in ("static", "lag", "lag-budget"))
    try:
        answers = llm.generate(PROMPTS, [greedy(8, temperature=float(i % 2), seed=i) for i in range(len(PROMPTS))])
    finally:
        stack.close()
    assert [len(answer.token_ids) for answer in answers] == [8] * len(PROMPTS)
    assert llm.engine.totals.accepted > 0


@MODES
def test_it_is_served_by_name(mode):
    """Without a drafter's network; with one loaded beside it too, which then owns no cache."""
    for models in (models_with(), models_with("dspark")):
        config = SpeculativeConfig.for_mode(mode, draft_model="ngram", speculative_algorithm="NGRAM")
        llm = LLM(models, speculative=config, max_model_len=64, page_size=8, max_num_seqs=4)
        assert isinstance(llm.engine.drafter, NGramDraft)
        assert len(llm.engine.backend._pools) == 1
        assert llm.engine.scheduler.limits.max_drafts == 7
        notes = {field: value for field, value, _ in llm.notes}
        assert notes["draft_model"] == "ngram"
        assert notes.get("confidence_signal", "head") == "head"
        assert mode == "static" or "--ngram--" in notes["cost_model"]
        assert ids(llm.generate(PROMPTS, greedy(12))) == plain_answers(PROMPTS, greedy(12))
        assert llm.engine.totals.accepted > 0
        assert_nothing_left(llm.engine)


def test_it_is_loaded_from_nowhere(tiny_folders, monkeypatch, tmp_path):
    """No file is looked for, in the working directory neither; the calibration of a folder beside it is not read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ngram").mkdir()
    monkeypatch.setattr("slipstream.load.load_drafter", None)
    models = load_models(str(tiny_folders[0]), "ngram", dtype="float32")
    assert (models.network, models.drafter_name, models.drafter_path) == (None, "ngram", None)


def test_what_lies_beside_a_network_is_not_for_other_drafters(tmp_path):
    """Neither its calibration nor its cost profile: for look-up by name, or for a drafter of the caller's own."""
    (tmp_path / "calibration.json").write_text("not JSON")
    (tmp_path / "model.safetensors").write_bytes(b"weights")  # only hashed here
    whole = tiny_models("dspark", spec=tiny_spec(vocab_size=VOCAB))
    models = Models(whole.target, whole.tokenizer, whole.network, "tiny", "dspark", Path(tmp_path))
    config = SpeculativeConfig.for_mode("lag", draft_model="ngram", cost_model="none")
    LLM(models, speculative=config, max_model_len=64, max_num_seqs=2)
    own = SpeculativeConfig.for_mode("lag", draft_model="mine", speculative_algorithm="dflash")
    llm = LLM(models, speculative=own, drafter=NGramDraft(CPU), max_model_len=64, max_num_seqs=2)
    assert "--mine--" in str({field: value for field, value, _ in llm.notes}["cost_model"])
    with pytest.raises(ConfigError, match="calibration"):
        LLM(models, speculative=SpeculativeConfig.for_mode("lag", draft_model="dspark", cost_model="none"),
            max_model_len=64, max_num_seqs=2)  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_speculative_tokens": 17}, "at most 16"),
        ({"speculative_algorithm": "dspark"}, "ngram is a ngram drafter"),
        ({"draft_model": "dspark", "speculative_algorithm": "ngram"}, "dspark is a dspark drafter"),
        ({"mode": "lag", "confidence_signal": "peak"}, "use auto or head"),
        ({"mode": "lag", "confidence_signal": "drawn"}, "use auto or head"),
        ({"draft_sampling": "sample"}, "never draws"),
    ],
)
def test_what_it_cannot_do_is_refused(fields, named):
    """Each message names the field or what would do."""
    mode = fields.pop("mode", "static") if "mode" in fields else "static"
    with pytest.raises(ConfigError, match=named):
        LLM(models_with("dspark"), speculative=SpeculativeConfig.for_mode(mode, **{"draft_model": "ngram", **fields}),
            max_model_len=64, max_num_seqs=2)  # fmt: skip
