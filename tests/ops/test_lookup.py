"""Look-up equals its definition read out loud, on ragged rows full of other tokens behind the anchor."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.ops.lookup import lookup
from tests.ops.test_no_host_reads import NoHostReads


def by_definition(known: list[int], num_drafts: int, max_match: int) -> tuple[list[int], int]:
    """Drafts and match length: try every earlier end, the longest wins and of equals the latest, copy what followed."""
    anchor, best, best_end = len(known) - 1, 0, len(known) - 2
    for end in range(anchor):
        length = 0
        while length < max_match and length <= end and known[end - length] == known[anchor - length]:
            length += 1
        if length and length >= best:
            best, best_end = length, end
    text = list(known)
    for _ in range(num_drafts):
        text.append(text[len(text) - max(anchor - best_end, 1)])
    return text[anchor + 1 :], best


def look_up(
    rows: list[list[int]], num_drafts: int, max_match: int, spare: int = 3
) -> tuple[list[list[int]], list[int]]:
    """The op over all rows at once: in slots of their own, in reverse, with columns behind the anchors that would match."""
    longest = max(len(row) for row in rows)
    history = torch.stack([torch.tensor((row * (longest + spare))[: longest + spare]) for row in rows]).int()
    slots = torch.arange(len(rows) - 1, -1, -1)
    context = torch.tensor([len(row) - 1 for row in rows])
    drafts, length = lookup(history.flip(0), slots, context, longest - 1 + spare // 2, num_drafts, max_match)
    assert drafts.dtype == length.dtype == torch.int64
    return drafts.tolist(), length.tolist()


# Two to four token ids, so that matches of every length are common.
ROWS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(rows=ROWS, num_drafts=st.integers(1, 9), max_match=st.integers(1, 6))
def test_equals_its_definition(rows: list[list[int]], num_drafts: int, max_match: int) -> None:
    """For every sequence by itself: what stands in other rows, or behind the anchor, changes nothing."""
    drafts, length = look_up(rows, num_drafts, max_match)
    expected = [by_definition(row, num_drafts, max_match) for row in rows]
    assert drafts == [each for each, _ in expected]
    assert length == [each for _, each in expected]


def test_the_longest_match_wins_then_the_latest() -> None:
    row = [1, 2, 3, 7, 9, 3, 8, 2, 3, 5, 1, 2, 3]
    assert look_up([row], 2, 1) == ([[5, 1]], [1])
    assert look_up([row], 2, 2) == ([[5, 1]], [2])
    assert look_up([row], 2, 3) == ([[7, 9]], [3])
    assert look_up([row], 2, 9) == ([[7, 9]], [3])


def test_a_loop_is_drafted_to_any_length() -> None:
    """Past the anchor the drafts go on with the period of the match."""
    assert look_up([[9, 4, 5, 6, 4, 5, 6, 4]], 8, 4) == ([[5, 6, 4, 5, 6, 4, 5, 6]], [4])
    assert look_up([[9, 4, 4]], 5, 4) == ([[4] * 5], [1])


def test_a_new_anchor_has_no_match_and_repeats() -> None:
    assert look_up([[4], [4, 5, 4, 6]], 3, 4) == ([[4, 4, 4], [6, 6, 6]], [0, 0])


def test_reads_nothing_on_the_host() -> None:
    history = torch.randint(0, 3, (4, 40), dtype=torch.int32)
    with NoHostReads():
        lookup(history, torch.tensor([2, 0]), torch.tensor([30, 0]), 35, 7, 4)
