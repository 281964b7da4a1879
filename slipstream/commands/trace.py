"""`slipstream trace`."""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from slipstream.commands import flags
from slipstream.commands.shared import as_tuple, options_of, print_json, say, screen
from slipstream.errors import ConfigError
from slipstream.files import check_writable
from slipstream.lab.tables import new_table, shown
from slipstream.lab.trace_options import TraceOptions
from slipstream.options import MODE_FLAGS, Options


def trace(
    out: Annotated[Path | None, typer.Option(help="The trace, an .npz file. Must be given.")] = None,
    draft: flags.MeasuredDraft = None,
    draft_layout: flags.Layout = None,
    model: flags.Model = None,
    prompts: flags.PromptSets = None,
    requests: Annotated[int | None, typer.Option(help="Prompts of each set, the first ones. Default: all.")] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="S. Default: all that the drafter drafts.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests at a time. Default: 8.")] = None,
    max_tokens: flags.MaxTokens = None,
    temperature: flags.Temperature = None,
    seed: Annotated[int | None, typer.Option(help="Of sampled answers. Default: 0.")] = None,
    dtype: flags.Dtype = None,
    device: flags.Device = None,
    config: flags.Config = None,
    as_json: flags.Json = False,
) -> None:
    """Keep what is drafted at every token of a target's answers, so that any policy can be replayed on them."""
    trace_options = _trace_options(options_of({**locals(), "prompts": prompts or None}, own=OWN))
    check_writable(trace_options.out, "out")

    from slipstream.lab.trace_dense import run, summary

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("tokens", total=None)
        found = run(
            trace_options, say, lambda done, most: bar.update(task, completed=done, total=most),
            "slipstream " + shlex.join(sys.argv[1:]),
        )  # fmt: skip
    widths = sorted({1, min(3, found.num_drafts), min(7, found.num_drafts), found.num_drafts})
    rows = summary(found, widths)
    out_screen = screen(as_json)
    out_screen.print(_table(rows, widths, f"{trace_options.draft}: tokens per step at a fixed width"))
    out_screen.print(f"written to {trace_options.out}", soft_wrap=True)
    if as_json:
        print_json({**found.about, "out": str(trace_options.out), "signals": sorted(found.signals), "rows": rows})


OWN = ("out", "prompts", "requests", "concurrency")


def _table(rows: list[dict[str, Any]], widths: list[int], title: str) -> Table:
    heads = ("prompts", "answers", "tokens", "run", *(f"w = {width}" for width in widths))
    table = new_table(title, heads, ["prompts"])
    for row in rows:
        lengths = [shown(row["mean_accepted_length"][str(width)], ".2f") for width in widths]
        table.add_row(row["prompts"], str(row["answers"]), str(row["tokens"]), shown(row["mean_run"], ".2f"), *lengths)
    return table


def _trace_options(options: Options) -> TraceOptions:
    """Fields of TraceOptions; those that were not given keep its defaults."""
    if options.verify is not None or MODE_FLAGS & options.speculative.keys():
        raise ConfigError("verify: a trace verifies no draft, so that every token is drafted from; leave it out")
    if "max_num_seqs" in options.engine:
        raise ConfigError("max_num_seqs: trace sizes the engine by concurrency; use that")
    if "out" not in options.command:
        raise ConfigError("out: name the file of the trace, with --out")
    options.engine_config()  # refuses wrong values
    fields: dict[str, Any] = {"engine": dict(options.engine), "out": _path("out", options.command["out"])}
    speculative, sampling = dict(options.speculative), {"max_tokens": 256, **options.sampling}
    if options.model is not None:
        fields["model"] = options.model
        if "draft_model" not in speculative:  # the built-in drafter fits the built-in model only
            raise ConfigError("draft_model: a trace needs a drafter for this model; name one with --draft")
    if "draft_model" in speculative:
        fields["draft"] = speculative.pop("draft_model")
    if "num_speculative_tokens" in speculative:
        fields["num_speculative_tokens"] = speculative.pop("num_speculative_tokens")
    if "prompts" in options.command:
        fields["prompts"] = tuple(_path("prompts", path) for path in as_tuple(options.command["prompts"]))
    fields |= {name: options.command[name] for name in ("requests", "concurrency") if name in options.command}
    params = dataclasses.replace(options, sampling=sampling).sampling_params()
    return TraceOptions(**fields, speculative=speculative, sampling=params)


def _path(name: str, value: object) -> Path:
    if not isinstance(value, str | Path):
        raise ConfigError(f"{name} holds {value!r}; give a path")
    return Path(value)
