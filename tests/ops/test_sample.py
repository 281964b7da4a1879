"""Filters against a plain sort, the Gumbel-max rule, and rows that are broken or greedy among others."""

import math

import pytest
import torch
from torch import Tensor

from slipstream.ops.noise import gumbel
from slipstream.ops.sample import coupled_targets, filter_logits, invalid_rows, probabilities

DTYPES = (torch.float32, torch.float64)


def _filter(
    logits: Tensor,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
) -> Tensor:
    def per_row(value: float | list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(value, dtype=dtype).expand(len(logits))

    return filter_logits(
        logits, per_row(temperature, torch.float32), per_row(top_k, torch.int64), per_row(top_p, torch.float32)
    )


def _assert_smallest_prefix(row: Tensor, kept: Tensor, temperature: float, top_k: int, top_p: float) -> None:
    """`kept` [V] is a prefix of (logit descending, id ascending), and the shortest that both filters ask for."""
    order = row.double().sort(descending=True, stable=True).indices
    count = int(kept.sum())
    assert bool(kept[order[:count]].all()), "not a prefix"
    limit = min(top_k, len(row)) if top_k else len(row)
    weights = (row.double()[order[:limit]] / temperature).softmax(0)
    assert 1 <= count <= limit
    if top_p >= 1:
        assert count == limit
        return
    assert weights[:count].sum() > top_p - 1e-6
    assert weights[: count - 1].sum() < top_p + 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [2, 3, 50, 5003])
def test_filters_keep_the_smallest_prefix(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    temperatures, ks, ps = [0.3, 1.0, 2.5, 0.8], [0, 1, 7, 40], [1.0, 0.9, 0.35, 0.999, 1e-9]
    cases = [(t, k, p) for t in temperatures for k in ks for p in ps]
    logits = 3 * torch.randn(len(cases), vocab, generator=generator, dtype=dtype)
    logits[::2] = (2 * logits[::2]).round() / 2  # ties
    filtered = _filter(logits, [c[0] for c in cases], [c[1] for c in cases], [c[2] for c in cases])
    assert filtered.dtype is dtype
    for row, out, (temperature, k, p) in zip(logits, filtered, cases, strict=True):
        kept = out > -torch.inf
        _assert_smallest_prefix(row, kept, temperature, k, p)
        scaled = row / temperature
        torch.testing.assert_close(out[kept], (scaled - scaled.max())[kept], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_at_the_cut_go_to_the_lower_ids(dtype: torch.dtype) -> None:
    def kept(logits: list[float], **filters: float) -> list[int]:
        return (_filter(torch.tensor([logits], dtype=dtype), **filters)[0] > -torch.inf).nonzero().flatten().tolist()

    assert kept([0, 0, 0, 0], top_p=0.5) == [0, 1]
    assert kept([0, 0, 0, 0], top_p=0.51) == [0, 1, 2]
    assert kept([0, 0, 0, 0], top_k=3) == [0, 1, 2]
    assert kept([1, 2, 1, 2, 1], top_k=3) == [0, 1, 3]
    assert kept([1, 2, 1, 2, 1], top_k=2) == [1, 3]
    assert kept([-0.0, 0.0], top_k=1) == [0]
    assert kept([0.0, math.log(2), 0.0], top_k=2, top_p=0.6) == [1]  # .5, .25 of what top-k leaves: 2/3, 1/3


def test_a_prefix_that_the_first_filter_cut_to_minus_infinity_is_never_refilled() -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    logits[:, 150:] = -torch.inf
    filtered = _filter(logits, 1.0, [180, 0, 5], [1.0, 1.0, 0.999999])
    assert (filtered > -torch.inf).sum(1).tolist() == [150, 150, 5]


def test_greedy_rows_pass_untouched_and_rows_do_not_depend_on_each_other() -> None:
    logits = torch.randn(6, 97, generator=torch.Generator().manual_seed(2))
    temperature, k, p = [0.0, 0.7, 0.0, 1.0, 1.3, 0.0], [3, 5, 0, 0, 9, 1], [0.2, 0.9, 1.0, 0.5, 1.0, 0.1]
    filtered = _filter(logits, temperature, k, p)
    for row in range(6):
        if temperature[row] == 0:
            assert torch.equal(filtered[row], logits[row])
        alone = _filter(logits[row : row + 1], temperature[row], k[row], p[row])[0]
        assert torch.equal(filtered[row], alone)


def test_filters_are_not_applied_unless_the_flags_say_so() -> None:
    logits = torch.randn(2, 30)
    both = torch.ones(2), torch.tensor([2, 2]), torch.tensor([0.1, 0.1])
    assert bool(filter_logits(logits, *both, any_top_k=False, any_top_p=False).isfinite().all())
    assert int(filter_logits(logits, *both, any_top_k=True, any_top_p=False).isfinite().sum()) == 4


def test_small_temperatures_do_not_overflow() -> None:
    logits = torch.tensor([[50.0, 20.0, -30.0]])
    filtered = _filter(logits, 1e-38, top_p=0.9)
    assert probabilities(filtered, torch.tensor([1e-38])).tolist() == [[1.0, 0.0, 0.0]]
    assert coupled_targets(filtered, torch.tensor([1e-38]), torch.full((1, 3), -3.0)).tolist() == [0]


def test_half_precision_rows_are_widened() -> None:
    logits = torch.randn(2, 40).bfloat16()
    assert torch.equal(_filter(logits, 0.9, 5, 0.8), _filter(logits.float(), 0.9, 5, 0.8))


def test_mixed_rows_take_argmax_or_gumbel_max() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]]).repeat(3, 1)
    noise = torch.tensor([[9.0, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0]])
    assert coupled_targets(logits, torch.tensor([0.0, 1.0, 1.0]), noise).tolist() == [1, 0, 2]
    assert coupled_targets(logits, torch.zeros(3), None).tolist() == [1, 1, 1]
    assert coupled_targets(logits.double(), torch.tensor([0.0, 1.0, 1.0]), noise).tolist() == [1, 0, 2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_min_p_by_hand(dtype: torch.dtype) -> None:
    """Shares of the largest: 1, 1/2, 1/4, 1/8. Greedy rows and rows with 0 keep everything."""
    logits = torch.tensor([1.0, 1 / 2, 1 / 4, 1 / 8], dtype=dtype).log()
    cases = [(1.0, 0.3), (1.0, 0.125), (1.0, 0.0), (0.0, 0.9), (2.0, 0.4), (1.0, 1.0)]
    heat, min_p = (torch.tensor(x) for x in zip(*cases, strict=True))
    off = torch.zeros(len(cases))
    kept = filter_logits(logits.expand(len(cases), -1), heat, off.long(), off + 1, min_p=min_p).isfinite()
    counts = kept.sum(1).tolist()
    assert counts[:1] + counts[2:] == [2, 4, 4, 3, 1]  # at T = 2 the shares are 1, .71, .5, .35
    assert counts[1] in (3, 4)  # a tie up to rounding


def test_min_p_comes_after_top_k_and_top_p() -> None:
    """.4, .3, .2, .1: top-p .55 keeps two, and so does min-p .6 of these; of what min-p leaves top-p would keep one."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    one, top_p, min_p = torch.ones(1), torch.tensor([0.55]), torch.tensor([0.6])
    assert filter_logits(logits, one, torch.zeros(1).long(), top_p, min_p=min_p).isfinite().tolist() == [
        [True, True, False, False]
    ]
    assert int(filter_logits(logits, one, torch.ones(1).long(), one, min_p=min_p).isfinite().sum()) == 1


def test_filtered_tokens_are_never_emitted() -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3)).repeat(4000, 1)
    filtered = _filter(logits, 1.5, 4, 0.9)
    seeds = torch.arange(4000)
    drawn = coupled_targets(filtered, torch.full((4000,), 1.5), gumbel(seeds, 0 * seeds, 12))
    assert set(drawn.tolist()) == set(filtered[0].isfinite().nonzero().flatten().tolist())


def test_probabilities_are_one_hot_where_greedy() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [0.0, 0.0, -torch.inf]], dtype=torch.float64)
    expected = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(probabilities(logits, torch.tensor([0.0, 1.0])), expected)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_broken_rows_are_flagged_and_contained(temperature: float) -> None:
    logits = torch.randn(6, 31, generator=torch.Generator().manual_seed(4))
    noise = gumbel(torch.arange(6), torch.arange(6), 31)
    heat = torch.full((6,), temperature)
    clean = coupled_targets(_filter(logits, temperature, 5, 0.9), heat, noise)
    logits[1, 30], logits[2, 0], logits[3], logits[4, 3:] = torch.nan, torch.inf, -torch.inf, -torch.inf
    filtered = _filter(logits, temperature, 5, 0.9)
    broken = coupled_targets(filtered, heat, noise)
    assert invalid_rows(logits).tolist() == [False, True, True, True, False, False]
    assert bool(((broken >= 0) & (broken < 31)).all())
    assert broken[[0, 5]].tolist() == clean[[0, 5]].tolist()
    assert int(broken[4]) < 3
    for row in (0, 5):
        assert bool((probabilities(filtered, heat)[row] <= 1).all())


def test_a_padded_vocabulary_is_cut_off_by_the_caller() -> None:
    padded = torch.randn(3, 40)
    padded[:, 33:] = torch.tensor([torch.inf, torch.nan, 1e9, 0, 0, 0, 0])
    logits = padded[:, :33]
    assert not invalid_rows(logits).any()
    assert torch.equal(_filter(logits, 0.7, 3, 0.9), _filter(logits.contiguous(), 0.7, 3, 0.9))
    assert bool(
        (coupled_targets(_filter(logits), torch.ones(3), gumbel(torch.arange(3), torch.arange(3), 33)) < 33).all()
    )
