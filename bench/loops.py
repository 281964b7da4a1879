"""The overlapped loop beside the plain one: what running one step ahead gains, or costs, on this machine.

    python -m bench.loops --out runs/loops.json

Two engines a mode over the same weights take turns wave by wave, and who begins changes. Where host and device are one,
nothing is hidden by overlap, and a request that has ended takes part in one step more. `x` is the speed of the plain
loop over the overlapped one's in the same turn: its median over turns, with the least and the most.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.requests import prompts_of, wave, write
from slipstream import LLM, SamplingParams, SpeculativeConfig
from slipstream.config import MODES
from slipstream.lab.measure import load, warm_up
from slipstream.lab.waves import median
from slipstream.load import Models

LOOPS = {"overlapped": True, "plain": False}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="target: name, folder, .gguf file or random:SHAPE")
    parser.add_argument("--draft", default="smollm2-135m-dspark", help="drafter of all modes but off")
    parser.add_argument("--modes", nargs="+", default=["off", "static", "lag", "lag-budget"], choices=MODES)
    parser.add_argument("--prompts", type=Path, default=None, help="JSON lines with turns; default: built-in")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--max-tokens", type=int, default=64, help="exact: nothing ends an answer before")
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    return parser.parse_args()


def make_llm(options: argparse.Namespace, mode: str, models: Models, concurrency: int, length: int, loop: str) -> LLM:
    fields = {} if mode == "off" else {"draft_model": options.draft}
    return LLM(
        models, speculative=SpeculativeConfig.for_mode(mode, **fields), max_num_seqs=concurrency, max_model_len=length,
        prefix_caching=False, overlap=LOOPS[loop],
    )  # fmt: skip


def main() -> None:
    options = arguments()
    models = load(options.model, options.draft, {"dtype": options.dtype}, {})
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    rows: list[dict[str, Any]] = []
    for concurrency in options.concurrency:
        count = options.requests * (1 if concurrency == 1 else 2)
        prompts, length = prompts_of(options, models, count)
        for mode in options.modes:
            llms = {loop: make_llm(options, mode, models, concurrency, length, loop) for loop in LOOPS}
            for llm in llms.values():
                warm_up(llm, [tuple(prompt) for prompt in prompts], [params] * count)
            speeds: dict[str, list[float]] = defaultdict(list)
            for turn in range(options.waves):
                for loop in sorted(LOOPS, reverse=turn % 2 == 1):
                    speeds[loop].append(wave(llms[loop], prompts, [params] * count)["tok_per_s"])
            rows.append(row_of(mode, concurrency, speeds))
    write(options, models, rows)


def row_of(mode: str, concurrency: int, speeds: dict[str, list[float]]) -> dict[str, Any]:
    """Printed as well."""
    ratios = [plain / ahead for plain, ahead in zip(speeds["plain"], speeds["overlapped"], strict=True)]
    row = {"mode": mode, "concurrency": concurrency, "x": median(ratios), "least": min(ratios), "most": max(ratios)}
    shown = ", ".join(f"{loop} {median(found):,.1f} tok/s" for loop, found in speeds.items())
    print(f"{mode:10} at {concurrency}: {shown}; x {row['x']:.3f} ({row['least']:.3f} - {row['most']:.3f})", flush=True)
    return {**row, "wave_tok_per_s": dict(speeds)}


if __name__ == "__main__":
    main()
