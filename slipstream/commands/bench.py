"""`slipstream bench`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.commands import flags
from slipstream.commands.shared import as_tuple, deliver, options_of, say, screen, several
from slipstream.errors import ConfigError
from slipstream.files import check_writable
from slipstream.lab.bench_options import BenchOptions, Replay
from slipstream.lab.plots import require_matplotlib
from slipstream.lab.report import probe_table, rows_table
from slipstream.lab.timeline import Timeline
from slipstream.lab.timeline_plot import timeline_plot
from slipstream.options import MODE_FLAGS, Options
from slipstream.prompts import MadeUp, prompt_source


def bench(
    model: flags.Model = None,
    draft: flags.MeasuredDraft = None,
    draft_layout: flags.Layout = None,
    modes: Annotated[
        str | None, typer.Option(help="Comma-separated; lag-late and fixed:N too. Default: all five.")
    ] = None,
    num_speculative_tokens: Annotated[
        str | None, typer.Option(help="S, or several: 3,7. Default: what the drafter makes, at most 7.")
    ] = None,
    concurrency: Annotated[str | None, typer.Option(help="Requests at a time, or several: 1,8. Default: 1.")] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="JSON lines with turns, or random:N, N tokens each; with a trace, sets of it. Default: a sample of gsm8k."
        ),
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Prompts per wave. Default: 4, or concurrency.")] = None,
    waves: Annotated[int | None, typer.Option(help="How often all modes take turns. Default: 3.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Output tokens at most. Default: 128; as many as in a trace.")
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(help="coupled, rejection, or a trace (.npz) whose acceptance is replayed. Default: coupled."),
    ] = None,
    temperature: flags.Temperature = None,
    seed: flags.Seed = None,
    dtype: flags.Dtype = None,
    device: flags.Device = None,
    deterministic: flags.Deterministic = None,
    probe: Annotated[bool | None, typer.Option("--probe", help="Measure the critical path of a step.")] = None,
    timeline: Annotated[
        list[Path] | None,
        typer.Option(help="With --probe, every step's stages: .json for Perfetto, or .png. May be given again."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to this file as well.")] = None,
    config: flags.Config = None,
    as_json: flags.Json = False,
) -> None:
    """Run modes side by side on the same requests, taking turns, and compare them with plain decoding."""
    given = {
        **locals(),
        "modes": several("modes", modes, str),
        "concurrency": several("concurrency", concurrency, int),
        "num_speculative_tokens": several("num_speculative_tokens", num_speculative_tokens, int),
    }
    own = ("modes", "concurrency", "prompts", "requests", "waves", "probe")
    bench_options = _bench_options(options_of(given, own=own))  # refuses before torch is loaded
    spans = _timeline(timeline or [], bench_options)

    from slipstream.lab.bench import run

    result = run(bench_options, say, spans.add)
    out = screen(as_json)
    out.print(rows_table(result.report["rows"], f"{result.report['model']}, {result.report['rows'][0]['dtype']}"))
    if bench_options.probe:
        out.print(probe_table(result.report["rows"]))
    for path in timeline or []:
        _write_timeline(path, spans, result.report)
    deliver(result.report, output, as_json)


NO_LIMIT = 1 << 30  # tokens of an answer that ends by itself


def _is_trace(acceptance: object) -> bool:
    return isinstance(acceptance, str | Path) and Path(acceptance).suffix == ".npz"


def _timeline(paths: Sequence[Path], options: BenchOptions) -> Timeline:
    """Empty; what is wrong with its files shows before anything is measured."""
    for path in paths:
        if not options.probe:
            raise ConfigError(f"timeline {path}: stages are recorded with --probe only; add that")
        if path.suffix != ".json":
            require_matplotlib(path)
        check_writable(path, "timeline")
    return Timeline()


def _write_timeline(path: Path, timeline: Timeline, report: dict[str, Any]) -> None:
    if path.suffix == ".json":
        timeline.write(path, {name: value for name, value in report.items() if name not in ("ceilings", "rows")})
    else:
        timeline_plot(path, timeline.cases)
    say(f"timeline written to {path}")


def _bench_options(options: Options) -> BenchOptions:
    """Fields of BenchOptions; those that were not given keep its defaults."""
    if options.verify is not None or MODE_FLAGS & options.speculative.keys():
        raise ConfigError("verify: bench runs several modes; name them with modes")
    if "max_num_seqs" in options.engine:
        raise ConfigError("max_num_seqs: bench sizes the engine by concurrency; use that")
    speculative = dict(options.speculative)
    options.engine_config()  # refuses wrong values
    fields: dict[str, Any] = {"engine": dict(options.engine)}
    if options.model is not None:
        fields |= {"model": options.model, "draft": None}  # the built-in drafter fits the built-in model only
    if "draft_model" in speculative:
        fields["draft"] = speculative.pop("draft_model")
    for name in ("modes", "concurrency"):
        if name in options.command:
            fields[name] = as_tuple(options.command[name])
    if "num_speculative_tokens" in speculative:
        fields["num_speculative_tokens"] = as_tuple(speculative.pop("num_speculative_tokens"))
    if not isinstance(options.command.get("prompts", ""), str):
        raise ConfigError(f"prompts is {options.command['prompts']!r}; give a path, or random:N")
    if _is_trace(speculative.get("acceptance")):
        sets = several("prompts", options.command.get("prompts"), str) or []
        fields["replay"] = Replay(trace=Path(speculative.pop("acceptance")), sets=tuple(sets))
    elif "prompts" in options.command:
        fields["prompts"] = prompt_source(options.command["prompts"])
    fields |= {name: options.command[name] for name in ("requests", "waves", "probe") if name in options.command}
    # What is made up has no end of its own: answers go on to max_tokens, unless told otherwise.
    most_tokens = NO_LIMIT if "replay" in fields else 128
    sampling = {"max_tokens": most_tokens, "ignore_eos": isinstance(fields.get("prompts"), MadeUp), **options.sampling}
    return BenchOptions(
        **fields, speculative=speculative, sampling=dataclasses.replace(options, sampling=sampling).sampling_params()
    )
