"""From what a step costs to what every mode gains, on this machine: profile, trace, simulate, bench, and how well the
simulation foresaw the bench.

    python bench/pipeline.py --out runs/bench          (make bench; under ten minutes on two cores)

Each part is a command that a user could give; they are printed as they run, and everything they write goes to one
folder: profile.json, trace.npz, simulate.json and .png, bench.json, timeline.json (for Perfetto) and .png. summary.json
says how long each took, how far the profile is off on shapes held out from it, and what was foreseen beside what was
measured.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def commands(args: argparse.Namespace) -> Iterator[list[str]]:
    out: Path = args.out
    pair = [*(("--model", args.model) if args.model else ()), *(("--draft", args.draft) if args.draft else ())]
    drafts, requests, tokens = str(args.drafts), str(args.requests), str(args.max_tokens)
    most = max(int(part) for part in args.concurrency.split(","))
    profile, trace = str(out / "profile.json"), str(out / "trace.npz")
    yield ["profile", *pair, "--num-speculative-tokens", drafts, "--max-num-seqs", str(most),
           "--budget", str(args.budget), "--output", profile]  # fmt: skip
    yield ["trace", *pair, "--num-speculative-tokens", drafts, "--requests", requests, "--max-tokens", tokens,
           "--out", trace]  # fmt: skip
    yield ["simulate", "--trace", trace, "--profile", profile, "--concurrency", args.concurrency, "--requests", requests,
           "--output", str(out / "simulate.json"), "--plot", str(out / "simulate.png")]  # fmt: skip
    options = out / "options.json"
    options.write_text(json.dumps({"cost_model": profile}))
    yield ["bench", *pair, "--num-speculative-tokens", drafts, "--requests", requests, "--max-tokens", tokens,
           "--concurrency", args.concurrency, "--waves", str(args.waves), "--config", str(options), "--probe",
           "--timeline", str(out / "timeline.json"), "--timeline", str(out / "timeline.png"),
           "--output", str(out / "bench.json")]  # fmt: skip


def compare(simulated: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ratios to plain decoding and tokens a step, foreseen and measured, of every mode and concurrency that both have."""
    foreseen = {(row["policy"].partition(":")[0], row["signal"], row["concurrency"]): row for row in simulated}
    found = []
    for row in measured:
        like = foreseen.get((row["mode"], row["signal"], row["concurrency"]))
        if like is None or row["mode"] == "off":
            continue
        ratio = like["ratio_to_off"]
        off = next(r for r in measured if (r["mode"], r["concurrency"]) == ("off", row["concurrency"]))
        found.append({
            "mode": row["mode"], "concurrency": row["concurrency"], "simulated": ratio, "measured": row["ratio_to_off"],
            "measured_min": row["tok_per_s_min"] / off["tok_per_s_max"],
            "measured_max": row["tok_per_s_max"] / off["tok_per_s_min"],
            "off_by": ratio / row["ratio_to_off"] - 1,
            "simulated_tokens_per_step": like["mean_accepted_length"],
            "measured_tokens_per_step": row["mean_accepted_length"],
        })  # fmt: skip
    return found


def table(rows: Sequence[dict[str, Any]]) -> Table:
    made = Table(title="speed relative to plain decoding", title_justify="left")
    for name in ("mode", "at", "simulated", "measured", "spread", "simulation off by"):
        made.add_column(name, justify="left" if name == "mode" else "right")
    for row in rows:
        spread = f"{row['measured_min']:.2f} to {row['measured_max']:.2f}"
        ratios = (f"{row[name]:.2f}" for name in ("simulated", "measured"))
        made.add_row(row["mode"], str(row["concurrency"]), *ratios, spread, f"{row['off_by']:+.1%}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--model", help="default: the built-in pair")
    parser.add_argument("--draft")
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the profile")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    out = Console(highlight=False)
    seconds = {}
    for command in commands(args):
        out.print(f"$ slipstream {shlex.join(command)}", style="bold", soft_wrap=True)
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "slipstream", *command], check=True)
        seconds[command[0]] = round(time.perf_counter() - began, 1)
        out.print(f"({seconds[command[0]]:.0f} s)", style="dim")
    profile, simulated, measured = (
        json.loads((args.out / f"{name}.json").read_text()) for name in ("profile", "simulate", "bench")
    )
    rows = compare(simulated["rows"], measured["rows"])
    summary = {
        "command": shlex.join(["python", "bench/pipeline.py", *sys.argv[1:]]), "git": measured["git"],
        "versions": measured["versions"], "device": measured["device"], "seconds": seconds,
        "profile": profile["survey"], "rows": rows,
    }  # fmt: skip
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    out.print(table(rows))


if __name__ == "__main__":
    main()
