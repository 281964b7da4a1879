"""The engine in a thread of its own, and the way there and back: commands in, a step's deltas out, all at once.

The thread only steps. What it gains is handed to the event loop by one call for all, and laid into mailboxes there (an
`Outbox` says when). Nobody makes the thread wait: a mailbox takes whatever comes, and one that is not emptied in time
is closed and its requests ended. `EngineThread` belongs to the loop that made it; methods with a leading underscore and
`in thread` in their docstring run in the thread, all others on the loop. Knows no HTTP and no texts. Called by `lanes`.
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from slipstream.commit import Delta
from slipstream.errors import SlipstreamError
from slipstream.request import Request
from slipstream.serve.options import OnEngineError
from slipstream.serve.outbox import Outbox
from slipstream.serve.problems import Problem, engine_failed, problem_of, too_slow, unavailable
from slipstream.serve.steps import StepMeter

if TYPE_CHECKING:
    from slipstream.llm import LLM

log = logging.getLogger("slipstream.serve")

State = Literal["running", "restarting", "dead", "stopped"]
MAX_RESTARTS, RESTART_WINDOW_S = 3, 60.0  # more failures within that time, and the engine stays down
Value = TypeVar("Value")


class Mailbox:
    """What has come for some requests and was not taken yet, in pieces; on the loop only."""

    def __init__(self, max_backlog: int, by_step: bool = False) -> None:
        """by_step: a piece is what one step gave. Else it may be what several did."""
        self.by_step = by_step
        self.failure: Problem | None = None  # why no more will come
        self.on_failure: Callable[[], object] = lambda: None
        self._deltas: list[Delta] = []
        self._max_backlog = max_backlog
        self._changed = asyncio.Event()

    def put(self, delta: Delta) -> bool:
        """False: there is no room, since nobody takes."""
        if len(self._deltas) >= self._max_backlog:
            return False
        self._deltas.append(delta)
        self._changed.set()
        return True

    def fail(self, error: Problem) -> None:
        """Taking raises it from now on; the first one counts."""
        if self.failure is None:
            self.failure = error
            self._changed.set()
            self.on_failure()

    async def ready(self) -> None:
        """Until there is something to take, or to raise."""
        await self._changed.wait()

    async def take(self) -> list[Delta]:
        """All that has come, at least one, in order."""
        await self._changed.wait()
        if self.failure is not None:
            raise self.failure
        self._changed.clear()
        taken, self._deltas = self._deltas, []
        return taken


class EngineThread:
    def __init__(
        self, llm: "LLM", *, on_error: OnEngineError = "restart", on_dead: Callable[[], None] = lambda: None,
        stall_s: float = math.inf, interval_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Starts at once. on_dead: called on the loop when the engine has failed for good.

        stall_s: more than a step may take. interval_s: at least so long between what a request gained and what came next.
        """
        self.llm = llm
        self.state: State = "running"
        self.failure: str | None = None  # the last one
        self.num_failures = 0
        self._on_error, self._on_dead, self._stall_s = on_error, on_dead, stall_s
        self._loop = asyncio.get_running_loop()
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._outbox = Outbox(interval_s)  # what steps gave and the loop was not told of
        llm.engine.listener = self._outbox.put
        self._mailboxes: dict[int, tuple[Mailbox, Sequence[Request]]] = {}  # by uid, with all that share the mailbox
        self._busy_since: float | None = None
        self._failed_at: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._is_stopping = False
        self.meter = StepMeter(llm)  # the thread's
        self._thread = threading.Thread(target=self._run, name="slipstream-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ on the loop

    @property
    def is_healthy(self) -> bool:
        since = self._busy_since
        return self.state == "running" and (since is None or time.monotonic() - since < self._stall_s)

    @property
    def num_open(self) -> int:
        """Requests that are waited for."""
        return len(self._mailboxes)

    def submit(self, requests: Sequence[Request], mailbox: Mailbox) -> None:
        """What the requests gain is put into the mailbox. Nothing is, if the engine does not run: it has failed then."""
        if self.state in ("dead", "stopped"):
            mailbox.fail(unavailable("the engine is not running"))
            return
        for request in requests:
            self._mailboxes[request.uid] = mailbox, requests
        self._commands.put(partial(self._add, requests, mailbox.by_step))

    def release(self, requests: Sequence[Request]) -> None:
        """Nobody waits for them any more; those that have not ended are aborted."""
        open_ = [request.uid for request in requests if self._mailboxes.pop(request.uid, None) is not None]
        if open_:
            self._commands.put(partial(self._abort, open_))

    def ask(self, function: Callable[["LLM"], Value]) -> "asyncio.Future[Value]":
        """What the function returns when it is called between two steps."""
        answer: asyncio.Future[Value] = self._loop.create_future()
        self._commands.put(partial(self._answer, function, answer))
        return answer

    async def stop(self) -> None:
        """Fail what is open, and end the thread with its step."""
        self._fail_open(unavailable("the server is shutting down"))
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join, 10.0)

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            mailbox, requests = self._mailboxes.get(delta.request.uid, (None, ()))
            if mailbox is None:
                continue  # nobody waits for it any more
            if delta.finish_reason is not None:
                del self._mailboxes[delta.request.uid]
            if not mailbox.put(delta):
                mailbox.fail(too_slow())
                self.release(requests)

    def _fail(self, uid: int, error: Problem) -> None:
        mailbox, requests = self._mailboxes.get(uid, (None, ()))
        if mailbox is not None:
            mailbox.fail(error)
            self.release(requests)

    def _fail_ended(self, reason: str) -> None:
        """Those that took part in a step that failed have got no last delta."""
        ended = [uid for uid, (_, requests) in self._mailboxes.items() if any(request.error for request in requests)]
        for uid in ended:
            self._fail(uid, engine_failed(reason))

    def _fail_open(self, error: Problem) -> None:
        for uid in list(self._mailboxes):
            self._fail(uid, error)

    def _bury(self, reason: str) -> None:
        self._fail_open(engine_failed(reason))
        self._on_dead()

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        """In thread: steps and commands until it is told to stop or the engine has failed for good."""
        while self.state == "running" and not self._is_stopping:
            self._busy_since = None
            failure = self._turn()
            if failure is not None:
                self._recover(failure)
        self.state = "stopped" if self.state == "running" else self.state
        self._busy_since = None

    def _turn(self) -> str | None:
        """In thread: all commands (waiting for one where there is no work) and one step. Returns how it failed."""
        try:
            if not self.llm.engine.has_work:
                self.llm.engine.drain()
                self._commands.get()()
            while not self._commands.empty():
                self._commands.get()()
            self._busy_since = time.monotonic()
            if self.llm.engine.has_work and not self._is_stopping:
                self.meter.step()
            self._hand_over(all_of_it=not self.llm.engine.has_work)
        except Exception as error:
            log.exception("engine_failed")
            return f"{type(error).__name__}: {error}"  # not the error itself: its traceback holds the engine
        return None

    def _hand_over(self, all_of_it: bool = False) -> None:
        """In thread: what steps gained goes to the loop, in one piece; some of it may wait for a later step."""
        ready = self._outbox.take(time.monotonic(), all_of_it=all_of_it)
        if ready:
            self._post(partial(self._deliver, ready))

    def _recover(self, reason: str) -> None:
        """In thread: requests that took part have failed; those that still wait go on in a new engine, if there is one."""
        self._hand_over(all_of_it=True)
        self.state = "restarting"  # before anybody is told
        self.failure, self.num_failures = reason, self.num_failures + 1
        self._post(partial(self._fail_ended, reason))
        now = time.monotonic()
        is_loop = len(self._failed_at) == MAX_RESTARTS and now - self._failed_at[0] < RESTART_WINDOW_S
        self._failed_at.append(now)
        if self._on_error == "restart" and not is_loop and self._restart():
            return
        self.state = "dead"
        self._post(partial(self._bury, reason))

    def _restart(self) -> bool:
        """In thread: whether there is a new engine."""
        waiting = [request for request in self.llm.engine.requests.values() if not request.is_finished]
        try:
            self._outbox.clear()
            self.meter.forget_recording()  # or the old engine would stay beside the new one
            self.llm.restart()
            self.llm.engine.listener = self._outbox.put
            for request in waiting:
                self.llm.engine.add(request)
        except Exception:
            log.exception("engine_restart_failed")
            return False
        log.warning("engine_restarted", extra={"fields": {"num_failures": self.num_failures, "reason": self.failure}})
        self.state = "running"
        return True

    def _add(self, requests: Sequence[Request], by_step: bool) -> None:
        """In thread."""
        self._outbox.add(requests, by_step)
        try:
            for request in requests:
                self.llm.engine.add(request)
        except SlipstreamError as error:  # for all of them, and before any step: they are alike
            self._abort([request.uid for request in requests])
            self._post(partial(self._fail, requests[0].uid, problem_of(error, {})))

    def _abort(self, uids: Sequence[int]) -> None:
        """In thread."""
        for uid in uids:
            self.llm.engine.abort(uid)
        self._outbox.forget(uids)

    def _answer(self, function: Callable[["LLM"], Value], answer: "asyncio.Future[Value]") -> None:
        """In thread."""
        try:
            value = function(self.llm)
        except Exception as error:
            self._post(partial(_settle, answer.set_exception, answer, error))
        else:
            self._post(partial(_settle, answer.set_result, answer, value))

    def _stop(self) -> None:
        """In thread: what is left is aborted, so that nothing stays behind."""
        self._is_stopping = True
        self._abort(list(self.llm.engine.requests))
        self.llm.engine.drain()
        self.llm.engine.listener = None

    def _post(self, call: Callable[[], None]) -> None:
        """In thread: have it called on the loop, if that is still there."""
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            log.debug("the loop is closed")


def _settle(settle: Callable[[Value], None], answer: "asyncio.Future[Any]", value: Value) -> None:
    if not answer.done():
        settle(value)
