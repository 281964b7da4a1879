"""What goes through the socket comes out as it was, and a sender never waits."""

import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

from slipstream.commit import Gains
from slipstream.config import SamplingParams
from slipstream.request import Request
from slipstream.serve.driver import Steps
from slipstream.serve.wire import Asked, Channel, Packer, Unpacker


@pytest.fixture
def ends() -> Any:
    near, far = (Channel(end) for end in socket.socketpair())
    yield near, far
    near.close()
    far.close()


def requests(uids: range, **params: Any) -> dict[int, Request]:
    return {uid: Request(uid, (1, 2, 3), SamplingParams(**params), seed=0) for uid in uids}


def a_step(some: list[Request], number: int, width: int, num_decode: int, **rest: Any) -> Gains:
    count = len(some)
    tokens = np.arange(count * (width + 1), dtype=np.int32).reshape(count, -1) + 1000 * number
    kept = np.arange(count, dtype=np.int32) % (width + 2)
    return Gains(
        some, tokens, kept, np.maximum(kept - 1, 0), np.full(count, width, np.int32), rest.get("reasons", {}),
        rest.get("reports", {}), num_decode, width,
    )  # fmt: skip


def test_steps_are_the_same_at_the_other_end() -> None:
    there, here = requests(range(1, 6), logprobs=1), requests(range(1, 6), logprobs=1)
    packer, unpacker, some = Packer(), Unpacker(here), list(there.values())
    report = np.array([[1, 2, 3, 4]], np.int32)
    for uid, request in there.items():
        request.num_cached = 8 * uid
    there[2].stop_reason, there[4].error = "end", "why"
    there[5].prompt_logbook.add(report)
    steps = [
        a_step(some, 0, 3, 5, reports={1: report}), a_step(some, 1, 3, 4),
        a_step(some[1:], 2, 0, 2, reasons={0: "stop", 2: "error"}), a_step(some[:1], 3, 7, 1),
    ]  # fmt: skip
    heads, data, is_last = packer.pack(Steps(steps, True))
    assert [head.uids is None for head in heads] == [False, True, False, False]
    found = unpacker.unpack(heads, data, is_last)
    assert found.is_last
    for one, other in zip(steps, found.gains, strict=True):
        assert [request.uid for request in one.requests] == [request.uid for request in other.requests]
        for name in ("token_ids_np", "kept_np", "num_accepted_np", "widths_np"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        assert (one.num_decode, one.drafted, one.finish_reasons) == (
            other.num_decode, other.drafted, other.finish_reasons,
        )  # fmt: skip
    assert all(request is here[request.uid] for gains in found.gains for request in gains.requests)
    assert found.gains[0][1].logprobs == steps[0][1].logprobs
    assert (here[2].finish_reason, here[2].stop_reason) == ("stop", "end")
    assert (here[4].finish_reason, here[4].error) == ("error", "why")
    assert (here[1].num_cached, here[5].num_cached, here[5].prompt_logbook.num_tokens) == (None, 40, 1)


def test_tokens_of_those_who_have_left_are_nobodys() -> None:
    there, here = requests(range(1, 4)), requests(range(1, 4))
    del here[2]
    steps = Steps([a_step(list(there.values()), 0, 1, 0, reasons={1: "stop"})], False)
    (gains,) = Unpacker(here).unpack(*Packer().pack(steps)).gains
    assert [request.uid for request in gains.requests] == [1, 0, 3]
    assert gains.requests[1].finish_reason is None


def test_requests() -> None:
    request = Request(7, tuple(range(300)), SamplingParams(stop=("a",), n=2), seed=2**64 - 1, index=1)
    asked = Asked.of(request)
    assert (asked.uid, asked.prompt_ids, asked.params) == (7, request.prompt_ids, request.params)
    assert (asked.seed, asked.sibling) == (2**64 - 1, 1)


def test_a_sender_does_not_wait_and_nothing_is_lost(ends: tuple[Channel, Channel]) -> None:
    near, far = ends
    sent = [bytes([number % 256]) * 100_000 for number in range(400)]  # more than the system holds
    begun = time.monotonic()
    for each in sent:
        near.send(each)
    assert time.monotonic() - begun < 2
    incoming = far.receive()
    assert [next(incoming) for _ in sent] == sent
    near.flush()


def test_the_end(ends: tuple[Channel, Channel]) -> None:
    near, far = ends
    assert far.received() == []
    near.send((1, "two"))
    near.send(None)
    assert far.received() == [(1, "two"), None]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(near.receive()))
    thread.start()
    far.send("last")
    far.close()
    thread.join(10)
    assert found == ["last"]
    assert near.received() is None
    near.send("nobody is there")
