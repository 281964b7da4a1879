"""`slipstream export`."""

from pathlib import Path
from typing import Annotated

import typer

from slipstream.commands import flags
from slipstream.commands.shared import layout_of, print_json, screen
from slipstream.errors import ConfigError


def export(
    draft: Annotated[str, typer.Argument(help="Drafter: folder or built-in name.")],
    out: Annotated[Path, typer.Argument(help="New folder.")],
    dialect: Annotated[str, typer.Option(help="z-lab, deepspec or speculators.")],
    model: Annotated[
        str | None, typer.Option(help="Its target: folder, .gguf file or built-in name; z-lab mostly needs none.")
    ] = None,
    target_name: Annotated[
        str | None, typer.Option(help="How others find the target, for speculators. Default: what --model says.")
    ] = None,
    draft_layout: flags.Layout = None,
    as_json: flags.Json = False,
) -> None:
    """Write a drafter the way other engines read it; its drafts stay the same."""
    from slipstream.models.export import ExportTarget, export_drafter
    from slipstream.models.inspect import describe
    from slipstream.models.locate import resolve_drafter, resolve_target

    if target_name is not None and model is None:
        raise ConfigError("target_name: no effect without model; name the target's files with --model")
    if target_name is not None and dialect in ("z-lab", "deepspec"):
        raise ConfigError(f"target_name: no effect in the dialect {dialect}, which does not name its target; drop it")
    layout = layout_of(draft_layout)
    target = None if model is None else ExportTarget.at(resolve_target(model), target_name or model)
    export_drafter(resolve_drafter(draft), out, dialect, target, layout)
    report = {"path": str(out), **describe(out)}
    screen(as_json).print(
        f"{report['algorithm']} in the dialect {dialect}, layout {report['layout']}: "
        f"{report['tensors']} tensors, {report['bytes'] / 1e6:.1f} MB in {out}",
        soft_wrap=True,
    )
    if as_json:
        print_json(report)
