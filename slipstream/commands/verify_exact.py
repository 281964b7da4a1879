"""`slipstream verify-exact`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from slipstream.commands import flags
from slipstream.commands.shared import as_tuple, options_of, print_json, say, screen, several
from slipstream.errors import ConfigError
from slipstream.lab.verify_exact_options import EXACT_MODES, ExactOptions
from slipstream.lab.verify_exact_report import COLORS, checks_tables, notes
from slipstream.options import MODE_FLAGS, Options


def verify_exact(
    model: flags.Model = None,
    draft: flags.MeasuredDraft = None,
    modes: Annotated[str | None, typer.Option(help=f"Comma-separated. Default: {','.join(EXACT_MODES)}.")] = None,
    acceptance: Annotated[str | None, typer.Option(help="Rules. Default: coupled,rejection.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with turns. Default: a sample of gsm8k.")] = None,
    requests: Annotated[int | None, typer.Option(help="Prompts whose texts are compared. Default: 8.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Of these texts, at most. Default: 48.")] = None,
    samples: Annotated[
        int | None, typer.Option(help="Answers a mode whose law is tested. Default: 4000 on a GPU, 400 on a CPU.")
    ] = None,
    positions: Annotated[str | None, typer.Option(help="Tokens of them, from 1. Default: 1,2,5,10.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of what is sampled. Default: 1.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests at a time. Default: 8.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of samples and random widths. Default: 0.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 proves; bfloat16 only shows. Default: float32.")] = None,
    device: flags.Device = None,
    deterministic: flags.Deterministic = None,
    config: flags.Config = None,
    as_json: flags.Json = False,
) -> None:
    """Check that a pair's output is the target's own, in every mode; exit code 0 only if all of it is exact.

    Under penalties, biases, filters or a grammar where --config asks for them: {"structured": {"json": true}}.
    """
    given = {
        **locals(),
        "modes": several("modes", modes, str),
        "rules": several("acceptance", acceptance, str),
        "positions": several("positions", positions, int),
        "acceptance": None,
    }
    exact_options = _exact_options(options_of(given, own=OWN))

    from slipstream.lab.verify_exact import run

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("answers", total=None)
        report = run(exact_options, say, lambda done, total: bar.update(task, completed=done, total=total))
    out = screen(as_json)
    for line in notes(report):
        out.print(line, soft_wrap=True)
    for table in checks_tables(report):
        out.print(table)
    out.print(Text(report["verdict"], COLORS[report["verdict"]]))
    if as_json:
        print_json(report)
    if report["verdict"] != "exact":
        raise typer.Exit(1)


OWN = ("modes", "rules", "prompts", "requests", "samples", "positions", "concurrency")
SAMPLING = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_tokens",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "structured",
    }
)  # which the law is computed for


def _exact_options(options: Options) -> ExactOptions:
    """Fields of ExactOptions; those that were not given keep its defaults."""
    if options.verify is not None or MODE_FLAGS & options.speculative.keys():
        raise ConfigError("verify: verify-exact runs several modes; name them with modes")
    if "max_num_seqs" in options.engine:
        raise ConfigError("max_num_seqs: verify-exact sizes the engine by concurrency; use that")
    if others := sorted(options.sampling.keys() - SAMPLING):
        raise ConfigError(f"{', '.join(others)}: no part of what verify-exact checks; leave it out")
    options.engine_config()  # refuses wrong values
    speculative, command = dict(options.speculative), options.command
    fields: dict[str, Any] = {"engine": {"dtype": "float32", **options.engine}}
    if options.model is not None:
        fields["model"] = options.model
        if "draft_model" not in speculative:  # the built-in drafter fits the built-in model only
            raise ConfigError("draft_model: verify-exact needs a drafter for this model; name one with --draft")
    if "draft_model" in speculative:
        fields["draft"] = speculative.pop("draft_model")
    if "acceptance" in speculative:
        fields["rules"] = as_tuple(speculative.pop("acceptance"))
    fields |= {name: as_tuple(command[name]) for name in ("modes", "rules", "positions") if name in command}
    if "prompts" in command:
        if not isinstance(command["prompts"], str | Path):
            raise ConfigError(f"prompts is {command['prompts']!r}; give a path")
        fields["prompts"] = Path(command["prompts"])
    fields |= {name: command[name] for name in ("requests", "samples", "concurrency") if name in command}
    sampling = {"temperature": 1.0, "max_tokens": 48, "seed": 0, **options.sampling}
    params = dataclasses.replace(options, sampling=sampling).sampling_params()
    return ExactOptions(**fields, speculative=speculative, sampling=params)
