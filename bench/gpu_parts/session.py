"""Models, engines and waves that the phases of bench/gpu.py share. An engine is made when a phase first asks for it.

Engines are the public `LLM`; the pruning modes of one S take turns on one of them, by exchanging its policy, since every
engine captures its graphs anew. A wave is all requests once, at a fixed concurrency. Nothing here knows a goal.
"""

import copy
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bench.gpu_parts.scale import Pair
from slipstream import LLM, SamplingParams, SpeculativeConfig
from slipstream.decide.calibration import find_calibration
from slipstream.decide.make import make_policy
from slipstream.device.events import NullRecorder, Span
from slipstream.lab.bench_options import Case
from slipstream.lab.critical_path import critical_path, host_us, stage_ms
from slipstream.lab.measure import former_objects_left_alone
from slipstream.lab.report import Settings, bench_row
from slipstream.lab.waves import Answer, Wave, ttft_in_turn_ms
from slipstream.llm import Completion
from slipstream.load import Models
from slipstream.models.headers import weights_digest

PRUNING = ("adaptive", "lag", "lag-budget")
WARM_UP_TOKENS = 8
Ids = Sequence[int]


def tokens(count: int, ignore_eos: bool = True) -> SamplingParams:
    """Greedy, `count` tokens, at most that many where ends count."""
    return SamplingParams(max_tokens=count, ignore_eos=ignore_eos)


class Clock:
    """What is left of a phase's time. A phase always does the first round of what it measures, and no other once over."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds
        self.skipped: list[str] = []

    def allows(self, what: str, needs_s: float = 0.0) -> bool:
        """Whether there is time for one thing more; what there is not is written down."""
        if time.perf_counter() < self._end - needs_s:
            return True
        self.skipped.append(what)
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One wave, and the spans that were recorded if it was probed."""

    wave: Wave
    completions: tuple[Completion, ...]
    stages: dict[str, float | None] = field(default_factory=dict)


class Session:
    """One pair of target and drafter, and its engines."""

    def __init__(self, pair: Pair, say: Callable[[str], None]) -> None:
        self.pair = pair
        self.say = say
        self.seconds: dict[str, float] = {}  # what starting took
        self._models: Models | None = None
        self._llms: dict[tuple[str, int, int], LLM] = {}
        self._policies: dict[tuple[int, str, bool], Any] = {}

    @property
    def models(self) -> Models:
        if self._models is None:
            with self._timed("load"):
                self._models = self.pair.load()
        return self._models

    def llm(self, mode: str, drafts: int, slots: int, pinned: bool = False) -> LLM:
        """The engine with `slots` slots that serves `mode`, its policy in place.

        pinned: every step drafts S tokens, whatever the policy has learnt. A random drafter is never right, and nothing
        would be drafted soon.
        """
        group = mode if mode not in PRUNING else "pruning"
        key = (group, drafts if group != "off" else 0, slots)
        if key not in self._llms:
            self._llms[key] = self._start(mode if group != "pruning" else "lag", drafts, slots)
        llm = self._llms[key]
        if group == "pruning":
            llm.engine.policy = self._policy(llm, mode, drafts, pinned)
            llm.speculative = self._config(mode, drafts)
            llm.facts = replace(llm.facts, speculative=llm.speculative)
        return llm

    def close(self) -> None:
        """Give the engines' memory back; the weights stay."""
        self._llms.clear()
        self._policies.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _start(self, mode: str, drafts: int, slots: int) -> LLM:
        models = self.models
        name = f"start {mode} S={drafts} at {slots}" if mode != "off" else f"start off at {slots}"
        self.say(f"{self.pair.name}: {name}")
        with self._timed(name):
            llm = LLM(
                models,
                speculative=self._config(mode, drafts),
                max_num_seqs=slots,
                max_model_len=self.pair.max_model_len,
                prefix_caching=False,
            )
        llm.generate(self.pair.prompts(models, slots), tokens(WARM_UP_TOKENS))
        return llm

    def _config(self, mode: str, drafts: int) -> SpeculativeConfig:
        if mode == "off":
            return SpeculativeConfig()
        fields = {"cost_model": self.pair.cost_model} if mode in PRUNING else {}
        return SpeculativeConfig.for_mode(mode, draft_model=self.pair.draft, num_speculative_tokens=drafts, **fields)

    def _policy(self, llm: LLM, mode: str, drafts: int, pinned: bool) -> Any:
        key = (id(llm), mode, pinned)
        if key not in self._policies:
            own, folder = llm.engine.policy, self.models.drafter_path
            calibration = find_calibration(None, folder)
            policy, _ = make_policy(
                self._config(mode, drafts), num_drafts=drafts, has_head=llm.engine.drafter.has_confidence_head,
                cost=copy.deepcopy(own.cost), calibration=calibration,
                weights=weights_digest(folder) if calibration and folder else None,
            )  # fmt: skip
            if pinned:
                policy.draft_length = lambda plan: drafts if plan.num_decode else 0
            self._policies[key] = policy
        return self._policies[key]

    @contextmanager
    def _timed(self, name: str):
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin


def serve(llm: LLM, prompts: Sequence[Ids], params: SamplingParams, concurrency: int, probe: bool = False) -> Served:
    """All prompts once, texts included, `concurrency` at a time: one group after the other where the engine has more slots.

    probe: as many prompts as run at a time; spans are those of `while_all_run`.
    """
    recorder = llm.record() if probe else None
    before, completions, wall_s = llm.engine.num_decode_steps, [], 0.0
    size = len(prompts) if concurrency >= llm.engine.scheduler.limits.max_num_seqs else concurrency
    for first in range(0, len(prompts), size):
        with former_objects_left_alone():
            begin = time.perf_counter()
            completions += llm.generate(list(prompts[first : first + size]), params)
            wall_s += time.perf_counter() - begin
    first_token_ms = ttft_in_turn_ms([c.timing for c in completions], concurrency)
    answers = tuple(
        Answer(token_ids=c.token_ids, spec=c.spec, ttft_ms=ttft, tpot_ms=c.timing.tpot_ms)
        for c, ttft in zip(completions, first_token_ms, strict=True)
    )
    num_steps = llm.engine.num_decode_steps - before
    wave = Wave(wall_s=wall_s, num_steps=num_steps, answers=answers)
    if recorder is None:
        return Served(wave=wave, completions=tuple(completions))
    spans = while_all_run(recorder.spans, completions)
    unprobe(llm)
    stages = {
        "draft_ms": stage_ms(spans, "draft"), "verify_ms": stage_ms(spans, "verify"),
        "accept_ms": stage_ms(spans, "accept"), "host_us": host_us(spans), "detokenise_us": detokenise_us(llm, num_steps, completions),
    }  # fmt: skip
    return Served(wave=replace(wave, critical_path=critical_path(spans)), completions=tuple(completions), stages=stages)


def while_all_run(spans: Sequence[Span], completions: Sequence[Completion]) -> list[Span]:
    """Spans of the steps from when every request has its first token until one ends.

    Answers of one length end at different steps where drafts are accepted, and what comes then is no longer a step of so
    many requests.
    """
    begin_s = max(c.timing.first_token_s for c in completions)
    end_s = min(c.timing.last_token_s for c in completions)
    outside = {span.step for span in spans if span.start_s < begin_s or span.end_s > end_s}
    return [span for span in spans if span.step not in outside]


def detokenise_us(llm: LLM, num_steps: int, completions: Sequence[Completion]) -> float:
    """Making text of all answers, per step."""
    begin = time.perf_counter()
    for completion in completions:
        llm.tokenizer.decode(completion.token_ids)
    return 1e6 * (time.perf_counter() - begin) / max(1, num_steps)


def unprobe(llm: LLM) -> None:
    """Back to recording nothing."""
    llm.engine.recorder = NullRecorder()


def row(
    session: Session, mode: str, drafts: int, concurrency: int, served: Sequence[Served], plain: Sequence[Served] = (),
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """A row as `slipstream bench` reports it, and what stages took where they were probed."""
    case = Case(mode=mode, num_speculative_tokens=drafts if mode != "off" else None, concurrency=concurrency)
    dtype = str(session.models.dtype).removeprefix("torch.")
    settings = Settings(prompts=session.pair.prompts_name, dtype=dtype, acceptance="coupled", temperature=0.0)
    waves, off = [s.wave for s in served], [s.wave for s in plain]
    return {"model": session.pair.name, **bench_row(case, settings, None, waves, off), **served[0].stages, **more}


@contextmanager
def slow_decisions(llm: LLM, seconds: float):
    """Every decision takes this much longer."""
    policy, decide = llm.engine.policy, llm.engine.policy.decide

    def slow(plan: Any) -> Any:
        time.sleep(seconds)
        return decide(plan)

    policy.decide = slow
    try:
        yield
    finally:
        del policy.decide
