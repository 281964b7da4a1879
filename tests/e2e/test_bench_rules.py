"""bench/rules.py runs, and under either rule answers that have no seed in common differ."""

import json
from pathlib import Path

import pytest

from bench import rules
from tests.e2e.engines import SPECULATING, ScriptedDrafter, greedy, known, make_llm, models_with, prompts_of


@pytest.mark.slow
def test_both_rules_are_served_and_compared(
    tiny_folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = map(str, tiny_folders)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"turns": ["hello"]}\n{"turns": ["a b c"]}\n')
    code = rules.main(
        f"--model {target} --draft {drafter} --modes static lag --prompts {prompts} --requests 3 --concurrency 2 "
        f"--max-tokens 12 --waves 2 --dtype float32 --num-speculative-tokens 3 --temperatures 0.7 1 --out {out}".split()
    )
    assert code == 0
    report = json.loads(out.read_text())
    assert report["command"].startswith("python -m bench.rules --model")
    assert [(row["mode"], row["temperature"], row["acceptance"]) for row in report["rows"]] == [
        (mode, heat, rule) for mode in ("static", "lag") for heat in (0.7, 1.0) for rule in ("coupled", "rejection")
    ]
    for row in report["rows"]:
        assert len(row["wave_tok_per_s"]) == 2 and row["tok_per_s"] > 0
        assert row["mean_accepted_length"] >= 1 and 0 < row["output_tokens"] <= 2 * 3 * 12
        assert row["peak_bytes"] is None or row["peak_bytes"] > 0
    table = capsys.readouterr().out
    assert table.count("| coupled |") == table.count("| rejection |") == 4


PROMPTS = prompts_of(5, 9)


@pytest.mark.parametrize("acceptance", rules.RULES)
@pytest.mark.parametrize("source", ["dspark", "scripted"])
@pytest.mark.parametrize("mode", SPECULATING)
def test_siblings_and_requests_without_a_seed_differ(mode: str, source: str, acceptance: str) -> None:
    """Drafts are the same for all of them where they are scripted; answers are not."""
    hot = {"temperature": 2.0, "max_tokens": 14}
    scripted = ScriptedDrafter(known(PROMPTS, greedy(14))) if source == "scripted" else None
    llm = make_llm(mode, scripted, models=models_with(None if scripted else source), acceptance=acceptance)
    siblings = llm.generate([PROMPTS[0]], greedy(n=4, seed=1, **hot))
    unseeded = llm.generate([PROMPTS[0]] * 4, greedy(**hot))
    answers = [answer.token_ids for answer in (*siblings, *unseeded)]
    assert len(set(answers)) == len(answers) == 8
    again = llm.generate([PROMPTS[0]], greedy(n=4, seed=1, **hot))
    if acceptance == "coupled" or mode == "static":  # otherwise widths may have changed with what was learned
        assert [answer.token_ids for answer in again] == answers[:4]
    assert llm.engine.totals.verified > 0
