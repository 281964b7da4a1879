"""`slipstream chat`."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from slipstream.commands import flags
from slipstream.commands.generate import show_answers
from slipstream.commands.shared import no_logprobs, options_of, print_json, say, screen, start
from slipstream.config import SamplingParams
from slipstream.errors import RequestError
from slipstream.lab.paint import show

if TYPE_CHECKING:
    from slipstream.llm import LLM


def chat(
    model: flags.Model = None,
    draft: flags.Draft = None,
    draft_layout: flags.Layout = None,
    verify: flags.Verify = None,
    num_speculative_tokens: flags.NumDrafts = None,
    cost_model: flags.CostModel = None,
    acceptance: flags.Rule = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: flags.Temperature = None,
    top_p: flags.TopP = None,
    top_k: flags.TopK = None,
    seed: flags.Seed = None,
    max_tokens: flags.MaxTokens = None,
    dtype: flags.Dtype = None,
    device: flags.Device = None,
    config: flags.Config = None,
    as_json: flags.Json = False,
) -> None:
    """Talk; tokens from accepted drafts are green. /reset forgets, /exit (or end of input) ends.

    With several answers a turn (n in the config file) all are shown, and the first is the one that was said.
    """
    options = options_of(locals(), own=("system",))
    params = options.sampling_params()
    no_logprobs(params, "chat shows none; drop the option, or use generate")
    llm = start(options, max_num_seqs=params.n)
    opening = [{"role": "system", "content": options.command["system"]}] if options.command.get("system") else []
    out, messages = screen(as_json), list(opening)
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
            say(f"{error}; /reset starts over")
    if as_json:
        print_json({"messages": messages})


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
    """Stream one answer to the screen and return its text; of several, show all when they are whole."""
    if params.n > 1:
        answers = llm.chat([messages], params)
        show_answers(llm, answers, out)
        return answers[0].text
    text, num_tokens, num_accepted, start = "", 0, 0, time.perf_counter()
    for chunk in llm.stream(messages, params):
        show(out, chunk.pieces)
        text += chunk.text
        num_tokens += len(chunk.token_ids)
        num_accepted += sum(chunk.accepted)
    out.print()
    say(f"{num_tokens} tokens, {num_accepted} from drafts, {num_tokens / (time.perf_counter() - start):.1f} tok/s")
    return text
