"""A server on a free port, in a thread of the test's process, over a tiny pair in fp32."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from slipstream.llm import LLM
from slipstream.load import Models, load_models
from slipstream.serve.app import Server, bind
from slipstream.serve.driver import Driver
from slipstream.serve.engine_process import EngineProcess
from slipstream.serve.options import ServeOptions
from slipstream.serve.service import Service
from tests.e2e.conftest import tiny_folders
from tests.serve.engines import make_engines, make_llm, nothing_left

__all__ = ["make_llm", "tiny_folders"]
MODEL = "tiny"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="session")
def tiny_pair(tiny_folders: tuple[Any, Any]) -> Models:
    target, drafter = map(str, tiny_folders)
    return load_models(target, drafter, dtype="float32", device="cpu", layout="auto")


class Running:
    """A server that runs, and clients for it."""

    def __init__(self, llms: Sequence[LLM], server: Server, port: int) -> None:
        """llms: none where they are in a process of their own."""
        self.llms, self.server, self.port = llms, server, port
        self.url = f"http://127.0.0.1:{port}"
        self.process: EngineProcess | None = None
        self.http = httpx2.Client(base_url=self.url, timeout=60)

    @property
    def service(self) -> Service:
        service = self.server.app.state.service
        assert isinstance(service, Service)
        return service

    @property
    def llm(self) -> LLM:
        return self.llms[0]

    def ask(self, function: Callable[[Driver], Any], mode: str | None = None) -> Any:
        """Of an engine, between two of its steps."""

        async def ask() -> Any:
            return await self.service.lane(mode).engine.ask(function)

        return asyncio.run_coroutine_threadsafe(ask(), self.server.servers[0].get_loop()).result(60)

    def post(self, path: str, **fields: Any) -> httpx2.Response:
        return self.http.post(path, json=fields)

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all series of that name and with these labels."""
        lines = self.http.get("/metrics").text.splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        name = f"slipstream:{name}{{"
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith(name) and all(w in line for w in wanted)
        )

    def wait_until(self, true: Callable[[], bool], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "it did not come true"
            time.sleep(0.005)

    def settle(self) -> None:
        """Nothing is left of any request: no place in the queue, no slot, no page."""
        lanes = self.service.lanes.values()
        self.wait_until(lambda: all(lane.num_open == 0 and lane.engine.num_open == 0 for lane in lanes))
        self.wait_until(lambda: self.metric("num_requests_running") + self.metric("num_requests_waiting") == 0)
        assert self.metric("kv_cache_usage_perc") == 0
        for mode, lane in self.service.lanes.items():
            if lane.engine.state == "running":
                assert self.ask(nothing_left, mode)


@contextmanager
def serving(
    llm: LLM | Sequence[LLM] | EngineProcess, send_buffer: int | None = None, **options: Any
) -> Iterator[Running]:
    """Ends as SIGTERM would end it. llm: one, or a mode each. send_buffer: bytes that the system takes for a client that
    does not read.
    """
    chosen = ServeOptions(port=0, **options)
    bound = bind(chosen)
    if send_buffer is not None:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = Server(llm, chosen, MODEL)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server has not started"
            time.sleep(0.005)
        llms = [] if isinstance(llm, EngineProcess) else list(llm) if isinstance(llm, Sequence) else [llm]
        running = Running(llms, server, bound.getsockname()[1])
        with running.http:
            yield running
    finally:
        server.servers[0].get_loop().call_soon_threadsafe(server.close)
        thread.join(30)
        bound.close()
        assert not thread.is_alive(), "the server has not ended"


@contextmanager
def serving_apart(
    folders: tuple[Path, Path], *modes: str, make: Any = make_engines, before: Sequence[Any] = (),
    engine: dict[str, Any] | None = None, **options: Any,
) -> Iterator[Running]:  # fmt: skip
    """With the engines in a process of their own. before: what `make` is called with besides."""
    chosen = ServeOptions(port=0, **options)
    process = EngineProcess(make, *before, folders, modes or ("static",), engine or {}, options=chosen)
    try:
        with serving(process, **options) as running:
            running.process = process
            yield running
    finally:
        process.close()


@pytest.fixture(scope="module")
def served(tiny_pair: Models) -> Iterator[Running]:
    with serving(make_llm(tiny_pair)) as running:
        yield running
        running.settle()


@contextmanager
def slowed(llm: LLM, seconds: float) -> Iterator[None]:
    """Steps that take longer, so that a test can do something meanwhile."""
    engine, step = llm.engine, llm.engine.step

    def slow() -> Any:
        time.sleep(seconds)
        return step()

    engine.step = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.step = step  # type: ignore[method-assign]
