"""The one door for transfers between host and device: staged uploads down, asynchronous exports up.

Uploads are packed into one reused (pinned) buffer and copied once; a buffer is written again only after its copy has
been read. Exports are copied into pinned memory on a stream of their own, each with its event. On a CPU the same code
runs without streams and pins. Knows nothing of what the arrays mean.
"""

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


class Uploader:
    """Copies a group of small arrays to the device with one transfer."""

    def __init__(self, device: torch.device, num_buffers: int = 3) -> None:
        self._device = device
        self._buffers: list[tuple[Tensor, NDArray[np.uint8]]] = [self._buffer(1 << 12) for _ in range(num_buffers)]
        self._read: list[torch.cuda.Event | None] = [None] * num_buffers
        self._turn = 0

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
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._read[self._turn] = event
        return moved

    def _buffer(self, size: int) -> tuple[Tensor, NDArray[np.uint8]]:
        if self._device.type != "cuda":
            array = np.empty(size, np.uint8)
            return torch.from_numpy(array), array
        tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return tensor, tensor.numpy()


class Export:
    """Device values on their way to the host. `wait` is the only call that blocks."""

    def __init__(self, tensors: dict[str, Tensor], event: torch.cuda.Event | None) -> None:
        self._tensors = tensors
        self._event = event

    def wait(self) -> dict[str, NDArray[Any]]:
        if self._event is not None:
            self._event.synchronize()
        return {name: tensor.numpy() for name, tensor in self._tensors.items()}


class Exporter:
    """Starts copies to the host that run beside the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, tensors: dict[str, Tensor]) -> Export:
        if self._stream is None:
            return Export({name: tensor.clone() for name, tensor in tensors.items()}, None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            moved = {}
            for name, tensor in tensors.items():
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
                moved[name] = host
            event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return Export(moved, event)
