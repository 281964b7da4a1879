"""Acceptance out of a trace, in the real engine: every step accepts what the trace says, and sees what it says."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.config import SamplingParams, SpeculativeConfig
from slipstream.decide.make import make_policy
from slipstream.errors import ConfigError
from slipstream.lab.bench import run_all
from slipstream.lab.bench_options import BenchOptions, Replay
from slipstream.lab.dense import DenseTrace
from slipstream.lab.replay import replay, replay_requests
from slipstream.llm import LLM
from slipstream.testing import assert_nothing_left, tiny_models, tiny_spec
from tests.lossless.harness import on, scripted_cost

S = 4
SPECULATING = ("static", "adaptive", "lag", "lag-budget")


def made_up(num_answers: int = 7, num_drafts: int = S, seed: int = 0) -> DenseTrace:
    """Of no model: confidences that say something of runs, so that policies prune."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, num_answers)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    left = np.repeat(starts[1:], lengths) - np.arange(starts[-1]) - 1
    runs = np.minimum(rng.integers(0, num_drafts + 1, starts[-1]), left).astype(np.int8)
    said = np.where(np.arange(num_drafts) < runs[:, None], 0.9, 0.3) + rng.uniform(-0.1, 0.05, (len(runs), num_drafts))
    return DenseTrace(
        starts_np=starts, prompt_lengths_np=rng.integers(1, 12, num_answers).astype(np.int32),
        token_ids_np=np.zeros(starts[-1], np.int32), runs_np=runs,
        signals={"head": said.astype(np.float16), "peak": (said / 2).astype(np.float16)},
        set_names=("a", "b"), sets_np=(np.arange(num_answers) % 3 == 0).astype(np.int32), about={},
    )  # fmt: skip


def serve(
    trace: DenseTrace,
    mode: str,
    *,
    concurrency: int = 3,
    count: int = 9,
    max_tokens: int = 100,
    device: str = "cpu",
    **more,
):
    """Answers, and of each request (width, accepted, confidences) of its steps."""
    models = on(device, tiny_models("dspark", spec=tiny_spec(vocab_size=20)))
    speculative = SpeculativeConfig.for_mode(mode, draft_model="tiny", num_speculative_tokens=S)
    policy, _ = make_policy(speculative, num_drafts=S, has_head=True, cost=scripted_cost())
    prompts, params = replay_requests(trace, count, vocab_size=20, most_positions=64, max_tokens=max_tokens)
    llm = LLM(
        models, speculative=speculative, policy=policy, adapt=replay(trace), max_num_seqs=concurrency, max_model_len=64,
        page_size=8, max_num_batched_tokens=24, **more,
    )  # fmt: skip
    steps, said = defaultdict(list), {}
    observe, learn = policy.observe, policy.learn

    def note(plan, report):
        said[plan.step] = report.signal_np
        observe(plan, report)

    def settle(plan, result):
        for row in range(plan.num_decode):
            outcome = int(result.widths_np[row]), int(result.num_accepted_np[row])
            steps[int(plan.uids_np[row])].append((*outcome, plan.step, row))
        learn(plan, result)

    policy.observe, policy.learn = note, settle
    answers = llm.generate(prompts, params)
    assert_nothing_left(llm.engine)
    seen = {
        uid: [(w, n, said[step][row] if step in said else None) for w, n, step, row in s] for uid, s in steps.items()
    }
    return answers, params, defaultdict(list, seen)


def check(trace: DenseTrace, answers, params: list[SamplingParams], steps) -> int:
    """Every step of every request against the trace. Returns how many confidences were compared."""
    compared = 0
    for uid, (answer, each) in enumerate(zip(answers, params, strict=True), 1):
        anchor, end = each.seed + answer.prompt_tokens, each.seed + answer.prompt_tokens + each.max_tokens - 1
        assert len(answer.token_ids) == each.max_tokens and answer.finish_reason == "length"
        counted = 0
        for width, accepted, seen in steps[uid][: answer.spec.steps]:
            assert anchor < end
            assert accepted == min(width, trace.runs_np[anchor])
            if seen is not None:
                assert seen.tolist() == trace.signals["head"][anchor, : len(seen)].astype(np.float32).tolist()
                compared += 1
            anchor, counted = anchor + accepted + 1, counted + 1
        assert anchor >= end  # what the last step accepted may go beyond
        assert counted == answer.spec.steps
    return compared


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("mode", SPECULATING)
def test_every_step_goes_by_the_trace(mode: str, overlap: bool) -> None:
    trace = made_up()
    answers, params, steps = serve(trace, mode, overlap=overlap)
    compared = check(trace, answers, params, steps)
    assert compared == 0 if mode == "static" else compared > 15
    totals = [sum(getattr(answer.spec, name) for answer in answers) for name in ("drafted", "verified", "accepted")]
    assert totals[0] >= totals[1] > totals[2] > 0
    if mode == "adaptive":  # the others draft no more than they verify
        assert totals[0] > totals[1]


def test_the_drafts_of_no_model_are_worth_what_the_trace_says() -> None:
    """Nothing of it is left in an engine that was not asked for it, and plain decoding is as it was."""
    trace, models = made_up(), tiny_models("dspark", spec=tiny_spec(vocab_size=20))
    prompts, params = replay_requests(trace, 5, vocab_size=20, most_positions=64, max_tokens=100)
    options = {"max_model_len": 64, "page_size": 8, "max_num_batched_tokens": 24, "max_num_seqs": 3}
    plain = [answer.token_ids for answer in LLM(models, **options).generate(prompts, params)]
    assert [
        answer.token_ids for answer in LLM(models, adapt=replay(trace), **options).generate(prompts, params)
    ] == plain


def test_sets_take_turns_and_answers_come_again() -> None:
    trace = made_up()  # set b: answers 0, 3, 6
    prompts, params = replay_requests(trace, 9, vocab_size=20, most_positions=64, max_tokens=5)
    starts = [each.seed + len(prompt) for prompt, each in zip(prompts, params, strict=True)]
    assert starts == trace.starts_np[[1, 0, 2, 3, 4, 6, 5, 1, 0]].tolist()
    assert [each.max_tokens for each in params] == np.minimum(trace.lengths_np, 5)[[1, 0, 2, 3, 4, 6, 5, 1, 0]].tolist()
    assert [len(prompt) for prompt in prompts[:2]] == trace.prompt_lengths_np[[1, 0]].tolist()


def test_what_a_trace_cannot_give_is_refused() -> None:
    trace = made_up(num_drafts=2)
    with pytest.raises(ConfigError, match=r"was taken with 2; lower num_speculative_tokens"):
        serve(trace, "adaptive")
    without = made_up()
    del without.signals["head"]
    with pytest.raises(ConfigError, match="no confidence of kind 'head'; set confidence_signal to peak"):
        serve(without, "adaptive")
    with pytest.raises(ConfigError, match="the engine has 8 positions"):
        replay_requests(made_up(), 5, vocab_size=20, most_positions=8, max_tokens=100)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modes": ("off",)}, "nothing is accepted in mode off"),
        ({"sampling": SamplingParams(temperature=1.0)}, "replayed requests are greedy"),
        ({"speculative": {"acceptance": "coupled"}}, "drop the prompts, or the trace"),
        ({"prompts": Path("x.jsonl")}, "drop the prompts, or the trace"),
    ],
)
def test_options_that_do_not_go_with_a_trace(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchOptions(replay=Replay(trace=Path("t.npz")), **fields)


@pytest.mark.slow
def test_kinds_of_prompts_are_served_by_the_same_engines(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    made_up().save(tmp_path / "trace.npz")
    several = [
        BenchOptions(
            model=f"random:{tiny_folders[0] / 'config.json'}", draft="random", modes=("off", "lag"), waves=1, requests=4,
            replay=Replay(trace=tmp_path / "trace.npz", sets=kind), num_speculative_tokens=(3,), concurrency=(2,),
            engine={"dtype": "float32"}, speculative={"cost_model": "none"}, sampling=SamplingParams(max_tokens=100),
        )
        for kind in (("a",), ("b",), ())
    ]  # fmt: skip
    said: list[str] = []
    results = run_all(several, said.append)
    assert sum(line.startswith("starting") for line in said) == 2, "an engine a mode"
    lengths = [made_up().of_sets(kind).lengths_np for kind in (["a"], ["b"])]
    for result, own in zip(results, lengths, strict=False):  # where there are too few, answers come again
        assert {row["output_tokens"] for row in result.report["rows"]} == {np.resize(own, 4).sum()}
    assert [result.report["rows"][0]["prompts"] for result in results] == ["a", "b", "all of trace"]
    with pytest.raises(ConfigError, match="the trace has no set 'c'"):
        run_all([replace(several[0], replay=Replay(trace=tmp_path / "trace.npz", sets=("c",)))], said.append)


@pytest.mark.slow
def test_the_bench_says_so_everywhere(tiny_folders: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    from slipstream.cli import main

    path = tmp_path / "trace.npz"
    made_up().save(path)
    with pytest.raises(SystemExit) as left:
        main([
            "bench", "--model", f"random:{tiny_folders[0] / 'config.json'}", "--draft", "random", "--acceptance",
            str(path), "--prompts", "a", "--modes", "off,static,lag", "--num-speculative-tokens", "3", "--waves", "1",
            "--concurrency", "2", "--requests", "4", "--dtype", "float32", "--json", "--probe",
        ])  # fmt: skip
    printed = capsys.readouterr()
    assert left.value.code == 0, printed.err
    report = json.loads(printed.out.splitlines()[-1])
    trace = made_up().of_sets(["a"])
    for row in report["rows"]:
        assert row["acceptance"] == f"replayed from {path}" and row["prompts"] == "a" and row["same_as_off"] is None
        assert row["output_tokens"] == trace.lengths_np[:4].sum()
    lines = printed.err.replace("\n", " ").split("wave 1/1")[1:]
    assert len(lines) == 3 and all("acceptance replayed from" in line for line in lines)
    assert report["rows"][1]["accepted"] > 0


def test_a_file_that_is_no_trace_is_refused_before_anything_is_loaded(tmp_path: Path, capsys) -> None:
    from slipstream.cli import main

    with pytest.raises(SystemExit) as left:
        main(["bench", "--acceptance", str(tmp_path / "none.npz"), "--modes", "static"])
    assert left.value.code == 2
    assert "make one with `slipstream trace`" in capsys.readouterr().err.replace("\n", " ")
