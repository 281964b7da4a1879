"""What `deterministic` costs: engines with and without it, modes off, static and lag, wave by wave in turn.

    python -m bench.deterministic smollm2                    # real acceptance, gsm8k, T = 0: about two minutes
    python -m bench.deterministic 8b --concurrency 32        # Qwen3-8B's shape, acceptance replayed: about four

Needs a GPU. The table shows each deterministic case beside its usual one and, where acceptance is real, how many of its
texts are plain decoding's. The JSON goes to bench/results/deterministic, a file for each shape and number of requests.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.config import SamplingParams
from slipstream.lab import machine
from slipstream.lab.bench import (
    Load,
    make_rows,
    read_requests,
    replayed_load,
    start_all,
    wave_load,
)
from slipstream.lab.bench_options import BenchOptions, Replay
from slipstream.lab.dense import DenseTrace
from slipstream.lab.measure import load, run_wave
from slipstream.lab.report import plain_json
from slipstream.lab.waves import Wave
from slipstream.load import Models

RESULTS = Path(__file__).parent / "results" / "deterministic"
TRACE = Path(__file__).parent / "data" / "traces" / "smollm2-dspark-s7.npz"
PROMPTS = Path(__file__).parent / "data" / "prompts" / "gsm8k.jsonl"
MODES = ("off", "static", "lag")
NO_LIMIT = 1 << 30  # tokens of an answer that ends by itself

Say = Callable[[str], None]


def options_of(shape: str, concurrency: int, waves: int, model: str) -> BenchOptions:
    """model: where the small one is."""
    common: dict[str, Any] = {
        "modes": MODES, "num_speculative_tokens": (7,), "concurrency": (concurrency,), "waves": waves,
        "requests": max(4, 2 * concurrency),
    }  # fmt: skip
    if shape == "8b":
        sampling = SamplingParams(max_tokens=NO_LIMIT)
        return BenchOptions(
            model="random:qwen3-8b", draft="random", replay=Replay(trace=TRACE), sampling=sampling, **common
        )
    return BenchOptions(model=model, prompts=PROMPTS, sampling=SamplingParams(max_tokens=256), **common)


def measure(options: BenchOptions, models: Models, say: Say) -> dict[str, Any]:
    """Rows of `slipstream bench`, each with `deterministic` and `ratio_to_usual`, of the same case."""
    kinds = [replace(options, engine={**options.engine, "deterministic": flag}) for flag in (False, True)]
    served, cases = load_of(options, models), options.cases()
    llms = [[llm for llm, _ in start_all(models, cases, kind, served, say)] for kind in kinds]
    waves: list[list[list[Wave]]] = [[[] for _ in cases] for _ in kinds]
    for number in range(options.waves):
        for index, case in enumerate(cases):
            for kind, engines in enumerate(llms):
                wave, _ = run_wave(engines[index], served.prompts, served.params)
                waves[kind][index].append(wave)
                name = options.label(case) + (", deterministic" if kind else "")
                say(f"wave {number + 1}/{options.waves}  {name}: {wave.tok_per_s:.1f} tok/s")
    usual, fixed = (make_rows(*each) for each in zip(kinds, 2 * [models], 2 * [cases], llms, waves, strict=True))
    rows = [row | {"deterministic": False, "ratio_to_usual": 1.0} for row in usual]
    rows += [
        row | {"deterministic": True, "ratio_to_usual": row["tok_per_s"] / other["tok_per_s"]}
        for row, other in zip(fixed, usual, strict=True)
    ]
    return {**machine.provenance(models.device), "model": options.model, "draft": options.draft, "rows": rows}


def load_of(options: BenchOptions, models: Models) -> Load:
    if options.replay is not None:
        return replayed_load(options, DenseTrace.load(options.replay.trace), models)
    return wave_load(options, read_requests(options), models)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| mode | at | tok/s (min - max) | deterministic | x usual | ttft ms | deterministic | same text |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for one, other in zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True):
        same = "-" if other["same_as_off"] is None else f"{other['same_as_off']}/{other['requests']}"
        lines.append(
            f"| {one['mode']} | {one['concurrency']} | {_speed(one)} | {_speed(other)} | {other['ratio_to_usual']:.2f} "
            f"| {one['ttft_ms']:.1f} | {other['ttft_ms']:.1f} | {same} |"
        )
    return lines


def _speed(row: dict[str, Any]) -> str:
    return f"{row['tok_per_s']:.0f} ({row['tok_per_s_min']:.0f} - {row['tok_per_s_max']:.0f})"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=("smollm2", "8b"))
    parser.add_argument("--concurrency", default="1,32", help="requests at a time, one or several")
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m", help="where the small model is, if not installed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    models = None
    for concurrency in [int(part) for part in asked.concurrency.split(",")]:
        start_s = time.perf_counter()
        options = options_of(asked.shape, concurrency, asked.waves, asked.model)
        models = models or load(options.model, options.draft, options.engine, options.speculative)
        report = measure(options, models, say)
        command = f"python -m bench.deterministic {' '.join(arguments or sys.argv[1:])}"
        text = json.dumps(plain_json({"command": command, **report}))
        (asked.out / f"{asked.shape}-c{concurrency}.json").write_text(text + "\n")
        print("\n".join(table(report["rows"])), f"\n{time.perf_counter() - start_s:.0f} s", flush=True)
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
