"""What Prometheus is told: clocks and tokens of requests, the state of the engine, and what became of drafts.

Names are those that vLLM's dashboards know, with the prefix slipstream:. Requests are observed on the event loop as
they go; the engine's own counts are copied by `snapshot` between two steps when somebody asks for them. Knows no HTTP.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.metrics import SpecCounters
from slipstream.serve.steps import StepMeter, StepTimings, families

if TYPE_CHECKING:
    from slipstream.llm import LLM

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
    counters: SpecCounters  # since the start, requests in flight included
    num_decode_steps: int  # of the engine
    timings: StepTimings


def snapshot(llm: "LLM", meter: StepMeter) -> Snapshot:
    """To be called in the engine's thread."""
    engine, scheduler = llm.engine, llm.engine.scheduler
    counters = SpecCounters(mode=engine.totals.mode)
    counters.merge(engine.totals)
    for request in engine.requests.values():
        counters.merge(scheduler.counters_of(request))
    pages = scheduler.pages
    usage = pages.num_used / pages.num_usable
    return Snapshot(
        len(scheduler.running), len(scheduler.waiting), usage, scheduler.num_preemptions, counters,
        engine.num_decode_steps, meter.look(),
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
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that got an answer.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens that clients were given.")
        self._ended = self._counter("request_success", "Answers that ended, by why.", "finished_reason")
        self._refused = self._counter("http_problems", "Requests that ended otherwise, by HTTP status.", "status")

    def first_token(self, seconds: float, num_prompt: int) -> None:
        self._ttft.labels(self._model).observe(seconds)
        self._prompt_tokens.labels(self._model).inc(num_prompt)

    def tokens(self, count: int) -> None:
        self._generation_tokens.labels(self._model).inc(count)

    def answered(self, reason: str, seconds: float, seconds_per_token: float | None) -> None:
        self._ended.labels(self._model, reason).inc()
        self._latency.labels(self._model).observe(seconds)
        if seconds_per_token is not None:
            self._tpot.labels(self._model).observe(seconds_per_token)

    def problem(self, status: int) -> None:
        self._refused.labels(self._model, str(status)).inc()

    def render(self, now: Snapshot | None, num_failures: int) -> bytes:
        """The page; without a snapshot (the engine does not answer) what the engine said last."""
        self._engine.now = now or self._engine.now
        self._engine.num_failures = num_failures
        return bytes(generate_latest(self.registry))

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, about, ["model_name"], buckets=buckets, registry=self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, about, ["model_name", *labels], registry=self.registry)


class _EngineCollector(Collector):
    def __init__(self, model: str) -> None:
        self._model = model
        self.now: Snapshot | None = None
        self.num_failures = 0

    def collect(self) -> Iterator[Metric]:
        yield self._of(CounterMetricFamily, "engine_failures", "Steps that failed.", self.num_failures)
        if self.now is None:
            return
        now = self.now
        yield self._of(GaugeMetricFamily, "num_requests_running", "Answers that have a slot.", now.num_running)
        yield self._of(GaugeMetricFamily, "num_requests_waiting", "Answers that wait for one.", now.num_waiting)
        yield self._of(GaugeMetricFamily, "kv_cache_usage_perc", "Share of KV pages in use; 1 is all.", now.kv_usage)
        yield self._of(CounterMetricFamily, "num_preemptions", "Answers that lost their slot.", now.num_preemptions)
        yield from self._speculation(now.counters)
        yield from self._steps(now)

    def _speculation(self, counters: SpecCounters) -> Iterator[Metric]:
        """What became of drafts, in decode steps, by mode."""
        for name, about, value in (
            ("num_drafts", "Decode steps of requests.", counters.steps),
            ("num_draft_tokens", "Tokens drafted.", counters.drafted),
            ("num_verified_tokens", "Drafts that the target verified.", counters.verified),
            ("num_accepted_tokens", "Drafts that were accepted.", counters.accepted),
            ("num_emitted_tokens", "Tokens that decode steps gave, the target's own included.", counters.emitted),
        ):
            yield self._by(f"spec_decode_{name}", about, "", {"": value}, counters.mode)
        for name, about, label, histogram in (
            ("num_verified_tokens_per_pos", "Verified, by position in the block.", "position", counters.verified_at),
            ("num_accepted_tokens_per_pos", "Accepted, by position in the block.", "position", counters.accepted_at),
            (
                "num_steps_per_width",
                "Decode steps, by how many drafts were verified.",
                "width",
                counters.width_histogram,
            ),
        ):
            # Positions are counted from 0, as the field does.
            base = 1 if label == "position" else 0
            values = {str(key - base): float(value) for key, value in sorted(histogram.items())}
            yield self._by(f"spec_decode_{name}", about, label, values, counters.mode)

    def _steps(self, now: Snapshot) -> Iterator[Metric]:
        """Rows per step are rows / steps."""
        counters = now.counters
        rows = float(counters.steps + counters.verified)  # one given row, and the drafts
        for name, about, value in (
            ("engine_decode_steps", "The engine's steps in which somebody decoded.", float(now.num_decode_steps)),
            ("engine_decode_rows", "Rows of the target's batches in them, those of prompts left out.", rows),
        ):
            yield self._by(name, about, "", {"": value}, counters.mode)
        yield from families(PREFIX, self._model, counters.mode, now.timings)

    def _of(self, kind: type[Metric], name: str, about: str, value: float) -> Metric:
        family = kind(PREFIX + name, about, labels=["model_name"])  # type: ignore[call-arg]
        family.add_metric([self._model], value)  # type: ignore[attr-defined]
        return family

    def _by(self, name: str, about: str, label: str, values: dict[str, float], mode: str) -> Metric:
        labels = ["model_name", "mode", *([label] if label else [])]
        family = CounterMetricFamily(PREFIX + name, about, labels=labels)
        for key, value in values.items():
            family.add_metric([self._model, mode, *([key] if label else [])], value)
        return family
