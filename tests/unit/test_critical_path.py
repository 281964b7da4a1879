"""Host time counts only where the device has nothing to do."""

import pytest

from slipstream.device.events import Span
from slipstream.lab.critical_path import critical_path, host_us, overlap, stage_ms, step_times, union


def step(
    number: int, start: float, *, decide: tuple[float, float], draft: float = 3.0, verify_at: float = 4.0
) -> list[Span]:
    """One step in ms: 1 ms of planning, the draft, layout and fill of 0.25 ms each, a verify of 10 ms."""
    at = start / 1e3

    def ms(name: str, kind: str, begin: float, end: float) -> Span:
        return Span(number, name, kind, at + begin / 1e3, at + end / 1e3)  # type: ignore[arg-type]

    return [
        ms("schedule", "host", -1.0, 0.0),
        ms("draft", "device", 0.0, draft),
        ms("decide", "host", *decide),
        ms("layout", "device", verify_at - 0.5, verify_at - 0.25),
        ms("fill", "device", verify_at - 0.25, verify_at),
        ms("verify", "device", verify_at, verify_at + 10),
    ]


def test_union_and_overlap() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (5, 5)]) == [(0, 2), (3, 4)]
    assert overlap([(0, 2), (3, 4)], [(1, 3.5)]) == pytest.approx(1.5)
    assert overlap([], [(0, 1)]) == 0


def test_decision_behind_the_draft_is_hidden() -> None:
    path = critical_path([s for n in range(5) for s in step(n, 20.0 * n, decide=(1.0, 2.0))])
    assert path.decide_us == pytest.approx(0, abs=1e-6)
    assert path.decide_hidden_us == pytest.approx(1000)
    assert path.gap_us == pytest.approx(500)  # 1 ms between draft and verify, half of it layout and fill
    assert path.build_us == pytest.approx(1000)  # between two steps nothing runs on the device
    assert path.device_busy == pytest.approx(13.5 * 5 / (20 * 4 + 14))


def test_decision_partly_behind_the_draft_is_split() -> None:
    path = critical_path(step(0, 0.0, decide=(2.5, 3.4)))
    assert path.decide_us == pytest.approx(400)
    assert path.decide_hidden_us == pytest.approx(500)


def test_a_delay_of_5_ms_in_the_decision_shows() -> None:
    base = critical_path([s for n in range(3) for s in step(n, 30.0 * n, decide=(3.1, 3.2))])
    slow = critical_path([s for n in range(3) for s in step(n, 30.0 * n, decide=(3.1, 8.2), verify_at=9.0)])
    assert base.decide_us is not None and slow.decide_us is not None
    assert slow.decide_us - base.decide_us == pytest.approx(5000)
    assert base.gap_us is not None and slow.gap_us is not None
    assert slow.gap_us - base.gap_us == pytest.approx(5000)


def test_prefill_steps_and_empty_runs_do_not_count() -> None:
    prefill = [Span(0, "schedule", "host", 0.0, 9.0), Span(0, "verify", "device", 9.0, 10.0)]
    decode = [s for n in range(1, 4) for s in step(n, 20_000.0 + 20 * n, decide=(1.0, 2.0))]
    path = critical_path(prefill + decode)
    assert path.build_us == pytest.approx(1000)
    assert path.device_busy == critical_path(decode).device_busy
    assert critical_path([]).device_busy is None
    assert critical_path(prefill).gap_us is None


def test_the_first_steps_only_say_what_the_device_did_meanwhile() -> None:
    """A recording that begins in the middle of a run knows nothing of the step that its first one lies behind."""
    spans = [s for n in range(4) for s in step(n, 14.0 * n, decide=(1.0, 2.0))]
    times = step_times(spans, 1)
    assert times.build_s == pytest.approx([0, 0, 0])  # behind the verify before, that of the first one included
    assert step_times(spans).build_s == pytest.approx([1e-3, 0, 0, 0])
    assert len(times.decide_hidden_s) == len(times.gap_s) == 3
    assert times.device_busy == pytest.approx(13.5 / 14)
    assert step_times(spans[:6], 1).device_busy is None


def test_exports_run_beside_the_compute_stream() -> None:
    spans = step(0, 0.0, decide=(1.0, 2.0))
    with_export = [*spans, Span(0, "export_confidence", "copy", 0.003, 0.0035), Span(0, "export", "copy", 0.014, 0.015)]
    path, plain = critical_path(with_export), critical_path(spans)
    assert path.gap_us == plain.gap_us
    assert path.device_busy == plain.device_busy == pytest.approx(13.5 / 14)


def test_stages_are_timed_on_the_device() -> None:
    spans = [s for n in range(3) for s in step(n, 20.0 * n, decide=(1.0, 2.0), draft=2.0 + n)]
    assert stage_ms(spans, "verify") == pytest.approx(10)
    assert stage_ms(spans, "draft") == pytest.approx(3)
    assert stage_ms(spans, "layout", "fill", "verify") == pytest.approx(10.5)
    assert stage_ms(spans, "verify", "rank") is None


def test_the_host_works_where_it_does_not_wait() -> None:
    spans = [s for n in range(4) for s in step(n, 20.0 * n, decide=(1.0, 2.0))]
    waits = [Span(n, "collect", "wait", 0.02 * n + 0.004, 0.02 * n + 0.016) for n in range(4)]
    assert host_us([*spans, *waits]) == pytest.approx(8000)
    assert host_us(step(0, 0.0, decide=(1.0, 2.0))) is None
