"""What serving costs beside `LLM.generate`: the same requests, offline and over HTTP, in turn on one engine.

    python bench/serving.py --draft smollm2-135m-dspark --verify lag --streams 64 --out runs/serving.json

Served waves go through the server of `slipstream serve` in this process, whose engine has a thread of its own; the
clients are processes without a library (so that they cost little), on other cores where --client-cores names them. Each
keeps its streams busy, one request after another. `x` is offline tokens per second beside served ones, from medians over
waves; `cpu` is what this process used in all its threads, per output token, which other work on the machine changes less.
With --scrape a third wave asks for /metrics meanwhile, so that steps are recorded.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream import LLM, SamplingParams, SpeculativeConfig
from slipstream.config import MODES
from slipstream.lab import machine
from slipstream.lab.measure import former_objects_left_alone, load, positions_needed, token_ids, warm_up
from slipstream.lab.waves import median
from slipstream.prompts import read_prompts, user

QUANTILES = (0.5, 0.95, 0.99)
NAME = "served"
CLIENT = Path(__file__).with_name("serving_client.py")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="target: name, folder, .gguf file or random:SHAPE")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--verify", default="off", choices=MODES)
    parser.add_argument(
        "--prompts", type=Path, default=None, help="JSON lines with turns; default: the built-in sample"
    )
    parser.add_argument("--requests", type=int, default=128, help="in each wave")
    parser.add_argument("--streams", type=int, default=64, help="at a time; the engine has as many slots")
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="the mean; lengths are spread evenly, a half to one and a half"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--waves", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--clients", type=int, default=1, help="processes that the streams are shared among")
    parser.add_argument("--client-cores", default=None, help="as 8-15; this process takes the others")
    parser.add_argument(
        "--scrape", type=float, default=None, help="seconds between two looks at /metrics, in a third wave"
    )
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    return parser.parse_args()


@contextmanager
def serving(llm: LLM, num_waiting: int) -> Iterator[int]:
    """The port of a server in a thread of this process, with the interpreter as `slipstream serve` sets it."""
    from slipstream.serve.app import SWITCH_INTERVAL_S, Server, bind
    from slipstream.serve.options import ServeOptions

    options = ServeOptions(port=0, max_waiting=num_waiting)
    bound, server, interval = bind(options), Server(llm, options, NAME), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield bound.getsockname()[1]
    finally:
        server.servers[0].get_loop().call_soon_threadsafe(server.close)
        thread.join()
        bound.close()
        sys.setswitchinterval(interval)


def offline(llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> dict[str, float]:
    with counted(llm) as found, former_objects_left_alone():
        answers = llm.generate(prompts, params)
        timings = [answer.timing for answer in answers]
        seconds = max(t.last_token_s for t in timings) - min(t.submitted_s for t in timings)
        found |= {"seconds": seconds, "tokens": sum(len(answer.token_ids) for answer in answers)}
    return derived(found)


def served(
    llm: LLM, options: argparse.Namespace, requests: Sequence[dict[str, Any]], scrape: float | None
) -> dict[str, Any]:
    with serving(llm, len(requests)) as port, counted(llm) as found, former_objects_left_alone():
        with clients(options, port, requests) as running, scraped(port, scrape):
            for each in running:
                tell(each, "go")
            seen = [json.loads(each.stdout.readline()) for each in running if each.stdout is not None]
        answers = [answer for each in seen for answer in each["answers"]]
        seconds = max(each["end"] for each in seen) - min(each["start"] for each in seen)
        found |= {"seconds": seconds, "tokens": sum(answer["tokens"] for answer in answers)}
    found |= {"events": sum(answer["events"] for answer in answers)}
    found |= {f"ttft_ms_p{100 * q:.0f}": quantile([1e3 * a["first_s"] for a in answers], q) for q in QUANTILES}
    return derived(found)


@contextmanager
def counted(llm: LLM) -> Iterator[dict[str, Any]]:
    """Steps, and CPU seconds of this process."""
    found: dict[str, Any] = {}
    steps, cpu_s = llm.engine.num_decode_steps, time.process_time()
    yield found
    found |= {"decode_steps": llm.engine.num_decode_steps - steps, "cpu_s": time.process_time() - cpu_s}


def derived(found: dict[str, Any]) -> dict[str, Any]:
    tokens, steps = found["tokens"], found["decode_steps"]
    return {
        **found, "tok_per_s": tokens / found["seconds"], "step_ms": 1e3 * found["seconds"] / steps,
        "cpu_us_per_token": 1e6 * found["cpu_s"] / tokens,
    }  # fmt: skip


@contextmanager
def clients(
    options: argparse.Namespace, port: int, requests: Sequence[dict[str, Any]]
) -> Iterator[list["subprocess.Popen[str]"]]:
    """Processes that are there and wait for a line."""
    command, count, running = [sys.executable, str(CLIENT)], options.clients, []
    for number in range(count):
        each = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        streams = options.streams // count + (number < options.streams % count)
        tell(
            each,
            json.dumps(
                {"port": port, "streams": streams, "requests": requests[number::count], "cores": cores(options)}
            ),
        )
        running.append(each)
    for each in running:
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    yield running
    for each in running:
        each.communicate()


def tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


@contextmanager
def scraped(port: int, seconds: float | None) -> Iterator[None]:
    """Somebody looks at /metrics meanwhile."""
    from urllib.request import urlopen

    done = threading.Event()

    def look() -> None:
        while seconds is not None and not done.wait(seconds):
            urlopen(f"http://127.0.0.1:{port}/metrics").read()

    thread = threading.Thread(target=look)
    thread.start()
    yield
    done.set()
    thread.join()


def cores(options: argparse.Namespace) -> list[int]:
    if options.client_cores is None:
        return []
    first, _, last = options.client_cores.partition("-")
    return list(range(int(first), int(last or first) + 1))


def quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


def lengths(mean: int, count: int) -> list[int]:
    """Of the answers, so that they do not all end in the same step: in an order that is random and always the same."""
    spread = [max(1, round(mean * (0.5 + (place + 0.5) / count))) for place in range(count)]
    random.Random(0).shuffle(spread)
    return spread


def make_llm(options: argparse.Namespace) -> tuple[LLM, list[list[int]]]:
    models = load(options.model, options.draft, {"dtype": options.dtype}, {})
    texts = read_prompts(options.prompts)
    texts = [texts[i % len(texts)] for i in range(options.requests)]
    length = positions_needed(models, [user(text) for text in texts], 2 * options.max_tokens)
    fields = {} if options.verify == "off" else {"draft_model": options.draft}
    speculative = SpeculativeConfig.for_mode(options.verify, **fields)
    llm = LLM(models, speculative=speculative, max_num_seqs=options.streams, max_model_len=length)
    return llm, [token_ids(models.tokenizer, user(text)) for text in texts]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if taken := cores(options):
        os.sched_setaffinity(0, os.sched_getaffinity(0) - set(taken))
    llm, prompts = make_llm(options)
    asked = [
        {"seed": seed, "max_tokens": length, "temperature": options.temperature, "ignore_eos": True}
        for seed, length in enumerate(lengths(options.max_tokens, len(prompts)))
    ]
    params = [SamplingParams(**fields) for fields in asked]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    requests = [{"prompt": prompt, **fields, **usage} for prompt, fields in zip(prompts, asked, strict=True)]
    warm_up(llm, [tuple(prompt) for prompt in prompts], params)
    waves: dict[str, list[dict[str, Any]]] = {"offline": [], "served": []} | ({"scraped": []} if options.scrape else {})
    for _ in range(options.waves):
        for kind, found in waves.items():
            scrape = options.scrape if kind == "scraped" else None
            found.append(offline(llm, prompts, params) if kind == "offline" else served(llm, options, requests, scrape))
            print(f"{kind:8} {found[-1]['tok_per_s']:10,.0f} tok/s  {found[-1]['step_ms']:.3f} ms a step", flush=True)
    conditions = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    return {**machine.provenance(llm.models.device), "conditions": conditions, "rows": table(waves)}


def table(waves: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each kind of wave, printed as well."""
    rows: list[dict[str, Any]] = []
    for kind, found in waves.items():
        row: dict[str, Any] = {"kind": kind, "wave_tok_per_s": [each["tok_per_s"] for each in found]}
        row |= {name: median([each[name] for each in found]) for name in found[0]}
        row["x"] = (rows[0] if rows else row)["tok_per_s"] / row["tok_per_s"]
        rows.append(row)
        print(
            f"{kind:8} {row['tok_per_s']:10,.0f} tok/s ({min(row['wave_tok_per_s']):,.0f} - {max(row['wave_tok_per_s']):,.0f})"
            f"  x {row['x']:.3f}  {row['step_ms']:.3f} ms a step  cpu {row['cpu_us_per_token']:.1f} us a token"
            + (f"  first token {row['ttft_ms_p50']:.1f} ms, p99 {row['ttft_ms_p99']:.1f}" if "events" in row else "")
        )
    return rows


def main() -> None:
    options = arguments()
    report = measure(options)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
