"""How often greedy text in this dtype leaves that of plain decoding, and how near a tie it was where it did.

A kernel sums in another order for another number of rows, and in bf16 that can turn an argmax. The gap between the two
best logits at the first difference says whether it was such a tie: the target computes it over the common text.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from bench.gpu_parts.goals import Report, reported
from bench.gpu_parts.scale import Scale
from bench.gpu_parts.session import Clock, Session, serve, tokens
from bench.gpu_parts.small import slots_for
from slipstream.load import Models
from slipstream.models.layers import DenseAttend

MODES = ("static", "adaptive", "lag", "lag-budget")
ALONE = 32  # prompts that are decoded one at a time


def run(session: Session, scale: Scale, clock: Clock) -> Report:
    at = scale.small_at[-2]
    slots = slots_for(scale, at)
    prompts = session.pair.prompts(session.models, scale.agreement_prompts)
    params = tokens(scale.output_tokens, ignore_eos=False)

    def answers(mode: str, concurrency: int, count: int) -> list[Sequence[int]]:
        llm = session.llm(mode, scale.drafts[0], slots)
        return [c.token_ids for c in serve(llm, prompts[:count], params, concurrency).completions]

    plain = answers("off", at, len(prompts))
    found = {mode: compare(session.models, prompts, plain, answers(mode, at, len(prompts))) for mode in MODES}
    if clock.allows("off, one request at a time", 10.0):  # what other rows beside it do to plain decoding itself
        few = prompts[:ALONE]
        found["off at 1"] = compare(session.models, few, plain[:ALONE], answers("off", 1, ALONE))
    name, dtype = session.pair.name, str(session.models.dtype).removeprefix("torch.")
    report = {
        "dtype": dtype,
        "prompts": len(prompts),
        "concurrency": at,
        "max_tokens": scale.output_tokens,
        "modes": found,
    }
    goals = []
    for mode, figures in found.items():
        goals.append(reported(f"{name}, {dtype}: {mode}: share of prompts that leave plain decoding", figures["share"]))
        if figures["top2_gap"]:
            goals.append(reported(f"{name}, {dtype}: {mode}: largest top-2 gap where they do", figures["largest_gap"]))
    return report, goals


def compare(
    models: Models, prompts: Sequence[Sequence[int]], plain: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Share of answers that differ, and for each the place and the gap of the target's two best logits there."""
    places = [first_difference(a, b) for a, b in zip(plain, ours, strict=True)]
    gaps = [
        top2_gap(models, [*prompt, *answer[:place]])
        for prompt, answer, place in zip(prompts, plain, places, strict=True)
        if place is not None
    ]
    found = [place for place in places if place is not None]
    return {
        "share": len(found) / len(places), "first_difference": found, "top2_gap": gaps,
        "median_gap": statistics.median(gaps) if gaps else None, "largest_gap": max(gaps, default=None),
    }  # fmt: skip


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first place at which two answers are not the same, the end of one included; None: they are equal."""
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return None if place == len(a) == len(b) else place


@torch.inference_mode()
def top2_gap(models: Models, token_ids: Sequence[int]) -> float:
    """Difference of the two largest logits of the token that follows these."""
    target = models.target
    ids = torch.tensor(token_ids, device=models.device)
    positions = torch.arange(len(token_ids), device=models.device)
    hidden, _ = target(ids, positions, DenseAttend(target.spec))
    logits = target.head_weight[: models.vocab_size].float() @ hidden[-1].float()  # the head's own rounding left out
    best = logits.topk(2).values
    return float(best[0] - best[1])
