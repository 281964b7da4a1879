"""`slipstream generate`."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.commands import flags
from slipstream.commands.shared import options_of, print_json, say, screen, start
from slipstream.errors import EngineError, RequestError
from slipstream.lab.paint import pieces_of, show
from slipstream.prompts import user

if TYPE_CHECKING:
    from slipstream.metrics import SpecCounters


def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads stdin.")],
    model: flags.Model = None,
    draft: flags.Draft = None,
    draft_layout: flags.Layout = None,
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


def _summary(spec: "SpecCounters", tok_per_s: float | None) -> str:
    """One line about a finished answer."""
    parts = [f"mode {spec.mode}", f"{spec.emitted} tokens in {spec.steps} decode steps"]
    if spec.verified:
        parts.append(f"{spec.accepted} of {spec.verified} verified drafts accepted ({spec.drafted} drafted)")
    if tok_per_s is not None:
        parts.append(f"{tok_per_s:.1f} tok/s")
    return ", ".join(parts)
