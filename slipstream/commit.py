"""From a step's result to the requests' tokens: stop conditions, counters, and what each request gained.

Stops are looked at token by token inside a step, in the order stop, then length, so that a request ends exactly where
it would without drafts. A row whose slot has a new generation by now belongs to nobody and is dropped. Numbers are
moved for all rows at once in the scheduler's ledger; only a request's tokens are appended one by one. Torch-free.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
        return Delta(self.requests[index], tuple(token_ids), tuple(accepted), self.widths[index], reason)

    @property
    def ended(self) -> Iterator[Request]:
        return (self.requests[index] for index in self.finish_reasons)


def commit(plan: StepPlan, result: StepResult, scheduler: Scheduler) -> Gains:
    """Apply a collected step. Requests that end here leave the scheduler."""
    flight, ledger = scheduler.take_flight(plan.step), scheduler.ledger
    # The others have ended or been preempted while this step was in flight.
    rows = np.flatnonzero(ledger.generations[flight.slots_np] == flight.generations_np)
    slots, widths, invalid = flight.slots_np[rows], result.widths_np[rows], result.invalid_np[rows]
    requests = [ledger.tenants[slot] for slot in slots.tolist()]

    emits = flight.emits_np[rows] & ~invalid
    num_accepted = result.num_accepted_np[rows] * emits
    num_tokens, room = num_accepted + emits, ledger.max_outputs[slots] - ledger.num_outputs[slots]
    kept = np.minimum(num_tokens, room)
    token_ids = [ids[:count] for ids, count in zip(result.token_ids_np[rows].tolist(), kept.tolist(), strict=True)]
    reasons: dict[int, FinishReason] = dict.fromkeys(np.flatnonzero(num_tokens >= room).tolist(), "length")
    for index in _cut_at_stops(requests, token_ids):
        kept[index], reasons[index] = len(token_ids[index]), "stop"
    for index in np.flatnonzero(invalid).tolist():
        widths[index], reasons[index], requests[index].error = 0, "error", _NOT_FINITE

    kept_drafts = np.minimum(num_accepted, kept)
    gains = Gains(requests, token_ids, kept_drafts.tolist(), widths.tolist(), dict(sorted(reasons.items())))
    _append(gains)
    ledger.advance(slots, flight, rows, plan.num_given_np[rows] + num_accepted, kept)
    decoded = np.flatnonzero(emits & (rows < plan.num_decode))
    ledger.count(slots[decoded], plan.draft_length, widths[decoded], kept_drafts[decoded], kept[decoded])
    for index, reason in gains.finish_reasons.items():
        scheduler.finish(requests[index], reason)
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


def _flags(num_accepted: int, count: int) -> list[bool]:
    """Per token: it was an accepted draft. Those come first."""
    return [True] * num_accepted + [False] * (count - num_accepted)
