"""`slipstream simulate` from the command line, and against the engine on a replayed trace: the same calls, step by step."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.config import SpeculativeConfig
from slipstream.decide.make import make_policy
from slipstream.lab.replay import replay, replay_requests
from slipstream.lab.simulate_loop import Prices, VirtualEngine
from slipstream.llm import LLM
from slipstream.testing import tiny_models, tiny_spec
from tests.e2e.engines import VOCAB, price
from tests.unit.dense_traces import made_up
from tests.unit.test_simulate import Spy, profile

S = 4


def seen(spy: Spy) -> list[tuple[Any, ...]]:
    """Calls and answers as plain values. Numbers of requests begin elsewhere; times are not compared, they are real."""
    first = min(int(plan.uids_np.min()) for _, plan in spy.calls)
    calls: list[tuple[Any, ...]] = []
    for name, plan in spy.calls:
        columns = (
            plan.slots_np, plan.generations_np, plan.uids_np - first, plan.decode_steps_np, plan.num_given_np, plan.emits_np,
            plan.caps_np, plan.context_np, plan.context_upper_bound_np,
        )  # fmt: skip
        calls.append((name, plan.step, plan.num_decode, plan.draft_length, *(c.tolist() for c in columns)))
    shown = [
        (plan.step, one.signal_np.tolist()) if hasattr(one, "signal_np") else
        (plan.step, one.widths_np.tolist(), one.num_accepted_np.tolist())
        for plan, one in spy.shown if hasattr(one, "signal_np") or hasattr(one, "num_accepted_np")
    ]  # fmt: skip
    said = [
        (plan.step, one.budget, None if one.widths_np is None else one.widths_np.tolist())
        if hasattr(one, "caps_np") else (plan.step, one)
        for plan, one in spy.said
    ]  # fmt: skip
    return [*calls, *shown, *said]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("mode", ["static", "adaptive", "lag", "lag-budget"])
def test_a_policy_sees_what_the_engine_would_show_it(mode: str, concurrency: int, overlap: bool) -> None:
    trace, count, rows = made_up(7, num_drafts=S, mean_length=20, prompt=9), 9, 24
    speculative = SpeculativeConfig.for_mode(mode, draft_model="tiny", num_speculative_tokens=S)

    def spy() -> Spy:
        return Spy(make_policy(speculative, num_drafts=S, has_head=True, cost=price())[0])

    models, real, simulated = tiny_models("dspark", spec=tiny_spec(vocab_size=VOCAB)), spy(), spy()
    prompts, params = replay_requests(trace, count, vocab_size=VOCAB, most_positions=100, max_tokens=25)
    llm = LLM(
        models, speculative=speculative, policy=real, adapt=replay(trace), max_num_seqs=concurrency, max_model_len=128,
        page_size=8, max_num_batched_tokens=rows, overlap=overlap,
    )  # fmt: skip
    answers = llm.generate(prompts, params)
    cost = price()
    engine = VirtualEngine(
        trace, simulated, Prices(step=cost.step, draft=cost.fitted_draft), num_drafts=S, concurrency=concurrency,
        max_num_batched_tokens=rows, max_tokens=25, overlap=overlap,
    )  # fmt: skip
    starts = [each.seed + len(prompt) for prompt, each in zip(prompts, params, strict=True)]
    wave = engine.serve(np.searchsorted(trace.starts_np, starts))
    assert seen(simulated) == seen(real)
    for ours, theirs in zip(wave.answers, answers, strict=True):
        assert ours.spec.as_dict() | {"mode": mode} == theirs.spec.as_dict() | {"mode": mode}
    totals = [sum(getattr(answer.spec, name) for answer in answers) for name in ("drafted", "verified", "accepted")]
    assert totals[0] >= totals[1] > totals[2] > 0 and (totals[0] > totals[1] or mode == "static")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    made_up(6, num_drafts=S).save(tmp_path / "t.npz")
    profile().save(tmp_path / "p.json")
    return ["simulate", "--trace", str(tmp_path / "t.npz"), "--profile", str(tmp_path / "p.json")]


def run(arguments: list[str]) -> int:
    from slipstream.cli import main

    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


def test_the_command(files: list[str], tmp_path: Path, capsys: Any) -> None:
    out, plot = tmp_path / "a" / "out.json", tmp_path / "b" / "plot.png"
    more = ["--concurrency", "1,3", "--num-speculative-tokens", "2,4", "--sets", "a", "--waves", "1", "--seed", "1"]
    assert run([*files, *more, "--json", "--out", str(out), "--plot", str(plot)]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert report == json.loads(out.read_text()) and len(printed.out.splitlines()) == 1
    assert plot.read_bytes()[:4] == b"\x89PNG"
    rows = report["rows"]
    # off once for each concurrency; static, oracle, and three with each of two signals for each S as well
    assert len(rows) == 2 * (1 + 2 * (2 + 3 * 2))
    assert {row["signal"] for row in rows} == {None, "head", "peak"}
    assert all(row["regret"] is not None and row["ratio_to_off"] is not None for row in rows)
    assert report["trace"]["answers"] == 3 and report["calibration"] is None
    assert "regret" in printed.err and "lag-budget" in printed.err and "steps/s simulated" in printed.err


def test_arrivals_and_a_config_file(files: list[str], tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "c.toml"
    config.write_text('policies = ["off", "lag"]\nsignals = "peak"\nprefill = false\nexposed_us = "70"\n')
    assert run([*files, "--config", str(config), "--arrivals", "5,50", "--concurrency", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["policy"], row["arrivals_per_s"]) for row in report["rows"]] == [
        ("off", 5.0), ("lag", 5.0), ("off", 50.0), ("lag", 50.0)
    ]  # fmt: skip
    assert report["exposed_ms"]["fresh"] == 0.07 and not report["prefill"]
    assert all(row["regret"] is None for row in report["rows"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "lagg"], "policies holds 'lagg'"),
        (["--concurrency", "many"], "give whole numbers"),
        (["--trace", "none.npz"], "make one with `slipstream trace`"),
        (["--profile", "none.json"], "`slipstream profile`"),
        (["--plot", "x.doc"], "must end in one of"),
    ],
)
def test_wrong_use_is_refused(files: list[str], arguments: list[str], message: str, capsys: Any) -> None:
    assert run([*files, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_both_files_must_be_named(files: list[str], capsys: Any) -> None:
    assert run(files[:3]) == 2
    assert "name a file with --profile" in " ".join(capsys.readouterr().err.split())
