"""`bench/serving.py` runs: offline, served and scraped waves of the same requests."""

import json
import logging
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench import serving, serving_engine, serving_front

ENGINE_ALONE = {"tok_per_s", "step_ms", "cpu_us_per_token", "decode_steps", "tokens"}


@pytest.mark.slow
@pytest.mark.parametrize("in_thread", [True, False])
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
    assert offline["tokens"] == served["tokens"] == scraped["tokens"] == sum(serving.lengths(options)) == 48
    assert served["ttft_ms_p50"] > 0 and served["events"] >= 12
    assert served["x"] == pytest.approx(offline["tok_per_s"] / served["tok_per_s"])
    assert "first token" in capsys.readouterr().out


def test_clients_are_asked_for_as_much_and_end_together() -> None:
    options = Namespace(requests=2048, streams=64, clients=4, max_tokens=256)
    found = serving.lengths(options)
    assert len(found) == 2048 and sum(found) == pytest.approx(2048 * 256, rel=1e-3)
    shares = [found[number::4] for number in range(4)]
    assert max(map(sum, shares)) - min(map(sum, shares)) < 256
    for share in shares:
        assert share[-16:] == sorted(share[-16:], reverse=True) and share[:64] != sorted(share[:64], reverse=True)


@pytest.mark.slow
def test_the_server_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "front.json"
    asked = "--requests 8 --streams 4 --max-tokens 8 --waves 1 --step-ms 1 --clients 2 --chat --out"
    monkeypatch.setattr("sys.argv", ["serving_front.py", *asked.split(), str(out)])
    serving_front.main()
    (wave,) = json.loads(out.read_text())["waves"]
    assert wave["tokens"] == 64 and wave["server_us_per_request"] > 0 and 0 <= wave["empty"] < 1


@pytest.mark.parametrize(("during", "expected"), [({"server_s": 2.0}, 0.5), ({}, 2.5)], ids=["served", "offline"])
def test_in_one_process_what_starting_clients_takes_is_not_counted(during: dict[str, float], expected: float) -> None:
    counts = iter([(os.getpid(), 5, 20.0), (os.getpid(), 6, 30.0)])

    class Running:
        def ask(self, function: Any) -> Any:
            return next(counts) if function is serving_engine.counts else None

    found = serving.wave(Running(), lambda: {"tokens": 4, "seconds": 3.0, **during})  # type: ignore[arg-type]
    assert found["both_cpu_us_per_token"] == found["cpu_us_per_token"] == 1e6 * expected
    assert not {"engine_cpu_us_per_token", "server_cpu_us_per_token", "server_s"} & found.keys()


def test_logs_are_as_before_after_an_error() -> None:
    logger = logging.getLogger("slipstream.serve")
    before = list(logger.handlers), logger.level, logger.propagate
    with pytest.raises(ArithmeticError), serving_front.logged():
        raise ArithmeticError
    assert (logger.handlers, logger.level, logger.propagate) == before
