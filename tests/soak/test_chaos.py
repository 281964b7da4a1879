"""Some minutes of chaos, repeatable; `python -m tests.soak.chaos` goes on for as long as is wished."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from slipstream.cache.shared import SharedPages
from slipstream.config import SamplingParams
from slipstream.request import Request
from slipstream.scheduler import Scheduler
from tests.soak import chaos
from tests.soak.faults import Faults, InjectedFault


def test_all_that_can_happen_happens() -> None:
    """A short one: nothing is wrong, and no kind of trouble was left out."""
    found = chaos.run(chaos.tiny_setting(fault_rate=0.03), 120, [("lag", "coupled", True)])
    assert found["requests"] == 120 and found["equal"] > 50
    for name in ("refused", "aborted", "failed", "preemptions", "cached_tokens", "fault in no memory"):
        assert found[name] > 0, name
    assert 0 < found["accepted"] < found["verified"] < found["drafted"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_chaos() -> None:
    found = chaos.run(chaos.tiny_setting(seed=1), 3000)
    assert found["requests"] == 3000
    assert found["equal"] > 2000
    first, *_, last = found["resident_mb"]
    assert last - first < 40, found["resident_mb"]  # of eight engines in turn


_preempt = Scheduler._preempt


def preempts_and_loses_a_page(self: Scheduler, request: Request) -> int:
    slot = _preempt(self, request)
    self.pages.take(1)
    return slot


def finds_more(self: SharedPages, keys: Sequence[bytes]) -> list[int]:
    """Pages for keys whether they are known or not."""
    return [self._page_of.get(key, next(iter(self._key_of), 2)) for key in keys] if self._key_of else []


@pytest.mark.parametrize(
    ("part", "name", "wrong"),
    [(Scheduler, "_preempt", preempts_and_loses_a_page), (SharedPages, "find", finds_more)],
)
def test_what_is_wrong_is_noticed(
    part: type, name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is lost, and KV of other tokens."""
    monkeypatch.setattr(part, name, wrong)
    with pytest.raises(AssertionError):
        chaos.run(chaos.tiny_setting(), 200, [("static", "coupled", True)])


def test_a_fault_is_raised_once() -> None:
    llm = chaos.tiny_setting().engine("static", "coupled", True)
    faults = Faults(llm.engine)
    faults._armed = "verify"
    with pytest.raises(InjectedFault, match="injected into verify"):
        llm.generate([[3, 4, 5]], SamplingParams(max_tokens=3))
    assert len(llm.generate([[3, 4, 5]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
