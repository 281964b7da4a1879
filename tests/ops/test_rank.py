"""A budget goes to the largest survivals, in order of position and slot on ties, exactly."""

import pytest
import torch

from slipstream.ops.rank import rank


def _sequential(survival: list[list[float]], caps: list[int], total: int) -> list[int]:
    """One draft at a time: the best next draft of any sequence, ties by (position, slot)."""
    widths = [0] * len(caps)
    for _ in range(total):
        open_drafts = [(-survival[b][w], w, b) for b, w in enumerate(widths) if w < min(caps[b], len(survival[b]))]
        if not open_drafts:
            break
        widths[min(open_drafts)[2]] += 1
    return widths


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_sequential_rule(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for trial in range(200):
        size, num_drafts = 1 + trial % 7, 1 + trial % 5
        # A coarse grid, so that ties are common.
        steps = torch.randint(0, 4, (size, num_drafts), generator=generator).to(dtype) / 3
        survival = steps.cumprod(1)
        caps = torch.randint(0, num_drafts + 2, (size,), generator=generator)
        for total in (0, 1, trial % 11, size * num_drafts + 3):
            widths = rank(survival, caps, total)
            assert widths.tolist() == _sequential(survival.tolist(), caps.tolist(), total)
            assert int(widths.sum()) == min(total, int(caps.clamp(max=num_drafts).sum()))


def test_ties_go_by_position_then_row() -> None:
    equal = torch.full((3, 2), 0.5)
    caps = torch.full((3,), 2)
    assert [rank(equal, caps, k).tolist() for k in range(7)] == [
        [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2],
    ]  # fmt: skip


def test_rows_without_a_cap_take_nothing_and_survivals_of_zero_are_still_drafts() -> None:
    survival = torch.tensor([[0.9, 0.8], [0.0, 0.0], [0.7, 0.6]])
    assert rank(survival, torch.tensor([0, 2, 2]), 3).tolist() == [0, 1, 2]
    assert rank(survival, torch.tensor([2, 2, 2]), 5).tolist() == [2, 1, 2]


def test_nan_counts_as_zero_and_moves_no_other_row() -> None:
    survival = torch.tensor([[0.9, torch.nan], [0.8, 0.3]])
    assert rank(survival, torch.tensor([2, 2]), 3).tolist() == [1, 2]
    assert rank(survival, torch.tensor([2, 2]), 4).tolist() == [2, 2]


def test_empty_sizes() -> None:
    assert rank(torch.zeros(2, 0), torch.tensor([3, 3]), 4).tolist() == [0, 0]
    assert rank(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), 4).tolist() == []
