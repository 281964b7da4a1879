"""What a connection is refused before there is a request: uvicorn's HTTP/1.1, with limits on heads and errors as JSON.

A head (request line and headers) has `MAX_HEAD_BYTES` at most and comes within a time. A request that asks for another
protocol (h2c, web sockets) is served as if it did not, as RFC 9110 lets a server do.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from slipstream.serve.guard import respond
from slipstream.serve.problems import Problem

log = logging.getLogger("slipstream.serve")

MAX_HEAD_BYTES = 64 << 10
LINGER_S = 2  # what a refused client still sends is read, or the system would take the answer back from it


class Connection(HttpToolsProtocol):
    """head_timeout_s: for a head to be complete. on_refused: told of each refusal. The rest is uvicorn's."""

    def __init__(self, *, head_timeout_s: float, on_refused: Callable[[Problem], None], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._head_timeout_s, self._on_refused = head_timeout_s, on_refused
        self._timer: asyncio.TimerHandle | None = None  # runs while the client owes a head, and nobody owes it anything
        self._num_idle_bytes = 0  # in a row of which none ended a head or was of a body
        self._is_fruitful = False  # whether the data that is parsed had any such
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        self._num_idle_bytes += len(data)
        self._is_fruitful = False
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            refusal = error.__context__
            if not isinstance(refusal, Problem):
                refusal = Problem(400, f"this is no request of HTTP/1.1: {error}", code="bad_http")
            self._refuse(refusal)
            return
        if self._is_fruitful:
            self._num_idle_bytes = 0
        elif self._num_idle_bytes > MAX_HEAD_BYTES:  # of a head, or behind a body
            self._refuse(_head_too_large())
            return
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()

    def _parse(self, data: bytes) -> None:
        rest: bytes | memoryview = data
        while rest:
            offset = None
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:  # the parser stops behind the head
                offset = upgrade.args[0]
            if offset is None:
                return
            rest, head = memoryview(rest)[offset:], self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)  # the old one may take the connection for closed
            self.parser.feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        parts = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                parts += [name, b": ", value, b"\r\n"]
        return b"".join([*parts, b"\r\n"])

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            raise _head_too_large()
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise Problem(400, "this server is no proxy: it does not know CONNECT", code="bad_http")
            return  # it comes again, without
        self._stop_timer()
        self._is_fruitful = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._is_fruitful = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._is_fruitful = True
            super().on_message_complete()

    def _await_head(self) -> None:
        self._timer = self.loop.call_later(self._head_timeout_s, self._on_slow_head)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_slow_head(self) -> None:
        if self.scope is not None and "path" not in self.scope:  # which has begun
            message = f"the head of the request did not arrive within {self._head_timeout_s:g} s"
            self._refuse(Problem(408, message, code="slow_head"))
        else:
            self.transport.close()

    def _refuse(self, problem: Problem) -> None:
        """Answer, where the client can tell what is answered, and close, after the answers to whole requests before."""
        self._is_refused = True
        self._stop_timer()
        request_id, client = secrets.token_hex(12), self.client
        fields = {
            "request_id": request_id, "status": problem.status, "client": client[0] if client else None,
            "problem": problem.code, "about": problem.message,
        }  # fmt: skip
        log.info("refused", extra={"fields": fields})
        self._on_refused(problem)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:
                cycle.keep_alive = False
                return
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started or self.pipeline:
                self.transport.close()
                return
        response = respond(problem)
        headers = [*self.server_state.default_headers, *response.raw_headers, (b"x-request-id", request_id.encode())]
        lines = [b"%b: %b\r\n" % header for header in headers]
        head = [STATUS_LINE[problem.status], *lines, b"connection: close\r\n\r\n"]
        self.transport.write(b"".join([*head, bytes(response.body)]))
        self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)


def _head_too_large() -> Problem:
    return Problem(431, f"the head of the request has more than {MAX_HEAD_BYTES} bytes", code="head_too_large")
