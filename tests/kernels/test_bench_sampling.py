"""bench/sampling.py calls kernels as they are; times and graphs need a GPU."""

from collections.abc import Callable

import pytest

from bench import sampling

# The interpreter is NumPy, which warns of what padding rows do.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.slow
def test_every_call_can_be_made(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def called(calls: list[Callable[[], None]]) -> float:
        calls[0]()
        return 1.0

    monkeypatch.setattr(sampling, "DEVICE", device)
    monkeypatch.setattr(sampling, "L2_BYTES", 0)
    monkeypatch.setattr(sampling, "microseconds", called)
    rows = sampling.measure((sampling.Shape("toy", vocab=40, draft_vocab=20, rank=4, hidden=16),), (2,))
    assert [row.num_sequences for row in rows] == [2] * 17
    assert {row.kernel for row in rows} >= {
        "reject w=7 T=1",
        "draft markov head T=1",
        "draft markov T=1",
        "draft markov reject T=1",
        "accept w=0 T=0",
        "cut w=7 both",
    }
