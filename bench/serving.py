"""What serving costs beside `LLM.generate`: the same requests, offline and over HTTP, in turn on one engine.

    python bench/serving.py --draft smollm2-135m-dspark --verify lag --streams 64 --requests 2048 --out runs/serving.json

Served waves go through the server of `slipstream serve` in this process, whose engine has a process of its own or, with
--in-thread, a thread here; the clients are processes without a library (so that they cost little). The three are on
cores of their own where --client-cores and --engine-cores name them. Each client keeps its streams busy, one request
after another. A wave lasts from the first request to the last token: it begins with all streams at once and ends with
some of them, so give it many times as many --requests as --streams, for that to be a small part. Offline waves are
`LLM.generate` where the engine is, of the same requests in the same order. `x` is offline tokens per second beside
served ones, from medians over waves; `cpu` is what server and engine used in all their threads during a wave, per output token, which
other work on the machine changes less. With --scrape a third wave asks for /metrics meanwhile, so that steps are recorded.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from slipstream import SamplingParams
from slipstream.config import MODES
from slipstream.lab.measure import former_objects_left_alone
from slipstream.lab.waves import median
from slipstream.serve.app import Server, bind
from slipstream.serve.driver import Driver
from slipstream.serve.engine_process import EngineProcess
from slipstream.serve.options import ServeOptions
from slipstream.serve.wire import SWITCH_INTERVAL_S

sys.path.insert(0, str(Path(__file__).parents[1]))  # the engine's process imports from there as well
from bench import serving_engine
from bench.serving_engine import cores

QUANTILES = (0.5, 0.95, 0.99)
NAME, PATH = "served", "/v1/completions"
Value = TypeVar("Value")
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
    parser.add_argument("--client-cores", default=None, help="as 8-15; the server takes the others")
    parser.add_argument("--engine-cores", default=None, help="of these; the server takes what is left then")
    parser.add_argument("--in-thread", action="store_true", help="the engine in a thread of the server's process")
    parser.add_argument(
        "--scrape", type=float, default=None, help="seconds between two looks at /metrics, in a third wave"
    )
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    return parser.parse_args()


class Running:
    """A server in a thread of this process, with the interpreter as `slipstream serve` sets it, and its engine."""

    def __init__(self, server: Server, port: int) -> None:
        self._server, self.port = server, port

    def ask(self, function: Callable[[Driver], Value]) -> Value:
        """Of the engine."""

        async def ask() -> Any:
            return await self._server.app.state.service.engine.ask(function)

        return asyncio.run_coroutine_threadsafe(ask(), self._server.servers[0].get_loop()).result()


@contextmanager
def serving(
    options: argparse.Namespace, make: Callable[[argparse.Namespace], Any] = serving_engine.make
) -> Iterator[Running]:
    """make: called where the engine is to be."""
    chosen = ServeOptions(port=0, max_waiting=options.requests)
    bound, interval, process = bind(chosen), sys.getswitchinterval(), None
    if options.in_thread:
        engines: Any = make(options)
    else:
        engines = process = EngineProcess(make, options, options=chosen)
        if taken := cores(options.engine_cores):
            os.sched_setaffinity(0, os.sched_getaffinity(0) - taken)
    server = Server(engines, chosen, NAME)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield Running(server, bound.getsockname()[1])
    finally:
        server.servers[0].get_loop().call_soon_threadsafe(server.close)
        thread.join()
        bound.close()
        if process is not None:
            process.close()
        sys.setswitchinterval(interval)


def served(
    running: Running, options: argparse.Namespace, path: str, requests: Sequence[dict[str, Any]], scrape: float | None
) -> dict[str, Any]:
    """path: where the requests go; here and in `clients`."""
    with clients(options, running.port, path, requests) as each_client, scraped(running.port, scrape):
        server_s = time.process_time()  # not what starting the clients took
        for each in each_client:
            tell(each, "go")
        lines = [each.stdout.readline() for each in each_client if each.stdout is not None]
        server_s = time.process_time() - server_s
    seen = [json.loads(line) for line in lines]
    answers = [answer for each in seen for answer in each["answers"]]
    found = {"seconds": max(each["end"] for each in seen) - min(each["start"] for each in seen)}
    found |= {"server_s": server_s, "tokens": sum(answer["tokens"] for answer in answers)}
    found |= {"events": sum(answer["events"] for answer in answers)}
    return found | {f"ttft_ms_p{100 * q:.0f}": quantile([1e3 * a["first_s"] for a in answers], q) for q in QUANTILES}


def wave(running: Running, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """With steps, and CPU of the server and of the engine; where they are one process, of both."""
    with former_objects_left_alone():
        running.ask(partial(serving_engine.collect, freeze=True))
        pid, steps, engine_s = running.ask(serving_engine.counts)
        found = make()
        _, steps_now, engine_now_s = running.ask(serving_engine.counts)
        running.ask(partial(serving_engine.collect, freeze=False))
    engine_s, server_s = engine_now_s - engine_s, found.pop("server_s", None)
    if pid == os.getpid():  # the engine's count has the starting of clients in it
        cpu = {"both": engine_s if server_s is None else server_s}
    else:
        cpu = {"engine": engine_s, "server": server_s or 0.0}
    tokens, steps = found["tokens"], steps_now - steps
    return {
        **found, "decode_steps": steps, "tok_per_s": tokens / found["seconds"],
        "step_ms": 1e3 * found["seconds"] / steps, "cpu_us_per_token": 1e6 * sum(cpu.values()) / tokens,
        **{f"{name}_cpu_us_per_token": 1e6 * seconds / tokens for name, seconds in cpu.items()},
    }  # fmt: skip


@contextmanager
def clients(
    options: argparse.Namespace, port: int, path: str, requests: Sequence[dict[str, Any]]
) -> Iterator[list["subprocess.Popen[str]"]]:
    """Processes that are there and wait for a line."""
    command, count, running = [sys.executable, str(CLIENT)], options.clients, []
    for number in range(count):
        each = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        streams = streams_of(options, number)
        tell(
            each,
            json.dumps(
                {
                    "port": port,
                    "path": path,
                    "streams": streams,
                    "requests": requests[number::count],
                    "cores": sorted(cores(options.client_cores)),
                }
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


def quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


def lengths(options: argparse.Namespace) -> list[int]:
    """Of the answers, in an order that is random and always the same; what each client asks for is about as much.

    The last ones of a client, one a stream, are the longest first: they begin one after another, and end together.
    """
    count, clients, found = options.requests, options.clients, [0] * options.requests
    spread = [max(1, round(options.max_tokens * (0.5 + (place + 0.5) / count))) for place in range(count)]
    for number in range(clients):
        share = spread[number::clients]
        random.Random(number).shuffle(share)
        first = max(len(share) - streams_of(options, number), 0)
        found[number::clients] = share[:first] + sorted(share[first:], reverse=True)
    return found


def streams_of(options: argparse.Namespace, number: int) -> int:
    """Of a client."""
    share, rest = divmod(options.streams, options.clients)
    return int(share + (number < rest))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if taken := cores(options.client_cores):
        os.sched_setaffinity(0, os.sched_getaffinity(0) - taken)
    asked = [
        {"seed": seed, "max_tokens": length, "temperature": options.temperature, "ignore_eos": True}
        for seed, length in enumerate(lengths(options))
    ]
    params = [SamplingParams(**fields) for fields in asked]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    waves: dict[str, list[dict[str, Any]]] = {"offline": [], "served": []} | ({"scraped": []} if options.scrape else {})
    with serving(options) as running:
        prompts = running.ask(partial(serving_engine.prompts, options=options))
        requests = [{"prompt": prompt, **fields, **usage} for prompt, fields in zip(prompts, asked, strict=True)]
        running.ask(partial(serving_engine.warmed, prompts=prompts, params=params))
        ways = {
            "offline": lambda: running.ask(partial(serving_engine.offline, prompts=prompts, params=params)),
            "served": lambda: served(running, options, PATH, requests, None),
            "scraped": lambda: served(running, options, PATH, requests, options.scrape),
        }
        for _ in range(options.waves):
            for kind, found in waves.items():
                found.append(wave(running, ways[kind]))
                print(
                    f"{kind:8} {found[-1]['tok_per_s']:10,.0f} tok/s  {found[-1]['step_ms']:.3f} ms a step", flush=True
                )
        provenance = running.ask(serving_engine.provenance)
    conditions = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    return {**provenance, "conditions": conditions, "rows": table(waves)}


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
            + (f" ({row['engine_cpu_us_per_token']:.1f} the engine)" if "engine_cpu_us_per_token" in row else "")
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
