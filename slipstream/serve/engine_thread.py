"""The engine in a thread of the server's process: for tests, notebooks, and whoever has an `LLM` there already.

The thread shares Python's interpreter with the event loop, so that each waits for the other; `slipstream serve` has an
`engine_process` for that reason. Made by `app`.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.request import Request
from slipstream.serve.desk import Desk
from slipstream.serve.driver import Driver, Message
from slipstream.serve.options import OnEngineError

if TYPE_CHECKING:
    from slipstream.llm import LLM

log = logging.getLogger("slipstream.serve")


class EngineThread(Desk):
    def __init__(
        self, llm: "LLM", *, on_error: OnEngineError = "restart", on_dead: Callable[[], None] = lambda: None,
        stall_s: float = math.inf, interval_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Starts at once. The rest as `Desk` has it."""
        super().__init__(llm, on_dead=on_dead, stall_s=stall_s, interval_s=interval_s)
        self.llm = llm
        # The loop is told of steps half as often as it tells: each time the two wait for each other.
        self._driver = Driver(llm, self._post, on_error=on_error, ship_s=interval_s / 2)
        self._thread = threading.Thread(target=self._driver.run, name="slipstream-engine", daemon=True)
        self._thread.start()

    @property
    def _busy_since(self) -> float | None:
        return self._driver.busy_since

    def _add(self, requests: Sequence[Request]) -> None:
        self._driver.add(requests)

    def _abort(self, uids: Sequence[int]) -> None:
        self._driver.abort(uids)

    def _ask(self, key: int, function: Callable[[Driver], Any]) -> None:
        self._driver.ask(key, function)

    async def _end(self) -> None:
        self._driver.stop()
        await asyncio.to_thread(self._thread.join, 10.0)

    def _post(self, message: Message) -> None:
        """In the thread: have it handled on the loop, if that is still there."""
        try:
            self._loop.call_soon_threadsafe(self.handle, message)
        except RuntimeError:
            log.debug("the loop is closed")
