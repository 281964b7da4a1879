"""bench/tune_step.py runs, and its candidates are the tables that they speak of."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import tune_step
from bench.tune_step import CANDIDATES, Candidate
from slipstream.kernels import linear as kernels
from slipstream.kernels.linear import choose_tile

# The interpreter is NumPy, which warns of what padding rows do.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.slow
@pytest.mark.parametrize("width", [0, 1])
def test_every_candidate_is_timed_in_every_wave(width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found" / "out.json"
    asked = ["8b", "--smoke", "--waves", "2", "--rows", "2", "--width", str(width), "--out", str(out)]
    assert tune_step.main(asked) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    assert [(row["candidate"], row["rows"], len(row["waves"])) for row in found["rows"]] == [
        (name, 2, 2) for name in CANDIDATES["toy"]
    ]
    assert all(row["step_ms"] > 0 and row["linear_ms"] > 0 for row in found["rows"])
    assert capsys.readouterr().out.count("| toy | 2 |") == len(CANDIDATES["toy"])


@pytest.mark.parametrize("model", CANDIDATES)
def test_candidates_replace_what_they_say_and_nothing_else(model: str) -> None:
    def chosen(size: tuple[int, int]) -> list[Any]:
        weight = torch.empty(size, dtype=torch.bfloat16, device="meta")
        return [choose_tile(rows, weight, False) for rows in range(1, 300)]

    usual = {size: chosen(size) for size in kernels.TUNED}
    for candidate in CANDIDATES[model].values():
        with candidate.in_force():
            for size, before in usual.items():
                expected = list(before)
                for above, most, tile in candidate.replaced.get(size, ()):
                    expected[above:most] = [tile] * (most - above)
                assert chosen(size) == expected, size
            for entries in kernels.TUNED.values():
                assert [rows for rows, _ in entries] == sorted({rows for rows, _ in entries})
    assert {size: chosen(size) for size in kernels.TUNED} == usual


def test_products_of_many_programs_have_their_norms_launched() -> None:
    """Where the tile wants them normed; others carry the norm in their loop, and are better off with half of it made."""
    wide, narrow, unlisted = (
        torch.empty(*size, dtype=torch.bfloat16, device="meta") for size in ((24576, 4096), (3072, 576), (6144, 1024))
    )
    assert not kernels.reads_half_normed(32, wide)
    assert kernels.reads_half_normed(32, narrow)
    assert kernels.reads_half_normed(8, unlisted)


def test_with_norms_apart_nobody_reads_half_of_one() -> None:
    weight = torch.empty(960, 576, dtype=torch.bfloat16, device="meta")
    assert kernels.reads_half_normed(1, weight)
    with Candidate(norms_apart=True).in_force():
        assert not kernels.reads_half_normed(1, weight)
