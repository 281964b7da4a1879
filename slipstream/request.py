"""A request on the host: its tokens, what it owns (slot, pages) and what of it lies in flight.

Only the scheduler moves a request between states; only `commit` appends tokens. Host code: no tensors.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from slipstream.config import SamplingParams
from slipstream.metrics import SpecCounters

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step of this request that was planned and not yet committed."""

    step: int
    max_rows: int  # given rows + most drafts: how far the context may move
    emits: bool


@dataclass(slots=True, eq=False)
class Request:
    uid: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    constrained: bool = False  # something besides the target decides what may be emitted
    eos_token_ids: frozenset[int] = frozenset()
    output_ids: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)  # per output token: it was an accepted draft
    finish_reason: FinishReason | None = None
    error: str | None = None
    counters: SpecCounters = field(default_factory=SpecCounters)
    submitted_s: float = field(default_factory=time.perf_counter)
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    # Owned while running
    slot: int | None = None
    generation: int = -1
    pages: list[int] = field(default_factory=list)
    prefill_target: int = 0  # known tokens to compute before decoding: the prompt, after a preemption the output too
    context: int = 0  # committed context length
    planned_prefill: int = 0  # prefill tokens planned so far
    decode_steps: int = 0  # decode steps planned since admission
    in_flight: deque[InFlight] = field(default_factory=deque)

    @property
    def num_known(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_prefilling(self) -> bool:
        return self.planned_prefill < self.prefill_target

    @property
    def context_upper_bound(self) -> int:
        """Context length at most, with what lies in flight."""
        return self.context + sum(step.max_rows for step in self.in_flight)

    @property
    def num_output_lower_bound(self) -> int:
        """Output tokens at least, once everything in flight is committed: each emitting step brings one or more."""
        return len(self.output_ids) + sum(step.emits for step in self.in_flight)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None
