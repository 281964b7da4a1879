"""Reports of log-probabilities: against a look at every token, with ties, at any size, and within a bounded workspace."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.logprobs import NUM_REPORT_COLUMNS, RANK, VALUE, entries
from slipstream.ops import logprobs
from slipstream.ops.logprobs import report


def plain_report(row: list[float], token: int, num_top: int) -> tuple[int, float, list[tuple[int, float]]]:
    """(rank, value, top) in float64."""
    total = max(row) + math.log(sum(math.exp(x - max(row)) for x in row))
    order = sorted(range(len(row)), key=lambda v: (-row[v], v))
    return order.index(token) + 1, row[token] - total, [(v, row[v] - total) for v in order[:num_top]]


def check(logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int, found: Tensor) -> None:
    assert found.dtype == torch.int32
    most = min(num_top, logits.shape[1])
    assert found.shape == (len(rows), NUM_REPORT_COLUMNS + 2 * most)
    read = entries(iter(token_ids.tolist()), found.cpu().numpy(), num_top)
    for row, token, entry in zip(rows.tolist(), token_ids.tolist(), read, strict=True):
        rank, value, top = plain_report(logits[row].double().tolist(), token, num_top)
        assert (entry.token_id, entry.rank) == (token, rank)
        assert [at for at, _ in entry.top] == [at for at, _ in top]
        for mine, wanted in zip(
            [entry.logprob, *(x for _, x in entry.top)], [value, *(x for _, x in top)], strict=True
        ):
            assert mine == pytest.approx(wanted, abs=2e-6)


def case(
    vocab_size: int, num_rows: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of which many are equal, rows in any order and more than once, tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_rows, vocab_size + 3, generator=generator) * 4).round(decimals=1).to(dtype).to(device)
    logits[0, : vocab_size // 2] = -0.0
    logits[0, vocab_size // 2 :] = 0.0
    rows = torch.randint(0, num_rows, (2 * num_rows,), generator=generator).to(device)
    token_ids = torch.randint(0, vocab_size, (2 * num_rows,), generator=generator).to(device)
    rows[0] = 0
    return logits[:, :vocab_size], rows, token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("vocab_size", [2, 17, 300])
def test_against_a_look_at_every_token(vocab_size: int, num_top: int, dtype: torch.dtype) -> None:
    logits, rows, token_ids = case(vocab_size, 6, dtype)
    check(logits, rows, token_ids, num_top, report(logits, rows, token_ids, num_top))


def test_nothing_wanted_is_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert report(torch.zeros(3, 9), none, none, 4).shape == (0, NUM_REPORT_COLUMNS + 8)


def test_values_that_are_far_apart() -> None:
    """A probability that underflows has a logarithm all the same; the logits stay as they are."""
    logits = torch.tensor([[500.0, -500.0, 0.0], [-3e38, 0.0, -3e38]])
    kept = logits.clone()
    found = report(logits, torch.tensor([0, 1]), torch.tensor([1, 1]), 3)
    assert found[:, VALUE].contiguous().view(torch.float32).tolist() == [-1000.0, 0.0]
    assert found[:, RANK].tolist() == [3, 1]
    assert torch.equal(logits, kept)


def test_a_row_that_is_not_finite_disturbs_nobody() -> None:
    logits, _, _ = case(40, 4, torch.float32)
    whole, each = logits.clone(), torch.arange(4)
    logits[2, 7], logits[3, 3] = torch.nan, torch.inf
    found, wanted = (report(x, each, each, 3) for x in (logits, whole))
    assert torch.equal(found[:2], wanted[:2])
    ids = found[2:, NUM_REPORT_COLUMNS : NUM_REPORT_COLUMNS + 3]
    assert ((ids >= 0) & (ids < 40)).all()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [x for x in (result if isinstance(result, tuple | list) else [result]) if isinstance(x, Tensor)]
        self.num_elements = max([self.num_elements, *(x.numel() for x in made)])
        return result


def test_fault_23_the_workspace_does_not_grow_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of all rows, however many: 200 rows of 3,000 tokens are read four at a time."""
    monkeypatch.setattr(logprobs, "ELEMENTS_AT_ONCE", 4 * 3000)
    logits, rows, token_ids = case(3000, 100, torch.float32)
    with Largest() as largest:
        found = report(logits, rows, token_ids, 20)
    assert 4 * 3000 <= largest.num_elements <= max(4 * 3000, found.numel())
    monkeypatch.undo()
    assert torch.equal(found, report(logits, rows, token_ids, 20))
    assert logprobs.ELEMENTS_AT_ONCE * 8 <= 1 << 23  # bytes of keys
