"""Cells of the comparison: what is run for one, and how all of them are told."""

from argparse import Namespace
from pathlib import Path

import pytest

from bench import lag
from slipstream.lab.dense import DenseTrace

ROOT = Path(__file__).parents[2]


def cell(**changes: object) -> Namespace:
    fields = {"shape": "8b", "drafts": 7, "concurrency": 8, "set": None, "waves": 3, "model": "m", "out": Path("o")}
    return Namespace(**(fields | changes))


def test_the_large_shape_replays_the_trace_of_its_length() -> None:
    told = lag.command(cell(drafts=16, set="mbpp"))
    assert told[told.index("--acceptance") + 1].endswith("smollm2-dspark-s16.npz")
    assert told[told.index("--prompts") + 1] == "mbpp"
    assert told[told.index("--requests") + 1] == "32"
    assert told[told.index("--output") + 1] == "o/8b-s16-c8-mbpp.json"


def test_prompts_of_several_sets_take_turns(tmp_path: Path) -> None:
    path = lag.prompts_of(("gsm8k", "mbpp"), tmp_path)
    lines = path.read_text(encoding="utf-8").splitlines()
    firsts = [
        (lag.DATA / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[0]
        for name in ("gsm8k", "mbpp")
    ]
    assert lines[:2] == firsts
    assert lag.prompts_of(("mbpp",), tmp_path).name == "mbpp.jsonl"


@pytest.mark.parametrize("drafts", [7, 16])
def test_the_kept_traces_are_whole(drafts: int) -> None:
    trace = DenseTrace.load(lag.DATA / "traces" / f"smollm2-dspark-s{drafts}.npz")
    assert trace.num_drafts == drafts
    assert set(trace.set_names) == set(lag.SETS)


def test_the_page_tells_every_cell_that_was_measured() -> None:
    page = (ROOT / "docs" / "LAG.md").read_text(encoding="utf-8")
    lines = lag.table(list(lag.cells(lag.RESULTS)))
    assert len(lines) > 2
    for line in lines:
        assert line in page
