"""Faults put into an engine's stages: armed one at a time, raised by the next call of the stage. Called by `chaos`."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from slipstream.engine import Engine


class InjectedFault(Exception):
    def __init__(self, stage: str) -> None:
        super().__init__(f"injected into {stage}")


class Faults:
    def __init__(self, engine: Engine) -> None:
        """Stages that are replayed on a device are never called there, and raise nothing."""
        self.raised: Counter[str] = Counter()
        self._armed: str | None = None
        parts: dict[str, Any] = {
            "schedule": engine.scheduler, "load": engine.backend, "layout": engine.backend, "fill": engine.backend,
            "apply": engine.backend, "verify": engine.target, "accept_stages": engine, "collect": engine,
            "launch_verify": engine, "decide": engine.policy, "learn": engine.policy, "observe": engine.policy,
            "start": engine._exporter,
        }  # fmt: skip
        if engine.drafter is not None:
            parts |= {"propose": engine.drafter, "absorb": engine.drafter}
        self._stages = sorted(parts)
        for stage, part in parts.items():
            setattr(part, stage, self._wrapped(stage, getattr(part, stage)))

    def arm(self, rng: random.Random) -> None:
        self._armed = rng.choice([*self._stages, "no memory"])

    def _wrapped(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if self._armed == stage:
                self._raise(stage, InjectedFault(stage))
            if self._armed == "no memory" and stage == "verify":
                self._raise("no memory", torch.OutOfMemoryError("injected: out of memory"))
            return function(*given, **named)

        return call

    def _raise(self, stage: str, error: Exception) -> None:
        self._armed = None
        self.raised[stage] += 1
        raise error
