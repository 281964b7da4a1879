"""Decisions with all their inputs, as JSON lines that can be decided again.

`decide` asks the controller and keeps what it was asked; `replay` does so once more, elsewhere or under another cost.
Called by `policy`; knows nothing of where a problem comes from.
"""

import json
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from slipstream.decide.controller import Candidates, Ints, Problem, Rule, decide_budget, decide_widths
from slipstream.decide.cost import StepCost, step_cost_from_dict
from slipstream.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecisionRecord:
    """A decision with all its inputs. As JSON it is one line, and floats survive the way there and back."""

    step: int
    problem: Problem
    widths_np: Ints | None  # [B]; exactly one of widths and budget is set
    budget: int | None

    def to_json(self) -> str:
        p = self.problem
        return json.dumps(
            {
                "step": self.step,
                "rule": p.rule,
                "survival": p.survival_np.tolist(),
                "unknown": p.unknown_np.tolist(),
                "caps": p.caps_np.tolist(),
                "kv": p.kv_np.tolist(),
                "given": p.given_np.tolist(),
                "num_emitting": p.num_emitting,
                "cost": p.cost.to_dict(),
                "draft_ms": p.draft_ms,
                "min_gain": p.min_gain,
                "widths": None if self.widths_np is None else self.widths_np.tolist(),
                "budget": self.budget,
            }
        )

    @classmethod
    def from_json(cls, line: str) -> "DecisionRecord":
        try:
            fields = json.loads(line)
            problem = _problem_from(fields)
            widths = fields["widths"]
            return cls(
                step=int(fields["step"]),
                problem=problem,
                widths_np=None if widths is None else np.asarray(widths, dtype=np.int64),
                budget=fields["budget"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"decision record: {type(error).__name__}: {error}; expected a line of a decision log"
            ) from error


def _problem_from(fields: dict[str, Any]) -> Problem:
    rule = fields["rule"]
    if rule not in get_args(Rule):
        raise ValueError(f"rule is {rule!r}")
    caps = np.asarray(fields["caps"], dtype=np.int64)
    return Problem(
        rule=rule,
        survival_np=np.asarray(fields["survival"], dtype=np.float64).reshape(len(caps), -1),
        unknown_np=np.asarray(fields["unknown"], dtype=np.bool_),
        caps_np=caps,
        kv_np=np.asarray(fields["kv"], dtype=np.int64),
        given_np=np.asarray(fields["given"], dtype=np.int64),
        num_emitting=fields["num_emitting"] + 0,
        cost=step_cost_from_dict(fields["cost"], "cost"),
        draft_ms=float(fields["draft_ms"]),
        min_gain=float(fields["min_gain"]),
    )


def decide(step: int, problem: Problem, order: Candidates | None = None) -> DecisionRecord:
    """The decision for `problem`, with its inputs kept.

    `order` saves the sorting, if the caller has it: rank_candidates(problem.survival_np, problem.caps_np).
    """
    if problem.rule == "budget":
        return DecisionRecord(step=step, problem=problem, widths_np=None, budget=decide_budget(problem, order))
    return DecisionRecord(step=step, problem=problem, widths_np=decide_widths(problem, order), budget=None)


def replay(record: DecisionRecord, cost: StepCost | None = None) -> DecisionRecord:
    """The same problem decided again; with `cost`, what another machine would have decided."""
    problem = record.problem if cost is None else replace(record.problem, cost=cost)
    return decide(record.step, problem)
