"""Prompt files: the order of the file, its first turns, and what is said about files that are not like that."""

from pathlib import Path

import pytest

from slipstream.errors import ConfigError
from slipstream.prompts import MadeUp, prompt_source, prompts_name, read_prompts, user


def test_prompts_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    """First turns only, blank lines passed over, and U+2028 inside a turn ends no line."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["a\u2028z", "b"]}\n\n{"turns": ["c"]}\n', encoding="utf-8")
    assert read_prompts(path) == ["a\u2028z", "c"]
    assert read_prompts(path, limit=1) == ["a\u2028z"]
    assert user("c") == [{"role": "user", "content": "c"}]


def test_the_package_brings_a_sample() -> None:
    assert len(read_prompts(None)) == len(read_prompts(None, limit=99)) == 16
    assert prompts_name(None) == "gsm8k_sample"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no prompts"),
        ("\n \n", "holds no prompts"),
        ('{"turns": []}', "line 1"),
        ('{"turns": ["a"]}\n\n{"turn": "b"}', "line 3"),
        ('{"turns": ["  "]}', "not empty"),
        ("nonsense", "expected"),
        ('{"turns": "What is 2+2?"}', "line 1: expected"),
        ('{"turns": {"0": "a"}}', "line 1: expected"),
        ('["turns"]', "line 1: expected"),
        ('{"turns": ["a"]}\n{"turns": ["b \\ud800"]}', "line 2: the first turn holds half of a surrogate pair"),
        ("[" * 100_000, "line 1: expected"),
    ],
)
def test_bad_prompt_files_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_prompts(path)


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["\\ud83d\\ude00"]}')
    assert read_prompts(path) == ["\U0001f600"]


def test_a_missing_prompt_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.jsonl"):
        read_prompts(tmp_path / "absent.jsonl")


def test_made_up_prompts_have_exactly_the_length_asked_for() -> None:
    source = prompt_source("random:128")
    assert source == MadeUp(128)
    assert prompts_name(source) == "random:128"
    assert isinstance(source, MadeUp)
    drawn = source.draw(4, vocab_size=50)
    assert [len(ids) for ids in drawn] == [128] * 4
    assert len(set(drawn)) == 4
    assert all(0 <= token < 50 for ids in drawn for token in ids)
    assert source.draw(2, vocab_size=50) == drawn[:2], "the same in every case and run"


def test_a_file_of_prompts_is_a_path() -> None:
    assert prompt_source("random.jsonl") == Path("random.jsonl")
    assert prompt_source("./random:8") == Path("random:8")


@pytest.mark.parametrize("text", ["random:", "random:0", "random:-1", "random:many", "random:1.5"])
def test_a_length_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"random:128"):
        prompt_source(text)
