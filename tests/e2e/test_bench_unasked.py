"""bench/unasked.py runs, and its bare engine writes the texts of the whole one."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import unasked
from slipstream import SamplingParams, load_models


def test_a_bare_engine_writes_the_same_texts_and_knows_no_wishes(tiny_folders: tuple[Path, Path]) -> None:
    target, drafter = map(str, tiny_folders)
    models = load_models(target, draft_model=drafter, dtype="float32")
    options = argparse.Namespace(draft=drafter, acceptance="coupled", concurrency=3)
    prompts = [[3, 4, 9], [5, 7], [6, 6, 8], [9, 11, 12, 2]]
    sampled = SamplingParams(temperature=1.0, seed=5, max_tokens=12)
    for mode in ("off", "static", "adaptive", "lag", "lag-budget"):
        whole = unasked.make_llm(options, mode, models, 64)
        bare = unasked.bare(unasked.make_llm(options, mode, models, 64))
        for params in (SamplingParams(max_tokens=12), sampled):
            texts: list[Any] = [[answer.token_ids for answer in llm.generate(prompts, params)] for llm in (whole, bare)]
            assert texts[0] == texts[1]
        biased = SamplingParams(max_tokens=4, logit_bias={7: 100})
        assert whole.generate(prompts, biased)[0].token_ids == (7,) * 4
        plain = bare.generate(prompts, SamplingParams(max_tokens=4))
        assert [each.token_ids for each in bare.generate(prompts, biased)] == [each.token_ids for each in plain]


@pytest.mark.slow
def test_both_take_turns(tiny_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = map(str, tiny_folders)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"turns": ["hello"]}\n{"turns": ["a b c"]}\n')
    options = f"--model {target} --draft {drafter} --prompts {prompts} --requests 3 --concurrency 2 --max-tokens 6 --waves 3 --out {out}"
    monkeypatch.setattr(sys, "argv", ["unasked.py", *options.split()])
    unasked.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["mode"] for row in rows] == ["off", "static", "lag"]
    for row in rows:
        assert {name: len(speeds) for name, speeds in row["wave_tok_per_s"].items()} == {"whole": 3, "bare": 3}
        assert row["quartiles"][0] <= row["x"] <= row["quartiles"][1] and row["x"] > 0
