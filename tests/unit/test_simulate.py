"""Simulation of policies over a dense trace: steps by hand, the engine's order of calls, and who can beat whom."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.decide.cost import CostProfile, DraftTimes, LinearCost, ProfileKey, StepCost, TableCost
from slipstream.decide.policy import FullWidth, Policy
from slipstream.errors import ConfigError
from slipstream.lab.dense import DenseTrace
from slipstream.lab.simulate import Outcome, panels, read, requests, rows, simulate
from slipstream.lab.simulate_loop import Prices, VirtualEngine, fresh_survival, hand_out
from slipstream.lab.simulate_options import SimulateOptions
from slipstream.lab.simulate_policies import Contestant, Setting, contestants
from slipstream.plan import Decision
from tests.unit.dense_traces import made_up, trace_of

LINEAR = LinearCost(2.0, 0.04, 1e-6, 1e-6)
EDGES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
STAIRS = TableCost(rows=EDGES, ms=tuple(2.0 + 0.04 * rows for rows in EDGES))
DRAFT = DraftTimes((1, 7), (1, 32), ((0.1, 0.3), (0.3, 0.6)))


def profile(step: StepCost = LINEAR, draft: DraftTimes = DRAFT) -> CostProfile:
    return CostProfile(
        key=ProfileKey(device="cuda: made up", target="t", drafter="d", dtype="bfloat16"), versions={},
        use="table" if isinstance(step, TableCost) else "linear", use_reason="",
        linear=step if isinstance(step, LinearCost) else LINEAR, table=step if isinstance(step, TableCost) else STAIRS,
        draft=draft, linear_error=0.0, table_error=0.0, num_samples=1,
    )  # fmt: skip


class Spy:
    """Writes down the calls of a policy, in order, with what it was shown and what it said."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.calls: list[tuple[str, Any]] = []  # name, plan
        self.shown: list[tuple[Any, Any]] = []  # plan, report or result
        self.said: list[tuple[Any, Any]] = []  # plan, decision or length

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.policy, name)
        if not callable(member):
            return member

        def call(plan: Any, *more: Any) -> Any:
            answer = member(plan, *more)
            self.calls.append((name, plan))
            self.shown += [(plan, one) for one in more]
            self.said += [(plan, answer)] if answer is not None else []
            return answer

        return call

    def order(self) -> list[tuple[str, int]]:
        return [(name, plan.step) for name, plan in self.calls]


def make(name: str, setting: Setting) -> Policy:
    (one,) = contestants([name], setting.num_drafts, [setting.signal])
    return one.make(setting)


def setting(num_drafts: int = 7, concurrency: int = 4, **fields: Any) -> Setting:
    return Setting(num_drafts=num_drafts, signal="head", concurrency=concurrency, **{"profile": profile(), **fields})


def serve(
    trace: DenseTrace, policy: Any, *, concurrency: int = 4, num_drafts: int = 7, step: StepCost = LINEAR,
    draft: DraftTimes = DRAFT, arrivals: Any = None, count: int | None = None, **prices: Any,
) -> tuple[Any, VirtualEngine]:  # fmt: skip
    engine = VirtualEngine(
        trace, policy, Prices(step=step, draft=draft, **prices), num_drafts=num_drafts, concurrency=concurrency,
        max_num_batched_tokens=8192,
    )  # fmt: skip
    return engine.serve(np.arange(count or trace.num_answers) % trace.num_answers, arrivals), engine


# --------------------------------------------------------------------------------------------------------------- by hand

# Two answers: 6 tokens to a prompt of 2, 4 tokens to one of 3.
RUNS = [2, 0, 1, 1, 0, 0, 1, 0, 1, 0]
TWO = trace_of([6, 4], RUNS, {"head": np.full((10, 3), 0.5)}, [2, 3])


def test_two_requests_step_by_step() -> None:
    spy = Spy(FullWidth(3))
    wave, engine = serve(
        TWO, spy, concurrency=2, num_drafts=3, step=LinearCost(1.0, 0.1), draft=DraftTimes.constant(0.5)
    )
    decided = [
        (p.step, p.num_decode, p.draft_length, d.widths_np.tolist()) for p, d in spy.said if hasattr(d, "caps_np")
    ]
    # Step 0 reads the prompts. Step 3 was planned before step 2 was known to end both answers: the first answer might
    # have had one token left, no draft of it was wanted, and the second could not go on without that result.
    assert decided == [(0, 0, 0, [0, 0]), (1, 2, 3, [3, 2]), (2, 2, 3, [3, 1]), (3, 1, 0, [0])]
    results = [one for _, one in spy.shown if hasattr(one, "num_accepted_np")]
    assert [r.num_accepted_np.tolist() for r in results] == [[0, 0], [2, 1], [1, 1], [0]]
    # 1 + .1 * 5; .5 + 1 + .1 * 7; .5 + 1 + .1 * 6
    assert wave.wall_s == pytest.approx(1e-3 * (1.5 + 2.2 + 2.1))
    assert [answer.ttft_ms for answer in wave.answers] == pytest.approx([1.5, 1.5])
    assert [answer.tpot_ms for answer in wave.answers] == pytest.approx([4.3 / 5, 4.3 / 3])
    assert [answer.token_ids for answer in wave.answers] == [tuple(range(100, 106)), tuple(range(106, 110))]
    counters = [answer.spec for answer in wave.answers]
    assert [(c.steps, c.verified, c.accepted, c.emitted) for c in counters] == [(2, 6, 3, 5), (2, 3, 2, 3)]
    assert engine.num_decode_steps == 3


def test_a_budget_goes_to_the_largest_survivals_of_the_same_step() -> None:
    spy = Spy(make("lag-budget", setting(3, 2, profile=profile(LinearCost(1.0, 0.1), DraftTimes.constant(0.5)))))
    signal = np.full((10, 3), 0.9)
    signal[6:] = [0.95, 0.2, 0.1]
    serve(
        replace(TWO, signals={"head": signal.astype(np.float16)}), spy, concurrency=2, num_drafts=3,
        step=LinearCost(1.0, 0.1), draft=DraftTimes.constant(0.5),
    )  # fmt: skip
    budgets = {p.step: d.budget for p, d in spy.said if isinstance(d, Decision) and d.budget}
    widths = {r.step: r.widths_np.tolist() for _, r in spy.shown if hasattr(r, "num_accepted_np")}
    assert budgets[1] == sum(widths[1]) == 4 and widths[1] == [3, 1]  # .95 * .2 is the least of all
    plan = next(p for p, d in spy.said if isinstance(d, Decision) and p.step == 1)
    few = Decision(widths_np=None, budget=3, caps_np=plan.caps_np)
    said = signal[[0, 6]].astype(np.float32)
    assert hand_out(plan, few, said, spy.calibration_np).tolist() == [2, 1]  # .95, .9, .81


def test_survival_is_that_of_the_device() -> None:
    torch = pytest.importorskip("torch")
    from slipstream.ops.survival import fresh_survival as on_device

    rng = np.random.default_rng(0)
    signal = rng.random((40, 5)).astype(np.float32)
    signal[3, 2], signal[4, 0], signal[5, 1], signal[6, :] = np.nan, np.inf, 0.0, 1.0
    calibration = np.stack([rng.uniform(0.5, 1.5, (2, 7)), rng.normal(size=(2, 7))], axis=-1).astype(np.float32)
    sampled = np.arange(40) % 2 == 1
    expected = on_device(*map(torch.from_numpy, (signal, calibration, sampled))).numpy()
    np.testing.assert_allclose(fresh_survival(signal, calibration, sampled), expected, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("width", [0, 1, 4, 7])
def test_a_fixed_width_takes_the_steps_of_arithmetic(width: int) -> None:
    trace = made_up(9)
    for name, num_drafts in ((f"fixed:{width}", 7), (f"static:{width}" if width else "off", width)):
        wave, _ = serve(trace, make(name, setting()), num_drafts=num_drafts, concurrency=3)
        for index, answer in enumerate(wave.answers):
            first, end = trace.starts_np[index], trace.starts_np[index + 1] - 1
            steps = 0
            while first < end:
                first, steps = first + min(width, int(trace.runs_np[first])) + 1, steps + 1
            assert answer.spec.steps == steps
            assert answer.token_ids == tuple(trace.token_ids_np[trace.starts_np[index] : end + 1].tolist())


# ----------------------------------------------------------------------------------------------------- what a policy sees


def turn(waits_for: str, step: int) -> list[tuple[str, int]]:
    """Calls of one turn of the overlapped loop, in the middle of a run."""
    collected = [("learn", step - 1), ("timed", step - 1)]
    if waits_for == "fresh":
        return [("draft_length", step), ("times", step), *collected, ("observe", step), ("decide", step)]
    seen = [("observe", step - 1)] if waits_for == "lagged" else []
    return [*seen, ("draft_length", step), ("times", step), ("decide", step), *collected]


@pytest.mark.parametrize("name", ["adaptive", "lag", "lag-budget", "lag-2", "static:7"])
def test_a_policy_is_called_as_the_engine_calls_it(name: str) -> None:
    spy = Spy(make(name, setting()))
    trace = made_up(4)
    serve(trace, spy)
    calls = [call for call in spy.order() if call[0] != "timed"]
    for step in range(3, 12):
        expected = [call for call in turn(spy.waits_for, step) if call[0] != "timed"]
        start = calls.index(expected[0])
        assert calls[start : start + len(expected)] == expected
    timed = {step for called, step in spy.order() if called == "timed"}
    wanted = {plan.step for plan, answer in spy.said if answer is True}
    assert timed == wanted
    assert len(timed) > 10 or name == "static:7"


def test_confidence_is_that_of_the_anchors_that_the_device_stood_at() -> None:
    spy, trace = Spy(make("adaptive", setting())), made_up(6)
    serve(trace, spy, concurrency=2)
    anchors = defaultdict(int)
    results = {result.step: result for _, result in spy.shown if hasattr(result, "num_accepted_np")}
    reports = {report.step: report for _, report in spy.shown if hasattr(report, "signal_np")}
    plans = {plan.step: plan for plan, decision in spy.said if isinstance(decision, Decision)}
    compared = 0
    for step, plan in sorted(plans.items()):
        for row, uid in enumerate(plan.uids_np[: plan.num_decode].tolist()):
            at = int(trace.starts_np[uid]) + anchors[uid]
            if anchors[uid] >= trace.lengths_np[uid] - 1:
                continue  # it has ended, and the host does not know
            if step in reports:
                said = reports[step].signal_np[row]
                assert said.tolist() == trace.signals["head"][at, : len(said)].astype(np.float32).tolist()
                compared += 1
            width, accepted = int(results[step].widths_np[row]), int(results[step].num_accepted_np[row])
            assert accepted == min(width, int(trace.runs_np[at]))
            anchors[uid] += accepted + 1
    assert compared > 30


@pytest.mark.parametrize(("name", "age"), [("lag-2-raw", 2), ("lag-3-raw", 3)])
def test_old_confidence_is_as_old_as_its_name_says(name: str, age: int) -> None:
    """Confidence asks for a width that depends on the anchor; a price makes it that width, so many steps later."""
    length, num_drafts = 60, 4
    wanted = np.random.default_rng(1).integers(0, num_drafts + 1, length)
    signal = (np.arange(num_drafts) < wanted[:, None]).astype(np.float64)
    trace = trace_of([length], np.zeros(length), {"head": signal}, [5])
    policy: Any = make(name, setting(num_drafts, 1, profile=profile(LinearCost(2.0, 0.8), DraftTimes.constant(0.1))))
    policy.draft_length = lambda plan: num_drafts
    spy = Spy(policy)
    serve(trace, spy, concurrency=1, num_drafts=num_drafts, step=LinearCost(2.0, 0.8), draft=DraftTimes.constant(0.1))
    widths = [int(d.widths_np[0]) for p, d in spy.said if isinstance(d, Decision) and p.num_decode][
        : length - num_drafts - 3
    ]
    assert widths[:age] == [num_drafts] * age  # nothing is known yet: in full
    assert widths[age:] == wanted[: len(widths) - age].tolist()


# ---------------------------------------------------------------------------------------------------- who can beat whom


def outcomes(trace: DenseTrace, names: list[str], step: StepCost, concurrency: int, tmp_path: Path) -> list[Outcome]:
    trace.save(tmp_path / "t.npz")
    profile(step).save(tmp_path / "p.json")
    options = SimulateOptions(
        trace=tmp_path / "t.npz", profile=tmp_path / "p.json", policies=tuple(names), signals=("head",),
        concurrency=(concurrency,), waves=2, calibration="none",
    )  # fmt: skip
    inputs = read(options)
    return [simulate(case, inputs, options) for case in inputs.cases]


def test_plain_decoding_goes_by_its_own_prices_where_they_were_measured(tmp_path: Path) -> None:
    made_up(8, seed=1).save(tmp_path / "t.npz")
    half = profile(LinearCost(1.0, 0.02, 5e-7, 5e-7), DraftTimes.constant(0.0))
    options = SimulateOptions(
        trace=tmp_path / "t.npz", profile=tmp_path / "p.json", policies=("off", "static:7", "lag", "oracle"),
        signals=("head",), concurrency=(3,), calibration="none",
    )  # fmt: skip
    found = []
    for plain in (None, half):
        replace(profile(), plain=plain).save(tmp_path / "p.json")
        inputs = read(options)
        found.append({row["policy"]: row for row in rows([simulate(case, inputs, options) for case in inputs.cases])})
    shared, apart = found
    assert len(shared) == 4
    assert apart["off"]["tok_per_s"] == pytest.approx(2 * shared["off"]["tok_per_s"])
    for name in shared.keys() - {"off"}:
        assert apart[name]["tok_per_s"] == shared[name]["tok_per_s"]
        assert apart[name]["ratio_to_off"] == pytest.approx(shared[name]["ratio_to_off"] / 2)
    assert apart["off"]["regret"] == pytest.approx(1 - apart["off"]["tok_per_s"] / apart["oracle"]["tok_per_s"])


@pytest.mark.parametrize("step", [LINEAR, STAIRS], ids=["linear", "table"])
@pytest.mark.parametrize("concurrency", [1, 6])
def test_nobody_beats_the_oracle(step: StepCost, concurrency: int, tmp_path: Path) -> None:
    names = ["off", "static:all", "fixed:2", "adaptive", "lag", "lag-raw", "lag-2", "lag-3", "lag-budget", "oracle"]
    found = rows(outcomes(made_up(12, seed=concurrency), names, step, concurrency, tmp_path))
    assert len(found) == len(names) + 6
    for row in found:
        assert row["regret"] >= 0.0, row["policy"]
    by_name = {row["policy"]: row for row in found}
    assert by_name["oracle"]["regret"] == 0.0 and by_name["oracle"]["acceptance_rate"] > 0.99
    assert by_name["off"]["ratio_to_off"] == 1.0 and by_name["adaptive"]["ratio_to_off"] > 1.0


def test_where_confidence_never_changes_its_age_does_not_matter() -> None:
    """Of each request, from its second decode step on: in the first one nothing is known of it."""
    length = 50
    runs = np.minimum(np.tile([2, 0, 0], length)[:length], np.arange(length)[::-1])
    signal = np.tile([0.95, 0.9, 0.05, 0.05], (length * 3, 1))
    trace = trace_of([length] * 3, np.tile(runs, 3), {"head": signal}, [4, 5, 6])
    widths = {}
    for name in ("adaptive", "lag", "lag-2"):
        policy: Any = make(name, setting(4, 3))
        policy.survival.learns = False
        policy.draft_length = lambda plan: 4
        spy = Spy(policy)
        serve(trace, spy, concurrency=3, num_drafts=4)
        late = [(p, d) for p, d in spy.said if isinstance(d, Decision) and p.num_decode == 3]
        widths[name] = [
            d.widths_np.tolist() for p, d in late if (p.decode_steps_np >= 2).all() and p.caps_np.min() == 4
        ]
    shortest = min(map(len, widths.values()))
    assert shortest > 3
    assert widths["adaptive"][:shortest] == widths["lag"][:shortest] == widths["lag-2"][:shortest]
    assert widths["lag"][0] == [2, 2, 2]


def test_an_oracle_drafts_and_verifies_what_will_be_accepted() -> None:
    wave, _ = serve(TWO, make("oracle", setting(3, 1)), concurrency=1, num_drafts=3)
    first = wave.answers[0].spec
    assert (first.steps, first.drafted, first.verified, first.accepted) == (2, 3, 3, 3)


# ------------------------------------------------------------------------------------------------------------------ loads


def test_requests_that_arrive_seldom_do_not_wait() -> None:
    trace = made_up(5)
    arrivals = np.arange(5) * 1e4
    wave, _ = serve(trace, make("lag", setting(concurrency=2)), concurrency=2, arrivals=arrivals)
    alone, _ = serve(trace.answers(np.array([4])), make("off", setting(concurrency=1)), concurrency=1, num_drafts=0)
    for answer, prompt in zip(wave.answers, trace.prompt_lengths_np.tolist(), strict=True):
        assert answer.ttft_ms == pytest.approx(LINEAR.step_ms(np.array([prompt]), np.array([0]), np.array([0])))
    assert 40.0 < wave.wall_s < 40.0 + alone.wall_s
    crowded, _ = serve(trace, make("lag", setting(concurrency=2)), concurrency=2, arrivals=np.arange(5) * 1.0)
    assert crowded.wall_s < 1.0 and crowded.answers[4].ttft_ms > 2 * wave.answers[4].ttft_ms


def test_the_host_and_prompts_cost_what_they_are_said_to() -> None:
    trace = made_up(4)
    wave, engine = serve(trace, FullWidth(7))
    exposed, _ = serve(trace, FullWidth(7), exposed_ms=0.5)
    last_steps = 2  # launched before the last end was known; they end after it
    gap = 1e3 * (exposed.wall_s - wave.wall_s) / 0.5
    assert engine.num_steps - last_steps <= round(gap) <= engine.num_steps
    free, _ = serve(trace, FullWidth(7), prefill=False)
    prompts = LINEAR.step_ms(trace.prompt_lengths_np, np.zeros(4, np.int64), np.zeros(4, np.int64))
    assert 1e3 * (wave.wall_s - free.wall_s) == pytest.approx(prompts)


def test_waves_serve_sets_in_turn_and_begin_again(tmp_path: Path) -> None:
    trace = made_up(5)  # three of set a, two of b
    options = SimulateOptions(trace=tmp_path, profile=tmp_path, concurrency=(2,), requests=7, waves=2)
    (load,) = options.loads()
    assert [(list(answers), gaps) for answers, gaps in requests(load, options, trace)] == [
        ([0, 3, 1, 4, 2, 0, 3], None)
    ] * 2
    shuffled = replace(options, seed=3, arrivals=(10.0,))
    (load,) = shuffled.loads()
    (first, gaps), (second, later) = requests(load, shuffled, trace)
    assert sorted(first[:5]) == [0, 1, 2, 3, 4] and list(first) == list(second)
    assert (np.diff(gaps) > 0).all() and gaps[0] > 0 and list(gaps) != list(later)


def test_answers_may_be_cut() -> None:
    trace = made_up(4)
    engine = VirtualEngine(
        trace, FullWidth(3), Prices(step=LINEAR, draft=DRAFT), num_drafts=3, concurrency=2, max_num_batched_tokens=64,
        max_tokens=10,
    )  # fmt: skip
    wave = engine.serve(np.arange(4))
    assert [a.token_ids for a in wave.answers] == [tuple(range(100 + s, 110 + s)) for s in trace.starts_np[:4].tolist()]


# ----------------------------------------------------------------------------------------------------------------- names


def names_of(found: list[Contestant]) -> list[tuple[str, int, str | None]]:
    return [(one.name, one.num_drafts, one.signal) for one in found]


def test_policies_by_name() -> None:
    found = contestants(["off", "static", "static:all", "fixed:0", "lag", "oracle"], 3, ["head", "peak"])
    assert names_of(found) == [
        ("off", 0, None), ("static:3", 3, None), ("static:1", 1, None), ("static:2", 2, None), ("fixed:0", 3, None),
        ("lag", 3, "head"), ("lag", 3, "peak"), ("oracle", 3, None),
    ]  # fmt: skip
    assert len(contestants(["all"], 3, ["head"])) == 1 + 3 + 8 + 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lagg", "policies holds 'lagg'; choose among off, static:all"),
        ("static:8", "from 1 to 7, or all"),
        ("fixed", "choose among"),
        ("static:", "from 1 to 7"),
        ("lag-4", "choose among"),
        ("none.py:Mine", "there is no file none.py"),
    ],
)
def test_names_that_mean_nothing(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        contestants([name], 7, ["head"])


MINE = """
from slipstream.decide.policy import FullWidth

class Half(FullWidth):
    def __init__(self, *, num_drafts, cost, signal):
        super().__init__(num_drafts // 2)
        self.cost = cost

def broken(**given):
    return object()
"""


def test_a_policy_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    (one,) = contestants([f"{path}:Half"], 7, ["head"])
    wave, _ = serve(made_up(3), one.make(setting()))
    assert {width for answer in wave.answers for width in answer.spec.width_histogram} <= {0, 1, 2, 3}
    assert sum(answer.spec.drafted for answer in wave.answers) > 0
    with pytest.raises(ConfigError, match="no class or function 'Other'"):
        contestants([f"{path}:Other"], 7, ["head"])
    with pytest.raises(ConfigError, match=r"lacks waits_for, .*times, timed; see slipstream"):
        contestants([f"{path}:broken"], 7, ["head"])[0].make(setting())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policies": ()}, "policies is empty"),
        ({"concurrency": (1, 1)}, "name each value once"),
        ({"concurrency": (0,)}, "concurrency holds 0"),
        ({"signals": ("top",)}, "signals holds 'top'"),
        ({"arrivals": (0.0,)}, "arrivals holds 0.0"),
        ({"min_gain": -1.0}, "min_gain is -1.0"),
        ({"exposed_us": "later=3"}, "exposed_us is 'later=3'; give microseconds, or nothing=0,lagged=0,fresh=0 with"),
        ({"exposed_us": "fast"}, "exposed_us is 'fast'"),
    ],
)
def test_options_that_make_no_sense(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        SimulateOptions(trace=tmp_path, profile=tmp_path, **fields)


def test_exposed_time_by_what_is_waited_for(tmp_path: Path) -> None:
    options = SimulateOptions(trace=tmp_path, profile=tmp_path, exposed_us="70,lagged=1")
    assert options.exposed() == {"nothing": 0.0, "lagged": 0.001, "fresh": 0.07}


def test_what_the_trace_does_not_have(tmp_path: Path) -> None:
    trace = made_up(3, num_drafts=3)
    replace(trace, signals={"peak": trace.signals["peak"]}).save(tmp_path / "t.npz")
    profile().save(tmp_path / "p.json")
    options = SimulateOptions(trace=tmp_path / "t.npz", profile=tmp_path / "p.json")
    assert {case.contestant.signal for case in read(options).cases} == {None, "peak"}
    for fields, message in (
        ({"signals": ("head",)}, "the trace has no 'head'; it has peak"),
        ({"num_speculative_tokens": (2, 4)}, "holds 4; the trace drafts 3"),
        ({"sets": ("c",)}, "no set 'c'"),
        ({"calibration": str(tmp_path / "none.json")}, "calibration"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(replace(options, **fields))


def test_min_gain_needs_a_linear_price(tmp_path: Path) -> None:
    trace = made_up(8)
    found = {}
    for gain in (0.0, 0.4):
        policy = make("lag", setting(min_gain=gain))
        found[gain] = sum(answer.spec.verified for answer in serve(trace, policy)[0].answers)
    assert found[0.4] < found[0.0]
    trace.save(tmp_path / "t.npz")
    profile(STAIRS).save(tmp_path / "p.json")
    options = SimulateOptions(trace=tmp_path / "t.npz", profile=tmp_path / "p.json", min_gain=0.1)
    with pytest.raises(ConfigError, match="min_gain works with a linear cost model only"):
        read(options)


def test_calibration_changes_what_policies_see(tmp_path: Path) -> None:
    from slipstream.decide.calibration import Calibration

    trace, drafter = made_up(8), tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")
    Calibration(temperatures={("peak", "greedy"): (3.0,)}).save(drafter / "calibration.json")
    replace(trace, about={"draft": str(drafter)}).save(tmp_path / "t.npz")
    profile().save(tmp_path / "p.json")
    options = SimulateOptions(
        trace=tmp_path / "t.npz", profile=tmp_path / "p.json", policies=("lag", "lag-2"), signals=("peak",),
        concurrency=(4,), waves=1,
    )  # fmt: skip
    verified = {}
    for name in ("auto", "none", str(drafter / "calibration.json")):
        inputs = read(replace(options, calibration=name))
        verified[name] = [
            row["verified"] for row in rows([simulate(case, inputs, options) for case in inputs.cases])
        ]  # fmt: skip
    auto, none, named = verified.values()
    assert auto == named and all(a < b for a, b in zip(auto, none, strict=True))


def test_plots_show_the_best_of_a_sweep(tmp_path: Path) -> None:
    found = rows(outcomes(made_up(6), ["off", "static:all", "lag", "oracle"], LINEAR, 3, tmp_path))
    ((speed, _, regret),) = panels(found)
    assert [name for name, _, _ in speed.series] == ["off", "best static", "lag head", "oracle"]
    best = max(row["tok_per_s"] for row in found if row["policy"].startswith("static"))
    assert speed.series[1][1:] == ((3,), (best,))
    assert regret.series[3][2] == (0.0,)
