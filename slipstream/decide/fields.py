"""Typed reads from a JSON object, for the files and records that decisions are kept in.

A field that is missing or of the wrong kind is a ConfigError that names it by its full path. What the values mean is
not known here; `step_cost` and `cost` read cost models with it.
"""

import sys
from typing import Any

from slipstream.errors import ConfigError


class Fields:
    """The fields of one object; `where` is what errors call it."""

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, dict):
            raise ConfigError(f"{where or 'top level'} must be an object, found {type(data).__name__}")
        self.data: dict[str, Any] = data
        self._prefix = f"{where}." if where else ""

    def get(self, name: str) -> Any:
        if name not in self.data:
            raise ConfigError(f"{self._prefix}{name} is missing")
        return self.data[name]

    def sub(self, name: str) -> "Fields":
        return Fields(self.get(name), f"{self._prefix}{name}")

    def number(self, name: str) -> float:
        value = self.get(name)
        check_ms(f"{self._prefix}{name}", value)
        return float(value)

    def integer(self, name: str) -> int:
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{self._prefix}{name} is {value!r}; it must be a whole number")
        return value

    def boolean(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise ConfigError(f"{self._prefix}{name} is {value!r}; it must be true or false")
        return value

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise ConfigError(f"{self._prefix}{name} is {value!r}; it must be a string")
        return value

    def list(self, name: str) -> "list[Any]":
        value = self.get(name)
        if not isinstance(value, list):
            raise ConfigError(f"{self._prefix}{name} is {value!r}; it must be a list")
        return value

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self.get(name)
        if value not in allowed:
            raise ConfigError(f"{self._prefix}{name} is {value!r}; choose one of {', '.join(allowed)}")
        return str(value)


def check_ms(name: str, value: object) -> None:
    """A time or a coefficient: a finite number from 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
        raise ConfigError(f"{name} is {value!r}; it must be a finite number from 0")
