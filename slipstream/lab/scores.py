"""What `evaluate` says of drafters: the figures of a row, the tables. Torch-free.

A cell is one drafter on one set of prompts at one temperature: the answers and drafting steps of a trace, and timed waves
in mode static. Speed comes from the waves, everything else from the trace. A pooled cell is several sets taken together.
Where figures come from is `evaluate`'s business; what they mean is decided here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from slipstream.lab.quality import quality
from slipstream.lab.tables import new_table, share, shown
from slipstream.lab.waves import Answered, Wave, same_answers, speed, straight, total

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

POOLED = "all"  # prompts of all sets together


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """Drafting steps of a cell, with the survivals that were foretold. n steps, S positions."""

    signal: str
    widths_np: Ints  # [n]
    accepted_np: Ints  # [n]
    survived_np: Bools  # [n, S] drafts 1..j were all accepted
    known_np: Bools  # [n, S] where that counts: drafts that were verified and belong to the answer
    # [n, S] by name: raw (the signal alone), file (with the calibration file), fresh (as served: file, corrected by
    # outcomes), lagged (as served, from the step before).
    survival_np: Mapping[str, Floats]
    lag_known_np: Bools  # [n] there was a step before

    def rows(self, chosen_np: Bools) -> "Steps":
        """Some steps only."""
        arrays: dict[str, Any] = {name: getattr(self, name)[chosen_np] for name in _STEP_ARRAYS}
        survivals = {name: values[chosen_np] for name, values in self.survival_np.items()}
        return replace(self, survival_np=survivals, **arrays)

    @classmethod
    def join(cls, parts: Sequence["Steps"]) -> "Steps":
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in _STEP_ARRAYS
        }
        survivals = {name: np.concatenate([part.survival_np[name] for part in parts]) for name in parts[0].survival_np}
        return replace(parts[0], survival_np=survivals, **arrays)


_STEP_ARRAYS = ("widths_np", "accepted_np", "survived_np", "known_np", "lag_known_np")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    answers: tuple[Answered, ...]  # of the trace; of plain decoding, those of the first wave
    steps: Steps | None  # None: plain decoding
    waves: tuple[Wave, ...]

    @classmethod
    def join(cls, cells: Sequence["Cell"]) -> "Cell":
        """The same drafter on several sets, as if they were one."""
        steps = [cell.steps for cell in cells if cell.steps is not None]
        return cls(
            answers=tuple(answer for cell in cells for answer in cell.answers),
            steps=Steps.join(steps) if steps else None,
            waves=tuple(_joined(waves) for waves in zip(*(cell.waves for cell in cells), strict=True)),
        )


def _joined(waves: Sequence[Wave]) -> Wave:
    """One after the other."""
    return Wave(
        wall_s=sum(wave.wall_s for wave in waves),
        num_steps=sum(wave.num_steps for wave in waves),
        answers=tuple(answer for wave in waves for answer in wave.answers),
    )


# ---------------------------------------------------------------------------------------------------------------- figures


def score_row(
    *, prompts: str, temperature: float, drafter: str, num_drafts: int | None, cell: Cell, plain: Cell | None,
    same_text: bool,
) -> dict[str, Any]:  # fmt: skip
    """One row of the report. `plain` is the cell of plain decoding on the same prompts, if there is one."""
    return {
        "prompts": prompts,
        "temperature": temperature,
        "drafter": drafter,
        "num_speculative_tokens": num_drafts,
        **counted(cell.answers),
        **(foretold(cell.steps) if cell.steps else {}),
        **speed(cell.waves, plain.waves if plain else ()),
        "same_as_off": same_answers(cell.waves, plain.waves) if plain and same_text else None,
    }


def counted(answers: Sequence[Answered]) -> dict[str, Any]:
    """Counters of the answers, with and without those that end in a loop."""
    without_loops = straight(answers)
    counters, no_loops = total(answers), total(without_loops)
    return {
        "requests": len(answers),
        "output_tokens": sum(len(answer.token_ids) for answer in answers),
        "looping_answers": len(answers) - len(without_loops),
        "steps": counters.steps,
        "drafted": counters.drafted,
        "verified": counters.verified,
        "accepted": counters.accepted,
        "emitted": counters.emitted,
        "acceptance_rate": counters.acceptance_rate,
        "mean_accepted_length": counters.mean_accepted_length,
        "mean_accepted_length_no_loops": no_loops.mean_accepted_length,
    }


def foretold(steps: Steps) -> dict[str, Any]:
    """Acceptance by position, and how far the survivals that were foretold can be trusted."""
    measured = {}
    for name, survival_np in steps.survival_np.items():
        known = steps.known_np & steps.lag_known_np[:, None] if name == "lagged" else steps.known_np
        measured[name] = quality(survival_np, steps.survived_np, known)
    return {
        "signal": steps.signal,
        "acceptance_at": acceptance_at(steps),
        **{f"ece_{name}": found.ece for name, found in measured.items()},
        "calibration": {name: asdict(found) for name, found in measured.items()},
    }


def acceptance_at(steps: Steps) -> list[float | None]:
    """[S] draft j accepted, given that it was verified and those before it accepted; None where that never was."""
    rates: list[float | None] = []
    for position in range(steps.survived_np.shape[1]):
        reached = (steps.widths_np > position) & (steps.accepted_np >= position)
        rates.append(float((steps.accepted_np > position)[reached].mean()) if reached.any() else None)
    return rates


# ----------------------------------------------------------------------------------------------------------------- tables


def scores_tables(rows: Sequence[Mapping[str, Any]], title: str) -> tuple[Table, Table]:
    """The report for eyes: what the drafts bring, and acceptance by position beside what was foretold of it."""
    return _gains(rows, title), _positions([row for row in rows if "acceptance_at" in row])


def _gains(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    table = _table(title, ("tokens\n/step", "no\nloops", "loops", "tok/s", "x off", "same\ntext"))
    for row in rows:
        table.add_row(
            *_names(row),
            shown(row["mean_accepted_length"], ".2f"),
            shown(row["mean_accepted_length_no_loops"], ".2f"),
            shown(row["looping_answers"] / row["requests"], ".0%"),
            shown(row["tok_per_s"], ".1f"),
            shown(row["ratio_to_off"], ".2f"),
            share(row["same_as_off"], row["requests"]),
        )
    return table


def _positions(rows: Sequence[Mapping[str, Any]]) -> Table:
    most = max((len(row["acceptance_at"]) for row in rows), default=0)
    title = "drafts accepted by position, given those before, and error of the survival foretold (ECE), %"
    table = _table(title, (*map(str, range(1, most + 1)), "ECE\nfresh", "ECE\nlagged"))
    for row in rows:
        rates = [*row["acceptance_at"], *[None] * (most - len(row["acceptance_at"]))]
        errors = (row["ece_fresh"], row["ece_lagged"])
        table.add_row(
            *_names(row),
            *(shown(rate, ".0f", 100) for rate in rates),
            *(shown(error, ".1f", 100) for error in errors),
        )
    return table


def _table(title: str, heads: Sequence[str]) -> Table:
    return new_table(title, ("prompts", "T", "drafter", *heads), ("prompts", "drafter"))


def _names(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["prompts"], f"{row['temperature']:g}", Path(row["drafter"]).name
