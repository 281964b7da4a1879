"""CUDA graphs: a frozen key and a captured callable.

Capturing runs the very function that a step runs, on tensors at fixed addresses; what it returned then is what a replay
returns. All graphs share one memory pool, so nothing that one leaves in it outlives the next: what stages hand to each
other lies in buffers of its own.
"""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


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
        self._captured: dict[Hashable, Captured] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def find(self, key: Hashable) -> Captured | None:
        return self._captured.get(key)

    def capture(self, key: Hashable, function: Callable[[], Result]) -> Result:
        """Run once as it is, which compiles kernels and lets libraries set themselves up, then record. Returns what a replay returns."""
        function()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # thread_local: engines of other threads go on meanwhile, in a server of several modes that makes one anew.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        self._captured[key] = Captured(graph, result)
        return result


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
