"""Runs from drafts and answers, by hand, and what a fixed width makes of them."""

import numpy as np
import pytest

from slipstream.errors import ConfigError
from slipstream.lab.dense import DenseTrace
from slipstream.lab.trace_dense import Drafts, runs_of, steps_at, summary, tokens_per_step
from slipstream.lab.trace_options import TraceOptions
from tests.unit.test_dense import trace


def ints(*rows: object) -> np.ndarray:
    return np.array(rows, np.int32)


def test_a_run_is_the_leading_drafts_that_came_true_within_the_answer() -> None:
    answer = ints(5, 6, 7, 8)
    drafts = ints([6, 7, 9], [7, 8, 9], [9, 9, 9], [9, 9, 9])
    assert runs_of(answer, drafts).tolist() == [2, 2, 0, 0]
    assert runs_of(answer, ints([9, 7, 8], [7, 8, 0], [8, 0, 0], [0, 0, 0])).tolist() == [0, 2, 1, 0]
    nothing = ints(*[[-1, -1, -1]] * 4)
    assert runs_of(answer, nothing).tolist() == [0, 0, 0, 0]


def test_an_answer_of_one_token_has_one_anchor_without_a_run() -> None:
    assert runs_of(ints(5), ints([5, 5])).tolist() == [0]


def test_drafts_of_a_preempted_request_are_put_together() -> None:
    before = Drafts(ints([4, 5], [-1, -1]), {"peak": np.array([[0.5, 0.5], [0, 0]], np.float16)})
    after = Drafts(ints([-1, -1], [6, 7]), {"peak": np.array([[0, 0], [0.25, 0.25]], np.float16)})
    both = before.with_those_of(after)
    assert both.token_ids_np.tolist() == [[4, 5], [6, 7]]
    assert both.signals["peak"].tolist() == [[0.5, 0.5], [0.25, 0.25]]


def whole() -> DenseTrace:
    """Runs 2 0 0 and 1 0: one step for each answer at full width, two and one at width 1, two and one without drafts."""
    return trace()


def test_steps_at_a_fixed_width() -> None:
    assert steps_at(whole(), 0).tolist() == [2, 1]
    assert steps_at(whole(), 1).tolist() == [1, 1]  # an accepted draft and the target's own token end the first
    assert steps_at(whole(), 2).tolist() == [1, 1]
    assert tokens_per_step(whole(), 0) == 1.0
    assert tokens_per_step(whole(), 2) == 1.5


def test_a_summary_has_a_row_for_each_set_and_one_for_all() -> None:
    rows = summary(whole(), [0, 2])
    assert [row["prompts"] for row in rows] == ["gsm8k", "mbpp", "all"]
    assert [row["answers"] for row in rows] == [1, 1, 2]
    assert rows[0]["mean_accepted_length"] == {"0": 1.0, "2": 2.0}
    assert summary(whole().answers(np.array([0])).of_sets(["gsm8k"]), [1])[0]["tokens"] == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft": "ngram"}, "ngram learns its confidence"),
        ({"out": "trace.json"}, "give it that suffix"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"requests": 0}, "requests is 0"),
        ({"speculative": {"acceptance": "rejection"}}, "coupled acceptance only"),
        ({"speculative": {"confidence_signal": "peak"}}, "no effect"),
        ({"prompts": ("a/x.jsonl", "b/x.jsonl")}, "each set once"),
    ],
)
def test_what_no_trace_can_be_made_of_is_refused(fields: dict, message: str) -> None:
    from pathlib import Path

    paths = {"out": Path(fields.pop("out", "t.npz")), "prompts": tuple(map(Path, fields.pop("prompts", ())))}
    with pytest.raises(ConfigError, match=message):
        TraceOptions(**paths, **fields)
