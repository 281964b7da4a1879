"""Streams whose client does not read: who is cut off and when, what is said of it in the log, and what is no such case."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message

from slipstream.serve import sse
from slipstream.serve.desk import Mailbox
from slipstream.serve.guard import Entry
from slipstream.serve.problems import Problem, engine_failed, timed_out

TIMED_OUT, ENGINE_FAILED = timed_out(1), engine_failed("on purpose")


class FakeJob:
    num_output_tokens, is_over, is_closed = 1, True, False

    def __init__(self) -> None:
        self.mailbox = Mailbox(1)

    def close(self) -> None:
        self.is_closed = True


async def one_event() -> AsyncIterator[bytes]:
    yield b"data: [DONE]\n\n"


async def failing_events() -> AsyncIterator[bytes]:
    yield b"data: {}\n\n"
    raise ENGINE_FAILED


def stream(
    client: Callable[[FakeJob], Any], events: AsyncIterator[bytes], monkeypatch: pytest.MonkeyPatch
) -> tuple[Problem | None, BaseException | None]:
    """What the log says of a stream, and what it raised. client: called with the body of each message."""
    monkeypatch.setattr(sse, "LAST_WORDS_S", 0.01)

    async def run() -> tuple[Problem | None, BaseException | None]:
        job, entry = FakeJob(), Entry("x")
        take = client(job)

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                await take(message["body"])

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        watcher = asyncio.create_task(asyncio.Event().wait())
        response = sse.EventStream(job, watcher, events)  # type: ignore[arg-type]
        (raised,) = await asyncio.gather(
            asyncio.create_task(response({"slipstream": entry}, receive, send)), return_exceptions=True
        )
        assert job.is_closed and watcher.cancelling()
        return entry.problem, raised

    return asyncio.run(asyncio.wait_for(run(), 5))


async def nothing() -> None:
    pass


async def bug() -> None:
    raise ArithmeticError("on purpose")


async def forced_shutdown() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


def deaf(job: FakeJob, besides: Callable[[], Awaitable[None]] = nothing, at: bytes = b"") -> Any:
    """Takes nothing from the message on that holds `at`; the job's time is up meanwhile. besides: happens at the cut."""

    async def take(body: bytes) -> None:
        if at not in body:
            return
        job.mailbox.fail(TIMED_OUT)
        try:
            await asyncio.Event().wait()
        finally:
            await besides()

    return take


def test_who_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stream(deaf, one_event(), monkeypatch) == (TIMED_OUT, None)


@pytest.mark.parametrize(("what", "kind"), [(bug, ArithmeticError), (forced_shutdown, asyncio.CancelledError)])
def test_what_else_comes_with_the_cut_is_not_lost(
    what: Callable[[], Awaitable[None]], kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, raised = stream(lambda job: deaf(job, what), one_event(), monkeypatch)
    assert problem is TIMED_OUT
    assert isinstance(raised, kind)


def test_the_first_problem_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine failed, and the client does not take the event that says so."""
    assert stream(lambda job: deaf(job, at=b"engine_error"), failing_events(), monkeypatch) == (ENGINE_FAILED, None)


def test_an_answer_that_was_taken_late_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(job: FakeJob) -> Any:
        async def take(body: bytes) -> None:
            job.mailbox.fail(TIMED_OUT)

        return take

    assert stream(late, one_event(), monkeypatch) == (None, None)


def test_a_timeout_that_is_not_the_cut_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(job: FakeJob) -> Any:
        async def take(body: bytes) -> None:
            raise TimeoutError

        return take

    problem, raised = stream(broken, one_event(), monkeypatch)
    assert problem is None
    assert isinstance(raised, TimeoutError)
