"""What `serving.py` has done where the engine is: in a process of its own, or in a thread beside the server."""

import gc
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from slipstream import LLM, SamplingParams, SpeculativeConfig
from slipstream.lab import machine
from slipstream.lab.measure import former_objects_left_alone, load, positions_needed, token_ids, warm_up
from slipstream.prompts import read_prompts, user
from slipstream.serve.driver import Driver


def cores(named: str | None) -> set[int]:
    """Of "8-15"."""
    if named is None:
        return set()
    first, _, last = named.partition("-")
    return set(range(int(first), int(last or first) + 1))


def texts(options: Namespace) -> list[str]:
    found = read_prompts(options.prompts)
    return [found[i % len(found)] for i in range(options.requests)]


def make(options: Namespace) -> list[LLM]:
    if options.engine_cores:
        os.sched_setaffinity(0, cores(options.engine_cores))
    models = load(options.model, options.draft, {"dtype": options.dtype}, {})
    length = positions_needed(models, [user(text) for text in texts(options)], 2 * options.max_tokens)
    fields = {} if options.verify == "off" else {"draft_model": options.draft}
    speculative = SpeculativeConfig.for_mode(options.verify, **fields)
    return [LLM(models, speculative=speculative, max_num_seqs=options.streams, max_model_len=length)]


def prompts(driver: Driver, options: Namespace) -> list[list[int]]:
    return [token_ids(driver.llm.tokenizer, user(text)) for text in texts(options)]


def provenance(driver: Driver) -> dict[str, Any]:
    return machine.provenance(driver.llm.models.device)


def warmed(driver: Driver, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> None:
    listener, driver.llm.engine.listener = driver.llm.engine.listener, None
    warm_up(driver.llm, [tuple(prompt) for prompt in prompts], params)
    driver.llm.engine.listener = listener


def offline(
    driver: Driver, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> dict[str, float]:  # fmt: skip
    """A wave of `LLM.generate`: seconds and tokens."""
    listener, driver.llm.engine.listener = driver.llm.engine.listener, None
    with former_objects_left_alone():
        answers = driver.llm.generate(prompts, params)
    driver.llm.engine.listener = listener
    timings = [answer.timing for answer in answers]
    seconds = max(t.last_token_s for t in timings) - min(t.submitted_s for t in timings)
    return {"seconds": seconds, "tokens": sum(len(answer.token_ids) for answer in answers)}


def counts(driver: Driver) -> tuple[int, int, float]:
    """Process, steps, and seconds of all its threads."""
    return os.getpid(), driver.llm.engine.num_decode_steps, time.process_time()


def collect(driver: Driver, freeze: bool) -> None:
    """What was there before is left alone by collections of garbage, or not any more."""
    if freeze:
        gc.collect()
        gc.freeze()
    else:
        gc.unfreeze()
