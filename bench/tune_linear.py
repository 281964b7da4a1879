"""How `kernels.linear` should cut up each product: times tiles in CUDA graphs against cuBLAS and prints the table.

    PYTHONPATH=$PWD python bench/tune_linear.py [--only smollm2] [--seconds 145]

Products of SmolLM2-135M, of its drafter and of the Qwen3-8B shape, at 1 to 128 rows. A graph goes through as many
copies of the weight as the level-2 cache cannot hold, so every launch finds its weight in memory, as in a step. A tile
counts only if its result is right. A product behind a norm is timed with all of it; in a step half is made by whoever
wrote the rows, so bench/tune_step.py has the last word. Then whole steps (the linear layers of all layers and the head
in one graph): with the tiles found, and with the library. The first table is the measurement, the second what goes into
`TUNED`. JSON to $OUT (or runs/). Without a device, `--smoke` walks through everything on toys.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

from slipstream.kernels import linear as kernels  # noqa: E402  (the interpreter is chosen before triton is imported)
from slipstream.kernels.linear import Tile, add_linear, fused_linear, tiled_linear  # noqa: E402
from slipstream.ops.fused import Following, HalfNormed  # noqa: E402
from slipstream.ops.fused import fused_linear as reference  # noqa: E402

KERNEL = kernels._product
DEVICE = "cuda" if HAS_CUDA else "cpu"
DTYPE = torch.bfloat16 if HAS_CUDA else torch.float32
L2_BYTES = 200e6  # several times the cache
SHARED_BYTES = 220 * 1024
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
# Rows that tiles are searched at, the rows that the best are then timed at, and how many rows a tile holds.
SEARCHES = ((8, (1, 2, 4, 8, 16), 16), (32, (32,), 32), (64, (64,), 64), (128, (128,), 64))


@dataclasses.dataclass(frozen=True)
class Product:
    model: str
    name: str
    num_weight_rows: int
    num_in: int
    norm: bool = False
    gated: bool = False
    residual: bool = False

    @property
    def num_out(self) -> int:
        return self.num_weight_rows // 2 if self.gated else self.num_weight_rows

    @property
    def num_bytes(self) -> int:
        return 2 * self.num_weight_rows * self.num_in


def layer(model: str, qkv: int, q_dims: int, hidden: int, inner: int) -> tuple[Product, ...]:
    return (
        Product(model, "qkv", qkv, hidden, norm=True),
        Product(model, "o", hidden, q_dims, residual=True),
        Product(model, "gate_up", 2 * inner, hidden, norm=True, gated=True),
        Product(model, "down", hidden, inner, residual=True),
    )


SMOLLM2 = (*layer("smollm2", 960, 576, 576, 1536), Product("smollm2", "head", 49_152, 576, norm=True))
QWEN3_8B = (*layer("8b", 6144, 4096, 4096, 12_288), Product("8b", "head", 151_936, 4096, norm=True))
DRAFTER = (
    *layer("drafter", 960, 576, 576, 1216)[2:],
    Product("drafter", "fc", 576, 5 * 576),
    Product("drafter", "head", 16_384, 576, norm=True),
)
TOYS = (*layer("toy", 64, 32, 32, 48), Product("toy", "head", 100, 32, norm=True))
STEPS = {"smollm2": (SMOLLM2, 30, 30), "8b": (QWEN3_8B, 12, 36), "toy": (TOYS, 2, 2)}  # layers run, layers in all


def candidates(product: Product, tile_rows: int) -> Iterator[Tile]:
    """Few enough to compile. Small weights are a matter of latency, large ones of bytes in flight."""
    small = product.num_bytes < 8e6
    many = product.num_weight_rows > 8000
    columns = (16, 32) if small and many else (8, 16, 32) if small else (32, 64, 128) if many else (16, 32, 64)
    shapes = (
        [(4, 4, 32), (4, 4, 64), (8, 8, 32)] if small else [(4, 4, 32), (4, 4, 64), (2, 2, 64)]
    )  # lanes, warps, depth
    if tile_rows >= 32:
        shapes = [*shapes[:2], (1, 4, 64), (1, 4, 128)]
    for count, (lanes, warps, depth) in itertools.product(columns, shapes):
        if lanes > 1 and tile_rows * count > 2048:
            continue  # a warp would hold all these sums
        for norm_apart in (False, True) if product.norm and (not small or tile_rows > 16) else (False,):
            tile = fit(product, Tile(
                rows=tile_rows, columns=count, depth=depth, lanes=lanes, warps=warps, stages=2, norm_apart=norm_apart
            ))  # fmt: skip
            if tile is not None:
                yield tile


def fit(product: Product, tile: Tile) -> Tile | None:
    """As many stages as are of use, or as let two programs (of small weights, and of few columns, one) live together."""
    x_tiles = 2 if product.norm and not tile.norm_apart else 1
    stage_bytes = 2 * tile.lanes * tile.depth * (tile.columns + x_tiles * tile.rows)
    turns = -(-product.num_in // (tile.lanes * tile.depth))
    stages = min(SHARED_BYTES // (1 if product.num_bytes < 8e6 else 2) // stage_bytes, turns + 1, 10)
    sums_bytes = 4 * tile.lanes * tile.rows * tile.columns  # reduced through shared memory at the end
    if stages < 2 or sums_bytes > SHARED_BYTES:
        return None
    return dataclasses.replace(tile, stages=int(stages))


def operands(product: Product, num_rows: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """x, weight, and the options of a fused_linear."""
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=DTYPE)

    options: dict[str, Any] = {"gated": product.gated}
    if product.norm:
        options |= {"norm": 1 + 0.1 * draw(product.num_in), "eps": 1e-5}
    options["residual" if product.residual else "out"] = draw(num_rows, product.num_out)
    weight = draw(product.num_weight_rows, product.num_in).mul_(product.num_in**-0.5)
    return draw(num_rows, product.num_in), weight, options


class CompileOnly:
    """Stands for the kernel in a compiling process: nothing is launched, so nothing disturbs what is being timed."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return functools.partial(KERNEL.warmup, grid=grid)


def compile_one(product: Product, num_rows: int, tile: Tile) -> None:
    """In a process of its own: fills Triton's cache on disk, where the measuring process finds the binary."""
    kernels._product = CompileOnly()
    x, weight = (
        torch.empty(n, product.num_in, device=DEVICE, dtype=DTYPE) for n in (num_rows, product.num_weight_rows)
    )
    out = torch.empty(num_rows, product.num_out, device=DEVICE, dtype=DTYPE)
    has_norm = product.norm and not tile.norm_apart
    norm = torch.empty(product.num_in, device=DEVICE, dtype=DTYPE) if has_norm else None
    where: dict[str, Any] = {"residual" if product.residual else "out": out}
    tiled_linear(x, weight, None, tile, norm=norm, eps=1e-5, gated=product.gated, **where)
    torch.cuda.empty_cache()


def graph_us(launches: list[Callable[[], object]], repeats: int = 7) -> float:
    """Median time of a replay of all `launches` in one graph, per launch. Without a device: of calling them once."""
    if not HAS_CUDA:
        begun = time.perf_counter()
        for launch in launches:
            launch()
        return (time.perf_counter() - begun) * 1e6 / len(launches)
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times[2:])


class Bench:
    """One product's operands, enough copies of its weight, and what its launches take."""

    def __init__(self, product: Product) -> None:
        self.product = product
        _, weight, _ = operands(product, 1)
        num_copies = max(2, int(L2_BYTES / product.num_bytes) + 1) if HAS_CUDA else 2
        self.weights = [weight, *(weight.clone() for _ in range(num_copies - 1))]

    def is_right(self, num_rows: int, tile: Tile) -> bool:
        x, weight, options = operands(self.product, num_rows)
        wide = {name: v.float() if isinstance(v, Tensor) else v for name, v in options.items()}
        expected = reference(x.float(), weight.float(), **wide)
        error = (tiled_linear(x, weight, None, tile, **options).float() - expected).abs().max() / expected.abs().max()
        return bool(error < 2e-2)

    def tile_us(self, num_rows: int, tile: Tile) -> float:
        x, _, options = operands(self.product, num_rows)
        return graph_us([lambda w=w: tiled_linear(x, w, None, tile, **options) for w in self.weights])  # type: ignore[misc]

    def library_us(self, num_rows: int) -> float:
        x, _, options = operands(self.product, num_rows)
        whole = {"residual": None, "norm": None, "eps": 0.0, "out": None} | options
        return graph_us([lambda w=w: kernels._library(x, w, None, **whole) for w in self.weights])  # type: ignore[misc]

    def product_us(self, num_rows: int) -> float:
        """The bare product by cuBLAS, without norm, gate and residual."""
        x, _, _ = operands(self.product, num_rows)
        return graph_us([lambda w=w: torch.mm(x, w.t()) for w in self.weights])  # type: ignore[misc]


Found = dict[int, tuple[float, Tile | None]]  # by rows: the best time, and the tile or the library


def search(
    bench: Bench, compiled: dict[tuple[int, Tile], "Future[None] | None"], deadline: float
) -> list[dict[str, Any]]:
    """Rows of the first table, best tiles first within each number of rows."""
    results = []
    for at, rows, tile_rows in SEARCHES:
        timed = []
        for tile in itertools.islice(candidates(bench.product, tile_rows), None if HAS_CUDA else 2):
            if time.monotonic() > deadline:
                break
            time_us = try_tile(bench, at, tile, compiled.get((tile_rows, tile)))
            if time_us is not None:
                timed.append((time_us, tile))
        timed.sort(key=lambda pair: pair[0])
        for num_rows in rows:
            best = sorted(
                ((bench.tile_us(num_rows, tile), tile) for _, tile in timed[:3]), key=lambda pair: pair[0]
            ) if num_rows != at else timed[:3]  # fmt: skip
            results.append(row(bench, num_rows, best))
            print_row(results[-1])
    return results


def try_tile(bench: Bench, num_rows: int, tile: Tile, compiled: "Future[None] | None") -> float | None:
    """None where it does not compile, does not fit, or computes something else; which is said."""
    try:
        if compiled is not None:
            compiled.result()
        if bench.is_right(num_rows, tile):
            return bench.tile_us(num_rows, tile)
        print(f"  wrong: {bench.product.name} {short(tile)}")
    except Exception as error:  # whatever a compiler may raise; the others go on
        print(
            f"  failed: {bench.product.name} {short(tile)}: {str(error).splitlines()[0][:90] if str(error) else error!r}"
        )
    return None


def row(bench: Bench, num_rows: int, best: list[tuple[float, Tile]]) -> dict[str, Any]:
    product = bench.product
    return {
        "model": product.model, "product": product.name, "shape": (product.num_weight_rows, product.num_in),
        "rows": num_rows, "library_us": bench.library_us(num_rows), "mm_us": bench.product_us(num_rows),
        "tiles": [(us, dataclasses.asdict(tile)) for us, tile in best],
        "memory_gb_per_s": product.num_bytes / 1e3 / best[0][0] if best else None,
    }  # fmt: skip


def print_row(r: dict[str, Any]) -> None:
    best = r["tiles"][0] if r["tiles"] else (float("nan"), None)
    tile = short(Tile(**best[1])) if best[1] else "-"
    print(
        f"{r['model']:8} {r['product']:8} {r['rows']:4}  tile {best[0]:7.2f} us"
        f"  library {r['library_us']:7.2f}  mm {r['mm_us']:7.2f}  {r['memory_gb_per_s'] or 0:6.0f} GB/s  {tile}",
        flush=True,
    )


def short(tile: Tile) -> str:
    norm = " norm apart" if tile.norm_apart else ""
    return f"{tile.rows}x{tile.columns}x{tile.depth}*{tile.lanes} warps {tile.warps} stages {tile.stages}{norm}"


def literal(tile: Tile | None) -> str:
    if tile is None:
        return "None"
    given = {name: value for name, value in dataclasses.asdict(tile).items() if value is not False}
    return f"Tile({', '.join(f'{name}={value}' for name, value in given.items())})"


def table(results: list[dict[str, Any]]) -> dict[tuple[int, int], tuple[tuple[int, Tile | None], ...]]:
    """What goes into TUNED. One tile serves up to 16 rows: the one that is best at 8, if it beats the library there."""
    found: dict[tuple[int, int], tuple[tuple[int, Tile | None], ...]] = {}
    for r in results:
        if r["rows"] < 8 or r["rows"] == 16:
            continue
        tile = Tile(**r["tiles"][0][1]) if r["tiles"] and r["tiles"][0][0] < r["library_us"] else None
        entry = (16 if r["rows"] == 8 else r["rows"], tile)
        found[r["shape"]] = (*found.get(r["shape"], ()), entry)
    return found


def step_ms(model: str, num_rows: int, tuned: dict[Any, Any]) -> float:
    """All linear layers of a step in one graph, with their own weights, scaled to all layers of the model."""
    products, num_layers, num_all = STEPS[model]
    torch.manual_seed(0)
    hidden = products[0].num_in
    stream = torch.randn(num_rows, hidden, device=DEVICE, dtype=DTYPE)
    inputs = {p.num_in: torch.randn(num_rows, p.num_in, device=DEVICE, dtype=DTYPE) for p in products}
    norm = torch.ones(hidden, device=DEVICE, dtype=DTYPE)
    drawn = {p.name: operands(p, 1)[1] for p in products}
    layers = [{p.name: drawn[p.name].clone() for p in products[:4]} for _ in range(num_layers)]

    def run(weights: dict[str, Tensor], half: HalfNormed | None, following: Following | None) -> HalfNormed | None:
        fused_linear(stream, weights["qkv"], norm=norm, eps=1e-5, half=half)
        half = add_linear(inputs[products[1].num_in], weights["o"], None, stream, (norm, weights["gate_up"]))
        inner = fused_linear(stream, weights["gate_up"], norm=norm, eps=1e-5, gated=True, half=half)
        return add_linear(inner, weights["down"], None, stream, following)

    def run_layers() -> None:
        half = None
        for weights, then in zip(layers, [*layers[1:], None], strict=True):
            half = run(weights, half, None if then is None else (norm, then["qkv"]))

    kernels.TUNED = tuned
    layers_us = graph_us([run_layers])
    head_us = graph_us([lambda: fused_linear(stream, drawn["head"], norm=norm, eps=1e-5)] * 3)
    return (layers_us * num_all / num_layers + head_us) / 1e3


def measure_steps(models: set[str], tuned: dict[tuple[int, int], Any]) -> list[dict[str, Any]]:
    library = dict.fromkeys(tuned, ())
    results = []
    for model in models & STEPS.keys():
        for num_rows in (1, 8, 16, 32, 64) if HAS_CUDA else (2,):
            times = {"tiles": step_ms(model, num_rows, tuned), "library": step_ms(model, num_rows, library)}
            print(
                f"step {model:8} {num_rows:3} rows  " + "  ".join(f"{k} {v:.3f} ms" for k, v in times.items()),
                flush=True,
            )
            results.append({"model": model, "rows": num_rows, **times})
    return results


def submit(pool: ProcessPoolExecutor, product: Product) -> dict[tuple[int, Tile], "Future[None] | None"]:
    jobs = {(rows, tile): at for at, _, rows in SEARCHES for tile in candidates(product, rows)}
    return {key: pool.submit(compile_one, product, at, key[1]) for key, at in jobs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="smollm2, 8b or drafter")
    parser.add_argument("--seconds", type=float, default=145, help="what is not searched by then is left out")
    parser.add_argument("--workers", type=int, default=max(2, (os.cpu_count() or 2) - 2))
    parser.add_argument("--smoke", action="store_true", help="toys, on the interpreter where there is no device")
    options = parser.parse_args()
    begun = time.monotonic()
    products = TOYS if options.smoke else (*SMOLLM2, *QWEN3_8B, *DRAFTER)
    products = tuple(p for p in products if options.only in (None, p.model))
    deadline = begun + options.seconds - 15  # the steps come after the search
    results: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {p: submit(pool, p) if HAS_CUDA else {} for p in products}
        for product in products:
            if time.monotonic() > deadline:
                print(f"left out: {product.model} {product.name}")
                continue
            results += search(Bench(product), pending[product], deadline)
        pool.shutdown(wait=False, cancel_futures=True)
    tuned = table(results)
    with torch.inference_mode():
        steps = measure_steps({r["model"] for r in results}, tuned)
    print("\nTUNED = {")
    for shape, entries in tuned.items():
        print(f"    {shape}: (" + ", ".join(f"({rows}, {literal(tile)})" for rows, tile in entries) + ",),")
    print("}")
    folder = Path(os.environ.get("OUT", "runs"))
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if HAS_CUDA else "interpreter"
    body = {
        "device": device,
        "torch": torch.__version__,
        "seconds": time.monotonic() - begun,
        "products": results,
        "steps": steps,
    }
    (folder / "tune_linear.json").write_text(json.dumps(body, indent=1))
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
