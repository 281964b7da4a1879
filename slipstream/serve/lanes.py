"""A mode that the server offers: its engine in a thread, and the places in the queue for it.

Modes are engines of their own over the same weights, each with its slots and its KV pool; a request goes through one of
them. Called by `service`; runs on the event loop.
"""

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from slipstream.serve.engine_thread import EngineThread
from slipstream.serve.metrics import Metrics, Snapshot, snapshot
from slipstream.serve.options import ServeOptions
from slipstream.serve.problems import Problem, queue_full, unavailable

if TYPE_CHECKING:
    from slipstream.llm import LLM

SNAPSHOT_S = 2.0  # a step may take so long before its metrics are old ones


class Lane:
    """Starts its engine's thread at once."""

    def __init__(self, llm: "LLM", options: ServeOptions, metrics: Metrics, on_dead: Callable[[], None]) -> None:
        self.llm, self.options, self.metrics = llm, options, metrics
        self.mode: str = llm.speculative.mode
        self.engine = EngineThread(
            llm, on_error=options.on_engine_error, on_dead=on_dead, stall_s=options.stall_s,
            interval_s=options.stream_interval_s,
        )  # fmt: skip
        self.num_open = 0  # answers that were admitted and are not closed
        self.num_given = 0  # tokens that clients were given
        limits = llm.engine.scheduler.limits
        self.num_drafts, self._num_slots = limits.max_drafts, limits.max_num_seqs
        self._mean_s = 1.0  # how long an answer takes, the latest ones above all

    def open(self, num_answers: int) -> None:
        """Take places in the queue, which `close` gives back. Problem where there are none."""
        if self.engine.state == "dead":
            raise unavailable(f"the engine has failed: {self.engine.failure}")
        limit = self._num_slots + self.options.max_waiting
        if num_answers > limit:
            raise Problem(400, f"{num_answers} answers are asked for at once, and at most {limit} have room", param="n")
        if self.num_open + num_answers > limit:
            raise queue_full(self._retry_after_s())
        self.num_open += num_answers

    def close(self, num_answers: int) -> None:
        self.num_open -= num_answers

    def given(self, num_tokens: int) -> None:
        self.num_given += num_tokens
        self.metrics.tokens(self.mode, num_tokens)

    def answered(self, reason: str, seconds: float, seconds_per_token: float | None) -> None:
        self._mean_s += 0.1 * (seconds - self._mean_s)
        self.metrics.answered(self.mode, reason, seconds, seconds_per_token)

    async def snapshot(self) -> Snapshot | None:
        """Of the engine; None where it does not answer in time."""
        try:
            return await asyncio.wait_for(self.engine.ask(partial(snapshot, meter=self.engine.meter)), SNAPSHOT_S)
        except TimeoutError:
            return None

    def _retry_after_s(self) -> int:
        """About when one of those that wait for a slot will have got it."""
        waves = max(self.num_open - self._num_slots, 1) / self._num_slots
        return min(max(math.ceil(waves * self._mean_s), 1), 60)
