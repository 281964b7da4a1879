"""An engine in a process of its own on a GPU, where it records its graphs. Needs none of the server's libraries."""

import asyncio

import pytest

from slipstream.config import SamplingParams, SpeculativeConfig
from slipstream.decide.make import make_policy
from slipstream.llm import LLM
from slipstream.serve.engine_process import EngineProcess
from slipstream.serve.options import ServeOptions
from slipstream.testing import tiny_models, tiny_spec
from tests.gpu.test_engine_thread_cuda import everything
from tests.lossless.harness import on, scripted_cost


def make(mode: str, device: str) -> list[LLM]:
    models = on(device, tiny_models("dspark", spec=tiny_spec(vocab_size=20)))
    speculative, policy = SpeculativeConfig.for_mode(mode, **({} if mode == "off" else {"draft_model": "tiny"})), None
    if mode.startswith("lag"):  # else what steps cost would be measured
        policy, _ = make_policy(speculative, num_drafts=7, has_head=True, cost=scripted_cost())
    return [LLM(models, speculative=speculative, policy=policy, max_num_seqs=8)]


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "device"), [("off", "cuda"), ("lag", "cuda")])
def test_a_process_gives_the_same_answers(mode: str, device: str) -> None:
    prompts = [[3 + number, 5, 7, 9] for number in range(12)]
    params = SamplingParams(temperature=1, seed=1, max_tokens=40, ignore_eos=True)
    expected = [answer.token_ids for answer in make(mode, device)[0].generate(prompts, params)]
    process = EngineProcess(make, mode, device, options=ServeOptions())

    async def ask() -> list[tuple[int, ...]]:
        (engine,) = process.start(ServeOptions(), lambda: None)
        requests = [engine.host.prepare(prompt, params) for prompt in prompts]
        answers = await asyncio.gather(*(everything(engine, each) for each in requests))
        await engine.stop()
        return list(answers)

    try:
        assert asyncio.run(ask()) == expected
    finally:
        process.close()
