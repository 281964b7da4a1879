"""What surrounds every request: an id, the key that it must bring, and one line in the log when it is over.

An ASGI layer around the application. The log is JSON, one object a line; texts and keys are never in it.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, repeat
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.serve.problems import Problem, unavailable

log = logging.getLogger("slipstream.serve")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_PRIVATE = ("/v1", "/tokenize", "/detokenize")  # what a key is asked for


@dataclass(slots=True)
class Entry:
    """What is known of a request: `scope["slipstream"]`, for handlers to add to."""

    request_id: str
    fields: dict[str, Any] = field(default_factory=dict)
    problem: Problem | None = None
    status: int = 0


class Keys:
    """Compared in a time that depends neither on which key is right nor on how much of it."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def admit(self, headers: Headers) -> bool:
        if not self._digests:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode("latin-1")).digest()  # the bytes as they came
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches) and scheme.lower() == "bearer"


class Guard:
    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._keys = app, Keys(keys)
        self._ids = map("{}{:010x}".format, repeat(secrets.token_hex(7)), count())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, start = Headers(scope=scope), time.perf_counter()
        entry = scope["slipstream"] = Entry(request_id_of(headers.get("x-request-id")) or next(self._ids))

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = entry.request_id
            await send(message)

        try:
            if scope["path"].startswith(_PRIVATE) and not self._keys.admit(headers):
                entry.problem = Problem(
                    401, "a valid key is needed: Authorization: Bearer KEY", code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )  # fmt: skip
                await respond(entry.problem)(scope, receive, stamped)
            else:
                await self._app(scope, receive, stamped)
        except asyncio.CancelledError:  # the server ends at once
            if not entry.status:
                entry.problem = unavailable("the server is shutting down")
                await respond(entry.problem)(scope, receive, stamped)
            raise
        finally:
            _write(scope, entry, time.perf_counter() - start)


def request_id_of(given: str | None) -> str | None:
    """The client's own, where it is one."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else None


def respond(problem: Problem) -> JSONResponse:
    return JSONResponse(problem.body, problem.status, problem.headers)


def _write(scope: Scope, entry: Entry, seconds: float) -> None:
    problem, status = entry.problem, entry.status
    service = getattr(scope["app"].state, "service", None) if "app" in scope else None
    if service is not None and (problem is not None or status >= 400):
        service.metrics.problem(problem.status if problem is not None else status)
    if scope["path"] in ("/health", "/ready", "/metrics", "/stats") and status < 400:
        return  # asked for every few seconds
    client = scope.get("client")
    fields = {
        "request_id": entry.request_id, "method": scope["method"], "path": scope["path"], "status": status,
        "duration_ms": round(1e3 * seconds, 2), "client": client[0] if client else None, **entry.fields,
    }  # fmt: skip
    if problem is not None:
        fields |= {"problem": problem.code or problem.kind, "problem_status": problem.status, "about": problem.message}
    log.info("request", extra={"fields": fields})
