"""`slipstream inspect`."""

from typing import Annotated

import typer
from rich.table import Table

from slipstream.commands import flags
from slipstream.commands.shared import layout_of, print_json, screen


def inspect(
    checkpoint: Annotated[
        str, typer.Argument(help="Folder, .gguf file, built-in name or random:SHAPE, of a target or a drafter.")
    ],
    draft_layout: flags.Layout = None,
    as_json: flags.Json = False,
) -> None:
    """Say what a checkpoint is and, for a drafter, which row predicts which token and how that was decided."""
    from slipstream.models.inspect import describe
    from slipstream.models.locate import built_in_drafters, resolve_target
    from slipstream.models.shapes import describe_shape, shape_name

    layout, shape = layout_of(draft_layout), shape_name(checkpoint)
    if shape is not None:
        report = {"path": checkpoint, **describe_shape(shape, layout)}
    else:
        path = built_in_drafters().get(checkpoint) or resolve_target(checkpoint)
        report = {"path": str(path), **describe(path, layout)}
    table = Table(show_header=False, box=None)
    for name, value in report.items():
        table.add_row(name, "-" if value is None else str(value))
    screen(as_json).print(table)
    if as_json:
        print_json(report)
