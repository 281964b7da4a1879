"""Timing leaves the garbage collector as it was found."""

import gc

import pytest

from slipstream.lab.measure import former_objects_left_alone


def test_objects_are_frozen_for_the_time_of_a_wave() -> None:
    with former_objects_left_alone():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    with pytest.raises(ValueError, match="wave"), former_objects_left_alone():
        raise ValueError("a wave")
    assert gc.get_freeze_count() == 0


def test_what_the_caller_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with former_objects_left_alone():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
