"""`slipstream profile`."""

import dataclasses
import gc
import math
from pathlib import Path
from typing import Annotated

import typer

from slipstream.commands import flags
from slipstream.commands.shared import options_of, print_json, screen, start
from slipstream.errors import ConfigError
from slipstream.lab.bench_options import BenchOptions

PLAIN_SHARE = 0.2  # of as many seconds more, for what plain decoding costs


def profile(
    model: flags.Model = None,
    draft: flags.MeasuredDraft = None,
    draft_layout: flags.Layout = None,
    num_speculative_tokens: flags.NumDrafts = None,
    budget: Annotated[float, typer.Option(help="Seconds to spend; a fifth more goes to plain decoding.")] = 30.0,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Largest number of sequences. Default: 64 CPU, 256 GPU.")
    ] = None,
    dtype: flags.Dtype = None,
    device: flags.Device = None,
    output: Annotated[
        Path | None, typer.Option(help="File. Default: under $SLIPSTREAM_HOME, where auto finds it.")
    ] = None,
    config: flags.Config = None,
    as_json: flags.Json = False,
) -> None:
    """Measure what a step costs, by rows, sequences and context, and keep it as a cost model."""
    if not 0 < budget < math.inf:
        raise ConfigError(f"budget is {budget}; it must be a number of seconds above 0")
    options = options_of(locals())
    speculative = {**options.speculative, "cost_model": "none"}
    if options.model is None:  # the built-in drafter fits the built-in model only
        speculative.setdefault("draft_model", BenchOptions().draft)
    if "draft_model" not in speculative:
        raise ConfigError("a cost model prices drafts; name a drafter with --draft")
    # In a mode that prunes, for its engine has all shapes recorded that are timed.
    options = dataclasses.replace(options, verify="adaptive", speculative=speculative)

    from slipstream.decide.make import cost_model_follows
    from slipstream.lab import profile as lab

    with cost_model_follows():
        llm = start(options)
    models = llm.models
    key = lab.profile_key(
        models.target_name, models.drafter_name or "none", models.device, models.dtype,
        deterministic=options.engine_config().deterministic,
    )  # fmt: skip
    survey = lab.survey(llm.engine, key, budget)
    del llm  # on a GPU there may be no room for two
    gc.collect()
    plain = start(dataclasses.replace(options, verify="off", speculative={}), models)
    survey = dataclasses.replace(survey, profile=lab.with_plain(survey.profile, plain.engine, budget * PLAIN_SHARE))
    path = survey.profile.save(output)
    out = screen(as_json)
    out.print(lab.survey_table(survey))
    out.print(f"{survey.profile.use} model in use: {survey.profile.use_reason}; saved as {path}", soft_wrap=True)
    if as_json:
        print_json({"path": str(path), **survey.as_dict()})
