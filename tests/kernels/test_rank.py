"""One launch hands out a budget as ops/survival.py and ops/rank.py do, ties included."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels import rank as kernel
from slipstream.ops.rank import rank
from slipstream.ops.survival import fresh_survival

PLAIN = 0.0, 20.0  # scale and shift with which every confidence is exactly 1: all survivals are equal


class Case:
    """Inputs of a step with B sequences, of which some sample; row N of the slot state is for padding."""

    def __init__(self, size: int, max_drafts: int, device: str, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.device = device
        self.signal = torch.rand(size, max_drafts, generator=generator)
        scale = 0.5 + torch.rand(2, max_drafts, generator=generator)
        shift = torch.randn(2, max_drafts, generator=generator)
        self.calibration = torch.stack([scale, shift], dim=-1)
        self.slots = torch.randperm(size, generator=generator)
        self.temperature = (torch.rand(size + 1, generator=generator) < 0.5).float() * 0.8
        self.caps = torch.randint(0, max_drafts + 2, (size,), generator=generator)

    def widths(self, num_drafts: int, total: int) -> list[int]:
        out = torch.full((len(self.slots),), -7, device=self.device)
        inputs = (t.to(self.device) for t in (self.calibration, self.slots, self.temperature, self.caps))
        kernel.rank(self.signal.to(self.device), num_drafts, *inputs, torch.tensor([total], device=self.device), out)
        return out.tolist()

    def survival(self, num_drafts: int) -> Tensor:
        return fresh_survival(self.signal[:, :num_drafts], self.calibration, self.temperature[self.slots] > 0)

    def expected(self, num_drafts: int, total: int) -> list[int]:
        widths: list[int] = rank(self.survival(num_drafts), self.caps, total).tolist()
        return widths

    def is_clear(self, num_drafts: int, total: int) -> bool:
        """No two drafts on the two sides of the cut are so close that rounding may swap them."""
        allowed = torch.arange(num_drafts) < self.caps[:, None]
        values = self.survival(num_drafts)[allowed].sort(descending=True).values
        return not 0 < total < len(values) or bool(values[total - 1] - values[total] > 1e-5)


@pytest.mark.parametrize(("size", "max_drafts"), [(1, 1), (1, 7), (5, 7), (16, 7), (20, 16), (70, 5), (260, 3)])
def test_equals_the_reference(size: int, max_drafts: int, device: str) -> None:
    checked = 0
    for num_drafts in {max_drafts, (max_drafts + 1) // 2}:
        case = Case(size, max_drafts, device, seed=num_drafts)
        most = int(case.caps.clamp(max=num_drafts).sum())
        for total in {0, 1, most // 3, most // 2 + 1, max(most - 1, 0), most, most + 9}:
            if case.is_clear(num_drafts, total):
                widths = case.widths(num_drafts, total)
                assert widths == case.expected(num_drafts, total), (num_drafts, total)
                assert sum(widths) == min(total, most)
                checked += 1
    assert checked >= 3


def test_every_budget(device: str) -> None:
    case = Case(6, 7, device)
    for total in range(-1, 44):
        assert case.widths(7, total) == case.expected(7, total), total


def test_ties_go_by_position_then_row(device: str) -> None:
    case = Case(3, 2, device)
    case.calibration = torch.tensor(PLAIN).expand(2, 2, 2).contiguous()
    case.caps = torch.full((3,), 2)
    assert [case.widths(2, k) for k in range(7)] == [
        [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2],
    ]  # fmt: skip


def test_equal_signals_are_ties_at_every_size(device: str) -> None:
    """Rows that say the same get the same, up to the one that the budget runs out in."""
    case = Case(37, 5, device)
    case.signal = case.signal[:1].expand(37, 5).contiguous()
    case.temperature[:] = 0
    case.caps = torch.full((37,), 5)
    survival = case.survival(5)[:1].expand(37, 5)  # torch itself may round equal numbers differently, by their place
    for total in (1, 36, 37, 38, 100, 184, 185):
        assert case.widths(5, total) == rank(survival, case.caps, total).tolist()


def test_what_is_not_finite_counts_as_zero_from_there_on(device: str) -> None:
    case = Case(4, 4, device)
    case.caps = torch.full((4,), 4)
    case.signal[0, 1], case.signal[1, 0], case.signal[2, 3] = torch.nan, torch.inf, -torch.inf
    for total in range(17):
        assert case.widths(4, total) == case.expected(4, total), total
    assert case.widths(4, 16) == [4, 4, 4, 4]  # a survival of 0 is still a draft


def test_signals_outside_of_0_to_1_are_clamped(device: str) -> None:
    case = Case(4, 3, device)
    case.signal[0], case.signal[1] = 7.0, -3.0
    for total in range(13):
        assert case.widths(3, total) == case.expected(3, total), total


def test_sequences_that_do_not_decode_take_nothing(device: str) -> None:
    """Prefill behind the decoding sequences, padding behind that; old or NaN signals in their rows do not matter."""
    case = Case(8, 6, device)
    case.caps[5:] = 0
    want = [case.expected(6, total) for total in range(20)]
    case.signal[5:] = torch.nan
    case.slots[6:] = 8
    assert [case.widths(6, total) for total in range(20)] == want
    case.signal = case.signal[:5]  # not even there
    assert [case.widths(6, total) for total in range(20)] == want


def test_columns_that_were_not_drafted_do_not_count(device: str) -> None:
    case = Case(5, 7, device)
    case.caps = torch.full((5,), 7)
    want = [case.expected(3, total) for total in range(17)]
    case.signal[:, 3:] = torch.nan
    assert [case.widths(3, total) for total in range(17)] == want
    assert case.widths(0, 5) == [0, 0, 0, 0, 0]


def test_a_signal_may_be_a_view_of_a_wider_buffer(device: str) -> None:
    case = Case(5, 7, device)
    want = [case.expected(7, total) for total in range(0, 36, 5)]
    wide = torch.full((9, 16), torch.nan)
    wide[:5, :7] = case.signal
    case.signal = wide[:, :7]
    got = [case.widths(7, total) for total in range(0, 36, 5)]
    assert got == want


def test_a_width_does_not_depend_on_signals_at_later_positions(device: str) -> None:
    """Exactness of sampled drafts under rejection rests on this: whether draft j is verified is settled before j."""
    case = Case(9, 7, device)
    case.calibration = torch.tensor((1.0, 3.0)).expand(2, 7, 2).contiguous()  # near 1, where rounding could reorder
    case.caps = torch.full((9,), 7)
    for total in (5, 17, 30):
        widths = case.widths(7, total)
        for b in range(9):
            whole = case.signal.clone()
            case.signal[b, widths[b] + 1 :] = 1.0  # all after the first draft that was left out
            assert case.widths(7, total)[b] == widths[b]
            case.signal = whole


def test_no_sequences(device: str) -> None:
    case = Case(0, 3, device)
    assert case.widths(3, 4) == []
