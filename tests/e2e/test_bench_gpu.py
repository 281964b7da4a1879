"""bench/gpu.py: every phase runs, on tiny models, and says what it measured; what it computes by itself is right."""

import json
import time
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.gpu_parts import agreement, hf, large, small
from bench.gpu_parts.goals import Goal, at_least, at_most, goals_table, reported
from bench.gpu_parts.scale import full, tiny
from bench.gpu_parts.session import Clock, Session, serve, slow_decisions, tokens
from slipstream.device.events import NullRecorder
from slipstream.models.layers import DenseAttend
from slipstream.testing import assert_nothing_left, tiny_models, tiny_spec
from tests.e2e.engines import price


@pytest.fixture(scope="module")
def session() -> Session:
    return Session(tiny().small, lambda line: None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_phase_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    monkeypatch.setattr(hf, "batched", lambda model, prompts, count: len(prompts) * count)
    assert gpu.main(["--tiny", "--output", str(tmp_path / "new" / "report.json")]) == 0
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    assert list(report["phases"]) == list(gpu.PHASES)
    assert all(phase["error"] is None for phase in report["phases"].values())
    assert report["command"].startswith("python -m bench.gpu")
    assert len(report["goals"]) > 50
    assert len({goal["what"] for goal in report["goals"]}) == len(report["goals"])
    assert all(goal["value"] is not None for goal in report["goals"])
    out = capsys.readouterr().out
    assert out.index("8b") < out.index("goals")
    assert "s in all, written to" in out.splitlines()[-1]


def test_a_phase_that_fails_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    monkeypatch.setitem(gpu.PHASES, "8b", gpu.Phase(lambda *given: 1 / 0, "large", 1.0))
    assert gpu.main(["--tiny", "--only", "8b,start", "--output", str(tmp_path / "x.json")]) == 1
    phases = json.loads((tmp_path / "x.json").read_text())["phases"]
    assert list(phases) == ["start", "8b"]
    assert phases["start"]["error"] is None
    assert phases["8b"]["error"] == "ZeroDivisionError: division by zero"


def test_phases_are_named() -> None:
    with pytest.raises(SystemExit):
        gpu.parse(["--only", "8b,everything"])
    assert gpu.parse(["--only", "hf, start"]).only == ["hf", "start"]
    assert sum(phase.seconds for phase in gpu.PHASES.values()) <= gpu.TOTAL_S + 15
    scale = full()
    assert scale.verify_at * (scale.drafts[0] + 1) in scale.rows  # the step that is held against its ceiling
    assert set(scale.large_at[:2]) <= set(scale.rows)


def test_goals_are_met_or_not() -> None:
    goals = [at_most("a", 1.0, 1.0), at_least("b", 1.0, 2.0), at_least("c", None, 2.0), reported("d", 12345.6)]
    assert [goal.holds for goal in goals] == [True, False, None, None]
    assert Goal(what="a", value=1.0, sign="<=", limit=1.0).as_dict()["holds"] is True
    verdicts = list(goals_table(goals).columns[3].cells)
    assert verdicts == ["ok", "NOT MET", "not measured", ""]


def test_a_clock_names_what_it_leaves_out() -> None:
    clock = Clock(30.0)
    assert clock.allows("one")
    assert not clock.allows("two", needs_s=31.0)
    assert not Clock(-1.0).allows("three")
    assert clock.skipped == ["two"]


def test_modes_of_one_engine_take_turns(session: Session) -> None:
    prompts = session.pair.prompts(session.models, 3)
    answers = {
        mode: serve(session.llm(mode, 3, 2), prompts, tokens(8), 2) for mode in ("off", "static", "adaptive", "lag")
    }
    assert len({tuple(c.token_ids for c in served.completions) for served in answers.values()}) == 1
    assert session.llm("lag", 3, 2) is session.llm("adaptive", 3, 2) is not session.llm("static", 3, 2)
    assert session.llm("lag", 3, 2).engine.policy.waits_for == "lagged"
    assert session.llm("adaptive", 3, 2).engine.policy.waits_for == "fresh"
    assert [c.spec.mode for c in answers["adaptive"].completions] == ["adaptive"] * 3


def test_pinned_policies_draft_at_every_step(session: Session) -> None:
    """With a price, a drafter that is never right is soon not asked any more; its decisions are timed all the same."""
    llm = session.llm("lag", 3, 2)
    llm.engine.policy.cost = price()
    for mode in ("lag", "lag-budget", "adaptive"):
        llm = session.llm(mode, 3, 2, pinned=True)
        assert llm.engine.policy.cost is not None
        served = serve(llm, session.pair.prompts(session.models, 2), tokens(40), 2)
        spec = served.completions[0].spec
        assert spec.drafted >= 3 * (spec.steps - 2)  # the end of the answer caps the last ones
        assert_nothing_left(llm.engine)


def test_waves_are_probed_only_when_asked(session: Session) -> None:
    llm = session.llm("static", 3, 2)
    served = serve(llm, session.pair.prompts(session.models, 1), tokens(24), 1, probe=True)
    assert served.stages["verify_ms"] > 0 and served.stages["draft_ms"] > 0 and served.stages["host_us"] > 0
    assert served.wave.critical_path.gap_us is not None
    assert isinstance(llm.engine.recorder, NullRecorder)
    assert serve(llm, session.pair.prompts(session.models, 1), tokens(6), 1).stages == {}


def test_a_slow_decision_is_slow_only_inside(session: Session) -> None:
    llm = session.llm("adaptive", 3, 2)
    before = llm.engine.policy.decide
    prompts = session.pair.prompts(session.models, 1)
    base = large.on_path(small.probe(session, tiny(), llm, "adaptive", 3, 1))
    with slow_decisions(llm, 0.02):
        slow = large.on_path(small.probe(session, tiny(), llm, "adaptive", 3, 1))
    assert slow - base > 15_000
    assert llm.engine.policy.decide == before
    assert serve(llm, prompts, tokens(4), 1).completions[0].finish_reason == "length"


def test_first_difference() -> None:
    assert agreement.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert agreement.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert agreement.first_difference([1, 2, 3], [1, 2]) == 2


def test_the_gap_is_that_of_the_first_difference() -> None:
    models, prompt, plain = tiny_models(), [5, 6, 7], [1, 2, 3, 4]
    found = agreement.compare(models, [prompt] * 2, [plain] * 2, [plain, [1, 2, 9, 4]])
    assert (found["share"], found["first_difference"]) == (0.5, [2])
    ids = torch.tensor([*prompt, 1, 2])
    hidden, _ = models.target(ids, torch.arange(5), DenseAttend(models.target.spec))
    best = models.target.logits(hidden[-1]).topk(2).values
    assert found["top2_gap"] == [pytest.approx(float(best[0] - best[1]), rel=1e-4)]


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_gets_our_weights(tied: bool) -> None:
    """The same logits; rope theta and epsilon are not the defaults."""
    models = tiny_models(spec=tiny_spec(tie_word_embeddings=tied, rope_theta=3000.0, rms_norm_eps=1e-3))
    ids = torch.tensor([5, 9, 3, 30, 7])
    with torch.inference_mode():
        theirs = hf.from_decoder(models.target)(ids[None]).logits[0]
        hidden, _ = models.target(ids, torch.arange(5), DenseAttend(models.target.spec))
        ours = models.target.logits(hidden)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_transformers_answers_from_padded_prompts(session: Session) -> None:
    model = hf.from_decoder(session.models.target)
    assert hf.generated(model, [[5, 6, 7], [8]], 4) == 8


def test_what_hangs_is_left_behind() -> None:
    assert hf.within(5.0, lambda: 7) == 7
    with pytest.raises(TimeoutError, match="no answer"):
        hf.within(0.05, lambda: time.sleep(0.3))
    with pytest.raises(ZeroDivisionError):
        hf.within(5.0, lambda: 1 / 0)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "--tiny" in capsys.readouterr().err
