"""`make demo`: three prompts answered plainly, with all drafts verified, and with widths decided one step ahead.

The same bench as `slipstream bench`, on the built-in pair, with the answers shown: green text came from accepted drafts,
and it is the same text in all three modes. The last line is the bench's JSON object.
"""

import json
import os
import sys

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from slipstream.config import SamplingParams
from slipstream.errors import SlipstreamError
from slipstream.lab.bench import BenchResult, read_requests, run
from slipstream.lab.bench_options import BenchOptions, label
from slipstream.lab.paint import ACCEPTED, painted, pieces_of
from slipstream.lab.report import plain_json, rows_table
from slipstream.models.locate import resolve_target
from slipstream.models.tokenizer import load_tokenizer

OPTIONS = BenchOptions(
    model="smollm2-135m",
    draft="smollm2-135m-dspark",
    modes=("off", "static", "lag"),
    requests=3,
    waves=2,
    sampling=SamplingParams(max_tokens=112),
    engine={
        "dtype": "float32"
    },  # where the text of all modes is equal; bf16 is faster, but rounds near ties either way
)


def main() -> None:
    # Colours are the point of the demo, so they stay when the output is a pipe; NO_COLOR switches them off.
    forced = None if "NO_COLOR" in os.environ else True
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 110, force_terminal=forced)
    try:
        out.print(Text(f"{OPTIONS.model} with drafter {OPTIONS.draft}", style="bold"))
        result = run(OPTIONS, lambda line: out.print(Text(line, style="dim")))
    except SlipstreamError as error:
        Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
        sys.exit(error.exit_code)
    show(result, out)
    print(json.dumps(plain_json(result.report), allow_nan=False))


def show(result: BenchResult, out: Console) -> None:
    """Prompts, each with its answers by mode, and the table."""
    tokenizer = load_tokenizer(resolve_target(OPTIONS.model))
    out.print(Text("text from accepted drafts is ").append("green", style=ACCEPTED))
    for index, prompt in enumerate(read_requests(OPTIONS)):
        out.print(Rule(f"prompt {index + 1}", style="dim"))
        out.print(Text(prompt, style="italic"))
        for case, completions in zip(result.cases, result.completions, strict=True):
            answer = completions[index]
            out.print(Text(f"\n[{label(case)}]", style="bold"))
            out.print(painted(pieces_of(tokenizer, answer.token_ids, answer.accepted)))
    out.print()
    out.print(rows_table(result.report["rows"], f"{OPTIONS.model}, {result.report['rows'][0]['dtype']}, greedy"))


if __name__ == "__main__":
    main()
