"""Coupled acceptance against rejection on one pair: tokens a step, speed and memory, at the temperatures named.

    python -m bench.rules --temperatures 0.7 1.0 --prompts bench/data/prompts/gsm8k.jsonl --out bench/results/rules.json

Both rules serve the same prompts, rule by rule in turn, wave after wave, with seeds that no two waves share: what a rule
accepts is then a mean over all of them, and its error comes from how requests scatter. Under both rules answers have the
target's law; what differs is how often a draft is part of them. Memory is what a wave takes at its peak beyond what was
there before it: weights, KV pools, graphs and the engine's buffers, among them what drafts are drawn from under rejection
(on a GPU; on a CPU it is not measured).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, get_args

import torch

from slipstream import LLM, SamplingParams, SpeculativeConfig
from slipstream.config import MODES, Acceptance
from slipstream.lab import machine
from slipstream.lab.measure import load, run_wave, sizes, warm_up
from slipstream.lab.waves import Wave, median, total
from slipstream.load import Models
from slipstream.prompts import Messages, prompts_name, read_prompts, user

RULES: tuple[Acceptance, ...] = get_args(Acceptance)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="target: name, folder or .gguf file")
    parser.add_argument("--draft", default="smollm2-135m-dspark")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.7, 1.0])
    parser.add_argument("--modes", nargs="+", default=["static"], choices=[mode for mode in MODES if mode != "off"])
    parser.add_argument("--num-speculative-tokens", type=int, default=7, help="S")
    parser.add_argument(
        "--prompts", type=Path, default=None, help="JSON lines with turns; default: the built-in sample"
    )
    parser.add_argument("--requests", type=int, default=64, help="of a wave; prompts come again where there are fewer")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    return parser.parse_args(arguments)


def make_llm(options: argparse.Namespace, mode: str, rule: Acceptance, models: Models, prompts: list[Messages]) -> LLM:
    speculative = SpeculativeConfig.for_mode(
        mode, draft_model=options.draft, acceptance=rule, num_speculative_tokens=options.num_speculative_tokens
    )
    room = sizes(models, prompts, options.max_tokens, {"max_num_seqs": options.concurrency})
    return LLM(models, speculative=speculative, **room)


def params_of(options: argparse.Namespace, temperature: float, wave: int) -> list[SamplingParams]:
    first = wave * options.requests
    return [
        SamplingParams(temperature=temperature, max_tokens=options.max_tokens, seed=first + index)
        for index in range(options.requests)
    ]


def measured(llm: LLM, prompts: list[Messages], params: list[SamplingParams]) -> tuple[Wave, int | None]:
    """A wave, and the bytes that it took at its peak beyond what was there before."""
    on_gpu = llm.models.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    wave, _ = run_wave(llm, prompts, params)
    return wave, torch.cuda.max_memory_allocated() - before if on_gpu else None


def row_of(
    mode: str, temperature: float, rule: str, waves: Sequence[Wave], peaks: Sequence[int | None]
) -> dict[str, Any]:
    answers = [answer for wave in waves for answer in wave.answers]
    counters = total(answers)
    lengths = [each for answer in answers if (each := answer.spec.mean_accepted_length) is not None]
    return {
        "mode": mode,
        "temperature": temperature,
        "acceptance": rule,
        "tok_per_s": median([wave.tok_per_s for wave in waves]),
        "wave_tok_per_s": [wave.tok_per_s for wave in waves],
        "mean_accepted_length": counters.mean_accepted_length,
        # Of the mean over requests, each with its own length: how far chance alone may move a figure.
        "standard_error": stdev(lengths) / len(lengths) ** 0.5 if len(lengths) > 1 else None,
        "mean_over_requests": fmean(lengths) if lengths else None,
        "accepted_share": counters.accepted / counters.verified if counters.verified else None,
        "output_tokens": sum(wave.output_tokens for wave in waves),
        "peak_bytes": max((peak for peak in peaks if peak is not None), default=None),
    }


def compare(options: argparse.Namespace, models: Models, prompts: list[Messages]) -> list[dict[str, Any]]:
    rows = []
    for mode in options.modes:
        llms = {rule: make_llm(options, mode, rule, models, prompts) for rule in RULES}
        for temperature in options.temperatures:
            waves: dict[str, list[Wave]] = {rule: [] for rule in RULES}
            peaks: dict[str, list[int | None]] = {rule: [] for rule in RULES}
            for llm in llms.values():  # compiles what only sampled requests need
                warm_up(llm, prompts, params_of(options, temperature, options.waves))
            for number in range(options.waves):
                for rule, llm in llms.items():
                    wave, peak = measured(llm, prompts, params_of(options, temperature, number))
                    waves[rule].append(wave)
                    peaks[rule].append(peak)
            rows += [row_of(mode, temperature, rule, waves[rule], peaks[rule]) for rule in RULES]
            print("\n".join(map(line, rows[-len(RULES) :])), file=sys.stderr, flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """Of the table: numbers that are not there are dashes."""
    error = "-" if row["standard_error"] is None else f"{row['standard_error']:.3f}"
    peak = "not measured" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}"
    speeds = row["wave_tok_per_s"]
    return (
        f"| {row['mode']} | {row['temperature']:g} | {row['acceptance']} | {row['mean_accepted_length'] or 0:.3f} "
        f"± {error} | {row['accepted_share'] or 0:.3f} | {row['tok_per_s']:.0f} ({min(speeds):.0f} - {max(speeds):.0f}) "
        f"| {peak} |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    models = load(options.model, options.draft, {"dtype": options.dtype}, {})
    texts = read_prompts(options.prompts)
    prompts = [user(texts[index % len(texts)]) for index in range(options.requests)]
    rows = compare(options, models, prompts)
    conditions = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    report = {
        "command": f"python -m bench.rules {' '.join(given)}",
        **machine.provenance(models.device),
        "conditions": conditions | {"prompts": prompts_name(options.prompts), "dtype": str(models.dtype)},
        "rows": rows,
    }
    print("| mode | T | rule | tokens a step | accepted | tok/s (min - max) | MiB of a wave |")
    print("|---|---:|---|---:|---:|---:|---:|")
    print("\n".join(map(line, rows)))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
