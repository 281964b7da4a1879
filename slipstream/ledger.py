"""Numbers of the running requests, one column per slot: the scheduler plans from them, `commit` moves them on.

Arithmetic over all requests of a step is done on whole columns, because a step of hundreds of requests leaves no time
for Python per request. The ledger knows neither pages nor who comes next. Tokens stand beside the numbers, in `answers`.
"""

from dataclasses import dataclass

import numpy as np

from slipstream.answers import Answers
from slipstream.logprobs import PromptPart, Wanted
from slipstream.metrics import SpecCounters
from slipstream.plan import Bools, Int32s, Int64s
from slipstream.request import Request

# Bits of `Ledger.wishes`. A greedy request has none of the first four, whatever it asks for.
SAMPLED, TOP_K, TOP_P, MIN_P, PENALTY, EDIT, CONSTRAINED = 1, 2, 4, 8, 16, 32, 64


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """Who takes part in a step, with all that stays the same while the same requests decode: made once for many steps."""

    requests: list[Request]
    index_np: Int64s  # [B] their slots, to index columns with
    slots_np: Int32s  # [B] the same, as plans have them
    generations_np: Int32s  # [B]
    uids_np: Int64s  # [B]
    sampled_np: Bools  # [B]
    teaches_np: Bools  # [B]
    num_given_np: Int32s  # [B]
    emits_np: Bools  # [B]
    wishes: int  # bits of `Ledger.wishes` of those that emit
    num_departures: int  # that the ledger had seen
    logprobs: Wanted | None  # None: nobody asks for any


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A step that was planned and not yet committed."""

    step: int
    members: Members
    max_rows_np: Int32s  # [B] given rows + most drafts: how far the context may move


class Ledger:
    """Columns are valid for slots that have a tenant; `slots` arguments name no slot twice.

    The newest token of an answer is not yet in the context: a decoding request knows context + 1 tokens.
    """

    def __init__(self, num_slots: int, max_model_len: int, max_drafts: int) -> None:
        self.tenants = np.full(num_slots, None, np.object_)  # Request, or None where the slot is free
        self.generations = np.zeros(num_slots, np.int32)  # tenants that the slot has had before this one
        self.num_departures = 0  # tenants that have left any slot
        self.uids = np.zeros(num_slots, np.int64)
        self.context = np.zeros(num_slots, np.int32)  # committed context length
        self.context_lower_bound = np.zeros(num_slots, np.int32)  # with what lies in flight, no draft of it accepted
        self.context_upper_bound = np.zeros(num_slots, np.int32)  # with what lies in flight, as many as were planned
        self.full_context = np.zeros(num_slots, np.int32)  # where the answer ends, by max_tokens or the model's context
        self.unplanned = np.zeros(num_slots, np.int32)  # known tokens in no plan yet; 0: it decodes, or is free
        self.decode_steps = np.zeros(num_slots, np.int32)  # planned since admission
        self.wishes = np.zeros(num_slots, np.uint8)  # SAMPLED | TOP_K | ...
        self.teaches = np.zeros(num_slots, np.bool_)
        self.num_reporting = 0  # tenants that ask for log-probabilities, of whatever
        self.num_logprobs = np.full(num_slots, -1, np.int32)  # top tokens per output token, -1: none are wanted
        self.num_prompt_logprobs = np.full(num_slots, -1, np.int32)
        self.reported_prompt = np.zeros(num_slots, np.int32)  # rows of the prompt whose report need not be made (again)
        self.reported_prompt_end = np.zeros(num_slots, np.int32)  # rows of the prompt that have a next prompt token
        self.answers = Answers(num_slots, max_model_len, max_drafts)
        self._counts = _Counts(num_slots, max_drafts)

    def admit(self, slot: int, request: Request, max_model_len: int, num_cached: int) -> None:
        """A new tenant, the first `num_cached` of whose known tokens are computed."""
        params = request.params
        self.tenants[slot] = request
        self.uids[slot] = request.uid
        self.context[slot] = self.context_lower_bound[slot] = self.context_upper_bound[slot] = num_cached
        self.full_context[slot] = min(len(request.prompt_ids) + params.max_tokens, max_model_len) - 1
        self.unplanned[slot] = request.num_known - num_cached
        self.decode_steps[slot] = 0
        self.wishes[slot] = _wishes_of(request)
        self.teaches[slot] = not request.constrained
        self._admit_reports(slot, request)
        self.answers.admit(slot, request)

    def release(self, slot: int) -> None:
        """The tenant leaves with its tokens and counts; steps of it in flight are known by its generation."""
        request, self.tenants[slot] = self.tenants[slot], None
        self.answers.release(slot, request)
        self._counts.move_into(request.counters, slot)
        self.num_reporting -= request.params.wants_logprobs
        self.generations[slot] += 1
        self.num_departures += 1
        self.unplanned[slot] = 0

    def members(self, slots: Int64s, num_given: Int32s, emits: Bools) -> Members:
        """The tenants of `slots` [n], who take part with so many given rows each; emits: and gain tokens."""
        wishes = self.wishes[slots]
        return Members(
            requests=self.tenants[slots].tolist(),
            index_np=slots,
            slots_np=slots.astype(np.int32),
            generations_np=self.generations[slots],
            uids_np=self.uids[slots],
            sampled_np=(wishes & SAMPLED) > 0,
            teaches_np=self.teaches[slots],
            num_given_np=num_given,
            emits_np=emits,
            wishes=int(np.bitwise_or.reduce(wishes * emits)),
            num_departures=self.num_departures,
            logprobs=self._wanted(slots, num_given, emits) if self.num_reporting else None,
        )

    def _admit_reports(self, slot: int, request: Request) -> None:
        params = request.params
        self.num_reporting += params.wants_logprobs
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs[slot] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.reported_prompt[slot] = request.prompt_logbook.num_tokens
        self.reported_prompt_end[slot] = len(request.prompt_ids) - 1

    def _wanted(self, slots: Int64s, num_given: Int32s, emits: Bools) -> Wanted | None:
        """The bound is the context itself where prompts are computed: no draft of them is in flight."""
        tops, prompt_tops = self.num_logprobs[slots], self.num_prompt_logprobs[slots]
        sequences = ((tops >= 0) & emits).nonzero()[0]
        context, row = self.context_upper_bound[slots], np.cumsum(num_given) - num_given
        first = np.maximum(context, self.reported_prompt[slots])
        count = np.minimum(context + num_given, self.reported_prompt_end[slots]) - first
        parts = ((prompt_tops >= 0) & (count > 0)).nonzero()[0]
        if not len(sequences) and not len(parts):
            return None
        columns = (slots[parts], (row + first - context)[parts], first[parts], count[parts])
        return Wanted(
            sequences_np=sequences,
            num_top=int(tops[sequences].max(initial=0)),
            prompts=tuple(map(PromptPart, *(column.tolist() for column in columns))),
            num_prompt_top=int(prompt_tops[parts].max(initial=0)),
        )

    def still_there(self, flight: InFlight) -> Bools:
        """[B] which of a flight's tenants have neither ended nor been preempted since."""
        there: Bools = self.generations[flight.members.index_np] == flight.members.generations_np
        return there

    def all_there(self, flight: InFlight) -> bool:
        return flight.members.num_departures == self.num_departures or bool(self.still_there(flight).all())

    def book(self, flight: InFlight) -> None:
        slots = flight.members.index_np
        self.context_lower_bound[slots] += flight.members.num_given_np
        self.context_upper_bound[slots] += flight.max_rows_np

    def advance(self, slots: Int64s, num_given: Int32s, num_accepted: Int32s, max_rows: Int32s) -> Int32s:
        """Rows [n] of a flight, those of `slots`, have come back. Returns their contexts."""
        moved = num_given + num_accepted
        context: Int32s = self.context[slots] + moved
        self.context[slots] = context
        self.context_lower_bound[slots] += num_accepted
        self.context_upper_bound[slots] += moved - max_rows
        return context

    def count(self, slots: Int64s, drafted: int, widths: Int32s, accepted: Int32s) -> None:
        """A decode step of each of `slots` [n] in which every token was kept; see `SpecCounters.count_step`."""
        self._counts.add(slots, drafted, widths, accepted)

    def count_into(self, counters: SpecCounters, slot: int) -> None:
        """Add what `count` has counted since the tenant was admitted."""
        self._counts.add_to(counters, slot)


def _wishes_of(request: Request) -> int:
    params, bits = request.params, 0
    if params.temperature > 0:
        bits = SAMPLED | TOP_K * (params.top_k > 0) | TOP_P * (params.top_p < 1) | MIN_P * (params.min_p > 0)
    penalties = params.repetition_penalty != 1, params.frequency_penalty != 0, params.presence_penalty != 0
    bans = params.min_tokens > 0 and len(request.stop_ids) > 0
    bits |= CONSTRAINED * (request.constraint is not None)
    return bits | PENALTY * any(penalties) | EDIT * (bans or len(params.logit_bias) > 0)


class _Counts:
    """Decode steps by slot and by how they went. Steps are added up now and then: one by one they cost too much."""

    STEPS_AT_ONCE = 64
    ROWS_AT_ONCE = 4096  # more, and the step in which they are added up is a slow one

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        self._base = max_drafts + 1
        self._drafted = np.zeros(num_slots, np.int64)
        # How many steps: [slot, width, accepted].
        self._outcomes = np.zeros((num_slots, self._base, self._base), np.int64)
        self._later: list[tuple[Int64s, int, Int32s, Int32s]] = []  # slots, drafted, widths, accepted
        self._num_rows = 0  # in those

    def add(self, slots: Int64s, drafted: int, widths: Int32s, accepted: Int32s) -> None:
        self._later.append((slots, drafted, widths, accepted))
        self._num_rows += len(slots)
        if len(self._later) == self.STEPS_AT_ONCE or self._num_rows > self.ROWS_AT_ONCE:
            self._add_up()

    def add_to(self, counters: SpecCounters, slot: int) -> None:
        self._add_up()
        outcomes = self._outcomes[slot]
        widths, accepted = np.add.reduce(outcomes, axis=1), np.add.reduce(outcomes, axis=0)
        whole = outcomes.diagonal()
        # With the token after the accepted ones one draft more is reached, unless there was none left.
        reached = whole.copy()
        reached[1:] += (accepted - whole)[:-1]
        counters.count_steps(int(self._drafted[slot]), widths.tolist(), reached.tolist(), accepted.tolist())

    def move_into(self, counters: SpecCounters, slot: int) -> None:
        self.add_to(counters, slot)
        self._drafted[slot] = 0
        self._outcomes[slot] = 0

    def _add_up(self) -> None:
        if not self._later:
            return
        drafted = np.repeat([step[1] for step in self._later], [len(step[0]) for step in self._later])
        slots, widths, accepted = (np.concatenate([step[i] for step in self._later]) for i in (0, 2, 3))
        self._later.clear()
        self._num_rows = 0
        assert ((accepted >= 0) & (accepted <= widths) & (widths <= drafted)).all(), (drafted, widths, accepted)
        np.add.at(self._drafted, slots, drafted)
        np.add.at(self._outcomes.reshape(-1), slots * self._base**2 + (widths * self._base + accepted), 1)
