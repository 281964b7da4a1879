"""From measured target steps to prices: least relative errors, absolute ones, without negative coefficients.

Absolute errors and not squares, for steps of a shared machine have outliers, which may not move the price of ordinary
steps. Samples come from `slipstream profile` or from the start of an engine; nothing here takes a time itself. `cost`
chooses between the two fits and files them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipstream.decide.step_cost import LinearCost, StepCost, TableCost
from slipstream.errors import ConfigError

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

REWEIGHTED = 30  # rounds; the last ones change little
SMALL_ERROR = 0.01  # below it an error counts by its square: there it is noise


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
    """Least absolute relative errors. A column with a negative coefficient is taken out and the rest fitted again.

    A column that the samples cannot tell from earlier ones (all contexts alike) is left out as well, the later first.
    """
    columns = np.stack([np.ones_like(samples.rows_np), samples.rows_np, samples.kv_rows_np, samples.kv_np], axis=1)
    return LinearCost(*_fit_non_negative(columns, samples.ms_np).tolist())


def fit_table(samples: Samples, *, staircase: bool, edges: Sequence[int] = ()) -> TableCost:
    """The median time of each measured row count, after the KV terms, fitted within row counts, are taken off.

    `edges`, rising: the row counts that steps are padded up to. A step then counts for its padded rows, and an edge
    between measured ones that no step has reached gets a time by linear interpolation, so that a row count is never
    priced by a larger padding than its own. Steps beyond the last edge are not padded and count for their own rows.
    """
    padded = _pad(samples.rows_np.astype(np.int64), np.asarray(edges, dtype=np.int64))
    rows, group = np.unique(padded, return_inverse=True)
    dummies = np.eye(len(rows))[group]
    columns = np.concatenate([dummies, samples.kv_rows_np[:, None], samples.kv_np[:, None]], axis=1)
    c2, c3 = _fit_non_negative(columns, samples.ms_np)[-2:].tolist()
    rest = samples.ms_np - c2 * samples.kv_rows_np - c3 * samples.kv_np
    ms = [max(float(np.median(rest[group == g])), 0.0) for g in range(len(rows))]
    between = [edge for edge in edges if rows[0] < edge < rows[-1]]
    entries = np.union1d(rows, np.asarray(between, dtype=np.int64))
    return TableCost(
        tuple(entries.tolist()), tuple(np.interp(entries, rows, ms).tolist()), staircase=staircase, c2=c2, c3=c3
    )


def _pad(rows_np: Ints, edges_np: Ints) -> Ints:
    """Every row count up to the next edge; beyond the last it stays."""
    if not len(edges_np):
        return rows_np
    if (np.diff(edges_np) <= 0).any() or edges_np[0] < 1:
        raise ConfigError(f"edges is {edges_np.tolist()}; row counts that steps are padded to must rise from 1")
    index = np.searchsorted(edges_np, rows_np)
    return np.where(index < len(edges_np), edges_np[np.minimum(index, len(edges_np) - 1)], rows_np)


def fit_error(cost: StepCost, samples: Samples) -> float:
    """Mean relative error |predicted - measured| / measured."""
    predicted = np.array([float(cost.curve(int(r), 1)[0]) for r in samples.rows_np])
    predicted += cost.c2 * samples.kv_rows_np + cost.c3 * samples.kv_np
    return float(np.mean(np.abs(predicted - samples.ms_np) / samples.ms_np))


def _fit_non_negative(columns: Floats, ms_np: Floats) -> Floats:
    """[columns] coefficients from 0; those left out are 0. Squares with weights that turn them into absolute values."""
    relative = columns / ms_np[:, None]
    weight_np = np.ones_like(ms_np)
    for _ in range(REWEIGHTED):
        coefficients = _weighted(relative, weight_np)
        weight_np = 1 / np.sqrt(np.maximum(np.abs(relative @ coefficients - 1), SMALL_ERROR))
    return coefficients


def _weighted(relative: Floats, weight_np: Floats) -> Floats:
    """Least squares of what is missing to 1 in every row."""
    weighted = relative * weight_np[:, None]
    norms = np.linalg.norm(weighted, axis=0)
    active = _independent(weighted, norms)
    while True:
        scaled = weighted[:, active] / norms[active]
        solution = np.linalg.lstsq(scaled, weight_np, rcond=None)[0] / norms[active]
        if not len(active) or solution.min() >= 0:
            break
        active = np.delete(active, int(np.argmin(solution * norms[active])))
    coefficients = np.zeros(relative.shape[1])
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
