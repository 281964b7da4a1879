"""A profile of a made-up machine whose step times are known exactly."""

import statistics
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.decide.cost import CostProfile, ProfileKey
from slipstream.device.shapes import row_buckets
from slipstream.errors import CapacityError
from slipstream.lab import profile
from slipstream.lab.profile import (
    Point,
    Timed,
    draft_times,
    measure,
    points,
    profile_key,
    stored_profile,
    survey,
    survey_table,
)
from slipstream.rehearse import StepTime

KEY = ProfileKey(device="cpu: test x2", target="t", drafter="d", dtype="float32")


def engine(
    max_num_seqs: int = 16, max_drafts: int = 7, max_model_len: int = 2048, row_buckets: tuple[int, ...] = (),
    mixed_row_buckets: tuple[int, ...] = (64, 128, 256),
) -> Any:  # fmt: skip
    limits = SimpleNamespace(
        max_num_seqs=max_num_seqs, max_drafts=max_drafts, max_model_len=max_model_len, max_num_batched_tokens=512
    )
    buckets = {"row_buckets": row_buckets, "mixed_row_buckets": mixed_row_buckets if row_buckets else ()}
    return SimpleNamespace(scheduler=SimpleNamespace(limits=limits), backend=SimpleNamespace(**buckets))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """20 ms + 0.5 ms a row + KV terms; with a prompt 10 ms + 0.3 ms a row + KV terms; a draft of 2 ms + 0.1 ms a draft.
    Returns the shapes that were timed."""
    seen: list[tuple[int, int, int]] = []

    def time_step(
        engine: Any, *, num_sequences: int, width: int, context: int, repeats: int, chunk: int = 0, **drafted: int
    ) -> StepTime:
        assert width <= engine.scheduler.limits.max_drafts
        assert context + width < engine.scheduler.limits.max_model_len
        if num_sequences * context > 10_000:
            raise CapacityError("pages")
        assert num_sequences + bool(chunk) <= engine.scheduler.limits.max_num_seqs
        assert chunk < engine.scheduler.limits.max_model_len
        seen.append((num_sequences, width, context))
        rows = num_sequences * (width + 1)
        verify = (10 + 0.3 * (rows + chunk) if chunk else 20 + 0.5 * rows) + 1e-4 * rows * context
        verify += 1e-3 * num_sequences * context
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
    assert found.profile.survey is not None
    assert found.profile.survey.held_out_linear_error == pytest.approx(0, abs=1e-9)
    assert {t.point for t in found.held_out}.isdisjoint(t.point for t in found.timed)
    assert survey_table(found).row_count == len(found.timed) + len(found.held_out)
    assert sum(sample["held_out"] for sample in found.as_dict()["samples"]) == len(found.held_out)
    assert len(found.held_out) == found.profile.survey.num_held_out


@pytest.mark.parametrize("padded", [False, True])
def test_steps_with_a_prompt_have_a_price_of_their_own(machine: list[tuple[int, int, int]], padded: bool) -> None:
    found = survey(engine(row_buckets=row_buckets(128) if padded else ()), KEY, budget_s=60)
    mixed = found.profile.mixed
    assert mixed is not None
    assert mixed.rows == ((64, 128, 256) if padded else (64, 128, 256, 512))
    assert mixed.ms == pytest.approx([10 + 0.3 * rows for rows in mixed.rows])
    assert (mixed.c2, mixed.c3) == pytest.approx((1e-4, 1e-3), rel=1e-6)
    assert mixed.staircase == padded
    assert found.profile.linear.c0 == pytest.approx(20)  # nothing of them in the other price
    assert found.profile.survey is not None and found.profile.survey.held_out_mixed_error is not None
    if not padded:
        assert found.profile.survey.held_out_mixed_error == pytest.approx(0, abs=1e-9)
    assert "with a prompt" in str(survey_table(found).caption)
    assert CostProfile.load(found.profile.save()) == found.profile
    model = found.profile.model()
    assert (model.step, model.mixed) == (found.profile.step, mixed)
    assert found.profile.model(linear=True).mixed is found.profile.linear


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
    replace(found, mixed=None).save()  # made before steps with prompts were timed
    assert stored_profile(KEY, padded) is None
    alone = engine(max_num_seqs=1, row_buckets=(1, 2, 4, 8))  # nobody prefills beside another
    measure(alone, KEY, budget_s=60).save()
    assert stored_profile(KEY, alone) is not None


def test_a_stored_profile_is_found_unless_it_is_too_small(machine: list[tuple[int, int, int]]) -> None:
    assert stored_profile(KEY, engine()) is None
    measure(engine(max_num_seqs=1), KEY, budget_s=60).save()
    assert stored_profile(KEY, engine(max_num_seqs=1)) is not None
    assert stored_profile(KEY, engine(max_num_seqs=16)) is None
    measure(engine(max_num_seqs=16), KEY, budget_s=60).save()
    assert stored_profile(KEY, engine(max_num_seqs=64)) is not None
    assert stored_profile(KEY, engine(max_num_seqs=1, max_drafts=16)) is None


@pytest.mark.parametrize("padded", [False, True])
def test_the_error_on_shapes_held_out_is_told(
    machine: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch, padded: bool
) -> None:
    """Mean |predicted - measured| / measured, in the table, in the JSON and in the file; between fitted shapes only."""
    true_step = profile.time_step

    def slower(engine: Any, **shape: int) -> StepTime:
        step = true_step(engine, **shape)
        return StepTime(step.draft_ms, step.verify_ms * (1.25 if shape["context"] == 2 * profile.BASE_CONTEXT else 1.0))

    monkeypatch.setattr(profile, "time_step", slower)
    found = survey(engine(row_buckets=tuple(range(1, 129)) if padded else ()), KEY, budget_s=60)
    facts = found.profile.survey
    assert facts is not None
    assert facts.held_out_linear_error == pytest.approx(0.2)  # (1.25 - 1) / 1.25
    assert facts.held_out_table_error == pytest.approx(0.2, abs=0.02)
    assert {t.point.context for t in found.held_out if not t.point.chunk} == {2 * profile.BASE_CONTEXT}
    assert facts.num_held_out == len(found.held_out) >= 9
    assert len({t.point.num_sequences for t in found.held_out}) >= 3
    for held in found.held_out:
        assert any(held.point.within(t.point) for t in found.timed)
    assert "20.0%" in str(survey_table(found).caption)
    assert found.as_dict()["survey"]["held_out_linear_error"] == facts.held_out_linear_error
    assert CostProfile.load(found.profile.save()) == found.profile


def stairs_ms(rows: int, edges: tuple[int, ...]) -> float:
    """No line: every stair has a height of its own."""
    index = sorted(edges).index(min(e for e in edges if e >= rows))
    return 1.0 + 0.2 * index + 0.5 * (index % 3 == 0)


def test_every_stair_is_measured_and_none_is_smoothed(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = row_buckets(16 * 8)

    def time_step(
        engine: Any, *, num_sequences: int, width: int, context: int, repeats: int, chunk: int = 0, **drafted: int
    ) -> StepTime:
        return StepTime(0.3 if width else 0.0, stairs_ms(num_sequences * (width + 1), edges))

    monkeypatch.setattr(profile, "time_step", time_step)
    found = survey(engine(row_buckets=edges), KEY, budget_s=60)
    assert found.profile.use == "table"
    for rows in range(1, 129):
        assert found.profile.step.ms_of_rows(rows) == pytest.approx(stairs_ms(rows, edges)), rows
    assert found.profile.survey is not None
    assert found.profile.survey.held_out_table_error == pytest.approx(0, abs=1e-9)


def test_a_line_that_is_nearly_right_does_not_replace_stairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1%, and yet a row more is free in one place and dear in another."""
    edges = row_buckets(16 * 8)

    def time_step(
        engine: Any, *, num_sequences: int, width: int, context: int, repeats: int, chunk: int = 0, **drafted: int
    ) -> StepTime:
        padded = min(e for e in edges if e >= num_sequences * (width + 1))
        return StepTime(0.3 if width else 0.0, 20 + 0.05 * padded)

    monkeypatch.setattr(profile, "time_step", time_step)
    found = survey(engine(row_buckets=edges), KEY, budget_s=60).profile
    assert found.linear_error < 0.01
    assert found.use == "table"
    assert found.step.curve(65, 16).tolist() == pytest.approx([20 + 0.05 * 80] * 16)


def test_where_drafts_are_recorded_only_recorded_lengths_are_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In between, the device would wait for launches: 9 ms here, which are nobody's price."""

    def time_step(engine: Any, *, draft_length: int, width: int, **shape: int) -> StepTime:
        recorded = draft_length in (0, 1, 2, 4, 7)
        return StepTime(1.0 + draft_length if draft_length else 0.0, 5.0 if recorded else 14.0)

    monkeypatch.setattr(profile, "time_step", time_step)
    found = survey(engine(row_buckets=row_buckets(128)), KEY, budget_s=60).profile
    assert found.draft.lengths == (1, 2, 4, 7)
    assert [found.draft.at(length) for length in (1, 2, 4, 7)] == [2.0, 3.0, 5.0, 8.0]
    assert set(found.table.ms) == {5.0}


def test_on_a_gpu_a_point_runs_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are fast there at first: here as long as no more than five have run in a row."""

    def time_step(engine: Any, *, repeats: int, **shape: int) -> StepTime:
        return StepTime(0.5, 4.0 if repeats <= 5 else 5.0)

    monkeypatch.setattr(profile, "time_step", time_step)
    found = survey(engine(row_buckets=row_buckets(128)), KEY, budget_s=60)
    assert {t.verify_ms for t in found.timed} == {5.0}
    assert {t.verify_ms for t in survey(engine(), KEY, budget_s=60).timed} == {4.0}


def test_draft_times_are_apart_from_the_target(machine: list[tuple[int, int, int]]) -> None:
    found = survey(engine(), KEY, budget_s=60).profile
    assert found.draft.lengths == (1, 2, 3, 4, 5, 6, 7)
    assert found.draft.sequences == (1, 2, 4, 8, 16)
    for length in found.draft.lengths:
        for count in found.draft.sequences:
            assert found.draft.at(length, count) == pytest.approx(2 + 0.1 * length)
    assert found.linear.c0 == pytest.approx(20)  # nothing of the draft in it


def test_lengths_that_were_not_timed_go_with_those_that_were() -> None:
    timed = [Timed(Point(1, w, 192), 1.0 + w, 9.0) for w in range(8)]
    timed += [Timed(Point(8, w, 192), 2 * (1.0 + w), 9.0) for w in (0, 1, 7)]
    timed += [Timed(Point(5, 3, 192), 6.0, 9.0), Timed(Point(8, 7, 4096), 99.0, 9.0)]
    found = draft_times(timed)
    assert (found.lengths, found.sequences) == (tuple(range(1, 8)), (1, 5, 8))
    assert [found.at(w, 8) for w in range(1, 8)] == pytest.approx([2 * (1.0 + w) for w in range(1, 8)])
    assert [found.at(w, 5) for w in range(1, 8)] == pytest.approx([1.5 * (1.0 + w) for w in range(1, 8)])
    assert draft_times([Timed(Point(1, 0, 192), 0.0, 9.0)]).at(7) == 0.0


@pytest.mark.parametrize("plain_ms", [1.0, 126.0, 400.0, 4000.0])
def test_a_slow_machine_is_surveyed_once(plain_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little of it 10 seconds are enough for, S drafts are timed, and the next start finds what was stored."""
    now = [0.0]
    monkeypatch.setattr(profile.time, "perf_counter", lambda: now[0])

    def time_step(
        engine: Any, *, num_sequences: int, width: int, context: int, repeats: int, chunk: int = 0, **drafted: int
    ) -> StepTime:
        rows = num_sequences * (width + 1) + chunk
        step = StepTime(0.2 * plain_ms if width else 0.0, plain_ms * (1 + 0.05 * rows))
        now[0] += 1e-3 * (repeats + 1) * (step.draft_ms + step.verify_ms)
        return step

    monkeypatch.setattr(profile, "time_step", time_step)
    large = engine(max_num_seqs=64)
    found = measure(large, KEY)
    assert found.draft.lengths[-1] == 7
    assert found.draft.at(7) == pytest.approx(0.2 * plain_ms)
    assert now[0] < 1.3 * profile.START_BUDGET_S + 14 * 1e-3 * plain_ms
    found.save()
    assert stored_profile(KEY, large) == found
    assert stored_profile(KEY, engine(max_num_seqs=16)) == found
    assert stored_profile(KEY, engine(max_drafts=16)) is None


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_seconds_in_which_the_machine_is_slow_leave_no_trace(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six times slower for spells of two seconds, as two threads are that share a core with somebody else."""
    now = [0.0]
    monkeypatch.setattr(profile.time, "perf_counter", lambda: now[0])

    def time_step(
        engine: Any, *, num_sequences: int, width: int, context: int, repeats: int, chunk: int = 0, **drafted: int
    ) -> StepTime:
        draft, verify = (2 + 0.1 * width) if width else 0.0, 20 + 0.5 * (num_sequences * (width + 1) + chunk)
        factors = []
        for _ in range(repeats + 1):
            factors.append(6.0 if now[0] % (2.0 / share) < 2.0 else 1.0)
            now[0] += 1e-3 * factors[-1] * (draft + verify)
        slow = statistics.median(factors[1:])
        return StepTime(slow * draft, slow * verify)

    monkeypatch.setattr(profile, "time_step", time_step)
    found = survey(engine(), KEY, budget_s=60)
    assert (found.profile.linear.c0, found.profile.linear.c1) == pytest.approx((20, 0.5), rel=1e-6)
    wrong = [t for t in (*found.timed, *found.held_out) if t.verify_ms != pytest.approx(20 + 0.5 * t.point.rows)]
    assert not wrong
    assert len(found.timed) + len(found.held_out) > 40


def test_a_hasty_survey_does_not_serve_an_engine_that_it_is_too_small_for(
    machine: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(profile.time, "perf_counter", lambda: float(next(clock)))
    measure(engine(), KEY, budget_s=3.0).save()
    assert stored_profile(KEY, engine()) is None


def test_a_spent_budget_ends_the_survey(machine: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10_000))
    monkeypatch.setattr(profile.time, "perf_counter", lambda: float(next(now)))
    found = survey(engine(), KEY, budget_s=20.0)
    assert 0 < len(found.timed) < 20


def test_plain_decoding_has_prices_too(machine: list[tuple[int, int, int]]) -> None:
    found = survey(engine(max_drafts=0), KEY, budget_s=60).profile
    assert (found.linear.c0, found.linear.c1) == pytest.approx((20, 0.5), rel=1e-6)
    assert found.mixed is not None and found.draft.at(0) == 0
    assert all(width == 0 for _, width, _ in machine)


def test_key_names_machine_and_models() -> None:
    key = profile_key("smollm2-135m", "d", torch.device("cpu"), torch.bfloat16)
    assert key.device.startswith("cpu: ")
    assert key.dtype == "bfloat16"
    other = profile_key("smollm2-135m", "d", torch.device("cpu"), torch.bfloat16, deterministic=True)
    assert other.path() != key.path(), "other kernels have other prices"
