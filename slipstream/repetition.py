"""Answers that end in a loop: small models fall into them, and a loop is easy to draft.

The one definition for bench, evaluate (figures with and without such answers) and train (which cuts them). Knows token
ids only. Plain Python, since looking from the end backwards settles nearly every period at its first token.
"""

from collections.abc import Sequence

MAX_LOOP_PERIOD = 64  # tokens
MIN_LOOP_ROUNDS = 3
MIN_LOOP_TOKENS = 24  # "0000" at the end of a number is no loop


def find_loop(token_ids: Sequence[int]) -> tuple[int, int] | None:
    """The loop in which a text ends: where its second round begins and its period, or None.

    It is one if the tail repeats with a period of at most MAX_LOOP_PERIOD for MIN_LOOP_ROUNDS and MIN_LOOP_TOKENS.
    """
    for period in range(1, min(MAX_LOOP_PERIOD, len(token_ids) // MIN_LOOP_ROUNDS) + 1):
        second_round = _repeats_from(token_ids, period)
        if len(token_ids) - second_round + period >= max(MIN_LOOP_ROUNDS * period, MIN_LOOP_TOKENS):
            return second_round, period
    return None


def ends_in_loop(token_ids: Sequence[int]) -> bool:
    """Whether the end of an answer repeats itself."""
    return find_loop(token_ids) is not None


def _repeats_from(token_ids: Sequence[int], period: int) -> int:
    """From where on every token equals the one a period before it."""
    at = len(token_ids)
    while at > period and token_ids[at - 1] == token_ids[at - 1 - period]:
        at -= 1
    return at
