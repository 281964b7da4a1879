"""Reports by kernels: the same ids and ranks as the reference, values to rounding, over tiles, strides and ties."""

import pytest
import torch

from slipstream.kernels import logprobs as kernels
from slipstream.logprobs import NUM_REPORT_COLUMNS, VALUE, num_columns
from slipstream.ops import logprobs as ops
from tests.ops.test_logprobs import case, check

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("vocab_size", [2, 17, 300])
def test_against_a_look_at_every_token(device: str, dtype: torch.dtype, vocab_size: int, num_top: int) -> None:
    logits, rows, token_ids = case(vocab_size, 4, dtype, device=device)
    check(logits, rows, token_ids, num_top, kernels.report(logits, rows, token_ids, num_top))


@pytest.mark.parametrize("num_top", [0, 3, 20])
@pytest.mark.parametrize("vocab_size", [64, 500, 1000])
def test_over_tiles(
    device: str, dtype: torch.dtype, vocab_size: int, num_top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small tiles on the CPU; on a GPU those that serve."""
    if device == "cpu":
        monkeypatch.setattr(kernels, "BLOCK", 64)
    else:
        vocab_size *= 50
    monkeypatch.setattr(kernels, "MAX_ROWS", 3)
    logits, rows, token_ids = case(vocab_size, 4, dtype, device=device)
    found, wanted = (report(logits, rows, token_ids, num_top) for report in (kernels.report, ops.report))
    most = min(num_top, vocab_size)
    values = [VALUE, *range(NUM_REPORT_COLUMNS + most, NUM_REPORT_COLUMNS + 2 * most)]
    exact = [column for column in range(wanted.shape[1]) if column not in values]
    assert torch.equal(found[:, exact], wanted[:, exact])
    floats = [report[:, values].contiguous().view(torch.float32) for report in (found, wanted)]
    torch.testing.assert_close(*floats, atol=1e-5, rtol=1e-6)


def test_a_row_that_is_not_finite_disturbs_nobody(device: str) -> None:
    logits, _, _ = case(40, 4, torch.float32, device=device)
    whole, each = logits.clone(), torch.arange(4, device=device)
    logits[2, 7], logits[3, 3] = torch.nan, torch.inf
    found, wanted = (kernels.report(x, each, each, 3) for x in (logits, whole))
    assert torch.equal(found[:2], wanted[:2])


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("at_once", [5, 4096])
def test_what_was_emitted_is_found_on_the_device(
    device: str, dtype: torch.dtype, num_top: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of every width; who asks not in order of place; padding behind; nothing else is written."""
    monkeypatch.setattr(kernels, "MAX_ROWS", at_once)
    widths, accepted, turns = (2, 0, 3, 1, 0), (2, 0, 1, 1, 0), (1, -1, 0, 2, -1)  # the last one is padding
    logits, rows, _ = case(40, 10, dtype, device=device)
    logits = logits[: len(rows)]
    starts = torch.tensor([0, 3, 4, 8, 10, 10])
    result = torch.randint(0, 40, (5, 3 + 4), generator=torch.Generator().manual_seed(1))
    result[:, 0], result[:, 1] = torch.tensor(widths), torch.tensor(accepted)
    result[2, 4] = 99  # of a row that is invalid: any id may stand there
    columns = num_columns(num_top, 40)
    out = torch.full((3 * 4 * columns + 9,), -7, dtype=torch.int32, device=device)
    kernels.report_outputs(
        logits, result.int().to(device), cu_outputs=starts.to(device), turns=torch.tensor(turns).to(device),
        num_top=torch.tensor([num_top]).to(device), out=out,
    )  # fmt: skip
    assert (out[3 * 4 * columns :] == -7).all()
    found = out[: 3 * 4 * columns].view(3, 4, columns)
    for sequence, turn in enumerate(turns):
        if turn < 0:
            continue
        count = accepted[sequence] + 1
        at = torch.arange(count, device=device) + int(starts[sequence])
        token_ids = result[sequence, 3 : 3 + count].clamp(max=39).to(device)
        assert torch.equal(found[turn, :count], kernels.report(logits, at, token_ids, num_top))
        assert (found[turn, count:] == -7).all()
