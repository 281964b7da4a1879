"""bench/loops.py runs both loops and compares them turn by turn."""

import json
import sys
from pathlib import Path

import pytest

from bench import loops
from slipstream import LLM


@pytest.mark.slow
def test_both_loops_take_turns(
    tiny_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = map(str, tiny_folders)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"turns": ["hello"]}\n{"turns": ["a b c"]}\n')
    made: list[bool] = []
    start = LLM.__init__

    def spy(self: LLM, *args: object, **options: object) -> None:
        start(self, *args, **options)  # type: ignore[arg-type]
        made.append(self.engine.overlap)

    monkeypatch.setattr(LLM, "__init__", spy)
    options = f"--model {target} --draft {drafter} --prompts {prompts} --requests 2 --concurrency 1 2 --max-tokens 6"
    monkeypatch.setattr(
        sys, "argv", ["loops.py", *options.split(), "--modes", "off", "lag", "--waves", "3", "--out", str(out)]
    )
    loops.main()
    rows = json.loads(out.read_text())["rows"]
    assert [(row["mode"], row["concurrency"]) for row in rows] == [("off", 1), ("lag", 1), ("off", 2), ("lag", 2)]
    assert made == [True, False] * 4
    for row in rows:
        assert {loop: len(speeds) for loop, speeds in row["wave_tok_per_s"].items()} == {"overlapped": 3, "plain": 3}
        assert 0 < row["least"] <= row["x"] <= row["most"]
