"""Rows of logits after masks of bits, against plain Python; work in parts changes nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.ops import allowed
from slipstream.ops.allowed import strike
from slipstream.testing import packed


def case(seed: int, vocab: int, places: int, dtype: torch.dtype = torch.float32):
    """Five sequences, two without rows; some have masks. Returns arguments, and allowed tokens by (sequence, place)."""
    draw = np.random.default_rng(seed)
    widths = torch.from_numpy(draw.integers(0, places, 5))
    outputs = torch.where(torch.tensor([True, True, False, True, False]), widths + 1, 0)
    cu_outputs = torch.cat([torch.zeros(1, dtype=torch.int64), outputs.cumsum(0)])
    logits = torch.from_numpy(draw.normal(size=(int(cu_outputs[-1]), vocab))).to(dtype)
    sequences = [b for b in (3, 0, 1) if draw.random() < 0.7]
    may = draw.random((len(sequences), places, vocab)) < 0.6
    masks = np.array([[packed(row) for row in each] for each in may], np.int32).reshape(
        len(sequences), places, -(-vocab // 32)
    )
    arguments = {
        "masks": torch.from_numpy(masks), "sequences": torch.tensor(sequences, dtype=torch.int64),
        "cu_outputs": cu_outputs, "widths": widths,
    }  # fmt: skip
    return logits, arguments, {(b, j): may[m, j] for m, b in enumerate(sequences) for j in range(places)}


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1, 31, 32, 33, 70]), st.integers(1, 6), st.booleans())
def test_rows_equal_the_definition(seed, vocab, places, in_parts):
    logits, arguments, may = case(seed, vocab, places)
    before = logits.clone()
    with pytest.MonkeyPatch.context() as patch:
        if in_parts:
            patch.setattr(allowed, "_ELEMENTS_AT_ONCE", 2 * vocab)
        struck = strike(logits, **arguments)
    assert torch.equal(logits, before), "the rows are read by others too"
    for b in range(5):
        first, end = arguments["cu_outputs"][b : b + 2].tolist()
        for row in range(first, end):
            expected = logits[row].clone()
            if (b, row - first) in may:
                expected[torch.from_numpy(~may[b, row - first])] = -torch.inf
            assert torch.equal(struck[row], expected), (b, row - first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_stays(dtype):
    logits, arguments, _ = case(1, 33, 3, dtype)
    struck = strike(logits, **arguments)
    assert struck.dtype == dtype
    kept = struck.isfinite()
    assert torch.equal(struck[kept], logits[kept]) and not kept.all()


def test_what_is_not_finite_is_not_hidden():
    logits = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0] * 2])
    mask = torch.from_numpy(packed(np.array([False, False, False, False, True, True, True, True])))
    struck = strike(logits, mask.view(1, 1, 1), *(torch.tensor(x) for x in ([0], [0, 1], [0])))
    assert struck[0, :4].isnan().tolist() == [True, True, False, False]
    assert struck[0, 2:4].tolist() == [-torch.inf, -torch.inf]
    torch.testing.assert_close(struck[0, 4:], logits[0, 4:], rtol=0, atol=0, equal_nan=True)


def test_a_view_of_a_wider_table():
    """Padding of the vocabulary is cut off by a view."""
    logits, arguments, _ = case(2, 40, 4)
    wide = torch.full((len(logits), 64), 99.0)
    wide[:, :40] = logits
    struck = strike(wide[:, :40], **arguments)
    assert torch.equal(struck, strike(logits, **arguments))
    assert struck.stride(1) == 1
