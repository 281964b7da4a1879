"""What was seen of steps and what became of them, gathered and taught a few steps at a time.

A step brings a sighting (its report, beside what was known of the same rows before) and its result, in either order;
the two are brought together here. `SurvivalModel` takes many small calls to teach, as many for eight steps as for one,
and follows over about a thousand steps: so lessons wait, and nothing is taught but in `teach`, which `policy` calls off
the path from a confidence to its decision. No slots here, no costs, no decisions. Letters in shapes: D sequences that
decode in a step, d the draft length, n rows of a lesson.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.decide.confidence import Confidence
from slipstream.decide.survival import SurvivalModel, survival_of
from slipstream.plan import DraftReport, StepPlan, StepResult

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

STEPS = 8  # steps that are taught together
ROWS = 512  # with so many rows the calls cost little beside the arithmetic, and waiting would only make one step long
EARLY = 64  # steps at the start that are taught one by one: until then each of them changes much
MAX_UNPAIRED = 8  # steps whose report or result waits for the other half


@dataclass(slots=True, eq=False)
class Sighting:
    """A report with what was known of the same rows before it."""

    plan: StepPlan
    report: DraftReport
    lagged: Confidence
    confidence_np: Floats | None = None  # [D, d] by the calibration of when it was taught

    @property
    def length(self) -> int:
        return int(self.report.signal_np.shape[1])


Outcome: TypeAlias = tuple[Sighting, StepResult]


class Lessons:
    """Sightings and outcomes that are still to be taught."""

    def __init__(self) -> None:
        self._sightings: deque[Sighting] = deque(maxlen=2 * STEPS)  # of steps without results the oldest go
        self._outcomes: list[Outcome] = []
        self._unpaired: dict[int, Sighting | StepResult] = {}
        self._num_waited = 0  # results since anything was taught
        self._num_rows = 0
        self._num_taught = 0  # sightings

    def see(self, sighting: Sighting) -> None:
        self._sightings.append(sighting)
        self._num_rows += sighting.plan.num_decode
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
        if self._num_waited >= STEPS or self._num_rows >= ROWS or self._num_taught < EARLY:
            self.teach(model)

    def teach(self, model: SurvivalModel) -> None:
        """Everything that waits, now."""
        for same in _runs(self._sightings):
            _teach_survivals(model, same)
        self._num_taught += len(self._sightings)
        self._sightings.clear()
        for outcomes in _runs_of_outcomes(self._outcomes):
            _teach_outcomes(model, outcomes)
        self._outcomes.clear()
        self._num_waited = self._num_rows = 0


def _runs(sightings: "deque[Sighting]") -> list[list[Sighting]]:
    """Neighbours of one draft length."""
    return [list(run) for _, run in groupby(sightings, key=lambda sighting: sighting.length)]


def _runs_of_outcomes(outcomes: list[Outcome]) -> list[list[Outcome]]:
    """Neighbours of one draft length. A sighting that was dropped teaches nothing."""
    taught = (outcome for outcome in outcomes if outcome[0].confidence_np is not None)
    return [list(run) for _, run in groupby(taught, key=lambda outcome: outcome[0].length)]


def _teach_survivals(model: SurvivalModel, seen: list[Sighting]) -> None:
    """Prior and lag map."""
    length, classes, starts = seen[0].length, _classes(seen), _starts(seen)
    signals = [s.report.signal_np for s in seen] + [s.lagged.signal_np[:, :length] for s in seen]
    confidence = model.confidence(np.concatenate(signals), np.concatenate([classes, classes]))
    for sighting, first in zip(seen, starts.tolist(), strict=True):
        sighting.confidence_np = confidence[first : first + sighting.plan.num_decode]
    survival, count = survival_of(confidence), len(classes)
    lengths = np.concatenate([s.lagged.lengths_np for s in seen])
    model.teach_survival(survival[:count], survival[count:], lengths, classes, _teaches(seen), starts)


def _teach_outcomes(model: SurvivalModel, outcomes: list[Outcome]) -> None:
    """Calibration, by the confidences that the sightings were taught with."""
    seen, results = [s for s, _ in outcomes], [(result, s.plan.num_decode) for s, result in outcomes]
    model.teach_outcomes(
        np.concatenate([s.confidence_np for s in seen if s.confidence_np is not None]),
        np.concatenate([result.widths_np[:count] for result, count in results]),
        np.concatenate([result.num_accepted_np[:count] for result, count in results]),
        _classes(seen),
        _teaches(seen) & ~np.concatenate([result.invalid_np[:count] for result, count in results]),
        _starts(seen),
    )


def _classes(seen: Sequence[Sighting]) -> Ints:
    return np.concatenate([s.plan.sampled_np[: s.plan.num_decode] for s in seen]).astype(np.int64)


def _teaches(seen: Sequence[Sighting]) -> Bools:
    """Where no draft may be verified, the drafter may be past its last position, and what it says is noise."""
    caps = np.concatenate([s.plan.caps_np[: s.plan.num_decode] for s in seen])
    teaches: Bools = np.concatenate([s.plan.teaches_np[: s.plan.num_decode] for s in seen]) & (caps > 0)
    return teaches


def _starts(seen: Sequence[Sighting]) -> Ints:
    """[steps] the first row of each."""
    counts = [s.plan.num_decode for s in seen[:-1]]
    return np.add.accumulate(np.array([0, *counts], dtype=np.int64))
