"""The store of lagged confidence: who may see which row."""

import numpy as np
import pytest

from slipstream.decide.confidence import ConfidenceStore
from slipstream.plan import StepPlan

S = 4


def plan(step, slots, *, generations=None, uids=None, decode_steps=0, num_decode=None):
    count = len(slots)
    array = lambda value, dtype: np.broadcast_to(np.asarray(value, dtype=dtype), (count,)).copy()  # noqa: E731
    return StepPlan(
        step=step,
        num_decode=count if num_decode is None else num_decode,
        draft_length=S,
        slots_np=array(slots, np.int32),
        generations_np=array(1 if generations is None else generations, np.int32),
        uids_np=array(slots if uids is None else uids, np.int64),
        decode_steps_np=array(decode_steps, np.int32),
        num_given_np=array(1, np.int32),
        emits_np=array(True, np.bool_),
        caps_np=array(S, np.int32),
        context_np=array(10, np.int32),
        context_upper_bound_np=array(10, np.int32),
        sampled_np=array(False, np.bool_),
        teaches_np=array(True, np.bool_),
        admissions=(),
        page_writes_np=np.zeros((0, 3), np.int32),
        any_sampled=False,
        any_top_k=False,
        any_top_p=False,
    )


def values(plan, value, length=S):
    return np.broadcast_to(np.asarray(value, dtype=np.float64)[..., None], (plan.num_decode, length))


def test_a_row_is_known_to_the_next_decode_step_only():
    store = ConfidenceStore(S)
    first = plan(0, [3, 5], decode_steps=[0, 7])
    assert not store.lookup(first).known_np.any()
    store.put(first, values(first, [0.2, 0.9]))
    after = store.lookup(plan(1, [5, 3], decode_steps=[8, 1]))
    assert after.known_np.tolist() == [True, True]
    assert after.lengths_np.tolist() == [S, S]
    assert after.same_length is None  # another order of rows: gathered by slot
    assert store.lookup(plan(1, [3, 5], decode_steps=[1, 8])).same_length is None
    np.testing.assert_array_equal(after.values_np[:, 0], np.float64([0.9, 0.2]))
    assert not store.lookup(plan(2, [3, 5], decode_steps=[2, 9])).known_np.any()
    assert not store.lookup(first).known_np.any()


def test_own_sees_what_the_same_step_wrote():
    store = ConfidenceStore(S)
    now = plan(0, [0, 1], decode_steps=4)
    assert not store.own(now).known_np.any()
    store.put(now, values(now, 0.5))
    assert store.own(now).known_np.all()
    assert not store.lookup(now).known_np.any()


@pytest.mark.parametrize("length", [0, None])
def test_a_step_without_a_draft_invalidates(length):
    """Its decode step passed and nothing was written, or a report of no drafts was."""
    store = ConfidenceStore(S)
    first = plan(0, [0])
    store.put(first, values(first, 0.5))
    if length is not None:
        store.put(plan(1, [0], decode_steps=1), values(first, 0.5, length=0))
    assert not store.lookup(plan(2, [0], decode_steps=2)).known_np.any()


def test_a_skipped_request_keeps_its_row():
    store = ConfidenceStore(S)
    both = plan(0, [0, 1])
    store.put(both, values(both, [0.3, 0.6]))
    for step in (1, 2):
        alone = plan(step, [0], decode_steps=step)
        store.put(alone, values(alone, 0.4))
    back = store.lookup(plan(3, [1], decode_steps=1))
    assert back.known_np.tolist() == [True]
    assert back.values_np[0, 0] == np.float64(0.6)


def test_prefill_rows_of_the_plan_touch_nothing():
    store = ConfidenceStore(S)
    first = plan(0, [0])
    store.put(first, values(first, 0.3))
    mixed = plan(1, [0, 1], decode_steps=[1, 0], num_decode=1)
    found = store.lookup(mixed)
    assert found.known_np.tolist() == [True]
    assert found.values_np.shape == (1, S)
    store.put(mixed, values(mixed, 0.4))
    assert not store.lookup(plan(2, [1])).known_np.any()


def test_fault_1_late_value_of_a_former_owner():
    """A ends with .01; B has the slot when A's last copy comes in, before or after B's own first one."""
    store = ConfidenceStore(S)
    of_a = plan(10, [0], generations=[1], uids=[100], decode_steps=[9])
    store.put(of_a, values(of_a, 0.01))
    for_b = plan(11, [0], generations=[2], uids=[200], decode_steps=[0])
    assert not store.lookup(for_b).known_np.any()
    same_age = plan(11, [0], generations=[2], uids=[200], decode_steps=[10])
    assert not store.lookup(same_age).known_np.any()
    store.put(for_b, values(for_b, 0.8))
    late = plan(11, [0], generations=[1], uids=[100], decode_steps=[10])
    store.put(late, values(late, 0.01))
    found = store.lookup(plan(12, [0], generations=[2], uids=[200], decode_steps=[1]))
    assert found.known_np.tolist() == [True]
    assert found.values_np[0, 0] == np.float64(0.8)


def test_siblings_and_resumed_requests_are_told_apart():
    store = ConfidenceStore(S)
    first = plan(0, [0, 1], uids=[7, 8])
    store.put(first, values(first, 0.5))
    assert not store.lookup(plan(1, [0], uids=[8], decode_steps=1)).known_np.any()  # another request, same generation
    resumed = plan(1, [0], generations=[2], uids=[7], decode_steps=1)  # preempted and let in again, into the same slot
    assert not store.lookup(resumed).known_np.any()


def test_a_short_draft_remembers_its_length():
    store = ConfidenceStore(S)
    first = plan(0, [0])
    store.put(first, values(first, 0.9))
    second = plan(1, [0], decode_steps=1)
    store.put(second, values(second, 0.5, length=2))
    found = store.lookup(plan(2, [0], decode_steps=2))
    assert found.lengths_np.tolist() == [2]
    assert found.same_length == 2
    assert found.values_np[0, :2].tolist() == [0.5, 0.5]


def test_the_store_grows_with_its_slots():
    store = ConfidenceStore(S)
    far = plan(0, [300])
    store.put(far, values(far, 0.5))
    assert store.lookup(plan(1, [300], decode_steps=1)).known_np.all()
    assert not store.lookup(plan(1, [999, 2], decode_steps=1)).known_np.any()


def test_an_empty_step():
    store = ConfidenceStore(S)
    empty = plan(0, [4], num_decode=0)
    store.put(empty, values(empty, 0.5))
    assert store.lookup(empty).values_np.shape == (0, S)


def test_what_was_looked_up_does_not_change_later():
    store = ConfidenceStore(S)
    first = plan(0, [0])
    store.put(first, values(first, 0.5))
    second = plan(1, [0], decode_steps=1)
    found = store.lookup(second)
    store.put(second, values(second, 0.9))
    assert found.values_np[0, 0] == np.float64(0.5)
