"""Does a drafter read its rows the way its file says? A few blocks over a short answer of the target tell.

The two layouts differ in which row predicts which token; a wrong choice loads cleanly and drafts at under 1%
acceptance, and the output stays right, so nothing else would say it. The target continues a fixed prompt, one pass
of the drafter runs blocks from anchors all over the answer, and the same rows are compared with the target's tokens
under both readings. Knows nothing of pages or sampling; called by `load.load_models` for files of other makers.

Shapes: L tokens of prompt and answer, N blocks, m tokens compared per block, R rows of a call, K taps.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slipstream.models.block_attend import DenseBlockAttend
from slipstream.models.decoder import Decoder
from slipstream.models.drafters import BlockDrafter
from slipstream.models.layers import DenseAttend
from slipstream.models.layout import Layout
from slipstream.models.spec import DecoderSpec

# Code is easy to draft: on the two drafters for SmolLM2-135M the right reading agrees with 92 and 47% here, the wrong one
# with 2 and 12%; on an explanation or a story they come as close as 28 and 12% (bench/results/layout-probe.json).
PROMPT = "Write a Python function that checks whether a number is prime."
_ANSWER_TOKENS, _LEAST_ANSWER = 32, 12  # all of it if time allows; fewer than the least say nothing
_BLOCKS, _COMPARED = 32, 2  # drafts after the second are weak in any layout
_RATIO, _MARGIN = 2.0, 0.1  # what "clearly better" means


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutAgreement:
    """Share of drafts that are the target's own next tokens, under the layout as read and under the other one."""

    layout: Layout
    as_read: float
    other: float
    num_compared: int

    @property
    def other_layout(self) -> Layout:
        return "fill_in" if self.layout == "anchor_first" else "anchor_first"

    @property
    def verdict(self) -> Literal["agrees", "contradicts", "inconclusive"]:
        """Which reading is clearly better: agrees with at least twice as many tokens, and by 10 points at least."""
        if _clearly_better(self.other, self.as_read):
            return "contradicts"
        return "agrees" if _clearly_better(self.as_read, self.other) else "inconclusive"

    def __str__(self) -> str:
        return (
            f"on {self.num_compared} drafts of an answer of the target, {self.layout} agrees with {self.as_read:.0%}, "
            f"{self.other_layout} with {self.other:.0%}"
        )


def _clearly_better(one: float, other: float) -> bool:
    return one >= _RATIO * other and one - other >= _MARGIN


@torch.no_grad()
def layout_agreement(
    target: Decoder, drafter: BlockDrafter, prompt_ids: Sequence[int], seconds: float = 5.0
) -> LayoutAgreement | None:
    """Both readings of the drafter's rows; None where the target is too slow, or its context too short, to tell.

    The drafter shares the target's tables already. The answer ends early after `seconds`.
    """
    num_compared, start = min(_COMPARED, drafter.spec.block_size - 1), len(prompt_ids)
    room = min(target.spec.max_position_embeddings, drafter.spec.max_position_embeddings)
    limit = min(start + _ANSWER_TOKENS, room)
    if start == 0 or limit < start + _LEAST_ANSWER:
        return None
    tokens, features = _greedy_answer(target, prompt_ids, drafter.spec.target_layer_ids, limit, seconds)
    if len(tokens) < start + _LEAST_ANSWER:
        return None
    last = len(tokens) - 1 - num_compared  # anchors from start to last: their drafts lie in the answer
    anchors = torch.linspace(start, last, min(_BLOCKS, last - start + 1), device=tokens.device).long()
    logits = _block_logits(drafter, tokens, features, anchors)[:, : num_compared + 1]
    drafts = drafter.to_target(logits.argmax(dim=-1))  # [N, m + 1]
    truth = tokens[anchors[:, None] + torch.arange(1, num_compared + 1, device=tokens.device)]  # [N, m]
    fill_in = float((drafts[:, 1:] == truth).float().mean())
    anchor_first = float((drafts[:, :-1] == truth).float().mean())
    as_read, other = (fill_in, anchor_first) if drafter.spec.layout == "fill_in" else (anchor_first, fill_in)
    return LayoutAgreement(layout=drafter.spec.layout, as_read=as_read, other=other, num_compared=truth.numel())


def _block_logits(drafter: BlockDrafter, tokens: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
    """[N, n, Vd] of whole blocks, without the Markov bias: it knows the token before, whatever the layout."""
    spec = drafter.spec
    places = torch.arange(len(features), device=tokens.device)
    steps = torch.arange(spec.block_size, device=tokens.device)
    block = torch.where(steps == 0, tokens[anchors][:, None], spec.mask_token_id)
    positions = (anchors[:, None] + steps).clamp(max=spec.max_position_embeddings - 1)
    attend = DenseBlockAttend(spec, drafter.context_kv(features, places), places, anchors)
    return drafter.base_logits(drafter.hidden(drafter.embed(block), positions, attend))


def _greedy_answer(
    target: Decoder, prompt_ids: Sequence[int], taps: Sequence[int], limit: int, seconds: float
) -> tuple[Tensor, Tensor]:
    """Prompt and answer [L], L at most `limit`, and the features [L - 1, K * H] of all but the last token."""
    device, deadline = target.head_weight.device, time.monotonic() + seconds
    tokens = torch.tensor(list(prompt_ids), device=device)
    attend, given = _GrowingAttend(target.spec), tokens
    features: list[Tensor] = []
    while len(tokens) < limit and (not features or time.monotonic() < deadline):
        positions = torch.arange(len(tokens) - len(given), len(tokens), device=device)
        hidden, tapped = target(given, positions, attend, taps)
        assert tapped is not None
        features.append(tapped)
        given = target.logits(hidden[-1:]).argmax(dim=-1)
        tokens = torch.cat((tokens, given))
    return tokens, torch.cat(features)


class _GrowingAttend:
    """Causal attention of one sequence that keeps its keys and values: the prompt at once, then a row at a time."""

    def __init__(self, spec: DecoderSpec) -> None:
        self.spec, self.prompt = spec, DenseAttend(spec)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> k and v, each [rows so far, kv_heads, hd]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R, heads, hd], k and v [R, kv_heads, hd] -> [R, heads * hd]."""
        if layer not in self.kept:
            self.kept[layer] = (k, v)
            return self.prompt(layer, q, k, v)
        past_k, past_v = self.kept[layer]
        k, v = self.kept[layer] = (torch.cat((past_k, k)), torch.cat((past_v, v)))
        window = self.spec.window(layer) or len(k)
        keys, values = k[-window:].transpose(0, 1), v[-window:].transpose(0, 1)  # [kv_heads, rows, hd]
        out = scaled_dot_product_attention(q.transpose(0, 1)[None], keys[None], values[None], enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)
