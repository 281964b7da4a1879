"""What a model's files may ask of the engine: short drafters, reduced and padded vocabularies, windows, signals.

Whatever it is, the text is that of plain decoding, and drafts are tokens that the target knows.
"""

from functools import cache

import pytest
import torch

from slipstream.llm import LLM
from slipstream.load import Models
from slipstream.testing import assert_nothing_left, tiny_models, tiny_spec, tiny_tokenizer
from tests.e2e.engines import Spy, greedy, make_llm, prompts_of
from tests.lossless.laws import dense

MODES = pytest.mark.parametrize("mode", ["static", "lag-budget"])
PROMPTS = prompts_of(5, 17, 9)
REDUCED = torch.tensor([0, 2, 3, 5, 7, 8, 11, 12, 15, 16, 18, 19])  # target ids that can be drafted


def reduced(algorithm):
    models = tiny_models(algorithm, spec=tiny_spec(vocab_size=20), draft_vocab_size=len(REDUCED))
    models.network.set_draft_vocabulary(REDUCED)
    models.network.share(models.target)
    return models


def padded(algorithm):
    """A table of 32 rows of which the tokenizer knows 20; the padding would win every argmax."""
    models = tiny_models(algorithm, spec=tiny_spec(vocab_size=32, tie_word_embeddings=False))
    with torch.no_grad():
        models.target.head_weight[20:] = 40 * models.target.head_weight[:12]
    if models.network is not None:
        models.network.share(models.target)
    return Models(models.target, tiny_tokenizer(20), models.network, "tiny", algorithm, None)


def windowed(algorithm):
    """Target and drafter with a sliding layer of 8 and a full one."""
    layers = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    spec = tiny_spec("qwen3", vocab_size=20, use_sliding_window=True, **layers)
    return tiny_models(algorithm, spec=spec, use_sliding_window=True, **layers)


MODELS = {
    "reduced draft vocabulary": reduced,
    "padded vocabulary": padded,
    "windows": windowed,
    "a drafter of 24 positions": lambda algorithm: tiny_models(
        algorithm, spec=tiny_spec(vocab_size=20), max_position_embeddings=24
    ),
    "a gated head": lambda algorithm: tiny_models(algorithm, spec=tiny_spec(vocab_size=20), markov_head_type="gated"),
    "an rnn head": lambda algorithm: tiny_models(algorithm, spec=tiny_spec(vocab_size=20), markov_head_type="rnn"),
}
CASES = [
    (name, algorithm)
    for name in MODELS
    for algorithm in ("dspark", "dflash")
    if "head" not in name or algorithm == "dspark"
]


@cache
def models_of(name, algorithm):
    return MODELS[name](algorithm)


def params_for(temperature):
    return [greedy(14, temperature=temperature, top_p=0.95, seed=i) for i in range(len(PROMPTS))]


@cache
def plain(name, algorithm, temperature):
    llm = LLM(models_of(name, algorithm), max_model_len=128, page_size=8)
    return [answer.token_ids for answer in llm.generate(PROMPTS, params_for(temperature))]


@pytest.mark.parametrize(("name", "algorithm"), CASES)
@MODES
def test_the_text_is_that_of_plain_decoding(mode, name, algorithm):
    llm = make_llm(mode, models=models_of(name, algorithm), learns=True)
    spy = Spy(llm)
    for temperature in (0.0, 1.0):
        answers = llm.generate(PROMPTS, params_for(temperature))
        assert [answer.token_ids for answer in answers] == plain(name, algorithm, temperature)
    drafts = {
        token for step in spy.steps if step.draft is not None for token in step.draft.token_ids.flatten().tolist()
    }
    assert len(drafts) > 3
    assert drafts <= (set(REDUCED.tolist()) if name == "reduced draft vocabulary" else set(range(20)))
    if name == "a drafter of 24 positions":
        ends = [(int(step.plan.context_upper_bound_np[row]), int(step.plan.caps_np[row]))
                for step in spy.steps for row in range(step.plan.num_decode)]  # fmt: skip
        assert all(cap == 0 for bound, cap in ends if bound + 4 + 1 > 24)
        assert any(cap for bound, cap in ends)
    assert_nothing_left(llm.engine)


@pytest.mark.parametrize("name", ["reduced draft vocabulary", "padded vocabulary"])
@MODES
def test_rejection_keeps_to_the_vocabulary(mode, name):
    llm = make_llm(mode, models=models_of(name, "dspark"), acceptance="rejection", learns=True)
    spy = Spy(llm)
    answers = llm.generate(PROMPTS, params_for(1.0))
    assert {token for answer in answers for token in answer.token_ids} <= set(range(20))
    for step in spy.steps:
        if step.draft is not None:
            reduced = name == "reduced draft vocabulary"
            assert step.draft.law.logits.shape[-1] == (len(REDUCED) if reduced else 20)
            prob = dense(step.draft.law, step.draft.token_ids, 20)
            if reduced:
                others = [token for token in range(20) if token not in REDUCED.tolist()]
                assert not prob[..., others].any()


@pytest.mark.parametrize("name", ["reduced draft vocabulary", "padded vocabulary", "windows"])
@pytest.mark.parametrize("signal", ["peak", "drawn"])
def test_signals_are_probabilities_of_the_draft(signal, name):
    """Read from the very distribution that rejection keeps; a greedy request's at temperature 1."""
    llm = make_llm("lag", models=models_of(name, "dspark"), acceptance="rejection")
    llm.engine.policy._signal = signal
    spy = Spy(llm)
    llm.generate(PROMPTS, [greedy(10, temperature=0.7, seed=i) for i in range(3)])
    drafted = [step.draft for step in spy.steps if step.draft is not None]
    assert drafted
    for draft in drafted:
        prob = dense(draft.law, draft.token_ids, 20)
        best, drawn = prob.amax(-1), prob.gather(-1, draft.token_ids[..., None])[..., 0]
        torch.testing.assert_close(draft.signal, best if signal == "peak" else drawn, atol=1e-5, rtol=1e-5)
