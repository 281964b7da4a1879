"""The application, and the process that serves it until it is told to stop.

SIGTERM (or SIGINT): new requests are refused, those in flight may finish within the time of grace, the rest is told;
then the process ends with exit code 0. A second signal ends it at once. Called by the command `serve`.
"""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeAlias

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.errors import EngineError
from slipstream.host import Host
from slipstream.serve import webpage
from slipstream.serve.api import ANSWERS, router
from slipstream.serve.connection import Connection
from slipstream.serve.engine_process import EngineProcess
from slipstream.serve.engine_thread import EngineThread
from slipstream.serve.guard import Guard, respond
from slipstream.serve.logs import configure_logging
from slipstream.serve.openapi import document
from slipstream.serve.options import ServeOptions
from slipstream.serve.problems import Problem, client_gone
from slipstream.serve.render import Spelling
from slipstream.serve.service import Engines, Service
from slipstream.serve.stats import Stats
from slipstream.serve.wire import SWITCH_INTERVAL_S

if TYPE_CHECKING:
    from slipstream.llm import LLM

Offered: TypeAlias = "LLM | Sequence[LLM] | Engines"
Lifespan: TypeAlias = Callable[[FastAPI], AbstractAsyncContextManager[None]]
log = logging.getLogger("slipstream.serve")

CLOSING_S = 5  # for connections whose requests are over
DEAF_CLIENT_MS = 60_000  # of a client that acknowledges nothing; then the system closes the connection


def make_app(llms: "Offered", options: ServeOptions, model: str, on_dead: Callable[[], None] = lambda: None) -> FastAPI:
    """llms: one, or several over the same weights, a mode each; the first is the one of requests that name no mode.

    Those of another process are an `EngineProcess`. model: what it is called where options name nothing else.
    on_dead: called when an engine has failed for good.
    """
    engines = _engines(llms)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = service = Service(engines, options, options.served_name or model, on_dead)
        app.state.stats = Stats(service)
        try:
            yield
        finally:
            await service.stop()

    app = Application(options.keys, lifespan)
    app.state.spelling = Spelling(engines.hosts[0])
    app.include_router(router)
    app.include_router(webpage.router)
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientDisconnect, lambda http, error: _on_problem(http, client_gone()))
    app.add_exception_handler(Exception, _on_bug)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    return app


class Application(FastAPI):
    """FastAPI, but for answers: what it does to find a route and to watch over it takes longer than all that they need."""

    def __init__(self, keys: Sequence[str], lifespan: Lifespan) -> None:
        super().__init__(
            title="Slipstream", version=metadata.version("slipstream"), lifespan=lifespan, docs_url=None, redoc_url=None
        )
        self._guard = Guard(self._answer, keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self._guard(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = ANSWERS.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if answer is None:
            await super().__call__(scope, receive, send)
            return
        http, entry = Request(scope, receive, send), scope["slipstream"]
        try:
            response = await answer(http)
            await response(scope, receive, send)
        except Problem as problem:
            await _on_problem(http, problem)(scope, receive, send)
        except ClientDisconnect:
            await _on_problem(http, client_gone())(scope, receive, send)
        except Exception as error:
            response = _on_bug(http, error)
            if not entry.status:
                await response(scope, receive, send)
            raise


class Threads:
    """Engines of this process."""

    def __init__(self, llms: "Sequence[LLM]") -> None:
        self.hosts = tuple(llms)

    def start(self, options: ServeOptions, on_dead: Callable[[], None]) -> list[EngineThread]:
        return [
            EngineThread(
                llm, on_error=options.on_engine_error, on_dead=on_dead, stall_s=options.stall_s,
                interval_s=options.stream_interval_s,
            )
            for llm in self.hosts
        ]  # fmt: skip


def _engines(offered: "Offered") -> Engines:
    if isinstance(offered, Sequence):
        return Threads(offered)
    return Threads([offered]) if isinstance(offered, Host) else offered


def _on_problem(http: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    http.scope["slipstream"].problem = error.alone()
    return respond(error)


def _on_http(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    about = {404: f"there is no {http.url.path}", 405: f"{http.url.path} does not know {http.method}"}
    return respond(Problem(error.status_code, about.get(error.status_code, error.detail), headers=error.headers))


def _on_bug(http: Request, error: Exception) -> Response:
    entry = http.scope["slipstream"]
    log.error("bug", exc_info=error, extra={"fields": {"request_id": entry.request_id}})
    entry.problem = Problem(500, "an error of the server; its log says more", code="internal_error")
    return respond(entry.problem)  # which nobody gets where the answer had begun


def bind(options: ServeOptions) -> socket.socket:
    """The address, taken before a model is loaded for it. OSError where it cannot be."""
    try:
        return _bound(options, may_share=False)
    except OSError:  # perhaps by connections of a server that is gone
        return _bound(options, may_share=True)


def _bound(options: ServeOptions, may_share: bool) -> socket.socket:
    """may_share: with connections that are over, and on Linux with whoever says so too and does not listen yet."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # The protocol is named for asyncio, which lets small packets out at once (TCP_NODELAY) only where it is.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, may_share)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAF_CLIENT_MS)
    try:
        bound.bind((options.host, options.port))
    except OSError as error:
        bound.close()
        raise OSError(f"{options.host} port {options.port} cannot be bound: {error.strerror or error}") from error
    return bound


def run(llms: "Offered", options: ServeOptions, model: str, bound: socket.socket) -> None:
    """Serve until a signal comes; `llms` as in `make_app`. EngineError where the engine failed for good."""
    configure_logging()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    server = Server(llms, options, model)
    if isinstance(server.engines, EngineProcess):  # nothing that is there will ever go
        gc.collect()
        gc.freeze()
    server.run(sockets=[bound])
    if server.error is not None:
        raise server.error
    if server.has_failed:
        raise EngineError("the engine has failed and was not restarted; the log says why")


class Server(uvicorn.Server):
    """uvicorn, with signals that end it as described above."""

    def __init__(self, llms: "Offered", options: ServeOptions, model: str) -> None:
        self.has_failed = False
        self.error: OSError | None = None  # why it never listened
        self.engines = _engines(llms)
        self.app = make_app(self.engines, options, model, self._on_dead)
        self._closing: asyncio.Task[None] | None = None
        http: Any = partial(Connection, head_timeout_s=options.body_timeout_s, on_refused=self._on_refused)
        super().__init__(
            uvicorn.Config(
                self.app, http=http, lifespan="on", log_config=None, access_log=False, server_header=False,
                timeout_graceful_shutdown=CLOSING_S, ws="none",
                loop="asyncio",  # uvloop, if it is there, saves nothing here, and hides why it cannot listen
            )
        )  # fmt: skip

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Not as uvicorn does, which raises the signal again in the end: the exit code would not be 0."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread: whoever runs it there stops it
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.close)
        try:
            await super().startup(sockets)
        except OSError as error:
            self.error, self.should_exit = OSError(f"cannot listen: {error.strerror or error}"), True
            await self.lifespan.shutdown()  # which would say that it was cancelled
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            for each in sockets:  # its connections, once they are over, keep no later server from the port
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            log.info("serving", extra={"fields": {"host": host, "port": port, "model": self.app.state.service.model}})

    def close(self) -> None:
        """Begin to end; at the second call end."""
        if self._closing is not None:
            self.should_exit = self.force_exit = True
            if isinstance(self.engines, EngineProcess):
                self.engines.end()
            # It has a traceback of each request that it cancels.
            logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
            return
        log.info("draining")
        self._closing = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        service: Service = self.app.state.service
        try:
            await service.drain()
            await service.stop_engines()
        finally:
            self.should_exit = True

    def _on_refused(self, problem: Problem) -> None:
        self.app.state.service.metrics.problem(problem.status)

    def _on_dead(self) -> None:
        self.has_failed = True
        # Whoever waited is told first; the time is enough for that, and nobody new is let in.
        asyncio.get_running_loop().call_later(0.2, setattr, self, "should_exit", True)
