"""What a simulation replays: trace, prices, policies and loads, checked before anything runs. Torch-free."""

import math
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import SIGNALS
from slipstream.errors import ConfigError

WAITS = ("nothing", "lagged", "fresh")  # what a decision may wait for, see `Policy.waits_for`
DEFAULT_POLICIES = ("off", "static", "adaptive", "lag", "lag-budget", "oracle")
REQUESTS_AT_ONCE = 4  # requests of a wave, for each that runs at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How requests come: so many at a time, and, with `arrivals`, not before they arrive."""

    concurrency: int
    arrivals: float | None  # requests/s; None: all are there from the start

    def __str__(self) -> str:
        return f"at {self.concurrency}" + ("" if self.arrivals is None else f", {self.arrivals:g} requests/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    trace: Path  # made by `slipstream trace`
    profile: Path  # made by `slipstream profile`: what steps take, and what policies think they take
    policies: tuple[str, ...] = DEFAULT_POLICIES  # see `simulate_policies.contestants`
    signals: tuple[str, ...] = ()  # none: every one that the trace has
    num_speculative_tokens: tuple[int, ...] = ()  # S; none: all that the trace drafts
    sets: tuple[str, ...] = ()  # of prompts; none: all
    concurrency: tuple[int, ...] = (1, 8, 32)
    arrivals: tuple[float, ...] = ()  # requests/s, drawn by a Poisson process; none: all are there from the start
    requests: int | None = (
        None  # per wave: answers of the trace, its sets in turn, again and again; None: 4 x concurrency
    )
    max_tokens: int | None = None  # answers are cut there; None: as they were traced
    waves: int = 3  # passes of one engine, which goes on learning; a speed is their median
    min_gain: float = 0.0  # of adaptive and lag
    calibration: str = "auto"  # auto (beside the drafter that the trace names), none or a file
    exposed_us: str = "0"  # per step: "70" for policies that wait for fresh confidence, or fresh=70,lagged=1,nothing=0
    prefill: bool = True  # prompts take their share of the time; else only their place in the steps
    seed: int | None = None  # of arrivals; where it is given, answers are shuffled by it too

    def __post_init__(self) -> None:
        for name in ("policies", "concurrency"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty; name at least one")
        for name in ("policies", "signals", "num_speculative_tokens", "sets", "concurrency", "arrivals"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ConfigError(f"{name} is {list(values)}; name each value once")
        for name, values in (("concurrency", self.concurrency), ("num_speculative_tokens", self.num_speculative_tokens),
                             ("waves", (self.waves,)), ("requests", (self.requests,)),
                             ("max_tokens", (self.max_tokens,))):  # fmt: skip
            for value in values:
                if value is not None and value < 1:
                    raise ConfigError(f"{name} holds {value}; it must be a whole number from 1")
        for signal in self.signals:
            if signal not in SIGNALS:
                raise ConfigError(f"signals holds {signal!r}; choose among {', '.join(SIGNALS)}")
        for rate in self.arrivals:
            if not 0 < rate < math.inf:
                raise ConfigError(f"arrivals holds {rate}; it must be a number of requests a second, above 0")
        if not 0 <= self.min_gain < math.inf:
            raise ConfigError(f"min_gain is {self.min_gain}; it must be a finite number from 0")
        self.exposed()  # refuses wrong values

    def loads(self) -> list[Load]:
        rates: tuple[float | None, ...] = self.arrivals or (None,)
        return [Load(concurrency=count, arrivals=rate) for count in self.concurrency for rate in rates]

    def num_requests(self, load: Load) -> int:
        """Of a wave."""
        return self.requests or REQUESTS_AT_ONCE * load.concurrency

    def exposed(self) -> dict[str, float]:
        """Milliseconds a step of the host that no device work hides, by what decisions wait for."""
        found = dict.fromkeys(WAITS, 0.0)
        for part in self.exposed_us.split(","):
            name, _, text = part.strip().rpartition("=")
            kind = name or "fresh"
            try:
                us = float(text)
            except ValueError:
                us = math.nan
            if kind not in found or not 0 <= us < math.inf:
                raise ConfigError(
                    f"exposed_us is {self.exposed_us!r}; give microseconds, or {'=0,'.join(found)}=0 with yours"
                )
            found[kind] = us / 1e3
        return found
