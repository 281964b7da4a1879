"""What `slipstream trace` is asked for. Torch-free, so that wrong options are refused before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.config import NGRAM, SamplingParams, SpeculativeConfig
from slipstream.errors import ConfigError
from slipstream.prompts import prompts_name

SUFFIX = ".npz"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    out: Path
    model: str = "smollm2-135m"
    draft: str = "smollm2-135m-dspark"
    prompts: tuple[Path, ...] = ()  # each file is a set, called by its stem; none: the package's sample
    requests: int | None = None  # prompts of each set, its first ones; None: all
    num_speculative_tokens: int | None = None  # S; None: all that the drafter drafts
    concurrency: int = 8
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=256))
    speculative: Mapping[str, Any] = field(default_factory=dict)  # further fields of SpeculativeConfig
    engine: Mapping[str, Any] = field(default_factory=dict)  # fields of EngineConfig

    def __post_init__(self) -> None:
        for name in ("concurrency", "requests"):
            value = getattr(self, name)
            if not (value is None and name == "requests") and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number from 1")
        if self.out.suffix != SUFFIX:
            raise ConfigError(f"out is {str(self.out)!r}; a trace is an {SUFFIX} file, give it that suffix")
        if self.draft == NGRAM:
            raise ConfigError(
                "draft: ngram learns its confidence from drafts that were verified, and a trace verifies none; name a "
                "drafter with weights"
            )
        if len(set(self.set_names)) < len(self.set_names):
            raise ConfigError(f"prompts is {', '.join(self.set_names)}; name each set once")
        if self.speculative_config(self.num_speculative_tokens).acceptance != "coupled":
            raise ConfigError(
                "acceptance: under rejection it is not the draft alone that says whether it is accepted, so a trace is "
                "of coupled acceptance only"
            )

    @property
    def sets(self) -> tuple[Path | None, ...]:
        """Prompt files; None is the package's sample."""
        return self.prompts or (None,)

    @property
    def set_names(self) -> tuple[str, ...]:
        return tuple(prompts_name(path) for path in self.sets)

    def speculative_config(self, num_drafts: int | None) -> SpeculativeConfig:
        return SpeculativeConfig.for_mode(
            "static", draft_model=self.draft, num_speculative_tokens=num_drafts, **self.speculative
        )
