"""`bench --probe --timeline`: what a real run of every mode leaves in the file."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.commands.bench import _timeline
from slipstream.config import MODES, SamplingParams
from slipstream.errors import ConfigError
from slipstream.lab.bench import run
from slipstream.lab.bench_options import BenchOptions
from slipstream.lab.timeline import Timeline
from slipstream.prompts import MadeUp


def options(tiny_folders: tuple[Path, Path], **fields: Any) -> BenchOptions:
    target, drafter = (str(folder) for folder in tiny_folders)
    chosen: dict[str, Any] = {
        "model": target, "draft": drafter, "requests": 2, "waves": 2, "concurrency": (2,), "probe": True,
        "prompts": MadeUp(6), "sampling": SamplingParams(max_tokens=12, ignore_eos=True), "engine": {"dtype": "float32"},
        "speculative": {"cost_model": "none"}, **fields,
    }  # fmt: skip
    return BenchOptions(**chosen)


@pytest.mark.slow
def test_a_bench_leaves_a_trace_of_every_mode(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    timeline = Timeline()
    run(options(tiny_folders), lambda line: None, timeline.add)
    timeline.write(tmp_path / "t.json", {"model": "tiny"})
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    process = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(process) == [f"{mode} at 2" for mode in MODES]
    for mode in MODES:
        own = [e for e in events if e["pid"] == process[f"{mode} at 2"]]
        slices = [e for e in own if e["ph"] == "X"]
        assert min(e["ts"] for e in slices) == 0
        assert {"schedule", "decide", "collect", "commit"} <= {e["name"] for e in slices}
        assert {e["args"]["name"] for e in own if e["name"] == "thread_name"} == {"host", "copies", "device"}, mode
        assert ("draft" in {e["name"] for e in slices}) == (mode != "off")
        ages = confidence_ages(own)
        assert set(ages) == {"adaptive": {0}, "lag": {1}, "lag-budget": {1}}.get(mode, set())
        verifies = sum(e["name"] == "verify" for e in slices)
        assert sum(e["ph"] == "s" and e["name"] == "widths" for e in own) == verifies


def confidence_ages(events: list[dict[str, Any]]) -> list[int]:
    """Steps between a confidence and the decision that its arrow leads to."""

    def step_of(flow: dict[str, Any]) -> int:
        (found,) = [
            e["args"]["step"] for e in events
            if e["ph"] == "X" and e["tid"] == flow["tid"] and e["ts"] <= flow["ts"] < e["ts"] + e["dur"]
        ]  # fmt: skip
        return int(found)

    flows = [e for e in events if e["ph"] in "sf" and e["name"] == "confidence"]
    starts = {e["id"]: step_of(e) for e in flows if e["ph"] == "s"}
    return [step_of(e) - starts[e["id"]] for e in flows if e["ph"] == "f"]


def test_the_command_writes_a_trace_or_a_picture(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    target, drafter = tiny_folders
    arguments = ["bench", "--model", target, "--draft", drafter, "--modes", "static", "--requests", 1, "--waves", 1]
    arguments += ["--prompts", "random:4", "--max-tokens", 8, "--dtype", "float32", "--probe"]
    arguments += ["--timeline", tmp_path / "t.json", "--timeline", tmp_path / "t.png"]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    assert min((tmp_path / name).stat().st_size for name in ("t.json", "t.png")) > 1000
    report = json.loads((tmp_path / "t.json").read_text())["otherData"]
    assert (report["model"], report["draft"]) == (str(target), str(drafter))


def test_a_wrong_file_is_named_before_anything_is_measured(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--probe"):
        _timeline([tmp_path / "t.json"], options(tiny_folders, probe=False))
    with pytest.raises(ConfigError, match="must end in"):
        _timeline([tmp_path / "t.xyz"], options(tiny_folders))
    with pytest.raises(ConfigError, match=r"timeline .* cannot be written"):
        _timeline([_folder(tmp_path)], options(tiny_folders))
    assert _timeline([], options(tiny_folders, probe=False)).cases == {}


def _folder(where: Path) -> Path:
    (where / "t.json").mkdir()
    return where / "t.json"
