"""Figures of `evaluate`, each from a handful of steps whose answer can be counted by hand."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from slipstream.config import SamplingParams
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.lab.evaluate_options import EvaluateOptions
from slipstream.lab.scores import Cell, Steps, acceptance_at, counted, foretold, score_row, scores_tables
from slipstream.lab.waves import Answer, Wave
from slipstream.metrics import SpecCounters


def answer(ids: tuple[int, ...], *runs: int, width: int = 4) -> Answer:
    """An answer whose decode steps accepted so many of `width` drafts."""
    spec = SpecCounters(mode="static")
    for run in runs:
        spec.count_step(width, width, run, run + 1)
    return Answer(token_ids=ids, spec=spec, ttft_ms=1.0, tpot_ms=1.0)


def steps_of(widths: list[int], accepted: list[int], num_drafts: int = 3, lag: list[bool] | None = None) -> Steps:
    """Steps whose survival was foretold as 1/2 everywhere, and one step later as 1."""
    widths_np, accepted_np = np.array(widths, dtype=np.int64), np.array(accepted, dtype=np.int64)
    position = np.arange(num_drafts)
    half = np.full((len(widths), num_drafts), 0.5)
    return Steps(
        signal="head",
        widths_np=widths_np,
        accepted_np=accepted_np,
        survived_np=position < accepted_np[:, None],
        known_np=position < widths_np[:, None],
        survival_np={"raw": half, "file": half, "fresh": half, "lagged": 2 * half},
        lag_known_np=np.array(lag or [True] * len(widths), dtype=np.bool_),
    )


def wave(wall_s: float, *answers: Answer) -> Wave:
    return Wave(wall_s=wall_s, num_steps=1, answers=answers)


def test_acceptance_at_a_position_is_of_the_steps_that_reached_it() -> None:
    """Not verified is not rejected: the step of width 1 and the answer that ended after two say nothing of position 3."""
    assert acceptance_at(steps_of([3, 3, 1, 2, 3], [3, 0, 1, 2, 2])) == [4 / 5, 1.0, 1 / 2]
    assert acceptance_at(steps_of([3], [0])) == [0.0, None, None]
    assert acceptance_at(steps_of([], [])) == [None, None, None]


def test_lengths_come_with_and_without_looping_answers() -> None:
    figures = counted([answer((7,) * 40, 4, 4), answer(tuple(range(40)), 1, 0, 1)])
    assert figures["mean_accepted_length"] == (5 + 5 + 2 + 1 + 2) / 5
    assert figures["mean_accepted_length_no_loops"] == (2 + 1 + 2) / 3
    assert (figures["requests"], figures["looping_answers"], figures["output_tokens"]) == (2, 1, 80)
    assert counted([answer((7,) * 40, 4)])["mean_accepted_length_no_loops"] is None


def test_foretold_survival_is_judged_where_the_outcome_is_known() -> None:
    """Four of seven known survivals came true; of the one row with a step before it, two of three."""
    figures = foretold(steps_of([3, 1, 3], [2, 1, 1], lag=[True, False, False]))
    assert figures["ece_fresh"] == pytest.approx(abs(4 / 7 - 0.5))
    assert figures["ece_lagged"] == pytest.approx(1 - 2 / 3)
    assert figures["calibration"]["fresh"]["num"] == 7
    assert foretold(steps_of([], []))["ece_fresh"] is None


def test_sets_taken_together_are_counted_as_one() -> None:
    """Every figure of the joined cell is that of the concatenated steps, answers and times."""
    parts = [
        Cell(answers=(answer((1, 2, 3), 2),), steps=steps_of([3, 3], [2, 0]), waves=(wave(1.0, answer((1, 2, 3), 2)),)),
        Cell(answers=(answer((4,), 0),), steps=steps_of([3], [3]), waves=(wave(3.0, answer((4,), 0)),)),
    ]
    whole = Cell.join(parts)
    assert whole.steps is not None
    assert foretold(whole.steps) == foretold(steps_of([3, 3, 3], [2, 0, 3]))
    assert counted(whole.answers)["steps"] == 2
    assert [(each.wall_s, each.output_tokens, each.tok_per_s) for each in whole.waves] == [(4.0, 4, 1.0)]


def row(cell: Cell, plain: Cell | None, same_text: bool = True) -> dict[str, Any]:
    return score_row(
        prompts="a", temperature=0.0, drafter="x", num_drafts=3, cell=cell, plain=plain, same_text=same_text
    )


def test_speed_is_the_median_over_waves_beside_plain_decoding() -> None:
    ours, theirs = answer((1, 2, 3, 4), 3), answer((1, 2, 3, 5), 0)
    cell = Cell(answers=(ours,), steps=steps_of([3], [3]), waves=tuple(wave(t, ours, ours) for t in (1.0, 2.0, 4.0)))
    plain = Cell(answers=(theirs,), steps=None, waves=(wave(4.0, ours, theirs),))
    timed = row(cell, plain)
    assert (timed["tok_per_s"], timed["ratio_to_off"], timed["same_as_off"]) == (4.0, 2.0, 1)
    assert row(cell, plain, same_text=False)["same_as_off"] is None
    untimed = row(Cell(answers=(ours,), steps=steps_of([3], [3]), waves=()), None)
    assert (untimed["tok_per_s"], untimed["ratio_to_off"], untimed["same_as_off"]) == (None, None, None)


def test_tables_show_every_row() -> None:
    """Of drafters that draft to different lengths, too; plain decoding has no positions."""
    plain = Cell(answers=(answer((1,), 0),), steps=None, waves=(wave(1.0, answer((1,), 0)),))
    rows = [row(plain, plain), *(row(Cell(answers=(answer((1,), 0),), steps=steps_of([s], [s], s), waves=plain.waves),
                                     plain) for s in (3, 9))]  # fmt: skip
    gains, positions = scores_tables(rows, "t")
    assert (gains.row_count, positions.row_count, len(positions.columns)) == (3, 2, 3 + 9 + 2)
    out = io.StringIO()
    Console(file=out, width=120).print(gains)
    assert "1/1" in out.getvalue()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"limit": 0}, "limit is 0"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"waves": -1}, "waves is -1"),
        ({"baselines": ("eagle",)}, "baselines holds 'eagle'"),
        ({"temperatures": ()}, "temperature names no value"),
        ({"temperatures": (0.0, 0)}, "each once"),
        ({"temperatures": (-1.0,)}, "temperature is -1"),
        ({"prompts": (Path("a/x.jsonl"), Path("b/x.jsonl"))}, "prompts is x, x"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"speculative": {"acceptance": "maybe"}}, "acceptance is 'maybe'"),
        ({"speculative": {"confidence_signal": "mood"}}, "confidence_signal is 'mood'"),
        ({"speculative": {"cost_model": "none"}}, "cost_model: no effect"),
        ({"draft": "ngram", "speculative": {"confidence_signal": "peak"}}, "ngram drafts without any"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SlipstreamError, match=says) as refused:
        EvaluateOptions(**fields)
    assert refused.value.exit_code == ConfigError.exit_code


def test_baselines_take_turns_with_the_drafter() -> None:
    """Plain decoding first; without timed waves there is nothing to compare speeds with, and ngram is named once."""
    options = EvaluateOptions(draft="d", sampling=SamplingParams(max_tokens=8))
    assert (options.timed, options.drafters) == (("off", "ngram", "d"), ("ngram", "d"))
    assert EvaluateOptions(draft="d", waves=0).timed == ()
    assert EvaluateOptions(draft="d", baselines=()).timed == ("d",)
    assert EvaluateOptions(draft="ngram").drafters == ("ngram",)
    shared = EvaluateOptions(draft="d", speculative={"acceptance": "rejection", "draft_sampling": "sample"})
    assert shared.config_of("ngram").acceptance == "rejection"
    assert shared.config_of("ngram").draft_sampling == "auto"
    assert (shared.same_text(0.0), shared.same_text(1.0)) == (True, False)
