"""From a step's result to the requests' tokens: stop conditions, counters, and what each request gained.

Stops are looked for inside a step, token by token in the order stop ids, stop strings, length, so that a request ends
exactly where it would without drafts. Texts are not known here: a request with stop strings brings a watcher. A row whose
slot has a new generation by now belongs to nobody and is dropped. Numbers and tokens are moved for all rows at once in
the scheduler's ledger; Python per row is left for first tokens, for watchers and for ends. Torch-free.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import compress
from typing import Any, NamedTuple, overload

import numpy as np

from slipstream.ledger import InFlight, Ledger
from slipstream.logprobs import Reported, TokenLogprob, Wanted, entries
from slipstream.plan import Bools, Int32s, Int64s, StepPlan, StepResult
from slipstream.request import FinishReason, Request
from slipstream.scheduler import Scheduler

_NOTHING_TO_CHOOSE = (
    "no token could be chosen: the target's logits were not finite (NaN or infinite; check the weights and the dtype), or "
    "all tokens that have a chance are banned by the request"
)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one request gained in one step."""

    request: Request
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]  # per token: it was an accepted draft
    width: int  # drafts verified in this step
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] | None = None  # per token; None: not asked for
    drafted: int = 0  # in this step; 0 also where a prompt gave the token


@dataclass(frozen=True, eq=False)
class Gains(Sequence[Delta]):
    """What requests gained in one step, in the plan's order. A delta is made when it is read: mostly nobody does."""

    requests: Sequence[Request]
    token_ids_np: Int32s  # [n, W + 1]
    kept_np: Int32s  # [n] how many of them count
    num_accepted_np: Int32s  # [n] how many of those are accepted drafts, which come first
    widths_np: Int32s  # [n]
    finish_reasons: dict[int, FinishReason]  # by index, of those that ended
    reports: dict[int, Int32s]  # by index, of those that asked for log-probabilities: [kept, columns]
    num_decode: int  # the first ones decoded, the others got a token from their prompt
    drafted: int  # for each of those that decoded

    @classmethod
    def of_failed(cls, requests: Sequence[Request]) -> "Gains":
        """Of requests that end with an error and no token more."""
        nothing = np.zeros(len(requests), np.int32)
        reasons: dict[int, FinishReason] = dict.fromkeys(range(len(requests)), "error")
        return cls(requests, nothing[:, None], nothing, nothing, nothing, reasons, {}, num_decode=0, drafted=0)

    def __len__(self) -> int:
        return len(self.requests)

    @overload
    def __getitem__(self, index: int) -> Delta: ...
    @overload
    def __getitem__(self, index: slice) -> list[Delta]: ...
    def __getitem__(self, index: int | slice) -> Delta | list[Delta]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        token_ids, accepted, widths = self._columns
        request = self.requests[index]
        index %= len(widths)
        reason, drafted = self.finish_reasons.get(index), self.drafted if index < self.num_decode else 0
        return Delta(request, token_ids[index], accepted[index], widths[index], reason, self._logprobs(index), drafted)

    def _logprobs(self, index: int) -> tuple[TokenLogprob, ...] | None:
        most = self.requests[index].params.logprobs
        if most is None:
            return None
        report = self.reports.get(index)
        return () if report is None else tuple(entries(iter(self._columns[0][index]), report, most))

    @cached_property
    def _columns(self) -> tuple[list[tuple[int, ...]], list[tuple[bool, ...]], list[int]]:
        """Of all at once: whoever reads one delta reads the others as well."""
        kept, tokens = self.kept_np.tolist(), self.token_ids_np.tolist()
        token_ids = [tuple(ids[:count]) for ids, count in zip(tokens, kept, strict=True)]
        return token_ids, list(map(_flags, self.num_accepted_np.tolist(), kept)), self.widths_np.tolist()

    @property
    def ended(self) -> list[Request]:
        return [self.requests[index] for index in sorted(self.finish_reasons)]


def joined(rows: Sequence[tuple[Gains, int]]) -> Delta:
    """What a request gained in several steps, given by its place in each, as if it had been the last of them."""
    token_ids: list[int] = []
    accepted: list[bool] = []
    for step, place in rows:
        count = int(step.kept_np[place])
        token_ids += step.token_ids_np[place, :count].tolist()
        accepted += _flags(int(step.num_accepted_np[place]), count)
    gains, index = rows[-1]
    logprobs = None
    if gains.requests[index].params.logprobs is not None:
        logprobs = tuple(entry for step, place in rows for entry in step._logprobs(place) or ())
    return _ending(gains, index, token_ids, accepted, logprobs)


def all_joined(steps: Sequence[Gains], since: Mapping[int, int]) -> list[Delta]:
    """The same of all requests, in the order of their uids; of some only from a step on: `since` has its place, by uid.

    In arrays, for what many requests gained in many steps: no Python for each of their rows. Without log-probabilities.
    """
    begins = np.cumsum([0, *map(len, steps)])  # of each step's rows among those of all
    rows, uids_np = _by_request(steps, begins, since)
    if not len(rows):
        return []
    token_ids_np = np.zeros((begins[-1], max(gains.token_ids_np.shape[1] for gains in steps)), np.int32)
    for gains, begin in zip(steps, begins.tolist(), strict=False):
        token_ids_np[begin : begin + len(gains), : gains.token_ids_np.shape[1]] = gains.token_ids_np
    kept_np = np.concatenate([gains.kept_np for gains in steps])[rows]
    accepted_np = np.concatenate([gains.num_accepted_np for gains in steps])[rows]
    column = np.arange(token_ids_np.shape[1])
    there = column < kept_np[:, None]
    token_ids, accepted = token_ids_np[rows][there].tolist(), (column < accepted_np[:, None])[there].tolist()
    last = np.append(np.flatnonzero(np.diff(uids_np)), len(rows) - 1)  # of each request's
    step_np = np.searchsorted(begins, rows[last], side="right") - 1
    deltas, begin = [], 0
    for number, index, end in zip(
        step_np.tolist(), (rows[last] - begins[step_np]).tolist(), np.cumsum(kept_np)[last].tolist(), strict=True
    ):
        deltas.append(_ending(steps[number], index, token_ids[begin:end], accepted[begin:end], None))
        begin = end
    return deltas


def _by_request(steps: Sequence[Gains], begins: Int64s, since: Mapping[int, int]) -> tuple[Int64s, Int64s]:
    """Rows of all steps that are wanted, a request's behind each other, and their uids."""
    uids_np = np.array([request.uid for gains in steps for request in gains.requests], np.int64)
    rows = np.arange(len(uids_np))
    if since:
        known_np, first_np = np.array(sorted(since.items())).T
        place_np = np.searchsorted(known_np, uids_np).clip(max=len(known_np) - 1)
        is_late = rows >= begins[first_np[place_np]]
        rows = rows[(known_np[place_np] != uids_np) | is_late]
    rows = rows[np.argsort(uids_np[rows], kind="stable")]
    return rows, uids_np[rows]


def _ending(
    gains: Gains, index: int, token_ids: Sequence[int], accepted: Sequence[bool],
    logprobs: tuple[TokenLogprob, ...] | None,
) -> Delta:  # fmt: skip
    """With a row's step as its last one."""
    return Delta(
        gains.requests[index], tuple(token_ids), tuple(accepted), int(gains.widths_np[index]),
        gains.finish_reasons.get(index), logprobs, gains.drafted if index < gains.num_decode else 0,
    )  # fmt: skip


class _Rows(NamedTuple):
    """What of a step came back for tenants that are still there, in the plan's order."""

    num_decode: int  # the first ones decode, the others are chunks of prompts
    requests: list[Request]  # [n]
    slots: Int64s  # [n], like all that follow
    emitting: Int64s  # [E] those of `slots` whose tokens count
    num_given: Int32s
    max_rows: Int32s
    emits: Bools  # none that is invalid
    widths: Int32s
    num_accepted: Int32s
    token_ids: Int32s  # [n, W + 1]
    invalid: Bools


def commit(plan: StepPlan, result: StepResult, scheduler: Scheduler, reported: Reported | None = None) -> Gains:
    """Apply a collected step. Requests that end here leave the scheduler."""
    ledger = scheduler.ledger
    rows = _rows(plan, result, scheduler.take_flight(plan.step), ledger)
    context = ledger.advance(rows.slots, rows.num_given, rows.num_accepted, rows.max_rows)
    kept = rows.num_accepted + rows.emits
    reasons = _cut(kept, context, rows, ledger)
    ledger.answers.write(rows.slots, rows.token_ids, rows.num_accepted, kept)
    _stamp(rows, ledger)
    accepted = np.minimum(rows.num_accepted, kept) if reasons else rows.num_accepted
    reports = {} if reported is None or plan.logprobs is None else _report(plan, plan.logprobs, reported, rows, kept)
    gains = Gains(
        rows.requests, rows.token_ids, kept, accepted, rows.widths, reasons, reports, rows.num_decode,
        plan.draft_length,
    )  # fmt: skip
    _count(plan.draft_length, rows, gains, ledger)
    for index in sorted(reasons):
        scheduler.finish(rows.requests[index], reasons[index])
    return gains


def _rows(plan: StepPlan, result: StepResult, flight: InFlight, ledger: Ledger) -> _Rows:
    members, num_decode, requests = flight.members, plan.num_decode, flight.members.requests
    columns: tuple[Any, ...] = (
        members.index_np, members.num_given_np, flight.max_rows_np, members.emits_np, result.widths_np,
        result.num_accepted_np, result.token_ids_np, result.invalid_np,
    )  # fmt: skip
    if not ledger.all_there(flight):
        there = ledger.still_there(flight)
        num_decode = int(np.count_nonzero(there[:num_decode]))
        requests = list(compress(requests, there.tolist()))
        columns = tuple(column[there] for column in columns)
    slots, num_given, max_rows, emits, widths, num_accepted, token_ids, invalid = columns
    emitting = slots
    if np.count_nonzero(invalid):
        emits, widths = emits & ~invalid, widths * ~invalid
    if np.count_nonzero(emits) < len(emits):
        emitting, num_accepted = slots[emits], num_accepted * emits
    return _Rows(
        num_decode, requests, slots, emitting, num_given, max_rows, emits, widths, num_accepted, token_ids, invalid
    )


def _cut(kept: Int32s, context: Int32s, rows: _Rows, ledger: Ledger) -> dict[int, FinishReason]:
    """Lower kept [n] to where answers end, and say by index why they do."""
    reasons: dict[int, FinishReason] = {}
    full_context = ledger.full_context[rows.slots]
    for index in (context >= full_context).nonzero()[0].tolist():
        kept[index] -= context[index] - full_context[index]
        reasons[index] = "length"
    for index in ledger.answers.may_stop(rows.token_ids, kept):
        token_ids = rows.token_ids[index, : kept[index]].tolist()
        request = rows.requests[index]
        end = next((place for place, token in enumerate(token_ids) if token in request.stop_ids), None)
        if end is not None:
            kept[index], reasons[index], request.stop_reason = end + 1, "stop", token_ids[end]
    if ledger.answers.num_watched:
        _watch(kept, reasons, rows, ledger)
    for index in rows.invalid.nonzero()[0].tolist():
        request = rows.requests[index]
        reasons[index], request.error = "error", request.error or _NOTHING_TO_CHOOSE
    return reasons


def _watch(kept: Int32s, reasons: dict[int, FinishReason], rows: _Rows, ledger: Ledger) -> None:
    """Stop strings, after all else has cut the step. One that the very token of a stop id completes comes second."""
    for index in ledger.answers.watched(rows.slots, kept):
        request, token_ids = rows.requests[index], rows.token_ids[index, : kept[index]].tolist()
        assert request.watcher is not None
        stop = request.watcher(token_ids)
        if stop is not None and not (stop.num_tokens == len(token_ids) and reasons.get(index) == "stop"):
            kept[index], reasons[index], request.stop_reason = stop.num_tokens, "stop", stop.text


def _report(plan: StepPlan, wanted: Wanted, reported: Reported, rows: _Rows, kept: Int32s) -> dict[int, Int32s]:
    """Log-probabilities of the tokens that count go into their requests' logbooks; those of outputs, by index."""
    index_of = {slot: index for index, slot in enumerate(rows.slots.tolist())}  # none of a tenant that has left
    for part, report in zip(wanted.prompts, reported.prompts, strict=True):
        if part.slot in index_of:
            rows.requests[index_of[part.slot]].prompt_logbook.add(report)
    reports, counts = {}, kept.tolist()
    for slot, report in zip(plan.slots_np[wanted.sequences_np].tolist(), reported.outputs_np, strict=False):
        index = index_of.get(slot)
        if index is not None and counts[index]:
            reports[index] = report[: counts[index]].copy()  # the step's whole matrix may go
            rows.requests[index].logbook.add(reports[index])
    return reports


def _stamp(rows: _Rows, ledger: Ledger) -> None:
    now = time.perf_counter()
    ledger.answers.last_token_s[rows.emitting] = now
    for index in rows.emits[rows.num_decode :].nonzero()[0].tolist():  # first tokens come from prompts only
        request = rows.requests[rows.num_decode + index]
        request.first_token_s = request.first_token_s or now


def _count(drafted: int, rows: _Rows, gains: Gains, ledger: Ledger) -> None:
    """Decode steps, all at once but for requests that end: their last step may have been cut."""
    count = rows.num_decode
    decoded = rows.emits[:count]
    slots, widths, accepted = rows.slots[:count], rows.widths[:count], rows.num_accepted[:count]
    ended = [index for index in gains.finish_reasons if index < count]
    if ended:
        for index in ended:
            if decoded[index]:
                counts = int(widths[index]), int(gains.num_accepted_np[index]), int(gains.kept_np[index])
                gains.requests[index].counters.count_step(drafted, *counts)
        decoded = decoded.copy()
        decoded[ended] = False
        slots, widths, accepted = slots[decoded], widths[decoded], accepted[decoded]
    ledger.count(slots, drafted, widths, accepted)


@cache
def _flags(num_accepted: int, count: int) -> tuple[bool, ...]:
    """Per token: it was an accepted draft. Those come first."""
    return (True,) * num_accepted + (False,) * (count - num_accepted)
