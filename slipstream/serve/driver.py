"""Steps an engine: commands in, messages out, of what several steps gave one message.

It runs in a thread that does nothing else, in the server's process (`engine_thread`) or in one of its own
(`engine_process`). It knows neither: commands come by a queue, and messages go to a function that must not wait. Methods
that say `in thread` run there, all others anywhere. Knows no HTTP and no texts.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

from slipstream.commit import Gains
from slipstream.errors import SlipstreamError
from slipstream.host import Facts
from slipstream.request import Request
from slipstream.serve.options import OnEngineError
from slipstream.serve.steps import StepMeter

if TYPE_CHECKING:
    from slipstream.llm import LLM

log = logging.getLogger("slipstream.serve")

MAX_RESTARTS, RESTART_WINDOW_S = 3, 60.0  # more failures within that time, and the engine stays down


class RestartBudget:
    """How often an engine may fail before it is taken for broken."""

    def __init__(self) -> None:
        self._failed_at: deque[float] = deque(maxlen=MAX_RESTARTS)

    def spend(self) -> bool:
        """Book a failure of this moment; whether there may be another engine after it."""
        now = time.monotonic()
        is_loop = len(self._failed_at) == MAX_RESTARTS and now - self._failed_at[0] < RESTART_WINDOW_S
        self._failed_at.append(now)
        return not is_loop


@dataclass(frozen=True, slots=True)
class Steps:
    """What requests gained. is_last: nobody has work, so that nothing comes next."""

    gains: list[Gains]
    is_last: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """A step has; these requests have ended by that, and there is no engine now."""

    reason: str
    uids: list[int]


@dataclass(frozen=True, slots=True)
class Restarted:
    """There is a new engine, in which all others go on."""

    facts: Facts


@dataclass(frozen=True, slots=True)
class Dead:
    """There will be no new engine here. is_final: nor should there be one in another process."""

    reason: str
    is_final: bool = True


@dataclass(frozen=True, slots=True)
class Refused:
    """Requests that were not added."""

    uids: list[int]
    error: SlipstreamError


@dataclass(frozen=True, slots=True)
class Answered:
    """What `ask` was called with, and what came of it."""

    key: int
    value: Any
    error: Exception | None = None


Message: TypeAlias = Steps | Failed | Restarted | Dead | Refused | Answered


class Driver:
    def __init__(
        self, llm: "LLM", post: Callable[[Message], None], *, on_error: OnEngineError = "restart", ship_s: float = 0.0
    ) -> None:
        """post: called in the thread. ship_s: what no request began or ended with waits so long for later steps."""
        self.llm = llm
        self.meter = StepMeter(llm)  # the thread's
        self.busy_since: float | None = None  # when the step began that is not over, by time.monotonic
        self.num_failures = 0
        self._post, self._on_error, self._ship_s = post, on_error, ship_s
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._requests: dict[int, Request] = {}  # that were added and have not ended; these and all below: the thread's
        self._gains: list[Gains] = []  # of steps that nobody was told of
        self._is_urgent = False  # somebody began or ended in them
        self._shipped_s = -math.inf
        self._budget = RestartBudget()
        self._is_stopping = self._is_dead = False

    def add(self, requests: Sequence[Request]) -> None:
        self._commands.put(partial(self._add, requests))

    def abort(self, uids: Sequence[int]) -> None:
        self._commands.put(partial(self._abort, uids))

    def refuse(self, uids: list[int], error: SlipstreamError) -> None:
        """Say of requests that they will not be added, whatever is done to them before."""
        self._commands.put(partial(self._post, Refused(uids, error)))

    def ask(self, key: int, function: Callable[["Driver"], Any]) -> None:
        """Call the function between two steps, and post what it returns or raises."""
        self._commands.put(partial(self._answer, key, function))

    def stop(self) -> None:
        """Abort what is there, and end with the step."""
        self._commands.put(self._stop)

    def run(self) -> None:
        """In thread: steps and commands until it is told to stop or the engine has failed for good."""
        self.llm.engine.listener = self._put
        while not self._is_dead and not self._is_stopping:
            self.busy_since = None
            failure = self._turn()
            if failure is not None:
                self._recover(failure)
        self.busy_since = None

    def _turn(self) -> str | None:
        """In thread: all commands (waiting for one where there is no work) and one step. Returns how it failed."""
        try:
            if not self.llm.engine.has_work:
                self.llm.engine.drain()
                self._commands.get()()
            while not self._commands.empty():
                self._commands.get()()
            self.busy_since = time.monotonic()
            if self.llm.engine.has_work and not self._is_stopping:
                self.meter.step()
            self._ship(all_of_it=not self.llm.engine.has_work)
        except Exception as error:
            log.exception("engine_failed")
            return f"{type(error).__name__}: {error}"  # not the error itself: its traceback holds the engine
        return None

    def _put(self, gains: Gains) -> None:
        """In thread: what a step gave."""
        self._gains.append(gains)
        for request in gains.ended:
            self._requests.pop(request.uid, None)
        self._is_urgent |= bool(gains.finish_reasons) or bool(gains.kept_np[gains.num_decode :].any())

    def _ship(self, all_of_it: bool = False) -> None:
        """In thread: tell what steps gave, or leave it for a later step."""
        now = time.monotonic()
        if self._gains and (all_of_it or self._is_urgent or now - self._shipped_s >= self._ship_s):
            self._post(Steps(self._gains, all_of_it))
            self._gains, self._is_urgent, self._shipped_s = [], False, now

    def _recover(self, reason: str) -> None:
        """In thread: requests that took part have failed; those that still wait go on in a new engine, if there is one."""
        self._ship(all_of_it=True)
        self.num_failures += 1
        failed = [uid for uid, request in self._requests.items() if request.error]  # they have got no last delta
        for uid in failed:
            del self._requests[uid]
        self._post(Failed(reason, failed))
        may_go_on = self._budget.spend() and self._on_error == "restart"
        if not (may_go_on and self._restart(reason)):
            self._is_dead = True
            self._post(Dead(reason, is_final=not may_go_on))

    def _restart(self, reason: str) -> bool:
        """In thread: whether there is a new engine."""
        waiting = [request for request in self.llm.engine.requests.values() if not request.is_finished]
        try:
            self._gains.clear()
            self.meter.forget_recording()  # or the old engine would stay beside the new one
            self.llm.restart()
            self.llm.engine.listener = self._put
            for request in waiting:
                self.llm.engine.add(request)
        except Exception:
            log.exception("engine_restart_failed")
            return False
        log.warning("engine_restarted", extra={"fields": {"num_failures": self.num_failures, "reason": reason}})
        self._post(Restarted(self.llm.facts))
        return True

    def _add(self, requests: Sequence[Request]) -> None:
        """In thread."""
        try:
            for request in requests:
                self.llm.engine.add(request)
                self._requests[request.uid] = request
        except SlipstreamError as error:  # for all of them, and before any step: they are alike
            uids = [request.uid for request in requests]
            self._abort(uids)
            self._post(Refused(uids, error))

    def _abort(self, uids: Sequence[int]) -> None:
        """In thread."""
        for uid in uids:
            self.llm.engine.abort(uid)
            self._requests.pop(uid, None)

    def _answer(self, key: int, function: Callable[["Driver"], Any]) -> None:
        """In thread."""
        try:
            answer = Answered(key, function(self))
        except Exception as error:
            answer = Answered(key, None, error)
        self._post(answer)

    def _stop(self) -> None:
        """In thread: what is left is aborted, so that nothing stays behind."""
        self._is_stopping = True
        self._abort(list(self.llm.engine.requests))
        self.llm.engine.drain()
        self.llm.engine.listener = None
