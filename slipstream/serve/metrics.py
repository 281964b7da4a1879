"""What Prometheus is told: clocks and tokens of requests, the state of the engine, and what became of drafts.

Names are those that vLLM's dashboards know, with the prefix slipstream:. Requests are observed on the event loop as
they go; the engine's own counts are copied by `snapshot` between two steps when somebody asks for them. Knows no HTTP.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.metrics import SpecCounters
from slipstream.serve.driver import Driver
from slipstream.serve.steps import Durations, StepTimings

Kind = TypeVar("Kind", Counter, Histogram)
PREFIX = "slipstream:"
_WAITS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_PER_TOKEN_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2.5,
)
_WHOLE_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine between two steps."""

    num_running: int
    num_waiting: int
    kv_usage: float  # share of the pages that requests can own, in [0, 1]
    num_preemptions: int
    num_prefix_queries: int  # tokens of answers that got a slot; the next: those of them that were found in the cache
    num_prefix_hits: int
    counters: SpecCounters  # since the start, requests in flight included
    num_decode_steps: int  # of the engine
    timings: StepTimings

    @property
    def num_decode_rows(self) -> int:
        """Of the target's batches: one given row for each request that decodes, and its drafts."""
        return self.counters.steps + self.counters.verified


def snapshot(driver: Driver) -> Snapshot:
    """To be called in the driver's thread."""
    engine, scheduler = driver.llm.engine, driver.llm.engine.scheduler
    counters = SpecCounters(mode=engine.totals.mode)
    counters.merge(engine.totals)
    for request in engine.requests.values():
        counters.merge(scheduler.counters_of(request))
    pages = scheduler.pages
    usage = pages.num_used / pages.num_usable
    return Snapshot(
        len(scheduler.running), len(scheduler.waiting), usage, scheduler.num_preemptions,
        scheduler.prefixes.num_queried, scheduler.prefixes.num_hits, counters, engine.num_decode_steps, driver.meter.look(),
    )  # fmt: skip


class Metrics:
    """One registry for each server."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineCollector(model)
        self.registry.register(self._engine)
        self._model = model
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _WAITS_S)
        self._tpot = self._histogram(
            "time_per_output_token_seconds", "Mean over an answer's tokens after the first.", _PER_TOKEN_S
        )
        self._latency = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE_S)
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that got an answer.", "mode")
        self._generation_tokens = self._counter("generation_tokens", "Tokens that clients were given.", "mode")
        self._ended = self._counter("request_success", "Answers that ended, by why.", "mode", "finished_reason")
        self._refused = self._counter("http_problems", "Requests that ended otherwise, by HTTP status.", "status")

    def first_token(self, mode: str, seconds: float, num_prompt: int) -> None:
        self._ttft.of(mode).observe(seconds)
        self._prompt_tokens.of(mode).inc(num_prompt)

    def tokens(self, mode: str, count: int) -> None:
        self._generation_tokens.of(mode).inc(count)

    def answered(self, mode: str, reason: str, seconds: float, seconds_per_token: float | None) -> None:
        self._ended.of(mode, reason).inc()
        self._latency.of(mode).observe(seconds)
        if seconds_per_token is not None:
            self._tpot.of(mode).observe(seconds_per_token)

    def problem(self, status: int) -> None:
        self._refused.of(str(status)).inc()

    def render(self, now: Mapping[str, Snapshot | None], num_failures: Mapping[str, int]) -> bytes:
        """The page; without a snapshot (an engine does not answer) what the engine said last. Both by mode."""
        self._engine.now |= {mode: one for mode, one in now.items() if one is not None}
        self._engine.num_failures = num_failures
        return bytes(generate_latest(self.registry))

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> "_Family[Histogram]":
        labels = ["model_name", "mode"]
        return _Family(Histogram(PREFIX + name, about, labels, buckets=buckets, registry=self.registry), self._model)

    def _counter(self, name: str, about: str, *labels: str) -> "_Family[Counter]":
        return _Family(Counter(PREFIX + name, about, ["model_name", *labels], registry=self.registry), self._model)


class _Family(Generic[Kind]):
    """A metric's series, which the library takes longer to find than to count in."""

    def __init__(self, family: Kind, model: str) -> None:
        self._family: Kind = family
        self._model = model
        self._series: dict[tuple[str, ...], Kind] = {}

    def of(self, *labels: str) -> Kind:
        """The one with these labels, the model's name left out."""
        if labels not in self._series:
            self._series[labels] = self._family.labels(self._model, *labels)
        return self._series[labels]


class _EngineCollector(Collector):
    def __init__(self, model: str) -> None:
        self._model = model
        self.now: dict[str, Snapshot] = {}  # these two: by mode
        self.num_failures: Mapping[str, int] = {}

    def collect(self) -> Iterator[Metric]:
        yield self._of(CounterMetricFamily, "engine_failures", "Steps that failed.", self.num_failures)
        now = self.now
        for kind, name, about, values in (
            (GaugeMetricFamily, "num_requests_running", "Answers that have a slot.", _each(now, "num_running")),
            (GaugeMetricFamily, "num_requests_waiting", "Answers that wait for one.", _each(now, "num_waiting")),
            (GaugeMetricFamily, "kv_cache_usage_perc", "Share of KV pages in use; 1 is all.", _each(now, "kv_usage")),
            (CounterMetricFamily, "num_preemptions", "Answers that lost their slot.", _each(now, "num_preemptions")),
            (CounterMetricFamily, "prefix_cache_queries", "Tokens looked for.", _each(now, "num_prefix_queries")),
            (CounterMetricFamily, "prefix_cache_hits", "Tokens found, not computed.", _each(now, "num_prefix_hits")),
        ):
            yield self._of(kind, name, about, values)
        yield from self._speculation([one.counters for one in now.values()])
        yield from self._steps(now)

    def _speculation(self, counters: Sequence[SpecCounters]) -> Iterator[Metric]:
        """What became of drafts, in decode steps, by mode."""
        for name, about, field in (
            ("num_drafts", "Decode steps of requests.", "steps"),
            ("num_draft_tokens", "Tokens drafted.", "drafted"),
            ("num_verified_tokens", "Drafts that the target verified.", "verified"),
            ("num_accepted_tokens", "Drafts that were accepted.", "accepted"),
            ("num_emitted_tokens", "Tokens that decode steps gave, the target's own included.", "emitted"),
        ):
            values = {one.mode: float(getattr(one, field)) for one in counters}
            yield self._of(CounterMetricFamily, f"spec_decode_{name}", about, values)
        for name, about, label, field in (
            ("num_verified_tokens_per_pos", "Verified, by position in the block.", "position", "verified_at"),
            ("num_accepted_tokens_per_pos", "Accepted, by position in the block.", "position", "accepted_at"),
            ("num_steps_per_width", "Decode steps, by how many drafts were verified.", "width", "width_histogram"),
        ):
            histograms = {one.mode: getattr(one, field) for one in counters}
            yield self._histograms(f"spec_decode_{name}", about, label, histograms)

    def _steps(self, now: Mapping[str, Snapshot]) -> Iterator[Metric]:
        """Rows per step are rows / steps."""
        for name, about, values in (
            (
                "engine_decode_steps", "The engine's steps in which somebody decoded.",
                {mode: float(one.num_decode_steps) for mode, one in now.items()},
            ),
            (
                "engine_decode_rows", "Rows of the target's batches in them, those of prompts left out.",
                {mode: float(one.num_decode_rows) for mode, one in now.items()},
            ),
        ):  # fmt: skip
            yield self._of(CounterMetricFamily, name, about, values)
        yield from families(PREFIX, self._model, {mode: one.timings for mode, one in now.items()})

    def _of(self, kind: type[Metric], name: str, about: str, values: Mapping[str, float]) -> Metric:
        """values: by mode."""
        family = kind(PREFIX + name, about, labels=["model_name", "mode"])  # type: ignore[call-arg]
        for mode, value in values.items():
            family.add_metric([self._model, mode], value)  # type: ignore[attr-defined]
        return family

    def _histograms(self, name: str, about: str, label: str, values: Mapping[str, Mapping[int, int]]) -> Metric:
        """values: by mode, then by position or width."""
        family = CounterMetricFamily(PREFIX + name, about, labels=["model_name", "mode", label])
        base = 1 if label == "position" else 0  # positions are counted from 0, as the field does
        for mode, histogram in values.items():
            for key, value in sorted(histogram.items()):
                family.add_metric([self._model, mode, str(key - base)], float(value))
        return family


def _each(now: Mapping[str, Snapshot], field: str) -> dict[str, float]:
    return {mode: getattr(one, field) for mode, one in now.items()}


_ABOUT = {
    "step": ("engine_step_seconds", "Turns of the engine's loop."),
    "decide": ("decide_seconds", "Deciding widths while the device had nothing to do, of some steps."),
    "decide_hidden": ("decide_hidden_seconds", "Deciding widths while the device worked, of some steps."),
    "build": ("build_seconds", "Planning a step while the device had nothing to do, of some steps."),
    "gap": ("gap_seconds", "The device between draft and verify without work, of some steps."),
}


def families(prefix: str, model: str, timings: Mapping[str, StepTimings]) -> Iterator[Metric]:
    """What was measured, by mode, for Prometheus."""
    for field, (name, about) in _ABOUT.items():
        measured: dict[str, Durations] = {mode: getattr(one, field) for mode, one in timings.items()}
        measured = {mode: durations for mode, durations in measured.items() if durations.num}
        if measured:
            family = HistogramMetricFamily(prefix + name, about, labels=["model_name", "mode"])
            for mode, durations in measured.items():
                family.add_metric([model, mode], _buckets(durations), durations.sum_s)
            yield family
    busy = {mode: one.device_busy for mode, one in timings.items() if one.device_busy is not None}
    if busy:
        about = "Share of the time in which the device worked, over the steps that were recorded last; 1 is always."
        gauge = GaugeMetricFamily(f"{prefix}device_busy_perc", about, labels=["model_name", "mode"])
        for mode, share in busy.items():
            gauge.add_metric([model, mode], share)
        yield gauge


def _buckets(durations: Durations) -> list[tuple[str, float]]:
    bounds = [*map(repr, durations.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(durations.counts)), strict=True))
