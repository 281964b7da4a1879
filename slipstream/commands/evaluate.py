"""`slipstream evaluate`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.commands import flags
from slipstream.commands.shared import as_tuple, deliver, options_of, say, screen, several
from slipstream.errors import ConfigError
from slipstream.files import check_writable
from slipstream.lab.evaluate_options import EvaluateOptions
from slipstream.lab.scores import scores_tables
from slipstream.options import MODE_FLAGS, Options


def evaluate(
    draft: flags.MeasuredDraft = None,
    draft_layout: flags.Layout = None,
    model: flags.Model = None,
    prompts: flags.PromptSets = None,
    limit: Annotated[int | None, typer.Option(help="Prompts of each set, the first ones. Default: all.")] = None,
    temperature: Annotated[str | None, typer.Option(help="One, or several: 0,1. Default: 0,1.")] = None,
    num_speculative_tokens: flags.NumDrafts = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests at a time. Default: 8.")] = None,
    max_tokens: flags.MaxTokens = None,
    acceptance: flags.Rule = None,
    baselines: Annotated[
        str | None, typer.Option(help="What to compare with: off,ngram, one of them, or none. Default: off,ngram.")
    ] = None,
    waves: Annotated[int | None, typer.Option(help="Timed passes; 0: acceptance only, no speed. Default: 1.")] = None,
    seed: flags.Seed = None,
    dtype: flags.Dtype = None,
    device: flags.Device = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to this file as well.")] = None,
    config: flags.Config = None,
    as_json: flags.Json = False,
) -> None:
    """Say how good a drafter is: acceptance, calibration and speed, beside plain decoding and n-gram look-up."""
    given = {
        **locals(),
        "prompts": prompts or None,
        "temperature": several("temperature", temperature, float),
        "baselines": [] if baselines == "none" else several("baselines", baselines, str),
    }
    evaluate_options = _evaluate_options(options_of(given, own=OWN))  # refuses before torch is loaded
    if output is not None:
        check_writable(output, "output")

    from slipstream.lab.evaluate import run

    report = run(evaluate_options, say)
    title = f"{report['model']}, {report['conditions']['dtype']}, {report['conditions']['concurrency']} at a time"
    for table in scores_tables(report["rows"], title):
        screen(as_json).print(table)
    deliver(report, output, as_json)


OWN = ("prompts", "limit", "concurrency", "baselines", "waves")


def _evaluate_options(options: Options) -> EvaluateOptions:
    """Fields of EvaluateOptions; those that were not given keep its defaults."""
    if options.verify is not None or MODE_FLAGS & options.speculative.keys():
        raise ConfigError("verify: evaluate verifies every draft (mode static); compare modes with bench")
    if "max_num_seqs" in options.engine:
        raise ConfigError("max_num_seqs: evaluate sizes the engine by concurrency; use that")
    options.engine_config()  # refuses wrong values
    fields: dict[str, Any] = {"engine": dict(options.engine)}
    speculative, sampling = dict(options.speculative), {"max_tokens": 256, **options.sampling}
    if options.model is not None:
        fields["model"] = options.model
        if "draft_model" not in speculative:  # the built-in drafter fits the built-in model only
            raise ConfigError("draft_model: evaluate needs a drafter for this model; name one with --draft")
    if "draft_model" in speculative:
        fields["draft"] = speculative.pop("draft_model")
    if "num_speculative_tokens" in speculative:
        fields["num_speculative_tokens"] = speculative.pop("num_speculative_tokens")
    if "temperature" in sampling:
        fields["temperatures"] = as_tuple(sampling.pop("temperature"))
    for name in ("prompts", "baselines"):
        if name in options.command:
            fields[name] = as_tuple(options.command[name])
    for path in fields.get("prompts", ()):
        if not isinstance(path, str | Path):
            raise ConfigError(f"prompts holds {path!r}; give paths")
    if "prompts" in fields:
        fields["prompts"] = tuple(Path(path) for path in fields["prompts"])
    fields |= {name: options.command[name] for name in ("limit", "concurrency", "waves") if name in options.command}
    params = dataclasses.replace(options, sampling=sampling).sampling_params()
    return EvaluateOptions(**fields, speculative=speculative, sampling=params)
