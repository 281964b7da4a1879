"""`make bench`: what was foreseen stands beside what was measured, and every command of it runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import pipeline

ROOT = Path(__file__).parents[2]


def row(mode: str, ratio: float, *, at: int = 8, **more: object) -> dict[str, object]:
    speed = {"tok_per_s_min": 90.0 * ratio, "tok_per_s_max": 110.0 * ratio}
    return {
        "mode": mode,
        "signal": None,
        "concurrency": at,
        "ratio_to_off": ratio,
        "mean_accepted_length": 3.0,
        **speed,
        **more,
    }


def test_ratios_are_compared_where_both_have_them() -> None:
    simulated = [
        row("off", 1.0, policy="off"),
        row("lag", 1.5, policy="lag"),
        row("static", 2.0, policy="static:7", mean_accepted_length=3.5),
    ]
    measured = [
        row("off", 1.0),
        row("static", 1.6),
        row("lag-budget", 1.7),
        row("lag", 1.4, at=1),
        row("off", 1.0, at=1),
    ]
    (found,) = pipeline.compare(simulated, measured)
    assert (found["mode"], found["concurrency"], found["simulated"], found["measured"]) == ("static", 8, 2.0, 1.6)
    assert found["off_by"] == pytest.approx(0.25)
    assert (found["simulated_tokens_per_step"], found["measured_tokens_per_step"]) == (3.5, 3.0)
    assert found["measured_min"] == pytest.approx(1.6 * 90 / 110)
    assert found["measured_max"] == pytest.approx(1.6 * 110 / 90)


@pytest.mark.slow
def test_every_command_runs(tmp_path: Path) -> None:
    options = [
        "--requests",
        "2",
        "--max-tokens",
        "12",
        "--waves",
        "1",
        "--budget",
        "5",
        "--concurrency",
        "2",
        "--drafts",
        "3",
    ]
    command = [sys.executable, "bench/pipeline.py", "--out", str(tmp_path), *options]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert list(summary["seconds"]) == ["profile", "trace", "simulate", "bench"]
    assert (summary["profile"]["num_drafts"], summary["profile"]["budget_s"]) == (3, 5.0)
    rows = summary["rows"]
    assert {row["mode"] for row in rows} == {"static", "adaptive", "lag", "lag-budget"}
    assert all(row["simulated"] > 0 and row["measured"] > 0 for row in rows)
    for name in ("profile.json", "trace.npz", "simulate.png", "timeline.json", "timeline.png"):
        assert (tmp_path / name).stat().st_size > 0, name
