"""What memory does for speed: prefixes that are found instead of computed, and a pool of half the pages needed.

    PYTHONPATH=$PWD python -m bench.memory --out runs/memory.json
    PYTHONPATH=$PWD python -m bench.memory --parts fit --model random:qwen3-8b --draft random --mode static --concurrency 256 \
        --requests 256 --out runs/memory-fit.json

Prefix: every request begins with the same `--prefix` tokens (prompts of the file, one after another) and goes on with a
prompt of its own. Cases `cold` and `cached` take turns wave by wave; each wave begins with an empty cache. `prefill rows`
are prompt tokens that were computed. Pressure: the same prompts without the prefix, with KV pages for all (`roomy`) and
for half of what `--concurrency` requests fill at their ends (`half`). `same` counts answers equal to those of the other
case, token by token: in bf16 a near tie may fall otherwise. Fit (on a GPU): engines under both acceptance rules that size
their pools by themselves, each served alone, at temperature 1 with top-p and log-probabilities: what was measured at start,
the pool that it left, and the most that was taken of the GPU, beside the mark that it must not pass. What a step takes more
under rejection is the price of its distributions.
"""

import argparse
import json
import time
from collections import defaultdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any, get_args

import torch

from slipstream import LLM, Completion, SamplingParams, SpeculativeConfig
from slipstream.config import MODES, Acceptance
from slipstream.device.memory import DeviceUse, release_cached
from slipstream.lab import machine
from slipstream.lab.measure import former_objects_left_alone, load, token_ids
from slipstream.lab.waves import median, total
from slipstream.load import Models
from slipstream.prompts import read_prompts, user

Ids = list[int]
PARTS = {"prefix": ("cold", "cached"), "pressure": ("roomy", "half")}
FIT = "fit"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="target: name, folder, .gguf file or random:SHAPE")
    parser.add_argument("--draft", default="smollm2-135m-dspark")
    parser.add_argument("--mode", default="lag", choices=MODES)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=[*PARTS, FIT])
    parser.add_argument("--prompts", type=Path, default=None, help="JSON lines with turns; default: the built-in one")
    parser.add_argument("--prefix", type=int, default=1000, help="tokens that all requests begin with")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64, help="exact: nothing ends an answer before")
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--utilization", type=float, default=None, help="fit: gpu_memory_utilization")
    parser.add_argument("--max-model-len", type=int, default=None, help="fit: default: the target's limit")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    return parser.parse_args(given)


def make_llm(options: argparse.Namespace, models: Models, prompts: list[Ids], **engine: Any) -> LLM:
    fields = {} if options.mode == "off" else {"draft_model": options.draft}
    longest = max(map(len, prompts)) + options.max_tokens + 1
    room = {"max_num_seqs": options.concurrency, "max_model_len": longest, "prefix_caching": False}
    return LLM(models, speculative=SpeculativeConfig.for_mode(options.mode, **fields), **{**room, **engine})


def prefix_engines(options: argparse.Namespace, models: Models, asked: list[Ids]) -> tuple[dict[str, LLM], list[Ids]]:
    examples = [token for prompt in islice(cycle(asked), options.prefix) for token in prompt][: options.prefix]
    prompts = [examples + prompt for prompt in asked]
    return {
        name: make_llm(options, models, prompts, prefix_caching=name == "cached") for name in PARTS["prefix"]
    }, prompts


def pressure_engines(options: argparse.Namespace, models: Models, asked: list[Ids]) -> tuple[dict[str, LLM], list[Ids]]:
    roomy = make_llm(options, models, asked)
    pages = roomy.engine.scheduler.pages
    ends = sorted((pages.pages_for(len(prompt) + options.max_tokens) for prompt in asked), reverse=True)
    half = sum(ends[: options.concurrency]) // 2
    return {"roomy": roomy, "half": make_llm(options, models, asked, kv_memory=_bytes_of(roomy, half))}, asked


def _bytes_of(llm: LLM, pages: int) -> int:
    """kv_memory that holds so many pages; the engine says what it took for those it has."""
    (taken,) = (value for name, value, _ in llm.notes if name == "kv_memory")
    whole = llm.engine.scheduler.pages
    reserved = whole.num_pages - whole.num_usable
    return (pages + reserved) * (taken // whole.num_pages)


def wave(llm: LLM, prompts: list[Ids], params: SamplingParams) -> tuple[dict[str, float], list[Completion]]:
    scheduler = llm.engine.scheduler
    prefixes = scheduler.prefixes
    prefixes.discard_all()
    before = prefixes.num_queried - prefixes.num_hits, scheduler.num_preemptions
    with former_objects_left_alone():
        answers = llm.generate(prompts, params)
    first, last = min(a.timing.submitted_s for a in answers), max(a.timing.last_token_s for a in answers)
    return {
        "tok_per_s": sum(len(answer.token_ids) for answer in answers) / (last - first),
        "ttft_ms": median([1e3 * (a.timing.first_token_s - a.timing.submitted_s) for a in answers]),
        "prefill_rows": prefixes.num_queried - prefixes.num_hits - before[0],
        "preemptions": scheduler.num_preemptions - before[1],
        "tokens_per_step": total(answers).mean_accepted_length or 1.0,
    }, answers


def measure(part: str, options: argparse.Namespace, llms: dict[str, LLM], prompts: list[Ids]) -> list[dict[str, Any]]:
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    waves: dict[str, list[dict[str, float]]] = defaultdict(list)
    texts: dict[str, list[tuple[int, ...]]] = {}
    for number in range(options.waves + 1):
        for case, llm in llms.items():
            found, answers = wave(llm, prompts, params)
            if number:  # the first one warms up
                waves[case].append(found)
                texts[case] = [answer.token_ids for answer in answers]
    one, two = texts.values()
    same = sum(a == b for a, b in zip(one, two, strict=True))
    return [row(part, case, found, same, options.requests) for case, found in waves.items()]


def row(part: str, case: str, waves: list[dict[str, float]], same: int, requests: int) -> dict[str, Any]:
    found: dict[str, Any] = {name: median([each[name] for each in waves]) for name in waves[0]}
    found = {"part": part, "case": case, **found, "wave_tok_per_s": [each["tok_per_s"] for each in waves], "same": same}
    print(
        f"{part:9} {case:7} {found['tok_per_s']:9,.0f} tok/s  ttft {found['ttft_ms']:7,.0f} ms  prefill rows "
        f"{found['prefill_rows']:7,.0f}  preemptions {found['preemptions']:4.0f}  tokens/step "
        f"{found['tokens_per_step']:.2f}  same {same}/{requests}",
        flush=True,
    )
    return found


def fit(options: argparse.Namespace, models: Models, prompts: list[Ids]) -> list[dict[str, Any]]:
    """A row for each acceptance rule; bytes."""
    return [fit_row(options, rule, models, prompts) for rule in get_args(Acceptance) if options.mode != "off"]


def fit_row(options: argparse.Namespace, rule: Acceptance, models: Models, prompts: list[Ids]) -> dict[str, Any]:
    release_cached(models.device)
    speculative = SpeculativeConfig.for_mode(options.mode, draft_model=options.draft, acceptance=rule)
    started, room = time.perf_counter(), {"max_num_seqs": options.concurrency, "max_model_len": options.max_model_len}
    llm = LLM(models, speculative=speculative, gpu_memory_utilization=options.utilization, **room)
    notes = {name: (value, reason) for name, value, reason in llm.notes}
    found: dict[str, Any] = {"part": FIT, "case": rule, "start_s": time.perf_counter() - started}
    found |= {name: notes[name] for name in ("gpu_memory_utilization", "kv_memory", "graphs") if name in notes}
    on_gpu = models.device.type == "cuda"
    if on_gpu:
        use = DeviceUse.of(models.device)
        torch.cuda.reset_peak_memory_stats(models.device)
        found |= {"idle_bytes": use.taken, "mark_bytes": int(notes["gpu_memory_utilization"][0] * use.total)}
    params = [
        SamplingParams(
            temperature=1.0, top_p=0.9, logprobs=5, seed=seed, max_tokens=options.max_tokens, ignore_eos=True
        )
        for seed in range(len(prompts))
    ]
    answers = llm.generate(prompts, params)
    found["errors"] = sum(answer.error is not None for answer in answers)
    found["preemptions"] = llm.engine.scheduler.num_preemptions
    if on_gpu:
        after = DeviceUse.of(models.device)
        most = torch.cuda.max_memory_reserved(models.device)
        found |= {
            "most_bytes": most + after.beside_torch,
            "most_allocated_bytes": torch.cuda.max_memory_allocated(models.device),
        }
    print(json.dumps(found), flush=True)
    return found


def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    models = load(options.model, options.draft, {"dtype": options.dtype}, {})
    texts = list(islice(cycle(read_prompts(options.prompts)), options.requests))
    asked = [token_ids(models.tokenizer, user(text)) for text in texts]
    rows: list[dict[str, Any]] = []
    for part in options.parts:
        if part == FIT:
            rows += fit(options, models, asked)
            continue
        engines = prefix_engines if part == "prefix" else pressure_engines
        rows += measure(part, options, *engines(options, models, asked))
    conditions = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    report = {**machine.provenance(models.device), "conditions": conditions, "rows": rows}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
