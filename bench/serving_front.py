"""What serving costs the server's process, beside an engine that answers by the clock and costs nothing.

    python bench/serving_front.py --streams 64 --requests 1024 --out runs/front.json

The engine has slots and a process of its own, as a real one, but no weights: a step takes --step-ms, admits who waits,
and gives each request some tokens of one and the same text. So server, wire and clients do what they do beside a fast
GPU, on any machine. `server` is CPU time of the server's process, in all its threads, per request; `empty` is the share
of slots that nobody has, in all steps of a wave but the first and the last tenth. On a machine with few cores clients
and engine keep the server from its own: CPU time is what can be compared then.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slipstream.lab import machine
from slipstream.lab.measure import former_objects_left_alone
from slipstream.lab.waves import median
from slipstream.models.locate import resolve_target
from slipstream.models.tokenizer import load_tokenizer
from slipstream.prompts import read_prompts, user
from slipstream.serve.logs import JsonFormatter

sys.path.insert(0, str(Path(__file__).parents[1]))  # the engine's process imports from there as well
from bench import serving, serving_paced


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer it is")
    parser.add_argument("--requests", type=int, default=1024, help="in each wave")
    parser.add_argument("--streams", type=int, default=64, help="at a time; the engine has as many slots")
    parser.add_argument("--max-tokens", type=int, default=256, help="the mean, as in serving.py")
    parser.add_argument("--step-ms", type=float, default=1.5)
    parser.add_argument("--most-tokens", type=int, default=8, help="that a step gives a request; the mean is near half")
    parser.add_argument("--chat", action="store_true", help="messages, not token ids")
    parser.add_argument("--waves", type=int, default=5)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--client-cores", default=None)
    parser.add_argument("--engine-cores", default=None)
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    parser.set_defaults(in_thread=False)  # which serving.py lets one choose
    return parser.parse_args()


def wave(running: serving.Running, options: argparse.Namespace, requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    running.ask(partial(serving_paced.occupied, forget=True))
    found = serving.served(running, options, path_of(options), requests, None)
    server_s = found.pop("server_s")
    steps = running.ask(partial(serving_paced.occupied, forget=True))
    middle = steps[len(steps) // 10 : len(steps) - len(steps) // 10]
    return {
        **found, "server_us_per_request": 1e6 * server_s / len(requests),
        "server_us_per_token": 1e6 * server_s / found["tokens"], "server_busy": server_s / found["seconds"],
        "empty": 1 - sum(middle) / (options.streams * len(middle)), "tok_per_s": found["tokens"] / found["seconds"],
    }  # fmt: skip


def path_of(options: argparse.Namespace) -> str:
    return "/v1/chat/completions" if options.chat else serving.PATH


def bodies(options: argparse.Namespace) -> list[dict[str, Any]]:
    tokenizer, texts = load_tokenizer(resolve_target(options.model)), read_prompts(None)
    asked = []
    for seed, length in enumerate(serving.lengths(options)):
        messages = user(texts[seed % len(texts)])
        prompt = {"messages": messages} if options.chat else {"prompt": tokenizer.encode(tokenizer.chat(messages))}
        fields = {"seed": seed, "max_tokens": length, "temperature": 0.0, "ignore_eos": True}
        asked.append({**prompt, **fields, "stream": True, "stream_options": {"include_usage": True}})
    return asked


@contextmanager
def logged() -> Iterator[None]:
    """A line a request is written, as a server does, but nobody sees it."""
    logger = logging.getLogger("slipstream.serve")
    level, propagate = logger.level, logger.propagate
    with open(os.devnull, "w") as nowhere:
        handler = logging.StreamHandler(nowhere)
        handler.setFormatter(JsonFormatter())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


def main() -> None:
    options = arguments()
    if taken := serving.cores(options.client_cores):
        os.sched_setaffinity(0, os.sched_getaffinity(0) - taken)
    requests, waves = bodies(options), []
    with serving.serving(options, serving_paced.make) as running, logged():
        serving.served(running, options, path_of(options), requests[: 2 * options.streams], None)
        with former_objects_left_alone():  # as in a server
            for _ in range(options.waves):
                waves.append(wave(running, options, requests))
                print(_line(waves[-1]), flush=True)
    row = {name: median([each[name] for each in waves]) for name in waves[0]}
    print(_line(row))
    if options.out:
        conditions = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        report = {**machine.provenance(torch.device("cpu")), "conditions": conditions, "waves": waves, "median": row}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    return (
        f"server {row['server_us_per_request']:7,.0f} us a request  {row['server_us_per_token']:5.2f} a token  "
        f"busy {100 * row['server_busy']:3.0f}%  empty {100 * row['empty']:4.1f}%  {row['tok_per_s']:8,.0f} tok/s  "
        f"first token {row['ttft_ms_p50']:5.1f} ms, p99 {row['ttft_ms_p99']:5.1f}  {row['events'] / 1e3:.1f}k events"
    )


if __name__ == "__main__":
    main()
