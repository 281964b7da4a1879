"""From measured waves to the rows that `bench` and `make demo` report, and their tables. Torch-free.

A row is a case (mode, S, concurrency): its speed is the median over its waves, its counters are sums over all of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from slipstream.lab.bench_options import Case
from slipstream.lab.tables import new_table, share, shown
from slipstream.lab.waves import NO_CRITICAL_PATH, Wave, median, same_answers, speed, straight, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all cases of a run share."""

    prompts: str
    dtype: str
    acceptance: str
    temperature: float


def bench_row(
    case: Case, settings: Settings, signal: str | None, waves: Sequence[Wave], plain: Sequence[Wave],
    watched: Sequence[Wave] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One row of the report.

    plain: the waves of plain decoding at the same concurrency, if there are any. watched: those that the critical path is
    taken from, if it is not `waves`.
    """
    answers = [answer for wave in waves for answer in wave.answers]
    without_loops = straight(answers)
    counters, no_loops, timed = total(answers), total(without_loops), speed(waves, plain)
    speeds, paths = timed["wave_tok_per_s"], [wave.critical_path for wave in (watched or waves)]
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
        "ratio_to_off": timed["ratio_to_off"],
        "num_speculative_tokens": case.num_speculative_tokens,
        "concurrency": case.concurrency,
        "temperature": settings.temperature,
        "requests": len(waves[0].answers),
        "output_tokens": sum(wave.output_tokens for wave in waves),
        "wall_s": sum(wave.wall_s for wave in waves),
        "tok_per_s": timed["tok_per_s"],
        "tpot_ms": median([answer.tpot_ms for answer in answers]),
        "ttft_ms": median([answer.ttft_ms for answer in answers]),
        "drafted": counters.drafted,
        "verified": counters.verified,
        "accepted": counters.accepted,
        "emitted": counters.emitted,
        "acceptance_rate": counters.acceptance_rate,
        "mean_accepted_length": counters.mean_accepted_length,
        "rows_per_step": rows / num_steps if num_steps else None,
        **{name: median([getattr(path, name) for path in paths]) for name in asdict(NO_CRITICAL_PATH)},
        "wave_tok_per_s": speeds,
        "width_histogram": {str(w): n for w, n in sorted(counters.width_histogram.items())},
        "acceptance_at": counters.acceptance_at,
        "looping_answers": len(answers) - len(without_loops),
        "acceptance_rate_no_loops": no_loops.acceptance_rate,
        "mean_accepted_length_no_loops": no_loops.mean_accepted_length,
        "same_as_off": same_answers(waves, plain),
    }


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
    table = new_table(title + _replayed(rows), heads, ["mode"])
    for row in sorted(rows, key=lambda row: (row["concurrency"], row["mode"] != "off")):
        table.add_row(
            _mode(row),
            shown(row["num_speculative_tokens"], "d"),
            str(row["concurrency"]),
            *(shown(row[name], ".1f") for name in ("tok_per_s", "tok_per_s_min", "tok_per_s_max")),
            shown(row["ratio_to_off"], ".2f"),
            shown(row["mean_accepted_length"], ".2f"),
            shown(row["acceptance_rate"], ".0%"),
            shown(row["rows_per_step"], ".2f"),
            share(row["same_as_off"], row["requests"]),
        )
    return table


def row_key(rows: int) -> str:
    """How times of so many rows are called: `linear_ms_` and this."""
    return "1_row" if rows == 1 else f"{rows}_rows"


def ceiling_line(ceilings: Mapping[str, float]) -> str:
    """What the weights allow, and what a step takes where one was timed."""
    rows = [int(name.split("_")[2]) for name in ceilings if name.startswith("linear_ms_")]
    return "; ".join([_ceiling_at(ceilings, n) for n in rows] + [f"copy {ceilings['copy_gb_per_s']:.0f} GB/s"])


def _ceiling_at(ceilings: Mapping[str, float], rows: int) -> str:
    name = row_key(rows)
    alone, packed, step = (ceilings.get(f"{kind}_ms_{name}") for kind in ("linear", "prepacked", "step"))
    assert alone is not None
    text = f"{name.replace('_', ' ')}: linear layers {_ms(alone)}"
    text += "" if packed is None else f", prepacked {_ms(packed)}"
    ratios = [f"x {step / floor:.2f}" for floor in (alone, packed) if step is not None and floor is not None]
    return text if step is None else f"{text}, step {_ms(step)} ({' and '.join(ratios)})"


def _ms(value: float) -> str:
    return f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def probe_table(rows: Sequence[dict[str, Any]]) -> Table:
    """What lies on the critical path of a decode step, medians."""
    heads = ("mode", "at", "decide\nus", "hidden\nus", "build\nus", "gap\nus", "device\nbusy")
    table = new_table(f"critical path of a decode step{_replayed(rows)}", heads, ["mode"])
    for row in rows:
        times = [shown(row[name], ".0f") for name in ("decide_us", "decide_hidden_us", "build_us", "gap_us")]
        table.add_row(_mode(row), str(row["concurrency"]), *times, shown(row["device_busy"], ".0%"))
    return table


def _is_replayed(row: Mapping[str, Any]) -> bool:
    return str(row.get("acceptance")).startswith("replayed")


def _replayed(rows: Sequence[Mapping[str, Any]]) -> str:
    """What a table of figures under replayed acceptance says of it; nothing in any other."""
    return next((f", acceptance {row['acceptance']}" for row in rows if _is_replayed(row)), "")


def _mode(row: Mapping[str, Any]) -> str:
    return f"{row['mode']}, replayed" if _is_replayed(row) else str(row["mode"])


def plain_json(value: Any) -> Any:
    """The same value with null for every number that JSON does not know."""
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
