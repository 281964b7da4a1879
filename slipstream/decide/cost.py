"""The cost model that decides: fitted prices, corrected by what is measured while serving, and the file they live in.

`step_cost` holds the two kinds of price, `fit` makes them from samples; both are named here again, so that whoever
needs a cost model imports one module. Nothing here takes a time itself: samples come from `slipstream profile`,
measured steps from the engine by way of `policy`.
"""

import hashlib
import json
import math
import os
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.decide.fields import Fields
from slipstream.decide.fit import Samples, fit_error, fit_linear, fit_table
from slipstream.decide.step_cost import (
    DraftTimes,
    LinearCost,
    StepCost,
    TableCost,
    draft_times_from_dict,
    step_cost_from_dict,
)
from slipstream.errors import ConfigError
from slipstream.files import replace_text
from slipstream.models.folder import bounded_text, parse_json

__all__ = [
    "CostModel",
    "CostProfile",
    "DraftTimes",
    "LinearCost",
    "ProfileKey",
    "Samples",
    "StepCost",
    "SurveyFacts",
    "TableCost",
    "fit_error",
    "fit_linear",
    "fit_table",
    "make_profile",
    "slipstream_home",
    "step_cost_from_dict",
]

Floats: TypeAlias = NDArray[np.float64]

FILE_VERSION = 1
# Without stairs, a linear fit is used unless its error is above this multiple of the table's (in two benches of the shipped
# pair on 2 busy cores, at 1.4 and 1.5 times, speed-ups simulated by the line were off by 9%, by the table 3%) ...
LINEAR_TOLERANCE = 1.25
LINEAR_GOOD_ENOUGH = 0.03  # ... or below this error, whatever the table's


# ---------------------------------------------------------------------------------------------- the model that decides


class CostModel:
    """Step and draft times as the controller uses them: what was fitted, corrected by what is measured while serving.

    The logarithm of a step's time is off by one common factor, which follows the machine (clocks, neighbours), and by
    one per part: fixed and varying share of a linear cost, each entry and the KV terms of a table, and the draft. The
    common one changes no decision, since rates are compared; it is there so that a slow minute is not taken for a fault
    of the part that happened to run in it. A Kalman filter follows them: a part counts by its share of the step, what is
    not seen returns slowly to what was fitted, and no factor leaves its bounds. It is told the median of the last three
    steps of the same bucket (table entry or octave of rows, and draft length), so that one step that went wrong changes
    nothing; and no error above 25%, so that several change little.

    Steps in which somebody prefills run other shapes, with fewer outputs, and have a price and parts of their own where
    one was measured (`mixed`).
    """

    MEDIAN_OF = 3
    MAX_ERROR = math.log(1.25)  # of one observation
    NOISE = 0.15**2  # variance of an observation's logarithm
    PART_VARIANCE, COMMON_VARIANCE = 0.3**2, 0.7**2  # before anything was observed
    PART_BOUND, COMMON_BOUND = math.log(2.0), math.log(4.0)
    FORGET = 5e-4  # per step
    REFRESH = 16  # steps between two rebuilds of the corrected model

    def __init__(
        self, step: StepCost, draft: DraftTimes | None = None, *, mixed: StepCost | None = None, corrects: bool = True
    ) -> None:
        """step, mixed: target steps without and with rows of prompts. Without `mixed` all go by `step`."""
        self.fitted = step
        self.fitted_mixed = mixed
        self.fitted_draft = draft or DraftTimes.constant(0.0)
        self.corrects = corrects
        self.num_observed = 0
        self._steps_since_refresh = 0
        self._unfollowed = 0  # steps since the filter was last told anything
        self._recent: dict[tuple[int, int, int], deque[float]] = {}  # by bucket: log of measured / fitted
        # Log factors: parts of `step`, parts of `mixed`, draft, common.
        self._num_parts = len(step.parts(1, 0.0, 0.0))
        num_mixed = len(mixed.parts(1, 0.0, 0.0)) if mixed is not None else 0
        num_factors = self._num_parts + num_mixed + 1
        self._prior_np = np.array([self.PART_VARIANCE] * num_factors + [self.COMMON_VARIANCE])
        self._bound_np = np.array([self.PART_BOUND] * num_factors + [self.COMMON_BOUND])
        self._log_np = np.zeros(num_factors + 1)
        self._covariance_np = np.diag(self._prior_np)
        self._step = step
        self._mixed = mixed
        self._draft_factor = 1.0
        self._draft_ms: dict[tuple[int, int], float] = {}  # fitted, by (length, sequences) asked for so far

    @property
    def step(self) -> StepCost:
        """The corrected cost of a step in which nobody prefills: a value that a decision may keep."""
        return self._step

    @property
    def mixed(self) -> StepCost:
        """The same for steps with rows of prompts among their rows."""
        return self._step if self._mixed is None else self._mixed

    def draft_ms(self, length: int, num_sequences: int = 1) -> float:
        return self._draft_factor * self._fitted_draft_ms(length, num_sequences)

    def _fitted_draft_ms(self, length: int, num_sequences: int) -> float:
        ms = self._draft_ms.get((length, num_sequences))
        if ms is None:
            ms = self._draft_ms[length, num_sequences] = self.fitted_draft.at(length, num_sequences)
        return ms

    @property
    def factors(self) -> Floats:
        """[parts + 1] what each part (of mixed steps after the others) and, last, the draft is multiplied with."""
        factors: Floats = np.exp(self._log_np[:-1] + self._log_np[-1])
        return factors

    def observe(
        self,
        rows: int,
        measured_ms: float,
        *,
        kv_rows: float = 0.0,
        kv: float = 0.0,
        draft_length: int = 0,
        num_sequences: int = 1,
        mixed: bool = False,
        steps: int = 1,
    ) -> None:
        """Learn from a whole step: its draft, if it had one, and `rows` target rows took `measured_ms`.

        kv_rows is the sum of (given + w) * kv, kv the sum of kv. mixed: some rows were a prompt's. `steps`: how many went
        by since the last observation, this one included; they are forgotten by, but it is one observation. Values that
        cannot be times are ignored.
        """
        if not self.corrects or not math.isfinite(measured_ms) or measured_ms <= 0 or rows < 1:
            return
        self.num_observed += 1
        self._steps_since_refresh += steps
        self._unfollowed += steps
        weight = np.zeros_like(self._log_np)
        if mixed and self.fitted_mixed is not None:
            weight[self._num_parts : -2] = self.fitted_mixed.parts(rows, kv_rows, kv)
        else:
            weight[: self._num_parts] = self.fitted.parts(rows, kv_rows, kv)
        weight[-2] = self._fitted_draft_ms(draft_length, num_sequences)
        parts = weight[:-1]
        if (fitted_ms := float(np.add.reduce(parts))) > 0:
            bucket = (int(parts[:-2].argmax()), rows.bit_length(), draft_length)
            typical = self._typical(bucket, math.log(measured_ms / fitted_ms))
            if typical is not None:
                self._correct(weight, typical)
        if self._steps_since_refresh >= self.REFRESH:
            self._steps_since_refresh = 0
            self._refresh()

    def _refresh(self) -> None:
        factors = self.factors
        self._step = self.fitted.scaled(factors[: self._num_parts])
        if self.fitted_mixed is not None:
            self._mixed = self.fitted_mixed.scaled(factors[self._num_parts : -1])
        self._draft_factor = float(factors[-1])

    def _typical(self, bucket: tuple[int, int, int], log_ratio: float) -> float | None:
        """The median of the bucket's last steps, this one among them; None while there are too few."""
        recent = self._recent.get(bucket)
        if recent is None:
            recent = self._recent[bucket] = deque(maxlen=self.MEDIAN_OF)
        recent.append(log_ratio)
        return sorted(recent)[self.MEDIAN_OF // 2] if len(recent) == self.MEDIAN_OF else None

    def _correct(self, weight: Floats, log_ratio: float) -> None:
        """`weight`: what each part was fitted to take, in ms; turned into shares of the step as it is predicted now."""
        parts = weight[:-1]
        fitted_ms = float(np.add.reduce(parts))
        parts *= self.factors
        predicted_ms = float(np.add.reduce(parts))
        parts /= predicted_ms
        weight[-1] = 1.0
        error = log_ratio - math.log(predicted_ms / fitted_ms)
        self._follow(weight, max(-self.MAX_ERROR, min(self.MAX_ERROR, error)), self._unfollowed)
        self._unfollowed = 0

    def _follow(self, weight: Floats, error: float, steps: int) -> None:
        """One step of the filter: `error` of the log time, to which each log factor contributes by its `weight`."""
        kept = (1 - self.FORGET) ** steps
        log, covariance, bound = self._log_np, self._covariance_np, self._bound_np
        log *= kept
        covariance *= kept * kept
        covariance.reshape(-1)[:: len(log) + 1] += (1 - kept * kept) * self._prior_np  # the diagonal
        spread = covariance @ weight
        gain = spread / (float(weight @ spread) + self.NOISE)
        log += gain * error
        covariance -= gain[:, None] * spread
        np.maximum(log, -bound, out=log)
        np.minimum(log, bound, out=log)


# ----------------------------------------------------------------------------------------------------------------- file


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What a stored profile belongs to."""

    device: str  # "cpu: AMD EPYC ... x2" or "cuda: NVIDIA H200"
    target: str
    drafter: str
    dtype: str

    def path(self, home: Path | None = None) -> Path:
        """The profile's place under `home` ($SLIPSTREAM_HOME, default ~/.cache/slipstream)."""
        name = "--".join(_slug(part) for part in (self.device, self.target, self.drafter, self.dtype))
        return (home or slipstream_home()) / "cost" / f"{name}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyFacts:
    """How a profile was measured, and how far off its models are on shapes that they were not fitted to."""

    num_sequences: int  # the largest that was asked for, whether or not time sufficed to get there
    num_drafts: int
    budget_s: float
    held_out_linear_error: float | None  # mean |predicted - measured| / measured; None without such shapes
    held_out_table_error: float | None
    num_held_out: int
    held_out_mixed_error: float | None = None  # of the price of steps with a prompt

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Fields) -> "SurveyFacts":
        def error(name: str) -> float | None:
            return None if fields.data.get(name) is None else fields.number(name)

        return cls(
            num_sequences=fields.integer("num_sequences"),
            num_drafts=fields.integer("num_drafts"),
            budget_s=fields.number("budget_s"),
            held_out_linear_error=error("held_out_linear_error"),
            held_out_table_error=error("held_out_table_error"),
            num_held_out=fields.integer("num_held_out"),
            held_out_mixed_error=error("held_out_mixed_error"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """A fitted cost model with the machine and the models it belongs to: the file that `slipstream profile` writes."""

    key: ProfileKey
    versions: dict[str, str]  # package -> version
    use: Literal["linear", "table"]
    use_reason: str
    linear: LinearCost
    table: TableCost
    draft: DraftTimes
    linear_error: float  # mean relative error on the samples
    table_error: float
    num_samples: int
    mixed: TableCost | None = None  # steps with rows of prompts; None: not measured, they are priced like others
    survey: "SurveyFacts | None" = None  # None: made before these were kept
    # Of an engine without a drafter, which keeps no features and may be cut otherwise. None: not measured; it decides nothing.
    plain: "CostProfile | None" = None

    @property
    def step(self) -> StepCost:
        return self.linear if self.use == "linear" else self.table

    def model(self, *, linear: bool = False) -> CostModel:
        """linear: whatever fits better, for who needs a linear price of all steps (min_gain)."""
        return CostModel(self.linear, self.draft) if linear else CostModel(self.step, self.draft, mixed=self.mixed)

    def save(self, path: Path | None = None) -> Path:
        path = path or self.key.path()
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(self.to_dict(), indent=1) + "\n")  # a reader never sees half a file
        return path

    def to_dict(self) -> dict[str, Any]:
        key = self.key
        return {
            "version": FILE_VERSION,
            "key": {"device": key.device, "target": key.target, "drafter": key.drafter, "dtype": key.dtype},
            "versions": dict(self.versions),
            "use": self.use,
            "use_reason": self.use_reason,
            "linear": self.linear.to_dict(),
            "table": self.table.to_dict(),
            "draft": self.draft.to_dict(),
            "linear_error": self.linear_error,
            "table_error": self.table_error,
            "num_samples": self.num_samples,
            "mixed": self.mixed.to_dict() if self.mixed else None,
            "survey": self.survey.to_dict() if self.survey else None,
            "plain": self.plain.to_dict() if self.plain else None,
        }

    @classmethod
    def from_dict(cls, data: object) -> "CostProfile":
        fields = Fields(data, "")
        if (version := fields.integer("version")) != FILE_VERSION:
            raise ConfigError(f"version is {version}; this build reads {FILE_VERSION}. Run `slipstream profile` again")
        key = fields.sub("key")
        linear, table = (step_cost_from_dict(fields.get(kind), kind) for kind in ("linear", "table"))
        if not isinstance(linear, LinearCost) or not isinstance(table, TableCost):
            raise ConfigError("linear.kind must be 'linear' and table.kind 'table'")
        mixed = step_cost_from_dict(fields.get("mixed"), "mixed") if fields.data.get("mixed") is not None else None
        if mixed is not None and not isinstance(mixed, TableCost):
            raise ConfigError("mixed.kind must be 'table'")
        use = fields.choice("use", ("linear", "table"))
        return cls(
            key=ProfileKey(**{name: key.text(name) for name in ("device", "target", "drafter", "dtype")}),
            versions={str(k): str(v) for k, v in fields.sub("versions").data.items()},
            use="linear" if use == "linear" else "table",
            use_reason=fields.text("use_reason"),
            linear=linear,
            table=table,
            draft=draft_times_from_dict(fields.get("draft"), "draft"),
            linear_error=fields.number("linear_error"),
            table_error=fields.number("table_error"),
            num_samples=fields.integer("num_samples"),
            mixed=mixed,
            survey=SurveyFacts.from_fields(fields.sub("survey")) if fields.data.get("survey") is not None else None,
            plain=cls._plain(fields.data.get("plain")),
        )

    @classmethod
    def _plain(cls, data: object) -> "CostProfile | None":
        if data is None:
            return None
        if isinstance(data, dict) and data.get("plain") is not None:
            raise ConfigError("plain.plain: plain decoding has no other price; leave it out")
        try:
            return cls.from_dict(data)
        except ConfigError as error:
            raise ConfigError(f"plain: {error}") from error

    @classmethod
    def load(cls, path: Path) -> "CostProfile":
        """ConfigError names the file and the field at fault."""
        try:
            text = bounded_text(path)
            data = parse_json(text, len(text))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cost model {path}: {error}; write one with `slipstream profile`") from error
        try:
            return cls.from_dict(data)
        except ConfigError as error:
            raise ConfigError(f"cost model {path}: {error}") from error


def make_profile(
    key: ProfileKey,
    samples: Samples,
    draft: DraftTimes,
    *,
    staircase: bool,
    versions: dict[str, str],
    edges: Sequence[int] = (),
) -> CostProfile:
    """Fit both models and choose: the linear one, which can price each context, unless the table is clearly better.

    `staircase`: steps run at padded row counts; `edges` are these counts, see `fit_table`. There a line has to be as good
    as the table: even one that is off by little sees rows that cost nothing as dear, and a stair's first as cheap.
    """
    linear, table = fit_linear(samples), fit_table(samples, staircase=staircase, edges=edges)
    linear_error, table_error = fit_error(linear, samples), fit_error(table, samples)
    fits = linear_error <= (table_error if staircase else max(LINEAR_GOOD_ENOUGH, LINEAR_TOLERANCE * table_error))
    reason = f"mean error {linear_error:.1%} linear, {table_error:.1%} table"
    return CostProfile(
        key=key,
        versions=versions,
        use="linear" if fits else "table",
        use_reason=reason,
        linear=linear,
        table=table,
        draft=draft,
        linear_error=linear_error,
        table_error=table_error,
        num_samples=len(samples.ms_np),
    )


def slipstream_home() -> Path:
    """Where profiles are kept: $SLIPSTREAM_HOME, else ~/.cache/slipstream."""
    return Path(os.environ.get("SLIPSTREAM_HOME") or Path.home() / ".cache" / "slipstream")


def _slug(text: str) -> str:
    """`text` as part of a file name: its tail, readable, with a checksum where anything was lost."""
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[-48:]
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
