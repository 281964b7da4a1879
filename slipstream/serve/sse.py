"""Answers as server-sent events, to a client that may be slow, or gone.

`EventStream` is a response that owns its job: however the connection ends, the job is closed. A client that does not
read makes only its own sender wait; when its job fails meanwhile (too much is waiting, time is up), the sender gets a
few seconds to say so and is cut then. Called by `api`.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.serve.problems import Problem, client_gone
from slipstream.serve.protocol import StreamOptions, json_bytes
from slipstream.serve.render import Renderer, usage_of
from slipstream.serve.service import Job

LAST_WORDS_S = 2.0  # for the event that says why a stream ends early


def watch(receive: Receive, job: Job) -> "asyncio.Task[None]":
    """Until it is cancelled, the job fails as soon as the client has closed the connection."""
    return asyncio.create_task(_fail_when_gone(receive, job))


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

    def __init__(self, job: Job, watcher: "asyncio.Task[None]", events: AsyncIterator[bytes]) -> None:
        """watcher: of the client; both are its own from now on."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._problem: Problem | None = None  # why it ended early
        self._job, self._watcher, self._events = job, watcher, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        mailbox, loop = self._job.mailbox, asyncio.get_running_loop()
        limit = asyncio.timeout(None)
        try:
            async with limit:
                mailbox.on_failure = lambda: limit.reschedule(loop.time() + LAST_WORDS_S)
                if mailbox.failure is not None:
                    mailbox.on_failure()
                await self._send(send)
        except BaseException as error:
            # Who was stopped while it waited for the client has not heard of a failure; one who is through owes nothing.
            self._problem = self._problem or mailbox.failure
            if not (isinstance(error, TimeoutError) and limit.expired()):
                raise
        finally:
            mailbox.on_failure = lambda: None
            self._watcher.cancel()
            self._job.close()
            entry = scope["slipstream"]
            entry.problem = self._problem
            entry.fields["completion_tokens"] = self._job.num_output_tokens

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
