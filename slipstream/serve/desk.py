"""The event loop's side of an engine: who waits for what, and what they are given.

Messages of a `Driver` come in, what requests gained is laid into mailboxes (an `Outbox` says when). Nobody makes the
engine wait: a mailbox takes whatever comes, and one that is not emptied in time is closed and its requests ended. Where
the driver is, subclasses know: `engine_thread`, `engine_process`. Knows no HTTP and no texts. Called by `lanes`.
"""

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

from slipstream.commit import Delta
from slipstream.host import Host
from slipstream.request import Request
from slipstream.serve.driver import Answered, Dead, Driver, Failed, Message, Refused, Restarted, Steps
from slipstream.serve.outbox import Outbox
from slipstream.serve.problems import Problem, engine_failed, problem_of, too_slow, unavailable

State = Literal["running", "restarting", "dead", "stopped"]
Value = TypeVar("Value")

MOST_BUSY = 0.7  # share of its time that the loop works before events get rarer
MOST_STRETCH = 8.0


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


class Pace:
    """How much rarer events are than they might be, so that the loop has time for what else there is.

    A loop that makes events all the time is late with everything: new requests wait, and slots stay empty meanwhile.
    """

    def __init__(self) -> None:
        self._stretch = 1.0
        self._last_s = self._last_busy_s = 0.0

    def stretch(self, now_s: float, busy_s: float) -> float:
        """Asked before events go out. busy_s: of the loop's thread, since it began."""
        share = (busy_s - self._last_busy_s) / max(now_s - self._last_s, 1e-6)
        self._last_s, self._last_busy_s = now_s, busy_s
        if share > MOST_BUSY:
            self._stretch = min(self._stretch * 1.25, MOST_STRETCH)
        elif share < 0.75 * MOST_BUSY:
            self._stretch = max(self._stretch / 1.25, 1.0)
        return self._stretch


class Desk(ABC):
    """Belongs to the loop that made it."""

    def __init__(self, host: Host, *, on_dead: Callable[[], None], stall_s: float, interval_s: float) -> None:
        """on_dead: called when the engine has failed for good. stall_s: more than a step may take.

        interval_s: at least so long between what a request gained and what came next.
        """
        self.host = host
        self.state: State = "running"
        self.failure: str | None = None  # the last one
        self.num_failures = 0
        self._on_dead, self._stall_s = on_dead, stall_s
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(interval_s)  # what steps gave and nobody was told of
        self._pace = Pace()
        self._timer: asyncio.TimerHandle | None = None  # for what is left there
        self._mailboxes: dict[int, tuple[Mailbox, Sequence[Request]]] = {}  # by uid, with all that share the mailbox
        self._answers: dict[int, asyncio.Future[Any]] = {}  # to what was asked, by key
        self._keys = itertools.count()

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
        self._outbox.add(requests, mailbox.by_step)
        self._add(requests)

    def release(self, requests: Sequence[Request]) -> None:
        """Nobody waits for them any more; those that have not ended are aborted."""
        open_ = [request.uid for request in requests if self._mailboxes.pop(request.uid, None) is not None]
        if open_:
            self._outbox.forget(open_)
            self._abort(open_)

    def ask(self, function: Callable[[Driver], Value]) -> "asyncio.Future[Value]":
        """What the function returns when it is called between two steps.

        Where the engine has a process of its own, function and value are pickled: give one that a module has by its name.
        """
        answer: asyncio.Future[Value] = self._loop.create_future()
        key = next(self._keys)
        self._answers[key] = answer
        answer.add_done_callback(lambda _: self._answers.pop(key, None))  # also of one that was given up
        self._ask(key, function)
        return answer

    async def stop(self) -> None:
        """Fail what is open, and end the engine with its step."""
        self._fail_open(unavailable("the server is shutting down"))
        await self._end()
        if self._timer is not None:
            self._timer.cancel()
        if self.state != "dead":
            self.state = "stopped"

    def handle(self, message: Message) -> None:
        """What the driver says."""
        match message:
            case Steps(gains, is_last):
                for each in gains:
                    self._outbox.put(each)
                self._hand_over(all_of_it=is_last)
            case Failed(reason, uids):
                self.state = "restarting"  # before anybody is told
                self.failure, self.num_failures = reason, self.num_failures + 1
                self._fail(uids, engine_failed(reason))
            case Restarted(facts):
                self.host.facts = facts
                self.state = "running"
            case Dead(reason):
                self._bury(reason)
            case Refused(uids, error):
                self._fail(uids, problem_of(error, {}))
            case Answered():
                self._settle(message)

    # ------------------------------------------------------------------ what depends on where the driver is

    @property
    @abstractmethod
    def _busy_since(self) -> float | None:
        """When the step began that is not over, by time.monotonic."""

    @abstractmethod
    def _add(self, requests: Sequence[Request]) -> None: ...
    @abstractmethod
    def _abort(self, uids: Sequence[int]) -> None: ...
    @abstractmethod
    def _ask(self, key: int, function: Callable[[Driver], Any]) -> None: ...
    @abstractmethod
    async def _end(self) -> None:
        """Have the driver stop, and wait for it. May be called again."""

    # ------------------------------------------------------------------ for its own methods, and theirs

    def _hand_over(self, all_of_it: bool = False) -> None:
        now = time.monotonic()
        if now >= self._outbox.due_s:
            self._outbox.stretch = self._pace.stretch(now, time.thread_time())
        self._deliver(self._outbox.take(now, all_of_it=all_of_it))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if not self._outbox.is_empty:
            self._timer = self._loop.call_at(self._outbox.due_s, self._hand_over)

    def _deliver(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            mailbox, requests = self._mailboxes.get(delta.request.uid, (None, ()))
            if mailbox is None:
                continue  # nobody waits for it any more
            if delta.finish_reason is not None:
                del self._mailboxes[delta.request.uid]
            if not mailbox.put(delta):
                mailbox.fail(too_slow())
                self.release(requests)

    def _fail(self, uids: Sequence[int], error: Problem) -> None:
        for uid in uids:
            mailbox, requests = self._mailboxes.get(uid, (None, ()))
            if mailbox is not None:
                mailbox.fail(error)
                self.release(requests)

    def _fail_open(self, error: Problem) -> None:
        self._fail(list(self._mailboxes), error)

    def _bury(self, reason: str) -> None:
        self.state = "dead"  # before anybody is told
        self._fail_open(engine_failed(reason))
        self._on_dead()

    def _settle(self, answered: Answered) -> None:
        answer = self._answers.get(answered.key)
        if answer is None or answer.done():
            return
        if answered.error is not None:
            answer.set_exception(answered.error)
        else:
            answer.set_result(answered.value)
