"""Under load: a queue with an end, time limits, clients that leave or do not read; nothing of any of them stays behind."""

import asyncio
import gc
import json
import logging
import random
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from slipstream.config import SamplingParams
from slipstream.load import Models
from tests.serve.conftest import CHAT, COMPLETIONS, Running, make_llm, serving, slowed

LONG = {"prompt": "once", "max_tokens": 200, "ignore_eos": True, "seed": 1, "temperature": 1}


@contextmanager
def in_background(running: Running, count: int, **fields: Any) -> Iterator[list[httpx2.Response]]:
    """So many requests at once; their responses are there behind the block."""
    responses: list[httpx2.Response] = []
    threads = [
        threading.Thread(target=lambda: responses.append(running.post(COMPLETIONS, **fields))) for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    yield responses
    for thread in threads:
        thread.join(60)


def raw_request(port: int, receive_buffer: int | None = None, **fields: Any) -> socket.socket:
    """A connection over which a request was sent and nothing was read."""
    body = json.dumps(fields).encode()
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", port))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_a_full_queue(tiny_pair: Models) -> None:
    llm = make_llm(tiny_pair, max_num_seqs=2)
    with serving(llm, max_waiting=2) as running, slowed(llm, 0.005):
        with in_background(running, 4, **LONG) as responses:
            running.wait_until(lambda: running.service.num_open == 4)
            running.wait_until(lambda: running.metric("num_requests_running") == 2)
            assert running.metric("num_requests_waiting") == 2
            assert running.metric("kv_cache_usage_perc") > 0
            refused = running.post(COMPLETIONS, prompt="x")
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "queue_full"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert running.http.get("/ready").status_code == 200
            assert running.post(COMPLETIONS, prompt="x", n=5).status_code == 400  # has never room
        assert [response.status_code for response in responses] == [200] * 4
        assert running.post(COMPLETIONS, prompt="x", n=4).status_code == 200
        running.settle()


def test_answers_that_take_too_long(tiny_pair: Models) -> None:
    """One in its slot, one that still waits, and a stream that has begun."""
    llm = make_llm(tiny_pair, max_num_seqs=1)
    with serving(llm, request_timeout_s=0.5) as running, slowed(llm, 0.05):
        with in_background(running, 2, **LONG) as responses:
            pass
        assert [response.status_code for response in responses] == [504, 504]
        assert responses[0].json()["error"]["code"] == "timeout"
        running.settle()
        with running.http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as response:
            assert response.status_code == 200
            lines = [line for line in response.iter_lines() if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        assert len(lines) > 1
        running.settle()


@pytest.mark.parametrize(
    ("waits", "stream"),
    [
        pytest.param(True, False, id="in the queue"),
        pytest.param(False, True, id="in a slot, reading"),
        pytest.param(True, True, id="in the queue, to read", marks=pytest.mark.slow),
        pytest.param(False, False, id="in a slot", marks=pytest.mark.slow),
    ],
)
def test_a_client_that_leaves(tiny_pair: Models, stream: bool, waits: bool) -> None:
    llm = make_llm(tiny_pair, max_num_seqs=1 if waits else 4)
    with serving(llm) as running, slowed(llm, 0.01):
        with in_background(running, 1, **LONG) as stays:
            running.wait_until(lambda: running.service.engine.num_open == 1)
            connection = raw_request(running.port, **LONG, n=2, stream=stream)
            running.wait_until(lambda: running.service.num_open == 3)
            running.wait_until(lambda: running.service.engine.num_open == 3)
            if not waits:
                time.sleep(0.1)
            connection.close()
            running.wait_until(lambda: running.service.num_open == 1, seconds=1)
        assert stays[0].json()["usage"]["completion_tokens"] == 200
        running.settle()
        running.wait_until(lambda: running.metric("http_problems_total", status="499") == 1)


def test_a_client_that_does_not_read(tiny_pair: Models) -> None:
    """Nobody waits for it: its neighbour is served meanwhile, and it is cut off when too much waits for it."""
    llm = make_llm(tiny_pair)
    with serving(llm, max_backlog=20, stream_interval_s=0, send_buffer=4096) as running:
        deaf = raw_request(running.port, **LONG, logprobs=20, n=2, stream=True, receive_buffer=2048)
        with deaf:
            running.wait_until(lambda: running.service.num_open == 2)
            assert running.post(COMPLETIONS, **LONG).json()["usage"]["completion_tokens"] == 200
            running.wait_until(lambda: running.service.num_open == 0)
            running.wait_until(lambda: running.metric("http_problems_total", status="408") == 1)
            running.settle()


def test_a_client_that_reads_slowly(tiny_pair: Models) -> None:
    """It gets all of its answer, long after the engine has made it."""
    fields = LONG | {"logprobs": 20}
    with serving(make_llm(tiny_pair), send_buffer=4096) as running:
        whole = running.post(COMPLETIONS, **fields).json()["choices"][0]["text"]
        with raw_request(running.port, **fields, stream=True, receive_buffer=2048) as slow:
            running.wait_until(lambda: running.service.num_open == 1)
            running.wait_until(lambda: running.service.engine.num_open == 0)
            assert running.service.num_open == 1
            received = b""
            while b"[DONE]" not in received:
                time.sleep(0.001)
                received += slow.recv(2048)
        lines = [line[6:] for line in received.decode().split("\r\n") if line.startswith("data: {")]
        texts = [text for line in lines for text in line.strip().split("\n\ndata: ") if text != "[DONE]"]
        events = [json.loads(text) for text in texts]
        assert "".join(event["choices"][0]["text"] for event in events) == whole
        running.settle()


def test_a_body_that_does_not_arrive(tiny_pair: Models) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{{"
    with serving(make_llm(tiny_pair), body_timeout_s=0.2) as running:
        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            connection.sendall(head.encode())
            answer = connection.recv(10_000)
            assert answer.startswith(b"HTTP/1.1 408")
            assert b"slow_body" in answer + connection.recv(10_000)
        running.wait_until(lambda: running.metric("http_problems_total", status="408") == 1)
        running.settle()


# ------------------------------------------------------------------------------------------------ many at once


def soak(running: Running, answers: dict[int, str], clients: int, requests: int, seed: int) -> dict[str, int]:
    """Clients that stream, one request after another: most stay, some leave, some ask for nonsense."""
    counts = {"whole": 0, "left": 0, "refused": 0, "busy": 0}

    async def one(client: httpx2.AsyncClient, draw: random.Random) -> None:
        fate, chosen = draw.random(), draw.choice(list(answers))
        fields = {"prompt": f"prompt {chosen}", "seed": chosen, "max_tokens": 24, "stream": True}
        if fate < 0.05:
            bad = draw.choice([{"top_p": -1}, {"foo": 1}, {"prompt": ""}, {"model": "x"}, {"n": "3"}])
            assert (await client.post(COMPLETIONS, json=fields | bad)).status_code in (400, 404)
            counts["refused"] += 1
            return
        text, lines_to_read = "", draw.randrange(6) if fate < 0.25 else 10**6
        async with client.stream("POST", COMPLETIONS, json=fields) as response:
            if response.status_code == 429:
                counts["busy"] += 1
                await asyncio.sleep(0.02)
                return
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if lines_to_read <= 0:
                    counts["left"] += 1
                    return
                lines_to_read -= 1
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        assert text == answers[chosen]
        counts["whole"] += 1

    async def client_of(number: int) -> None:
        draw = random.Random(seed * 10_000 + number)
        async with httpx2.AsyncClient(base_url=running.url, timeout=120) as client:
            for _ in range(requests):
                await one(client, draw)

    async def all_of_them() -> None:
        await asyncio.gather(*map(client_of, range(clients)))

    asyncio.run(all_of_them())
    return counts


def offline_answers(models: Models, count: int) -> dict[int, str]:
    llm = make_llm(models, "off", max_num_seqs=16)
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=24) for seed in range(count)]
    texts = llm.generate([f"prompt {seed}" for seed in range(count)], params)
    return {seed: answer.text for seed, answer in enumerate(texts)}


def test_a_short_soak(tiny_pair: Models) -> None:
    answers = offline_answers(tiny_pair, 8)
    with serving(make_llm(tiny_pair, "lag", max_num_seqs=8)) as running:
        counts = soak(running, answers, clients=20, requests=6, seed=1)
        running.settle()
        assert counts["whole"] > 60
        assert counts["left"] > 5
        assert counts["refused"] > 0


@pytest.mark.slow
def test_two_hundred_clients(tiny_pair: Models) -> None:
    """After warm-up less than 1 MB stays behind per 1,000 requests, clients included.

    What Python and numpy have allocated is counted. The process itself grows on, with an engine alone as well: torch
    keeps code and buffers for every new number of rows.
    """
    answers = offline_answers(tiny_pair, 16)
    with serving(make_llm(tiny_pair, "lag", max_num_seqs=64)) as running, quiet():
        soak(running, answers, clients=200, requests=5, seed=1)
        running.settle()
        tracemalloc.start(1)
        try:
            counts = soak(running, answers, clients=200, requests=15, seed=2)
            running.settle()
            gc.collect()
            left_behind, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        total = sum(counts.values())
        assert total == 3000
        assert counts["busy"] == 0
        assert counts["left"] > 300
        assert counts["refused"] > 50
        assert left_behind < total / 1000 * (1 << 20), f"{left_behind / 1e6:.1f} MB for {total} requests"


@contextmanager
def quiet() -> Iterator[None]:
    """pytest keeps every line of a log."""
    logger = logging.getLogger("slipstream.serve")
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


def test_chat_waits_for_nobody_else(tiny_pair: Models) -> None:
    """A slot that is free is used at once, whoever else is being served."""
    llm = make_llm(tiny_pair, max_num_seqs=2)
    with serving(llm) as running, slowed(llm, 0.005), in_background(running, 1, **LONG):
        running.wait_until(lambda: running.metric("num_requests_running") == 1)
        message = [{"role": "user", "content": "hi"}]
        assert running.post(CHAT, messages=message, max_tokens=3).status_code == 200
        assert running.service.num_open == 1
