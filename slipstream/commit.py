"""From a step's result to the requests' tokens: stop conditions, counters, and what each request gained.

Stops are looked at token by token inside a step, in the order stop, then length, so that a request ends exactly where
it would without drafts. A row whose slot has a new generation by now belongs to nobody and is dropped. Numbers are
moved for all rows at once in the scheduler's ledger; only a request's tokens are appended one by one. Torch-free.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import overload

import numpy as np

from slipstream.plan import StepPlan, StepResult
from slipstream.request import FinishReason, Request
from slipstream.scheduler import Scheduler

_NOT_FINITE = "the target's logits were not finite (NaN or infinite): check the weights and the dtype"


@dataclass(frozen=True, slots=True)
class Delta:
    """What one request gained in one step."""

    request: Request
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]  # per token: it was an accepted draft
    width: int  # drafts verified in this step
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True, eq=False)
class Gains(Sequence[Delta]):
    """What requests gained in one step, in the plan's order. A delta is made when it is read: mostly nobody does."""

    requests: Sequence[Request] = ()
    token_ids: Sequence[list[int]] = ()  # those that were kept
    num_accepted: Sequence[int] = ()  # of them accepted drafts, which come first
    widths: Sequence[int] = ()
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)  # by index, of those that ended

    def __len__(self) -> int:
        return len(self.requests)

    @overload
    def __getitem__(self, index: int) -> Delta: ...
    @overload
    def __getitem__(self, index: slice) -> list[Delta]: ...
    def __getitem__(self, index: int | slice) -> Delta | list[Delta]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        token_ids, reason = self.token_ids[index], self.finish_reasons.get(index % len(self))
        accepted = _flags(self.num_accepted[index], len(token_ids))
        return Delta(self.requests[index], tuple(token_ids), accepted, self.widths[index], reason)

    @property
    def ended(self) -> list[Request]:
        return [self.requests[index] for index in sorted(self.finish_reasons)]


def commit(plan: StepPlan, result: StepResult, scheduler: Scheduler) -> Gains:
    """Apply a collected step. Requests that end here leave the scheduler."""
    flight, ledger = scheduler.take_flight(plan.step), scheduler.ledger
    rows = ledger.still_there(flight).nonzero()[0]
    slots, widths, invalid = flight.slots_np[rows], result.widths_np[rows], result.invalid_np[rows]
    emits = flight.emits_np[rows] & ~invalid
    num_accepted = result.num_accepted_np[rows] * emits
    ledger.advance(slots, flight.num_given_np[rows], num_accepted, flight.max_rows_np[rows])

    too_long = ledger.context[slots] - ledger.full_context[slots]  # 0: the length that was asked for
    full = (too_long >= 0).nonzero()[0]
    reasons: dict[int, FinishReason] = dict.fromkeys(full.tolist(), "length")
    kept = num_accepted + emits
    kept[full] -= too_long[full]
    requests = [ledger.tenants[slot] for slot in slots.tolist()]
    tokens = result.token_ids_np.take(rows, axis=0).tolist()
    token_ids = [ids[:count] for ids, count in zip(tokens, kept.tolist(), strict=True)]
    for index in _cut_at_stops(requests, token_ids):
        kept[index], reasons[index] = len(token_ids[index]), "stop"
    for index in invalid.nonzero()[0].tolist():
        widths[index], reasons[index], requests[index].error = 0, "error", _NOT_FINITE

    gains = Gains(requests, token_ids, np.minimum(num_accepted, kept).tolist(), widths.tolist(), reasons)
    _append(gains)
    decoded = emits & (rows < plan.num_decode)
    for index in sorted(reasons):
        if decoded[index]:  # counted by itself, for it may have been cut
            kept_drafts, count = gains.num_accepted[index], len(token_ids[index])
            requests[index].counters.count_step(plan.draft_length, gains.widths[index], kept_drafts, count)
            decoded[index] = False
        scheduler.finish(requests[index], reasons[index])
    ledger.count(slots[decoded], plan.draft_length, widths[decoded], num_accepted[decoded])
    scheduler.settle(slots[emits])
    return gains


def _cut_at_stops(requests: list[Request], token_ids: list[list[int]]) -> list[int]:
    """Cut tokens behind the first that ends its request's answer; return the indices where there was one."""
    found = []
    for index, (request, ids) in enumerate(zip(requests, token_ids, strict=True)):
        if not request.stop_ids.isdisjoint(ids):
            end = next(place for place, token in enumerate(ids) if token in request.stop_ids)
            del ids[end + 1 :]
            found.append(index)
    return found


def _append(gains: Gains) -> None:
    now = time.perf_counter()
    for request, ids, num_accepted in zip(gains.requests, gains.token_ids, gains.num_accepted, strict=True):
        if not ids:
            continue
        if not request.output_ids:
            request.first_token_s = now
        request.last_token_s = now
        request.output_ids += ids
        request.accepted += _flags(num_accepted, len(ids))


@cache
def _flags(num_accepted: int, count: int) -> tuple[bool, ...]:
    """Per token: it was an accepted draft. Those come first."""
    return (True,) * num_accepted + (False,) * (count - num_accepted)
