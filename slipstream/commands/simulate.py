"""`slipstream simulate`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.commands import flags
from slipstream.commands.shared import as_tuple, deliver, say, screen, several
from slipstream.errors import ConfigError
from slipstream.files import check_writable
from slipstream.lab.simulate_options import SimulateOptions
from slipstream.options import build, field_names, merge


def simulate(
    trace: Annotated[Path | None, typer.Option(help="Made by `trace`. Must be given.")] = None,
    profile: Annotated[Path | None, typer.Option(help="Cost model made by `profile`. Must be given.")] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help="Of off, static, static:N, static:all, fixed:N (S drafts, N verified), adaptive, lag, lag-2, lag-3, "
            "lag-raw, lag-budget, oracle, file.py:Name, all. Default: off,static,adaptive,lag,lag-budget,oracle."
        ),
    ] = None,
    signals: Annotated[str | None, typer.Option("--signal", help="head, peak. Default: all of the trace.")] = None,
    num_speculative_tokens: Annotated[
        str | None, typer.Option(help="S, or several: 3,7. Default: what was traced.")
    ] = None,
    sets: Annotated[str | None, typer.Option(help="Sets of prompts that are served. Default: all.")] = None,
    concurrency: Annotated[str | None, typer.Option(help="Requests at a time. Default: 1,8,32.")] = None,
    arrivals: Annotated[
        str | None, typer.Option(help="Requests a second, drawn at random. Default: all wait from the start.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Per wave. Default: 4 x concurrency.")] = None,
    waves: Annotated[int | None, typer.Option(help="Passes of an engine that goes on learning. Default: 3.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Cut answers there. Default: as traced.")] = None,
    min_gain: Annotated[float | None, typer.Option(help="Gain that a draft must promise. Default: 0.")] = None,
    calibration: Annotated[str | None, typer.Option(help="auto, none or a file. Default: auto.")] = None,
    exposed_us: Annotated[
        str | None, typer.Option(help="Host time per step in fresh modes, or fresh=70,lagged=1. Default: 0.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of arrivals; shuffles answers too. Default: their order.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw speed, rows and regret over the load into this file.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "--out", help="Write the JSON to this file as well.")
    ] = None,
    config: flags.Config = None,
    as_json: flags.Json = False,
) -> None:
    """Replay policies over a trace under the prices of a profile: what each would gain, beside an oracle."""
    given = {
        **locals(),
        "policies": several("policies", policies, str),
        "signals": several("signals", signals, str),
        "num_speculative_tokens": several("num_speculative_tokens", num_speculative_tokens, int),
        "sets": several("sets", sets, str),
        "concurrency": several("concurrency", concurrency, int),
        "arrivals": several("arrivals", arrivals, float),
    }
    names = field_names(SimulateOptions)
    merged = merge({name: value for name, value in given.items() if name in names}, config)
    options = build(SimulateOptions, _checked(merged), "simulate")

    from slipstream.lab import plots
    from slipstream.lab.simulate import panels, rows_table, run

    if plot is not None:
        plots.require_matplotlib(plot)
    if output is not None:
        check_writable(output, "output")
    report = run(options, say)
    title = f"simulated: {report['trace']['path']} at the prices of {report['profile']['device']}"
    screen(as_json).print(rows_table(report["rows"], title))
    if plot is not None:
        plots.lines_plot(plot, panels(report["rows"]))
        say(f"drawn into {plot}")
    deliver(report, output, as_json)


SEVERAL = ("policies", "signals", "num_speculative_tokens", "sets", "concurrency", "arrivals")


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """Lists where the file has one value; both files must be named."""
    for name, maker in (("trace", "slipstream trace"), ("profile", "slipstream profile --output FILE")):
        if name not in values:
            raise ConfigError(f"{name}: name a file with --{name}; `{maker}` makes one")
    return {**values, **{name: as_tuple(values[name]) for name in SEVERAL if name in values}}
