"""What README and model cards claim of the shipped drafters is what lies there: files, figures, calibrations."""

import json
import re
from pathlib import Path

import pytest

from slipstream.decide.calibration import Calibration
from slipstream.models.headers import read_headers, weights_digest
from slipstream.models.locate import built_in_drafters

ROOT = Path(__file__).parents[2]
ACCEPTANCE = json.loads((ROOT / "bench/results/acceptance-h200.json").read_text(encoding="utf-8"))["drafters"]
DRAFTERS = built_in_drafters()


def lengths(drafter: str, drafts: str) -> dict[str, tuple[float, float]]:
    """Prompt set -> tokens per step, of all answers and of those without a loop."""
    figures = ACCEPTANCE[drafter][drafts]
    return {
        s: tuple(round(f[kind]["mean_accepted_length"], 2) for kind in ("all", "no_loops")) for s, f in figures.items()
    }


def test_together_they_stay_small() -> None:
    assert sum((folder / "model.safetensors").stat().st_size for folder in DRAFTERS.values()) < 40e6


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_card_describes_the_files(name: str) -> None:
    card = (DRAFTERS[name] / "README.md").read_text(encoding="utf-8")
    values = sum(header.num_values for header in read_headers(DRAFTERS[name]).values())
    size = (DRAFTERS[name] / "model.safetensors").stat().st_size / 1e6
    assert f"{values:,} values with `d2t`, bf16, {size:.1f} MB" in card
    assert "@@" not in card
    for drafts in ACCEPTANCE[name]:
        for prompts, (whole, straight) in lengths(name, drafts).items():
            assert f"| {prompts} | {whole:.2f} | {straight:.2f} |" in card, (drafts, prompts)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_calibration_is_of_these_weights(name: str) -> None:
    calibration = Calibration.load(DRAFTERS[name] / "calibration.json")
    assert set(calibration.weights.values()) == {weights_digest(DRAFTERS[name])}


def test_the_readme_quotes_the_kept_figures() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for label, name, drafts in (
        ("smollm2-135m-dspark", "smollm2-135m-dspark", "S=7"),
        ("the same at S = 16", "smollm2-135m-dspark", "S=16"),
        ("smollm2-135m-dflash", "smollm2-135m-dflash", "S=7"),
    ):
        found = re.search(rf"^\| {re.escape(label)} \| (.*) \|$", readme, re.MULTILINE)
        assert found, label
        cells = [f"{whole:.2f} ({straight:.2f})" for whole, straight in lengths(name, drafts).values()]
        assert found[1].split(" | ") == cells


@pytest.mark.parametrize("name", ["cpu-2core-bf16-dspark", "cpu-2core-bf16-dspark-concurrency8"])
def test_the_readme_quotes_the_kept_speeds(name: str) -> None:
    """Every row of a bench table stands in the README as the bench printed it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    report = json.loads((ROOT / f"bench/results/{name}.json").read_text(encoding="utf-8"))
    for row in report["rows"]:
        speed = f"{row['tok_per_s']:.1f} ({row['tok_per_s_min']:.1f} - {row['tok_per_s_max']:.1f})"
        assert f"| {row['concurrency']} | {speed} | {row['ratio_to_off']:.2f} |" in readme, row["mode"]


def test_the_readme_quotes_the_kept_speeds_of_a_gpu() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    report = json.loads((ROOT / "bench/results/gpu-h200.json").read_text(encoding="utf-8"))
    rows = [row for row in report["phases"]["smollm2"]["rows"] if row["ratio_to_off"] is not None]
    assert len(rows) == 15  # five modes at three concurrencies
    for row in rows:
        speed = f"{row['tok_per_s']:,.0f} ({row['tok_per_s_min']:,.0f} - {row['tok_per_s_max']:,.0f})"
        assert f"| {row['concurrency']} | {speed} | {row['ratio_to_off']:.2f} |" in readme, row["mode"]
    goals = {goal["what"]: goal["value"] for goal in report["goals"]}
    for at in (1, 32, 256):
        assert f"{goals[f'smollm2-135m: off at {at}: tok/s']:,.0f}" in readme
