"""Positions: models that claim millions of them, contexts up to the limit, drafters that end before."""

import pytest

from slipstream.llm import LLM
from slipstream.models import layers
from slipstream.sizes import weight_bytes
from slipstream.testing import assert_nothing_left, tiny_models, tiny_spec
from tests.e2e.engines import SPECULATING, VOCAB, greedy, make_llm, prompts_of

LENGTH = 128
PROMPTS = prompts_of(100, 60, 7)
PARAMS = [greedy(27, temperature=t, seed=i) for i, t in enumerate((0.0, 1.0, 0.7))]


def models_of(claimed, **drafter):
    return tiny_models("dspark", spec=tiny_spec(vocab_size=VOCAB, max_position_embeddings=claimed), **drafter)


def ids(answers):
    return [answer.token_ids for answer in answers]


def test_a_claim_of_millions_costs_nothing_until_it_is_used(monkeypatch):
    monkeypatch.setattr(layers, "FIRST_POSITIONS", 16)
    models = models_of(1 << 22, max_position_embeddings=1 << 22)
    assert weight_bytes(models.target, models.network) < 1 << 20
    llm = make_llm("static", models=models, num_drafts=4, max_model_len=LENGTH)
    rows = [len(network.rotary.cos_sin) for network in (models.target, models.network)]
    assert rows == [LENGTH + 4 + 1] * 2
    longer = LLM(models, max_model_len=2 * LENGTH)  # over the same weights; the first one goes on with its table
    assert len(models.target.rotary.cos_sin) == 2 * LENGTH + 1
    assert ids(llm.generate(PROMPTS, PARAMS)) == ids(longer.generate(PROMPTS, PARAMS))


@pytest.mark.parametrize("mode", ["off", *SPECULATING])
def test_contexts_run_up_to_the_last_position(mode, monkeypatch):
    """Prompt and answer fill max_model_len, drafts end with it, and texts are those of a table that was whole."""
    plain = ids(LLM(models_of(LENGTH), max_model_len=LENGTH, page_size=8).generate(PROMPTS, PARAMS))
    monkeypatch.setattr(layers, "FIRST_POSITIONS", 16)
    models = models_of(1 << 22, max_position_embeddings=1 << 22)
    llm = make_llm(mode, models=models, num_drafts=5, max_model_len=LENGTH)
    params = [*PARAMS, greedy(LENGTH - 100)]
    answers = llm.generate([*PROMPTS, PROMPTS[0]], params)
    assert ids(answers)[:3] == plain
    assert len(answers[3].token_ids) == LENGTH - 100
    assert_nothing_left(llm.engine)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_drafter_that_knows_fewer_positions_drafts_within_them(acceptance):
    """Beyond them requests go on without drafts; tables are as long as the drafter's own limit."""
    models = models_of(1 << 22, max_position_embeddings=40)
    llm = make_llm("static", models=models, num_drafts=4, max_model_len=LENGTH, acceptance=acceptance)
    params = [greedy(27, seed=i) for i in range(3)]
    plain = ids(LLM(models_of(LENGTH), max_model_len=LENGTH, page_size=8).generate(PROMPTS, params))
    answers = llm.generate(PROMPTS, params)
    assert ids(answers) == plain
    assert len(models.network.rotary.cos_sin) == 40
    assert [answer.spec.verified > 0 for answer in answers] == [False, False, True]
