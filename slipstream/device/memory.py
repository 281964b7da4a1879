"""What a device says of its memory: how much there is, who has it, and that none is left. Called by who
loads weights, by who builds engines and by the engine.
"""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.errors import CapacityError

_CPU_ALLOCATOR = "can't allocate memory"  # torch raises a plain RuntimeError there


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A GPU's memory at some moment, in bytes."""

    total: int
    taken: int  # by everybody: other programs, what torch keeps for later, what libraries take beside torch
    reserved: int  # of it, by torch in this process

    @classmethod
    def of(cls, device: torch.device) -> "DeviceUse":
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, total - free, torch.cuda.memory_reserved(device))

    @property
    def beside_torch(self) -> int:
        return self.taken - self.reserved


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


@contextmanager
def must_fit(message: Callable[[], str], cpu_bytes: int = 0) -> Iterator[None]:
    """What finds no memory inside is a CapacityError of that message; what it had made until then is let go.

    cpu_bytes: what it takes of a CPU's memory, asked for beforehand: Linux promises memory that it does not have, and ends
    the process that uses it.
    """
    if cpu_bytes > memory_at_hand() + _swap_at_hand():
        raise CapacityError(f"{message()} ({in_words(cpu_bytes)} are needed)")
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        raise CapacityError(f"{message()} ({type(error).__name__}: {error})") from None


def memory_of(device: torch.device) -> str:
    """What is free, for a message."""
    if device.type != "cuda":
        return f"this machine has {in_words(memory_at_hand())} free"
    use = DeviceUse.of(device)
    return f"{device} has {in_words(use.total - use.taken)} of {in_words(use.total)} free"


def memory_at_hand() -> int:
    """What this machine could still give to a program, in bytes."""
    found = _meminfo("MemAvailable")  # what sysconf calls available leaves out the page cache, which fills with uptime
    return 8 << 30 if found is None else found


def _swap_at_hand() -> int:
    return _meminfo("SwapFree") or 0


def _meminfo(name: str) -> int | None:
    """What Linux says of its memory, in bytes."""
    meminfo = Path("/proc/meminfo")
    found = re.search(rf"^{name}: +(\d+) kB", meminfo.read_text(), re.MULTILINE) if meminfo.is_file() else None
    return int(found[1]) * 1024 if found else None


def release_cached(device: torch.device) -> None:
    """Blocks that torch's allocator keeps for later go back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def in_words(num_bytes: int) -> str:
    """1.50 GiB, 3.2 MiB, 12 bytes."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"
