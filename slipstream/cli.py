"""The `slipstream` command: flags in, text and JSON out. All work is done by the library; nothing here decides.

With `--json` the last line of stdout is one JSON object and everything else goes to stderr. Exit codes: 0 done,
1 failed, 2 wrong use; an error on purpose is one red line. torch is imported by the commands that need it, never for
`--help` or to refuse an option.
"""

import dataclasses
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.config import MODES, SamplingParams
from slipstream.errors import ConfigError, EngineError, RequestError, SlipstreamError
from slipstream.lab.cases import BenchOptions
from slipstream.lab.paint import pieces_of, show
from slipstream.lab.report import plain_json, probe_table, rows_table
from slipstream.options import DEFAULT_MODEL, MODE_FLAGS, Options, build, field_names, gather, merge

if TYPE_CHECKING:
    from slipstream.llm import LLM
    from slipstream.metrics import SpecCounters

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str | None, typer.Option(help="Folder, .gguf file or built-in name. Default: smollm2-135m.")]
Draft = Annotated[str | None, typer.Option("--draft", help="Drafter: folder or built-in name. Default: none.")]
Verify = Annotated[
    str | None, typer.Option(help=f"Mode: {', '.join(MODES)}. Default: static with a drafter, else off.")
]
NumDrafts = Annotated[int | None, typer.Option(help="Drafts per step, S. Default: what the drafter makes, at most 7.")]
CostModel = Annotated[str | None, typer.Option(help="auto, none or a file made by `profile`. Default: auto.")]
Rule = Annotated[str | None, typer.Option("--acceptance", help="coupled or rejection. Default: coupled.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy. Default: 0.")]
TopP = Annotated[float | None, typer.Option(help="Nucleus, in (0, 1]. Default: 1, off.")]
TopK = Annotated[int | None, typer.Option(help="Most likely tokens kept. Default: 0, off.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text, in every mode. Default: random.")]
MaxTokens = Annotated[int | None, typer.Option(help="Output tokens at most. Default: 256.")]
Dtype = Annotated[str | None, typer.Option(help="auto, bfloat16, float16 or float32. Default: auto.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda. Default: auto.")]
Config = Annotated[Path | None, typer.Option(help="Options from a JSON or TOML file; flags win over it.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object as the last line of stdout, the rest on stderr.")]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the `slipstream` command."""
    os.environ.setdefault(
        "GOMP_SPINCOUNT", "10000"
    )  # else idle threads of torch slow down all others on a busy machine
    try:
        app(args=list(arguments) if arguments is not None else None, prog_name="slipstream")
    except SlipstreamError as error:
        line = Text(f"error: {' '.join(str(error).split())}", style="red")
        Console(stderr=True, highlight=False).print(line, soft_wrap=True)
        sys.exit(error.exit_code)
    except OSError as error:  # a file that cannot be written, a full disk
        Console(stderr=True, highlight=False).print(Text(f"error: {error}", style="red"), soft_wrap=True)
        sys.exit(1)
    sys.exit(0)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"slipstream {metadata.version('slipstream')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say what was chosen at start, and why.")] = False,
) -> None:
    """Speculative decoding with block drafters, verifying as many drafts as pay off."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", stream=sys.stderr)


@app.command(epilog='Example: slipstream generate "Why is the sky blue?" --draft smollm2-135m-dspark --verify lag')
def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads stdin.")],
    model: Model = None,
    draft: Draft = None,
    verify: Verify = None,
    num_speculative_tokens: NumDrafts = None,
    cost_model: CostModel = None,
    acceptance: Rule = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    dtype: Dtype = None,
    device: Device = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Answer one prompt."""
    if prompt == "-" and sys.stdin is None:
        raise RequestError("prompt is -, but stdin is closed; give a text or open stdin")
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise RequestError("prompt is empty; give a text to answer")
    options = _options(locals())
    params = options.sampling_params()
    llm = _start(options, max_num_seqs=1)
    completion = (llm.generate([text], params) if raw else llm.chat([_user(text)], params))[0]
    out = _output(as_json)
    show(out, pieces_of(llm.tokenizer, completion.token_ids, completion.accepted))
    out.print()
    _say(_summary(completion.spec, completion.timing.tok_per_s))
    if completion.error:
        raise EngineError(completion.error)
    if as_json:
        _print_json(
            {
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "usage": {
                    "prompt_tokens": completion.prompt_tokens,
                    "completion_tokens": len(completion.token_ids),
                },
                "spec": completion.spec.as_dict(),
                "timing": completion.timing.as_dict(),
            }
        )


@app.command(epilog="Example: slipstream chat --draft smollm2-135m-dspark --verify lag --temperature 0.7")
def chat(
    model: Model = None,
    draft: Draft = None,
    verify: Verify = None,
    num_speculative_tokens: NumDrafts = None,
    cost_model: CostModel = None,
    acceptance: Rule = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    dtype: Dtype = None,
    device: Device = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Talk; tokens from accepted drafts are green. /reset forgets, /exit (or end of input) ends."""
    options = _options(locals(), own=("system",))
    params = options.sampling_params()
    llm = _start(options, max_num_seqs=1)
    opening = [{"role": "system", "content": options.command["system"]}] if options.command.get("system") else []
    out, messages = _output(as_json), list(opening)
    for line in _lines(out):
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(opening)
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            messages = [*asked, {"role": "assistant", "content": _reply(llm, asked, params, out)}]
        except RequestError as error:  # this line cannot be answered; what was said so far stands
            _say(f"{error}; /reset starts over")
    if as_json:
        _print_json({"messages": messages})


@app.command(epilog="Example: slipstream bench --modes off,static,lag --concurrency 1,8 --waves 5 --json")
def bench(
    model: Model = None,
    draft: Draft = None,
    modes: Annotated[str | None, typer.Option(help="Comma-separated. Default: all five.")] = None,
    num_speculative_tokens: Annotated[
        str | None, typer.Option(help="S, or several: 3,7. Default: what the drafter makes, at most 7.")
    ] = None,
    concurrency: Annotated[str | None, typer.Option(help="Requests at a time, or several: 1,8. Default: 1.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with turns. Default: a sample of gsm8k.")] = None,
    requests: Annotated[int | None, typer.Option(help="Prompts per wave. Default: 4, or concurrency.")] = None,
    waves: Annotated[int | None, typer.Option(help="How often all modes take turns. Default: 3.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Output tokens at most. Default: 128.")] = None,
    temperature: Temperature = None,
    seed: Seed = None,
    dtype: Dtype = None,
    device: Device = None,
    probe: Annotated[bool | None, typer.Option("--probe", help="Measure the critical path of a step.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to this file as well.")] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Run modes side by side on the same requests, taking turns, and compare them with plain decoding."""
    flags = {
        **locals(),
        "modes": None if modes is None else [mode.strip() for mode in modes.split(",")],
        "concurrency": _numbers("concurrency", concurrency),
        "num_speculative_tokens": _numbers("num_speculative_tokens", num_speculative_tokens),
    }
    own = ("modes", "concurrency", "prompts", "requests", "waves", "probe")
    bench_options = _bench_options(_options(flags, own=own))  # refuses before torch is loaded

    from slipstream.lab.bench import run

    result = run(bench_options, _say)
    out = _output(as_json)
    out.print(rows_table(result.report["rows"], f"{result.report['model']}, {result.report['rows'][0]['dtype']}"))
    if bench_options.probe:
        out.print(probe_table(result.report["rows"]))
    _deliver(result.report, output, as_json)


@app.command(epilog="Example: slipstream profile --draft smollm2-135m-dspark --budget 30")
def profile(
    model: Model = None,
    draft: Draft = None,
    num_speculative_tokens: NumDrafts = None,
    budget: Annotated[float, typer.Option(help="Seconds to spend.")] = 30.0,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Largest number of sequences. Default: 64 CPU, 256 GPU.")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    output: Annotated[
        Path | None, typer.Option(help="File. Default: under $SLIPSTREAM_HOME, where auto finds it.")
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Measure what a step costs, by rows, sequences and context, and keep it as a cost model."""
    if not 0 < budget < math.inf:
        raise ConfigError(f"budget is {budget}; it must be a number of seconds above 0")
    options = _options(locals())
    if options.model is None:  # the built-in drafter fits the built-in model only
        options = dataclasses.replace(options, speculative={"draft_model": BenchOptions().draft, **options.speculative})

    from slipstream.lab import profile as lab

    llm = _start(options)
    models = llm.models
    key = lab.profile_key(models.target_name, models.drafter_name or "none", models.device, models.dtype)
    survey = lab.survey(llm.engine, key, budget)
    path = survey.profile.save(output)
    out = _output(as_json)
    out.print(lab.survey_table(survey))
    out.print(f"{survey.profile.use} model in use: {survey.profile.use_reason}; saved as {path}", soft_wrap=True)
    if as_json:
        _print_json({"path": str(path), **survey.as_dict()})


@app.command(epilog="Example: slipstream inspect smollm2-135m-dspark --json")
def inspect(
    checkpoint: Annotated[str, typer.Argument(help="Folder, .gguf file or built-in name, of a target or a drafter.")],
    layout: Annotated[
        str | None, typer.Option(help="Read a drafter as fill_in or anchor_first, whatever it says.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a checkpoint is and, for a drafter, which row predicts which token and how that was decided."""
    from slipstream.models.inspect import describe
    from slipstream.models.locate import built_in_drafters, resolve_target

    path = built_in_drafters().get(checkpoint) or resolve_target(checkpoint)
    report = {"path": str(path), **describe(path, layout)}
    table = Table(show_header=False, box=None)
    for name, value in report.items():
        table.add_row(name, "-" if value is None else str(value))
    _output(as_json).print(table)
    if as_json:
        _print_json(report)


@app.command(epilog="Example: slipstream train --out runs/dspark --steps 2000 --prompts questions.jsonl")
def train(
    out: Annotated[Path | None, typer.Option(help="Folder of the run: drafter, checkpoint, answers, logs.")] = None,
    model: Model = None,
    algorithm: Annotated[str | None, typer.Option(help="dspark or dflash. Default: dspark.")] = None,
    prompts: Annotated[list[Path] | None, typer.Option(help="JSON lines with turns; may be given again.")] = None,
    answers: Annotated[list[Path] | None, typer.Option(help="Answers of an earlier run; may be given again.")] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(help="Tokens that the target answers. Default: 2,000,000.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps. Default: 2000.")] = None,
    minutes: Annotated[float | None, typer.Option(help="End the schedule after this time at the latest.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Rows of a block, anchor included. Default: 8.")] = None,
    num_layers: Annotated[int | None, typer.Option(help="Layers of the drafter. Default: 2.")] = None,
    draft_vocab_size: Annotated[int | None, typer.Option(help="Tokens it can draft; 0 is all. Default: 16384.")] = None,
    markov_rank: Annotated[int | None, typer.Option(help="Of dspark's Markov head. Default: 32.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same run. Default: 0.")] = None,
    device: Device = None,
    resume: Annotated[bool | None, typer.Option("--resume", help="Go on from the checkpoint in OUT.")] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Train a drafter for a target, from answers that the target itself gives."""
    from slipstream.train.options import TrainOptions

    given = {name: value for name, value in locals().items() if name in field_names(TrainOptions)}
    options = build(TrainOptions, merge({**given, "target": model}, config, {"target": DEFAULT_MODEL}), "train")
    from slipstream.train.trainer import train as run

    run(options, _output(as_json))
    if as_json:
        _print_json({"target": options.target, "algorithm": options.algorithm, "drafter": str(options.out / "drafter")})


# What commands share


def _options(flags: Mapping[str, Any], own: Sequence[str] = ()) -> Options:
    """A command's `locals()` as options; names that no class of options knows stay out of it."""
    kept = {name: value for name, value in flags.items() if name in _FLAG_FIELDS or name in own}
    kept["draft_model"] = kept.pop("draft", None)
    return gather(kept, flags.get("config"), frozenset(own))


_FLAG_FIELDS = frozenset(
    [
        "model",
        "draft",
        "verify",
        "num_speculative_tokens",
        "cost_model",
        "acceptance",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "max_tokens",
        "dtype",
        "device",
        "max_num_seqs",
    ]
)


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
            fields[name] = _tuple(options.command[name])
    if "num_speculative_tokens" in speculative:
        fields["num_speculative_tokens"] = _tuple(speculative.pop("num_speculative_tokens"))
    if not isinstance(options.command.get("prompts", ""), str | Path):
        raise ConfigError(f"prompts is {options.command['prompts']!r}; give a path")
    if "prompts" in options.command:
        fields["prompts"] = Path(options.command["prompts"])
    fields |= {name: options.command[name] for name in ("requests", "waves", "probe") if name in options.command}
    sampling = dataclasses.replace(options, sampling={"max_tokens": 128, **options.sampling}).sampling_params()
    return BenchOptions(**fields, speculative=speculative, sampling=sampling)


def _start(options: Options, **engine: Any) -> "LLM":
    speculative, sized = options.speculative_config(), options.engine_config()  # refuse before anything is loaded
    from slipstream.llm import LLM

    fields = {f.name: getattr(sized, f.name) for f in dataclasses.fields(sized)}
    for name, value in engine.items():
        fields[name] = value if fields[name] is None else fields[name]
    return LLM(options.model or DEFAULT_MODEL, speculative=speculative, **fields)


def _tuple(value: Any) -> tuple[Any, ...]:
    """A value of a flag or a file where several are possible."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _numbers(name: str, text: str | None) -> list[int] | None:
    """ "1,8" as numbers."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}; give whole numbers with commas between them") from error


def _lines(out: Console) -> Iterator[str]:
    """What the user types, line by line, empty lines left out; ends with the input."""
    while True:
        if sys.stdin.isatty():
            out.print("[bold]> [/bold]", end="")
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _reply(llm: "LLM", messages: list[dict[str, str]], params: SamplingParams, out: Console) -> str:
    """Stream one answer to the screen and return its text."""
    text, num_tokens, num_accepted, start = "", 0, 0, time.perf_counter()
    for chunk in llm.stream(messages, params):
        show(out, chunk.pieces)
        text += chunk.text
        num_tokens += len(chunk.token_ids)
        num_accepted += sum(chunk.accepted)
    out.print()
    _say(f"{num_tokens} tokens, {num_accepted} from drafts, {num_tokens / (time.perf_counter() - start):.1f} tok/s")
    return text


def _summary(spec: "SpecCounters", tok_per_s: float | None) -> str:
    """One line about a finished answer."""
    parts = [f"mode {spec.mode}", f"{spec.emitted} tokens in {spec.steps} steps"]
    if spec.verified:
        parts.append(f"{spec.accepted} of {spec.verified} verified drafts accepted ({spec.drafted} drafted)")
    if tok_per_s is not None:
        parts.append(f"{tok_per_s:.1f} tok/s")
    return ", ".join(parts)


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _output(as_json: bool) -> Console:
    """Where a command's text goes: stdout, unless that is kept for JSON."""
    return Console(stderr=as_json, highlight=False)


def _say(line: str) -> None:
    Console(stderr=True, highlight=False).print(Text(line, style="dim"), soft_wrap=True)


def _print_json(value: Any) -> None:
    sys.stdout.flush()
    print(json.dumps(plain_json(value), ensure_ascii=False, allow_nan=False), flush=True)


def _deliver(report: dict[str, Any], output: Path | None, as_json: bool) -> None:
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(plain_json(report), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        _say(f"written to {output}")
    if as_json:
        _print_json(report)
