"""Policies that are there to be compared with: lag decided late, and fixed widths.

Lag decided late has the widths of mode lag and the wait of mode adaptive, so that what lies between it and lag is overlap,
and what lies between it and adaptive is what the widths are worth. Fixed widths draft S and verify the first N of them: a
sweep of them says what deciding for each sequence is worth. Called by benches and simulations; no engine makes one.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from slipstream.config import Signal
from slipstream.decide.policy import Float32s, FullWidth, Policy, WaitsFor
from slipstream.errors import ConfigError
from slipstream.plan import Decision, DraftReport, StepPlan, StepResult

LATE = "lag-late"
_FIXED = re.compile(r"fixed:(0|[1-9]\d{0,3})")


def is_variant(mode: str) -> bool:
    """Whether `variant` knows it: lag-late or fixed:N."""
    return mode == LATE or _FIXED.fullmatch(mode) is not None


def check_width(mode: str, num_drafts: int) -> None:
    """ConfigError where more are to be verified than are drafted."""
    found = _FIXED.fullmatch(mode)
    if found is not None and int(found[1]) > num_drafts:
        raise ConfigError(f"modes holds {mode!r}, and {num_drafts} tokens are drafted; lower it")


def variant(mode: str, lag: Policy, num_drafts: int) -> Policy:
    """For an engine in mode lag with this policy. ConfigError as `check_width`."""
    check_width(mode, num_drafts)
    if mode == LATE:
        return Late(copy.deepcopy(lag))
    found = _FIXED.fullmatch(mode)
    assert found is not None, mode
    return FixedWidth(num_drafts, int(found[1]), lag.signal)


class FixedWidth(FullWidth):
    """Drafts S and verifies the first so many of them."""

    def __init__(self, num_drafts: int, width: int, signal: Signal | Literal["none"] = "none") -> None:
        super().__init__(num_drafts, signal)
        self._width = np.int32(width)

    def decide(self, plan: StepPlan) -> Decision:
        full = super().decide(plan)
        return replace(full, widths_np=np.minimum(full.caps_np, self._width))


class Late:
    """A policy that decides by the last step's confidence, asked as late as one that needs this step's."""

    waits_for: WaitsFor = "fresh"

    def __init__(self, lagged: Policy) -> None:
        if lagged.waits_for != "lagged":
            raise ConfigError("only a policy that decides from the last step's confidence can be asked late")
        self._lagged = lagged
        # Kept from the policy until it would have heard of them in mode lag.
        self._unseen: tuple[StepPlan, DraftReport] | None = None
        self._unheard: list[Callable[[], None]] = []
        self.signal: Signal = lagged.signal  # type: ignore[assignment]  # a policy that waits has one

    @property
    def calibration_np(self) -> Float32s:
        return self._lagged.calibration_np

    def draft_length(self, plan: StepPlan) -> int:
        self._hear()
        if self._unseen is not None:
            self._lagged.observe(*self._unseen)
            self._unseen = None
        return self._lagged.draft_length(plan)

    def observe(self, plan: StepPlan, report: DraftReport) -> None:
        self._unseen = plan, report

    def decide(self, plan: StepPlan) -> Decision:
        decision = self._lagged.decide(plan)
        self._hear()
        return decision

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        """The engine collects the step before ahead of a decision that waits, and in mode lag behind it."""
        self._unheard.append(partial(self._lagged.learn, plan, result))

    def times(self, plan: StepPlan) -> bool:
        return self._lagged.times(plan)

    def timed(self, plan: StepPlan, decision: Decision, measured_ms: float) -> None:
        self._unheard.append(partial(self._lagged.timed, plan, decision, measured_ms))

    def _hear(self) -> None:
        for call in self._unheard:
            call()
        self._unheard.clear()
