"""CUDA graphs: a frozen key and a captured callable.

Capturing runs the very function that a step runs, on tensors at fixed addresses; what it returned then is what a replay
returns. All graphs share one memory pool, so nothing that one leaves in it outlives the next: what stages hand to each
other lies in buffers of its own.
"""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch

from slipstream.device.shapes import Stage

Result = TypeVar("Result")
Key: TypeAlias = tuple[Stage, Hashable]  # and its shape


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    graph: torch.cuda.CUDAGraph
    result: Any

    def replay(self) -> Any:
        self.graph.replay()
        return self.result


class Graphs:
    """Captured stages by key, all of one memory pool; filled before the first request, never emptied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[Key, Captured] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def find(self, key: Key) -> Captured | None:
        return self._captured.get(key)

    def capture(self, key: Key, function: Callable[[], Result]) -> Result:
        """Run once as it is, which compiles kernels and lets libraries set themselves up, then record. Returns what a replay returns."""
        function()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # thread_local: engines of other threads go on meanwhile, in a server of several modes that makes one anew.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        self._captured[key] = Captured(graph, result)
        return result


class Branch:
    """Lets launches of a stage that is recorded run beside its others; a replay starts both at once."""

    def __init__(self, device: torch.device | None) -> None:
        """device: None where nothing is ever recorded."""
        self._stream: torch.cuda.Stream | None = None
        if device is not None:
            # The same in every graph: they share what it allocates.
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def beside(self, function: Callable[[], object]) -> Iterator[None]:
        """`function` runs beside what the block launches, and is over when it is. Where nothing is recorded: before it."""
        if self._stream is None or not torch.cuda.is_current_stream_capturing():
            function()
            yield
            return
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            function()
        yield
        main.wait_stream(self._stream)


@contextmanager
def garbage_left_alone() -> Iterator[None]:
    """No collection meanwhile: graphs of a former engine that are let go while one is recorded would break the record."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
