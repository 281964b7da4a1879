"""What counts as an answer that ends in a loop, for reports and for training alike."""

import pytest

from slipstream.repetition import ends_in_loop, find_loop


@pytest.mark.parametrize(
    ("ids", "loops"),
    [
        (range(100), False),
        ([*range(50), *[7] * 24], True),
        ([*range(50), *[7] * 20], False),  # a run of digits
        ([*range(50), *list(range(30)) * 3], True),
        ([*range(50), *list(range(30)) * 2, *range(29)], False),
        ([*range(500), *list(range(64)) * 3], True),
        ([*range(500), *list(range(65)) * 3], False),  # too long a period
        ([*[1, 2] * 50, 3], False),  # it left the loop
        ([], False),
    ],
)
def test_an_end_that_repeats_three_times_is_a_loop(ids: list[int], loops: bool) -> None:
    """Three rounds of at most 64 tokens, 24 tokens in all; anything less, or before the end, is none."""
    assert ends_in_loop(tuple(ids)) is loops


def test_the_second_round_and_the_period_are_told() -> None:
    """So that training can keep two rounds; a part of a round at the end belongs to the loop."""
    straight, loop = list(range(30)), [91, 92, 93, 94]
    assert find_loop(straight + loop * 8) == (34, 4)
    assert find_loop(straight + loop * 8 + loop[:3]) == (34, 4)
    assert find_loop(straight + loop * 2) is None
    assert find_loop([7] * 40) == (1, 1)
