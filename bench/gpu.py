"""Everything that is promised of a GPU, measured in one run of less than 9 minutes; a short table comes last.

    make bench-gpu                                    # or: python -m bench.gpu --output runs/bench-gpu.json
    python -m bench.gpu --only smollm2,hf             # some phases only
    python -m bench.gpu --tiny                        # shows on a CPU that every phase runs; no figure means anything

Ceilings come first in each phase, cases take turns wave by wave, and every phase has a time budget: what it leaves out
for lack of time is named. The JSON is written after every phase, so that a run that is cut short leaves what it has.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.gpu_parts import agreement, attention, clock, hf, large, small
from bench.gpu_parts.goals import Goal, Report, goals_table
from bench.gpu_parts.scale import Scale, full, tiny
from bench.gpu_parts.session import Clock, Session
from slipstream.lab import machine
from slipstream.lab.report import plain_json

OUTPUT = Path("runs/bench-gpu.json")
TOTAL_S = 525.0  # of all phases; the last ones get what is left


@dataclass(frozen=True, slots=True)
class Phase:
    run: Callable[[Session, Scale, Clock], Report]
    pair: str  # whose session it gets
    seconds: float  # at most; starting engines counts


# In this order: `start` must find nothing compiled, and what may hang comes last.
PHASES = {
    "start": Phase(large.start, "large", 70),
    "clock": Phase(clock.run, "large", 5),
    "8b": Phase(large.run, "large", 160),
    "attention": Phase(attention.run, "large", 15),
    "smollm2": Phase(small.run, "small", 150),
    "agreement": Phase(agreement.run, "small", 35),
    "hf": Phase(hf.run, "small", 80),
}


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not (options.tiny or torch.cuda.is_available()):
        print("there is no GPU here; --tiny shows on a CPU that every phase runs", file=sys.stderr)
        return 2
    console = Console(highlight=False, width=max(110, Console().width))
    scale = tiny() if options.tiny else full(options.small, options.large)
    report = run(options, scale, lambda line: console.print(line, style="dim", soft_wrap=True, markup=False))
    goals = [Goal(**{k: v for k, v in goal.items() if k != "holds"}) for goal in report["goals"]]
    console.print(goals_table(goals))
    for name, phase in report["phases"].items():
        left_out = f"; left out for lack of time: {', '.join(phase['skipped'])}" if phase["skipped"] else ""
        console.print(f"{name}: {phase['seconds']:.0f} s{left_out}", markup=False)
        if phase["error"]:
            console.print(f"{name} failed: {phase['error']}", markup=False)
    console.print(f"{report['seconds']:.0f} s in all, written to {options.output}")
    return 1 if any(phase["error"] for phase in report["phases"].values()) else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PHASES), help=f"phases, with commas: {','.join(PHASES)} (all)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"JSON file ({OUTPUT})")
    parser.add_argument("--stretch", type=float, default=1.0, help="multiplies the time of every phase (1.0)")
    parser.add_argument("--large", default="random:qwen3-8b", help="the large target; its drafter is random")
    parser.add_argument(
        "--small", default="smollm2-135m", help="where the small target is: a .gguf file, if not installed"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models, for tests")
    options = parser.parse_args(arguments)
    options.only = [name.strip() for name in options.only.split(",")]
    if unknown := [name for name in options.only if name not in PHASES]:
        parser.error(f"--only: {', '.join(unknown)}; choose among {', '.join(PHASES)}")
    return options


def run(options: argparse.Namespace, scale: Scale, say: Callable[[str], None]) -> dict[str, Any]:
    """All phases; the report is on disk after each of them."""
    begin = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() and not options.tiny else "cpu")
    report: dict[str, Any] = {
        **machine.provenance(device), "command": " ".join(["python -m bench.gpu", *sys.argv[1:]]), "started": time.strftime("%F %T"),
        "goals": [], "phases": {},
    }  # fmt: skip
    sessions: dict[str, Session] = {}
    with tempfile.TemporaryDirectory() as home:
        os.environ["SLIPSTREAM_HOME"] = home  # profiles are measured in this run
        for name in (name for name in PHASES if name in options.only):
            session = session_of(PHASES[name].pair, sessions, scale, say)
            say(f"--- {name}")
            left_s = options.stretch * TOTAL_S - (time.perf_counter() - begin)
            phase, goals = run_phase(PHASES[name], session, scale, min(options.stretch * PHASES[name].seconds, left_s))
            report["phases"][name] = phase
            report["goals"] += [goal.as_dict() for goal in goals]
            report["seconds"] = time.perf_counter() - begin
            write(options.output, report)
    return report


def session_of(which: str, sessions: dict[str, Session], scale: Scale, say: Callable[[str], None]) -> Session:
    """The pair's session; the other one's engines and weights go first."""
    if which not in sessions:
        for other in sessions.values():
            other.close()
        sessions.clear()
        gc.collect()
        sessions[which] = Session(scale.large if which == "large" else scale.small, say)
    return sessions[which]


def run_phase(phase: Phase, session: Session, scale: Scale, seconds: float) -> tuple[dict[str, Any], list[Goal]]:
    """What it reports, or how it failed: the others go on."""
    left, begin = Clock(seconds), time.perf_counter()
    found: dict[str, Any] = {}
    goals: list[Goal] = []
    error = None
    try:
        found, goals = phase.run(session, scale, left)
    except Exception as failure:  # a bench that lost one phase still has the others
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    return {**found, "seconds": time.perf_counter() - begin, "skipped": left.skipped, "error": error}, goals


def write(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain_json(report), indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
