"""A cost model from the engine itself: which steps are timed, when one is made, found, corrected or missing."""

import logging
from pathlib import Path

import pytest

import slipstream.build
from slipstream.config import SpeculativeConfig
from slipstream.decide.cost import CostProfile
from slipstream.decide.policy import NO_COST_MODEL, Adaptive
from slipstream.device.events import Recorder
from slipstream.lab import profile
from slipstream.llm import LLM
from slipstream.load import Models
from slipstream.rehearse import time_step
from slipstream.testing import tiny_models
from tests.e2e.engines import PRUNING, Spy, greedy, prompts_of


@pytest.fixture(scope="module")
def models() -> Models:
    return tiny_models("dspark")


def llm_for(models: Models, mode: str = "lag", cost_model: str = "auto", **options: object) -> LLM:
    speculative = SpeculativeConfig.for_mode(
        mode, draft_model="dspark", cost_model=cost_model, num_speculative_tokens=3
    )
    return LLM(models, speculative=speculative, max_model_len=128, page_size=8, max_num_seqs=4, **options)


@pytest.fixture
def short_survey(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Surveys at start are cut to three seconds; the budgets of those that were made."""
    made: list[float] = []

    def measure(engine: object, key: object, budget_s: float = 3.0) -> CostProfile:
        made.append(budget_s)
        return profile.measure(engine, key, budget_s)  # type: ignore[arg-type]

    monkeypatch.setattr(profile, "START_BUDGET_S", 3.0)  # enough on a busy machine too
    monkeypatch.setattr(slipstream.build, "measure", measure)
    return made


def test_the_step_that_is_timed_is_the_step_that_runs(models: Models) -> None:
    """The same stages in the same order, the same rows and output rows, and the draft apart from the target."""
    llm = llm_for(models, "static")
    spy, recorder = Spy(llm), llm.record()
    llm.generate(prompts_of(10, 10), greedy(12))
    real = next(s for s in reversed(spy.steps) if s.plan.num_decode == 2 and s.widths == [3, 3])
    wanted = [span.name for span in recorder.spans if span.step == real.plan.step and span.kind == "device"]

    llm.engine.recorder = timed = Recorder()
    before, context = len(spy.steps), int(real.plan.context_upper_bound_np[0])
    found = time_step(llm.engine, num_sequences=2, width=3, context=context, repeats=2)
    names = [span.name for span in timed.spans if span.kind == "device"]
    assert names == 3 * wanted
    assert {"load", "draft", "layout", "fill", "verify", "accept", "apply"} <= set(names)
    assert len(spy.steps) - before == 3
    rehearsed = spy.steps[-1]
    assert rehearsed.batch is not None and real.batch is not None
    assert rehearsed.widths == real.widths
    assert rehearsed.batch.token_ids.shape == real.batch.token_ids.shape
    assert rehearsed.batch.output_rows.tolist() == real.batch.output_rows.tolist()
    drafts = [s.end_s - s.start_s for s in timed.spans if s.name == "draft"]
    assert found.verify_ms > 0
    assert 1e3 * min(drafts) <= found.draft_ms


def test_an_engine_makes_its_profile_once(models: Models, short_survey: list[float], own_home: Path) -> None:
    first = llm_for(models)
    assert len(short_survey) == 1
    (path,) = (own_home / "cost").iterdir()
    assert ("cost_model", str(path), "measured at start and stored") in first.notes
    stored = CostProfile.load(path)
    assert (stored.key.target, stored.key.drafter, stored.key.dtype) == ("tiny", "dspark", "float32")
    assert stored.survey is not None and stored.survey.num_held_out > 0
    second = llm_for(models, "adaptive")
    assert len(short_survey) == 1
    assert ("cost_model", str(path), "stored for this machine and pair") in second.notes
    assert isinstance(second.engine.policy, Adaptive) and second.engine.policy.cost is not None
    assert second.engine.policy.cost.step == stored.step


def test_prices_are_corrected_in_service(models: Models, short_survey: list[float]) -> None:
    llm = llm_for(models)
    policy = llm.engine.policy
    assert isinstance(policy, Adaptive) and policy.cost is not None
    fitted = policy.cost.step
    llm.generate(prompts_of(10, 10, 10), greedy(64))
    assert policy.cost.num_observed >= 20
    assert policy.cost.step != fitted
    assert policy.cost.fitted == fitted


@pytest.mark.parametrize("mode", PRUNING)
def test_without_a_cost_model_nothing_is_pruned_and_it_is_said(
    models: Models, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "slipstream"):
        llm = llm_for(models, mode, "none")
    assert NO_COST_MODEL in caplog.text
    assert ("cost_model", None, NO_COST_MODEL) in llm.notes
    spy = Spy(llm)
    completions = llm.generate(prompts_of(10, 7), greedy(16))
    for step in spy.steps:
        assert step.widths == step.plan.caps_np[: step.plan.num_decode].tolist()
        if step.plan.num_decode and step.plan.caps_np.any():
            assert step.decision is not None and step.decision.reason == NO_COST_MODEL
    assert all(max(completion.spec.width_histogram) == 3 for completion in completions)
    told = sum(step.decision is not None and bool(step.decision.reason) for step in spy.steps)
    assert llm.engine.totals.as_dict()["unpruned"] == {NO_COST_MODEL: told}
    assert told > 3
