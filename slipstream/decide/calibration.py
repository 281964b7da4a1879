"""The calibration file of a drafter: temperatures per position, for each signal and class of requests.

Measured by `slipstream calibrate`; what a survival model begins with. Called by `make`, exports and the lab.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.config import CALIBRATION_FILE, SIGNALS
from slipstream.decide.survival import CLASSES
from slipstream.errors import ConfigError
from slipstream.files import replace_text
from slipstream.models.folder import bounded_text, member, parse_json

Floats: TypeAlias = NDArray[np.float64]

MAX_TEMPERATURE = sys.float_info.max


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Temperatures per position by (signal, class), as the calibration file of a drafter holds them."""

    temperatures: dict[tuple[str, str], tuple[float, ...]]  # (head | peak | drawn, greedy | sampled) -> T_1, T_2, ...
    # For readers, by the same keys: data, conditions, errors before and after. Must be JSON; nothing is decided by it.
    about: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    # By the same keys: digest of the drafter's weights that were measured. Older files and n-gram look-up have none.
    weights: dict[tuple[str, str], str] = field(default_factory=dict)

    def scale_np(self, signal: str, num_drafts: int) -> Floats:
        """[2, S] 1 / T. Positions beyond the file take its last value, classes that it lacks stay as they are."""
        scale = np.ones((2, num_drafts))
        for label, name in enumerate(CLASSES):
            values = self.temperatures.get((signal, name))
            if values:
                known = np.asarray(values[:num_drafts])
                scale[label] = 1 / np.concatenate([known, np.full(num_drafts - len(known), known[-1])])
        return scale

    def covers(self, signal: str) -> bool:
        return any((signal, name) in self.temperatures for name in CLASSES)

    def of_other_weights(self, weights: str | None) -> list[tuple[str, str]]:
        """Entries that were measured on other weights than those of this digest. None: there is nothing to compare."""
        return [key for key, measured in self.weights.items() if weights is not None and measured != weights]

    def save(self, path: Path) -> None:
        signals: dict[str, dict[str, dict[str, Any]]] = {}
        for (signal, name), values in self.temperatures.items():
            about = self.about.get((signal, name), {})
            weights = self.weights.get((signal, name))
            measured_on = {} if weights is None else {"weights": weights}
            signals.setdefault(signal, {})[name] = {"temperatures": list(values), **measured_on, **about}
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps({"version": 1, "signals": signals}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Calibration":
        """Reads {"version": 1, "signals": {"head": {"greedy": {"temperatures": [...], ...}, "sampled": ...}, ...}}.

        Keys beside `temperatures` (data set, errors before and after) are kept in `about`. ConfigError names the field.
        """
        try:
            text = bounded_text(path)
            data = parse_json(text, len(text))
        except (OSError, ValueError) as error:
            raise ConfigError(f"calibration {path}: {error}") from error
        where = f"calibration {path}"
        if not isinstance(data, dict) or data.get("version") != 1:
            raise ConfigError(f"{where}: version must be 1")
        temperatures: dict[tuple[str, str], tuple[float, ...]] = {}
        about: dict[tuple[str, str], dict[str, Any]] = {}
        weights: dict[tuple[str, str], str] = {}
        for signal, classes in _object(data.get("signals"), f"{where}: signals").items():
            if signal not in SIGNALS:
                raise ConfigError(f"{where}: signals.{signal} is not a signal; use {', '.join(SIGNALS)}")
            for name, entry in _object(classes, f"{where}: signals.{signal}").items():
                if name not in CLASSES:
                    raise ConfigError(f"{where}: signals.{signal}.{name} is not a class; use greedy or sampled")
                where_entry = f"{where}: signals.{signal}.{name}"
                entry = _object(entry, where_entry)
                temperatures[signal, name] = _temperatures(entry.get("temperatures"), f"{where_entry}.temperatures")
                if "weights" in entry:
                    weights[signal, name] = _digest(entry["weights"], f"{where_entry}.weights")
                if beside := {key: value for key, value in entry.items() if key not in ("temperatures", "weights")}:
                    about[signal, name] = beside
        return cls(temperatures=temperatures, about=about, weights=weights)


def find_calibration(named: str | Path | None, folder: Path | None) -> Path | None:
    """The file that the user names, whether it is there or not; else the one in the drafter's folder, if there is one."""
    if named is not None:
        return Path(named)
    path = folder and member(folder, CALIBRATION_FILE)
    return path if path and path.is_file() else None


def _object(value: object, field: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{field} must be an object, found {type(value).__name__}")
    return value


def _digest(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{field} is {value!r}; it must be a text, the digest of a drafter's weights")
    return value


def _temperatures(values: object, field: str) -> tuple[float, ...]:
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{field} must be a list of numbers, one per position")
    for index, value in enumerate(values):
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= MAX_TEMPERATURE
        if not ok:  # a number that no float holds is compared, not converted
            raise ConfigError(f"{field}[{index}] is {value!r}; it must be a finite number above 0")
    return tuple(float(v) for v in values)
