"""What a run is held against: one line for each figure that issue and README name, with the limit and whether it holds."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Table

from slipstream.lab.tables import new_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    what: str
    value: float | None  # None: it could not be measured
    sign: Literal["<=", ">=", ""]  # "": reported, held against nothing
    limit: float | None = None

    @property
    def holds(self) -> bool | None:
        if self.value is None or self.limit is None:
            return None
        return self.value <= self.limit if self.sign == "<=" else self.value >= self.limit

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


Report = tuple[dict[str, Any], list[Goal]]  # what a phase gives: its part of the JSON, and its goals


def at_most(what: str, value: float | None, limit: float) -> Goal:
    return Goal(what=what, value=value, sign="<=", limit=limit)


def at_least(what: str, value: float | None, limit: float) -> Goal:
    return Goal(what=what, value=value, sign=">=", limit=limit)


def reported(what: str, value: float | None) -> Goal:
    return Goal(what=what, value=value, sign="")


def ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def goals_table(goals: Iterable[Goal]) -> Table:
    table = new_table("goals", ("figure", "measured", "goal", ""), ["figure"])
    for goal in goals:
        limit = f"{goal.sign} {goal.limit:g}" if goal.limit is not None else ""
        verdict = {True: "ok", False: "NOT MET", None: "" if goal.limit is None else "not measured"}[goal.holds]
        table.add_row(goal.what, "-" if goal.value is None else _short(goal.value), limit, verdict)
    return table


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
