"""An engine that answers by the clock and costs next to nothing, for `serving_front.py`: where the engine is."""

import os
import random
import time
from argparse import Namespace
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench.serving_engine import cores
from slipstream.commit import Gains
from slipstream.config import SpeculativeConfig
from slipstream.grammars import XGrammars
from slipstream.host import Facts, Host
from slipstream.models.locate import resolve_target
from slipstream.models.tokenizer import load_tokenizer
from slipstream.prompts import read_prompts
from slipstream.request import Request
from slipstream.scheduler import SchedulerLimits
from slipstream.serve.driver import Driver

MAX_MODEL_LEN, NUM_PAGES, PAGE_SIZE = 8192, 1 << 20, 16


class PacedEngine:
    """What a `Driver` knows of an engine."""

    def __init__(self, options: Namespace, text: Sequence[int]) -> None:
        self.listener: Any = None
        self.requests: dict[int, Request] = {}  # that have not ended, in the order in which they came
        self.occupied: list[int] = []  # slots, by step
        self._running: list[Request] = []
        self._left: dict[int, int] = {}  # uid -> tokens to come
        self._step_s, self._num_slots, self._most = options.step_ms / 1e3, options.streams, options.most_tokens
        self._text_np, self._draws, self._due_s = np.array(text, np.int32), random.Random(0), 0.0

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def num_decode_steps(self) -> int:
        return len(self.occupied)

    def drain(self) -> None:
        """Nothing is in flight between two steps."""

    def add(self, request: Request) -> None:
        self.requests[request.uid] = request
        self._left[request.uid] = request.params.max_tokens

    def abort(self, uid: int) -> None:
        self.requests.pop(uid, None)
        if any(request.uid == uid for request in self._running):
            self._running = [request for request in self._running if request.uid != uid]

    def step(self) -> None:
        num_decode = len(self._running)
        waiting = [request for request in self.requests.values() if request.num_cached is None]
        begun = waiting[: self._num_slots - num_decode]
        for request in begun:
            request.num_cached = 0
        if begun:  # else it is the same list: its uids are not sent again
            self._running = [*self._running, *begun]
        self._due_s = max(self._due_s + self._step_s, time.perf_counter())
        time.sleep(max(self._due_s - time.perf_counter(), 0.0))
        gains = self._gains(num_decode)
        self.occupied.append(len(self._running))
        if gains.finish_reasons:
            self._running = [request for request in self._running if request.uid in self.requests]
        if self.listener is not None:
            self.listener(gains)

    def _gains(self, num_decode: int) -> Gains:
        count, reasons = len(self._running), {}
        kept_np, at = np.ones(count, np.int32), self._draws.randrange(len(self._text_np) - self._most)
        for index, request in enumerate(self._running):
            given = self._draws.randint(1, self._most) if index < num_decode else 1
            kept_np[index] = given = min(given, self._left[request.uid])
            self._left[request.uid] -= given
            if not self._left[request.uid]:
                reasons[index] = request.finish_reason = "length"
                del self._left[request.uid], self.requests[request.uid]
        token_ids_np = np.tile(self._text_np[at : at + self._most], (count, 1))
        widths_np = np.full(count, self._most - 1, np.int32)
        return Gains(
            self._running, token_ids_np, kept_np, kept_np - 1, widths_np, reasons, {}, num_decode, self._most - 1
        )


class Paced(Host):
    """What a `Driver` and its process know of an `LLM`."""

    def __init__(self, options: Namespace) -> None:
        tokenizer = load_tokenizer(resolve_target(options.model))
        limits = SchedulerLimits(
            max_num_seqs=options.streams, max_num_batched_tokens=MAX_MODEL_LEN, max_model_len=MAX_MODEL_LEN,
            max_drafts=options.most_tokens - 1, max_draft_context=MAX_MODEL_LEN,
        )  # fmt: skip
        ends = frozenset(tokenizer.eos_token_ids)
        facts = Facts(
            vocab_size=tokenizer.vocab_size, eos_token_ids=ends, dtype="none", speculative=SpeculativeConfig(draft_model="none"),
            seed=0, limits=limits, page_size=PAGE_SIZE, num_pages=NUM_PAGES,
        )  # fmt: skip
        super().__init__(tokenizer, facts, XGrammars(tokenizer, tokenizer.vocab_size, ends))
        self.models = SimpleNamespace(
            device=torch.device("cpu"), tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=ends
        )
        self.engine = PacedEngine(options, tokenizer.encode(" ".join(read_prompts(None))))


def make(options: Namespace) -> list[Any]:
    if options.engine_cores:
        os.sched_setaffinity(0, cores(options.engine_cores))
    return [Paced(options)]


def occupied(driver: Driver, forget: bool) -> list[int]:
    """Slots, in each step since it was last forgotten."""
    engine: Any = driver.llm.engine
    found = list(engine.occupied)
    if forget:
        engine.occupied.clear()
    return found
