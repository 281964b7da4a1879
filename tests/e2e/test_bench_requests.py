"""bench/requests.py runs, and what is asked for is what is measured."""

import json
import sys
from pathlib import Path

import pytest

from bench import requests


@pytest.mark.slow
def test_every_wish_is_served_and_measured(
    tiny_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = map(str, tiny_folders)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"turns": ["hello"]}\n{"turns": ["a b c"]}\n')
    options = (
        f"--model {target} --draft {drafter} --modes static --prompts {prompts} --requests 3 --concurrency 2 "
        f"--max-tokens 6 --waves 1 --dtype float32 --out {out}"
    )
    monkeypatch.setattr(sys, "argv", ["requests.py", *options.split()])
    requests.main()
    rows = json.loads(out.read_text())["rows"]
    assert [(row["mode"], row["wish"]) for row in rows] == [("static", wish) for wish in requests.WISHES]
    for row in rows:
        wish = requests.WISHES[row["wish"]]
        assert row["tok_per_s"] > 0 and (row["x"] == 1) >= (row["wish"] == "nothing")
        assert (row["entries"] > 0) == any("logprobs" in name for name in wish)
        if "logprobs" in wish:
            assert row["entries"] == 3 * 6
