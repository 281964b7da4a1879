"""What `slipstream verify-exact` is asked for. Torch-free, so that wrong options are refused before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from slipstream.config import MODES, Acceptance, SamplingParams, SpeculativeConfig
from slipstream.errors import ConfigError

RANDOM = "random"  # widths drawn at random: it prunes whatever the drafter is worth
EXACT_MODES = (*(mode for mode in MODES if mode != "off"), RANDOM)
RULES: tuple[str, ...] = get_args(Acceptance)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactOptions:
    model: str = "smollm2-135m"
    draft: str = "smollm2-135m-dspark"
    modes: tuple[str, ...] = EXACT_MODES
    rules: tuple[str, ...] = RULES  # of acceptance
    prompts: Path | None = None  # None: the package's sample
    requests: int = 8  # prompts whose texts are compared
    samples: int | None = None  # answers per mode whose law is tested; None: 4,000 on a GPU, 400 on a CPU
    positions: tuple[int, ...] = (1, 2, 5, 10)  # tokens of an answer, from 1, whose law is tested
    concurrency: int = 8
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0, max_tokens=48, seed=0))
    speculative: Mapping[str, Any] = field(default_factory=dict)  # further fields of SpeculativeConfig
    engine: Mapping[str, Any] = field(default_factory=lambda: {"dtype": "float32"})  # fields of EngineConfig

    def __post_init__(self) -> None:
        for name in ("requests", "samples", "concurrency"):
            value = getattr(self, name)
            if not (value is None and name == "samples") and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number from 1")
        for name, values, allowed in (("modes", self.modes, EXACT_MODES), ("acceptance", self.rules, RULES)):
            for value in values:
                if value not in allowed:
                    raise ConfigError(f"{name} holds {value!r}; choose among {', '.join(allowed)}")
        for position in self.positions:
            if type(position) is not int or position < 1:
                raise ConfigError(f"positions holds {position!r}; tokens of an answer are counted from 1")
        named: dict[str, tuple[Any, ...]] = {"modes": self.modes, "acceptance": self.rules, "positions": self.positions}
        for name, items in named.items():
            if not items or len(set(items)) < len(items):
                raise ConfigError(f"{name} is {list(items)}; name at least one, each once")
        if self.sampling.temperature == 0:
            raise ConfigError(
                "temperature is 0: greedy decoding is checked beside it in any case; give one above 0 for what is sampled"
            )
        if not 0 <= self.seed < 1 << 62:
            raise ConfigError(f"seed is {self.seed}; samples count on from it: give one from 0, below 2^62")
        if self.speculative.get("cost_model") == "none":
            raise ConfigError("cost_model is 'none', and then no draft is pruned; use auto, or a file")
        for mode in self.modes:
            self.config_of(mode, self.rules[0])  # refuses wrong values

    @property
    def seed(self) -> int:
        return self.sampling.seed or 0

    def config_of(self, mode: str, rule: str) -> SpeculativeConfig:
        """The options that have an effect in a mode. Random widths are a policy of their own, in mode static."""
        fields = {"draft_model": self.draft, **self.speculative, "acceptance": rule}
        return SpeculativeConfig.with_effect("static" if mode == RANDOM else mode, **fields)
