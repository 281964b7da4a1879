"""bench/memory.py runs, and its cases are what they are called."""

import json
from pathlib import Path

import pytest

from bench import memory


@pytest.mark.slow
def test_both_parts_are_served_and_measured(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    target, drafter = map(str, tiny_folders)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"turns": ["hello"]}\n{"turns": ["a b c"]}\n')
    memory.main(
        f"--model {target} --draft {drafter} --prompts {prompts} --requests 5 --concurrency 5 --prefix 100 "
        f"--max-tokens 40 --mode static --waves 1 --dtype float32 --out {out}".split()
    )
    rows = {row["case"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["cold", "cached", "roomy", "half"]
    assert all(row["tok_per_s"] > 0 and row["same"] == 5 for row in rows.values())
    assert rows["cached"]["prefill_rows"] < rows["cold"]["prefill_rows"] / 2
    assert rows["half"]["preemptions"] > 0 == rows["roomy"]["preemptions"]


def test_both_rules_are_fitted(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    """On a GPU with what was taken of it."""
    target, drafter = map(str, tiny_folders)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"turns": ["hello"]}\n')
    memory.main(
        f"--model {target} --draft {drafter} --prompts {prompts} --parts fit --requests 3 --concurrency 3 --max-tokens 5 --mode static "
        f"--max-model-len 200 --dtype float32 --out {out}".split()
    )
    rows = json.loads(out.read_text())["rows"]
    assert [(row["case"], row["errors"], row["preemptions"]) for row in rows] == [
        ("coupled", 0, 0),
        ("rejection", 0, 0),
    ]
    assert all(row["kv_memory"][0] > 0 for row in rows)
