"""An engine that is stepped by a thread of its own on a GPU: streams and graphs were made by another one.

Needs none of the server's libraries. `tests/serve/test_engine_thread.py` takes its tools from here.
"""

import asyncio
from collections.abc import Sequence

import pytest

from slipstream.config import SamplingParams, SpeculativeConfig
from slipstream.decide.make import make_policy
from slipstream.llm import LLM
from slipstream.request import Request
from slipstream.serve.desk import Desk, Mailbox
from slipstream.serve.engine_thread import EngineThread
from slipstream.testing import assert_nothing_left, tiny_models, tiny_spec
from tests.lossless.harness import on, scripted_cost


async def everything(thread: Desk, requests: Sequence[Request]) -> tuple[int, ...]:
    """The tokens of an only answer."""
    mailbox = Mailbox(1000)
    thread.submit(requests, mailbox)
    token_ids: tuple[int, ...] = ()
    while True:
        for delta in await mailbox.take():
            token_ids += delta.token_ids
            if delta.finish_reason is not None:
                return token_ids


def answers_of(llm: LLM, prompts: Sequence[str | Sequence[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    """Of all prompts at once, through a thread."""

    async def ask() -> list[tuple[int, ...]]:
        thread = EngineThread(llm)
        answers = await asyncio.gather(*(everything(thread, llm.prepare(prompt, params)) for prompt in prompts))
        await thread.stop()
        return list(answers)

    answers = asyncio.run(ask())
    assert_nothing_left(llm.engine)
    return answers


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["off", "static", "lag", "lag-budget"])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_thread_gives_the_same_answers(mode: str, restarted: bool) -> None:
    models = on("cuda", tiny_models("dspark", spec=tiny_spec(vocab_size=20)))
    speculative, policy = SpeculativeConfig.for_mode(mode, **({} if mode == "off" else {"draft_model": "tiny"})), None
    if mode.startswith("lag"):  # else what steps cost would be measured
        policy, _ = make_policy(speculative, num_drafts=7, has_head=True, cost=scripted_cost())
    prompts = [[3 + number, 5, 7, 9] for number in range(12)]
    params = SamplingParams(temperature=1, seed=1, max_tokens=40, ignore_eos=True)
    llm = LLM(models, speculative=speculative, policy=policy, max_num_seqs=8)
    expected = [answer.token_ids for answer in llm.generate(prompts, params)]
    if restarted:
        llm.restart()
    assert answers_of(llm, prompts, params) == expected
