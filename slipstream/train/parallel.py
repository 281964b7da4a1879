"""Several processes that train one drafter: torch.distributed behind four verbs, one process a GPU.

A batch is dealt out by rows, and sums over ranks are all that is exchanged, so the number of processes changes how fast
a run is and not what it does: steps, batches, anchors and loss are those of one process. `ALONE` is one process, where
every verb does nothing. On a CPU the processes speak gloo, which is how tests run them. Called by the trainer.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from slipstream import errors
from slipstream.errors import EngineError, SlipstreamError
from slipstream.files import replace_text


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of a run."""

    rank: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        """The one process that logs, validates and writes."""
        return self.rank == 0

    def share(self, total: int) -> slice:
        """This rank's part of a batch of `total` rows, which must divide evenly: compiled code knows one shape."""
        assert total % self.count == 0, f"{total} rows for {self.count} processes"
        each = total // self.count
        return slice(self.rank * each, (self.rank + 1) * each)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype by their sums over all ranks, in one exchange."""
        if self.count == 1 or not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def agree(self, value: float) -> float:
        """The first rank's value, on every rank: what depends on a clock must not differ."""
        if self.count == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64)  # on the CPU, so that no GPU is waited for
        dist.broadcast(shared, src=0)
        return shared.item()

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.count > 1:
            dist.barrier()


ALONE = Ranks()


def launch(count: int, on_gpu: bool, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(*arguments, ranks)` in `count` processes and wait; `work` is a module's function.

    A SlipstreamError of one of them is raised here as it was there. No process outlives this call.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = spawn(_process, args=(count, on_gpu, folder, work, arguments), nprocs=count, join=False)  # type: ignore[no-untyped-call]
        try:
            while not context.join():
                pass
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise _reported(folder) or _unforeseen(count, error) from error
        finally:  # an interrupt reaches this process alone, and the others would be waited for at its end
            for process in context.processes:
                process.kill()


def _reported(folder: Path) -> SlipstreamError | None:
    """The error on purpose that a process left in the folder; those it took along only know that it is gone."""
    for path in sorted(folder.glob("error-*")):
        kind, _, message = path.read_text(encoding="utf-8").partition(" ")
        made: SlipstreamError = getattr(errors, kind)(message)
        return made
    return None


def _unforeseen(count: int, error: Exception) -> EngineError:
    reason = str(error).rstrip().splitlines()[-1]
    hint = "; was it out of memory? lower recipe.batch_rows" if "SIGKILL" in reason else ""
    return EngineError(f"one of {count} training processes failed: {reason}{hint}")


def _process(
    rank: int, count: int, on_gpu: bool, folder: Path, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, init_method=(folder / "ranks").as_uri(), rank=rank, world_size=count)
    try:
        work(*arguments, Ranks(rank, count))
    except SlipstreamError as error:
        replace_text(folder / f"error-{rank}", f"{type(error).__name__} {error}")
        raise
    except KeyboardInterrupt as error:  # torch would take this for a good end, and the others would wait for ever
        raise EngineError("it was interrupted") from error
    finally:
        dist.destroy_process_group()
