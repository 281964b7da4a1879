"""A request on the host: what was asked, the tokens so far, and the slot while it runs. Host code: no tensors.

Only the scheduler moves a request between states; only `commit` appends tokens. Numbers that change with every step
(context, what lies in flight) stand in the scheduler's ledger, its pages in the scheduler's page table, by slot.
"""

import time
from dataclasses import dataclass, field
from typing import Literal

from slipstream.config import SamplingParams
from slipstream.metrics import SpecCounters

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True, eq=False)
class Request:
    uid: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams  # not changed once it was added
    seed: int
    constrained: bool = False  # something besides the target decides what may be emitted
    eos_token_ids: frozenset[int] = frozenset()
    output_ids: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)  # per output token: it was an accepted draft
    finish_reason: FinishReason | None = None
    error: str | None = None
    counters: SpecCounters = field(default_factory=SpecCounters)  # up to when it last left its slot
    submitted_s: float = field(default_factory=time.perf_counter)
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    slot: int | None = None  # while it runs
    stop_ids: frozenset[int] = field(init=False)  # tokens that end the answer

    def __post_init__(self) -> None:
        ends = frozenset() if self.params.ignore_eos else self.eos_token_ids
        self.stop_ids = ends.union(self.params.stop_token_ids)

    @property
    def num_known(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None
