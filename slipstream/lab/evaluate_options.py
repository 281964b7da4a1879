"""What `slipstream evaluate` is asked for. Torch-free, so that wrong options are refused before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.config import NGRAM, SamplingParams, SpeculativeConfig
from slipstream.errors import ConfigError
from slipstream.prompts import prompts_name

OFF = "off"  # plain decoding, among the baselines
BASELINES = (OFF, NGRAM)


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
