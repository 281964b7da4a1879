"""Requests served to be measured: models as options name them, room for the prompts, a timed wave, seeds.

What `bench`, `evaluate` and `traces` share. Knows no case and no table; what a wave says is counted in `waves`.
"""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from slipstream.config import SamplingParams
from slipstream.errors import ConfigError
from slipstream.lab.critical_path import critical_path
from slipstream.lab.waves import NO_CRITICAL_PATH, Answer, Wave, ttft_in_turn_ms
from slipstream.llm import LLM, Completion
from slipstream.load import Models, load_models
from slipstream.models.tokenizer import Tokenizer
from slipstream.prompts import Prompt

WARM_UP_TOKENS = 8
WEIGHT_FIELDS = frozenset({"dtype", "device"})  # of EngineConfig: they say how weights are loaded


def load(model: str, draft: str | None, engine: Mapping[str, Any], speculative: Mapping[str, Any]) -> Models:
    """The models, as the fields of EngineConfig and SpeculativeConfig that concern weights ask for them."""
    kinds = {name: str(value) for name, value in engine.items() if name in WEIGHT_FIELDS}
    return load_models(model, draft, layout=speculative.get("draft_layout", "auto"), **kinds)


def sizes(models: Models, prompts: Sequence[Prompt], max_tokens: int, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of EngineConfig: what was asked for, and room for the longest request unless that was asked for too.

    Unless it is asked for, prefixes are not cached: a prompt costs the same in every wave.
    """
    asked = {name: value for name, value in engine.items() if name not in WEIGHT_FIELDS}
    return {"max_model_len": positions_needed(models, prompts, max_tokens), "prefix_caching": False, **asked}


def positions_needed(models: Models, prompts: Sequence[Prompt], max_tokens: int) -> int:
    """Room for the longest request and a block beyond it, so that small benches do not reserve a whole context."""
    longest = max(len(token_ids(models.tokenizer, prompt)) for prompt in prompts)
    return min(longest + max_tokens + 32, models.target.spec.max_position_embeddings)


def warm_up(llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams] | None = None) -> LLM:
    """As many requests as run at a time: its first steps, and the cost model if it makes one, are not timed.

    They are greedy ones, without params.
    """
    at_once = llm.engine.scheduler.limits.max_num_seqs
    given = [SamplingParams()] * len(prompts) if params is None else params
    short = [replace(p, max_tokens=min(WARM_UP_TOKENS, p.max_tokens), min_tokens=0) for p in given[:at_once]]
    answer(llm, prompts[:at_once], short)
    return llm


def answer(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
) -> tuple[Completion, ...]:
    """Answers in the order of the prompts; conversations become tokens here, as in `LLM.chat`."""
    return tuple(llm.generate([token_ids(llm.tokenizer, prompt) for prompt in prompts], params))


def token_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Of a conversation through the chat template; a prompt of token ids is taken as it is."""
    return list(prompt) if isinstance(prompt, tuple) else tokenizer.encode(tokenizer.chat(prompt))


@contextmanager
def former_objects_left_alone() -> Iterator[None]:
    """Timing without full garbage collections of all that was there before, unless the caller sees to that.

    They walk over everything that was ever imported, for longer than a hundred steps of a small model take.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def sampling_facts(sampling: SamplingParams) -> dict[str, Any]:
    """For reports: what most people ask about, and whatever else was asked for."""
    plain = SamplingParams()
    usual = ("max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos")
    return {
        f.name: getattr(sampling, f.name)
        for f in fields(sampling)
        if f.name in usual or getattr(sampling, f.name) != getattr(plain, f.name)
    }


def request_params(sampling: SamplingParams, count: int) -> list[SamplingParams]:
    """The same for all, but each request with a seed of its own, equal in every mode and wave. One answer each."""
    if sampling.n > 1:
        raise ConfigError(
            f"n is {sampling.n}: what is measured is one answer to a prompt; ask for more prompts instead"
        )
    seed = sampling.seed or 0
    return [replace(sampling, seed=seed + index) for index in range(count)]


def run_wave(
    llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams], probe: bool = False
) -> tuple[Wave, tuple[Completion, ...]]:
    """All requests once, at most `max_num_seqs` at a time."""
    recorder = llm.record() if probe else None  # a new one, empty
    steps_before = llm.engine.num_decode_steps
    with former_objects_left_alone():
        completions = answer(llm, prompts, params)
    wall_s = time.perf_counter() - min(c.timing.submitted_s for c in completions)  # texts are made by now
    first_token_ms = ttft_in_turn_ms([c.timing for c in completions], llm.engine.scheduler.limits.max_num_seqs)
    answers = tuple(
        Answer(token_ids=tuple(c.token_ids), spec=c.spec, ttft_ms=ttft, tpot_ms=c.timing.tpot_ms)
        for c, ttft in zip(completions, first_token_ms, strict=True)
    )
    wave = Wave(
        wall_s=wall_s,
        num_steps=llm.engine.num_decode_steps - steps_before,
        answers=answers,
        critical_path=critical_path(recorder.spans) if recorder else NO_CRITICAL_PATH,
    )
    return wave, completions
