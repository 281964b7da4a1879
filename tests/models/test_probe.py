"""The layout probe: what it counts, what it calls a contradiction, and when it says nothing."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from slipstream.models import probe
from slipstream.models.checkpoint import DrafterSpec
from slipstream.models.decoder import Decoder
from slipstream.models.drafters import BlockDrafter
from slipstream.models.layers import DenseAttend
from slipstream.models.probe import LayoutAgreement, layout_agreement
from slipstream.models.spec import FULL, SLIDING, DecoderSpec

Make = Callable[..., DrafterSpec]
PROMPT = [5, 9, 33, 2, 60]


@pytest.fixture
def target(target_spec: DecoderSpec) -> Decoder:
    spec = dataclasses.replace(target_spec, sliding_window=4, layer_types=(FULL, SLIDING, FULL, SLIDING))
    return Decoder(spec, torch.float32).init_random(1, std=0.3)


@torch.no_grad()
def greedy(target: Decoder, num_tokens: int) -> tuple[list[int], Tensor]:
    """The answer and the features, every token from a forward over everything before it."""
    tokens = list(PROMPT)
    for _ in range(num_tokens):
        hidden, features = target(torch.tensor(tokens), torch.arange(len(tokens)), DenseAttend(target.spec), (0, 2))
        tokens.append(int(target.logits(hidden[-1]).argmax()))
    assert features is not None
    return tokens, features


def scripted(shift: int, right_every: int = 1) -> Callable[..., Tensor]:
    """Rows whose draft is the token at anchor + row + shift, in every `right_every`th block; else token 0."""

    def logits(drafter: BlockDrafter, tokens: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        steps = torch.arange(drafter.spec.block_size)
        meant = tokens[(anchors[:, None] + steps + shift).clamp(max=len(tokens) - 1)]
        wrong = torch.arange(len(anchors)) % right_every != 0
        return one_hot(meant.masked_fill(wrong[:, None], 0), 64).float()

    return logits


def drafter_of(spec: DrafterSpec, target: Decoder) -> BlockDrafter:
    drafter = BlockDrafter(spec, torch.float32).init_random(2, std=0.3)
    drafter.share(target)
    return drafter


@pytest.mark.parametrize("layout", ["fill_in", "anchor_first"])
@pytest.mark.parametrize("shift", [0, 1])
def test_the_reading_that_fits_the_targets_tokens_wins(
    drafter_spec: Make, target: Decoder, monkeypatch: pytest.MonkeyPatch, layout: str, shift: int
) -> None:
    """A drafter that is right under one reading, read rightly and wrongly."""
    monkeypatch.setattr(probe, "_block_logits", scripted(shift))
    found = layout_agreement(target, drafter_of(drafter_spec(layout=layout), target), PROMPT)
    assert found is not None
    right = (shift == 0) == (layout == "fill_in")
    assert found.verdict == ("agrees" if right else "contradicts")
    assert (found.as_read if right else found.other) == 1.0
    assert found.layout == layout
    assert found.num_compared > 40
    assert f"{layout} agrees with {found.as_read:.0%}" in str(found)


def test_a_drafter_that_is_right_now_and_then_is_read_as_well(
    drafter_spec: Make, target: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block in four right: a quarter of the drafts against what repeats by chance."""
    monkeypatch.setattr(probe, "_block_logits", scripted(1, right_every=4))
    found = layout_agreement(target, drafter_of(drafter_spec(layout="fill_in"), target), PROMPT)
    assert found is not None
    assert 0.2 <= found.other <= 0.4


@pytest.mark.parametrize(
    ("as_read", "other", "verdict"),
    [
        (0.62, 0.12, "agrees"),
        (0.12, 0.62, "contradicts"),
        (0.0, 0.1, "contradicts"),
        (0.0, 0.09, "inconclusive"),  # less than 10 points
        (0.3, 0.5, "inconclusive"),  # less than twice
        (0.0, 0.0, "inconclusive"),
    ],
)
def test_what_clearly_better_means(as_read: float, other: float, verdict: str) -> None:
    found = LayoutAgreement(layout="fill_in", as_read=as_read, other=other, num_compared=60)
    assert (found.verdict, found.other_layout) == (verdict, "anchor_first")


def test_answer_and_features_are_the_targets_own(target: Decoder) -> None:
    """Row by row over kept keys and values, windows included, as in one forward over everything."""
    tokens, features = greedy(target, 14)
    got, tapped = probe._greedy_answer(target, PROMPT, (0, 2), len(tokens), 60.0)
    assert got.tolist() == tokens
    torch.testing.assert_close(tapped, features, rtol=1e-4, atol=1e-5)


def test_blocks_see_only_what_lies_before_their_anchor(drafter_spec: Make, target: Decoder) -> None:
    """Else a block would read the answer off its context, and both readings would look right."""
    drafter = drafter_of(drafter_spec(), target)
    tokens, features = greedy(target, 14)
    anchors, changed = torch.tensor([8, 12]), features.clone()
    changed[8:] += 1.0
    with torch.no_grad():
        one, two = (probe._block_logits(drafter, torch.tensor(tokens), rows, anchors) for rows in (features, changed))
    assert torch.equal(one[0], two[0])
    assert not torch.equal(one[1], two[1])


def test_where_nothing_can_be_told_nothing_is_said(drafter_spec: Make, target: Decoder) -> None:
    drafter = drafter_of(drafter_spec(), target)
    assert layout_agreement(target, drafter, []) is None
    assert layout_agreement(target, drafter, PROMPT * 24) is None  # 120 of 128 positions: no room for an answer
    assert layout_agreement(target, drafter, PROMPT, seconds=0.0) is None  # too slow
    short = drafter_of(drafter_spec(max_position_embeddings=12), target)
    assert layout_agreement(target, short, PROMPT) is None
