"""Training losses against numbers worked out by hand, row weights and masks in both layouts, packing, anchors, rates."""

import math

import numpy as np
import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.train.answers import AnswerSet
from slipstream.train.data import (
    BatchOrder,
    PackedRows,
    anchor_candidates,
    block_rows,
    draft_vocabulary,
    draw_blocks,
    pack,
)
from slipstream.train.losses import (
    RowLosses,
    decay,
    fused_rows,
    label_shift,
    row_losses,
    row_mask,
    total_loss,
)
from slipstream.train.optim import orthogonal
from slipstream.train.options import DATA_CE, LossOptions, Recipe, TrainOptions
from slipstream.train.trainer import schedule, teacher_table


def log(*values: float) -> torch.Tensor:
    """Logits whose softmax is `values`."""
    return torch.tensor(values).log()


# Two rows over three draft tokens. Row 0: q (.5 .25 .25), t (.7 .2 .1). Row 1: q (.1 .1 .8), t (.2 .2 .4), the target
# gives .2 to tokens that cannot be drafted.
LOGITS = torch.stack((log(0.5, 0.25, 0.25), log(0.1, 0.1, 0.8)))
TEACHER = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.2, 0.4]])


def test_rows_by_hand() -> None:
    rows = row_losses(LOGITS, TEACHER, torch.tensor([0, -1]), torch.tensor([0.0, 2.0]))
    # |.5 - .7| + |.25 - .2| + |.25 - .1| = .4;  |.1 - .2| + |.1 - .2| + |.8 - .4| + .2 missed = .8
    torch.testing.assert_close(rows.l1, torch.tensor([0.4, 0.8]))
    # sum of minima: .5 + .2 + .1 = .8;  .1 + .1 + .4 = .6
    torch.testing.assert_close(rows.overlap, torch.tensor([0.8, 0.6]))
    # -ln .5; a label outside the draft vocabulary has no term
    torch.testing.assert_close(rows.ce, torch.tensor([math.log(2.0), 0.0]))
    # BCE of sigmoid(0) = .5 against .8, and of sigmoid(2) against .6
    sigma = 1 / (1 + math.exp(-2.0))
    expected = [math.log(2.0), -(0.6 * math.log(sigma) + 0.4 * math.log(1 - sigma))]
    assert rows.confidence is not None
    torch.testing.assert_close(rows.confidence, torch.tensor(expected))


def test_total_by_hand_and_by_named_options() -> None:
    rows = RowLosses(
        ce=torch.tensor([1.0, 3.0, 9.0]),
        l1=torch.tensor([0.4, 0.8, 9.0]),
        confidence=torch.tensor([0.5, 0.2, 9.0]),
        overlap=torch.zeros(3),
    )
    weights = torch.tensor([1.0, 0.5, 0.0])
    loss, terms = total_loss(rows, weights, LossOptions())
    assert terms["ce"].item() == pytest.approx(2.5 / 1.5)
    assert terms["l1"].item() == pytest.approx(0.8 / 1.5)
    assert terms["confidence"].item() == pytest.approx(0.6 / 1.5)
    assert loss.item() == pytest.approx(0.1 * 2.5 / 1.5 + 0.9 * 0.8 / 1.5 + 0.6 / 1.5)
    assert total_loss(rows, weights, DATA_CE)[0].item() == pytest.approx(2.5 / 1.5)
    only_l1 = LossOptions(ce=0.0, l1=1.0, confidence=0.0)
    assert total_loss(rows, weights, only_l1)[0].item() == pytest.approx(0.8 / 1.5)
    assert total_loss(rows, torch.zeros(3), LossOptions())[0].item() == 0.0


def test_the_confidence_target_is_no_path_for_gradients() -> None:
    logits = LOGITS.clone().requires_grad_()
    confidence = torch.zeros(2, requires_grad=True)
    rows = row_losses(logits, TEACHER, torch.tensor([0, 1]), confidence)
    assert rows.confidence is not None
    rows.confidence.sum().backward()
    assert logits.grad is None
    torch.testing.assert_close(confidence.grad, torch.tensor([0.5 - 0.8, 0.5 - 0.6]))


def test_the_fused_form_adds_the_bias_and_looks_the_teacher_up() -> None:
    bias = torch.tensor([[0.1, 0.2, 0.3], [0.0, -1.0, 1.0]])
    table = torch.stack((torch.zeros(3), TEACHER[1], TEACHER[0]))
    labels, confidence = torch.tensor([2, 0]), torch.tensor([0.3, -0.3])
    fused = fused_rows(LOGITS - bias, bias, table, torch.tensor([2, 1]), labels, confidence)
    rows = row_losses(LOGITS, TEACHER, labels, confidence)
    for name in ("ce", "l1", "confidence", "overlap"):
        torch.testing.assert_close(getattr(fused, name), getattr(rows, name))
    assert fused_rows(LOGITS, None, table, torch.tensor([2, 1]), labels, None).confidence is None


def test_decay_in_both_layouts() -> None:
    offsets = torch.arange(4)
    first = decay(offsets, "anchor_first", 4.0)
    torch.testing.assert_close(first, torch.tensor([1.0, 0.7788, 0.6065, 0.4724]), atol=1e-4, rtol=0)
    fill_in = decay(offsets, "fill_in", 4.0)
    torch.testing.assert_close(fill_in, torch.tensor([0.0, 1.0, 0.7788, 0.6065]), atol=1e-4, rtol=0)


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


def test_rates_warm_up_and_end_at_zero() -> None:
    for kind in ("linear", "cosine"):
        assert schedule(0.0, 0.1, kind) < 0.05
        assert schedule(0.1, 0.1, kind) == pytest.approx(1.0)
        assert schedule(1.0, 0.1, kind) == pytest.approx(0.0, abs=1e-12)
    assert schedule(0.55, 0.1, "linear") == pytest.approx(0.5)
    assert schedule(0.325, 0.1, "cosine") == pytest.approx(0.5 + 0.5 * math.cos(math.pi * 0.25))


def test_blocks_of_two_lengths_fill_the_rows(tmp_path) -> None:  # type: ignore[no-untyped-def]
    options = TrainOptions(target="t", out=tmp_path, block_size=16, recipe=Recipe(short_block=7))
    lengths = options.block_lengths()
    assert sum(lengths) == 2048
    assert lengths.count(7) * 7 == pytest.approx(0.65 * 2048, rel=0.02)
    assert TrainOptions(target="t", out=tmp_path, block_size=8).block_lengths() == (8,) * 256


@pytest.mark.parametrize(
    ("field", "value"), [("algorithm", "eagle"), ("block_size", 1), ("steps", 0), ("minutes", 0.0), ("markov_rank", -1)]
)
def test_bad_options_are_named(tmp_path, field: str, value: object) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=field):
        TrainOptions(target="t", out=tmp_path, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="short_block"):
        TrainOptions(target="t", out=tmp_path, recipe=Recipe(short_block=9))
