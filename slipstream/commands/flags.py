"""The flags that mean the same in every command. `Model`, `Draft`, ... are the types of a command's parameters."""

from pathlib import Path
from typing import Annotated

import typer

from slipstream.config import MODES

Model = Annotated[
    str | None, typer.Option(help="Folder, .gguf file, built-in name or random:SHAPE. Default: smollm2-135m.")
]
DRAFTER = "Drafter: folder, built-in name, ngram or random."
Draft = Annotated[str | None, typer.Option("--draft", help=f"{DRAFTER} Default: none.")]
MeasuredDraft = Annotated[
    str | None, typer.Option("--draft", help=f"{DRAFTER} Default: smollm2-135m-dspark, with the default model.")
]
NeededDraft = Annotated[str | None, typer.Option("--draft", help=f"{DRAFTER} Must be given.")]
Layout = Annotated[
    str | None,
    typer.Option("--draft-layout", help="Read the drafter's rows as fill_in or anchor_first. Default: as it says."),
]
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
Stop = Annotated[
    list[str] | None, typer.Option(help="A text that ends the answer and is no part of it; may be given several times.")
]
NumAnswers = Annotated[int | None, typer.Option("--n", help="Answers to the prompt, each drawn anew. Default: 1.")]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs", help="With --json: log-probabilities of output tokens, and of so many top ones. Default: none."
    ),
]
MaxTokens = Annotated[int | None, typer.Option(help="Output tokens at most. Default: 256.")]
Dtype = Annotated[str | None, typer.Option(help="auto, bfloat16, float16 or float32. Default: auto.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda. Default: auto.")]
KVMemory = Annotated[
    str | None, typer.Option(help="Bytes for keys and values: 500000000, 2GiB. Default: what memory and slots allow.")
]
Utilization = Annotated[
    float | None, typer.Option(help="GPU: part of its memory to use, that of others included. Default: 0.9.")
]
Deterministic = Annotated[
    bool | None, typer.Option("--deterministic", help="GPU: the same bits whatever shares a step. Default: no.")
]
Config = Annotated[Path | None, typer.Option(help="Options from a JSON or TOML file; flags win over it.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object as the last line of stdout, the rest on stderr.")]
PromptSets = Annotated[
    list[Path] | None,
    typer.Option("--prompts", help="JSON lines with turns, a set each; may be given again. Default: a sample."),
]
