"""Losses against numbers worked out by hand, row weights and masks in both layouts, presets, packing, anchors, rates."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.models.layers import PackedLinear
from slipstream.options import build
from slipstream.train.answers import AnswerSet
from slipstream.train.data import (
    BatchOrder,
    PackedRows,
    anchor_candidates,
    block_rows,
    draft_vocabulary,
    draw_blocks,
    pack,
    scored_candidates,
)
from slipstream.train.losses import (
    RowLosses,
    decay,
    dpace,
    fused_rows,
    label_shift,
    normaliser,
    row_losses,
    row_mask,
    total_loss,
)
from slipstream.train.optim import MasterOptimizer, orthogonal
from slipstream.train.options import LossOptions, OptimOptions, Recipe, TrainOptions
from slipstream.train.presets import PRESETS, with_preset
from slipstream.train.trainer import schedule, teacher_table


def log(*values: float) -> torch.Tensor:
    """Logits whose softmax is `values`."""
    return torch.tensor(values).log()


# Two rows over three draft tokens. Row 0: q (.5 .25 .25), t (.7 .2 .1). Row 1: q (.1 .1 .8), t (.2 .2 .4), the target
# gives .2 to tokens that cannot be drafted.
LOGITS = torch.stack((log(0.5, 0.25, 0.25), log(0.1, 0.1, 0.8)))
TEACHER = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.2, 0.4]])


def test_rows_by_hand() -> None:
    rows = row_losses(LOGITS, TEACHER, torch.tensor([0, -1]), torch.tensor([0.0, 2.0]), with_kl=True)
    # |.5 - .7| + |.25 - .2| + |.25 - .1| = .4;  |.1 - .2| + |.1 - .2| + |.8 - .4| + .2 missed = .8
    torch.testing.assert_close(rows.l1, torch.tensor([0.4, 0.8]))
    # sum of minima: .5 + .2 + .1 = .8;  .1 + .1 + .4 = .6
    torch.testing.assert_close(rows.overlap, torch.tensor([0.8, 0.6]))
    # -ln .5; a label outside the draft vocabulary has no term
    torch.testing.assert_close(rows.ce, torch.tensor([math.log(2.0), 0.0]))
    torch.testing.assert_close(rows.label_prob, torch.tensor([0.5, 0.0]))
    # sum t ln(t / q); in row 1 t adds up to .8, so q counts .8 of what it is
    whole = 0.7 * math.log(0.7 / 0.5) + 0.2 * math.log(0.2 / 0.25) + 0.1 * math.log(0.1 / 0.25)
    part = 2 * 0.2 * math.log(0.2 / 0.08) + 0.4 * math.log(0.4 / 0.64)
    assert rows.kl is not None
    torch.testing.assert_close(rows.kl, torch.tensor([whole, part]))
    # BCE of sigmoid(0) = .5 against .8, and of sigmoid(2) against .6
    sigma = 1 / (1 + math.exp(-2.0))
    expected = [math.log(2.0), -(0.6 * math.log(sigma) + 0.4 * math.log(1 - sigma))]
    assert rows.confidence is not None
    torch.testing.assert_close(rows.confidence, torch.tensor(expected))


def test_kl_is_zero_where_the_drafter_is_right_and_pulls_towards_the_teacher() -> None:
    """Its gradient is m q - t, that of a cross entropy whose labels the teacher draws; a probability of 0 is no NaN."""
    alike = row_losses(TEACHER.log(), TEACHER, torch.tensor([0, 0]), with_kl=True)
    torch.testing.assert_close(alike.kl, torch.zeros(2), atol=1e-6, rtol=0)
    logits = LOGITS.clone().requires_grad_()
    teacher = torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.2, 0.4]])
    kl = row_losses(logits, teacher, torch.tensor([0, 0]), with_kl=True).kl
    assert kl is not None
    kl.sum().backward()
    mass = torch.tensor([[1.0], [0.8]])
    torch.testing.assert_close(logits.grad, mass * LOGITS.softmax(-1) - teacher)


def test_total_by_hand_and_by_named_options() -> None:
    rows = RowLosses(
        ce=torch.tensor([1.0, 3.0, 9.0]),
        l1=torch.tensor([0.4, 0.8, 9.0]),
        kl=torch.tensor([0.3, 0.6, 9.0]),
        confidence=torch.tensor([0.5, 0.2, 9.0]),
        overlap=torch.zeros(3),
        label_prob=torch.zeros(3),
    )
    weights, mask = torch.tensor([1.0, 0.5, 0.0]), torch.tensor([True, True, False])

    def total(**options: Any) -> float:
        given = LossOptions(**{"ce": 0.0, "l1": 0.0, "confidence": 0.0, **options})
        return total_loss(rows, weights, given, normaliser(weights, mask, given))[0].item()

    loss, terms = total_loss(rows, weights, LossOptions(), torch.tensor(1.5))
    assert terms["ce"].item() == pytest.approx(2.5 / 1.5)
    assert terms["l1"].item() == pytest.approx(0.8 / 1.5)
    assert terms["kl"].item() == pytest.approx(0.6 / 1.5)
    assert terms["confidence"].item() == pytest.approx(0.6 / 1.5)
    assert loss.item() == pytest.approx(0.1 * 2.5 / 1.5 + 0.9 * 0.8 / 1.5 + 0.6 / 1.5)
    assert total(ce=1.0) == pytest.approx(2.5 / 1.5)
    assert total(ce=1.0, normalise="rows") == pytest.approx(2.5 / 2)
    assert total(l1=0.9) == total(tv=1.8) == pytest.approx(0.9 * 0.8 / 1.5)
    assert total(kl=2.0, confidence=1.0) == pytest.approx((1.2 + 0.6) / 1.5)
    assert total_loss(rows, torch.zeros(3), LossOptions(), torch.tensor(0.0))[0].item() == 0.0


def test_the_confidence_target_is_no_path_for_gradients() -> None:
    logits = LOGITS.clone().requires_grad_()
    confidence = torch.zeros(2, requires_grad=True)
    rows = row_losses(logits, TEACHER, torch.tensor([0, 1]), confidence)
    assert rows.confidence is not None
    rows.confidence.sum().backward()
    assert logits.grad is None
    torch.testing.assert_close(confidence.grad, torch.tensor([0.5 - 0.8, 0.5 - 0.6]))


def test_a_term_of_weight_0_moves_nothing() -> None:
    """No gradient at all, rather than one of zero that an optimiser would decay weights by."""
    logits, confidence = LOGITS.clone().requires_grad_(), torch.zeros(2, requires_grad=True)
    rows = row_losses(logits, TEACHER, torch.tensor([0, 1]), confidence)
    loss, terms = total_loss(rows, torch.ones(2), LossOptions(confidence=0.0), torch.tensor(2.0))
    loss.backward()
    assert terms["confidence"] > 0
    assert confidence.grad is None
    assert logits.grad is not None


def test_the_fused_form_adds_the_bias_and_looks_the_teacher_up() -> None:
    bias = torch.tensor([[0.1, 0.2, 0.3], [0.0, -1.0, 1.0]])
    table = torch.stack((torch.zeros(3), TEACHER[1], TEACHER[0]))
    labels, confidence = torch.tensor([2, 0]), torch.tensor([0.3, -0.3])
    fused = fused_rows(LOGITS - bias, bias, table, torch.tensor([2, 1]), labels, confidence)
    rows = row_losses(LOGITS, TEACHER, labels, confidence)
    for name in ("ce", "l1", "confidence", "overlap", "label_prob"):
        torch.testing.assert_close(getattr(fused, name), getattr(rows, name))
    assert fused_rows(LOGITS, None, table, torch.tensor([2, 1]), labels, None).confidence is None


def test_decay_in_both_layouts() -> None:
    offsets = torch.arange(4)
    first = decay(offsets, "anchor_first", 4.0)
    torch.testing.assert_close(first, torch.tensor([1.0, 0.7788, 0.6065, 0.4724]), atol=1e-4, rtol=0)
    fill_in = decay(offsets, "fill_in", 4.0)
    torch.testing.assert_close(fill_in, torch.tensor([0.0, 1.0, 0.7788, 0.6065]), atol=1e-4, rtol=0)


# Two blocks side by side, of three rows and of two.
OFFSETS = torch.tensor([0, 1, 2, 0, 1])
PROBS = torch.tensor([[0.5, 0.2, 0.8, 1.0, 0.0]])


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        # s = .75 .6 .9 | 1 .5; products .75 .45 .405 | 1 .5
        ([1, 1, 1, 1, 1], [1.605, 0.855, 0.405, 1.5, 0.5]),
        # fill-in: row 0 predicts nothing; s = .6 .9 | .5, products .6 .54 | .5
        ([0, 1, 1, 0, 1], [0.0, 1.14, 0.54, 0.0, 0.5]),
        # the document ends in the block: products .75 .45 | 1
        ([1, 1, 0, 1, 0], [1.2, 0.45, 0.0, 1.0, 0.0]),
        # a gap, where masks are not cumulative: products .75 (.75) .675 | (1) .5
        ([1, 0, 1, 0, 1], [1.425, 0.0, 0.675, 0.0, 0.5]),
    ],
)
def test_dpace_by_hand(mask: list[int], expected: list[float]) -> None:
    """alpha .5, in both layouts; blocks of one row and alpha 1, which takes every label as sure."""
    weights = dpace(PROBS, torch.tensor([mask], dtype=torch.bool), OFFSETS, 0.5, 3)
    torch.testing.assert_close(weights, torch.tensor([expected]))
    sure = dpace(PROBS, torch.tensor([mask], dtype=torch.bool), OFFSETS, 1.0, 3)
    left = [sum(mask[row:3]) if row < 3 else sum(mask[row:]) for row in range(5)]
    assert sure[0].tolist() == [count * counts for count, counts in zip(left, mask, strict=True)]


def test_dpace_is_how_fast_the_expected_length_rises() -> None:
    """The weight of a row is the derivative of the sum of prefix products by the logarithm of the row's own factor."""
    rng = torch.Generator().manual_seed(0)
    probs = torch.rand(4, 16, generator=rng)
    offsets = torch.tensor([*range(7), *range(4), *range(5)])
    logs = (0.7 * probs + 0.3).log().requires_grad_()
    for block in torch.split(logs, [7, 4, 5], dim=1):
        block.cumsum(dim=1).exp().sum().backward()
    torch.testing.assert_close(dpace(probs, torch.ones_like(probs) > 0, offsets, 0.3, 7), logs.grad)


def test_normalisers() -> None:
    weights, mask = torch.tensor([[1.0, 0.5, 0.0]]), torch.tensor([[True, True, False]])
    assert normaliser(weights, mask, LossOptions()).item() == 1.5
    assert normaliser(weights, mask, LossOptions(normalise="rows")).item() == 2.0


# One packed row of ten tokens: a document of six (prompt of two), then one of four (prompt of one).
SCORED = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1, 1, 1]], dtype=torch.bool)
STARTS = torch.tensor([[0, 0, 0, 0, 0, 0, 6, 6, 6, 6]])


def mask_of(layout: str, anchor: int, cumulative: bool, scored: torch.Tensor = SCORED) -> list[int]:
    anchors = torch.full((1, 4), anchor)
    labels = anchors + torch.arange(4) + label_shift(layout)  # type: ignore[arg-type]
    return row_mask(scored, STARTS, anchors, labels, cumulative)[0].int().tolist()


@pytest.mark.parametrize("cumulative", [True, False])
def test_masks_stop_at_the_document_and_at_the_row(cumulative: bool) -> None:
    assert mask_of("anchor_first", 2, cumulative) == [1, 1, 1, 0]  # labels 3, 4, 5; 6 is another document
    assert mask_of("anchor_first", 4, cumulative) == [1, 0, 0, 0]
    assert mask_of("anchor_first", 7, cumulative) == [1, 1, 0, 0]  # 10 and 11 lie beyond the row
    assert mask_of("fill_in", 2, cumulative) == [0, 1, 1, 1]  # row 0 predicts nothing
    assert mask_of("fill_in", 4, cumulative) == [0, 1, 0, 0]


def test_only_the_cumulative_mask_ends_at_a_gap() -> None:
    gap = SCORED.clone()
    gap[0, 3] = False
    assert mask_of("anchor_first", 2, True, gap) == [0, 0, 0, 0]
    assert mask_of("anchor_first", 2, False, gap) == [0, 1, 1, 0]
    assert mask_of("fill_in", 2, True, gap) == [0, 0, 0, 0]
    assert mask_of("fill_in", 2, False, gap) == [0, 0, 1, 1]


def test_the_teacher_keeps_its_full_softmax() -> None:
    logits = torch.stack((log(0.1, 0.2, 0.3, 0.4), log(0.7, 0.1, 0.1, 0.1)))
    table = teacher_table(logits + 3.0, torch.tensor([1, 3]))
    torch.testing.assert_close(table, torch.tensor([[0.2, 0.4], [0.1, 0.1]]))
    torch.testing.assert_close(teacher_table(logits, None).sum(-1), torch.ones(2))


def answer_set(*lengths: tuple[int, int]) -> AnswerSet:
    """Texts of (prompt, answer) tokens; token ids count through the whole set from 10."""
    whole = [prompt + answer for prompt, answer in lengths]
    return AnswerSet(
        token_ids=np.arange(10, 10 + sum(whole), dtype=np.int32),
        starts=np.cumsum([0, *whole]),
        prompt_lengths=np.array([prompt for prompt, _ in lengths], dtype=np.int32),
        temperatures=np.zeros(len(lengths), dtype=np.float32),
        looping=np.zeros(len(lengths), dtype=np.bool_),
    )


def test_packing_keeps_documents_whole_and_apart() -> None:
    answers = answer_set((2, 4), (1, 3), (3, 6), (1, 2))
    rows, placement = pack(answers, 10)
    assert len(rows) == 3  # 9; 6 + 4; 3: best fit decreasing, no row with room for the last
    for document in range(4):
        row, column = int(placement.rows[document]), int(placement.columns[document])
        span = slice(column, column + int(placement.lengths[document]))
        assert rows.token_ids[row, span].tolist() == answers.text(document).tolist()
        assert rows.positions[row, span].tolist() == list(range(span.stop - span.start))
        assert set(rows.starts[row, span].tolist()) == {column}
        prompt = int(answers.prompt_lengths[document])
        assert rows.scored[row, span].tolist() == [index >= prompt for index in range(span.stop - span.start)]
    assert rows.scored.sum() == answers.num_answer_tokens
    overlong, _ = pack(answer_set((2, 20)), 10)
    assert overlong.token_ids.tolist() == [list(range(10, 20))]


def packed_row() -> PackedRows:
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])
    return PackedRows(token_ids=positions + 20, positions=positions, starts=STARTS, scored=SCORED)


def test_anchors_are_drawn_once_each_and_where_a_next_token_is_known() -> None:
    rows = packed_row()
    assert anchor_candidates(rows).nonzero()[:, 1].tolist() == [2, 3, 4, 7, 8]
    seen: set[tuple[int, ...]] = set()
    for seed in range(20):
        blocks = draw_blocks(rows, (3, 2, 2), seed)
        firsts = blocks.anchors[0, blocks.offsets == 0].tolist()
        assert firsts == sorted(set(firsts))
        assert set(firsts) <= {2, 3, 4, 7, 8}
        assert bool(blocks.live.all())
        seen.add(tuple(firsts))
    assert len(seen) > 3
    again, other = draw_blocks(rows, (3, 2, 2), 7), draw_blocks(rows, (3, 2, 2), 7)
    assert torch.equal(again.anchors, other.anchors)
    crowded = draw_blocks(rows, (2,) * 7, 0)  # seven blocks, five candidates
    assert crowded.live[0].tolist() == [True] * 10 + [False] * 4


def test_the_other_rule_takes_any_scored_token_but_the_last_of_the_row() -> None:
    assert scored_candidates(packed_row(), 2).nonzero()[:, 1].tolist() == [2, 3, 4, 5, 7]


def test_block_rows_lie_side_by_side() -> None:
    block, offsets = block_rows((3, 2), "cpu")
    assert block.tolist() == [0, 0, 0, 1, 1]
    assert offsets.tolist() == [0, 1, 2, 0, 1]


def test_every_row_is_seen_once_an_epoch() -> None:
    order = BatchOrder(num_rows=6, batch_rows=4, seed=3)
    seen = [int(row) for step in range(6) for row in order.rows(step)]
    assert [sorted(seen[epoch * 6 : epoch * 6 + 6]) for epoch in range(4)] == [list(range(6))] * 4
    assert seen[:6] != seen[6:12]
    assert BatchOrder(num_rows=6, batch_rows=4, seed=3).rows(5).tolist() == seen[20:]


def test_the_draft_vocabulary_is_the_most_frequent_and_ascends() -> None:
    answers = answer_set((2, 6))
    answers.token_ids[:] = [9, 9, 4, 4, 7, 7, 3, 1]  # the prompt's tokens do not count
    assert draft_vocabulary(answers, 3, 10, keep=()).tolist() == [1, 4, 7]  # 1 and 3 tie: the smaller id
    assert draft_vocabulary(answers, 3, 10, keep=(8,)).tolist() == [4, 7, 8]
    assert draft_vocabulary(answers, 10, 10, keep=()).tolist() == list(range(10))


def test_muon_moves_along_orthogonal_matrices() -> None:
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    for given in (matrix, matrix.T):
        values = torch.linalg.svdvals(orthogonal(given))
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_adamw_is_torchs_and_spares_vectors_the_decay() -> None:
    """Ten steps of both; matrices of the body are moved by AdamW too."""
    torch.manual_seed(0)
    ours = torch.nn.ModuleDict({"fc": PackedLinear(6, (4, 4), False), "norm": torch.nn.LayerNorm(8)})
    ours["fc"].weight.data.normal_()
    theirs = torch.nn.ModuleDict({"fc": torch.nn.Linear(6, 8, bias=False), "norm": torch.nn.LayerNorm(8)})
    theirs.load_state_dict(ours.state_dict())
    options = OptimOptions(method="adamw", adam_lr=0.01, betas=(0.9, 0.999), weight_decay=0.1, clip=0.0)
    optimizer = MasterOptimizer(ours, options)
    groups = [{"params": theirs["fc"].parameters(), "weight_decay": 0.1}, {"params": theirs["norm"].parameters()}]
    reference = torch.optim.AdamW(groups, lr=0.01, eps=1e-10, weight_decay=0.0)
    for step in range(10):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        for network in (ours, theirs):
            network["norm"](network["fc"](x)).square().mul(torch.arange(8.0)).sum().backward()
        optimizer.step(1.0)
        reference.step()
        reference.zero_grad()
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], weight)
    assert optimizer.muon == []
    assert MasterOptimizer(ours, OptimOptions()).muon == ["fc.weight"]


def test_rates_warm_up_and_end_at_zero() -> None:
    for kind in ("linear", "cosine"):
        assert schedule(0.0, 0.1, kind) < 0.05
        assert schedule(0.1, 0.1, kind) == pytest.approx(1.0)
        assert schedule(1.0, 0.1, kind) == pytest.approx(0.0, abs=1e-12)
    assert schedule(0.55, 0.1, "linear") == pytest.approx(0.5)
    assert schedule(0.325, 0.1, "cosine") == pytest.approx(0.5 + 0.5 * math.cos(math.pi * 0.25))


def test_blocks_of_two_lengths_fill_the_rows(tmp_path: Path) -> None:
    options = TrainOptions(model="t", out=tmp_path, block_size=16, recipe=Recipe(short_block=7))
    lengths = options.block_lengths()
    assert sum(lengths) == 2048
    assert lengths.count(7) * 7 == pytest.approx(0.65 * 2048, rel=0.02)
    assert TrainOptions(model="t", out=tmp_path, block_size=8).block_lengths() == (8,) * 256


def made(**values: Any) -> TrainOptions:
    """As the command line makes them from a file."""
    return build(TrainOptions, with_preset({"model": "t", "out": "o", **values}), "train")


def test_presets_are_values_under_those_given() -> None:
    """Every preset is a recipe that can be run, the project's own is the defaults, and what is given beside it wins."""
    for name in PRESETS:
        made(preset=name)
    assert made(preset="slipstream") == made() == TrainOptions(model="t", out=Path("o"))
    published = made(preset="deepspec-dspark")
    assert (published.algorithm, published.block_size, published.recipe.optim.method) == ("dspark", 7, "adamw")
    assert published.recipe.losses == LossOptions()
    changed = made(preset="zlab-dflash", block_size=8, recipe={"losses": {"gamma": 3.0}, "batch_rows": 2})
    assert (changed.algorithm, changed.block_size, changed.recipe.batch_rows) == ("dflash", 8, 2)
    assert changed.recipe.losses == LossOptions(ce=1.0, l1=0.0, confidence=0.0, gamma=3.0, cumulative_mask=False)
    with pytest.raises(ConfigError, match=r"preset is 'dspark'; choose slipstream, deepspec-dspark"):
        made(preset="dspark")


@pytest.mark.parametrize(
    ("field", "value"), [("algorithm", "eagle"), ("block_size", 1), ("steps", 0), ("minutes", 0.0), ("markov_rank", -1)]
)
def test_bad_options_are_named(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        TrainOptions(model="t", out=tmp_path, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="short_block"):
        TrainOptions(model="t", out=tmp_path, recipe=Recipe(short_block=9))


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({"losses": {"tv": 1.8}}, r"losses.tv is 1.8 and losses.l1 0.9.* set one of them to 0"),
        ({"losses": {"kl": -1.0}}, r"losses.kl is -1.0; it must be at least 0"),
        ({"losses": {"ce": 0.0, "l1": 0.0}}, r"ce, l1, tv and kl are all 0"),
        ({"losses": {"label": "argmax"}}, r"losses.label is 'argmax'; choose data or teacher"),
        ({"losses": {"normalise": "mean"}}, r"losses.normalise .* choose weights or rows"),
        ({"losses": {"weights": "dpace"}}, r"weighs cross entropy only; set l1, confidence to 0"),
        ({"losses": {"alpha": 1.5}}, r"losses.alpha is 1.5; it must be above 0 and at most 1"),
        ({"losses": {"gamma": 0.0}}, r"losses.gamma is 0.0; it must be above 0"),
        ({"optim": {"method": "sgd"}}, r"optim.method is 'sgd'; choose muon or adamw"),
        ({"schedule": "flat"}, r"recipe.schedule is 'flat'; choose linear or cosine"),
        ({"anchors": "all"}, r"recipe.anchors is 'all'; choose next_scored or scored"),
        ({"feature_noise": -0.1}, r"recipe.feature_noise is -0.1"),
        ({"sampled_temperature": 0.0}, r"recipe.sampled_temperature is 0.0; it must be above 0"),
    ],
)
def test_bad_recipes_say_what_to_change(recipe: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        made(recipe=recipe)
