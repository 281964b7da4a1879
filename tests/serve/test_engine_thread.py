"""The engine's thread without HTTP: who gets what, and that nobody is waited for."""

import asyncio
from typing import Any

import pytest

from slipstream.config import SamplingParams
from slipstream.llm import LLM
from slipstream.load import Models
from slipstream.request import Request
from slipstream.serve.desk import Mailbox
from slipstream.serve.engine_thread import EngineThread
from slipstream.serve.metrics import snapshot
from slipstream.serve.problems import Problem
from slipstream.testing import assert_nothing_left
from tests.gpu.test_engine_thread_cuda import answers_of, everything
from tests.serve.conftest import make_llm, slowed

PARAMS = SamplingParams(temperature=1, seed=1, max_tokens=40, ignore_eos=True)


def run(llm: LLM, test: Any) -> None:
    """An async test with a thread, which leaves nothing behind."""

    async def whole() -> None:
        thread = EngineThread(llm)
        try:
            await test(thread)
            assert thread.num_open == 0
        finally:
            await thread.stop()
        assert thread.state == "stopped"

    asyncio.run(whole())
    assert_nothing_left(llm.engine)


@pytest.mark.parametrize("mode", ["off", "static", "lag"])
def test_answers_are_those_of_the_engine(tiny_pair: Models, mode: str) -> None:
    prompts = [f"prompt {number}" for number in range(9)]
    expected = [answer.token_ids for answer in make_llm(tiny_pair, "off").generate(prompts, PARAMS)]
    assert answers_of(make_llm(tiny_pair, mode), prompts, PARAMS) == expected


def test_a_mailbox_is_filled_by_steps_and_emptied_at_once(tiny_pair: Models) -> None:
    async def test(thread: EngineThread) -> None:
        requests, mailbox = thread.llm.prepare("abc", PARAMS), Mailbox(1000)
        thread.submit(requests, mailbox)
        while thread.num_open:
            await asyncio.sleep(0.01)
        deltas = await mailbox.take()
        assert len(deltas) > 1
        assert sum(len(delta.token_ids) for delta in deltas) == 40
        assert deltas[-1].finish_reason == "length"

    run(make_llm(tiny_pair), test)


def test_a_mailbox_that_is_not_emptied_is_closed(tiny_pair: Models) -> None:
    async def test(thread: EngineThread) -> None:
        requests, mailbox = thread.llm.prepare("abc", PARAMS), Mailbox(3)
        others = thread.llm.prepare("def", PARAMS)
        thread.submit(requests, mailbox)
        assert len(await everything(thread, others)) == 40
        while thread.num_open:
            await asyncio.sleep(0.01)
        with pytest.raises(Problem, match="did not take"):
            await mailbox.take()
        while not requests[0].is_finished:
            await asyncio.sleep(0.01)
        assert requests[0].finish_reason == "abort"

    run(make_llm(tiny_pair, "off"), test)


def test_released_requests_are_aborted_wherever_they_are(tiny_pair: Models) -> None:
    async def test(thread: EngineThread) -> None:
        with slowed(thread.llm, 0.01):
            all_requests: list[list[Request]] = []
            for number in range(4):  # two have a slot, one of them has begun
                all_requests.append(thread.llm.prepare(f"prompt {number}", PARAMS))
                thread.submit(all_requests[-1], Mailbox(1000))
            while (await thread.ask(snapshot)).num_waiting != 2:
                await asyncio.sleep(0.01)
            for requests in reversed(all_requests):
                thread.release(requests)
            assert thread.num_open == 0
            now = await thread.ask(snapshot)
        assert (now.num_running, now.num_waiting, now.kv_usage) == (0, 0, 0)
        assert all(requests[0].finish_reason == "abort" for requests in all_requests)

    run(make_llm(tiny_pair, max_num_seqs=2), test)


def test_what_is_asked_is_answered_between_steps_or_raised(tiny_pair: Models) -> None:
    async def test(thread: EngineThread) -> None:
        assert await thread.ask(lambda driver: driver.llm.engine.has_work) is False
        with pytest.raises(ZeroDivisionError):
            await thread.ask(lambda driver: 1 / 0)
        assert thread.is_healthy

    run(make_llm(tiny_pair), test)


def test_stopping_tells_those_who_wait(tiny_pair: Models) -> None:
    llm = make_llm(tiny_pair)

    async def whole() -> None:
        thread, mailbox = EngineThread(llm), Mailbox(1000)
        thread.submit(thread.llm.prepare("abc", PARAMS), mailbox)
        await thread.stop()
        with pytest.raises(Problem, match="shutting down"):
            await mailbox.take()
        thread.submit(thread.llm.prepare("abc", PARAMS), late := Mailbox(1000))
        with pytest.raises(Problem, match="not running"):
            await late.take()

    asyncio.run(whole())
    assert_nothing_left(llm.engine)
