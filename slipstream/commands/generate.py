"""`slipstream generate`."""

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from slipstream.commands import flags
from slipstream.commands.shared import no_logprobs, options_of, print_json, say, screen, start
from slipstream.errors import EngineError, RequestError
from slipstream.lab.paint import pieces_of, show
from slipstream.prompts import user
from slipstream.stream import cut

if TYPE_CHECKING:
    from slipstream.llm import LLM, Completion
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
    stop: flags.Stop = None,
    n: flags.NumAnswers = None,
    logprobs: flags.Logprobs = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    dtype: flags.Dtype = None,
    device: flags.Device = None,
    deterministic: flags.Deterministic = None,
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
    if not as_json:
        no_logprobs(params, "shown with --json only; add it, or drop the option")
    llm = start(options, max_num_seqs=params.n)
    answers = llm.generate([text], params) if raw else llm.chat([user(text)], params)
    show_answers(llm, answers, screen(as_json))
    if as_json:
        print_json(_report(answers))


def show_answers(llm: "LLM", answers: "list[Completion]", out: Console) -> None:
    """Answers to one prompt, numbered where there are several. EngineError where one of them failed."""
    for answer in answers:
        if len(answers) > 1:
            say(f"answer {answer.index + 1} of {len(answers)}")
        show(out, cut(pieces_of(llm.tokenizer, answer.token_ids, answer.accepted), len(answer.text)))
        out.print()
        say(_summary(answer.spec, answer.timing.tok_per_s))
    if errors := [answer.error for answer in answers if answer.error]:
        raise EngineError(errors[0])


def _report(answers: "list[Completion]") -> dict[str, Any]:
    """The answer; of several, a list of them, and their usage together."""
    if len(answers) == 1:
        return _answer_report(answers[0])
    from slipstream.llm import usage_of

    return {"answers": [_answer_report(answer) for answer in answers], "usage": usage_of(answers)}


def _answer_report(answer: "Completion") -> dict[str, Any]:
    entries = {name: getattr(answer, name) for name in ("logprobs", "prompt_logprobs")}  # None: not asked for
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "usage": answer.usage,
        "spec": answer.spec.as_dict(),
        "timing": answer.timing.as_dict(),
        **{name: [entry and asdict(entry) for entry in of] for name, of in entries.items() if of is not None},
    }


def _summary(spec: "SpecCounters", tok_per_s: float | None) -> str:
    """One line about a finished answer."""
    parts = [f"mode {spec.mode}", f"{spec.emitted} tokens in {spec.steps} decode steps"]
    if spec.verified:
        parts.append(f"{spec.accepted} of {spec.verified} verified drafts accepted ({spec.drafted} drafted)")
    if tok_per_s is not None:
        parts.append(f"{tok_per_s:.1f} tok/s")
    return ", ".join(parts)
