"""Spans become the events of a Chrome trace: tracks, microseconds, arrows; and a picture of a typical step."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slipstream.device.events import Kind, Span
from slipstream.lab.timeline import Timeline, arrows, trace_events
from slipstream.lab.timeline_plot import timeline_plot, window


def ms(step: int, name: str, kind: Kind, start: float, end: float) -> Span:
    return Span(step, name, kind, start / 1e3, end / 1e3)


def lag_step(step: int, at: float) -> list[Span]:
    """From `at`, 10 ms: the host decides and plans behind the draft; the last step's confidence decides."""
    taken = [ms(step - 1, "take_confidence", "wait", at - 2.8, at - 2.7)] if step else []
    return [
        ms(step, "schedule", "host", at - 3, at - 2.8),
        *taken,
        ms(step, "draft", "device", at, at + 2),
        ms(step, "export_confidence", "copy", at - 2.6, at - 2.5),
        ms(step, "decide", "host", at - 2.4, at - 2.2),
        ms(step, "verify", "device", at + 2, at + 9),
        ms(step, "accept", "device", at + 9, at + 10),
        ms(step, "collect", "wait", at + 5, at + 5.5),
        ms(step, "commit", "host", at + 5.5, at + 6),
    ]


def fresh_step(step: int, at: float) -> list[Span]:
    return [
        ms(step, "draft", "device", at, at + 2),
        ms(step, "export_confidence", "copy", at + 0.1, at + 0.2),
        ms(step, "take_confidence", "wait", at + 0.2, at + 2.1),
        ms(step, "decide", "host", at + 2.1, at + 2.3),
        ms(step, "verify", "device", at + 2.5, at + 9),
    ]


LAG = [span for n in range(4) for span in lag_step(n, 1000 + 10 * n)]
FRESH = [span for n in range(4) for span in fresh_step(n, 1000 + 10 * n)]


def slices(events: list[dict[str, Any]], pid: int = 1) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X" and e["pid"] == pid]


def names_of(events: list[dict[str, Any]], about: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == about}


def test_every_case_is_a_process_that_begins_at_0() -> None:
    events = trace_events({"lag at 1": LAG, "adaptive at 1": FRESH})
    assert list(names_of(events, "process_name").items()) == [((1, 0), "lag at 1"), ((2, 0), "adaptive at 1")]
    for pid, spans in ((1, LAG), (2, FRESH)):
        assert len(slices(events, pid)) == len(spans)
        assert min(e["ts"] for e in slices(events, pid)) == 0
    verify = [e for e in slices(events) if e["name"] == "verify"]
    assert [e["args"] for e in verify] == [{"step": n} for n in range(4)]
    assert [(e["ts"], e["dur"]) for e in verify] == [(pytest.approx(5000 + 10_000 * n), 7000) for n in range(4)]
    assert trace_events({}) == []
    assert not slices(trace_events({"off": []}))


def test_host_device_and_copies_have_a_track_each() -> None:
    events = trace_events({"lag": LAG})
    track = {tid: name for (_, tid), name in names_of(events, "thread_name").items()}
    found = {(e["name"], track[e["tid"]]) for e in slices(events)}
    assert found == {
        ("schedule", "host"), ("take_confidence", "host"), ("decide", "host"), ("collect", "host"), ("commit", "host"),
        ("draft", "device"), ("verify", "device"), ("accept", "device"), ("export_confidence", "copies"),
    }  # fmt: skip
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert [track[tid] for tid in sorted(order, key=lambda t: order[t])] == ["host", "copies", "device"]


def test_spans_that_cut_across_each_other_get_lanes_of_their_own() -> None:
    """Within one thread viewers know disjoint and nested slices only."""
    spans = [ms(0, "outer", "device", 0, 10), ms(0, "inner", "device", 2, 5), ms(0, "across", "device", 8, 12),
             ms(1, "after", "device", 12, 13)]  # fmt: skip
    events = trace_events({"x": spans})
    lanes = names_of(events, "thread_name")
    lane = {e["name"]: lanes[1, e["tid"]] for e in slices(events)}
    assert lane == {"outer": "device", "inner": "device", "across": "device 2", "after": "device"}


def test_neighbours_do_not_overlap_by_rounding() -> None:
    ends = [0.0]
    for n in range(1, 2000):
        ends.append(ends[-1] + 1e-3 * n / 7)
    spans = [ms(n, "verify", "device", *pair) for n, pair in enumerate(pairwise(ends))]
    found = slices(trace_events({"x": spans}))
    for before, after in pairwise(found):
        assert round(1e3 * (before["ts"] + before["dur"])) == round(1e3 * after["ts"])


@pytest.mark.parametrize(("spans", "age"), [(LAG, 1), (FRESH, 0)])
def test_arrows_lead_from_confidence_to_decision_to_verify(spans: list[Span], age: int) -> None:
    found = arrows(spans)
    used = [(a.source.step, a.target.step) for a in found if a.name == "confidence"]
    decides = [(a.source.step, a.target.step) for a in found if a.name == "widths"]
    assert used == [(n - age, n) for n in range(age, 4)]
    assert decides == [(n, n) for n in range(4)]
    assert all((a.source.name, a.target.name) == ("decide", "verify") for a in found if a.name == "widths")


def test_what_is_cut_off_at_an_end_has_no_arrow() -> None:
    without_first = [s for s in LAG if (s.step, s.name) not in ((0, "export_confidence"), (0, "decide"))]
    without_last = [s for s in without_first if (s.step, s.name) != (3, "verify")]
    found = arrows(without_last)
    assert [a.target.step for a in found if a.name == "confidence"] == [2, 3]
    assert [a.target.step for a in found if a.name == "widths"] == [1, 2]
    trace_events({"cut": without_last})


def test_a_confidence_that_was_overtaken_decides_nothing() -> None:
    spans = [s for s in FRESH if (s.step, s.name) != (1, "decide")]
    assert [(a.source.step, a.target.step) for a in arrows(spans) if a.name == "confidence"] == [(0, 0), (2, 2), (3, 3)]


def test_flows_begin_and_end_within_their_slices() -> None:
    events = trace_events({"lag": LAG, "adaptive": FRESH})
    ids = Counter(e["id"] for e in events if e["ph"] in "sf")
    assert set(ids.values()) == {2}
    assert len(ids) == len(arrows(LAG)) + len(arrows(FRESH))
    for flow in (e for e in events if e["ph"] in "sf"):
        around = [
            e
            for e in slices(events, flow["pid"])
            if e["tid"] == flow["tid"] and e["ts"] <= flow["ts"] < e["ts"] + e["dur"]
        ]
        wanted = {("s", "confidence"): "export_confidence", ("f", "confidence"): "decide", ("s", "widths"): "decide",
                  ("f", "widths"): "verify"}  # fmt: skip
        assert [e["name"] for e in around] == [wanted[flow["ph"], flow["name"]]]
        assert flow["ph"] == "s" or flow["bp"] == "e"


def test_the_file_holds_the_latest_wave_and_where_it_was_measured(tmp_path: Path) -> None:
    timeline, recorded = Timeline(), list(FRESH)
    timeline.add("adaptive at 1", LAG)
    timeline.add("adaptive at 1", recorded)
    recorded.clear()  # as a recorder's list is
    timeline.write(tmp_path / "new" / "trace.json", {"device": "cpu: test"})
    trace = json.loads((tmp_path / "new" / "trace.json").read_text())
    assert len(slices(trace["traceEvents"])) == len(FRESH)
    assert trace["otherData"] == {"device": "cpu: test"}


def test_the_picture_shows_steps_that_take_as_long_as_most() -> None:
    slow = [span for n in range(4, 6) for span in fresh_step(n, 2000 + 500 * n)]
    start, end = window([*FRESH, *slow], 2)
    assert end - start == pytest.approx(0.020)
    prefill = ms(9, "verify", "device", 0, 1)
    assert window([prefill, *FRESH], 2) == (start, end)
    assert window([prefill], 2) == (0.0, 0.001)
    assert window([], 2) == (0.0, 0.0)


@pytest.mark.parametrize("cases", [{}, {"off at 1": []}, {"lag at 1": LAG, "adaptive at 1": FRESH}])
def test_a_picture_is_drawn(tmp_path: Path, cases: dict[str, list[Span]]) -> None:
    timeline_plot(tmp_path / "new" / "timeline.png", cases)
    assert (tmp_path / "new" / "timeline.png").stat().st_size > 1000
