"""What lag gains and costs, cell by cell: one shape, one number of requests at a time and one S a command.

    python -m bench.lag cell 8b --drafts 7 --concurrency 32                  # acceptance replayed at Qwen3-8B's shape
    python -m bench.lag cell smollm2 --drafts 16 --concurrency 8 --model runs/model.gguf
    python -m bench.lag cell 8b --drafts 7 --concurrency 32 --set mt_bench   # one kind of prompts
    python -m bench.lag tables                                               # all cells so far, as docs/LAG.md has them

A cell is one `slipstream bench`: all five modes wave by wave in turn, four times as many requests as run at a time. Its
JSON goes to bench/results/lag and is named by the cell, so that cells measured apart add up to the whole comparison.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "lag"
DATA = Path(__file__).parent / "data"
SETS = ("gsm8k", "humaneval", "math500", "mbpp", "mt_bench")
MODES = ("off", "static", "adaptive", "lag", "lag-budget")
REQUESTS_EACH = 4  # of every slot, in a wave


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    cell = commands.add_parser("cell", help="measure one cell")
    cell.add_argument("shape", choices=("8b", "smollm2"))
    cell.add_argument("--drafts", type=int, required=True, help="S; 7 or 16, of which there are traces")
    cell.add_argument("--concurrency", type=int, required=True)
    cell.add_argument("--set", choices=SETS, help="one kind of prompts (all, mixed)")
    cell.add_argument("--waves", type=int, default=3)
    cell.add_argument("--model", default="smollm2-135m", help="where the small model is, if not installed")
    cell.add_argument("--out", type=Path, default=RESULTS)
    tables = commands.add_parser("tables", help="print all cells as a table")
    tables.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.command == "tables":
        print("\n".join(table(list(cells(options.out)))))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    return subprocess.run([sys.executable, "-m", "slipstream", *command(options)]).returncode


def command(options: argparse.Namespace) -> list[str]:
    """What `slipstream` is asked for."""
    name = "-".join(filter(None, (options.shape, f"s{options.drafts}", f"c{options.concurrency}", options.set)))
    if options.shape == "8b":
        trace = DATA / "traces" / f"smollm2-dspark-s{options.drafts}.npz"
        served = ["--model", "random:qwen3-8b", "--draft", "random", "--acceptance", str(trace)]
        served += ["--prompts", options.set] if options.set else []
    else:
        served = ["--model", options.model, "--draft", "smollm2-135m-dspark", "--max-tokens", "256"]
        served += ["--prompts", str(prompts_of((options.set,) if options.set else SETS))]
    return [
        "bench", *served, "--num-speculative-tokens", str(options.drafts), "--concurrency", str(options.concurrency),
        "--requests", str(REQUESTS_EACH * options.concurrency), "--waves", str(options.waves), "--probe",
        "--output", str(options.out / f"{name}.json"),
    ]  # fmt: skip


def prompts_of(sets: Sequence[str], folder: Path = Path("runs")) -> Path:
    """One file; prompts of several sets take turns in it."""
    files = [DATA / "prompts" / f"{name}.jsonl" for name in sets]
    if len(files) == 1:
        return files[0]
    lines = [file.read_text(encoding="utf-8").splitlines() for file in files]
    folder.mkdir(parents=True, exist_ok=True)
    mixed = folder / "mixed.jsonl"
    mixed.write_text("\n".join(line for turn in zip(*lines, strict=False) for line in turn) + "\n", encoding="utf-8")
    return mixed


def cells(folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(name, rows) of every cell that was measured, the smaller ones first."""

    def order(path: Path) -> tuple[str, int, int, str]:
        shape, drafts, at, *kind = path.stem.split("-")
        return shape, int(drafts[1:]), int(at[1:]), "".join(kind)

    for path in sorted(folder.glob("*-s*-c*.json"), key=order):
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))["rows"]


def table(measured: Sequence[tuple[str, list[dict[str, Any]]]]) -> list[str]:
    """Markdown: tok/s with its spread, beside plain decoding and beside static; what was verified; the critical path."""
    lines = [
        "| cell | mode | tok/s (min - max) | x off | x static | tokens/step | rows/step | decide, build, gap in us | busy |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, rows in measured:
        by_mode = {row["mode"]: row for row in rows}
        for mode in MODES:
            row = by_mode[mode]
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


if __name__ == "__main__":
    sys.exit(main())
