"""Answers to HTTP requests, without HTTP: admission, the engine's deltas as text, deadlines, numbers for the metrics.

A `Job` is what one HTTP request gets: all answers to all its prompts. It holds its places in the queue from the moment
it is opened until `close`, whatever happens in between, and `close` leaves nothing of it in the engine. Runs on the
event loop; prompts are tokenized and grammars compiled in small pools of threads.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.commit import Delta
from slipstream.host import Host
from slipstream.logprobs import TokenLogprob
from slipstream.request import FinishReason, Request
from slipstream.serve.desk import Desk, Mailbox
from slipstream.serve.lanes import Lane
from slipstream.serve.metrics import Metrics, Snapshot
from slipstream.serve.options import ServeOptions
from slipstream.serve.problems import Problem, engine_failed, timed_out, unavailable
from slipstream.stream import Chunk, TextStream

log = logging.getLogger("slipstream.serve")


@dataclass(slots=True)
class Part:
    """A run of one answer's tokens: what several chunks say together."""

    index: int  # among the choices
    request: Request
    num_chars_before: int  # of the answer's text, and
    num_tokens_before: int
    pieces: list[str] = field(default_factory=list)  # the text of each token, and perhaps what was held back at the end
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    steps: list[Chunk] | None = None  # None: not asked for

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(self, chunk: Chunk) -> None:
        if self.steps is not None:
            self.steps.append(chunk)
        self.pieces += [piece.text for piece in chunk.pieces]
        self.token_ids += chunk.token_ids
        if chunk.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *chunk.logprobs]
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = chunk.prompt_logprobs
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason


@dataclass(slots=True)
class _Answer:
    """One answer while it is made."""

    index: int
    request: Request
    text: TextStream
    num_chars: int = 0
    num_tokens: int = 0
    first_token_s: float = 0.0


class Job:
    """The answers to one HTTP request."""

    def __init__(self, lane: Lane, num_answers: int, keeps_steps: bool) -> None:
        """The places in the lane's queue are taken. keeps_steps: parts say what became of drafts, step by step."""
        self.num_prompt_tokens = self.num_output_tokens = 0
        self.mailbox = Mailbox(lane.options.max_backlog * num_answers, by_step=keeps_steps)
        self._lane, self._num_answers, self._keeps_steps = lane, num_answers, keeps_steps
        self._arrived_s = time.perf_counter()
        self._answers: dict[int, _Answer] = {}  # by uid, of those that have not ended
        self._prompts: Sequence[Sequence[Request]] = ()  # the requests of each
        self._requests: list[Request] = []
        seconds = lane.options.request_timeout_s
        self._timer = asyncio.get_running_loop().call_later(seconds, self.mailbox.fail, timed_out(seconds))
        self._is_open = True

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that had not to be computed; siblings, who share theirs, do not count."""
        return sum(siblings[0].num_cached or 0 for siblings in self._prompts)

    @property
    def is_over(self) -> bool:
        """It was started, and all of its answers were taken to their ends."""
        return bool(self._requests) and not self._answers

    def start(self, prompts: Sequence[Sequence[Request]]) -> None:
        """Put the requests, those of each prompt, into the engine's queue."""
        self._prompts = prompts
        self._requests = [request for siblings in prompts for request in siblings]
        self.num_prompt_tokens = sum(len(siblings[0].prompt_ids) for siblings in prompts)
        for index, request in enumerate(self._requests):
            by_token = self._keeps_steps or request.params.logprobs is not None
            self._answers[request.uid] = _Answer(index, request, self._lane.host.text_stream(request, by_token))
        self._lane.engine.submit(self._requests, self.mailbox)

    async def begun(self) -> None:
        """Until the first tokens are there. Problem where there will be none."""
        await self.mailbox.ready()
        if self.mailbox.failure is not None:
            raise self.mailbox.failure

    async def parts(self) -> AsyncIterator[list[Part]]:
        """What has come since the last time, one part for each answer that gained something, until all have ended.

        Problem where one of them fails: they stand and fall together.
        """
        while self._answers:
            parts: dict[int, Part] = {}
            for delta in await self.mailbox.take():
                self._take(delta, parts)
            self._lane.given(sum(len(part.token_ids) for part in parts.values()))
            yield list(parts.values())

    async def whole(self) -> list[Part]:
        """All of it, in the order of the choices."""
        whole: dict[int, list[Part]] = {index: [] for index in range(self._num_answers)}
        async for parts in self.parts():
            for part in parts:
                whole[part.index].append(part)
        return [_joined(parts) for parts in whole.values()]

    def close(self) -> None:
        """Give its places back, and abort what has not ended."""
        if self._is_open:
            self._is_open = False
            self._timer.cancel()
            self._lane.engine.release(self._requests)
            self._lane.close(self._num_answers)

    def _take(self, delta: Delta, parts: dict[int, Part]) -> None:
        answer = self._answers[delta.request.uid]
        if delta.finish_reason == "error":
            raise engine_failed(delta.request.error or "no reason is known")
        chunk = answer.text.chunk(delta)
        part = parts.get(answer.index)
        if part is None:
            part = parts[answer.index] = Part(answer.index, delta.request, answer.num_chars, answer.num_tokens)
            part.steps = [] if self._keeps_steps else None
        part.add(chunk)
        answer.num_chars += len(chunk.text)
        answer.num_tokens += len(delta.token_ids)
        self.num_output_tokens += len(delta.token_ids)
        self._observe(answer, delta)

    def _observe(self, answer: _Answer, delta: Delta) -> None:
        now, lane = time.perf_counter(), self._lane
        if not answer.first_token_s:
            answer.first_token_s = now
            num_prompt = len(delta.request.prompt_ids) if delta.request.index == 0 else 0
            lane.metrics.first_token(lane.mode, now - self._arrived_s, num_prompt)
        if delta.finish_reason is not None:
            del self._answers[delta.request.uid]
            seconds = now - self._arrived_s
            later = answer.num_tokens - 1
            lane.answered(delta.finish_reason, seconds, (now - answer.first_token_s) / later if later > 0 else None)


def _joined(parts: Sequence[Part]) -> Part:
    first, last = parts[0], parts[-1]
    entries = None if first.logprobs is None else [entry for part in parts for entry in part.logprobs or ()]
    return Part(
        first.index, first.request, 0, 0, [piece for part in parts for piece in part.pieces],
        [token for part in parts for token in part.token_ids], entries, first.prompt_logprobs, last.finish_reason,
        last.stop_reason, None if first.steps is None else [step for part in parts for step in part.steps or ()],
    )  # fmt: skip


class Engines(Protocol):
    """Engines over the same weights, a mode each; where they are, nobody else knows."""

    @property
    def hosts(self) -> Sequence[Host]: ...
    def start(self, options: ServeOptions, on_dead: Callable[[], None]) -> Sequence[Desk]:
        """In the loop that talks to them."""


class Service:
    """What all requests share. Made in the event loop that serves them."""

    def __init__(
        self, engines: Engines, options: ServeOptions, model: str, on_dead: Callable[[], None]
    ) -> None:  # fmt: skip
        """on_dead: called when one of the engines has failed for good. The first is the one of requests that name no mode."""
        self.options, self.model = options, model
        self.created = int(time.time())
        self.metrics = Metrics(model)
        desks = engines.start(options, on_dead)
        self.lanes = {desk.host.mode: Lane(desk, options, self.metrics) for desk in desks}
        assert len(self.lanes) == len(desks), "two engines of one mode"
        self.own = next(iter(self.lanes.values()))
        self.is_draining = False
        # Two pools: a schema that takes long to compile keeps no text waiting.
        self._pools = {False: ThreadPoolExecutor(2, "slipstream-text"), True: ThreadPoolExecutor(2, "slipstream-form")}

    @property
    def host(self) -> Host:
        """For what does not depend on the mode."""
        return self.own.host

    @property
    def engine(self) -> Desk:
        """Of requests that name no mode."""
        return self.own.engine

    @property
    def num_open(self) -> int:
        """Answers that were admitted and are not closed."""
        return sum(lane.num_open for lane in self.lanes.values())

    @property
    def is_healthy(self) -> bool:
        return all(lane.engine.is_healthy for lane in self.lanes.values())

    @property
    def is_ready(self) -> bool:
        return self.is_healthy and not self.is_draining

    def lane(self, mode: str | None) -> Lane:
        """The engine that serves this mode; None: the server's own. Problem where the server does not offer it."""
        if mode is None:
            return self.own
        if mode not in self.lanes:
            raise Problem(400, f"verify is {mode!r}, and this server offers {', '.join(self.lanes)}", param="verify")
        return self.lanes[mode]

    def open(self, lane: Lane, num_prompts: int, num_siblings: int, keeps_steps: bool) -> Job:
        """Places in a lane's queue for a request. Problem where there are none."""
        if self.is_draining:
            raise unavailable("the server is shutting down")
        lane.open(num_prompts, num_siblings)
        return Job(lane, num_prompts * num_siblings, keeps_steps)

    async def in_pool(self, function: Callable[[], Any], is_form: bool = False) -> Any:
        """The result of work that would hold up the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pools[is_form], function)

    async def snapshots(self) -> dict[str, Snapshot | None]:
        """Of every engine, by mode; None where one does not answer in time."""
        found = await asyncio.gather(*(lane.snapshot() for lane in self.lanes.values()))
        return dict(zip(self.lanes, found, strict=True))

    async def drain(self) -> None:
        """Admit nobody, and let those that are in finish within the time of grace."""
        self.is_draining = True
        end = time.monotonic() + self.options.grace_s
        while self.num_open and time.monotonic() < end:
            await asyncio.sleep(0.02)

    async def stop_engines(self) -> None:
        await asyncio.gather(*(lane.engine.stop() for lane in self.lanes.values()))

    async def stop(self) -> None:
        self.is_draining = True
        await self.stop_engines()
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
