"""What was expected of steps and what became of them, gathered and taught a few steps at a time.

A step brings a sighting (what its drafter said, beside what was known of the same rows before) and its result, in either
order; the two are brought together here. `SurvivalModel` takes many small calls to teach, as many for sixteen steps as
for one, and follows over about a thousand steps: so lessons wait, many rows teach by a part of them, and nothing is
taught but in `teach`, which `policy` calls off the path from a confidence to its decision. No slots here, no costs, no
decisions. Letters in shapes: D sequences that decode in a step, d the draft length, n rows of a lesson.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipstream.decide.confidence import Confidence
from slipstream.decide.pace import TURN
from slipstream.decide.survival import SurvivalModel
from slipstream.plan import StepPlan, StepResult

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

STEPS = 16  # steps that are taught together
ROWS = 32  # of a step, at most: over a thousand steps that is plenty, and lessons of large batches cost no more
EARLY = 64  # steps at the start that are taught one by one: until then each of them changes much
MAX_UNPAIRED = 8  # steps whose report or result waits for the other half


@dataclass(slots=True, eq=False)
class Sighting:
    """What was expected of a step's drafts, with what was known of the same rows before."""

    plan: StepPlan
    confidence_np: Floats  # [D, d]
    survival_np: Floats  # [D, d]
    lagged: Confidence  # survivals
    rows: slice = field(init=False)  # those that teach
    count: int = field(init=False)  # of them

    def __post_init__(self) -> None:
        """Of many rows every k-th teaches, from the first on or a later one, by a rule that no rhythm of steps meets."""
        every = max(1, -(-self.plan.num_decode // ROWS))
        first = int(self.plan.step * TURN % 1.0 * every)
        self.rows = slice(first, self.plan.num_decode, every)
        self.count = len(range(first, self.plan.num_decode, every))

    @property
    def length(self) -> int:
        return int(self.confidence_np.shape[1])


Outcome: TypeAlias = tuple[Sighting, StepResult]
Item = TypeVar("Item")


class Lessons:
    """Sightings and outcomes that are still to be taught."""

    def __init__(self) -> None:
        self._sightings: deque[Sighting] = deque(maxlen=2 * STEPS)  # of steps without results the oldest go
        self._outcomes: list[Outcome] = []
        self._unpaired: dict[int, Sighting | StepResult] = {}
        self._num_waited = 0  # results since anything was taught
        self._num_taught = 0  # sightings

    def see(self, sighting: Sighting) -> None:
        self._sightings.append(sighting)
        self._pair(sighting.plan.step, sighting)

    def hear(self, result: StepResult) -> None:
        self._pair(result.step, result)

    def _pair(self, step: int, half: Sighting | StepResult) -> None:
        """Bring a step's confidence and its outcome together, whichever comes first."""
        other = self._unpaired.pop(step, None)
        if isinstance(other, Sighting) and isinstance(half, StepResult):
            self._outcomes.append((other, half))
        elif isinstance(other, StepResult) and isinstance(half, Sighting):
            self._outcomes.append((half, other))
        else:
            self._unpaired[step] = half
            while len(self._unpaired) > MAX_UNPAIRED:
                self._unpaired.pop(next(iter(self._unpaired)))

    def teach_when_due(self, model: SurvivalModel) -> None:
        """Called once per result."""
        if not self._sightings and not self._outcomes:
            return
        self._num_waited += 1
        if self._num_waited >= STEPS or self._num_taught < EARLY:
            self.teach(model)

    def teach(self, model: SurvivalModel) -> None:
        """Everything that waits, now."""
        for seen in _by_length(self._sightings, lambda sighting: sighting):
            _teach_survivals(model, seen)
        self._num_taught += len(self._sightings)
        self._sightings.clear()
        for outcomes in _by_length(self._outcomes, lambda outcome: outcome[0]):
            _teach_outcomes(model, outcomes)
        self._outcomes.clear()
        self._num_waited = 0


def _by_length(items: Iterable[Item], sighting: Callable[[Item], Sighting]) -> list[list[Item]]:
    """Those of one draft length together."""
    groups: dict[int, list[Item]] = {}
    for item in items:
        groups.setdefault(sighting(item).length, []).append(item)
    return list(groups.values())


def _teach_survivals(model: SurvivalModel, seen: list[Sighting]) -> None:
    """Prior and lag map."""
    model.teach_survival(
        np.concatenate([s.survival_np[s.rows] for s in seen]),
        np.concatenate([s.lagged.values_np[s.rows, : s.length] for s in seen]),
        np.concatenate([s.lagged.lengths_np[s.rows] for s in seen]),
        _classes(seen),
        _teaches(seen),
        _starts(seen),
    )


def _teach_outcomes(model: SurvivalModel, outcomes: list[Outcome]) -> None:
    """Calibration."""
    seen = [s for s, _ in outcomes]
    model.teach_outcomes(
        np.concatenate([s.confidence_np[s.rows] for s in seen]),
        np.concatenate([result.widths_np[s.rows] for s, result in outcomes]),
        np.concatenate([result.num_accepted_np[s.rows] for s, result in outcomes]),
        _classes(seen),
        _teaches(seen) & ~np.concatenate([result.invalid_np[s.rows] for s, result in outcomes]),
        _starts(seen),
    )


def _classes(seen: Sequence[Sighting]) -> Ints:
    return np.concatenate([s.plan.sampled_np[s.rows] for s in seen]).astype(np.int64)


def _teaches(seen: Sequence[Sighting]) -> Bools:
    """Where no draft may be verified, the drafter may be past its last position, and what it says is noise."""
    caps = np.concatenate([s.plan.caps_np[s.rows] for s in seen])
    teaches: Bools = np.concatenate([s.plan.teaches_np[s.rows] for s in seen]) & (caps > 0)
    return teaches


def _starts(seen: Sequence[Sighting]) -> Ints:
    """[steps] the first row of each."""
    counts = [s.count for s in seen[:-1]]
    return np.add.accumulate(np.array([0, *counts], dtype=np.int64))
