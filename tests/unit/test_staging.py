"""Transfers: what is posted arrives at the same addresses, padded; what is exported keeps its value."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slipstream.device import staging
from slipstream.device.staging import Exporter, Mailbox, Uploader

CPU = torch.device("cpu")


def mailbox() -> Mailbox:
    return Mailbox({"slots": ((6,), np.int64), "emits": ((6,), np.bool_), "scale": ((2, 3), np.float32)}, CPU)


def test_a_post_fills_the_leading_places_and_pads_the_others() -> None:
    box = mailbox()
    box.post({"slots": np.array([3, 1], np.int32), "emits": np.array([True, True])}, {"slots": 9, "emits": 0})
    assert box.received["slots"].tolist() == [3, 1, 9, 9, 9, 9]
    assert box.received["emits"].tolist() == [True, True, False, False, False, False]
    box.post({"slots": np.array([5])}, {"slots": 9})
    assert box.received["slots"].tolist() == [5, 9, 9, 9, 9, 9]


def test_addresses_stay() -> None:
    box = mailbox()
    before = {name: tensor.data_ptr() for name, tensor in box.received.items()}
    for value in range(10):  # more posts than there are buffers
        box.post({"slots": np.full(6, value), "scale": np.full((2, 3), value / 2)}, {})
        assert box.received["slots"].tolist() == [value] * 6
        assert box.received["scale"].tolist() == [[value / 2] * 3] * 2
    assert before == {name: tensor.data_ptr() for name, tensor in box.received.items()}


def test_more_than_there_is_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        mailbox().post({"slots": np.arange(7)}, {})


def test_an_array_that_was_posted_before_comes_again() -> None:
    """In turn with others and with itself, so that every staged buffer has written it, or not."""
    box, old, new = mailbox(), np.array([1, 2, 3]), np.array([4, 5])
    for array in (old, old, new, old, old, old, old, new, new, old):
        box.post({"slots": array}, {"slots": 9})
        assert box.received["slots"].tolist() == [*array.tolist(), *[9] * (6 - len(array))]


def test_an_export_does_not_change_with_its_source() -> None:
    source, exporter = torch.arange(4), Exporter(CPU)
    first = exporter.start("result", source)
    source += 1
    exporter.fence("result")
    assert first.wait().tolist() == [0, 1, 2, 3]
    assert exporter.start("result", source).wait().tolist() == [1, 2, 3, 4]


def test_uploads_of_any_size_keep_shape_and_type() -> None:
    uploader = Uploader(CPU)
    for size in (1, 5000, 3):
        moved = uploader.upload({"a": np.arange(size, dtype=np.int32), "b": np.ones((size, 2), np.float32)})
        assert moved["a"].tolist() == list(range(size))
        assert moved["b"].shape == (size, 2)
        assert moved["b"].dtype == torch.float32


def test_a_fence_is_left_out_where_the_host_has_seen_the_copy_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up streams: each kind by its latest copy, and only a copy that was waited for counts."""
    waited: list[object] = []
    stream = SimpleNamespace(wait_event=waited.append)

    def pinned(like: torch.Tensor, room: int) -> SimpleNamespace:
        event = SimpleNamespace(record=lambda _: None, synchronize=lambda: None)
        view = torch.empty_like(like)
        return SimpleNamespace(event=event, view=view, arrived=False, fits=lambda _: True)

    monkeypatch.setattr(staging, "_Pinned", pinned)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    exporter = Exporter(torch.device("cpu"), num_buffers=2)
    exporter._stream, exporter._compute = SimpleNamespace(wait_event=lambda _: None), stream

    first, other = exporter.start("confidence", torch.ones(3)), exporter.start("result", torch.ones(3))
    first.wait()
    exporter.fence("confidence")
    assert not waited
    exporter.fence("result")
    assert len(waited) == 1
    second = exporter.start("confidence", torch.ones(3))
    first.wait()  # again: it says nothing of the second
    exporter.fence("confidence")
    assert len(waited) == 2
    second.wait()
    third = exporter.start("confidence", torch.ones(3))  # into the first one's memory
    exporter.fence("confidence")
    assert len(waited) == 3
    third.wait()
    other.wait()
    exporter.fence("confidence")
    exporter.fence("result")
    assert len(waited) == 3
