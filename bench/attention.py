"""How `kernels.attention` should be launched: times its cuts in CUDA graphs and prints what each reaches of memory.

    PYTHONPATH=$PWD python bench/attention.py [--only 8b] [--seconds 95] [--fused]

Cases of the Qwen3-8B shape, of SmolLM2-135M and of their drafters' blocks. A graph walks through as many layers as the
level-2 cache cannot hold, so every launch finds its KV in memory, as in a step. First all launches at the usual number
of splits, then the best two at other numbers. Every output is compared with the first one's, and that with the
definition. `GB/s` counts each key and value once. The last tables hold decoding in one launch against rotation, then
attention (`--fused`: nothing but that), and the goals. JSON to $OUT (or runs/). Without a device, `--smoke` walks
through everything on toys.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

from slipstream.kernels import attention as kernels  # noqa: E402  (the interpreter is chosen before triton is imported)
from slipstream.kernels import own_attention, rope  # noqa: E402
from slipstream.kernels.attention import Launch, Tiles, choose_splits, paged_attention  # noqa: E402
from slipstream.kernels.own_attention import block_attention, decode_attention  # noqa: E402

DEVICE = "cuda" if HAS_CUDA else "cpu"
DTYPE = torch.bfloat16 if HAS_CUDA else torch.float32
L2_BYTES = 200e6  # several times the cache
MAX_LAYERS = 256
FEW_ROWS = (  # (chunk_n, warps, stages) for up to 32 packed rows
    (64, 4, 3), (64, 8, 3), (64, 2, 3), (32, 2, 4), (32, 1, 4), (64, 4, 4), (128, 4, 2), (128, 8, 2), (128, 4, 3),
)  # fmt: skip
MANY_ROWS = ((64, 4, 3), (64, 4, 2), (64, 8, 3), (128, 8, 2), (32, 4, 3))


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    num_seqs: int
    context: int  # KV before the rows
    rows: int  # of each sequence
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block: bool = False  # a drafter's block, not rows of the target
    page_size: int = 16
    block_q: int = 0  # 0: one tile a sequence

    @property
    def tile_rows(self) -> int:
        return self.block_q or self.rows

    @property
    def num_tiles(self) -> int:
        return self.num_seqs * -(-self.rows // self.tile_rows)

    @property
    def decodes(self) -> bool:
        """Whether `decode_attention` can do it, and a launch less is worth a look."""
        return not self.block and self.tile_rows == self.rows and self.context <= 300

    @property
    def packed_rows(self) -> int:
        return kernels._packed_rows(self.tile_rows, self.num_heads // self.num_kv_heads)

    @property
    def kv_bytes(self) -> int:
        tokens = self.num_seqs * (self.context + self.rows)
        return 2 * tokens * self.num_kv_heads * self.head_dim * DTYPE.itemsize

    @property
    def splits(self) -> int:
        return choose_splits(self.num_tiles, self.num_kv_heads, self.context + self.rows)


def small(name: str, num_seqs: int, context: int, rows: int, **more: Any) -> Case:
    return Case(name, num_seqs, context, rows, num_heads=9, num_kv_heads=3, head_dim=64, **more)


CASES = (
    Case("8b 32 x 4096, w 0", 32, 4095, 1),
    Case("8b 32 x 4096, w 7", 32, 4088, 8),
    Case("8b 32 x 256, w 0", 32, 255, 1),
    Case("8b 32 x 256, w 7", 32, 248, 8),
    Case("8b 256 x 256, w 0", 256, 255, 1),
    Case("8b 1 x 300, w 0", 1, 299, 1),
    Case("8b 1 x 4096, w 7", 1, 4088, 8),
    Case("8b 1 x 32768, w 0", 1, 32767, 1),
    Case("8b 32 x 4096, w 16", 32, 4079, 17),
    Case("8b prefill 4 x 2048", 4, 0, 2048, block_q=16),
    Case("8b prefill 4 x 2048, tiles of 32", 4, 0, 2048, block_q=32),
    Case("8b drafter 32 x 4096", 32, 4096, 7, block=True),
    Case("8b drafter 32 x 256", 32, 256, 7, block=True),
    small("smollm2 1 x 300, w 0", 1, 299, 1),
    small("smollm2 1 x 300, w 7", 1, 292, 8),
    small("smollm2 32 x 300, w 0", 32, 299, 1),
    small("smollm2 32 x 300, w 7", 32, 292, 8),
    small("smollm2 256 x 300, w 0", 256, 299, 1),
    small("smollm2 256 x 300, w 7", 256, 292, 8),
    Case("8b 1 x 256, w 0", 1, 255, 1),
    Case("8b 1 x 256, w 7", 1, 248, 8),
    small("smollm2 32 x 2048, w 7", 32, 2040, 8),
    small("smollm2 drafter 1 x 300", 1, 300, 8, block=True),
    small("smollm2 drafter 32 x 300", 32, 300, 8, block=True),
    small("smollm2 drafter 256 x 300", 256, 300, 8, block=True),
)
TOYS = (
    Case("toy 2 x 60", 2, 57, 3, num_heads=4, num_kv_heads=2, head_dim=16),
    Case("toy prefill 2 x 40", 2, 0, 40, num_heads=4, num_kv_heads=2, head_dim=16, block_q=16),
    Case("toy drafter 2 x 40", 2, 40, 5, num_heads=4, num_kv_heads=2, head_dim=16, block=True),
)


class Bench:
    """Tensors of one case: several layers of KV in shuffled pages, and a call per layer."""

    def __init__(self, case: Case) -> None:
        self.case = case
        n, ps = case.num_seqs, case.page_size
        pages_each = -(-(case.context + case.rows) // ps)
        self.num_layers = max(1, min(MAX_LAYERS if HAS_CUDA else 2, math.ceil(L2_BYTES / case.kv_bytes)))
        shape = (self.num_layers, n * pages_each + 2, ps, case.num_kv_heads, case.head_dim)
        self.keys, self.values = (torch.randn(shape, dtype=DTYPE, device=DEVICE) for _ in range(2))
        order = torch.randperm(n * pages_each, device=DEVICE) + 2
        self.table = torch.zeros(n + 1, pages_each + 3, dtype=torch.int64, device=DEVICE)
        self.table[:n, :pages_each] = order.view(n, pages_each)
        total = case.num_heads + 2 * case.num_kv_heads
        self.qkv = torch.randn(n * case.rows, total * case.head_dim, dtype=DTYPE, device=DEVICE)
        self.q, self.k, self.v = self.qkv.view(-1, total, case.head_dim).split(
            [case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1
        )
        self.unturned = torch.zeros(1, case.head_dim, device=DEVICE)  # stands for every position
        self.unturned[:, : case.head_dim // 2] = 1
        places = [(b, first) for b in range(n) for first in range(0, case.rows, case.tile_rows)]
        records = [
            [b * case.rows + first, min(case.tile_rows, case.rows - first), b, case.context + first]
            for b, first in places
        ]
        self.records = torch.tensor(records, dtype=torch.int32, device=DEVICE)
        self.workspace = kernels.attention_workspace(
            case.num_heads, case.num_kv_heads, case.head_dim, case.tile_rows, DEVICE, max_programs=4 * 1056
        )

    def call(self, layer: int, launch: Launch | None, num_splits: int) -> Tensor:
        case, shared = self.case, (self.table, self.case.head_dim**-0.5, None, self.workspace)
        pages, tiles = (self.keys[layer], self.values[layer]), Tiles(self.records, case.tile_rows, num_splits)
        if case.block:
            turn = self.unturned, None, None, 1e-6
            return block_attention(self.qkv, *pages, tiles, shared[0], *turn, *shared[1:], launch=launch)
        return paged_attention(self.q, *pages, tiles, *shared, launch=launch)

    def expected(self, b: int) -> Tensor:
        """Sequence b's rows in layer 0 by the definition, fp32 [rows, nh * hd]."""
        case, group = self.case, self.case.num_heads // self.case.num_kv_heads
        rows, num_kv = slice(b * case.rows, (b + 1) * case.rows), case.context + (0 if case.block else case.rows)
        past = [pool[0][self.table[b]].flatten(0, 1)[:num_kv] for pool in (self.keys, self.values)]
        own = [x[rows] for x in (self.k, self.v)] if case.block else [x[:0] for x in (self.k, self.v)]
        keys, values = (torch.cat(x).float().repeat_interleave(group, 1) for x in zip(past, own, strict=True))
        scores = torch.einsum("qhd,lhd->hql", self.q[rows].float(), keys) * case.head_dim**-0.5
        if not case.block:
            at = torch.arange(num_kv, device=DEVICE)
            scores.masked_fill_(at > case.context + at[: case.rows, None], -math.inf)
        return torch.einsum("hql,lhd->qhd", scores.softmax(-1), values).flatten(1)

    def time_us(self, launch: Launch | None, num_splits: int) -> float:
        count = max(self.num_layers, 20)
        return time_graph(lambda i: self.call(i % self.num_layers, launch, num_splits), count)


class Fused(Bench):
    """A layer's rotation, KV write and attention, in two launches or in one; head norms for heads of 128."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        rows = torch.arange(case.num_seqs * case.rows, device=DEVICE)
        slots = rows // case.rows
        self.positions = case.context + rows % case.rows
        ps, table = case.page_size, self.table[slots, self.positions // case.page_size]
        self.kv_slots = table * ps + self.positions % ps
        self.cos_sin = torch.randn(case.context + case.rows, case.head_dim, device=DEVICE).clamp(-1, 1)
        norm = torch.ones(case.head_dim, dtype=DTYPE, device=DEVICE) if case.head_dim == 128 else None
        self.turn = self.cos_sin, norm, norm, 1e-6
        self.how = case.head_dim**-0.5, None, self.workspace

    def rope(self, layer: int, qkv: Tensor) -> None:
        pages = self.keys[layer], self.values[layer]
        rope.rope_and_store(qkv, self.positions, *self.turn, *pages, self.kv_slots, self.case.num_heads)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        case, pages = self.case, (self.keys[layer], self.values[layer])
        q = qkv.view(len(qkv), -1, case.head_dim)[:, : case.num_heads]
        return paged_attention(q, *pages, Tiles(self.records, case.rows, case.splits), self.table, *self.how)

    def decode(self, layer: int, qkv: Tensor, launch: Launch | None, num_splits: int) -> Tensor:
        pages, tiles = (self.keys[layer], self.values[layer]), Tiles(self.records, self.case.rows, num_splits)
        return decode_attention(qkv, *pages, tiles, self.table, *self.turn, self.kv_slots, *self.how, launch=launch)

    def time(self, call: Callable[[int], Any]) -> float:
        return time_graph(lambda i: call(i % self.num_layers), max(self.num_layers, 20))

    def compare(self) -> dict[str, Any]:
        """Microseconds of both ways and of attention alone, the best other launch, and how far their outputs differ."""
        rows, splits = self.qkv.clone(), self.case.splits

        def both(layer: int) -> Tensor:
            self.rope(layer, rows)
            return self.attend(layer, rows)

        expected = both(0)
        difference = float((self.decode(0, self.qkv, None, splits) - expected).abs().max())
        found = {
            "rope_and_attention": self.time(both),
            "attention": self.time(lambda layer: self.attend(layer, rows)),
            "decode_attention": self.time(lambda layer: self.decode(layer, self.qkv, None, splits)),
        }
        others = {
            launch: self.time(lambda layer, cut=launch: self.decode(layer, self.qkv, cut, splits))  # type: ignore[misc]
            for launch in launches(self.case)
        }
        best = min(others, key=lambda launch: others[launch])
        return {"case": self.case.name, **found, "best": others[best], "best_launch": dataclasses.astuple(best),
                "difference": difference}  # fmt: skip


def describe_fused(row: dict[str, Any]) -> str:
    times = "rope + attention {rope_and_attention:.2f} us, decode_attention {decode_attention:.2f}".format(**row)
    rest = "attention alone {attention:.2f}, best {best:.2f} by {best_launch}".format(**row)
    return f"{row['case']}: {times} ({rest}){'' if row['difference'] < 2e-2 else '  DIFFERS'}"


def time_graph(call: Callable[[int], Any], count: int) -> float:
    """Microseconds of one of `count` calls in a graph, the median of some replays."""
    if not HAS_CUDA:
        began = time.perf_counter()
        call(0)
        return 1e6 * (time.perf_counter() - began)
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i)
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / count)
    return statistics.median(times[2:])


def launches(case: Case) -> Iterator[Launch]:
    cuts = FEW_ROWS if case.packed_rows <= 32 else MANY_ROWS
    for chunk_n, num_warps, num_stages in cuts[:2] if not HAS_CUDA else cuts:
        if num_stages * chunk_n * 2 * kernels._padded(case.head_dim) * 2 <= 220 * 1024:
            yield Launch(chunk_n, num_warps, num_stages)


class _Warmup:
    """Stands in for the kernel and only compiles."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **options: self.kernel.warmup(*args, grid=grid, **options)


def compile_all(cases: list[Case]) -> float:
    """Compile what the cases launch, several at a time; returns seconds."""
    began = time.perf_counter()
    if not HAS_CUDA:
        return 0.0
    from triton.runtime._async_compile import AsyncCompileMode

    kernel, own_kernel = kernels._attention_kernel, own_attention._own_rows_kernel
    kernels._attention_kernel, own_attention._own_rows_kernel = _Warmup(kernel), _Warmup(own_kernel)
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for case in cases:
                few = dataclasses.replace(case, num_seqs=1, context=16, rows=min(case.rows, 32))
                bench, fused = Bench(few), Fused(few) if case.decodes else None
                for launch in {None, *launches(case)}:
                    bench.call(0, launch, 1)
                    if fused:
                        fused.decode(0, fused.qkv, launch, 1)
    finally:
        kernels._attention_kernel, own_attention._own_rows_kernel = kernel, own_kernel
    return time.perf_counter() - began


def sweep(case: Case) -> dict[str, Any]:
    """The usual launch, all others, and the best two with other numbers of splits."""
    bench, first = Bench(case), None
    rows: list[dict[str, Any]] = []

    def measure(launch: Launch | None, num_splits: int) -> float:
        nonlocal first
        row: dict[str, Any] = {"launch": launch and dataclasses.astuple(launch), "num_splits": num_splits}
        try:
            out = bench.call(0, launch, num_splits).float()
            first = out if first is None else first
            row["difference"] = float((out - first).abs().max())
            row["us"] = bench.time_us(launch, num_splits)
            row["gb_per_s"] = case.kv_bytes / row["us"] / 1e3
        except Exception as error:  # a launch that does not fit the device is a row of the table
            row |= {"us": math.inf, "error": f"{type(error).__name__}: {error}"[:200]}
        rows.append(row)
        return float(row["us"])

    measure(None, case.splits)
    assert first is not None, rows[0]["error"]
    error = max(
        float((first[b * case.rows : (b + 1) * case.rows] - bench.expected(b)).abs().max())
        for b in {0, case.num_seqs - 1}
    )
    times = {launch: measure(launch, case.splits) for launch in launches(case)}
    others = sorted({1, case.splits // 2, case.splits * 2, case.splits * 4, 2, 4} - {0, case.splits})
    for launch in sorted(times, key=lambda launch: times[launch])[:2]:
        for num_splits in others:
            if num_splits <= max(1, (case.context + case.rows) // 64) and case.rows <= 32:
                measure(launch, num_splits)
                for shortest in (64, 256):
                    if num_splits > 1 and shortest <= case.context < 16 * shortest:
                        measure(dataclasses.replace(launch, min_split_tokens=shortest), num_splits)
    assert not bool(bench.workspace.arrivals.any()), "counters are left behind"
    return {"case": dataclasses.asdict(case), "kv_bytes": case.kv_bytes, "error": error, "rows": rows}


def describe(row: dict[str, Any], copy_gb_per_s: float) -> str:
    cut = "usual         " if row["launch"] is None else "n{:<3} w{} s{} m{:<3}".format(*row["launch"])
    wrong = "" if row.get("difference", 0) < 2e-2 else "  DIFFERS"
    return f"{row['us']:8.2f} us  {100 * row['gb_per_s'] / copy_gb_per_s:4.0f}%  {cut} x{row['num_splits']}{wrong}"


def show(found: dict[str, Any], copy_gb_per_s: float) -> None:
    rows = sorted((row for row in found["rows"] if "error" not in row), key=lambda row: row["us"])
    print(f"{found['case']['name']}  ({found['kv_bytes'] / 1e6:.1f} MB, error {found['error']:.1e})")
    for row in [found["rows"][0], *rows[:4]]:
        print("   ", describe(row, copy_gb_per_s))
    for row in found["rows"]:
        if "error" in row or row["difference"] >= 2e-2:
            print("    FAULT", row)


def other_page_size(found: dict[str, Any], page_size: int) -> str:
    """The best launch of a case on larger pages."""
    best = min((row for row in found["rows"] if "error" not in row and row["launch"]), key=lambda row: row["us"])
    bench = Bench(dataclasses.replace(Case(**found["case"]), page_size=page_size))
    us = bench.time_us(Launch(*best["launch"]), best["num_splits"])
    return f"    {us:8.2f} us with pages of {page_size}, {best['us']:.2f} with {found['case']['page_size']}"


def time_rope(rows: int, num_heads: int, num_kv_heads: int, head_dim: int) -> str:
    total, norms = num_heads + 2 * num_kv_heads, torch.ones(2, head_dim, dtype=DTYPE, device=DEVICE)
    qkv = torch.randn(rows, total * head_dim, dtype=DTYPE, device=DEVICE)
    pages = torch.zeros(2, rows // 16 + 3, 16, num_kv_heads, head_dim, dtype=DTYPE, device=DEVICE)
    cos_sin, at = torch.randn(4096, head_dim, device=DEVICE), torch.arange(rows, device=DEVICE)
    usual, times = (rope._HEADS_OF_FEW, rope._HEADS_OF_MANY), {}
    for heads in (2, 4, 8, 16):
        rope._HEADS_OF_FEW = rope._HEADS_OF_MANY = heads
        times[heads] = time_graph(
            lambda _: rope.rope_and_store(qkv, at, cos_sin, *norms, 1e-6, *pages, at + 32, num_heads), 100
        )
    rope._HEADS_OF_FEW, rope._HEADS_OF_MANY = usual
    return f"rope {num_heads} heads of {head_dim}, {rows:5} rows: " + "  ".join(
        f"{us:.2f} us by {heads}" for heads, us in times.items()
    )


def copy_bandwidth(repeats: int = 10) -> float:
    """GB/s, read and written bytes counted, of copies that are queued behind one another (a graph's are slower)."""
    source = torch.zeros(2**32 if HAS_CUDA else 2**18, dtype=torch.uint8, device=DEVICE)
    if not HAS_CUDA:
        return 2 * source.nbytes / time_graph(lambda _: source.clone(), 1) / 1e3
    for _ in range(3):
        source.clone()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        source.clone()
    end.record()
    end.synchronize()
    return 2 * source.nbytes * repeats / start.elapsed_time(end) / 1e6


def goals(best: dict[str, float], copy_gb_per_s: float, results: dict[str, Any]) -> list[str]:
    def share(name: str) -> float:
        return 100 * float(results[name]["kv_bytes"]) / best[name] / 1e3 / copy_gb_per_s

    wide, narrow = "8b 32 x 4096, w 7", "8b 32 x 4096, w 0"
    lines = []
    if wide in best and narrow in best:
        lines.append(f"w 7 over w 0 at 32 x 4096: {best[wide] / best[narrow]:.2f} (goal 1.3)")
        lines += [f"share of copy bandwidth, {name}: {share(name):.0f}% (goal 60, aim 75)" for name in (narrow, wide)]
    limits = {"8b 32 x 256, w 0": 10, "smollm2 1 x 300, w 0": 3, "smollm2 256 x 300, w 0": 20}
    return lines + [f"{name}: {best[name]:.2f} us (goal {limit})" for name, limit in limits.items() if name in best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=95.0, help="no case begins after this")
    parser.add_argument("--fused", action="store_true", help="decoding in one launch against two, and nothing else")
    parser.add_argument("--smoke", action="store_true", help="toys, on whatever is there")
    args = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(0)
    cases = [case for case in (TOYS if args.smoke else CASES) if args.only in case.name]
    copy = copy_bandwidth()
    print(f"copy bandwidth {copy:.0f} GB/s; compiled in {compile_all(cases):.0f} s")
    results: dict[str, Any] = {}
    for case in [] if args.fused else cases:
        if time.perf_counter() - began > args.seconds:
            print(f"no time left for {case.name}")
            continue
        results[case.name] = sweep(case)
        show(results[case.name], copy)
        if case.name.startswith(("8b 32 x 4096, w 7", "smollm2 32 x 300, w 7", "toy 2")):
            print(other_page_size(results[case.name], 64))
    fused = [Fused(case).compare() for case in cases if case.decodes]
    print("decoding in one launch", *map(describe_fused, fused), sep="\n    ")
    for heads in ((9, 3, 64), (32, 8, 128)):
        print(*(time_rope(rows, *heads) for rows in ((1, 32, 256) if HAS_CUDA else (1,))), sep="\n")
    usual = {name: float(found["rows"][0]["us"]) for name, found in results.items()}
    best = {name: min(float(row["us"]) for row in found["rows"]) for name, found in results.items()}
    for title, times in (("with the usual launches", usual), ("with the best launches", best)):
        print(title, *goals(times, copy, results), sep="\n    ")
    folder = Path(os.environ.get("OUT", "runs"))
    folder.mkdir(parents=True, exist_ok=True)
    report = {
        "copy_gb_per_s": copy,
        "results": list(results.values()),
        "fused": fused,
        "seconds": time.perf_counter() - began,
    }
    (folder / "attention.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
