"""A mode that the server offers: its engine, and the places in the queue for it.

Modes are engines of their own over the same weights, each with its slots and its KV pool; a request goes through one of
them. Called by `service`; runs on the event loop.
"""

import asyncio
import math

from slipstream.errors import EngineError
from slipstream.serve.desk import Desk
from slipstream.serve.metrics import Metrics, Snapshot, snapshot
from slipstream.serve.options import ServeOptions
from slipstream.serve.problems import Problem, queue_full, unavailable

SNAPSHOT_S = 2.0  # a step may take so long before its metrics are old ones


class Lane:
    def __init__(self, engine: Desk, options: ServeOptions, metrics: Metrics) -> None:
        self.engine, self.options, self.metrics = engine, options, metrics
        self.host = engine.host
        self.mode = self.host.mode
        self.num_open = 0  # answers that were admitted and are not closed
        self.num_given = 0  # tokens that clients were given
        limits = self.host.facts.limits
        self.num_drafts, self._num_slots = limits.max_drafts, limits.max_num_seqs
        self._mean_s = 1.0  # how long an answer takes, the latest ones above all

    def open(self, num_prompts: int, num_siblings: int) -> None:
        """Take places in the queue, one for each answer, which `close` gives back. Problem where there are none."""
        if self.engine.state == "dead":
            raise unavailable(f"the engine has failed: {self.engine.failure}")
        limit, num_answers = self._num_slots + self.options.max_waiting, num_prompts * num_siblings
        if num_answers > limit:
            names = [*(["prompt"] if num_prompts > 1 else []), *(["n"] if num_siblings > 1 else [])]
            message = (
                f"{num_prompts} prompts with {num_siblings} answers each"
                if len(names) == 2
                else f"{num_answers} answers"
            )
            message = f"{' and '.join(names)} ask for {message} at once, and at most {limit} have room"
            raise Problem(400, message, param=names[0])
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
        """Of the engine; None where it is not there, or does not answer in time."""
        if self.engine.state != "running":
            return None
        try:
            return await asyncio.wait_for(self.engine.ask(snapshot), SNAPSHOT_S)
        except (TimeoutError, EngineError):
            return None

    def _retry_after_s(self) -> int:
        """About when one of those that wait for a slot will have got it."""
        waves = max(self.num_open - self._num_slots, 1) / self._num_slots
        return min(max(math.ceil(waves * self._mean_s), 1), 60)
