"""Several answers to one prompt: siblings differ, and each is what its own seed gives alone, in every mode."""

import dataclasses

import pytest

from slipstream import SamplingParams
from slipstream.errors import CapacityError
from slipstream.llm import LLM, usage_of
from slipstream.request import sibling_seed
from slipstream.testing import assert_nothing_left
from tests.e2e.engines import (
    SPECULATING,
    ScriptedDrafter,
    greedy,
    known,
    make_llm,
    models_with,
    pool_bytes,
    prompts_of,
)

PROMPTS = prompts_of(5, 9)
LOOPS = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
MODES = pytest.mark.parametrize("mode", ["off", *SPECULATING])
HOT = SamplingParams(temperature=2.0, max_tokens=14, ignore_eos=True)


def hot(**fields) -> SamplingParams:
    return dataclasses.replace(HOT, **fields)


def llm_for(mode, **options):
    scripted = None
    if mode != "off":
        scripted = ScriptedDrafter(known(PROMPTS, greedy(14)), wrong=lambda position: position % 3 == 0)
    return make_llm(mode, scripted, **options)


def ids(answers):
    return [answer.token_ids for answer in answers]


@LOOPS
@MODES
def test_siblings_are_the_answers_of_their_seeds_alone(mode, overlap):
    llm, plain = llm_for(mode, overlap=overlap), make_llm("off")
    answers = llm.generate(PROMPTS, [hot(n=4, seed=11), hot(n=3, seed=-5)])
    assert [answer.index for answer in answers] == [0, 1, 2, 3, 0, 1, 2]
    alone = [
        plain.generate([prompt], hot(seed=sibling_seed(seed, index)))[0].token_ids
        for prompt, seed, count in zip(PROMPTS, (11, -5), (4, 3), strict=True)
        for index in range(count)
    ]
    assert ids(answers) == alone
    assert len(set(alone)) == 7
    assert [answer.prompt_tokens for answer in answers] == [5] * 4 + [9] * 3
    assert usage_of(answers[:4]) == {"prompt_tokens": 5, "completion_tokens": 4 * 14}
    assert usage_of([]) == {"prompt_tokens": 0, "completion_tokens": 0}
    assert_nothing_left(llm.engine)


@pytest.mark.parametrize("mode", ["off", "lag"])
def test_unseeded_siblings_differ(mode):
    llm = llm_for(mode)
    first, second = (ids(llm.generate([PROMPTS[0]], hot(n=5))) for _ in range(2))
    assert len({*first, *second}) == 10
    again = [ids(LLM(models_with(), seed=3).generate(PROMPTS, hot(n=2))) for _ in range(2)]
    assert again[0] == again[1]


def test_one_answer_is_as_it_was():
    """n = 1 draws the same seeds from the engine's own as a build without siblings."""
    plain, seeded = LLM(models_with(), seed=3), LLM(models_with(), seed=3)
    assert ids(plain.generate(PROMPTS, hot())) == ids(seeded.generate(PROMPTS, hot(n=2)))[::2]
    (answer,) = plain.generate([PROMPTS[0]], hot(seed=4))
    assert (answer.index, answer.token_ids) == (0, seeded.generate([PROMPTS[0]], hot(seed=4, n=3))[0].token_ids)


def test_greedy_siblings_are_equal():
    assert len(set(ids(make_llm("off").generate([PROMPTS[0]], greedy(9, n=3))))) == 1


@LOOPS
@MODES
def test_a_stream_of_siblings(mode, overlap):
    """Chunks in turn, each with the index of its answer; one may end before the others."""
    llm = llm_for(mode, overlap=overlap, max_num_seqs=2)
    params = hot(n=3, seed=2, stop="t4")
    answers = llm.generate([PROMPTS[0]], params)
    chunks = list(llm.stream(PROMPTS[0], params))
    for answer in answers:
        mine = [chunk for chunk in chunks if chunk.index == answer.index]
        assert tuple(token for chunk in mine for token in chunk.token_ids) == answer.token_ids
        assert "".join(chunk.text for chunk in mine) == answer.text
        assert (mine[-1].finish_reason, mine[-1].stop_reason) == (answer.finish_reason, answer.stop_reason)
    stream = llm.stream(PROMPTS[0], params)
    next(stream)
    stream.close()
    assert_nothing_left(llm.engine)


def test_siblings_that_do_not_fit_leave_nothing():
    llm = make_llm("off", kv_memory=pool_bytes(2, make_llm("off")))
    with pytest.raises(CapacityError, match="kv_memory"):
        llm.generate([PROMPTS[0]], hot(n=3, max_tokens=20))
    with pytest.raises(CapacityError, match="kv_memory"):
        list(llm.stream(PROMPTS[0], hot(n=3, max_tokens=20)))
    assert_nothing_left(llm.engine)
