"""What a step costs in ms: linear in the rows, or a table by row count, plus KV terms, plus the draft's own time.

    linear   c0 + c1 * rows                      + c2 * sum of (given + w) * kv + c3 * sum of kv
    table    a value by (padded) row count       + the same KV terms

Here live the two models, their fits, the file that keeps them with the machine and the models they belong to, and the
correction while serving. Nothing here takes a time itself: samples come from `slipstream profile` or from the engine.
"""

import hashlib
import json
import math
import os
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipstream.errors import ConfigError
from slipstream.files import replace_text

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

FILE_VERSION = 1
LINEAR_TOLERANCE = 1.5  # a linear fit is used unless its error is above this multiple of the table's ...
LINEAR_GOOD_ENOUGH = 0.03  # ... or below this error, whatever the table's


# ------------------------------------------------------------------------------------------------------- time of a step


class StepCost:
    """Time of one target step. The two kinds differ in how rows are priced; both add the KV terms."""

    __slots__ = ()
    c2: float  # ms per row and token of context that the row attends to
    c3: float  # ms per token of context in the step, whatever the widths

    def curve(self, first: int, count: int) -> Floats:
        """[count] ms of steps with first, first + 1, ... rows, without the KV terms."""
        raise NotImplementedError

    def hull(self) -> "StepCost":
        """The largest convex cost that is nowhere above this one."""
        raise NotImplementedError

    def scaled(self, factors: Floats) -> "StepCost":
        """Every part multiplied by its correction factor; see `parts`."""
        raise NotImplementedError

    def parts(self, rows: int, kv_rows: float, kv: float) -> Floats:
        """[parts] what each correctable part contributes to one step's time, in ms."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def kv_ms(self, kv_rows: float, kv: float) -> float:
        return self.c2 * kv_rows + self.c3 * kv

    def step_ms(self, given_np: Ints, kv_np: Ints, widths_np: Ints) -> float:
        """A step in which sequence i has given + width rows, each over kv tokens of context. All [B]."""
        rows_np = given_np + widths_np
        ms = float(self.curve(int(rows_np.sum()), 1)[0])
        if self.c2 or self.c3:
            ms += self.kv_ms(float(rows_np @ kv_np), float(kv_np.sum()))
        return ms


@dataclass(frozen=True, slots=True)
class LinearCost(StepCost):
    """c0 + c1 * rows + c2 * sum of (given + w) * kv + c3 * sum of kv."""

    c0: float
    c1: float
    c2: float = 0.0
    c3: float = 0.0

    def __post_init__(self) -> None:
        for name in ("c0", "c1", "c2", "c3"):
            _check_ms(name, getattr(self, name))

    def curve(self, first: int, count: int) -> Floats:
        return self.c0 + self.c1 * np.arange(first, first + count, dtype=np.float64)

    def hull(self) -> "LinearCost":
        return self

    def parts(self, rows: int, kv_rows: float, kv: float) -> Floats:
        return np.array([self.c0, self.c1 * rows + self.kv_ms(kv_rows, kv)])

    def scaled(self, factors: Floats) -> "LinearCost":
        fixed, varying = (float(f) for f in factors)
        return LinearCost(self.c0 * fixed, self.c1 * varying, self.c2 * varying, self.c3 * varying)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "linear", "c0": self.c0, "c1": self.c1, "c2": self.c2, "c3": self.c3}


@dataclass(frozen=True, slots=True)
class TableCost(StepCost):
    """Step time by row count. A staircase where rows are padded up to the next entry, else linear between entries.

    Below the first entry its time holds; beyond the last the mean slope of the table goes on.
    """

    rows: tuple[int, ...]  # rising
    ms: tuple[float, ...]
    staircase: bool = True
    c2: float = 0.0
    c3: float = 0.0
    _dense_np: Floats = field(init=False, repr=False, compare=False)  # [rows[-1] + 1] ms by row count
    _hull: "TableCost | None" = field(init=False, repr=False, compare=False)  # made when it is first asked for

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.ms):
            raise ConfigError(
                f"rows has {len(self.rows)} entries, ms {len(self.ms)}; a cost table needs as many of each, at least 1"
            )
        for r in self.rows:
            if not isinstance(r, int) or isinstance(r, bool) or r < 1:
                raise ConfigError(f"rows holds {r!r}; row counts are whole numbers from 1")
        if any(b <= a for a, b in pairwise(self.rows)):
            raise ConfigError(f"rows is {list(self.rows)}; row counts must rise")
        for index, value in enumerate(self.ms):
            _check_ms(f"ms[{index}]", value)
        _check_ms("c2", self.c2)
        _check_ms("c3", self.c3)
        counts = np.arange(self.rows[-1] + 1)
        if self.staircase:
            dense = np.asarray(self.ms, dtype=np.float64)[np.searchsorted(self.rows, counts)]
        else:
            dense = np.interp(counts, self.rows, self.ms)
        object.__setattr__(self, "_dense_np", dense)
        object.__setattr__(self, "_hull", None)

    def curve(self, first: int, count: int) -> Floats:
        dense = self._dense_np
        if first + count <= len(dense):
            return dense[first : first + count]
        counts = np.arange(first, first + count)
        beyond = np.maximum(counts - self.rows[-1], 0)
        curve: Floats = dense[np.minimum(counts, self.rows[-1])] + self._slope_beyond() * beyond
        return curve

    def _slope_beyond(self) -> float:
        if len(self.rows) == 1:
            return self.ms[0] / self.rows[0]
        return max(0.0, (self.ms[-1] - self.ms[0]) / (self.rows[-1] - self.rows[0]))

    def hull(self) -> "TableCost":
        if self._hull is None:
            object.__setattr__(self, "_hull", self._make_hull())
        assert self._hull is not None
        return self._hull

    def _make_hull(self) -> "TableCost":
        """Monotone chain over both ends of every stair, or over the entries."""
        last = self.rows[-1]
        corners = {1, *self.rows, *(r + 1 for r in self.rows if r < last)}
        lower: list[tuple[int, float]] = []
        for rows in sorted(corners):
            point = (rows, float(self._dense_np[rows]))
            while len(lower) > 1 and _turns_down(lower[-2], lower[-1], point):
                lower.pop()
            lower.append(point)
        return TableCost(
            rows=tuple(x for x, _ in lower), ms=tuple(y for _, y in lower), staircase=False, c2=self.c2, c3=self.c3
        )

    def parts(self, rows: int, kv_rows: float, kv: float) -> Floats:
        contribution = np.zeros(len(self.rows) + 1)
        contribution[self._entry(rows)] = float(self.curve(rows, 1)[0])
        contribution[-1] = self.kv_ms(kv_rows, kv)
        return contribution

    def _entry(self, rows: int) -> int:
        """Index of the entry that prices `rows`: the step's stair, or the nearest entry."""
        if self.staircase:
            return min(int(np.searchsorted(self.rows, rows)), len(self.rows) - 1)
        return int(np.argmin(np.abs(np.asarray(self.rows) - rows)))

    def scaled(self, factors: Floats) -> "TableCost":
        return TableCost(
            rows=self.rows,
            ms=tuple((np.asarray(self.ms) * factors[:-1]).tolist()),
            staircase=self.staircase,
            c2=self.c2 * float(factors[-1]),
            c3=self.c3 * float(factors[-1]),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "table",
            "rows": list(self.rows),
            "ms": list(self.ms),
            "staircase": self.staircase,
            "c2": self.c2,
            "c3": self.c3,
        }


def _turns_down(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


# ---------------------------------------------------------------------------------------------------- time of the draft


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """Draft time by draft length, and, where it was measured, by the number of sequences that draft.

    Linear between entries; beyond the last one the last slope goes on; below the first it holds. Length 0 is free.
    """

    lengths: tuple[int, ...]  # [L] rising, from 1
    sequences: tuple[int, ...]  # [M] rising, from 1
    ms: tuple[tuple[float, ...], ...]  # [L][M]

    def __post_init__(self) -> None:
        for name, values in (("lengths", self.lengths), ("sequences", self.sequences)):
            rises = all(isinstance(v, int) and not isinstance(v, bool) and v >= 1 for v in values)
            if not values or not rises or any(b <= a for a, b in pairwise(values)):
                raise ConfigError(f"{name} is {list(values)}; it must hold rising whole numbers from 1")
        if len(self.ms) != len(self.lengths) or any(len(row) != len(self.sequences) for row in self.ms):
            raise ConfigError(
                f"ms must have {len(self.lengths)} rows (lengths) of {len(self.sequences)} values (sequences)"
            )
        for i, row in enumerate(self.ms):
            for j, value in enumerate(row):
                _check_ms(f"ms[{i}][{j}]", value)

    @classmethod
    def constant(cls, ms: float) -> "DraftTimes":
        return cls((1,), (1,), ((ms,),))

    @classmethod
    def by_length(cls, ms: dict[int, float]) -> "DraftTimes":
        lengths = sorted(n for n in ms if n > 0)
        return cls(tuple(lengths), (1,), tuple((float(ms[n]),) for n in lengths))

    def at(self, length: int, num_sequences: int = 1) -> float:
        if length == 0 or num_sequences == 0:
            return 0.0
        return _interpolate(length, self.lengths, [_interpolate(num_sequences, self.sequences, row) for row in self.ms])

    def to_dict(self) -> dict[str, Any]:
        return {"lengths": list(self.lengths), "sequences": list(self.sequences), "ms": [list(row) for row in self.ms]}


def _interpolate(x: float, xs: tuple[int, ...], ys: "list[float] | tuple[float, ...]") -> float:
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    i = 1
    while i < len(xs) - 1 and xs[i] < x:
        i += 1
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    if x > xs[-1]:
        slope = max(slope, 0.0)
    return ys[i] + slope * (x - xs[i])


# ---------------------------------------------------------------------------------------------- the model that decides


class CostModel:
    """Step and draft times as the controller uses them: what was fitted, corrected by what is measured while serving.

    The logarithm of a step's time is off by one common factor, which follows the machine (clocks, neighbours), and by
    one per part: fixed and varying share of a linear cost, each entry and the KV terms of a table, and the draft. The
    common one changes no decision, since rates are compared; it is there so that a slow minute is not taken for a fault
    of the part that happened to run in it. A Kalman filter follows them: a part counts by its share of the step, what is
    not seen returns slowly to what was fitted, an error is clipped (a pause of a second counts no more than one of
    25%), and no factor leaves its bounds.
    """

    MAX_ERROR = math.log(1.25)  # of one observation
    NOISE = 0.15**2  # variance of an observation's logarithm
    PART_VARIANCE, COMMON_VARIANCE = 0.3**2, 0.7**2  # before anything was observed
    PART_BOUND, COMMON_BOUND = math.log(2.0), math.log(4.0)
    FORGET = 5e-4  # per observation
    REFRESH = 16  # observations between two rebuilds of the corrected model

    def __init__(self, step: StepCost, draft: DraftTimes | None = None, *, corrects: bool = True) -> None:
        self.fitted = step
        self.fitted_draft = draft or DraftTimes.constant(0.0)
        self.corrects = corrects
        self.num_observed = 0
        num_parts = len(step.parts(1, 0.0, 0.0))
        self._prior_np = np.array([self.PART_VARIANCE] * (num_parts + 1) + [self.COMMON_VARIANCE])
        self._bound_np = np.array([self.PART_BOUND] * (num_parts + 1) + [self.COMMON_BOUND])
        self._log_np = np.zeros(num_parts + 2)  # log factors: parts, draft, common
        self._covariance_np = np.diag(self._prior_np)
        self._step = step
        self._draft_factor = 1.0

    @property
    def step(self) -> StepCost:
        """The corrected step cost: a value that a decision may keep."""
        return self._step

    def draft_ms(self, length: int, num_sequences: int = 1) -> float:
        return self._draft_factor * self.fitted_draft.at(length, num_sequences)

    @property
    def factors(self) -> Floats:
        """[parts + 1] what each part and, last, the draft is multiplied with."""
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
    ) -> None:
        """Learn from a whole step: its draft, if it had one, and `rows` target rows took `measured_ms`.

        kv_rows is the sum of (given + w) * kv, kv the sum of kv. Values that cannot be times are ignored.
        """
        if not self.corrects or not math.isfinite(measured_ms) or measured_ms <= 0 or rows < 1:
            return
        parts = np.append(self.fitted.parts(rows, kv_rows, kv), self.fitted_draft.at(draft_length, num_sequences))
        parts *= self.factors
        predicted = float(parts.sum())
        if predicted <= 0:
            return
        error = float(np.clip(math.log(measured_ms / predicted), -self.MAX_ERROR, self.MAX_ERROR))
        self._follow(np.append(parts / predicted, 1.0), error)
        self.num_observed += 1
        if self.num_observed % self.REFRESH == 0:
            self._step = self.fitted.scaled(self.factors[:-1])
            self._draft_factor = float(self.factors[-1])

    def _follow(self, weight: Floats, error: float) -> None:
        """One step of the filter: `error` of the log time, to which each log factor contributes by its `weight`."""
        kept = 1 - self.FORGET
        self._log_np *= kept
        self._covariance_np *= kept * kept
        self._covariance_np[np.diag_indices_from(self._covariance_np)] += (1 - kept * kept) * self._prior_np
        spread = self._covariance_np @ weight
        gain = spread / (float(weight @ spread) + self.NOISE)
        self._log_np += gain * error
        self._covariance_np -= np.outer(gain, spread)
        np.clip(self._log_np, -self._bound_np, self._bound_np, out=self._log_np)


# ----------------------------------------------------------------------------------------------------------------- fits


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Measured target steps, draft not included. All [n]."""

    rows_np: Floats
    ms_np: Floats
    kv_rows_np: Floats  # sum of (given + w) * kv
    kv_np: Floats  # sum of kv

    @classmethod
    def of(
        cls, rows: ArrayLike, ms: ArrayLike, kv_rows: ArrayLike | None = None, kv: ArrayLike | None = None
    ) -> "Samples":
        rows_np, ms_np = np.asarray(rows, dtype=np.float64), np.asarray(ms, dtype=np.float64)
        zeros = np.zeros_like(rows_np)
        samples = cls(
            rows_np,
            ms_np,
            zeros if kv_rows is None else np.asarray(kv_rows, dtype=np.float64),
            zeros if kv is None else np.asarray(kv, dtype=np.float64),
        )
        for name in ("rows", "ms", "kv_rows", "kv"):
            values = getattr(samples, f"{name}_np")
            if values.shape != rows_np.shape or not len(values) or not np.isfinite(values).all():
                raise ConfigError(
                    f"{name} of the cost samples must be finite, one value per step, and at least one step"
                )
        if (ms_np <= 0).any() or (rows_np < 1).any():
            raise ConfigError("cost samples need ms above 0 and rows of at least 1")
        return samples


def fit_linear(samples: Samples) -> LinearCost:
    """Least squares on relative errors. A column with a negative coefficient is taken out and the rest fitted again.

    A column that the samples cannot tell from earlier ones (all contexts alike) is left out as well, the later first.
    """
    columns = np.stack([np.ones_like(samples.rows_np), samples.rows_np, samples.kv_rows_np, samples.kv_np], axis=1)
    return LinearCost(*_fit_non_negative(columns, samples.ms_np).tolist())


def fit_table(samples: Samples, *, staircase: bool) -> TableCost:
    """The median time of each measured row count, after the KV terms, fitted within row counts, are taken off."""
    rows, group = np.unique(samples.rows_np.astype(np.int64), return_inverse=True)
    dummies = np.eye(len(rows))[group]
    columns = np.concatenate([dummies, samples.kv_rows_np[:, None], samples.kv_np[:, None]], axis=1)
    c2, c3 = _fit_non_negative(columns, samples.ms_np)[-2:].tolist()
    rest = samples.ms_np - c2 * samples.kv_rows_np - c3 * samples.kv_np
    ms = [max(float(np.median(rest[group == g])), 0.0) for g in range(len(rows))]
    return TableCost(tuple(rows.tolist()), tuple(ms), staircase=staircase, c2=c2, c3=c3)


def fit_error(cost: StepCost, samples: Samples) -> float:
    """Mean relative error |predicted - measured| / measured."""
    predicted = np.array([float(cost.curve(int(r), 1)[0]) for r in samples.rows_np])
    predicted += cost.c2 * samples.kv_rows_np + cost.c3 * samples.kv_np
    return float(np.mean(np.abs(predicted - samples.ms_np) / samples.ms_np))


def _fit_non_negative(columns: Floats, ms_np: Floats) -> Floats:
    """[columns] coefficients from 0; those left out are 0."""
    weighted = columns / ms_np[:, None]
    norms = np.linalg.norm(weighted, axis=0)
    active = _independent(weighted, norms)
    while True:
        scaled = weighted[:, active] / norms[active]
        solution = np.linalg.lstsq(scaled, np.ones(len(ms_np)), rcond=None)[0] / norms[active]
        if not len(active) or solution.min() >= 0:
            break
        active = np.delete(active, int(np.argmin(solution * norms[active])))
    coefficients = np.zeros(columns.shape[1])
    coefficients[active] = solution
    return coefficients


def _independent(columns: Floats, norms: Floats) -> Ints:
    """Indices of the columns that no earlier ones make up."""
    basis: list[Floats] = []
    kept = []
    for index in np.flatnonzero(norms > 0):
        rest = columns[:, index] / norms[index]
        for direction in (*basis, *basis):  # twice: once more for what rounding left
            rest = rest - direction * float(direction @ rest)
        length = float(np.linalg.norm(rest))
        if length > 1e-6:
            basis.append(rest / length)
            kept.append(index)
    return np.asarray(kept, dtype=np.int64)


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

    @property
    def step(self) -> StepCost:
        return self.linear if self.use == "linear" else self.table

    def model(self) -> CostModel:
        return CostModel(self.step, self.draft)

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
        }

    @classmethod
    def from_dict(cls, data: object) -> "CostProfile":
        fields = _Fields(data, "")
        if (version := fields.integer("version")) != FILE_VERSION:
            raise ConfigError(f"version is {version}; this build reads {FILE_VERSION}. Run `slipstream profile` again")
        key = fields.sub("key")
        linear, table = (step_cost_from_dict(fields.get(kind), kind) for kind in ("linear", "table"))
        if not isinstance(linear, LinearCost) or not isinstance(table, TableCost):
            raise ConfigError("linear.kind must be 'linear' and table.kind 'table'")
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
        )

    @classmethod
    def load(cls, path: Path) -> "CostProfile":
        """ConfigError names the file and the field at fault."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cost model {path}: {error}; write one with `slipstream profile`") from error
        try:
            return cls.from_dict(data)
        except ConfigError as error:
            raise ConfigError(f"cost model {path}: {error}") from error


def make_profile(
    key: ProfileKey, samples: Samples, draft: DraftTimes, *, staircase: bool, versions: dict[str, str]
) -> CostProfile:
    """Fit both models and choose: the linear one, which can price each context, unless the table is clearly better."""
    linear, table = fit_linear(samples), fit_table(samples, staircase=staircase)
    linear_error, table_error = fit_error(linear, samples), fit_error(table, samples)
    fits = linear_error <= max(LINEAR_GOOD_ENOUGH, LINEAR_TOLERANCE * table_error)
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


def step_cost_from_dict(data: object, where: str) -> StepCost:
    """The inverse of `StepCost.to_dict`; `where` is what errors call it."""
    fields = _Fields(data, where)
    kind = fields.choice("kind", ("linear", "table"))
    try:
        if kind == "linear":
            return LinearCost(*(fields.number(name) for name in ("c0", "c1", "c2", "c3")))
        return TableCost(
            rows=tuple(fields.list("rows")),
            ms=tuple(fields.list("ms")),
            staircase=fields.boolean("staircase"),
            c2=fields.number("c2"),
            c3=fields.number("c3"),
        )
    except ConfigError as error:
        raise ConfigError(str(error) if str(error).startswith(where) else f"{where}.{error}") from error


def draft_times_from_dict(data: object, where: str) -> DraftTimes:
    fields = _Fields(data, where)
    ms = [tuple(row) if isinstance(row, list) else (row,) for row in fields.list("ms")]
    try:
        return DraftTimes(tuple(fields.list("lengths")), tuple(fields.list("sequences")), tuple(ms))
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from error


class _Fields:
    """Typed reads from a JSON object; a wrong one is a ConfigError that names the field."""

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, dict):
            raise ConfigError(f"{where or 'top level'} must be an object, found {type(data).__name__}")
        self.data: dict[str, Any] = data
        self._prefix = f"{where}." if where else ""

    def get(self, name: str) -> Any:
        if name not in self.data:
            raise ConfigError(f"{self._prefix}{name} is missing")
        return self.data[name]

    def sub(self, name: str) -> "_Fields":
        return _Fields(self.get(name), f"{self._prefix}{name}")

    def number(self, name: str) -> float:
        value = self.get(name)
        _check_ms(f"{self._prefix}{name}", value)
        return float(value)

    def integer(self, name: str) -> int:
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{self._prefix}{name} is {value!r}; it must be a whole number")
        return value

    def boolean(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise ConfigError(f"{self._prefix}{name} is {value!r}; it must be true or false")
        return value

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise ConfigError(f"{self._prefix}{name} is {value!r}; it must be a string")
        return value

    def list(self, name: str) -> "list[Any]":
        value = self.get(name)
        if not isinstance(value, list):
            raise ConfigError(f"{self._prefix}{name} is {value!r}; it must be a list")
        return value

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self.get(name)
        if value not in allowed:
            raise ConfigError(f"{self._prefix}{name} is {value!r}; choose one of {', '.join(allowed)}")
        return str(value)


def _check_ms(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{name} is {value!r}; it must be a finite number from 0")


def _slug(text: str) -> str:
    """`text` as part of a file name: its tail, readable, with a checksum where anything was lost."""
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[-48:]
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
