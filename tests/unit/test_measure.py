"""What measurements share: the garbage collector is left as it was found, and each prompt has one answer."""

import gc

import pytest

from slipstream.config import SamplingParams
from slipstream.errors import ConfigError
from slipstream.lab.measure import former_objects_left_alone, request_params


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


def test_one_answer_to_a_prompt_is_measured() -> None:
    params = request_params(SamplingParams(seed=5), 2)
    assert [each.seed for each in params] == [5, 6]
    with pytest.raises(ConfigError, match="n is 3: what is measured is one answer"):
        request_params(SamplingParams(n=3), 2)
