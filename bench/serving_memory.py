"""Does a server grow? `slipstream serve` as a process, many requests, and how much memory it and its engine have after each thousand.

    python bench/serving_memory.py --model FOLDER --draft FOLDER --verify lag --out runs/memory.json

Streams of random prompts and lengths, a fifth of which leave in the middle and a twentieth of which are nonsense. Linux only.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

LEAVE, NONSENSE = 0.2, 0.05


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", default="smollm2-135m-dspark")
    parser.add_argument("--verify", default="lag")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=1000, help="in each round")
    parser.add_argument("--streams", type=int, default=100, help="at a time")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    return parser.parse_args()


async def one(port: int, draw: random.Random, counts: dict[str, int]) -> None:
    fate = draw.random()
    prompt = [draw.randrange(4, 200) for _ in range(draw.randrange(4, 60))]
    fields = {"prompt": prompt, "max_tokens": draw.randrange(4, 48), "temperature": 1, "seed": 1, "stream": True}
    body = json.dumps(fields | ({"top_p": -1} if fate < NONSENSE else {})).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    lines_to_read = draw.randrange(8) if fate < NONSENSE + LEAVE else 10**6
    outcome = "left" if fate < NONSENSE + LEAVE else "broken"
    if fate < NONSENSE:
        outcome = "refused" if b" 400 " in await reader.readline() else "broken"
    else:
        async for line in reader:
            lines_to_read -= 1
            if line.startswith(b"data: [DONE]"):
                outcome = "whole"
            if lines_to_read <= 0 or outcome == "whole":
                break
    counts[outcome] = counts.get(outcome, 0) + 1
    writer.close()


async def round_of(port: int, options: argparse.Namespace, seed: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    waiting = iter(range(options.requests))

    async def one_after_another() -> None:
        for number in waiting:
            await one(port, random.Random(seed * 10**6 + number), counts)

    await asyncio.gather(*(one_after_another() for _ in range(options.streams)))
    return counts


def processes(pid: int) -> dict[str, int]:
    """The server's, and the one in which its engine is."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (engine,) = (child for child in children if b"engine_main" in Path(f"/proc/{child}/cmdline").read_bytes())
    return {"server": pid, "engine": int(engine)}


def resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def main() -> None:
    options = arguments()
    names = ("model", "draft", "verify", "dtype")
    flags = [word for name in names for word in (f"--{name}", getattr(options, name))]
    command = [sys.executable, "-m", "slipstream", "serve", "--port", "0", *flags]
    rounds: list[dict[str, Any]] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        port = json.loads(next(line for line in server.stderr if '"serving"' in line))["port"]
        sink = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)  # or its log would stop it
        for number in range(options.rounds):
            counts = asyncio.run(round_of(port, options, number))
            resident = {name: resident_mb(pid) for name, pid in processes(server.pid).items()}
            rounds.append({"requests": (number + 1) * options.requests, "resident_mb": resident, **counts})
            print(json.dumps(rounds[-1]), flush=True)
        server.terminate()
    sink.wait()
    if options.out:
        conditions = {name: str(value) for name, value in vars(options).items()}
        report = {"command": sys.argv, "conditions": conditions, "cores": os.cpu_count(), "rounds": rounds}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
