"""From measured waves to the rows that `bench` and `make demo` report: statistics, the table. Torch-free.

A wave is one pass of one case (mode, S, concurrency) over all requests. Cases take turns wave by wave, so a row's
figures are medians over waves that lay between those of the other cases; counters are sums over all waves.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.table import Table

from slipstream.lab.cases import Case
from slipstream.lab.critical_path import CriticalPath
from slipstream.loops import ends_in_loop
from slipstream.metrics import SpecCounters, Timing

NO_CRITICAL_PATH = CriticalPath(decide_us=None, decide_hidden_us=None, build_us=None, gap_us=None, device_busy=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all cases of a run share."""

    prompts: str
    dtype: str
    acceptance: str
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a bench keeps of one completion."""

    token_ids: tuple[int, ...]
    spec: SpecCounters
    ttft_ms: float  # from when its turn came
    tpot_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    wall_s: float  # from the first submit to the last token, prefill included
    num_steps: int  # engine steps in which something decoded
    answers: tuple[Answer, ...]  # in the order of the requests
    critical_path: CriticalPath = field(default=NO_CRITICAL_PATH)

    @property
    def output_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tok_per_s(self) -> float:
        return self.output_tokens / self.wall_s


def median(values: Sequence[float | None]) -> float | None:
    """Of the values that exist."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def ttft_in_turn_ms(timings: Sequence[Timing], concurrency: int) -> list[float]:
    """Time to first token of each request, from when its turn came.

    All requests of a wave are submitted at once and served in order, `concurrency` at a time: request i begins when the
    (i - concurrency)-th answer is complete, and what it waited before that says nothing about the engine.
    """
    ends = sorted(timing.last_token_s for timing in timings)
    begins = [t.submitted_s if i < concurrency else ends[i - concurrency] for i, t in enumerate(timings)]
    return [1e3 * (t.first_token_s - begin) for t, begin in zip(timings, begins, strict=True)]


def total(answers: Sequence[Answer]) -> SpecCounters:
    counters = SpecCounters(mode=answers[0].spec.mode if answers else "off")
    for answer in answers:
        counters.merge(answer.spec)
    return counters


def bench_row(case: Case, settings: Settings, signal: str | None, waves: Sequence[Wave]) -> dict[str, Any]:
    """One row of the report; `ratio_to_off` and `same_as_off` are filled by `compare_to_off`."""
    answers = [answer for wave in waves for answer in wave.answers]
    straight = [answer for answer in answers if not ends_in_loop(answer.token_ids)]
    counters, no_loops = total(answers), total(straight)
    speeds = [wave.tok_per_s for wave in waves]
    num_steps = sum(wave.num_steps for wave in waves)
    rows = counters.verified + counters.steps
    return {
        "mode": case.mode,
        "prompts": settings.prompts,
        "dtype": settings.dtype,
        "acceptance": settings.acceptance,
        "signal": signal,
        "waves": len(waves),
        "tok_per_s_min": min(speeds),
        "tok_per_s_max": max(speeds),
        "ratio_to_off": None,
        "num_speculative_tokens": case.num_speculative_tokens,
        "concurrency": case.concurrency,
        "temperature": settings.temperature,
        "requests": len(waves[0].answers),
        "output_tokens": sum(wave.output_tokens for wave in waves),
        "wall_s": sum(wave.wall_s for wave in waves),
        "tok_per_s": statistics.median(speeds),
        "tpot_ms": median([answer.tpot_ms for answer in answers]),
        "ttft_ms": median([answer.ttft_ms for answer in answers]),
        "drafted": counters.drafted,
        "verified": counters.verified,
        "accepted": counters.accepted,
        "emitted": counters.emitted,
        "acceptance_rate": counters.acceptance_rate,
        "mean_accepted_length": counters.mean_accepted_length,
        "rows_per_step": rows / num_steps if num_steps else None,
        **{name: median([getattr(w.critical_path, name) for w in waves]) for name in asdict(NO_CRITICAL_PATH)},
        "wave_tok_per_s": speeds,
        "width_histogram": {str(w): n for w, n in sorted(counters.width_histogram.items())},
        "acceptance_at": counters.acceptance_at,
        "looping_answers": len(answers) - len(straight),
        "acceptance_rate_no_loops": no_loops.acceptance_rate,
        "mean_accepted_length_no_loops": no_loops.mean_accepted_length,
        "same_as_off": None,
    }


def compare_to_off(rows: Sequence[dict[str, Any]], answers: Sequence[Sequence[Answer]]) -> None:
    """Fill in, for every row, the speed relative to the plain row of its concurrency and how many answers equal its.

    `answers` are each row's, of one wave. In fp32 answers differ only by near ties, in bf16 by ties of rounding.
    """
    plain = {
        row["concurrency"]: (row, theirs) for row, theirs in zip(rows, answers, strict=True) if row["mode"] == "off"
    }
    for row, ours in zip(rows, answers, strict=True):
        if row["concurrency"] not in plain:
            continue
        off, theirs = plain[row["concurrency"]]
        row["ratio_to_off"] = row["tok_per_s"] / off["tok_per_s"]
        row["same_as_off"] = sum(a.token_ids == b.token_ids for a, b in zip(ours, theirs, strict=True))


def rows_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """The report for eyes, plain decoding first."""
    heads = (
        "mode",
        "S",
        "at",
        "tok/s",
        "min",
        "max",
        "x off",
        "tokens\n/step",
        "accep-\nted",
        "rows\n/step",
        "same\ntext",
    )
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True
    )
    for name in heads:
        table.add_column(name, justify="left" if name == "mode" else "right")
    for row in sorted(rows, key=lambda row: (row["concurrency"], row["mode"] != "off")):
        table.add_row(
            row["mode"],
            _shown(row["num_speculative_tokens"], "d"),
            str(row["concurrency"]),
            *(_shown(row[name], ".1f") for name in ("tok_per_s", "tok_per_s_min", "tok_per_s_max")),
            _shown(row["ratio_to_off"], ".2f"),
            _shown(row["mean_accepted_length"], ".2f"),
            _shown(row["acceptance_rate"], ".0%"),
            _shown(row["rows_per_step"], ".2f"),
            "-" if row["same_as_off"] is None else f"{row['same_as_off']}/{row['requests']}",
        )
    return table


def ceiling_line(ceilings: Mapping[str, float]) -> str:
    """What the weights allow, and what a step takes."""
    parts = []
    for rows, name in ((1, "1_row"), (8, "8_rows")):
        alone, packed = ceilings[f"linear_ms_{name}"], ceilings[f"prepacked_ms_{name}"]
        step = ceilings.get(f"step_ms_{name}")
        whole = "" if step is None else f", step {step:.1f} ms (x {step / alone:.2f} and x {step / packed:.2f})"
        parts.append(f"{rows} row{'s'[: rows - 1]}: linear layers {alone:.1f} ms, prepacked {packed:.1f} ms{whole}")
    return "; ".join(parts)


def probe_table(rows: Sequence[dict[str, Any]]) -> Table:
    """What lies on the critical path of a decode step, medians."""
    table = Table(
        title="critical path of a decode step",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
    )
    for name in ("mode", "at", "decide\nus", "hidden\nus", "build\nus", "gap\nus", "device\nbusy"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for row in rows:
        shown = [_shown(row[name], ".0f") for name in ("decide_us", "decide_hidden_us", "build_us", "gap_us")]
        table.add_row(row["mode"], str(row["concurrency"]), *shown, _shown(row["device_busy"], ".0%"))
    return table


def plain_json(value: Any) -> Any:
    """The same value with null for every number that JSON does not know."""
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _shown(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
