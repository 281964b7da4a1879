"""How many tokens a step yields: greedy walks of drafters over the target's own greedy answers, by prompt set.

    python bench/acceptance.py --draft smollm2-135m-dspark --drafts 7 16 --out bench/results/acceptance.json

Answers are generated once (and kept with --answers), then every drafter walks over them as serving would; see
`slipstream/train/walks.py`. Answers that end in a loop are easy to draft, so figures come with and without them.
The table is printed, the JSON written last. A GPU does it in half a minute; on a CPU use --limit.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from slipstream.models.decoder import Decoder
from slipstream.models.drafters import load_drafter
from slipstream.models.locate import resolve_drafter, resolve_target
from slipstream.models.tokenizer import load_tokenizer
from slipstream.models.weights import load_decoder
from slipstream.prompts import read_prompts
from slipstream.train.answers import AnswerSet, SlotGenerator
from slipstream.train.prompts import greedy_answers
from slipstream.train.walks import evaluate

SETS = ("gsm8k", "humaneval", "mbpp", "math500", "mt_bench")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="target: name, folder or .gguf file")
    parser.add_argument("--draft", nargs="+", required=True, help="drafter names or folders")
    parser.add_argument(
        "--drafts", nargs="+", type=int, default=[7], help="S, one or several; cut to what a drafter can do"
    )
    parser.add_argument(
        "--prompts", type=Path, default=Path(__file__).parent / "data" / "prompts", help="folder of JSONL files"
    )
    parser.add_argument("--sets", nargs="+", default=list(SETS), help="files of that folder, without .jsonl")
    parser.add_argument("--limit", type=int, default=None, help="prompts per set")
    parser.add_argument("--max-tokens", type=int, default=512, help="new tokens per answer")
    parser.add_argument(
        "--answers", type=Path, default=None, help="folder to keep the answers in, or to read them from"
    )
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    return parser.parse_args()


def answer_sets(options: argparse.Namespace, target: Decoder) -> dict[str, AnswerSet]:
    """Greedy answers per prompt set, all generated side by side."""
    prompts = {name: read_prompts(options.prompts / f"{name}.jsonl", limit=options.limit) for name in options.sets}
    paths = {name: options.answers / f"{name}.safetensors" for name in prompts} if options.answers else {}
    if paths and all(path.exists() for path in paths.values()):
        return {name: AnswerSet.load(path) for name, path in paths.items()}
    tokenizer = load_tokenizer(resolve_target(options.model))
    slots = sum(len(texts) for texts in prompts.values()) if torch.cuda.is_available() else 8
    generator = SlotGenerator(target, num_slots=slots, max_length=512 + options.max_tokens, seed=0)
    found = greedy_answers(generator, tokenizer, prompts, options.max_tokens)
    for name, path in paths.items():
        found[name].save(path)
    return found


def main() -> None:
    options = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    target = load_decoder(resolve_target(options.model), dtype, device)
    started = time.monotonic()
    answers = answer_sets(options, target)
    report: dict[str, Any] = {
        "conditions": {
            "target": options.model,
            "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu",
            "dtype": str(dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "temperature": 0.0,
            "max_tokens": options.max_tokens,
            "prompts": {name: len(texts) for name, texts in answers.items()},
            "answer_tokens": {name: texts.num_answer_tokens for name, texts in answers.items()},
        },
        "drafters": {},
    }
    print(f"answers: {time.monotonic() - started:.1f} s")
    for name in options.draft:
        drafter = load_drafter(resolve_drafter(name), target)
        for drafts in dict.fromkeys(min(s, drafter.spec.max_draft_tokens) for s in options.drafts):
            figures = {each: evaluate(target, drafter, texts, drafts) for each, texts in answers.items()}
            report["drafters"].setdefault(name, {})[f"S={drafts}"] = figures
            print(f"{name}, S = {drafts}: tokens per step")
            for each, figure in figures.items():
                whole, straight = figure["all"], figure["no_loops"]
                print(
                    f"  {each:10} {whole['mean_accepted_length']:.2f}, without the {figure['looping_share']:.0%} loops "
                    f"{straight['mean_accepted_length']:.2f}, by position {whole['acceptance_by_position']}"
                )
    text = json.dumps(report, indent=1)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text if options.out is None else f"-> {options.out}")


if __name__ == "__main__":
    main()
