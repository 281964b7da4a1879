"""What lag gains and costs, cell by cell: a shape, a number of requests at a time, S, and the kind of load.

    python -m bench.lag trace --drafts 7 --temperature 1                     # the trace that cells are replayed from
    python -m bench.lag cell 8b --drafts 7 --concurrency 128,32 --temperature 1   # acceptance replayed, Qwen3-8B's shape
    python -m bench.lag cell 8b --drafts 7 --concurrency 32 --set mt_bench --set mbpp   # kinds of prompts, a cell each
    python -m bench.lag cell smollm2 --drafts 16 --concurrency 8 --model runs/model.gguf
    python -m bench.lag simulate                                             # what simulation says of every 8b cell so far
    python -m bench.lag tables --page docs/LAG.md                            # all cells so far, into the page

A cell is one bench: its modes wave by wave in turn, four times as many requests as run at a time. Its JSON goes to
bench/results/lag and is named by the cell, so that cells measured apart add up to the whole comparison. Cells of one
command share what they load and, the largest first, the cost model, which is kept beside them; kinds of prompts also the
engines, one kind after the other.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from slipstream.config import SamplingParams
from slipstream.lab.bench_options import BenchOptions, Replay
from slipstream.lab.variants import LATE

RESULTS = Path(__file__).parent / "results" / "lag"
DATA = Path(__file__).parent / "data"
SETS = ("gsm8k", "humaneval", "math500", "mbpp", "mt_bench")
MODES = ("off", "static", "adaptive", "lag", "lag-budget", LATE)
REQUESTS_EACH = 4  # of every slot, in a wave
FEWEST_REQUESTS = 8
PLAIN_BUDGET_S = 4.0
NO_LIMIT = 1 << 30  # tokens of an answer that ends by itself
EXTRA = ("oracle", "lag-2", "lag-raw")  # simulated beside what was measured, with every static S
SHAPES = {"8b": "random:qwen3-8b", "smollm2": "smollm2-135m"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    shape: str  # 8b or smollm2
    drafts: int  # S
    concurrency: int
    temperature: float = 0.0  # that the trace was taken at, or that the small model is sampled at
    kind: str | None = None  # of prompts; None: all, mixed
    fixed: tuple[int, ...] = ()  # widths that are measured beside the modes
    waves: int = 3

    @property
    def name(self) -> str:
        warm = f"t{self.temperature:g}" if self.temperature else None
        return "-".join(filter(None, (self.shape, f"s{self.drafts}", f"c{self.concurrency}", warm, self.kind)))

    @property
    def trace(self) -> Path:
        return trace_path(self.drafts, self.temperature)

    @property
    def num_requests(self) -> int:
        return max(FEWEST_REQUESTS, REQUESTS_EACH * self.concurrency)

    def options(self, model: str) -> BenchOptions:
        """model: where the small one is."""
        common: dict[str, Any] = {
            "modes": (*MODES, *(f"fixed:{width}" for width in self.fixed)), "num_speculative_tokens": (self.drafts,),
            "concurrency": (self.concurrency,), "requests": self.num_requests, "waves": self.waves, "probe": True,
        }  # fmt: skip
        if self.shape == "8b":
            replay = Replay(trace=self.trace, sets=(self.kind,) if self.kind else ())
            sampling = SamplingParams(max_tokens=NO_LIMIT)
            return BenchOptions(model=SHAPES["8b"], draft="random", replay=replay, sampling=sampling, **common)
        sampling = SamplingParams(max_tokens=256, temperature=self.temperature, seed=0 if self.temperature else None)
        return BenchOptions(
            model=model, draft="smollm2-135m-dspark", sampling=sampling,
            prompts=prompts_of((self.kind,) if self.kind else SETS, self.num_requests), **common,
        )  # fmt: skip


def trace_path(drafts: int, temperature: float) -> Path:
    warm = f"-t{temperature:g}" if temperature else ""
    return DATA / "traces" / f"smollm2-dspark{warm}-s{drafts}.npz"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.command == "trace":
        return subprocess.run([sys.executable, "-m", "slipstream", *trace_command(options)]).returncode
    if options.command == "cell":
        measure(options)
    elif options.command == "simulate":
        simulate(options.out)
    else:
        out = options.out
        tables = {shape: table([c for c in cells(out) if c[0].startswith(shape)]) for shape in SHAPES}
        tables |= {"simulated": compared(out), "static": best_static(out)}
        if options.page is not None:
            fill(options.page, tables)
        print("\n\n".join("\n".join(lines) for lines in tables.values()))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    trace = commands.add_parser("trace", help="what is drafted at every token of the small pair's answers")
    cell = commands.add_parser("cell", help="measure one cell, or several")
    cell.add_argument("shape", choices=tuple(SHAPES))
    cell.add_argument("--concurrency", type=_numbers, required=True, help="several: 128,32,8,1")
    cell.add_argument("--set", choices=SETS, action="append", help="one kind of prompts; again for others (all, mixed)")
    cell.add_argument("--fixed", type=_numbers, default=(), help="fixed widths measured beside the modes: 2,3,4")
    cell.add_argument("--waves", type=int, default=3)
    cell.add_argument("--timeline", action="store_true", help="draw two steps of each mode as well")
    for command in (trace, cell):
        command.add_argument("--drafts", type=int, required=True, help="S; 7 or 16, of which there are traces")
        command.add_argument("--temperature", type=float, default=0.0)
        command.add_argument("--model", default=SHAPES["smollm2"], help="where the small model is, if not installed")
    tables = commands.add_parser("tables", help="print what was measured and simulated so far")
    tables.add_argument("--page", type=Path, help="put the tables into this page as well, where its marks are")
    for command in (cell, tables, commands.add_parser("simulate", help="the same cells in simulation")):
        command.add_argument("--out", type=Path, default=RESULTS)
    trace.add_argument("--out", type=Path, help="another file")
    return parser.parse_args(arguments)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def trace_command(options: argparse.Namespace) -> list[str]:
    """What `slipstream` is asked for."""
    prompts = [part for name in SETS for part in ("--prompts", str(DATA / "prompts" / f"{name}.jsonl"))]
    return [
        "trace", "--model", options.model, "--draft", "smollm2-135m-dspark", *prompts, "--requests", "32",
        "--num-speculative-tokens", str(options.drafts), "--temperature", f"{options.temperature:g}",
        "--concurrency", "64", "--out", str(options.out or trace_path(options.drafts, options.temperature)),
    ]  # fmt: skip


def measure(options: argparse.Namespace) -> None:
    """One cell after the other, on models that are loaded once."""
    import torch

    from slipstream.lab import bench
    from slipstream.lab.measure import load
    from slipstream.lab.timeline import Timeline
    from slipstream.lab.timeline_plot import timeline_plot

    options.out.mkdir(parents=True, exist_ok=True)
    models = None
    for concurrency in options.concurrency:
        start_s = time.perf_counter()
        kinds = [
            Cell(
                shape=options.shape, drafts=options.drafts, concurrency=concurrency, temperature=options.temperature,
                kind=kind, fixed=options.fixed, waves=options.waves,
            )
            for kind in options.set or (None,)
        ]  # fmt: skip
        asked, timeline = [cell.options(options.model) for cell in kinds], Timeline()
        models = models or load(asked[0].model, asked[0].draft, asked[0].engine, asked[0].speculative)
        watch = timeline.add if options.timeline else None
        found = bench.run_all(asked, lambda line: print(line, file=sys.stderr, flush=True), watch, models)
        prices = cost_model(models, concurrency)
        for cell, result in zip(kinds, found, strict=True):
            write(options.out / f"{cell.name}.json", {**result.report, "cost_model": prices})
            print("\n".join(table([(cell.name, result.report["rows"])])), flush=True)
        if options.timeline:  # of the last kind
            shown = {label: spans for label, spans in timeline.cases.items() if not label.startswith("fixed")}
            timeline_plot(options.out / f"{kinds[-1].name}.png", shown)
        print(f"{time.perf_counter() - start_s:.0f} s", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def cost_model(models: Any, concurrency: int) -> dict[str, Any]:
    """What the engines of a cell decided by, measured at the start of the first of them, and what plain decoding costs."""
    from slipstream import LLM
    from slipstream.decide.cost import CostProfile
    from slipstream.lab.profile import BASE_CONTEXT, profile_key, with_plain

    key = profile_key(models.target_name, str(models.drafter_name), models.device, models.dtype)
    llm = LLM(models, max_num_seqs=concurrency, max_model_len=4 * BASE_CONTEXT, prefix_caching=False)
    return with_plain(CostProfile.load(key.path()), llm.engine, PLAIN_BUDGET_S).to_dict()


def write(path: Path, report: dict[str, Any]) -> None:
    from slipstream.lab.report import plain_json

    path.write_text(
        json.dumps(plain_json({"command": f"python -m bench.lag {' '.join(sys.argv[1:])}", **report})) + "\n"
    )


def simulate(folder: Path) -> None:
    """Every replayed cell again, in simulation: same trace, same requests, at the prices that its engines went by."""
    for name, report in reports(folder):
        if name.startswith("8b") and "cost_model" in report:
            write(folder / f"simulated-{name}.json", {"cell": name, **simulated(report)})


def simulated(report: dict[str, Any]) -> dict[str, Any]:
    """What `slipstream simulate` says of a cell."""
    from slipstream.decide.cost import CostProfile
    from slipstream.lab import simulate as lab
    from slipstream.lab.simulate_options import SimulateOptions

    measured, first = {row["mode"]: row for row in report["rows"]}, report["rows"][0]
    policies = [mode for mode in measured if mode not in ("static", LATE)] + [*EXTRA, "static:all"]
    kind = first["prompts"] if first["prompts"] in SETS else None
    exposed = measured["adaptive"]["gap_us"] - measured["lag"]["gap_us"]
    profile = CostProfile.from_dict(report["cost_model"]).save(Path("runs") / "cost.json")
    options = SimulateOptions(
        trace=Path(first["acceptance"].removeprefix("replayed from ")), profile=profile, policies=tuple(policies),
        signals=("head",), num_speculative_tokens=(measured["lag"]["num_speculative_tokens"],),
        sets=(kind,) if kind else (), concurrency=(first["concurrency"],), requests=first["requests"],
        waves=first["waves"], calibration="none", exposed_us=f"{max(exposed, 0):.0f}",
    )  # fmt: skip
    rows = lab.run(options, lambda line: print(line, file=sys.stderr, flush=True))["rows"]
    return {"exposed_us": exposed, "rows": rows}


def reports(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, report) of every cell that was measured, the smaller ones first."""

    def order(path: Path) -> tuple[str, int, int, str]:
        shape, drafts, at, *kind = path.stem.split("-")
        return shape, int(drafts[1:]), int(at[1:]), "".join(kind)

    cells = (path for path in folder.glob("*-s*-c*.json") if not path.stem.startswith("simulated"))
    for path in sorted(cells, key=order):
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))


def prompts_of(sets: Sequence[str], count: int, folder: Path = Path("runs")) -> Path:
    """A file of `count` prompts: those of several sets take turns in it, and all begin again where there are too few."""
    lines = [(DATA / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines() for name in sets]
    in_turn = (line for turn in zip(*lines, strict=False) for line in turn)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{sets[0] if len(sets) == 1 else 'mixed'}.jsonl"
    file.write_text("\n".join(islice(cycle(in_turn), count)) + "\n", encoding="utf-8")
    return file


def cells(folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(name, rows) of every cell."""
    for name, report in reports(folder):
        yield name, report["rows"]


def table(measured: Sequence[tuple[str, list[dict[str, Any]]]]) -> list[str]:
    """Markdown: tok/s with its spread, beside plain decoding and beside static; what was verified; the critical path."""
    lines = [
        "| cell | mode | tok/s (min - max) | x off | x static | tokens/step | rows/step | decide, build, gap in us | busy |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, rows in measured:
        by_mode = {row["mode"]: row for row in rows}
        for mode, row in by_mode.items():
            over = row["tok_per_s"] / by_mode["static"]["tok_per_s"]
            path = ", ".join(
                "-" if row[what] is None else f"{row[what]:.0f}" for what in ("decide_us", "build_us", "gap_us")
            )
            lines.append(
                f"| {name} | {mode} | {row['tok_per_s']:,.0f} ({row['tok_per_s_min']:,.0f} - {row['tok_per_s_max']:,.0f}) "
                f"| {row['ratio_to_off']:.2f} | {over:.2f} | {row['mean_accepted_length']:.2f} | {row['rows_per_step']:.0f} "
                f"| {path} | {row['device_busy']:.0%} |"
            )
    return lines


def fill(page: Path, tables: dict[str, list[str]]) -> None:
    """Between <!-- name --> and <!-- end name --> the page gets the table of that name."""
    text = page.read_text(encoding="utf-8")
    for name, lines in tables.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end {name} -->")
        if not end:
            raise SystemExit(f"{page} has no marks for {name}")
        text = before + begin + "\n".join(lines) + "\n" + end + after
    page.write_text(text, encoding="utf-8")


def compared(folder: Path) -> list[str]:
    """Markdown: how fast each mode is beside static, measured and simulated."""
    lines = [
        "| cell | mode | measured / static | simulated / static | apart | simulated regret |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, mode, measured, simulated, regret in ratios(folder):
        apart = f"{simulated / measured - 1:+.1%}"
        lines.append(f"| {name} | {mode} | {measured:.3f} | {simulated:.3f} | {apart} | {regret:.1%} |")
    return lines


def best_static(folder: Path) -> list[str]:
    """Markdown, all simulated: modes beside the static engine of the best S, and lag's confidence older or as it was said."""
    names = ("adaptive", "lag", "lag-budget", "lag-2", "lag-raw", "oracle")
    lines = [
        "| cell | best static | " + " | ".join(f"{name} / it" for name in names) + " |",
        "|---|---|" + "---:|" * len(names),
    ]
    for name, _ in cells(folder):
        path = folder / f"simulated-{name}.json"
        if path.exists():
            speed = {row["policy"]: row["tok_per_s"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
            best = max((policy for policy in speed if policy.startswith("static:")), key=speed.__getitem__)
            lines.append(f"| {name} | {best} | " + " | ".join(f"{speed[n] / speed[best]:.3f}" for n in names) + " |")
    return lines


def ratios(folder: Path) -> Iterator[tuple[str, str, float, float, float]]:
    """(cell, mode, measured over static, simulated over static, simulated regret to the oracle)."""
    for name, rows in cells(folder):
        path = folder / f"simulated-{name}.json"
        if not path.exists():
            continue
        drafts = next(row["num_speculative_tokens"] for row in rows if row["mode"] == "static")
        simulated = {row["policy"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
        measured = {row["mode"]: row["tok_per_s"] for row in rows}
        base = simulated[f"static:{drafts}"]["tok_per_s"]
        for mode, speed in measured.items():
            if mode not in ("static", LATE):
                row = simulated[mode]
                yield name, mode, speed / measured["static"], row["tok_per_s"] / base, row["regret"]


if __name__ == "__main__":
    sys.exit(main())
