"""Cells of the comparison: what is run for one, and how all of them are told."""

import json
from pathlib import Path

import pytest

from bench import lag
from slipstream.lab.dense import DenseTrace

ROOT = Path(__file__).parents[2]


def test_the_large_shape_replays_the_trace_of_its_kind() -> None:
    cell = lag.Cell(shape="8b", drafts=16, concurrency=8, temperature=1.0, kind="mbpp", fixed=(2, 4))
    asked = cell.options("m")
    assert cell.name == "8b-s16-c8-t1-mbpp"
    assert asked.replay is not None and asked.replay.trace.name == "smollm2-dspark-t1-s16.npz"
    assert (asked.replay.sets, asked.requests, asked.num_speculative_tokens) == (("mbpp",), 32, (16,))
    assert asked.modes[-3:] == ("lag-late", "fixed:2", "fixed:4")
    assert lag.Cell(shape="8b", drafts=7, concurrency=1).options("m").requests == 8


def test_the_small_shape_is_sampled_for_real() -> None:
    cell = lag.Cell(shape="smollm2", drafts=7, concurrency=8, temperature=1.0)
    asked = cell.options("m.gguf")
    assert (cell.name, asked.model, asked.replay) == ("smollm2-s7-c8-t1", "m.gguf", None)
    assert (asked.sampling.temperature, asked.sampling.seed) == (1.0, 0)


def test_commands_are_read() -> None:
    options = lag.parse(["cell", "8b", "--drafts", "7", "--concurrency", "128,32", "--fixed", "2,3"])
    assert (options.concurrency, options.fixed, options.temperature) == ((128, 32), (2, 3), 0.0)
    assert options.set is None
    kinds = ["--set", "mbpp", "--set", "mt_bench"]
    assert lag.parse(["cell", "8b", "--drafts", "7", "--concurrency", "32", *kinds]).set == ["mbpp", "mt_bench"]
    told = lag.trace_command(lag.parse(["trace", "--drafts", "16", "--temperature", "1"]))
    assert told[-1].endswith("smollm2-dspark-t1-s16.npz")
    assert told.count("--prompts") == 5


def test_prompts_of_several_sets_take_turns(tmp_path: Path) -> None:
    sets = [
        (lag.DATA / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines() for name in ("gsm8k", "mbpp")
    ]
    in_turn = [line for turn in zip(*sets, strict=False) for line in turn]
    path = lag.prompts_of(("gsm8k", "mbpp"), len(in_turn) + 10, tmp_path)
    assert path.read_text(encoding="utf-8").splitlines() == in_turn + in_turn[:10], "and again from the first"
    assert lag.prompts_of(("mbpp",), 8, tmp_path).name == "mbpp.jsonl"


@pytest.mark.parametrize("path", sorted((lag.DATA / "traces").glob("*.npz")), ids=lambda path: path.stem)
def test_the_kept_traces_are_whole(path: Path) -> None:
    trace = DenseTrace.load(path)
    temperature = trace.about["sampling"]["temperature"]
    assert path == lag.trace_path(trace.num_drafts, temperature)
    assert set(trace.set_names) == set(lag.SETS)


def test_the_page_tells_every_cell_that_was_measured() -> None:
    page = (ROOT / "docs" / "LAG.md").read_text(encoding="utf-8")
    lines = lag.table(list(lag.cells(lag.RESULTS))) + lag.compared(lag.RESULTS) + lag.best_static(lag.RESULTS)
    assert len(lines) > 4
    for line in lines:
        assert line in page


def test_tables_go_where_the_page_wants_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- cells -->\nold\n<!-- end cells -->\nb\n")
    lag.fill(page, {"cells": ["| new |", "| 1 |"]})
    assert page.read_text() == "a\n<!-- cells -->\n| new |\n| 1 |\n<!-- end cells -->\nb\n"
    with pytest.raises(SystemExit, match="no marks for others"):
        lag.fill(page, {"others": []})


def test_plain_decoding_is_simulated_at_its_own_prices() -> None:
    report = json.loads((lag.RESULTS / "8b-s7-c32-t1.json").read_text(encoding="utf-8"))
    wanted = [row for row in report["rows"] if row["mode"] in ("off", "static", "adaptive", "lag")]
    report["rows"] = [row | {"requests": 8, "waves": 1} for row in wanted]
    prices = json.loads(json.dumps(report["cost_model"]))
    for price in (prices["linear"], prices["table"], prices["mixed"]):
        if price["kind"] == "table":
            price["ms"] = [ms / 2 for ms in price["ms"]]
        price |= {name: price[name] / 2 for name in ("c0", "c1", "c2", "c3") if name in price}
    shared, apart = (
        {row["policy"]: row for row in lag.simulated(report | more)["rows"]}
        for more in ({}, {"cost_model": report["cost_model"] | {"plain": prices}})
    )
    assert apart["off"]["tok_per_s"] == pytest.approx(2 * shared["off"]["tok_per_s"], rel=0.02)
    assert apart["lag"]["tok_per_s"] == shared["lag"]["tok_per_s"]
    assert apart["off"]["regret"] == pytest.approx(1 - apart["off"]["tok_per_s"] / apart["oracle"]["tok_per_s"])
