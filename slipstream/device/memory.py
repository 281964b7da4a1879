"""What a device says when it has no memory left, and giving back what nobody uses. Called by the engine."""

import torch

_CPU_ALLOCATOR = "can't allocate memory"  # torch raises a plain RuntimeError there


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


def release_cached(device: torch.device) -> None:
    """Blocks that torch's allocator keeps for later go back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
