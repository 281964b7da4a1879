"""Options of a command, from flags and a config file: a flag over the file, the file over the defaults.

A file (JSON or TOML) is flat; its keys are the fields of SpeculativeConfig, EngineConfig and SamplingParams, plus
`model`, `verify` and what the command adds. Unknown keys are errors. Torch-free; called by the command line only.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from slipstream.config import EngineConfig, SamplingParams, SpeculativeConfig, from_mapping, read_config_file
from slipstream.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
MODE_FLAGS = frozenset({"enable_adaptive_speculative_decode", "enable_lag_confidence", "confidence_allocation"})


def field_names(cls: type) -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(cls))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for, by whom it is for. Values are checked by the classes that they are fields of."""

    model: str | None
    verify: str | None  # a mode by name; None: the mode that the fields of `speculative` say
    speculative: Mapping[str, Any]
    engine: Mapping[str, Any]
    sampling: Mapping[str, Any]
    command: Mapping[str, Any]  # what belongs to the command alone

    def speculative_config(self) -> SpeculativeConfig:
        """The mode named by `verify`, with the other fields; what has no effect in that mode is refused."""
        if self.verify is None:
            return from_mapping(SpeculativeConfig, dict(self.speculative))
        if self.verify == "off":
            idle = sorted(set(self.speculative) - {"draft_model"})
            if idle:
                raise ConfigError(
                    f"{', '.join(idle)}: no effect with verify off; drop the option or choose another mode"
                )
        elif not self.speculative.get("draft_model"):
            raise ConfigError(f"verify {self.verify!r} needs a drafter; name one with --draft, or use --verify off")
        return SpeculativeConfig.for_mode(self.verify, **self.speculative)

    def engine_config(self) -> EngineConfig:
        return from_mapping(EngineConfig, dict(self.engine))

    def sampling_params(self) -> SamplingParams:
        return from_mapping(SamplingParams, dict(self.sampling))


def gather(flags: Mapping[str, Any], config: Path | None, own: frozenset[str] = frozenset()) -> Options:
    """Options from `flags` (None: not given) and the file. `own` are the names that the command adds."""
    from_file, given = merge({}, config), merge(flags, None)
    if "verify" in from_file and MODE_FLAGS & from_file.keys():
        both = ", ".join(sorted(MODE_FLAGS & from_file.keys()))
        raise ConfigError(f"config file {config}: verify and {both} both say the mode; keep one of them")
    if "verify" in given:
        from_file = {name: value for name, value in from_file.items() if name not in MODE_FLAGS}
    merged = {**from_file, **given}
    parts = {cls: field_names(cls) for cls in (SpeculativeConfig, EngineConfig, SamplingParams)}
    _refuse_unknown(merged, frozenset({"model", "verify"}) | own | frozenset().union(*parts.values()))

    for name in ("model", "verify"):
        if name in merged and (not isinstance(merged[name], str) or not merged[name]):
            raise ConfigError(f"{name} is {merged[name]!r}; give a name" + (" or a path" if name == "model" else ""))

    def pick(names: frozenset[str]) -> dict[str, Any]:
        return {name: value for name, value in merged.items() if name in names}

    sampling = pick(parts[SamplingParams])
    if isinstance(sampling.get("stop_token_ids"), list):
        sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    return Options(
        model=merged.get("model"),
        verify=merged.get("verify"),
        speculative=pick(parts[SpeculativeConfig]),
        engine=pick(parts[EngineConfig]),
        sampling=sampling,
        command=pick(own),
    )


def merge(flags: Mapping[str, Any], config: Path | None, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Defaults, over them the file, over that the flags that were given (are not None)."""
    from_file = read_config_file(config) if config else {}
    return {**(defaults or {}), **from_file, **{name: value for name, value in flags.items() if value is not None}}


Record = TypeVar("Record")


def build(cls: type[Record], values: Mapping[str, Any], where: str) -> Record:
    """`cls(**values)` for a dataclass; tables become its dataclass fields, lists tuples, texts paths where it has them."""
    _refuse_unknown(values, field_names(cls), where)
    hints = get_type_hints(cls)
    fields = {name: _converted(hints[name], value, f"{where}.{name}") for name, value in values.items()}
    try:
        return cls(**fields)
    except TypeError as error:
        raise ConfigError(f"{where}: {str(error).partition('()')[2].strip()}") from error


def _converted(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return build(hint, value, where)  # type: ignore[arg-type]
    if hint is Path and isinstance(value, str | Path):
        return Path(value)
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(_converted(get_args(hint)[0], item, where) for item in value)
    kinds = get_args(hint) if isinstance(hint, UnionType) else (get_origin(hint) or hint,)
    if all(isinstance(kind, type) for kind in kinds):
        wanted = (*kinds, int) if float in kinds else kinds
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(
                f"{where} is {value!r}; it must be {' or '.join(_KINDS.get(k, k.__name__) for k in kinds)}"
            )
    return value


_KINDS = {
    int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path", tuple: "a list",
    type(None): "null",
}  # fmt: skip


def _refuse_unknown(given: Mapping[str, Any], known: frozenset[str], where: str = "") -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {near[0]}?" if near else "see --help"
            raise ConfigError(f"unknown option {name!r}{f' of {where}' if where else ''}; {hint}")
