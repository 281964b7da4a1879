"""A profile of a made-up machine whose step times are known exactly."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.decide.cost import ProfileKey
from slipstream.errors import CapacityError, ConfigError
from slipstream.lab import profile
from slipstream.lab.profile import measure, points, profile_key, stored_profile, survey, survey_table
from slipstream.rehearse import StepTime

KEY = ProfileKey(device="cpu: test x2", target="t", drafter="d", dtype="float32")


def engine(
    max_num_seqs: int = 16, max_drafts: int = 7, max_model_len: int = 2048, row_buckets: tuple[int, ...] = ()
) -> Any:
    limits = SimpleNamespace(max_num_seqs=max_num_seqs, max_drafts=max_drafts, max_model_len=max_model_len)
    return SimpleNamespace(scheduler=SimpleNamespace(limits=limits), backend=SimpleNamespace(row_buckets=row_buckets))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """20 ms + 0.5 ms a row + KV terms; a draft of 2 ms + 0.1 ms a draft. Returns the shapes that were timed."""
    seen: list[tuple[int, int, int]] = []

    def time_step(engine: Any, *, num_sequences: int, width: int, context: int, repeats: int) -> StepTime:
        assert width <= engine.scheduler.limits.max_drafts
        assert context + width < engine.scheduler.limits.max_model_len
        if num_sequences * context > 10_000:
            raise CapacityError("pages")
        seen.append((num_sequences, width, context))
        rows = num_sequences * (width + 1)
        verify = 20 + 0.5 * rows + 1e-4 * rows * context + 1e-3 * num_sequences * context
        return StepTime(2 + 0.1 * width if width else 0.0, verify)

    monkeypatch.setattr(profile, "time_step", time_step)
    return seen


def test_a_linear_machine_is_recovered(machine: list[tuple[int, int, int]]) -> None:
    found = survey(engine(), KEY, budget_s=60)
    linear = found.profile.linear
    assert found.profile.use == "linear"
    assert (linear.c0, linear.c1) == pytest.approx((20, 0.5), rel=1e-6)
    assert (linear.c2, linear.c3) == pytest.approx((1e-4, 1e-3), rel=1e-6)
    assert found.profile.draft.at(7) == pytest.approx(2.7)
    assert found.held_out
    assert found.held_out_error(linear) == pytest.approx(0, abs=1e-9)
    assert {(t.point.num_sequences, t.point.width, t.point.context) for t in found.held_out}.isdisjoint(
        (t.point.num_sequences, t.point.width, t.point.context) for t in found.timed
    )
    assert survey_table(found).row_count == len(found.timed) + len(found.held_out)
    assert found.as_dict()["held_out_error"]["num_samples"] == len(found.held_out)


@pytest.mark.parametrize("sizes", [(1, 1, 64), (1, 7, 16), (64, 16, 8192), (3, 2, 300)])
def test_shapes_stay_within_the_engine(machine: list[tuple[int, int, int]], sizes: tuple[int, int, int]) -> None:
    small = engine(*sizes)
    assert points(small)
    measure(small, KEY, budget_s=60)
    assert max(n for n, _, _ in machine) <= sizes[0]


def test_padded_steps_are_a_staircase_up_to_the_largest(machine: list[tuple[int, int, int]]) -> None:
    edges = (1, 8, 16, 24, 64, 128)
    padded = engine(max_num_seqs=16, row_buckets=edges)
    found = survey(padded, KEY, budget_s=60).profile
    assert found.table.staircase
    assert set(found.table.rows) <= set(edges)
    assert found.table.rows[-1] == 128
    assert found.table.rows[0] == 1
    found.save()
    assert stored_profile(KEY, padded) is not None
    assert stored_profile(KEY, engine(max_num_seqs=32, row_buckets=edges)) is None


def test_a_stored_profile_is_found_unless_it_is_too_small(machine: list[tuple[int, int, int]]) -> None:
    assert stored_profile(KEY, engine()) is None
    measure(engine(max_num_seqs=1), KEY, budget_s=60).save()
    assert stored_profile(KEY, engine(max_num_seqs=1)) is not None
    assert stored_profile(KEY, engine(max_num_seqs=16)) is None
    measure(engine(max_num_seqs=16), KEY, budget_s=60).save()
    assert stored_profile(KEY, engine(max_num_seqs=64)) is not None
    assert stored_profile(KEY, engine(max_num_seqs=1, max_drafts=16)) is None


def test_a_spent_budget_ends_the_survey(machine: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10_000))
    monkeypatch.setattr(profile.time, "perf_counter", lambda: float(next(now)))
    found = survey(engine(), KEY, budget_s=20.0)
    assert 0 < len(found.timed) < 20


def test_without_drafts_there_is_nothing_to_price() -> None:
    with pytest.raises(ConfigError, match="--draft"):
        survey(engine(max_drafts=0), KEY, budget_s=1.0)


def test_key_names_machine_and_models() -> None:
    key = profile_key("smollm2-135m", "d", torch.device("cpu"), torch.bfloat16)
    assert key.device.startswith("cpu: ")
    assert key.dtype == "bfloat16"
