"""What waits for the next step, and what does not."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.commit import Delta, Gains, all_joined, joined
from slipstream.config import SamplingParams
from slipstream.request import Request
from slipstream.serve.desk import MOST_STRETCH, Pace
from slipstream.serve.outbox import EACH_S, Outbox

REQUESTS = [Request(uid, (1,), SamplingParams(), seed=0, eos_token_ids=frozenset()) for uid in range(4)]


def step(decode: Mapping[int, tuple[int, ...]], prompts: Mapping[int, tuple[int, ...]] = {}, **ends: Any) -> Gains:
    """uid -> tokens that a step gave, by whether it decoded; u3="stop": request 3 ends."""
    rows = [*decode.items(), *prompts.items()]
    tokens = np.zeros((len(rows), 3), np.int32)
    for row, (_, some) in enumerate(rows):
        tokens[row, : len(some)] = some
    kept = np.array([len(some) for _, some in rows], np.int32)
    reasons: Any = {row: ends[f"u{uid}"] for row, (uid, _) in enumerate(rows) if f"u{uid}" in ends}
    accepted = np.maximum(kept - 1, 0)
    return Gains(
        [REQUESTS[uid] for uid, _ in rows], tokens, kept, accepted, accepted, reasons, {}, len(decode), 2
    )  # fmt: skip


def told(deltas: list[Delta]) -> list[tuple[int, tuple[int, ...]]]:
    return [(delta.request.uid, delta.token_ids) for delta in deltas]


def test_beginnings_and_ends_go_out_at_once() -> None:
    box = Outbox(0.02)
    box.put(step({}, {0: (5,), 1: ()}))  # a chunk of a prompt gains nothing
    assert told(box.take(1.0)) == [(0, (5,))]
    box.put(step({0: (6,)}, {1: (7,)}))
    assert told(box.take(1.001)) == [(1, (7,))]  # it begins
    box.put(step({0: (8, 9), 1: (10,)}))
    assert box.take(1.002) == []
    box.put(step({0: (11,), 1: (12,)}, u0="stop"))
    (ended,) = box.take(1.003)
    assert (ended.token_ids, ended.accepted) == ((6, 8, 9, 11), (False, True, False, False))
    assert ended.finish_reason == "stop"
    assert told(box.take(1.02)) == [(1, (10, 12))]
    assert box.take(1.05) == []


def test_everything_goes_where_no_step_may_follow_or_nothing_is_to_wait() -> None:
    box, eager = Outbox(10.0), Outbox(0.0)
    box.put(step({}, {0: (1,)}))
    box.take(0.0)
    box.put(step({0: (2,)}))
    assert box.take(0.1) == []
    assert told(box.take(0.1, all_of_it=True)) == [(0, (2,))]
    for _ in range(3):
        eager.put(step({0: (1,)}))
        assert told(eager.take(0.0)) == [(0, (1,))]


def test_the_interval_grows_with_the_requests() -> None:
    box = Outbox(EACH_S)
    for now, goes_out in ((0.0, True), (3.5 * EACH_S, False), (4.5 * EACH_S, True), (6 * EACH_S, False)):
        box.put(step(dict.fromkeys(range(4), (1,))))
        assert bool(box.take(now)) == goes_out


def test_events_get_rarer_where_the_loop_works_all_the_time() -> None:
    box, pace, now, busy = Outbox(1.0), Pace(), 0.0, 0.0
    found = []
    for share in [1.0] * 20 + [0.6] * 5 + [0.2] * 20:
        now, busy = now + 1.0, busy + share
        found.append(pace.stretch(now, busy))
    assert found[0] == 1.25 and found[19] == found[24] == MOST_STRETCH and found[-1] == 1.0
    box.stretch = 3.0
    box.put(step({0: (1,)}))
    box.take(0.0)
    box.put(step({0: (1,)}))
    assert not box.take(2.9) and box.due_s == 3.0
    assert box.take(3.0)


def test_every_step_by_itself_where_it_was_asked_for() -> None:
    box = Outbox(10.0)
    box.add(REQUESTS[:1], by_step=True)
    for number in range(3):
        box.put(step({0: (number, number), 1: (number,)}))
    deltas = box.take(0.0)
    assert told(deltas) == [(0, (0, 0)), (0, (1, 1)), (0, (2, 2)), (1, (0, 1, 2))]
    assert [delta.drafted for delta in deltas[:3]] == [2, 2, 2]
    box.put(step({0: (3,)}, u0="length"))
    box.take(0.1)
    assert not box._apart


def test_what_nobody_wants_is_forgotten() -> None:
    box = Outbox(10.0)
    box.add(REQUESTS, by_step=True)
    box.put(step({0: (1,), 1: (1,)}))
    box.take(0.0)
    box.put(step({0: (2,), 1: (2,)}))
    box.forget([0, 3])
    assert told(box.take(0.0, all_of_it=True)) == [(1, (2,))]
    assert box._apart.keys() == {1, 2}
    box.put(step({1: (2,)}))
    box.clear()
    assert box.take(20.0) == []


def test_of_many_steps_as_of_each() -> None:
    first = step({0: (1, 2), 1: (3,)}, {2: (4,)})
    wide = step({2: (5,), 0: ()}, u2="length")
    object.__setattr__(wide, "token_ids_np", np.pad(wide.token_ids_np, ((0, 0), (0, 2))))
    last = step({0: (6, 7, 8)}, {3: ()}, u3="error")
    found = all_joined([first, wide, last], {1: 1})
    assert found == [joined([(first, 0), (wide, 1), (last, 0)]), joined([(first, 2), (wide, 0)]), joined([(last, 1)])]
    assert [(delta.request.uid, delta.token_ids, delta.finish_reason) for delta in found] == [
        (0, (1, 2, 6, 7, 8), None), (2, (4, 5), "length"), (3, (), "error"),
    ]  # fmt: skip
    assert [delta.accepted for delta in found] == [(True, False, True, True, False), (False, False), ()]
    assert [(delta.width, delta.drafted) for delta in found] == [(2, 2), (0, 2), (0, 0)]
    assert all_joined([first], {0: 1, 1: 1, 2: 1}) == []


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), unique=True), st.booleans(), st.integers(0, 9), st.booleans()),
        max_size=30,
    )
)
def test_nothing_is_lost_or_turned_round(steps: list[tuple[list[int], bool, int, bool]]) -> None:
    box, wanted, out, now = Outbox(0.02), {uid: [] for uid in range(4)}, [], 0.0
    for number, (uids, is_prompt, ms, flush) in enumerate(steps):
        now += ms / 1000
        rows = {uid: (number,) * (1 + uid % 2) for uid in uids}
        box.put(step({}, rows) if is_prompt else step(rows))
        for uid, tokens in rows.items():
            wanted[uid] += tokens
        out += box.take(now, all_of_it=flush)
    out += box.take(now, all_of_it=True)
    for uid, tokens in wanted.items():
        assert [token for delta in out if delta.request.uid == uid for token in delta.token_ids] == tokens


def test_beginnings_and_ends_are_first_of_all() -> None:
    box = Outbox(0.0)
    box.put(step({0: (1,), 1: (2,), 2: (3,)}, u2="stop"))
    assert told(box.take(0.0)) == [(2, (3,)), (0, (1,)), (1, (2,))]
