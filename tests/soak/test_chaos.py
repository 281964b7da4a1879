"""Some minutes of chaos, repeatable; `python -m tests.soak.chaos` goes on for as long as is wished."""

import pytest

from tests.soak import chaos
from tests.soak.faults import InjectedFault


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


def leaks_a_page(scheduler: object) -> None:
    scheduler.pages.take(1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", ["a page is lost", "a token is wrong"])
def test_what_is_wrong_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "a page is lost":
        monkeypatch.setattr("slipstream.scheduler.Scheduler._preempt", _preempt_and_lose(1))
    else:
        monkeypatch.setattr("slipstream.cache.shared.SharedPages.find", _find_more)
    with pytest.raises(AssertionError):
        chaos.run(chaos.tiny_setting(), 200, [("static", "coupled", True)])


def _preempt_and_lose(count: int):
    from slipstream.scheduler import Scheduler

    preempt = Scheduler._preempt

    def losing(self, request):
        slot = preempt(self, request)
        self.pages.take(count)
        return slot

    return losing


def _find_more(self, keys):
    """Pages for keys whether they are known or not."""
    return [self._page_of.get(key, next(iter(self._key_of), 2)) for key in keys] if self._key_of else []


def test_a_fault_is_raised_once() -> None:
    llm = chaos.tiny_setting().engine("static", "coupled", True)
    from tests.soak.faults import Faults

    faults = Faults(llm.engine)
    faults._armed = "verify"
    with pytest.raises(InjectedFault, match="injected into verify"):
        llm.generate([[3, 4, 5]], chaos.SamplingParams(max_tokens=3))
    assert len(llm.generate([[3, 4, 5]], chaos.SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
