"""The store of lagged confidence: one row per slot, and who wrote it.

A row holds what was expected of the slot's last draft, a value per position, with the slot's generation, the request's
uid and its count of decode steps. It is *known* to a plan only if the same request wrote it, in the same tenancy of the slot, in its latest
decode step: a late copy of a former owner, a step without a draft or a stay outside the pool never passes for it, while
a step in which the request was skipped, or verified nothing, changes nothing. What the values mean is not known here.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.plan import StepPlan

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

_NUM_ROWS = 4  # of a slot's owner: decode steps are those before the draft, the length is the draft's
_GENERATION, _UID, _DECODE_STEPS, _LENGTH = range(_NUM_ROWS)


@dataclass(frozen=True, slots=True, eq=False)
class Confidence:
    """Rows of the store as one plan may see them. D sequences that decode, S positions."""

    values_np: Floats  # [D, S] undefined beyond the length and in unknown rows
    lengths_np: Ints  # [D] drafts that the row covers, the d of its step
    known_np: Bools  # [D]
    stale_np: Bools  # [D] the request's own, but older: no draft was made in its latest decode steps
    same_length: int | None  # drafts that every row covers, if all are known and alike; None if not


class ConfidenceStore:
    """Raw confidence by slot. Grows with the largest slot it meets.

    In most steps the same requests decode as in the last one. The newest report is therefore kept aside as it came, and
    goes to its slots when another set of rows is written or read.
    """

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts  # S
        self._values_np = np.zeros((0, num_drafts))
        self._owner_np = np.zeros((_NUM_ROWS, 0), dtype=np.int64)  # by slot
        self._newest: _Newest | None = None

    def put(self, plan: StepPlan, values_np: Floats) -> None:
        """Keep values [D, d] of the draft of `plan`, as they are. A slot that a newer tenant has written to is left alone."""
        num_decode, length = values_np.shape
        assert num_decode == plan.num_decode, (num_decode, plan.num_decode)
        assert length <= self.num_drafts, (length, self.num_drafts)
        if length == 0 or num_decode == 0:
            return
        newest, new = self._newest, _Newest(plan, values_np)
        if newest is not None and not _same_rows(newest.plan, plan):
            self._write(newest)
            newest = None
        if newest is not None or self._is_current(new):
            self._newest = new
        else:
            self._newest = None
            self._write(new)

    def lookup(self, plan: StepPlan) -> Confidence:
        """What was known before the draft of `plan`: confidence that is one decode step old."""
        return self._read(plan, steps_ago=1)

    def own(self, plan: StepPlan) -> Confidence:
        """What the draft of `plan` itself said."""
        return self._read(plan, steps_ago=0)

    def _read(self, plan: StepPlan, steps_ago: int) -> Confidence:
        newest = self._newest
        if newest is not None:
            if _same_rows(newest.plan, plan):
                return newest.read(plan, steps_ago, self.num_drafts)
            self._write(newest)
            self._newest = None
        num_decode = plan.num_decode
        slots = self._slots(plan)
        owner = self._owner_np.take(slots, axis=1)
        own = owner[_GENERATION] == plan.generations_np[:num_decode]
        own &= owner[_UID] == plan.uids_np[:num_decode]
        age = plan.decode_steps_np[:num_decode] - owner[_DECODE_STEPS]
        known, stale = own & (age == steps_ago), own & (age > steps_ago)
        lengths = owner[_LENGTH] * known
        return Confidence(self._values_np.take(slots, axis=0), lengths, known, stale, same_length=None)

    def _is_current(self, new: "_Newest") -> bool:
        """Whether no slot of it has a newer tenant."""
        slots = self._slots(new.plan)
        written = self._owner_np[_GENERATION].take(slots)
        return not np.count_nonzero(written > new.plan.generations_np[: new.plan.num_decode])

    def _write(self, new: "_Newest") -> None:
        plan, values, num_decode = new.plan, new.values_np, new.plan.num_decode
        slots, length = self._slots(plan), values.shape[1]
        owner = np.empty((_NUM_ROWS, num_decode), dtype=np.int64)
        owner[_GENERATION] = plan.generations_np[:num_decode]
        owner[_UID] = plan.uids_np[:num_decode]
        owner[_DECODE_STEPS] = plan.decode_steps_np[:num_decode]
        owner[_LENGTH] = length
        current = owner[_GENERATION] >= self._owner_np[_GENERATION].take(slots)
        if np.count_nonzero(current) < num_decode:
            slots, values, owner = slots[current], values[current], owner[:, current]
        self._values_np[slots, :length] = values
        self._owner_np[:, slots] = owner

    def _slots(self, plan: StepPlan) -> NDArray[np.int32]:
        """[D] slots of the sequences that decode, all of them within the store."""
        slots = plan.slots_np[: plan.num_decode]
        if plan.num_decode:
            self._grow(int(np.maximum.reduce(slots)) + 1)
        return slots

    def _grow(self, num_slots: int) -> None:
        missing = num_slots - len(self._values_np)
        if missing > 0:
            missing = max(missing, len(self._values_np))
            nobody = np.full((_NUM_ROWS, missing), -1, dtype=np.int64)
            self._owner_np = np.concatenate([self._owner_np, nobody], axis=1)
            self._values_np = np.concatenate([self._values_np, np.zeros((missing, self.num_drafts))])


@dataclass(frozen=True, slots=True, eq=False)
class _Newest:
    """A report whose rows have no newer tenant."""

    plan: StepPlan
    values_np: Floats  # [D, d]

    def read(self, plan: StepPlan, steps_ago: int, num_drafts: int) -> Confidence:
        """What is known to a plan of the same rows."""
        num_decode, length = self.values_np.shape
        age = plan.decode_steps_np[:num_decode] - self.plan.decode_steps_np[:num_decode]
        known, values = age == steps_ago, self.values_np
        if length < num_drafts:
            values = np.zeros((num_decode, num_drafts))
            values[:, :length] = self.values_np
        same_length = length if np.count_nonzero(known) == num_decode else None
        return Confidence(values, known * length, known, age > steps_ago, same_length)


def _same_rows(a: StepPlan, b: StepPlan) -> bool:
    """Whether the same requests decode, in the same tenancy of the same slots. Plans share arrays while that holds."""
    count = a.num_decode
    if count != b.num_decode:
        return False
    if a.slots_np is b.slots_np and a.generations_np is b.generations_np and a.uids_np is b.uids_np:
        return True
    return (
        np.array_equal(a.slots_np[:count], b.slots_np[:count])
        and np.array_equal(a.generations_np[:count], b.generations_np[:count])
        and np.array_equal(a.uids_np[:count], b.uids_np[:count])
    )
