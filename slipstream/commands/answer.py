"""`slipstream generate` and `slipstream chat`."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from slipstream.commands import flags
from slipstream.commands.shared import options_of, print_json, say, screen, start
from slipstream.config import SamplingParams
from slipstream.errors import EngineError, RequestError
from slipstream.lab.paint import pieces_of, show
from slipstream.prompts import user

if TYPE_CHECKING:
    from slipstream.llm import LLM
    from slipstream.metrics import SpecCounters


def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads stdin.")],
    model: flags.Model = None,
    draft: flags.Draft = None,
    verify: flags.Verify = None,
    num_speculative_tokens: flags.NumDrafts = None,
    cost_model: flags.CostModel = None,
    acceptance: flags.Rule = None,
    temperature: flags.Temperature = None,
    top_p: flags.TopP = None,
    top_k: flags.TopK = None,
    seed: flags.Seed = None,
    max_tokens: flags.MaxTokens = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    dtype: flags.Dtype = None,
    device: flags.Device = None,
    config: flags.Config = None,
    as_json: flags.Json = False,
) -> None:
    """Answer one prompt."""
    if prompt == "-" and sys.stdin is None:
        raise RequestError("prompt is -, but stdin is closed; give a text or open stdin")
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise RequestError("prompt is empty; give a text to answer")
    options = options_of(locals())
    params = options.sampling_params()
    llm = start(options, max_num_seqs=1)
    completion = (llm.generate([text], params) if raw else llm.chat([user(text)], params))[0]
    out = screen(as_json)
    show(out, pieces_of(llm.tokenizer, completion.token_ids, completion.accepted))
    out.print()
    say(_summary(completion.spec, completion.timing.tok_per_s))
    if completion.error:
        raise EngineError(completion.error)
    if as_json:
        print_json(
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


def chat(
    model: flags.Model = None,
    draft: flags.Draft = None,
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
    """Talk; tokens from accepted drafts are green. /reset forgets, /exit (or end of input) ends."""
    options = options_of(locals(), own=("system",))
    params = options.sampling_params()
    llm = start(options, max_num_seqs=1)
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
    """Stream one answer to the screen and return its text."""
    text, num_tokens, num_accepted, start = "", 0, 0, time.perf_counter()
    for chunk in llm.stream(messages, params):
        show(out, chunk.pieces)
        text += chunk.text
        num_tokens += len(chunk.token_ids)
        num_accepted += sum(chunk.accepted)
    out.print()
    say(f"{num_tokens} tokens, {num_accepted} from drafts, {num_tokens / (time.perf_counter() - start):.1f} tok/s")
    return text


def _summary(spec: "SpecCounters", tok_per_s: float | None) -> str:
    """One line about a finished answer."""
    parts = [f"mode {spec.mode}", f"{spec.emitted} tokens in {spec.steps} steps"]
    if spec.verified:
        parts.append(f"{spec.accepted} of {spec.verified} verified drafts accepted ({spec.drafted} drafted)")
    if tok_per_s is not None:
        parts.append(f"{tok_per_s:.1f} tok/s")
    return ", ".join(parts)
