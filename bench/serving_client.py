"""A client of `serving.py`: streams that are kept busy, with nothing but Python's own library, so that it costs little.

Its work comes as a line of JSON on stdin. It tells when it is there, begins at the next line, and says what it saw.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any


async def stream(port: int, path: str, body: bytes) -> dict[str, float]:
    """One request over a connection of its own: seconds to the first event and to the last, tokens, events."""
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    if b" 200 " not in await reader.readline():
        raise RuntimeError((await reader.read(2000)).decode())
    first_s, num_events, usage = 0.0, 0, b""
    async for line in reader:
        if line.startswith(b"data: {"):
            num_events, usage = num_events + 1, line
            first_s = first_s or time.perf_counter() - start
        elif line.startswith(b"data: [DONE]"):
            break
    writer.close()
    num_tokens = json.loads(usage[6:])["usage"]["completion_tokens"]
    return {"first_s": first_s, "last_s": time.perf_counter() - start, "tokens": num_tokens, "events": num_events}


async def client(port: int, path: str, num_streams: int, bodies: Sequence[bytes]) -> dict[str, Any]:
    waiting = iter(bodies)

    async def one_after_another() -> list[dict[str, float]]:
        return [await stream(port, path, body) for body in waiting]

    start = time.time()
    found = await asyncio.gather(*(one_after_another() for _ in range(num_streams)))
    return {"start": start, "end": time.time(), "answers": [answer for answers in found for answer in answers]}


def main() -> None:
    task = json.loads(sys.stdin.readline())
    if task["cores"]:
        os.sched_setaffinity(0, task["cores"])
    bodies = [json.dumps(fields).encode() for fields in task["requests"]]
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(asyncio.run(client(task["port"], task["path"], task["streams"], bodies))))


if __name__ == "__main__":
    main()
