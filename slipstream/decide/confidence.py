"""The store of lagged confidence: one row per slot, and who wrote it.

A row holds the raw signal of the slot's last draft with the slot's generation, the request's uid and its count of
decode steps. It is *known* to a plan only if the same request wrote it, in the same tenancy of the slot, in its latest
decode step: a late copy of a former owner, a step without a draft or a stay outside the pool never passes for it, while
a step in which the request was skipped, or verified nothing, changes nothing. What the values mean is not known here.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.plan import DraftReport, StepPlan

Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Confidence:
    """Rows of the store as one plan may see them. D sequences that decode, S positions."""

    signal_np: Floats  # [D, S] raw; undefined beyond the length and in unknown rows
    lengths_np: Ints  # [D] drafts that the row covers, the d of its step
    known_np: Bools  # [D]
    stale_np: Bools  # [D] the request's own, but older: no draft was made in its latest decode steps


class ConfidenceStore:
    """Raw confidence by slot. Grows with the largest slot it meets."""

    def __init__(self, num_drafts: int, num_slots: int = 0) -> None:
        self.num_drafts = num_drafts  # S
        self._signal_np = np.zeros((0, num_drafts), dtype=np.float32)
        self._owner_np = np.zeros(
            (5, 0), dtype=np.int64
        )  # generation, uid, decode steps at the draft and after it, length
        self._grow(num_slots)

    def put(self, plan: StepPlan, report: DraftReport) -> None:
        """Keep what the draft of `plan` said. A slot that a newer tenant has written to is left alone."""
        num_decode, length = report.signal_np.shape
        assert num_decode == plan.num_decode, (num_decode, plan.num_decode)
        assert length <= self.num_drafts, (length, self.num_drafts)
        if length == 0 or num_decode == 0:
            return
        slots, signal = self._slots(plan), report.signal_np
        owner = np.empty((5, num_decode), dtype=np.int64)
        owner[0] = plan.generations_np[:num_decode]
        owner[1] = plan.uids_np[:num_decode]
        owner[2] = plan.decode_steps_np[:num_decode]
        owner[3] = owner[2] + 1
        owner[4] = length
        current = owner[0] >= self._owner_np[0].take(slots)
        if np.count_nonzero(current) < num_decode:
            slots, signal, owner = slots[current], signal[current], owner[:, current]
        self._signal_np[slots, :length] = signal
        self._owner_np[:, slots] = owner

    def lookup(self, plan: StepPlan) -> Confidence:
        """What was known before the draft of `plan`: confidence that is one decode step old."""
        return self._read(plan, after_draft=True)

    def own(self, plan: StepPlan) -> Confidence:
        """What the draft of `plan` itself said."""
        return self._read(plan, after_draft=False)

    def _read(self, plan: StepPlan, after_draft: bool) -> Confidence:
        num_decode = plan.num_decode
        slots = self._slots(plan)
        generation, uid, *steps, length = self._owner_np.take(slots, axis=1)
        own = (generation == plan.generations_np[:num_decode]) & (uid == plan.uids_np[:num_decode])
        now, then = plan.decode_steps_np[:num_decode], steps[after_draft]
        known = own & (then == now)
        return Confidence(
            signal_np=self._signal_np.take(slots, axis=0),
            lengths_np=length * known,
            known_np=known,
            stale_np=own & (then < now),
        )

    def _slots(self, plan: StepPlan) -> NDArray[np.int32]:
        """[D] slots of the sequences that decode, all of them within the store."""
        slots = plan.slots_np[: plan.num_decode]
        if plan.num_decode:
            self._grow(int(np.maximum.reduce(slots)) + 1)
        return slots

    def _grow(self, num_slots: int) -> None:
        missing = num_slots - len(self._signal_np)
        if missing > 0:
            missing = max(missing, len(self._signal_np))
            nobody = np.full((5, missing), -1, dtype=np.int64)
            self._owner_np = np.concatenate([self._owner_np, nobody], axis=1)
            self._signal_np = np.concatenate([self._signal_np, np.zeros((missing, self.num_drafts), dtype=np.float32)])
