"""What commands share: options from their flags, a started engine, and how a result is delivered."""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.text import Text

from slipstream.config import EngineConfig, SamplingParams, SpeculativeConfig
from slipstream.errors import ConfigError, RequestError
from slipstream.lab.report import plain_json
from slipstream.options import DEFAULT_MODEL, Options, field_names, gather

if TYPE_CHECKING:
    from slipstream.llm import LLM
    from slipstream.load import Models


def options_of(flags: Mapping[str, Any], own: Sequence[str] = ()) -> Options:
    """A command's `locals()` as options; names that no class of options knows stay out of it."""
    known = {"model", "draft", "verify", *own}.union(
        *map(field_names, (SpeculativeConfig, EngineConfig, SamplingParams))
    )
    kept = {name: value for name, value in flags.items() if name in known}
    kept["draft_model"] = kept.pop("draft", None)
    kept["stop"] = kept.pop("stop", None) or None  # a flag that may be repeated is an empty list where it is not given
    return gather(kept, flags.get("config"), frozenset(own))


def start(options: Options, models: "Models | None" = None, **engine: Any) -> "LLM":
    """models: those that the options name, where they are loaded already."""
    speculative, sized = options.speculative_config(), options.engine_config()  # refuse before anything is loaded
    from slipstream.llm import LLM

    fields = {f.name: getattr(sized, f.name) for f in dataclasses.fields(sized)}
    for name, value in engine.items():
        fields[name] = value if fields[name] is None else fields[name]
    return LLM(models or options.model or DEFAULT_MODEL, speculative=speculative, **fields)


def no_logprobs(params: SamplingParams, why: str) -> None:
    """RequestError that names what was asked for, if it is log-probabilities."""
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            raise RequestError(f"{name}: {why}")


def as_tuple(value: Any) -> tuple[Any, ...]:
    """A value of a flag or a file where several are possible."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


Part = TypeVar("Part", int, float, str)


def several(name: str, text: str | None, kind: Callable[[str], Part]) -> list[Part] | None:
    """ "1,8" as values of a kind; None where nothing was given."""
    if text is None:
        return None
    try:
        return [kind(part.strip()) for part in text.split(",")]
    except ValueError as error:
        kinds = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{name} is {text!r}; give {kinds} with commas between them") from error


def screen(as_json: bool) -> Console:
    """Where a command's text goes: stdout, unless that is kept for JSON."""
    return Console(stderr=as_json, highlight=False)


def say(line: str) -> None:
    Console(stderr=True, highlight=False).print(Text(line, style="dim"), soft_wrap=True)


def print_json(value: Any) -> None:
    sys.stdout.flush()
    print(json.dumps(plain_json(value), ensure_ascii=False, allow_nan=False), flush=True)


def deliver(report: dict[str, Any], output: Path | None, as_json: bool) -> None:
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(plain_json(report), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        say(f"written to {output}")
    if as_json:
        print_json(report)


def layout_of(draft_layout: str | None) -> str | None:
    """What `--draft-layout` asks for; None: as the file says."""
    if draft_layout not in (None, "auto", "fill_in", "anchor_first"):
        raise ConfigError(f"draft_layout is {draft_layout!r}; choose one of auto, fill_in, anchor_first")
    return None if draft_layout == "auto" else draft_layout
