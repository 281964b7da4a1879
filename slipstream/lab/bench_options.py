"""What a bench compares: cases, and the options that they are made from. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.config import MODES, NO_EFFECT, SamplingParams, SpeculativeConfig
from slipstream.errors import ConfigError
from slipstream.lab.variants import LATE, check_width, is_variant
from slipstream.prompts import PromptSource, prompts_name

DEFAULT_REQUESTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table, before it is measured."""

    mode: str
    num_speculative_tokens: int | None  # S; None: the drafter's default, or mode off
    concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Acceptance out of a dense trace, in place of that of the models that are measured."""

    trace: Path
    sets: tuple[str, ...] = ()  # of the trace's prompts; none: all

    def __str__(self) -> str:
        return f"replayed from {self.trace}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    model: str = "smollm2-135m"
    draft: str | None = "smollm2-135m-dspark"
    modes: tuple[str, ...] = MODES
    num_speculative_tokens: tuple[int | None, ...] = (None,)  # None: the drafter's default
    concurrency: tuple[int, ...] = (1,)
    prompts: PromptSource = None
    replay: Replay | None = None  # then requests are answers of its trace, and there are no prompts to name
    requests: int | None = None  # per wave; None: 4, or as many as run at a time
    waves: int = 3
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=128))
    probe: bool = False  # record spans, for the figures of the critical path
    speculative: Mapping[str, Any] = field(default_factory=dict)  # further fields of SpeculativeConfig
    engine: Mapping[str, Any] = field(default_factory=dict)  # fields of EngineConfig

    def __post_init__(self) -> None:
        for name, values in (("concurrency", self.concurrency), ("waves", (self.waves,)), ("requests", (self.requests,)),
                           ("num_speculative_tokens", self.num_speculative_tokens)):  # fmt: skip
            for one in values:
                if one is not None and type(one) is not int:
                    raise ConfigError(f"{name} holds {one!r}; it must be a whole number")
        if self.draft is not None and not isinstance(self.draft, str):
            raise ConfigError(f"draft_model is {self.draft!r}; give a name or a path")
        for mode in self.modes:
            if mode not in MODES and not is_variant(mode):
                raise ConfigError(f"modes holds {mode!r}; choose among {', '.join(MODES)}, {LATE} and fixed:N")
        for name in ("modes", "num_speculative_tokens", "concurrency"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name} is {list(values)}; name at least one value, each once")
        for name, value in (("waves", self.waves), *(("concurrency", c) for c in self.concurrency)):
            if value < 1:
                raise ConfigError(f"{name} holds {value}; it must be 1 or more")
        if self.num_requests < max(self.concurrency):
            raise ConfigError(
                f"concurrency {max(self.concurrency)} with {self.num_requests} requests: there is never so much to do; "
                "raise requests or lower concurrency"
            )
        if self.draft is None and self.modes != ("off",):
            raise ConfigError("modes other than off need a drafter; name one with --draft")
        if self.replay is not None:
            self._check_replay()
        for name in self.speculative:
            if all(name in NO_EFFECT.get(mode, ()) for mode in self.modes):
                raise ConfigError(f"{name}: no effect in mode {', '.join(self.modes)}")
        for case in self.cases():
            self.speculative_config(case)  # refuses wrong values
            if case.num_speculative_tokens is not None:
                check_width(case.mode, case.num_speculative_tokens)

    def _check_replay(self) -> None:
        if self.modes == ("off",):
            raise ConfigError("acceptance: nothing is accepted in mode off; name another mode, or drop the trace")
        if self.prompts is not None or "acceptance" in self.speculative:
            raise ConfigError("a trace has its own prompts and acceptance; drop the prompts, or the trace")
        if self.sampling.temperature:
            raise ConfigError(
                f"temperature is {self.sampling.temperature:g}: replayed requests are greedy, whatever the trace was taken "
                "at; drop the option"
            )

    @property
    def acceptance(self) -> str:
        """The rule, or where acceptance comes from."""
        return str(self.replay or self.speculative.get("acceptance", "coupled"))

    @property
    def prompts_name(self) -> str:
        """What reports call the requests."""
        if self.replay is None:
            return prompts_name(self.prompts)
        return "+".join(self.replay.sets) or f"all of {self.replay.trace.stem}"

    def label(self, case: Case) -> str:
        """A case in a line of its own; what was replayed is said wherever a figure stands."""
        return label(case) + (f", acceptance {self.replay}" if self.replay else "")

    @property
    def num_requests(self) -> int:
        """Prompts per wave."""
        return max(DEFAULT_REQUESTS, *self.concurrency) if self.requests is None else self.requests

    def cases(self) -> list[Case]:
        """In the order in which they take turns: plain decoding once for each concurrency, first."""
        return [
            Case(mode=mode, num_speculative_tokens=drafts, concurrency=concurrency)
            for concurrency in self.concurrency
            for mode in sorted(self.modes, key=lambda mode: MODES.index(mode) if mode in MODES else len(MODES))
            for drafts in (self.num_speculative_tokens if mode != "off" else (None,))
        ]

    def speculative_config(self, case: Case) -> SpeculativeConfig:
        """The options that have an effect in the case's mode."""
        fields = {"draft_model": self.draft, "num_speculative_tokens": case.num_speculative_tokens, **self.speculative}
        return SpeculativeConfig.with_effect("lag" if is_variant(case.mode) else case.mode, **fields)


def label(case: Case) -> str:
    drafts = f" S={case.num_speculative_tokens}" if case.num_speculative_tokens else ""
    return f"{case.mode}{drafts} at {case.concurrency}"
