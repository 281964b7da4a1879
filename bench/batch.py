"""What building a batch costs on a GPU: microseconds per launch of each kernel, inside a CUDA graph.

    PYTHONPATH=$PWD python bench/batch.py

layout, fill, draft_inputs and rank (by number of warps), for steps of 1 to 512 sequences that each verify 7 drafts, and
for a prompt of 8192 rows alone. JSON to $OUT (or runs/). Takes about half a minute, most of it compile time.
"""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from slipstream.device.state import SlotState, make_slot_state
from slipstream.kernels import batch, rank

DEVICE = torch.device("cuda")
LAUNCHES, REPLAYS = 50, 20
WIDTH, DRAFTS_STRIDE, PAGE_SIZE, MAX_LEN = 7, 16, 16, 8448
KEYS_PER_THREAD = 32  # more do not fit into registers, and compile for long
SEQUENCES = (1, 8, 32, 128, 256, 512)


def microseconds(launch: Callable[[], object]) -> float:
    """Per launch, the best of several replays of a graph of many."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            launch()
    best = float("inf")
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, 1e3 * start.elapsed_time(end) / LAUNCHES)
    return best


def layout_of(state: SlotState, slots: torch.Tensor, given: int, width: int) -> tuple[batch.Rows, Callable[[], None]]:
    """The rows of a step in which all sequences have as many, and what fills them in."""
    count = len(slots)
    num_rows = count * (given + width)
    out = batch.make_rows(
        num_sequences=count, num_rows=num_rows, num_outputs=count * (width + 1),
        num_tiles=batch.max_tiles(count, num_rows, 8), device=DEVICE,
    )  # fmt: skip
    numbers = (torch.full_like(slots, number) for number in (given, width))
    num_given, widths = numbers
    emits = num_given > 0

    def launch() -> None:
        batch.layout(
            slots, num_given, emits, widths, context=state.context, page_table=state.page_table,
            token_ids=state.token_ids, page_size=PAGE_SIZE, block_q=8, draft_stride=DRAFTS_STRIDE, out=out,
        )  # fmt: skip

    return out, launch


def measure(state: SlotState) -> dict[str, dict[int, float]]:
    """Kernel -> sequences -> microseconds."""
    table: dict[str, dict[int, float]] = {}
    drafts = torch.ones(max(SEQUENCES), DRAFTS_STRIDE, dtype=torch.int64, device=DEVICE)
    for count in SEQUENCES:
        slots = torch.arange(count, device=DEVICE)
        out, layout = layout_of(state, slots, 1, WIDTH)
        calls: dict[str, Callable[[], object]] = {"layout": layout}
        calls["fill"] = lambda out=out: batch.fill(out.token_ids, out.draft_index, drafts)
        calls["draft_inputs"] = lambda slots=slots: batch.draft_inputs(
            slots, state.context, state.token_ids, 0, WIDTH + 1
        )
        for name, call in calls.items():
            table.setdefault(name, {})[count] = microseconds(call)
        for num_drafts, warps in itertools.product((7, 16), (1, 2, 4, 8)):
            if rank._padded(count) * num_drafts <= warps * 32 * KEYS_PER_THREAD:
                name = f"rank of {num_drafts}, {warps} warps"
                table.setdefault(name, {})[count] = rank_time(state, slots, num_drafts, warps)
    _, prompt = layout_of(state, torch.zeros(1, dtype=torch.int64, device=DEVICE), 8192, 0)
    table["layout of a prompt"] = {1: microseconds(prompt)}
    return table


def rank_time(state: SlotState, slots: torch.Tensor, num_drafts: int, warps: int) -> float:
    usual, rank._num_warps = rank._num_warps, lambda num_keys: warps
    signal = torch.rand(len(slots), num_drafts, device=DEVICE)
    calibration = torch.ones(2, num_drafts, 2, device=DEVICE)
    total = torch.tensor([len(slots) * num_drafts // 2], device=DEVICE)
    caps, widths = torch.full_like(slots, num_drafts), torch.zeros_like(slots)
    try:
        return microseconds(
            lambda: rank.rank(signal, num_drafts, calibration, slots, state.temperature, caps, total, widths)
        )
    finally:
        rank._num_warps = usual


def main() -> None:
    table = measure(make_slot_state(max(SEQUENCES), MAX_LEN, PAGE_SIZE, DEVICE))
    print(f"{'us per launch':<24}" + "".join(f"{count:>8}" for count in SEQUENCES))
    for name, times in table.items():
        print(f"{name:<24}" + "".join(f"{times[count]:8.1f}" if count in times else " " * 8 for count in SEQUENCES))
    folder = Path(os.environ.get("OUT", "runs"))
    folder.mkdir(exist_ok=True)
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "us": table}
    (folder / "batch.json").write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
