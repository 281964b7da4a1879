"""Compiled grammars are kept within bounds: many big ones must not fill the memory."""

from dataclasses import dataclass

from slipstream.grammars import Outcomes


@dataclass
class Compiled:
    memory_size_bytes: int


def ask(text: str) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    return "regex", (text,), (0,)


def test_those_asked_for_last_are_kept() -> None:
    kept = Outcomes(most=3)
    for text in "abc":
        kept.put(ask(text), text)
    assert kept.get(ask("a")) == "a"
    kept.put(ask("d"), "d")
    assert [kept.get(ask(text)) for text in "abcd"] == ["a", None, "c", "d"]


def test_big_ones_leave_room_for_fewer() -> None:
    kept = Outcomes(most=100, most_bytes=1000)
    for text in "abcde":
        kept.put(ask(text), Compiled(350))
        kept.put(ask(text), Compiled(300))  # by two threads at once
    assert [kept.get(ask(text)) is not None for text in "abcde"] == [False, False, True, True, True]
    kept.put(ask("f"), Compiled(5000))
    assert [kept.get(ask(text)) is not None for text in "abcdef"] == [False] * 5 + [True]
    kept.put(ask("g"), "refused")
    assert kept.get(ask("f")) is None and kept.get(ask("g")) == "refused"
