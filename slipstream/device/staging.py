"""The one door for transfers between host and device: staged uploads down, asynchronous exports up.

Uploads are packed into one reused (pinned) buffer and copied once; a buffer is written again only after its copy has
been read. Exports are copied into pinned memory on a stream of their own, each with its event. On a CPU the same code
runs without streams and pins. Knows nothing of what the arrays mean.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGN = 16
_DTYPES = {
    np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}  # fmt: skip


def compute_stream(device: torch.device) -> "torch.cuda.Stream | None":
    """The stream that steps are launched on: asking for it each time would cost microseconds."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class Uploader:
    """Copies a group of small arrays to the device with one transfer."""

    def __init__(self, device: torch.device, num_buffers: int = 3) -> None:
        self._device = device
        self._buffers: list[tuple[Tensor, NDArray[np.uint8]]] = [self._buffer(1 << 12) for _ in range(num_buffers)]
        self._read: list[torch.cuda.Event | None] = [None] * num_buffers
        self._turn = 0
        self._stream = compute_stream(device)

    def upload(self, arrays: dict[str, NDArray[Any]]) -> dict[str, Tensor]:
        """The arrays (int32, int64, float32 or bool) as device tensors; views of one fresh device buffer."""
        offsets, size = {}, 0
        for name, array in arrays.items():
            offsets[name] = size
            size += -(-array.nbytes // _ALIGN) * _ALIGN
        staged, host = self._next(size)
        for name, array in arrays.items():
            start = offsets[name]
            host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        moved = staged[:size].clone() if self._device.type == "cpu" else self._copy(staged[:size])
        return {
            name: moved[offsets[name] : offsets[name] + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            for name, array in arrays.items()
        }

    def _next(self, size: int) -> tuple[Tensor, NDArray[np.uint8]]:
        self._turn = (self._turn + 1) % len(self._buffers)
        event = self._read[self._turn]
        if event is not None:
            event.synchronize()  # of a copy made len(buffers) uploads ago: long done in a running loop
        if len(self._buffers[self._turn][1]) < size:
            self._buffers[self._turn] = self._buffer(2 * size)
        return self._buffers[self._turn]

    def _copy(self, staged: Tensor) -> Tensor:
        moved = staged.to(self._device, non_blocking=True)
        event = self._read[self._turn] or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._read[self._turn] = event
        return moved

    def _buffer(self, size: int) -> tuple[Tensor, NDArray[np.uint8]]:
        if self._device.type != "cuda":
            array = np.empty(size, np.uint8)
            return torch.from_numpy(array), array
        tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return tensor, tensor.numpy()


class Mailbox:
    """Small arrays that go down every step, always to the same addresses: one copy for all of them.

    `places` says what there is: name -> (shape, dtype). `post` fills the leading entries and pads the others.
    """

    def __init__(
        self, places: dict[str, tuple[tuple[int, ...], type[Any]]], device: torch.device, num_buffers: int = 3,
        beside: bool = False,
    ) -> None:  # fmt: skip
        """beside: copies run beside what is on the compute stream since `free`, and only what follows waits for them."""
        self._offsets, size = {}, 0
        for name, (shape, kind) in places.items():
            self._offsets[name] = size
            size += -(-math.prod(shape) * np.dtype(kind).itemsize // _ALIGN) * _ALIGN
        self._places = places
        self._received = torch.zeros(size, dtype=torch.uint8, device=device)
        self.received = self._views(self._received)  # name -> tensor on the device
        staged = [torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(num_buffers)]
        # Each with its places as the host sees them, and the array that was last written to each place.
        self._staged: list[tuple[Tensor, dict[str, NDArray[Any]], dict[str, NDArray[Any]]]] = [
            (tensor, {n: v.numpy() for n, v in self._views(tensor).items()}, {}) for tensor in staged
        ]
        self._read: list[torch.cuda.Event | None] = [None] * num_buffers
        self._turn = 0
        self._stream = compute_stream(device)
        self._beside: torch.cuda.Stream | None = None
        if beside and device.type == "cuda":
            self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._free = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def _views(self, whole: Tensor) -> dict[str, Tensor]:
        found = {}
        for name, (shape, kind) in self._places.items():
            start, count = self._offsets[name], math.prod(shape) * np.dtype(kind).itemsize
            found[name] = whole[start : start + count].view(_DTYPES[np.dtype(kind)]).view(shape)
        return found

    def post(self, arrays: dict[str, NDArray[Any]], padding: dict[str, int]) -> None:
        """Send the arrays; places beyond an array's length hold what `padding` says for it, else what they held.

        An array that was posted before is not written again: whoever posts it must not change it in the meantime.
        """
        self._turn = (self._turn + 1) % len(self._staged)
        event = self._read[self._turn]
        if event is not None:
            event.synchronize()  # of a copy made a few steps ago: long done in a running loop
        staged, host, written = self._staged[self._turn]
        for name, array in arrays.items():
            if written.get(name) is not array:
                host[name][: len(array)] = array
                if name in padding:
                    host[name][len(array) :] = padding[name]
                written[name] = array
        if self._stream is None:
            self._received.copy_(staged)
            return
        self._read[self._turn] = event = event or torch.cuda.Event()  # type: ignore[no-untyped-call]
        if self._beside is None:
            self._received.copy_(staged, non_blocking=True)
            event.record(self._stream)
            return
        self._beside.wait_event(self._free)
        torch.cuda.set_stream(self._beside)
        try:
            self._received.copy_(staged, non_blocking=True)
        finally:
            torch.cuda.set_stream(self._stream)
        event.record(self._beside)
        self._stream.wait_event(event)

    def free(self) -> None:
        """Whoever reads what was received has been launched: what is posted next may take its place after them."""
        if self._beside is not None:
            self._free.record(self._stream)


class Export:
    """A device value on its way to the host. `wait` is the only call that blocks."""

    def __init__(self, copy: Tensor, buffer: "_Pinned | None", source: Tensor) -> None:
        self._copy = copy
        self._buffer = buffer
        self._source = source  # its memory must not go to anybody else while it is copied

    def wait(self) -> NDArray[Any]:
        if self._buffer is not None:
            self._buffer.event.synchronize()
            self._buffer.arrived = True
        value: NDArray[Any] = self._copy.numpy()
        return value


class Exporter:
    """Starts copies to the host that run beside the compute stream, one kind of value at a time.

    Each kind has pinned buffers of its own that take turns. A source at a fixed address may be written again only after
    its copy: `fence` makes the compute stream, not the host, wait for that.
    """

    def __init__(self, device: torch.device, num_buffers: int = 4) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._compute = compute_stream(device)
        self._num_buffers = num_buffers
        self._rings: dict[str, _Ring] = {}

    def start(self, kind: str, tensor: Tensor) -> Export:
        if self._stream is None:
            return Export(tensor.clone(), None, tensor)
        assert self._compute is not None
        buffer = self._rings.setdefault(kind, _Ring(self._num_buffers)).next(tensor)
        buffer.event.record(self._compute)
        self._stream.wait_event(buffer.event)
        torch.cuda.set_stream(self._stream)  # `with torch.cuda.stream` takes ten times as long
        try:
            buffer.view.copy_(tensor, non_blocking=True)
        finally:
            torch.cuda.set_stream(self._compute)
        buffer.event.record(self._stream)
        buffer.arrived = False
        return Export(buffer.view, buffer, tensor)

    def fence(self, kind: str) -> None:
        """What is launched from now on may write where values of this kind were copied from.

        Nothing is put into the stream where the host has seen the latest of them arrive.
        """
        if kind in self._rings and not self._rings[kind].latest.arrived:
            assert self._compute is not None
            self._compute.wait_event(self._rings[kind].latest.event)


class _Pinned:
    """Host memory that copies go to, as values of one shape see it."""

    def __init__(self, like: Tensor, room: int) -> None:
        self.memory = torch.empty(room, dtype=like.dtype, pin_memory=True)
        self.arrived = False  # the host has waited for the latest copy to it
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.view = self.view_of(like)

    def fits(self, like: Tensor) -> bool:
        return self.memory.dtype == like.dtype and len(self.memory) >= like.numel()

    def view_of(self, like: Tensor) -> Tensor:
        return self.memory[: like.numel()].view(like.shape)


class _Ring:
    """Pinned buffers of one kind of export; a value must be read before its buffer's next turn."""

    def __init__(self, num_buffers: int) -> None:
        self._buffers: list[_Pinned | None] = [None] * num_buffers
        self._turn = 0

    def next(self, like: Tensor) -> _Pinned:
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        if buffer is None or not buffer.fits(like):
            self._buffers[self._turn] = buffer = _Pinned(like, 2 * like.numel())
        elif buffer.view.shape != like.shape:
            buffer.view = buffer.view_of(like)
        return buffer

    @property
    def latest(self) -> _Pinned:
        buffer = self._buffers[self._turn]
        assert buffer is not None
        return buffer
