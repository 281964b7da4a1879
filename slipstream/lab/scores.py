"""What `evaluate` says of drafters: its options, the figures of a row, the table. Torch-free.

A cell is one drafter on one set of prompts at one temperature: the answers and drafting steps of a trace, and timed waves
in mode static. Speed comes from the waves, everything else from the trace. A pooled cell is several sets taken together.
Where figures come from is `evaluate`'s business; what they mean is decided here.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table

from slipstream.config import NGRAM, SamplingParams, SpeculativeConfig
from slipstream.decide.scaling import quality
from slipstream.errors import ConfigError
from slipstream.lab.report import Wave
from slipstream.loops import ends_in_loop
from slipstream.metrics import SpecCounters
from slipstream.prompts import prompts_name

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

OFF = "off"  # plain decoding, among the baselines
BASELINES = (OFF, NGRAM)
POOLED = "all"  # prompts of all sets together


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions:
    model: str = "smollm2-135m"
    draft: str = "smollm2-135m-dspark"
    prompts: tuple[Path, ...] = ()  # each file is a set, called by its stem; none: the package's sample
    limit: int | None = None  # prompts of each set, its first ones; None: all
    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_speculative_tokens: int | None = None  # S; None: what a drafter makes, at most 7
    concurrency: int = 8
    baselines: tuple[str, ...] = BASELINES
    waves: int = 1  # timed passes of each cell; 0: no speed, and no plain decoding to compare with
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=256))
    speculative: Mapping[str, Any] = field(default_factory=dict)  # further fields of SpeculativeConfig
    engine: Mapping[str, Any] = field(default_factory=dict)  # fields of EngineConfig

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("waves", 0), ("limit", 1)):
            value = getattr(self, name)
            if not (value is None and name == "limit") and (type(value) is not int or value < least):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number from {least}")
        for baseline in self.baselines:
            if baseline not in BASELINES:
                raise ConfigError(f"baselines holds {baseline!r}; choose among {', '.join(BASELINES)}, or none")
        for name, values in (
            ("temperature", self.temperatures), ("prompts", self.set_names), ("baselines", self.baselines)
        ):  # fmt: skip
            if len(set(values)) < len(values):
                raise ConfigError(f"{name} is {', '.join(map(str, values))}; name each once")
        if not self.temperatures:
            raise ConfigError("temperature names no value; give at least one")
        for temperature in self.temperatures:
            replace(self.sampling, temperature=temperature)  # refuses what is no temperature
        # These two refuse what does not go together: options of drafting, and of a signal to go by.
        self.config_of(self.draft)
        SpeculativeConfig.for_mode("adaptive", draft_model=self.draft, **self.speculative)

    @property
    def sets(self) -> tuple[Path | None, ...]:
        """Prompt files; None is the package's sample."""
        return self.prompts or (None,)

    @property
    def set_names(self) -> tuple[str, ...]:
        return tuple(prompts_name(path) for path in self.sets)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Who drafts, the baseline first."""
        return tuple(dict.fromkeys([*(name for name in self.baselines if name != OFF), self.draft]))

    @property
    def timed(self) -> tuple[str, ...]:
        """Who takes turns in the timed waves."""
        return ((OFF,) if OFF in self.baselines else ()) + self.drafters if self.waves else ()

    def config_of(self, drafter: str) -> SpeculativeConfig:
        """Full width. Options about how drafts are drawn are those of the drafter under test."""
        if drafter == OFF:
            return SpeculativeConfig()
        names = {"acceptance"} if drafter != self.draft else set(self.speculative) - SIGNAL_FIELDS
        shared = {name: self.speculative[name] for name in names & self.speculative.keys()}
        return SpeculativeConfig.for_mode(
            "static", draft_model=drafter, num_speculative_tokens=self.num_speculative_tokens, **shared
        )

    def same_text(self, temperature: float) -> bool:
        """Whether drafts must not change the text. Under rejection at T > 0 only its distribution is the same."""
        return temperature == 0 or self.speculative.get("acceptance", "coupled") == "coupled"


# Of a trace, not of the engine that makes it, which runs in mode static.
SIGNAL_FIELDS = frozenset({"confidence_signal", "calibration"})


class Answered(Protocol):
    """The part of a completion that is counted."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def spec(self) -> SpecCounters: ...


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
    straight = [answer for answer in answers if not ends_in_loop(answer.token_ids)]
    counters, no_loops = total(answers), total(straight)
    return {
        "requests": len(answers),
        "output_tokens": sum(len(answer.token_ids) for answer in answers),
        "looping_answers": len(answers) - len(straight),
        "steps": counters.steps,
        "drafted": counters.drafted,
        "verified": counters.verified,
        "accepted": counters.accepted,
        "emitted": counters.emitted,
        "acceptance_rate": counters.acceptance_rate,
        "mean_accepted_length": counters.mean_accepted_length,
        "mean_accepted_length_no_loops": no_loops.mean_accepted_length,
    }


def total(answers: Sequence[Answered]) -> SpecCounters:
    counters = SpecCounters()
    for answer in answers:
        counters.merge(answer.spec)
    return counters


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


def speed(waves: Sequence[Wave], plain: Sequence[Wave]) -> dict[str, Any]:
    """Median over waves, and relative to plain decoding."""
    speeds = [wave.tok_per_s for wave in waves]
    median = statistics.median(speeds) if speeds else None
    off = statistics.median(wave.tok_per_s for wave in plain) if plain else None
    return {
        "wave_tok_per_s": speeds,
        "tok_per_s": median,
        "ratio_to_off": median / off if median is not None and off else None,
    }


def same_answers(waves: Sequence[Wave], plain: Sequence[Wave]) -> int | None:
    """How many answers equal plain decoding's; all but near ties should."""
    if not waves or not plain:
        return None
    pairs = zip(waves[0].answers, plain[0].answers, strict=True)
    return sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs)


# ----------------------------------------------------------------------------------------------------------------- tables


def scores_tables(rows: Sequence[Mapping[str, Any]], title: str) -> tuple[Table, Table]:
    """The report for eyes: what the drafts bring, and acceptance by position beside what was foretold of it."""
    return _gains(rows, title), _positions([row for row in rows if "acceptance_at" in row])


def _gains(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    table = _table(title, ("tokens\n/step", "no\nloops", "loops", "tok/s", "x off", "same\ntext"))
    for row in rows:
        table.add_row(
            *_names(row),
            _shown(row["mean_accepted_length"], ".2f"),
            _shown(row["mean_accepted_length_no_loops"], ".2f"),
            _shown(row["looping_answers"] / row["requests"], ".0%"),
            _shown(row["tok_per_s"], ".1f"),
            _shown(row["ratio_to_off"], ".2f"),
            "-" if row["same_as_off"] is None else f"{row['same_as_off']}/{row['requests']}",
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
            *(_shown(rate, ".0f", 100) for rate in rates),
            *(_shown(error, ".1f", 100) for error in errors),
        )
    return table


def _table(title: str, heads: Sequence[str]) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True
    )
    table.add_column("prompts", overflow="fold")
    table.add_column("T", justify="right")
    table.add_column("drafter", overflow="fold")
    for name in heads:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _names(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["prompts"], f"{row['temperature']:g}", Path(row["drafter"]).name


def _shown(value: float | None, spec: str, scale: int = 1) -> str:
    return "-" if value is None else format(value * scale, spec)
