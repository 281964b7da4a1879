"""`slipstream train`."""

from pathlib import Path
from typing import Annotated

import typer

from slipstream.commands import flags
from slipstream.commands.shared import print_json, screen
from slipstream.errors import ConfigError
from slipstream.options import DEFAULT_MODEL, build, field_names, merge


def train(
    out: Annotated[Path | None, typer.Option(help="Folder of the run: drafter, checkpoint, answers, logs.")] = None,
    model: flags.Model = None,
    preset: Annotated[str | None, typer.Option(help="A published recipe by name; see docs/training.md.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="dspark or dflash. Default: dspark.")] = None,
    prompts: Annotated[list[Path] | None, typer.Option(help="JSON lines with turns; may be given again.")] = None,
    answers: Annotated[list[Path] | None, typer.Option(help="Answers of an earlier run; may be given again.")] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(help="Tokens that the target answers. Default: 2,000,000.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps. Default: 2000.")] = None,
    minutes: Annotated[float | None, typer.Option(help="End the schedule after this time at the latest.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Rows of a block, anchor included. Default: 8.")] = None,
    init: Annotated[str | None, typer.Option(help="A drafter to go on from. Default: random weights.")] = None,
    processes: Annotated[int | None, typer.Option(help="That share every batch, one a GPU. Default: 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same run. Default: 0.")] = None,
    device: flags.Device = None,
    resume: Annotated[bool | None, typer.Option("--resume", help="Go on from the checkpoint in OUT.")] = None,
    config: flags.Config = None,
    as_json: flags.Json = False,
) -> None:
    """Train a drafter for a target, from answers that the target itself gives."""
    from slipstream.train.options import TrainOptions
    from slipstream.train.presets import with_preset

    given = {name: value for name, value in locals().items() if name in {*field_names(TrainOptions), "preset"}}
    values = merge(given, config, {"model": DEFAULT_MODEL})
    if not values.get("out"):
        raise ConfigError("out: name the folder of the run, with --out")
    options = build(TrainOptions, with_preset(values), "train")
    from slipstream.train.run import train as run

    run(options, screen(as_json))
    if as_json:
        print_json({"model": options.model, "algorithm": options.algorithm, "draft": str(options.out / "drafter")})
