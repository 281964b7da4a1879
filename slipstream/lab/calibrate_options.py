"""What `slipstream calibrate` is asked for. Torch-free, so that wrong options are refused before anything is loaded."""

from dataclasses import dataclass
from pathlib import Path

from slipstream.config import NGRAM, SIGNALS, EngineConfig, SamplingParams, Signal, SpeculativeConfig
from slipstream.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    draft: str
    model: str = "smollm2-135m"
    prompts: tuple[Path, ...] = ()  # none: the package's own sample, which no evaluation uses
    limit: int | None = None  # prompts of each file, its first ones; None: all
    temperature: tuple[float, ...] = (0.0, 1.0)  # of serving: 0 for greedy requests, one above 0 for sampled ones
    top_p: float = 1.0
    signals: tuple[Signal, ...] = ()  # none: all that the drafter has
    num_speculative_tokens: int | None = None  # S of the fit; None: all that the drafter drafts
    acceptance: str = "coupled"
    draft_layout: str = "auto"  # how the drafter's rows are read
    concurrency: int = 8
    max_tokens: int = 256
    output: Path | None = None  # None: calibration.json in the drafter's folder
    plot: Path | None = None
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        above = [value for value in self.temperature if value]
        if len(above) > 1:
            raise ConfigError(
                f"temperature names {' and '.join(f'{value:g}' for value in above)}, and the file has one entry for all "
                "sampled requests: calibrate for the one that is served, or write two files with output"
            )
        if not self.temperature or len(set(self.temperature)) < len(self.temperature):
            raise ConfigError(f"temperature is {list(self.temperature)}; name 0, one value above 0, or both")
        for signal in self.signals:
            if signal not in SIGNALS:
                raise ConfigError(f"signals holds {signal!r}; choose among head, peak and drawn")
        if self.draft == NGRAM and set(self.signals) - {"head"}:
            raise ConfigError("signals: ngram has its running acceptance and no other confidence; use head")
        for name in ("concurrency", "limit"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be a whole number from 1")
        if self.draft == NGRAM and self.output is None:
            raise ConfigError("output: ngram has no folder to keep a calibration in; name a file")
        for temperature in self.temperature:
            self.params(temperature)  # refuses wrong values
        self.speculative()
        EngineConfig(dtype=self.dtype, device=self.device)

    def params(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature=temperature, top_p=self.top_p, max_tokens=self.max_tokens)

    def speculative(self, num_drafts: int | None = None) -> SpeculativeConfig:
        """Full width with S drafts."""
        return SpeculativeConfig.for_mode(
            "static",
            draft_model=self.draft,
            num_speculative_tokens=num_drafts or self.num_speculative_tokens,
            acceptance=self.acceptance,
            draft_layout=self.draft_layout,
        )
