"""How far back n-gram look-up should compare: tokens per step and conditional acceptance, by longest match allowed.

    python bench/ngram.py --answers runs/ngram-answers.json --out bench/results/ngram-match.json

Greedy answers are generated once (and kept with --answers); then `ops.lookup` walks over them as serving would, each step
from the newest token, as many tokens on as its drafts were right. Answers that end in a loop are easy to draft, so figures
come with and without them. `log_loss` says how well (match length, position) tells accepted drafts from rejected ones: per
draft tried, counted on every other answer and tested on the rest.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream import LLM, SamplingParams, SpeculativeConfig
from slipstream.lab import machine
from slipstream.ops.lookup import lookup
from slipstream.prompts import read_prompts
from slipstream.repetition import ends_in_loop

SETS = ("gsm8k", "humaneval", "mbpp", "math500", "mt_bench")
Step = tuple[int, int, int]  # match length, accepted drafts, drafts that lie within the answer


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="target: name, folder or .gguf file")
    parser.add_argument("--draft", default="smollm2-135m-dspark", help="what generates the answers faster")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "data" / "prompts")
    parser.add_argument("--limit", type=int, default=14, help="prompts per set")
    parser.add_argument("--max-tokens", type=int, default=320, help="new tokens per answer")
    parser.add_argument("--drafts", type=int, default=7, help="S")
    parser.add_argument("--matches", nargs="+", type=int, default=[1, 2, 3, 4, 6, 8, 16], help="longest matches to try")
    parser.add_argument(
        "--answers", type=Path, default=None, help="JSON file to keep the answers in, or to read them from"
    )
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    return parser.parse_args()


def make_answers(options: argparse.Namespace) -> list[dict[str, Any]]:
    if options.answers and options.answers.exists():
        return json.loads(options.answers.read_text())
    llm = LLM(
        options.model, speculative=SpeculativeConfig(draft_model=options.draft), max_num_seqs=8, prefix_caching=False
    )
    found = []
    for name in SETS:
        texts = read_prompts(options.prompts / f"{name}.jsonl", limit=options.limit)
        chats = [[{"role": "user", "content": text}] for text in texts]
        for chat, answer in zip(chats, llm.chat(chats, SamplingParams(max_tokens=options.max_tokens)), strict=True):
            prompt = llm.tokenizer.encode(llm.tokenizer.chat(chat))
            found.append({"set": name, "prompt": prompt, "answer": list(answer.token_ids)})
    if options.answers:
        options.answers.parent.mkdir(parents=True, exist_ok=True)
        options.answers.write_text(json.dumps(found))
    return found


def walk(prompt: Sequence[int], answer: Sequence[int], num_drafts: int, max_match: int) -> list[Step]:
    """The steps of one answer; its first token comes from the prompt's own forward."""
    text = torch.tensor([*prompt, *answer])
    anchors = torch.arange(len(prompt), len(text) - 1)
    if not len(anchors):
        return []
    drafts, length = lookup(text[None].int(), torch.zeros_like(anchors), anchors, len(text) - 1, num_drafts, max_match)
    ahead = anchors[:, None] + 1 + torch.arange(num_drafts)
    right = (ahead < len(text)) & (text[ahead.clamp(max=len(text) - 1)] == drafts)
    accepted = right.long().cumprod(1).sum(1).tolist()
    steps, at = [], 0
    while at < len(anchors):
        steps.append((int(length[at]), accepted[at], min(num_drafts, len(anchors) - at)))
        at += accepted[at] + 1
    return steps


def tokens_per_step(walks: Sequence[list[Step]]) -> float | None:
    steps = [step for each in walks for step in each]
    return round(sum(accepted + 1 for _, accepted, _ in steps) / len(steps), 3) if steps else None


def counts(walks: Sequence[list[Step]], num_drafts: int, max_match: int) -> torch.Tensor:
    """[M + 1, S, 2] drafts tried and accepted; a draft is tried where all before it were accepted."""
    table = torch.zeros(max_match + 1, num_drafts, 2)
    for length, accepted, within in (step for each in walks for step in each):
        for position in range(min(within, accepted + 1)):
            table[length, position] += torch.tensor([1.0, float(position < accepted)])
    return table


def log_loss(seen: torch.Tensor, unseen: torch.Tensor) -> float:
    share = (seen[..., 1] + 1) / (seen[..., 0] + 2)
    tried, accepted = unseen.unbind(-1)
    total = -(accepted * share.log() + (tried - accepted) * (1 - share).log()).sum() / tried.sum()
    assert math.isfinite(total)
    return round(float(total), 4)


def figures(answers: Sequence[dict[str, Any]], num_drafts: int, max_match: int) -> dict[str, Any]:
    walks = [walk(each["prompt"], each["answer"], num_drafts, max_match) for each in answers]
    straight = [not ends_in_loop(each["answer"]) for each in answers]
    by_set = {}
    for name in SETS:
        mine = [i for i, each in enumerate(answers) if each["set"] == name]
        by_set[name] = {
            "all": tokens_per_step([walks[i] for i in mine]),
            "no_loops": tokens_per_step([walks[i] for i in mine if straight[i]]),
        }
    halves = [counts(walks[start::2], num_drafts, max_match) for start in (0, 1)]
    tried, accepted = (halves[0] + halves[1]).unbind(-1)
    return {
        "tokens_per_step": by_set,
        "log_loss": log_loss(halves[0], halves[1]),
        "tried_first": tried[:, 0].long().tolist(),
        "acceptance": (accepted / tried.clamp(min=1)).mul(1000).round().div(1000).tolist(),
    }


def main() -> None:
    options = arguments()
    answers = make_answers(options)
    report = {
        "git": machine.git_commit(),
        "versions": machine.versions(),
        "conditions": {
            "target": options.model, "temperature": 0.0, "max_tokens": options.max_tokens, "S": options.drafts,
            "prompts_per_set": options.limit, "answers": len(answers),
            "looping": sum(ends_in_loop(each["answer"]) for each in answers),
        },
        "by_longest_match": {str(m): figures(answers, options.drafts, m) for m in options.matches},
    }  # fmt: skip
    for longest, found in report["by_longest_match"].items():
        means = found["tokens_per_step"]
        print(
            f"up to {longest:2} tokens: log loss {found['log_loss']:.3f}, tokens per step (without loops) "
            + ", ".join(f"{name} {each['all']:.2f} ({each['no_loops']:.2f})" for name, each in means.items())
        )
    text = json.dumps(report, indent=1)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
