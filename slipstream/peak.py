"""What an engine takes of a GPU beside its pages, measured on one like it that has next to none.

That engine runs its largest steps and records the largest of its graphs, and is thrown away; `build` then makes the real
one with the pages that are left room for (`sizes.gpu_budget`). Knows nothing of options.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from slipstream.device.memory import DeviceUse, must_fit
from slipstream.device.shapes import DraftShape, VerifyShape
from slipstream.engine import Engine
from slipstream.rehearse import run_largest_steps
from slipstream.sizes import Peak

NUM_SAMPLED = 6  # shapes of each kind, from the largest to the smallest, that stand for all others
TOO_LARGE = (
    "no memory for a step, even without a KV pool: lower max_num_seqs, max_num_batched_tokens or max_model_len, take a "
    "smaller model, or free the GPU of other programs"
)
Shape = TypeVar("Shape")

# Bytes that engines which are alive were left for their steps and do not hold while they idle: the device does not know of
# them, and whoever is sized later must not take them.
_promised: "weakref.WeakKeyDictionary[Engine, int]" = weakref.WeakKeyDictionary()


def promise(engine: Engine, num_bytes: int) -> None:
    """The engine takes so much more once it works at its worst."""
    _promised[engine] = max(num_bytes, 0)


def free_use(device: torch.device) -> DeviceUse:
    """Of a GPU, once what nobody uses was given back; what was promised counts as taken."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    use = DeviceUse.of(device)
    others = sum(size for engine, size in _promised.items() if engine.state.context.device == with_index(device))
    return replace(use, taken=use.taken + others)


def with_index(device: torch.device) -> torch.device:
    """cuda is the current one of them, as tensors name it: cuda:0."""
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def measure_peak(
    make: Callable[[], Engine], device: torch.device, draft_lengths: Sequence[int], pool_bytes: int
) -> Peak:
    """make: an engine with pages of `pool_bytes`, of which nothing may be left when this returns.

    draft_lengths: those that will be captured. CapacityError where not even that engine has room.
    """
    free_use(device)
    before = DeviceUse.of(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        with must_fit(lambda: TOO_LARGE):
            return _peak(make(), device, draft_lengths, before, pool_bytes)
    finally:
        free_use(device)


def _peak(
    engine: Engine, device: torch.device, draft_lengths: Sequence[int], before: DeviceUse, pool_bytes: int
) -> Peak:
    run_largest_steps(engine)
    torch.cuda.synchronize(device)
    after = DeviceUse.of(device)
    most = torch.cuda.max_memory_reserved(device) - before.reserved
    step = most + max(after.beside_torch - before.beside_torch, 0) - pool_bytes
    return Peak(step=max(step, 0), graphs=_graphs(engine, device, draft_lengths) if engine.backend.captures else 0)


@torch.inference_mode()
def _graphs(engine: Engine, device: torch.device, draft_lengths: Sequence[int]) -> int:
    """What all graphs will take: the largest have the memory that the others work in, each has some of its own."""
    from slipstream.capture import Recording, Shapes
    from slipstream.device.graphs import garbage_left_alone

    shapes = Shapes.of(engine, draft_lengths)
    mixed = [shape for shape in shapes.verifies if not shape.decode_only]
    decode = shapes.verifies[len(mixed) :]
    every: tuple[Sequence[DraftShape | VerifyShape | int], ...] = (shapes.drafts, mixed, decode, shapes.reports)
    kinds = [spread(kind, NUM_SAMPLED) for kind in every]
    torch.cuda.empty_cache()  # capturing does so too, and what the steps left would hide what graphs take
    with garbage_left_alone():
        start, recording = DeviceUse.of(device).taken, Recording(engine)
        for kind in kinds:
            for shape in kind[:1]:
                recording.capture(shape)
        first, used = recording.count, DeviceUse.of(device).taken
        for kind in kinds:
            for shape in kind[1:]:
                recording.capture(shape)
    more = DeviceUse.of(device).taken - used
    return extrapolated(used - start, more, recording.count - first, shapes.num_graphs - first)


def extrapolated(largest: int, more: int, num_more: int, num_others: int) -> int:
    """Bytes of all graphs: of the largest, and of `num_others` if `num_more` of them took `more`."""
    return max(largest, 0) + (max(more, 0) * num_others // num_more if num_more else 0)


def spread(shapes: Sequence[Shape], count: int) -> list[Shape]:
    """At most `count` of them, evenly, with the first and the last."""
    if len(shapes) <= count:
        return list(shapes)
    return [shapes[index * (len(shapes) - 1) // (count - 1)] for index in range(count)]
