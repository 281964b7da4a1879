"""Cost models: prices, hulls, fits, files, and the correction while serving."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.decide.cost import (
    CostModel,
    CostProfile,
    DraftTimes,
    LinearCost,
    ProfileKey,
    Samples,
    TableCost,
    fit_error,
    fit_linear,
    fit_table,
    make_profile,
    slipstream_home,
    step_cost_from_dict,
)
from slipstream.errors import ConfigError

KEY = ProfileKey(device="cpu: Some CPU x2", target="smollm2-135m", drafter="smollm2-135m-dspark", dtype="bfloat16")


def test_linear_prices_rows_and_contexts():
    cost = LinearCost(1.0, 0.5, 0.01, 0.001)
    given_rows, kv, widths = np.array([1, 1, 10]), np.array([100, 200, 50]), np.array([2, 0, 0])
    rows = [3, 1, 10]
    want = 1.0 + 0.5 * 14 + 0.01 * (3 * 100 + 200 + 10 * 50) + 0.001 * 350
    assert cost.step_ms(given_rows, kv, widths) == pytest.approx(want)
    assert cost.curve(sum(rows), 3).tolist() == pytest.approx([8.0, 8.5, 9.0])


def test_staircase_pads_up_and_goes_on_beyond_its_end():
    table = TableCost(rows=(8, 16, 32), ms=(5.0, 6.0, 9.0))
    assert table.curve(1, 16).tolist() == [5.0] * 8 + [6.0] * 8
    assert table.curve(17, 16).tolist() == [9.0] * 16
    slope = 4.0 / 24
    assert table.curve(31, 4).tolist() == pytest.approx([9.0, 9.0, 9.0 + slope, 9.0 + 2 * slope])
    assert table.curve(100, 1).tolist() == pytest.approx([9.0 + 68 * slope])
    assert TableCost(rows=(4,), ms=(2.0,)).curve(8, 1).tolist() == pytest.approx([4.0])


def test_a_table_without_padding_is_linear_between_entries():
    table = TableCost(rows=(2, 4, 8), ms=(1.0, 2.0, 3.0), staircase=False)
    assert table.curve(1, 8).tolist() == pytest.approx([1.0, 1.0, 1.5, 2.0, 2.25, 2.5, 2.75, 3.0])


@given(st.dictionaries(st.integers(1, 64), st.floats(0, 20), min_size=1, max_size=8), st.booleans())
@settings(max_examples=200, deadline=None)
def test_hull_is_convex_and_nowhere_above(entries, staircase):
    rows = tuple(sorted(entries))
    table = TableCost(rows=rows, ms=tuple(entries[r] for r in rows), staircase=staircase)
    hull = table.hull().curve(1, rows[-1])
    assert (hull <= table.curve(1, rows[-1]) + 1e-9).all()
    assert (np.diff(hull, 2) >= -1e-9).all()
    assert hull[-1] == pytest.approx(table.ms[-1])


def test_draft_times_interpolate_both_ways():
    times = DraftTimes((1, 4), (1, 8), ((1.0, 2.0), (2.5, 5.0)))
    assert times.at(0, 8) == 0.0
    assert times.at(4, 0) == 0.0
    assert times.at(1, 1) == 1.0
    assert times.at(2, 1) == pytest.approx(1.5)
    assert times.at(4, 8) == 5.0
    assert times.at(1, 15) == pytest.approx(3.0)
    assert times.at(7, 1) == pytest.approx(4.0)
    assert DraftTimes.by_length({0: 0.0, 2: 1.0, 4: 3.0}).at(3) == pytest.approx(2.0)
    assert DraftTimes.constant(1.5).at(7, 200) == 1.5


# ------------------------------------------------------------------------------------------------------------------ fits


def sampled(cost, rng, count=80, noise=0.0, alike=False):
    rows = rng.integers(1, 64, count)
    kv_each = np.full(count, 300.0) if alike else rng.uniform(10, 4000, count)
    sequences = rng.integers(1, 9, count)
    kv_rows, kv = rows * kv_each, sequences * kv_each
    ms = np.array([cost.curve(int(r), 1)[0] for r in rows]) + cost.c2 * kv_rows + cost.c3 * kv
    return Samples.of(rows, ms * rng.lognormal(0, noise, count), kv_rows, kv)


def test_fit_linear_finds_the_coefficients():
    truth = LinearCost(3.0, 0.2, 2e-5, 4e-5)
    found = fit_linear(sampled(truth, np.random.default_rng(0), noise=0.002))
    assert found.c0 == pytest.approx(3.0, rel=0.02)
    assert found.c1 == pytest.approx(0.2, rel=0.02)
    assert found.c2 == pytest.approx(2e-5, rel=0.02)
    assert found.c3 == pytest.approx(4e-5, rel=0.1)


def test_a_negative_coefficient_is_refitted_without_its_column_not_clamped():
    rows = np.array([1.0, 2, 4, 8, 16, 32])
    kv = np.array([10.0, 50, 20, 40, 30, 60])
    ms = 2 + 0.5 * rows - 0.005 * kv
    found = fit_linear(Samples.of(rows, ms, kv=kv))
    assert found.c3 == 0.0
    refit = fit_linear(Samples.of(rows, ms))
    assert [found.c0, found.c1] == pytest.approx([refit.c0, refit.c1])
    clamped = LinearCost(2.0, 0.5)
    samples = Samples.of(rows, ms, kv=kv)
    assert fit_error(found, samples) < fit_error(clamped, samples)


@pytest.mark.parametrize("table", [False, True])
def test_outliers_do_not_move_the_price_of_ordinary_steps(table):
    """A tenth of the samples six times too long; least squares would be off by up to 3%."""
    rows = np.tile([1.0, 2, 4, 8, 16, 32, 64], 6)
    kv = np.repeat([100.0, 200, 400, 800, 1000, 1200], 7)
    ms = 20 + 0.5 * rows + 1e-3 * kv
    measured = ms.copy()
    measured[[5, 17, 22, 34]] *= 6
    samples = Samples.of(rows, measured, kv=kv)
    found = fit_table(samples, staircase=False) if table else fit_linear(samples)
    priced = [found.ms_of_rows(int(r)) + found.c3 * k for r, k in zip(rows, kv, strict=True)]
    assert priced == pytest.approx(ms.tolist(), rel=0.01)


def test_columns_that_samples_cannot_tell_apart_are_left_out():
    found = fit_linear(sampled(LinearCost(3.0, 0.2), np.random.default_rng(1), alike=True))
    assert (found.c2, found.c3) == (0.0, pytest.approx(0.0, abs=1e-9))
    assert found.c1 == pytest.approx(0.2)
    only_one_shape = fit_linear(Samples.of([4, 4, 4], [2.0, 2.0, 2.0]))
    assert only_one_shape.c0 == pytest.approx(2.0)
    assert only_one_shape.c1 == 0.0


def test_fit_table_takes_medians_beside_the_kv_terms():
    rng = np.random.default_rng(2)
    truth = TableCost(rows=tuple(range(1, 65)), ms=tuple(5.0 if r <= 32 else 8.0 for r in range(1, 65)), c2=1e-5)
    samples = sampled(truth, rng, count=900, noise=0.002)
    slow = samples.ms_np.copy()
    slow[::50] *= 8  # pauses
    found = fit_table(Samples.of(samples.rows_np, slow, samples.kv_rows_np, samples.kv_np), staircase=False)
    assert np.median(np.abs(found.curve(1, 32) - 5.0)) < 0.2
    assert np.median(np.abs(found.curve(33, 31) - 8.0)) < 0.3
    clean_fit = fit_table(samples, staircase=True)
    assert clean_fit.c2 == pytest.approx(1e-5, rel=0.05)
    assert clean_fit.staircase


def test_profile_uses_the_table_where_a_line_does_not_fit():
    rng = np.random.default_rng(3)
    stairs = TableCost(rows=(8, 16, 32, 64), ms=(2.0, 2.1, 4.0, 4.1))
    profile = make_profile(KEY, sampled(stairs, rng), DraftTimes.constant(1.0), staircase=True, versions={})
    assert profile.use == "table"
    assert profile.step is profile.table
    line = make_profile(
        KEY, sampled(LinearCost(2.0, 0.1, 1e-6), rng), DraftTimes.constant(1.0), staircase=False, versions={}
    )
    assert line.use == "linear"
    assert line.linear_error < 0.01
    assert line.model().fitted is line.linear
    assert profile.model(linear=True).fitted is profile.linear


def padded_to(edges, rows, ms_by_edge):
    """Samples of steps that really ran at the next edge."""
    return Samples.of(rows, [ms_by_edge[min(e for e in edges if e >= r)] for r in rows])


def test_a_staircase_of_given_edges_is_priced_by_the_padded_count():
    edges = (1, 2, 4, 8, 16, 24, 32)
    truth = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.7, 16: 2.5, 24: 3.0, 32: 5.0}
    # no step has 16 or 24 rows exactly, and none was padded to 4
    samples = padded_to(edges, [1, 2, 6, 7, 8, 9, 13, 20, 21, 30], truth)
    table = fit_table(samples, staircase=True, edges=edges)
    assert table.staircase
    assert table.rows == edges
    priced = {r: table.curve(r, 1)[0] for r in range(1, 33)}
    for rows, ms in priced.items():
        edge = min(e for e in edges if e >= rows)
        assert ms == pytest.approx(priced[edge])
        if edge != 4:
            assert ms == pytest.approx(truth[edge])
    assert priced[3] == pytest.approx(1.1 + (1.7 - 1.1) * 2 / 6)  # between what was measured around it
    guessed = fit_table(samples, staircase=True)  # entries where somebody happened to measure
    assert guessed.curve(14, 1)[0] == pytest.approx(3.0)  # the fault that the edges prevent: 14 runs at 16


def test_steps_beyond_the_last_edge_are_not_padded():
    table = fit_table(Samples.of([8, 40, 50], [1.0, 4.0, 5.0]), staircase=True, edges=(8, 16, 32))
    assert table.rows == (8, 16, 32, 40, 50)
    assert table.curve(16, 1)[0] == pytest.approx(1.75)


@pytest.mark.parametrize("edges", [(4, 4), (0, 8), (8, 4)])
def test_edges_that_do_not_rise_are_refused(edges):
    with pytest.raises(ConfigError, match="edges"):
        fit_table(Samples.of([1, 2], [1.0, 2.0]), staircase=True, edges=edges)


def test_a_profile_keeps_its_stairs_in_its_file(tmp_path):
    edges, truth = (4, 8, 16), {4: 1.0, 8: 1.2, 16: 6.0}
    samples = padded_to(edges, [1, 3, 5, 7, 9, 12, 15], truth)
    made = make_profile(KEY, samples, DraftTimes.constant(0.1), staircase=True, versions={}, edges=edges)
    assert made.use == "table"
    loaded = CostProfile.load(made.save(tmp_path / "cost.json")).model().step
    assert [loaded.curve(r, 1)[0] for r in (1, 4, 5, 8, 9, 16)] == pytest.approx([1.0, 1.0, 1.2, 1.2, 6.0, 6.0])


def test_a_correction_prices_between_edges_by_the_padded_count_too():
    model = CostModel(TableCost(rows=(8, 16, 32), ms=(2.0, 3.0, 4.0)))
    for _ in range(model.REFRESH * 10):
        model.observe(13, 6.0)  # ran at 16 rows
    low, middle, high = model.step.ms
    assert model.step.curve(9, 8).tolist() == [middle] * 8
    assert middle / low > 1.6  # from 1.5: the stair that was too slow took most of the blame
    assert high / low == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("rows", "ms"), [([], []), ([1], [0.0]), ([0], [1.0]), ([1, 2], [1.0, math.nan]), ([1, 2], [1.0])]
)
def test_bad_samples_are_refused(rows, ms):
    with pytest.raises(ConfigError, match="cost samples"):
        Samples.of(rows, ms)


# ------------------------------------------------------------------------------------------------------------------ file


def a_profile():
    samples = sampled(LinearCost(2.0, 0.1, 1e-6), np.random.default_rng(4), noise=0.01)
    draft = DraftTimes((1, 7), (1, 4), ((0.5, 0.6), (0.7, 1.1)))
    return make_profile(KEY, samples, draft, staircase=True, versions={"torch": "2.13"})


def test_a_profile_survives_its_file(tmp_path):
    profile = a_profile()
    path = profile.save(tmp_path / "deep" / "cost.json")
    assert CostProfile.load(path) == profile
    assert list(path.parent.iterdir()) == [path]
    plain = replace(profile, key=replace(KEY, drafter="none"))
    both = replace(profile, plain=plain)
    assert CostProfile.load(both.save(path)) == both
    nested = replace(profile, plain=both).to_dict()
    with pytest.raises(ConfigError, match=r"plain\.plain"):
        CostProfile.from_dict(nested)
    profile.save(path)
    data = json.loads(path.read_text())
    assert data["key"] == {
        "device": "cpu: Some CPU x2",
        "target": "smollm2-135m",
        "drafter": "smollm2-135m-dspark",
        "dtype": "bfloat16",
    }
    assert data["use"] in ("linear", "table")


def test_profiles_lie_under_slipstream_home_by_key(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    assert slipstream_home() == tmp_path
    path = a_profile().save()
    assert path == KEY.path()
    assert tmp_path in path.parents
    others = {replace(KEY, **{name: "/some/where/else"}).path() for name in ("device", "target", "drafter", "dtype")}
    assert len(others | {path}) == 5
    assert replace(KEY, target="a/b").path() != replace(KEY, target="a-b").path()
    monkeypatch.delenv("SLIPSTREAM_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert slipstream_home() == tmp_path / "home" / ".cache" / "slipstream"


def change(data, path, value):
    *parents, last = path
    for name in parents:
        data = data[name]
    if value is KeyError:
        del data[last]
    else:
        data[last] = value


BAD_FIELDS = [
    (("version",), 99, "version"),
    (("key", "dtype"), 5, r"key\.dtype"),
    (("key",), [], "key"),
    (("use",), "spline", "use"),
    (("linear", "c1"), math.nan, r"linear\.c1"),
    (("linear", "c0"), -1.0, r"linear\.c0"),
    (("linear", "c2"), KeyError, r"linear\.c2"),
    (("linear", "kind"), "cubic", r"linear\.kind"),
    (("table", "ms", 1), math.inf, r"table\.ms\[1\]"),
    (("table", "rows", 0), 4.5, r"table\.rows"),
    (("table", "rows"), [], r"table\.rows"),
    (("table", "staircase"), "yes", r"table\.staircase"),
    (("draft", "ms", 0, 0), "fast", r"draft\.ms\[0\]\[0\]"),
    (("draft", "lengths"), [7, 1], r"draft\.lengths"),
    (("draft",), KeyError, "draft is missing"),
    (("num_samples",), 1.5, "num_samples"),
    (("linear_error",), math.nan, "linear_error"),
]


@pytest.mark.parametrize(("where", "value", "message"), BAD_FIELDS)
def test_a_malformed_file_names_the_field(tmp_path, where, value, message):
    data = a_profile().to_dict()
    data = json.loads(json.dumps(data))
    change(data, where, value)
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=message) as caught:
        CostProfile.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"x"'])
def test_a_file_that_is_no_profile_is_refused(tmp_path, text):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cost\.json"):
        CostProfile.load(path)
    with pytest.raises(ConfigError, match="absent"):
        CostProfile.load(tmp_path / "absent")


@given(st.sampled_from([LinearCost(1.5, 0.25, 1e-7, 0.0), TableCost(rows=(1, 8), ms=(0.1, 0.3), c2=1e-9)]))
def test_step_costs_survive_their_dict(cost):
    assert step_cost_from_dict(json.loads(json.dumps(cost.to_dict())), "cost") == cost


# ------------------------------------------------------------------------------------------------------------ correction


def serve(model, truth, true_draft_ms, rows, rng, steps=4000, noise=0.05):
    for _ in range(steps):
        r = int(rng.choice(rows))
        ms = float(truth.curve(r, 1)[0]) + true_draft_ms
        pause = 20.0 if rng.random() < 0.01 else 1.0
        model.observe(r, ms * rng.lognormal(0, noise) * pause, draft_length=7)


def test_correction_learns_the_shape_of_a_line():
    model = CostModel(LinearCost(4.0, 0.1), DraftTimes.constant(1.0))
    truth = LinearCost(4.0, 0.18)
    serve(model, truth, 1.0, [1, 4, 8, 16, 32, 64], np.random.default_rng(0))
    before = 0.1 / 4.0
    after = model.step.c1 / model.step.c0
    assert after > before * 1.4
    assert after < truth.c1 / truth.c0 * 1.25


def test_correction_learns_one_bad_stair():
    model = CostModel(TableCost(rows=(8, 16, 32), ms=(2.0, 3.0, 4.0)))
    serve(model, TableCost(rows=(8, 16, 32), ms=(2.0, 5.0, 4.0)), 0.0, [8, 16, 32], np.random.default_rng(1))
    low, middle, high = model.step.ms
    assert middle / low == pytest.approx(2.5, rel=0.15)
    assert high / low == pytest.approx(2.0, rel=0.15)


def test_a_slow_machine_does_not_change_what_is_cheap():
    model = CostModel(TableCost(rows=(8, 16, 32), ms=(2.0, 3.0, 4.0)), DraftTimes.constant(1.0))
    truth = TableCost(rows=(8, 16, 32), ms=(3.0, 4.5, 6.0))
    serve(model, truth, 1.5, [8, 16], np.random.default_rng(2), noise=0.02)  # 1.5 times slower, 32 rows never seen
    ratios = np.array([*model.step.ms, model.draft_ms(7)]) / np.array([2.0, 3.0, 4.0, 1.0])
    assert ratios.max() / ratios.min() < 1.15
    assert ratios.mean() == pytest.approx(1.5, rel=0.1)


@pytest.mark.parametrize("cost", [LinearCost(4.0, 0.1), TableCost(rows=(8, 16, 32), ms=(4.0, 5.0, 6.0))])
@pytest.mark.parametrize("at", [0, 1, 2, 40, 300])
def test_one_step_that_went_wrong_changes_nothing(cost, at):
    """A pause, a fault of the clock: whenever it comes, the corrected prices are those of an engine that had none."""
    models = [CostModel(cost, DraftTimes.constant(1.0)) for _ in range(2)]
    for step in range(400):
        rows = (8, 16, 32)[step % 3]
        true_ms = 1.2 * (cost.ms_of_rows(rows) + 1.0)
        for model, wrong in zip(models, (False, True), strict=True):
            model.observe(rows, true_ms * (1000.0 if wrong and step == at else 1.0), draft_length=7)
            assert (
                model.step == models[0].step or at < 9 > step - 9
            )  # early on one bucket may wait for a third step more
    np.testing.assert_allclose(models[1].factors, models[0].factors, rtol=1e-9)


def test_steps_that_stay_slow_are_believed():
    model = CostModel(LinearCost(4.0, 0.1))
    for _ in range(200):
        model.observe(8, 4.8)
    for _ in range(200):
        model.observe(8, 9.6)
    assert model.step.ms_of_rows(8) == pytest.approx(9.6, rel=0.1)


def test_correction_is_bounded_and_ignores_what_is_no_time():
    model = CostModel(LinearCost(4.0, 0.1), DraftTimes.constant(1.0))
    for value in (math.nan, math.inf, 0.0, -3.0):
        model.observe(8, value)
    assert model.num_observed == 0
    for _ in range(5000):
        model.observe(8, 1e9)
    assert model.factors.max() <= 4.0 * 2.0 + 1e-9
    for _ in range(5000):
        model.observe(8, 1e-9)
    assert model.factors.min() >= 1 / 8 - 1e-9


def test_steps_with_a_prompt_are_corrected_apart():
    """They run other kernels: what is learned of them changes the other price by no more than the machine's speed."""
    cost, mixed = TableCost(rows=(8, 16, 32), ms=(2.0, 3.0, 4.0)), TableCost(rows=(64, 128), ms=(5.0, 6.0))
    model = CostModel(cost, mixed=mixed)
    assert (model.step, model.mixed) == (cost, mixed)
    for step in range(400):
        model.observe((8, 16, 32)[step % 3], (2.0, 3.0, 4.0)[step % 3])
        model.observe(100, 9.0, mixed=True)
    assert model.mixed.ms_of_rows(100) == pytest.approx(9.0, rel=0.05)
    assert model.mixed.ms_of_rows(64) == pytest.approx(5.0, rel=0.15)  # never seen: it may follow the other a little
    np.testing.assert_allclose(model.step.curve(1, 32), cost.curve(1, 32), rtol=0.05)


def test_without_a_price_of_their_own_steps_with_a_prompt_are_priced_like_others():
    model = CostModel(LinearCost(4.0, 0.1))
    for _ in range(200):
        model.observe(100, 28.0, mixed=True)
    assert model.mixed == model.step
    assert model.mixed.ms_of_rows(100) == pytest.approx(28.0, rel=0.05)


def test_correction_can_be_off():
    model = CostModel(LinearCost(4.0, 0.1), corrects=False)
    for _ in range(100):
        model.observe(8, 100.0)
    assert model.step == LinearCost(4.0, 0.1)


def test_a_step_cost_that_was_handed_out_does_not_move():
    model = CostModel(LinearCost(4.0, 0.1))
    held = model.step
    for _ in range(64):
        model.observe(8, 100.0)
    assert held == LinearCost(4.0, 0.1)
    assert model.step != held
