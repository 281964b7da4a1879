"""The `slipstream` command: flags in, text and JSON out. All work is done by the library; nothing here decides.

With `--json` the last line of stdout is one JSON object and everything else goes to stderr. Exit codes: 0 done,
1 failed, 2 wrong use; an error on purpose is one red line. torch is imported by the commands that need it, never for
`--help` or to refuse an option.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from slipstream.commands.bench import bench
from slipstream.commands.calibrate import calibrate
from slipstream.commands.chat import chat
from slipstream.commands.evaluate import evaluate
from slipstream.commands.export import export
from slipstream.commands.generate import generate
from slipstream.commands.inspect import inspect
from slipstream.commands.profile import profile
from slipstream.commands.serve import serve
from slipstream.commands.simulate import simulate
from slipstream.commands.trace import trace
from slipstream.commands.train import train
from slipstream.commands.verify_exact import verify_exact
from slipstream.errors import SlipstreamError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

# In the order of `--help`; each with its example.
COMMANDS: tuple[tuple[Callable[..., None], str], ...] = (
    (generate, 'generate "Why is the sky blue?" --draft smollm2-135m-dspark --verify lag'),
    (chat, "chat --draft smollm2-135m-dspark --verify lag --temperature 0.7"),
    (serve, "serve --draft smollm2-135m-dspark --verify lag --port 8000"),
    (bench, "bench --modes off,static,lag --concurrency 1,8 --waves 5 --json"),
    (profile, "profile --draft smollm2-135m-dspark --budget 30"),
    (trace, "trace --out runs/trace.npz --prompts questions.jsonl --requests 32 --concurrency 32"),
    (simulate, "simulate --trace runs/trace.npz --profile runs/cost.json --concurrency 1,32 --plot runs/simulate.png"),
    (evaluate, "evaluate --draft smollm2-135m-dspark --limit 4 --temperature 0"),
    (verify_exact, "verify-exact --draft smollm2-135m-dspark --requests 4 --samples 200"),
    (inspect, "inspect smollm2-135m-dspark --json"),
    (
        export,
        "export smollm2-135m-dspark out --dialect speculators --model smollm2-135m --target-name HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    (calibrate, "calibrate --draft runs/dspark/drafter --temperature 0,1 --plot reliability.png"),
    (train, "train --out runs/dspark --steps 2000 --prompts questions.jsonl"),
)
for command, example in COMMANDS:
    app.command(epilog=f"Example: slipstream {example}")(command)


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
