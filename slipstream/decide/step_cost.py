"""Prices: what a target step and a draft cost in ms, as values.

    linear   c0 + c1 * rows                      + c2 * sum of (given + w) * kv + c3 * sum of kv
    table    a value by (padded) row count       + the same KV terms

A price knows no clock and does not change; `cost` corrects prices while serving and keeps them in files, `fit` makes
them from measured steps, `controller` reads them row count by row count.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.decide.fields import Fields, check_ms
from slipstream.errors import ConfigError

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


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

    def ms_of_rows(self, rows: int) -> float:
        """One value of `curve`."""
        return float(self.curve(rows, 1)[0])

    def step_ms(self, given_np: Ints, kv_np: Ints, widths_np: Ints) -> float:
        """A step in which sequence i has given + width rows, each over kv tokens of context. All [B]."""
        rows_np = given_np + widths_np
        ms = self.ms_of_rows(int(np.add.reduce(rows_np)))
        if self.c2 or self.c3:
            ms += self.kv_ms(float(rows_np @ kv_np), float(np.add.reduce(kv_np)))
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
            check_ms(name, getattr(self, name))

    def curve(self, first: int, count: int) -> Floats:
        return self.c0 + self.c1 * np.arange(first, first + count, dtype=np.float64)

    def ms_of_rows(self, rows: int) -> float:
        return float(self.c0 + self.c1 * rows)

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
            check_ms(f"ms[{index}]", value)
        check_ms("c2", self.c2)
        check_ms("c3", self.c3)
        if self.staircase:
            dense = np.asarray(self.ms, dtype=np.float64)[_stairs(self.rows)]
        else:
            dense = np.interp(np.arange(self.rows[-1] + 1), self.rows, self.ms)
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

    def ms_of_rows(self, rows: int) -> float:
        return float(self._dense_np[rows] if 0 <= rows < len(self._dense_np) else self.curve(rows, 1)[0])

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
        contribution[self._entry(rows)] = self.ms_of_rows(rows)
        contribution[-1] = self.kv_ms(kv_rows, kv)
        return contribution

    def _entry(self, rows: int) -> int:
        """Index of the entry that prices `rows`: the step's stair, or the nearest entry."""
        if self.staircase:
            return min(bisect_left(self.rows, rows), len(self.rows) - 1)
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


@lru_cache(maxsize=4)
def _stairs(rows: tuple[int, ...]) -> Ints:
    """[rows[-1] + 1] the entry that every row count is padded up to; corrected tables share it with the fitted one."""
    stairs: Ints = np.searchsorted(rows, np.arange(rows[-1] + 1))
    stairs.flags.writeable = False
    return stairs


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
                check_ms(f"ms[{i}][{j}]", value)

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


def step_cost_from_dict(data: object, where: str) -> StepCost:
    """The inverse of `StepCost.to_dict`; `where` is what errors call it."""
    fields = Fields(data, where)
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
    fields = Fields(data, where)
    ms = [tuple(row) if isinstance(row, list) else (row,) for row in fields.list("ms")]
    try:
        return DraftTimes(tuple(fields.list("lengths")), tuple(fields.list("sequences")), tuple(ms))
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from error
