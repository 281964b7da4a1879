"""Options of the server, as a value that checks itself. Needs nothing but the package: a command reads it at once."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from slipstream.config import MODES
from slipstream.errors import ConfigError

OnEngineError = Literal["restart", "exit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free, said in the log
    served_name: str | None = None  # what requests call the model; None: as it was named at start
    also: tuple[str, ...] = ()  # modes besides the server's own: an engine each over the same weights
    max_waiting: int = 256  # answers of a mode that may wait for a slot; beyond them requests are answered 429
    request_timeout_s: float = 600.0  # from the arrival of a request to the end of its answer
    stream_interval_s: float = 0.02  # what several short steps gained is one event of a stream; 0: an event a step
    max_backlog: int = 1024  # steps whose tokens a client has not taken; beyond them its request is ended
    max_body_bytes: int = 4 << 20
    body_timeout_s: float = 30.0  # for the body of a request to arrive
    stall_s: float = 120.0  # a step that takes longer is taken for one that never ends: /health turns red
    grace_s: float = 30.0  # for requests in flight after SIGTERM
    on_engine_error: OnEngineError = "restart"
    engine_process: bool = True  # the engines have a process of their own, not threads of the server's
    # File with one key a line (empty lines and # comments left out), all of which may use the API. None: anybody may.
    api_keys: Path | None = None
    keys: tuple[str, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        if self.on_engine_error not in get_args(OnEngineError):
            raise ConfigError(f"on_engine_error is {self.on_engine_error!r}; choose one of restart, exit")
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port is {self.port!r}; it must lie in [0, 65535], 0 takes any that is free")
        if not self.host or self.served_name == "":
            raise ConfigError("host and served_name must not be empty")
        for mode in self.also:
            if mode not in MODES:
                raise ConfigError(f"also holds {mode!r}; choose among {', '.join(MODES)}")
        if len(set(self.also)) < len(self.also):
            raise ConfigError(f"also is {', '.join(self.also)}; name every mode once")
        for name, least in (("max_waiting", 0), ("max_backlog", 1), ("max_body_bytes", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be a whole number from {least}")
        for name in ("request_timeout_s", "body_timeout_s", "stall_s", "grace_s", "stream_interval_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be a finite number of seconds")
        for name in ("request_timeout_s", "body_timeout_s", "stall_s"):
            if getattr(self, name) == 0:
                raise ConfigError(f"{name} is 0, which nothing could meet; give some seconds")
        object.__setattr__(self, "keys", () if self.api_keys is None else _read_keys(self.api_keys))


def _read_keys(path: Path) -> tuple[str, ...]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"api_keys: {path} cannot be read: {error}") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"api_keys: {path} holds no key; write one a line, or drop the option to let anybody in")
    return keys
