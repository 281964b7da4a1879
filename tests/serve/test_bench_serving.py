"""`bench/serving.py` runs: offline, served and scraped waves of the same requests."""

from argparse import Namespace
from pathlib import Path

import pytest

from bench import serving

ENGINE_ALONE = {"tok_per_s", "step_ms", "cpu_us_per_token", "decode_steps", "tokens"}


@pytest.mark.parametrize("in_thread", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_small_run(
    in_thread: bool, tiny_folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = map(str, tiny_folders)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["hi"]}\n')
    options = Namespace(
        model=target, draft=drafter, verify="static", prompts=prompts, requests=6, streams=4, max_tokens=8, temperature=0.0,
        waves=1, dtype="float32", clients=2, client_cores=None, engine_cores=None, in_thread=in_thread, scrape=0.01, out=None,
    )  # fmt: skip
    report = serving.measure(options)
    offline, served, scraped = report["rows"]
    assert [row["kind"] for row in report["rows"]] == ["offline", "served", "scraped"]
    assert set(offline) >= ENGINE_ALONE
    assert offline["tokens"] == served["tokens"] == scraped["tokens"] == sum(serving.lengths(8, 6)) == 48
    assert served["ttft_ms_p50"] > 0 and served["events"] >= 12
    assert served["x"] == pytest.approx(offline["tok_per_s"] / served["tok_per_s"])
    assert "first token" in capsys.readouterr().out
