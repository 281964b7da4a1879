"""Spans on a GPU: events of a device with a clock of its own, laid onto the host's clock when somebody asks."""

from dataclasses import dataclass, field

import pytest

from slipstream.device import events
from slipstream.device.events import EventPool, Recorder, Stopwatch, Timeline


@dataclass
class World:
    """A host whose clock is moved by hand, and a device that is `lead_s` behind it and whose clock runs fast."""

    now_s: float = 100.0
    drift: float = 1.001
    free_s: float = 0.0  # when the device has done all that was launched
    made: int = 0
    recorded: list["FakeEvent"] = field(default_factory=list)

    def perf_counter(self) -> float:
        return self.now_s

    def launch(self, seconds: float) -> None:
        self.free_s = max(self.free_s, self.now_s) + seconds

    def make(self) -> "FakeEvent":
        self.made += 1
        return FakeEvent(self)


@dataclass(eq=False)
class FakeEvent:
    world: World
    at_s: float = 0.0

    def record(self, stream: object = None) -> None:
        self.at_s = max(self.world.free_s, self.world.now_s)
        self.world.recorded.append(self)

    def synchronize(self) -> None:
        self.world.now_s = max(self.world.now_s, self.at_s)

    def elapsed_time(self, end_event: "FakeEvent") -> float:
        return 1e3 * self.world.drift * (end_event.at_s - self.at_s)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(events.time, "perf_counter", made.perf_counter)
    return made


def near(*values: float) -> list[object]:
    return [pytest.approx(value, abs=1e-9) for value in values]


def test_device_spans_begin_and_end_when_the_device_does(world: World) -> None:
    recorder = Recorder(EventPool(world.make))
    with recorder.span(0, "draft", "device"):
        world.launch(3.0)
    with recorder.span(0, "decide", "host"):
        world.now_s += 1.0
    with recorder.span(0, "verify", "device"):
        world.launch(4.0)
    with recorder.span(0, "collect", "wait"):
        world.now_s += 20.0
    found = {span.name: [span.start_s, span.end_s] for span in recorder.spans}
    assert found == {
        "draft": near(100, 103), "decide": near(100, 101), "verify": near(103, 107), "collect": near(101, 121)
    }  # fmt: skip
    assert recorder.names() == ["draft", "decide", "verify", "collect"]


def test_nothing_waits_before_spans_are_read(world: World) -> None:
    recorder = Recorder(EventPool(world.make))
    for step in range(3):
        with recorder.span(step, "verify", "device"):
            world.launch(5.0)
    assert world.now_s == 100.0
    assert len(recorder.spans) == 3
    assert world.now_s == 115.0


def test_one_launch_does_not_begin_before_it_was_made(world: World) -> None:
    """Of an idle device, whose first event is reached while the host still prepares; not of a busy one."""
    recorder = Recorder(EventPool(world.make))
    for _ in range(2):
        with recorder.span(0, "verify", "device", one_launch=True):
            world.now_s += 2.0
            world.launch(5.0)
    with recorder.span(0, "eager", "device"):
        world.now_s += 20.0
        world.launch(1.0)
    assert [[s.start_s, s.end_s] for s in recorder.spans] == [near(102, 107), near(107, 112), near(112, 125)]


def test_spans_are_read_in_between_and_cleared(world: World) -> None:
    recorder = Recorder(EventPool(world.make))
    for step in range(2):
        with recorder.span(step, "verify", "device"):
            world.launch(5.0)
        world.now_s += 10.0
        assert [recorder.spans[-1].start_s, recorder.spans[-1].end_s] == near(100 + 10 * step, 105 + 10 * step)
    recorder.clear()
    assert recorder.spans == []
    with recorder.span(2, "verify", "device"):
        world.launch(5.0)
    assert [recorder.spans[0].start_s, recorder.spans[0].end_s] == near(120, 125)


def test_events_are_used_again(world: World) -> None:
    pool = EventPool(world.make)
    for _ in range(5):
        recorder = Recorder(pool)
        for step in range(50):
            with recorder.span(step, "verify", "device"):
                world.launch(0.1)
        assert len(recorder.spans) == 50
    assert world.made <= 2 * 50 + 5 + 2 * events.ANCHOR_TRIES


def test_long_runs_keep_their_precision(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elapsed times are fp32: over a minute, from one event alone, they would be off by several microseconds."""
    import numpy as np

    exact = FakeEvent.elapsed_time
    monkeypatch.setattr(FakeEvent, "elapsed_time", lambda self, end: float(np.float32(exact(self, end))))
    timeline = Timeline(EventPool(world.make))
    marks = []
    for _ in range(6000):
        world.launch(0.01)
        marks.append(timeline.mark())
    at = timeline.resolve()
    assert max(abs(at[mark] - (100 + 0.01 * (n + 1))) for n, mark in enumerate(marks)) < 1e-6


def test_the_stopwatch_uses_few_events(world: World) -> None:
    stopwatch = Stopwatch(True, EventPool(world.make))
    for _ in range(1000):
        start = stopwatch.mark()
        world.launch(0.002)
        assert Stopwatch.elapsed_ms(start, stopwatch.mark()) == pytest.approx(2.0 * world.drift)
    assert world.made <= events.STOPWATCH_EVENTS + 1
    assert isinstance(Stopwatch(False).mark(), float)


def test_without_a_pool_stages_run_where_they_are_launched(world: World) -> None:
    recorder = Recorder()
    with recorder.span(0, "verify", "device", one_launch=True):
        world.now_s += 2.0
    assert [recorder.spans[0].start_s, recorder.spans[0].end_s] == [100.0, 102.0]
