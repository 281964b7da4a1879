"""Kernels compile for an H200 on machines that have none, in few variants.

The interpreter takes Python that the compiler refuses, so passing in it is not enough. Run as a script, this file calls
the wrappers on CPU tensors with a driver that compiles what they launch for compute capability 9.0 and launches
nothing. The test is its caller, because whether kernels are interpreted is settled once in a process.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# Kernel -> variants that it may have over the calls below. Start-up compiles all that a run needs: few is a promise.
VARIANTS = {"_admit": 1, "_write_pages": 1, "_layout": 1, "_fill": 1, "_draft_inputs": 1, "_rank": 2}


class CompilingDriver:
    """What the launcher of triton asks its driver for, without a device."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(calls: Callable[[], None]) -> dict[str, int]:
    """Kernel -> number of variants that `calls` needed."""
    import triton

    found: set[tuple[str, str]] = set()
    launch = triton.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        assert "cubin" in kernel.asm
        found.add((self.fn.__name__, kernel.hash))

    triton.JITFunction.run = compile_only
    triton.runtime.driver.set_active(CompilingDriver())
    calls()
    return dict(Counter(name for name, _ in found))


def batch_and_rank() -> None:
    """Steps of many sizes, odd ones too, as an engine with 33 slots of 300 positions would have them."""
    from slipstream.device.state import SlotState, make_slot_state
    from slipstream.kernels import batch
    from slipstream.kernels.rank import rank

    state = make_slot_state(33, 300, 16, torch.device("cpu"))
    fields = {name: getattr(state, name) for name in SlotState.__slots__}
    gathered = {name: fields[name] for name in ("context", "page_table", "token_ids")}
    longs = torch.zeros(8 * 512, dtype=torch.int64)
    floats, flags = torch.zeros(2 * 16 * 2), torch.zeros(512, dtype=torch.bool)
    for n in (1, 2, 15, 16, 33):
        batch.admit(
            batch.Admissions(longs[:n], longs[: n + 1], longs.int(), floats[:n], longs[:n], floats[:n], longs[:n]),
            **fields,
        )
        batch.write_pages(state.page_table, longs[: 3 * n].view(n, 3))
        rows = batch.make_rows(num_sequences=n, num_rows=8 * n, num_outputs=8 * n, num_tiles=n, device="cpu")
        per_sequence = longs[:n], longs[:n], flags[:n], longs[:n]
        batch.layout(*per_sequence, **gathered, page_size=16, block_q=n, draft_stride=7 + n % 2, out=rows)
        batch.fill(rows.token_ids, rows.draft_index, longs)
        batch.draft_inputs(longs[:n], state.context, state.token_ids, 16 * n, min(n, 17), 300 * n)
        signal, calibration = torch.zeros(n, 7), torch.zeros(2, 7, 2)
        per_sequence = longs[:n], state.temperature, longs[:n]
        rank(signal, 7 - n % 7, calibration, *per_sequence, longs[:1], longs[:n])


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a device, every test of a kernel compiles it")
def test_kernels_compile_without_a_device_in_few_variants(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    variants = json.loads(done.stdout.splitlines()[-1])
    assert variants.keys() == VARIANTS.keys()
    assert all(count <= VARIANTS[name] for name, count in variants.items()), variants


if __name__ == "__main__":
    print(json.dumps(compiled(batch_and_rank)))
