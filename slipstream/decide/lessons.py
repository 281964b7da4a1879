"""What was expected of steps and what became of them, gathered and taught a few steps at a time.

A step brings a sighting (what its drafter said, beside what was known of the same rows before) and its result, in either
order; the two are brought together here, and teach together. `SurvivalModel` takes many small calls to teach, as many
for 16 steps as for one, and follows over about a thousand steps: so lessons wait, many rows teach by a part of them, and
nothing is taught but in `teach`, which `policy` calls off the path from a confidence to its decision. No slots here, no
costs, no decisions. Letters in shapes: D sequences that decode in a step, d the draft length.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.decide.confidence import Confidence
from slipstream.decide.pace import TURN
from slipstream.decide.survival import SurvivalModel
from slipstream.plan import StepPlan, StepResult

Floats: TypeAlias = NDArray[np.float64]

STEPS = 16  # steps that are taught together
ROWS = 16  # of a step, at most: over a thousand steps that is plenty, and lessons of large batches cost no more
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


class Lessons:
    """Outcomes that are still to be taught, and halves of some."""

    def __init__(self) -> None:
        self._outcomes: list[Outcome] = []
        self._unpaired: dict[int, Sighting | StepResult] = {}
        self._num_waited = 0  # results since anything was taught
        self._num_taught = 0  # outcomes

    def see(self, sighting: Sighting) -> None:
        self._pair(sighting.plan.step, sighting)

    def hear(self, result: StepResult) -> None:
        self._pair(result.step, result)

    def _pair(self, step: int, half: Sighting | StepResult) -> None:
        """Bring what was expected of a step and its outcome together, whichever comes first."""
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
        if not self._outcomes:
            return
        self._num_waited += 1
        if self._num_waited >= STEPS or self._num_taught < EARLY:
            self.teach(model)

    def teach(self, model: SurvivalModel) -> None:
        """Everything that waits, now; steps of one draft length together."""
        by_length: dict[int, list[Outcome]] = {}
        for outcome in self._outcomes:
            by_length.setdefault(outcome[0].length, []).append(outcome)
        for outcomes in by_length.values():
            _teach(model, outcomes)
        self._num_taught += len(self._outcomes)
        self._outcomes.clear()
        self._num_waited = 0


def _teach(model: SurvivalModel, outcomes: list[Outcome]) -> None:
    """Prior, lag map and calibration, from steps of one draft length."""
    seen = [(s, s.plan, s.rows) for s, _ in outcomes]
    results = [(result, s.rows) for s, result in outcomes]
    classes = np.concatenate([plan.sampled_np[rows] for _, plan, rows in seen]).astype(np.int64)
    # Where no draft may be verified, the drafter may be past its last position, and what it says is noise.
    teaches = np.concatenate([plan.caps_np[rows] for _, plan, rows in seen]) > 0
    teaches &= np.concatenate([plan.teaches_np[rows] for _, plan, rows in seen])
    starts = np.add.accumulate(np.array([0, *(s.count for s, _ in outcomes[:-1])], dtype=np.int64))
    model.teach_survival(
        np.concatenate([s.survival_np[rows] for s, _, rows in seen]),
        np.concatenate([s.lagged.values_np[rows, : s.length] for s, _, rows in seen]),
        np.concatenate([s.lagged.lengths_np[rows] for s, _, rows in seen]),
        classes,
        teaches,
        starts,
    )
    model.teach_outcomes(
        np.concatenate([s.confidence_np[rows] for s, _, rows in seen]),
        np.concatenate([result.widths_np[rows] for result, rows in results]),
        np.concatenate([result.num_accepted_np[rows] for result, rows in results]),
        classes,
        teaches & ~np.concatenate([result.invalid_np[rows] for result, rows in results]),
        starts,
    )
