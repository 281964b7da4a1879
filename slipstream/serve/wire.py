"""What goes between a server and its engine's process: objects over a socket, and steps as few bytes.

A sender never waits: what the system does not take is sent by a thread that does. Objects are pickled, for both ends are
ours. Steps are most of what is sent, and their sender has little time: of all requests, and of several steps, one
message, with numbers as the bytes of their columns. Called by `engine_process` and `engine_main`.
"""

import pickle
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from slipstream.commit import Gains
from slipstream.config import SamplingParams
from slipstream.host import Facts
from slipstream.models.tokenizer import Tokenizer
from slipstream.plan import Int32s
from slipstream.request import FinishReason, Request
from slipstream.serve.driver import Steps
from slipstream.serve.options import OnEngineError

if TYPE_CHECKING:
    from slipstream.llm import LLM

SWITCH_INTERVAL_S = 5e-4  # what a thread waits for another one at most: Python's own 5 ms are many steps
_BUFFER_BYTES = 1 << 22  # that the system is asked to hold: a loop that is busy for a while keeps nobody waiting
_READ_BYTES = 1 << 16  # at once: of a buffer much larger than messages, making it would take longer than reading
_HEAD = struct.Struct("<Q")


class Channel:
    """One end of a socket pair; any threads may send, one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._received = bytearray()
        self._lock = threading.Lock()
        self._backlog: deque[bytes] = deque()  # that the system did not take
        self._sender: threading.Thread | None = None  # of the backlog

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, value: object) -> None:
        """Whoever is at the other end may be gone: then nothing happens, and receiving tells."""
        data = pickle.dumps(value, 5)
        data = _HEAD.pack(len(data)) + data
        with self._lock:
            if not self._backlog:
                data = data[self._taken(data) :]
            if data:
                self._backlog.append(data)
                if self._sender is None:
                    self._sender = threading.Thread(target=self._send_backlog, name="slipstream-send", daemon=True)
                    self._sender.start()

    def receive(self) -> Iterator[Any]:
        """What comes, until the other end is gone. Waits for it."""
        while True:
            yield from self._whole()
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError:
                return
            if not data:
                return
            self._received += data

    def received(self) -> list[Any] | None:
        """What has come; None: the other end is gone. Does not wait."""
        try:
            data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._received += data
        return list(self._whole())

    def flush(self) -> None:
        """Wait until all is sent."""
        sender = self._sender
        if sender is not None:
            sender.join()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a thread that sends would wait on
        self._socket.close()

    def _whole(self) -> Iterator[Any]:
        """Objects that are there as a whole."""
        received = self._received
        while len(received) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(received)[0]
            if len(received) < end:
                break
            with memoryview(received) as view, view[_HEAD.size : end] as whole:
                value = pickle.loads(whole)
            del received[:end]
            yield value

    def _taken(self, data: bytes) -> int:
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def _send_backlog(self) -> None:
        while True:
            with self._lock:
                if not self._backlog:
                    self._sender = None
                    return
                data = self._backlog[0]
            with suppress(OSError):
                self._socket.sendall(data)
            with self._lock:
                self._backlog.popleft()


# Where engines come from. It is sent by its name, like all functions, so that a module must have it.
Maker: TypeAlias = "Callable[..., Sequence[LLM]]"


class Order(NamedTuple):
    """The first message: what is to be served."""

    make: Maker
    arguments: tuple[Any, ...]
    on_error: OnEngineError
    interval_s: float
    stall_s: float
    log_level: int


class Ready(NamedTuple):
    """The answer to it, where there are engines."""

    tokenizer: Tokenizer
    facts: list[Facts]  # of each


class Beat(NamedTuple):
    """A sign of life. busy_since: of each engine, when the step began that is not over, by time.monotonic."""

    busy_since: list[float | None]


class Asked(NamedTuple):
    """A request on its way to the engine; the rest of a `Request` is made there."""

    uid: int
    prompt: bytes  # token ids, int32
    params: SamplingParams
    seed: int
    sibling: int  # `Request.index`

    @classmethod
    def of(cls, request: Request) -> "Asked":
        prompt = np.array(request.prompt_ids, np.int32).tobytes()
        return cls(request.uid, prompt, request.params, request.seed, request.index)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return tuple(np.frombuffer(self.prompt, np.int32).tolist())


class Step(NamedTuple):
    """A step's `Gains`, but for the numbers."""

    uids: list[int] | None  # None: of the same requests as the step before
    num_requests: int
    num_columns: int  # of token_ids
    num_decode: int
    drafted: int
    ended: list[tuple[int, FinishReason, int | str | None, str | None]]  # index, why, stop_reason, error
    begun: list[tuple[int, int | None, list[Int32s]]]  # index, num_cached, reports of the prompt
    reports: dict[int, Int32s]


class Packer:
    """The engine's end, for one engine."""

    def __init__(self) -> None:
        self._roster: Sequence[Request] = ()

    def pack(self, steps: Steps) -> tuple[list[Step], bytes, bool]:
        heads, columns = [], []
        for gains in steps.gains:
            heads.append(self._head(gains))
            columns += [
                np.ascontiguousarray(column, np.int32).tobytes()
                for column in (gains.token_ids_np, gains.kept_np, gains.num_accepted_np, gains.widths_np)
            ]
        return heads, b"".join(columns), steps.is_last

    def _head(self, gains: Gains) -> Step:
        requests, uids = gains.requests, None
        if requests is not self._roster:
            self._roster, uids = requests, [request.uid for request in requests]
        ended = [
            (index, reason, requests[index].stop_reason, requests[index].error)
            for index, reason in gains.finish_reasons.items()
        ]
        begun = [
            (index, requests[index].num_cached, requests[index].prompt_logbook.reports)
            for index in range(gains.num_decode, len(requests))
            if gains.kept_np[index]
        ]
        columns = gains.token_ids_np.shape[1]
        return Step(uids, len(requests), columns, gains.num_decode, gains.drafted, ended, begun, gains.reports)


_STRANGER = Request(0, (0,), SamplingParams(), seed=0)  # whom nobody waits for any more


class Unpacker:
    """The server's end, for one engine. What requests are told besides tokens is written to them."""

    def __init__(self, requests: Mapping[int, Request]) -> None:
        """requests: by uid, of those that somebody waits for."""
        self._requests = requests
        self._roster: list[Request] = []

    def unpack(self, heads: Sequence[Step], data: bytes, is_last: bool) -> Steps:
        values_np, at, gains = np.frombuffer(data, np.int32), 0, []
        for head in heads:
            rows, size = head.num_requests, head.num_requests * head.num_columns
            ends = at + size, at + size + rows, at + size + 2 * rows, at + size + 3 * rows
            kept, accepted, widths = (values_np[begin:end] for begin, end in pairwise(ends))
            token_ids, at = values_np[at : ends[0]], ends[-1]
            if head.uids is not None:
                self._roster = [self._requests.get(uid, _STRANGER) for uid in head.uids]
            reasons = self._tell(head)
            gains.append(
                Gains(
                    self._roster, token_ids.reshape(rows, head.num_columns), kept, accepted, widths, reasons,
                    head.reports, head.num_decode, head.drafted,
                )
            )  # fmt: skip
        return Steps(gains, is_last)

    def _tell(self, head: Step) -> dict[int, FinishReason]:
        for index, num_cached, reports in head.begun:
            request = self._roster[index]
            if request.num_cached is None and request is not _STRANGER:
                request.num_cached = num_cached
                for report in reports:
                    request.prompt_logbook.add(report)
        for index, reason, stop_reason, error in head.ended:
            request = self._roster[index]
            if request is not _STRANGER:
                request.finish_reason, request.stop_reason, request.error = reason, stop_reason, error
        return {index: reason for index, reason, *_ in head.ended}
