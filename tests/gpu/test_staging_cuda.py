"""Copies down beside the compute stream: they neither overtake who reads what stands there, nor wait for what does not."""

import numpy as np
import pytest
import torch

from slipstream.device.staging import Mailbox

pytestmark = pytest.mark.gpu

SOME_MS = 4_000_000  # cycles


def test_a_copy_beside_overtakes_no_reader_and_is_read_by_who_follows() -> None:
    """The host is many steps ahead; each step reads what was posted for it."""
    box, seen = Mailbox({"widths": ((4,), np.int64)}, torch.device("cuda"), beside=True), []
    for value in range(10):
        box.free()
        torch.cuda._sleep(SOME_MS)  # a draft
        box.post({"widths": np.full(4, value)}, {})
        torch.cuda._sleep(SOME_MS)
        seen.append(box.received["widths"].clone())
    assert torch.stack(seen).tolist() == [[value] * 4 for value in range(10)]


def test_a_copy_beside_does_not_wait_for_the_draft() -> None:
    box = Mailbox({"widths": ((4,), np.int64)}, torch.device("cuda"), beside=True)
    box.free()
    torch.cuda._sleep(100 * SOME_MS)
    box.post({"widths": np.arange(4)}, {})
    assert box._beside is not None
    box._beside.synchronize()
    assert not torch.cuda.current_stream().query(), "the draft is over"
    assert box.received["widths"].tolist() == [0, 1, 2, 3]
