"""`slipstream calibrate`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.commands import flags
from slipstream.commands.shared import as_tuple, print_json, say, screen, several
from slipstream.errors import ConfigError
from slipstream.lab.calibrate_options import CalibrateOptions
from slipstream.options import build, field_names, merge


def calibrate(
    draft: flags.NeededDraft = None,
    draft_layout: flags.Layout = None,
    model: flags.Model = None,
    prompts: Annotated[list[Path] | None, typer.Option(help="JSON lines with turns; may be given again.")] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts of each file, its first ones. Default: all.")] = None,
    temperature: Annotated[
        str | None, typer.Option(help="That is served: 0, one above 0, or both. Default: 0,1.")
    ] = None,
    top_p: flags.TopP = None,
    signals: Annotated[
        str | None, typer.Option(help="head, peak, drawn. Default: head, if there is one, and peak.")
    ] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="S. Default: all that the drafter drafts.")] = None,
    acceptance: flags.Rule = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests at a time. Default: 8.")] = None,
    max_tokens: flags.MaxTokens = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="File; what it says of other signals and classes stays. Default: calibration.json in the drafter's "
            "folder, where engines look; of a built-in drafter that is in the installed package."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw predicted against observed survival into this file.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampled answers. Default: 0.")] = None,
    dtype: flags.Dtype = None,
    device: flags.Device = None,
    config: flags.Config = None,
    as_json: flags.Json = False,
) -> None:
    """Fit temperatures that turn a drafter's confidence into probabilities, and keep them beside the drafter."""
    given = {
        **locals(),
        "prompts": prompts or None,
        "temperature": several("temperature", temperature, float),
        "signals": several("signals", signals, str),
    }
    names = field_names(CalibrateOptions)
    merged = merge({name: value for name, value in given.items() if name in names}, config)
    options = build(CalibrateOptions, _checked(merged), "calibrate")

    from slipstream.lab.calibrate import fits_table, run

    result = run(options, say)
    out = screen(as_json)
    out.print(fits_table(result.fits))
    stay = "; what it had on " + ", ".join(map(" ".join, result.kept)) + " stays" if result.kept else ""
    out.print(f"temperatures of these signals and classes are in {result.path}{stay}", soft_wrap=True)
    if as_json:
        print_json(result.report)


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """Lists where the file has one value; a drafter must be named."""
    if "draft" not in values:
        raise ConfigError("draft: name the drafter whose confidence is to be calibrated, with --draft")
    several: dict[str, Any] = {
        name: as_tuple(values[name]) for name in ("temperature", "signals", "prompts") if name in values
    }
    paths: dict[str, Any] = {
        name: Path(values[name]) for name in ("output", "plot") if isinstance(values.get(name), str)
    }
    return {**values, **several, **paths}
