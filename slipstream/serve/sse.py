"""Answers as server-sent events, to a client that may be slow, or gone.

`EventStream` is a response that owns its job: however the connection ends, the job is closed. A client that does not
read makes only its own sender wait; when its job fails meanwhile (too much is waiting, time is up), the sender gets a
few seconds to say so and is cut then. Called by `api`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.serve.problems import Problem, client_gone
from slipstream.serve.protocol import StreamOptions, json_bytes
from slipstream.serve.render import Renderer, usage_of
from slipstream.serve.service import Job

LAST_WORDS_S = 2.0  # for the event that says why a stream ends early


@asynccontextmanager
async def watched(receive: Receive, job: Job) -> AsyncIterator[None]:
    """Inside, the job fails as soon as the client has closed the connection."""
    watcher = asyncio.create_task(_fail_when_gone(receive, job))
    try:
        yield
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher


async def _fail_when_gone(receive: Receive, job: Job) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    job.mailbox.fail(client_gone())


async def events(job: Job, renderer: Renderer, wanted: StreamOptions) -> AsyncIterator[bytes]:
    """One event for each answer that gained something; what comes together, the end too, is sent together."""
    usage: dict[str, Any] = {"usage": None} if wanted.include_usage else {}
    async for parts in job.parts():
        if wanted.continuous_usage_stats:
            usage = {"usage": usage_of(job)}
        data = [_event(json_bytes(renderer.chunk([part], usage))) for part in parts]
        if job.is_over:
            if wanted.include_usage:
                data.append(_event(json_bytes(renderer.chunk([], {"usage": usage_of(job)}))))
            data.append(_event(b"[DONE]"))
        yield b"".join(data)


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, job: Job, events: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._problem: Problem | None = None  # why it ended early
        self._job, self._events = job, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.create_task(self._send(send))
        loop = asyncio.get_running_loop()
        self._job.mailbox.on_failure = partial(loop.call_later, LAST_WORDS_S, sender.cancel)
        try:
            async with watched(receive, self._job):
                await asyncio.wait([sender])
        finally:
            self._job.close()
            if sender.cancel():
                await asyncio.wait([sender])
            entry = scope["slipstream"]
            # A sender that was cut while it waited for the client has said nothing.
            entry.problem = self._job.mailbox.failure if sender.cancelled() else self._problem
            entry.fields["completion_tokens"] = self._job.num_output_tokens
        if not sender.cancelled():
            sender.result()  # raises what should not have happened

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": not self._job.is_over})
            return
        except Problem as problem:
            self._problem = problem
            data = _event(json_bytes(problem.body))
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
