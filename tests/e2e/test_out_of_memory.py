"""A step for which there is no memory: everybody is computed again in smaller steps, and nobody's text shows it."""

import logging
import weakref

import pytest
import torch

from slipstream import engine, scheduler
from slipstream.testing import assert_nothing_left
from tests.e2e.engines import SPECULATING, greedy, make_llm, models_with, plain_answers, prompts_of

PROMPTS = prompts_of(30, 9, 17, 12)
PARAMS = [greedy(14, temperature=t, seed=i) for i, t in enumerate((0.0, 1.0, 0.0, 0.7))]
OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("can't allocate memory: 9 GB"),
)


def limited(llm, most_rows, error=OUT_OF_MEMORY[0]):
    """An engine whose target has memory for so many rows; how often it ran out."""
    verify, failed = llm.engine.target.verify, []

    def with_little_memory(batch, token_ids, shape):
        if len(token_ids) > most_rows:
            failed.append(len(token_ids))
            raise error
        return verify(batch, token_ids, shape)

    llm.engine.target.verify = with_little_memory
    return failed


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("mode", ["off", *SPECULATING])
def test_texts_are_those_of_an_engine_with_enough(mode, overlap, caplog):
    llm = make_llm(mode, models=models_with("dspark"), overlap=overlap, max_num_batched_tokens=64, num_drafts=3)
    failed = limited(llm, 8)
    with caplog.at_level(logging.WARNING):
        answers = llm.generate(PROMPTS, PARAMS)
    assert [answer.token_ids for answer in answers] == plain_answers(PROMPTS, PARAMS)
    assert failed and "max_num_batched_tokens" in caplog.text
    assert_nothing_left(llm.engine)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_whatever_says_so(error):
    llm = make_llm("off", max_num_batched_tokens=64)
    failed = limited(llm, 10, error)
    assert [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)] == plain_answers(PROMPTS, PARAMS)
    assert failed


def test_who_does_not_fit_alone_fails_and_the_engine_goes_on():
    llm = make_llm("static", models=models_with("dspark"), num_drafts=3)
    verify = llm.engine.target.verify
    failed = limited(llm, 0)
    (answer,) = llm.generate(PROMPTS[:1], PARAMS[:1])
    assert (answer.finish_reason, answer.token_ids) == ("error", ())
    assert "no memory" in answer.error
    assert failed == [24, 12, 6, 3, 1]
    assert_nothing_left(llm.engine)
    llm.engine.target.verify = verify
    assert [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)] == plain_answers(PROMPTS, PARAMS)


def test_steps_grow_again(monkeypatch):
    """Twice as large after so many that went well, whoever is served meanwhile."""
    monkeypatch.setattr(scheduler, "STEPS_UNTIL_GROWTH", 10)
    llm = make_llm("off", max_num_batched_tokens=64, prefix_caching=False)
    failed = limited(llm, 20)
    llm.generate(PROMPTS, PARAMS)
    assert failed == [64, 32]
    assert llm.engine.scheduler._most_given == 32
    llm.generate(PROMPTS[:2], PARAMS[:2])
    assert failed == [64, 32, 32] and llm.engine.scheduler._most_given == 32


def test_a_lack_of_memory_while_results_are_committed_is_an_error():
    """Half of a step may be committed: nobody can be computed again from there."""
    llm = make_llm("off")
    llm.engine.policy.learn = lambda *known: (_ for _ in ()).throw(MemoryError())
    with pytest.raises(MemoryError):
        llm.generate(PROMPTS, PARAMS)
    assert_nothing_left(llm.engine)


def test_what_a_step_had_made_is_let_go_before_memory_is_given_back(monkeypatch):
    llm, made, left = make_llm("off"), [], []
    verify = llm.engine.target.verify

    def without_memory_at_first(batch, token_ids, shape):
        if not made:
            activations = token_ids.clone()
            made.append(weakref.ref(activations))
            raise OUT_OF_MEMORY[0]
        return verify(batch, token_ids, shape)

    llm.engine.target.verify = without_memory_at_first
    monkeypatch.setattr(engine, "release_cached", lambda device: left.append(made[0]()))
    llm.generate(PROMPTS, PARAMS)
    assert left == [None]


def test_other_errors_are_not_taken_for_it():
    llm = make_llm("off")
    failed = limited(llm, 0, RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal"):
        llm.generate(PROMPTS, PARAMS)
    assert len(failed) == 1
