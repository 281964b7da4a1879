"""Modes side by side on the same requests: one process, one set of weights, taking turns wave by wave.

A case is (mode, S, concurrency); each has its own engine over shared weights. Ceilings are measured first. Knows nothing
of flags or terminals: `slipstream bench` and the demo make the options and show what comes back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from slipstream.backends import Adapt
from slipstream.config import SamplingParams
from slipstream.decide.policy import Policy
from slipstream.device.events import Span
from slipstream.errors import ConfigError
from slipstream.lab import ceilings, machine
from slipstream.lab.bench_options import BenchOptions, Case, Replay
from slipstream.lab.dense import DenseTrace
from slipstream.lab.measure import load, request_params, run_wave, sizes, warm_up
from slipstream.lab.replay import replay, replay_requests
from slipstream.lab.report import Settings, bench_row, ceiling_line, row_key
from slipstream.lab.variants import is_variant, variant
from slipstream.lab.waves import Wave
from slipstream.llm import LLM, Completion
from slipstream.load import Models
from slipstream.prompts import MadeUp, Prompt, prompts_name, read_prompts, user
from slipstream.rehearse import time_step

Watch: TypeAlias = Callable[[str, Sequence[Span]], None]  # (label of a case, spans of its wave)

PROBED_EACH = 2  # requests of every slot, in a wave that is probed
STEP_CONTEXT = 192  # tokens of KV of the steps that are timed alone


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    report: dict[str, Any]  # what `--json` prints
    cases: tuple[Case, ...]
    completions: tuple[tuple[Completion, ...], ...]  # of each case, from its first wave


def run(
    options: BenchOptions, say: Callable[[str], None], watch: Watch | None = None, models: Models | None = None
) -> BenchResult:
    """Measure all cases; `say` gets one line per thing done, `watch` the spans of every case's probed wave.

    models: those that `options` name, where somebody has loaded them before.
    """
    return run_all([options], say, watch, models)[0]


def run_all(
    several: Sequence[BenchOptions], say: Callable[[str], None], watch: Watch | None = None,
    models: Models | None = None,
) -> list[BenchResult]:  # fmt: skip
    """Benches that differ in their requests, one after another by the same engines, which are started once."""
    first = several[0]
    texts = [read_requests(options) for options in several]
    trace = read_trace([options.replay for options in several if options.replay])
    models = models or load(first.model, first.draft, first.engine, first.speculative)
    loads = [
        wave_load(options, its, models) if trace is None else replayed_load(options, trace, models)
        for options, its in zip(several, texts, strict=True)
    ]
    served_by = start_all(models, first.cases(), first, joined(loads), say)
    found = {**ceilings.ceilings(models.target), **step_times([llm for llm, _ in served_by])}
    say(ceiling_line(found))
    results = []
    for options, served in zip(several, loads, strict=True):
        rows, completions = measure(options, models, served, served_by, say, watch)
        report = make_report(options, models, found, rows)
        results.append(BenchResult(report=report, cases=tuple(first.cases()), completions=completions))
    return results


def measure(
    options: BenchOptions, models: Models, served: "Load", served_by: Sequence[tuple[LLM, Policy]],
    say: Callable[[str], None], watch: Watch | None,
) -> tuple[list[dict[str, Any]], tuple[tuple[Completion, ...], ...]]:  # fmt: skip
    """The rows of all cases, and what each answered in its first wave.

    A probed wave comes after all others and says nothing of speed: recording takes time of the host, of which a small
    model has none to spare.
    """
    cases = options.cases()
    waves: list[list[Wave]] = [[] for _ in cases]
    first: list[tuple[Completion, ...]] = []
    for number in range(options.waves):
        for index, (case, (llm, policy)) in enumerate(zip(cases, served_by, strict=True)):
            llm.engine.policy = policy
            wave, completions = run_wave(llm, served.prompts, served.params)
            waves[index].append(wave)
            if number == 0:
                first.append(completions)
            say(f"wave {number + 1}/{options.waves}  {options.label(case)}: {wave.tok_per_s:.1f} tok/s")
    watched = [
        probe(options, case, llm, policy, served, watch) if options.probe else None
        for case, (llm, policy) in zip(cases, served_by, strict=True)
    ]
    llms = [llm for llm, _ in served_by]
    return make_rows(options, models, cases, llms, waves, watched), tuple(first)


def probe(options: BenchOptions, case: Case, llm: LLM, policy: Policy, served: "Load", watch: Watch | None) -> Wave:
    """One wave more, of a few requests for each slot, with every stage recorded."""
    llm.engine.policy, count = policy, PROBED_EACH * case.concurrency
    wave, _ = run_wave(llm, served.prompts[:count], served.params[:count], probe=True)
    if watch is not None:
        watch(options.label(case), llm.engine.recorder.spans)
    llm.stop_recording()
    return wave


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What every wave serves."""

    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]  # one each
    adapt: Adapt | None = None  # what the engines are wrapped in

    @property
    def max_tokens(self) -> int:
        return max(params.max_tokens for params in self.params)


def read_requests(options: BenchOptions) -> list[str]:
    """The texts of every wave, none where prompts are made up."""
    if options.replay is not None or isinstance(options.prompts, MadeUp):
        return []
    found, wanted = read_prompts(options.prompts, limit=options.num_requests), options.num_requests
    if len(found) < wanted:
        raise ConfigError(
            f"prompts {prompts_name(options.prompts)}: the file has {len(found)} prompts and a wave takes {wanted}; name a "
            "longer one, or lower requests and concurrency"
        )
    return found


def joined(loads: Sequence[Load]) -> Load:
    """What engines that serve all of them must have room for."""
    prompts, params = [p for load in loads for p in load.prompts], [p for load in loads for p in load.params]
    return Load(prompts=prompts, params=params, adapt=loads[0].adapt)


def read_trace(sources: Sequence[Replay]) -> DenseTrace | None:
    """The one trace of all of them, which has the sets that each asks for."""
    if not sources:
        return None
    trace = DenseTrace.load(sources[0].trace)
    for name in (name for source in sources for name in source.sets):
        trace.set_index(name)
    return trace


def wave_load(options: BenchOptions, texts: Sequence[str], models: Models) -> Load:
    params = request_params(options.sampling, options.num_requests)
    return Load(prompts=wave_prompts(options, texts, models), params=params)


def replayed_load(options: BenchOptions, trace: DenseTrace, models: Models) -> Load:
    """Requests that stand for answers of the trace, and the engines' part of it."""
    prompts, params = replay_requests(
        trace, options.num_requests, vocab_size=models.vocab_size, most_positions=_most_positions(options, models),
        max_tokens=options.sampling.max_tokens, sets=() if options.replay is None else options.replay.sets,
    )  # fmt: skip
    return Load(prompts=prompts, params=params, adapt=replay(trace))


def _most_positions(options: BenchOptions, models: Models) -> int:
    return int(options.engine.get("max_model_len") or models.target.spec.max_position_embeddings)


def wave_prompts(options: BenchOptions, texts: Sequence[str], models: Models) -> list[Prompt]:
    """What every wave serves; prompts that are made up, and answers to them, have exactly the length asked for."""
    if not isinstance(options.prompts, MadeUp):
        return [user(text) for text in texts]
    limit = _most_positions(options, models)
    if options.prompts.num_tokens + options.sampling.max_tokens > limit:
        raise ConfigError(
            f"prompts {options.prompts} and max_tokens {options.sampling.max_tokens} go beyond {limit} positions; "
            "lower one of them"
        )
    return [*options.prompts.draw(options.num_requests, models.vocab_size)]


def start_all(
    models: Models, cases: Sequence[Case], options: BenchOptions, served: Load, say: Callable[[str], None]
) -> list[tuple[LLM, Policy]]:
    """An engine for each mode, and the policy that it gets for a case's waves: variants of lag share lag's engine."""
    found: list[tuple[LLM, Policy]] = []
    lag: dict[tuple[int | None, int], LLM] = {}
    for case in cases:
        key = case.num_speculative_tokens, case.concurrency
        llm = lag.get(key) if is_variant(case.mode) else None
        llm = llm or start(models, case, options, served, say)
        policy, num_drafts = llm.engine.policy, llm.engine.scheduler.limits.max_drafts
        if case.mode == "lag" or is_variant(case.mode):
            lag[key] = llm
        found.append((llm, variant(case.mode, policy, num_drafts) if is_variant(case.mode) else policy))
    return found


def start(models: Models, case: Case, options: BenchOptions, served: Load, say: Callable[[str], None]) -> LLM:
    """An engine for one case, warmed up: its first steps, and the cost model if it makes one, are not timed."""
    say(f"starting {options.label(case)}")
    engine = {
        **sizes(models, served.prompts, served.max_tokens, options.engine),
        "max_num_seqs": case.concurrency,
    }
    llm = LLM(models, speculative=options.speculative_config(case), adapt=served.adapt, **engine)
    return warm_up(llm, served.prompts, None if served.adapt is None else served.params)


def step_times(llms: Sequence[LLM]) -> dict[str, float]:
    """The target's part of a step at 1 row and, with a drafter of 7 or more, at 8: to hold against the linear layers."""
    found = {}
    for width in (0, 7):
        engine = next((llm.engine for llm in llms if llm.engine.scheduler.limits.max_drafts >= width), None)
        if engine is not None:
            context = min(STEP_CONTEXT, engine.scheduler.limits.max_model_len - width - 1)
            step = time_step(engine, num_sequences=1, width=width, context=context)
            found[f"step_ms_{row_key(1 + width)}"] = step.verify_ms
            if width:
                found["draft_ms"] = step.draft_ms
    return found


def make_rows(
    options: BenchOptions, models: Models, cases: Sequence[Case], llms: Sequence[LLM], waves: Sequence[Sequence[Wave]],
    watched: Sequence[Wave | None] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """watched: the probed wave of each case, where there is one."""
    settings = Settings(
        prompts=options.prompts_name,
        dtype=str(models.target.head_weight.dtype).removeprefix("torch."),
        acceptance=options.acceptance,
        temperature=options.sampling.temperature,
    )
    off = {case.concurrency: measured for case, measured in zip(cases, waves, strict=True) if case.mode == "off"}
    rows = []
    for case, llm, measured, seen in zip(cases, llms, waves, watched or [None] * len(cases), strict=True):
        resolved = replace(case, num_speculative_tokens=llm.engine.scheduler.limits.max_drafts or None)
        plain = off.get(case.concurrency, ())
        signal = None if llm.engine.policy.signal == "none" else llm.engine.policy.signal
        rows.append(bench_row(resolved, settings, signal, measured, plain, [seen] if seen else None))
        if options.replay is not None:  # drafts stand that the target would not have written
            rows[-1]["same_as_off"] = None
    return rows


def make_report(
    options: BenchOptions, models: Models, found: Mapping[str, float], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        **machine.provenance(models.target.head_weight.device),
        "ceilings": dict(found),
        "model": options.model,
        "draft": options.draft,
        "rows": rows,
    }
