"""Numbers of the running requests, one column per slot: the scheduler plans from them, `commit` moves them on.

Arithmetic over all requests of a step is done on whole columns, because a step of hundreds of requests leaves no time
for Python per request. The ledger knows neither pages nor who comes next; a request's tokens are kept by the request.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.metrics import SpecCounters
from slipstream.plan import Bools, Int32s, Int64s
from slipstream.request import Request

UInt8s: TypeAlias = NDArray[np.uint8]

# Bits of `Ledger.sampling`; none for a greedy request, whatever else it asks for.
SAMPLED, TOP_K, TOP_P = 1, 2, 4


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A step that was planned and not yet committed."""

    step: int
    slots_np: Int64s  # [B]
    generations_np: Int32s  # [B]
    max_rows_np: Int32s  # [B] given rows + most drafts: how far the context may move
    emits_np: Bools  # [B]


class Ledger:
    """Columns are valid for slots that have a tenant; `slots` arguments name no slot twice."""

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        self.tenants: dict[int, Request] = {}  # by slot
        self.generations = np.zeros(num_slots, np.int32)  # tenants that the slot has had before this one
        self.uids = np.zeros(num_slots, np.int64)
        self.context = np.zeros(num_slots, np.int32)  # committed context length
        self.context_upper_bound = np.zeros(num_slots, np.int32)  # with what lies in flight
        self.num_outputs = np.zeros(num_slots, np.int32)
        self.num_outputs_lower_bound = np.zeros(num_slots, np.int32)  # each emitting step in flight brings one or more
        self.max_outputs = np.zeros(num_slots, np.int32)  # by max_tokens and the model's context
        self.unplanned = np.zeros(
            num_slots, np.int32
        )  # known tokens that are in no plan yet; 0: it decodes, or is free
        self.decode_steps = np.zeros(num_slots, np.int32)  # planned since admission
        self.steps_in_flight = np.zeros(num_slots, np.int32)
        self.sampling = np.zeros(num_slots, np.uint8)  # SAMPLED | TOP_K | TOP_P
        self.teaches = np.zeros(num_slots, np.bool_)
        # Of its decode steps since admission: drafted, emitted; how many had width, reached and accepted = column.
        self._sums = np.zeros((2, num_slots), np.int64)
        self._histograms = np.zeros((3, num_slots, max_drafts + 1), np.int64)

    def admit(self, slot: int, request: Request, max_model_len: int) -> None:
        """A new tenant, of whose known tokens none is computed."""
        params, num_outputs = request.params, len(request.output_ids)
        self.tenants[slot] = request
        self.uids[slot] = request.uid
        self.context[slot] = self.context_upper_bound[slot] = 0
        self.num_outputs[slot] = self.num_outputs_lower_bound[slot] = num_outputs
        self.max_outputs[slot] = min(params.max_tokens, max_model_len - len(request.prompt_ids))
        self.unplanned[slot] = request.num_known
        self.decode_steps[slot] = self.steps_in_flight[slot] = 0
        cuts = SAMPLED | TOP_K * (params.top_k > 0) | TOP_P * (params.top_p < 1)
        self.sampling[slot] = cuts if params.temperature > 0 else 0
        self.teaches[slot] = not request.constrained
        self._sums[:, slot] = 0
        self._histograms[:, slot] = 0

    def release(self, slot: int) -> None:
        """The tenant leaves with its counts; steps of it in flight are known by its generation."""
        self.count_into(self.tenants.pop(slot).counters, slot)
        self.generations[slot] += 1
        self.unplanned[slot] = 0

    def book(self, flight: InFlight) -> None:
        slots = flight.slots_np
        self.context_upper_bound[slots] += flight.max_rows_np
        self.num_outputs_lower_bound[slots] += flight.emits_np
        self.steps_in_flight[slots] += 1

    def advance(self, slots: Int64s, flight: InFlight, rows: Int64s, moved: Int32s, kept: Int32s) -> None:
        """`rows` [n] of a flight, those of `slots`, came back: contexts moved by so much, so many tokens were kept."""
        self.context[slots] += moved
        self.context_upper_bound[slots] += moved - flight.max_rows_np[rows]
        self.num_outputs[slots] += kept
        self.num_outputs_lower_bound[slots] += kept - flight.emits_np[rows]
        self.steps_in_flight[slots] -= 1

    def count(self, slots: Int64s, drafted: int, widths: Int32s, accepted: Int32s, emitted: Int32s) -> None:
        """One decode step of each of `slots` [n], as `SpecCounters.count_step` counts it."""
        reached = np.minimum(emitted, widths)
        wrong = (accepted < 0) | (accepted > widths) | (widths > drafted) | (emitted < 0) | (emitted > widths + 1)
        assert not np.count_nonzero(wrong), (drafted, widths, accepted, emitted)
        self._sums[0, slots] += drafted
        self._sums[1, slots] += emitted
        for histogram, column in zip(self._histograms, (widths, reached, accepted), strict=True):
            histogram[slots, column] += 1

    def count_into(self, counters: SpecCounters, slot: int) -> None:
        """Add what the tenant's decode steps since its admission have counted."""
        drafted, emitted = self._sums[:, slot].tolist()
        counters.count_steps(drafted, emitted, *self._histograms[:, slot].tolist())
