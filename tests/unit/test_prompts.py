"""Prompt files: the order of the file, its first turns, and what is said about files that are not like that."""

from pathlib import Path

import pytest

from slipstream.errors import ConfigError
from slipstream.prompts import prompts_name, read_prompts, user


def test_prompts_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    """First turns only, blank lines passed over, and U+2028 inside a turn ends no line."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["a\u2028z", "b"]}\n\n{"turns": ["c"]}\n', encoding="utf-8")
    assert read_prompts(path) == ["a\u2028z", "c"]
    assert read_prompts(path, 1) == ["a\u2028z"]
    assert user("c") == [{"role": "user", "content": "c"}]


def test_the_package_brings_a_sample() -> None:
    assert len(read_prompts(None)) == len(read_prompts(None, 16)) == 16
    assert prompts_name(None) == "gsm8k_sample"


@pytest.mark.parametrize(
    ("text", "count", "says"),
    [
        ("", 1, "has 0 prompts"),
        ("\n \n", None, "has 0 prompts"),
        ('{"turns": ["a"]}', 2, "has 1 prompts and 2"),
        ('{"turns": ["a"]}', 0, "requests is 0"),
        ('{"turns": []}', 1, "line 1"),
        ('{"turns": ["a"]}\n\n{"turn": "b"}', None, "line 3"),
        ('{"turns": ["  "]}', 1, "not empty"),
        ("nonsense", 1, "expected"),
    ],
)
def test_bad_prompt_files_are_named(tmp_path: Path, text: str, count: int | None, says: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_prompts(path, count)


def test_a_missing_prompt_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.jsonl"):
        read_prompts(tmp_path / "absent.jsonl")
