"""What it costs that requests ask for things: log-probabilities, penalties and filters, against the same requests without.

    python bench/requests.py --draft smollm2-135m-dspark --concurrency 32 --out runs/requests.json

Every request of a wave asks for the same; what is asked for takes turns wave by wave on one engine per mode. Speeds are
tokens from the first submit to the last token (entries are made of what was collected afterwards, and timed by
themselves), `x` is the time per token beside that of the same mode where nobody asks, from medians over waves. Penalties
and filters change the text, so `tokens/step` stands beside it: where drafts are right less often, that is no cost of
computing them. Filters do something above temperature 0 only:

    python bench/requests.py --temperature 1 --wishes nothing "top_p 0.9" "top_k 50" "top_k 50, top_p 0.9, min_p 0.05"
"""

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from slipstream import LLM, Completion, SamplingParams, SpeculativeConfig
from slipstream.config import MODES
from slipstream.lab import machine
from slipstream.lab.measure import former_objects_left_alone, load, positions_needed, token_ids, warm_up
from slipstream.lab.waves import median, total
from slipstream.load import Models
from slipstream.prompts import read_prompts, user

WISHES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "logprobs 0": {"logprobs": 0},
    "logprobs 5": {"logprobs": 5},
    "logprobs 20": {"logprobs": 20},
    "prompt_logprobs 0": {"prompt_logprobs": 0},
    "penalties": {"presence_penalty": 0.01, "frequency_penalty": 0.01},
    "penalties, logprobs 5": {"presence_penalty": 0.01, "frequency_penalty": 0.01, "logprobs": 5},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50, top_p 0.9, min_p 0.05": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
    "penalties, top_p 0.9": {"presence_penalty": 0.01, "frequency_penalty": 0.01, "top_p": 0.9},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="target: name, folder, .gguf file or random:SHAPE")
    parser.add_argument("--draft", default="smollm2-135m-dspark", help="drafter of all modes but off")
    parser.add_argument("--modes", nargs="+", default=["off", "static", "lag"], choices=MODES)
    parser.add_argument("--wishes", nargs="+", default=list(WISHES), choices=list(WISHES))
    parser.add_argument("--acceptance", default="coupled")
    parser.add_argument(
        "--prompts", type=Path, default=None, help="JSON lines with turns; default: the built-in sample"
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128, help="exact: nothing ends an answer before")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--waves", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    return parser.parse_args()


def params_of(options: argparse.Namespace, wish: str, count: int) -> list[SamplingParams]:
    base = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, ignore_eos=True)
    return [replace(base, seed=seed, **WISHES[wish]) for seed in range(count)]


def make_llm(options: argparse.Namespace, mode: str, models: Models, max_model_len: int) -> LLM:
    fields = {} if mode == "off" else {"draft_model": options.draft, "acceptance": options.acceptance}
    speculative = SpeculativeConfig.for_mode(mode, **fields)
    return LLM(
        models,
        speculative=speculative,
        max_num_seqs=options.concurrency,
        max_model_len=max_model_len,
        prefix_caching=False,
    )


def wave(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> dict[str, Any]:
    steps = llm.engine.num_decode_steps
    with former_objects_left_alone():
        answers = llm.generate(prompts, params)
    ends = perf_counter()
    timings = [answer.timing for answer in answers]
    last, first = max(t.last_token_s for t in timings), min(t.submitted_s for t in timings)
    return {
        "tok_per_s": sum(len(answer.token_ids) for answer in answers) / (last - first),
        "entries_ms": 1e3 * (ends - last),  # and texts
        "decode_steps": llm.engine.num_decode_steps - steps,
        "tokens_per_step": total(answers).mean_accepted_length,
        "entries": num_entries(answers),
    }


def num_entries(answers: list[Completion]) -> int:
    return sum(len(answer.logprobs or ()) + len(answer.prompt_logprobs or ()) for answer in answers)


def prompts_of(options: argparse.Namespace, models: Models, count: int) -> tuple[list[list[int]], int]:
    """Token ids of `count` prompts, in turns, and the positions that the longest needs with its answer."""
    texts = read_prompts(options.prompts)
    texts = [texts[i % len(texts)] for i in range(count)]
    length = positions_needed(models, [user(text) for text in texts], options.max_tokens)
    return [token_ids(models.tokenizer, user(text)) for text in texts], length


def write(options: argparse.Namespace, models: Models, rows: list[dict[str, Any]], **conditions: Any) -> None:
    """The report, to `options.out` if that is given."""
    given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    report = {**machine.provenance(models.device), "conditions": given | conditions, "rows": rows}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    options = arguments()
    models = load(options.model, options.draft, {"dtype": options.dtype}, {})
    prompts, length = prompts_of(options, models, options.requests)
    rows: list[dict[str, Any]] = []
    for mode in options.modes:
        llm = make_llm(options, mode, models, length)
        asked = {wish: params_of(options, wish, len(prompts)) for wish in options.wishes}
        for params in asked.values():  # compiles what only they need
            warm_up(llm, [tuple(prompt) for prompt in prompts], params)
        waves: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for _ in range(options.waves):
            for wish, params in asked.items():
                waves[wish].append(wave(llm, prompts, params))
        rows += table(mode, waves)
    write(options, models, rows, wishes=WISHES)


def table(mode: str, waves: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each wish, printed as well."""
    rows: list[dict[str, Any]] = []
    for wish, found in waves.items():
        speeds = [each["tok_per_s"] for each in found]
        row = {"mode": mode, "wish": wish, "wave_tok_per_s": speeds}
        row |= {name: median([each[name] for each in found]) for name in found[0]}
        base = rows[0]["tok_per_s"] if rows else row["tok_per_s"]
        row["x"] = base / row["tok_per_s"]
        rows.append(row)
        print(
            f"{mode:10} {wish:32} {row['tok_per_s']:10,.0f} tok/s ({min(speeds):,.0f} - {max(speeds):,.0f})  "
            f"x {row['x']:.3f}  tokens/step {row['tokens_per_step']:.2f}  entries {row['entries_ms']:.0f} ms",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main()
