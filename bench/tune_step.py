"""What a tile is worth in a whole step: plain steps of one engine for each candidate table, in turn, wave by wave.

    python -m bench.tune_step 8b --out runs/tune-step-8b.json
    python -m bench.tune_step smollm2 --small runs/model.gguf --out runs/tune-step-smollm2.json
    python -m bench.tune_step 8b --width 7 --rows 256 --only "now,any rows,eight warps"   # of 32 sequences

bench/tune_linear.py times a product beside cold weights; in a step it also decides whether a norm is a launch of its own,
and who waits for whom. A candidate is `TUNED` with some entries replaced, or as it is with every norm a launch (`apart`),
or with launches that wait for the one before to be over (`late`), that come when it is (`behind`), beside the last
programs of any kernel (`beside`), or early in steps of any number of rows (`any rows`), or with attention by other warps
(`eight warps`). `--width` W: steps that verify, W drafts of each sequence and its token, W + 1 rows.
Entries of one candidate for different numbers of rows are choices of their own: compare candidates row by row. Engines
record decoding at the given numbers of rows and nothing else. `linear` is the time in which the library multiplies by
the weights of a step, and does nothing else. Two minutes at most for each model. `--smoke`: a toy, which is how the tests walk through it.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.nn.functional as F

from slipstream.config import SpeculativeConfig
from slipstream.device import shapes
from slipstream.kernels import attention, early
from slipstream.kernels import linear as kernels
from slipstream.kernels.attention import Launch
from slipstream.kernels.linear import Tile, _tile
from slipstream.lab import machine
from slipstream.lab.ceilings import linear_ms, linear_weights
from slipstream.lab.report import plain_json
from slipstream.llm import LLM
from slipstream.load import Models, load_models
from slipstream.rehearse import time_step
from slipstream.testing import tiny_models

Size = tuple[int, int]
CONTEXT, MAX_MODEL_LEN = 216, 432
SMALL_CONTEXT = 24  # on a toy


@dataclass(frozen=True, slots=True)
class Candidate:
    """(O, I) -> (above, up to, tile): what makes the product at more rows than `above` and no more than `up to`."""

    replaced: Mapping[Size, Sequence[tuple[int, int, Tile | None]]] = field(default_factory=dict)
    norms_apart: bool = False
    is_early: bool = True  # kernels are launched while the one before ends
    most_programs: int = (
        early.MOST_PROGRAMS
    )  # of a kernel beside whose last ones others come; norms stay where they are
    most_rows: int = early.MOST_ROWS  # of a step whose kernels are launched early
    attention: Mapping[Launch, Launch] = field(default_factory=dict)  # what is launched -> by what it is replaced

    def table(self) -> dict[Size, tuple[tuple[int, Tile | None], ...]]:
        found = dict(kernels.TUNED)
        for size, entries in self.replaced.items():
            for above, most, tile in entries:
                found[size] = _replaced(found.get(size, ()), above, most, tile)
        return found

    @contextmanager
    def in_force(self) -> Iterator[None]:
        reads, usual = (lambda *_: False) if self.norms_apart else kernels.reads_half_normed, attention.choose_launch

        def launch(*asked: Any) -> Launch:
            found = usual(*asked)
            return self.attention.get(found, found)

        with (
            patch.object(kernels, "TUNED", self.table()), patch.object(kernels, "reads_half_normed", reads),
            patch.object(attention, "choose_launch", launch),
            patch.multiple(
                early, ENABLED=self.is_early, MOST_PROGRAMS=self.most_programs, MOST_ROWS=self.most_rows
            ),
        ):  # fmt: skip
            yield


def _replaced(
    entries: tuple[tuple[int, Tile | None], ...], above: int, most: int, tile: Tile | None
) -> tuple[tuple[int, Tile | None], ...]:
    """Rows up to `above` and beyond `most` keep what they have."""
    until = next((found for rows, found in entries if above <= rows), None)
    before = tuple((rows, found) for rows, found in entries if rows < above)
    after = tuple((rows, found) for rows, found in entries if rows > most)
    return (*before, *(((above, until),) if above else ()), (most, tile), *after)


QKV, OUT, DOWN = (6144, 4096), (4096, 4096), (4096, 12288)
SMALL_QKV, SMALL_OUT, SMALL_GATE_UP, SMALL_DOWN = (960, 576), (576, 576), (3072, 576), (576, 1536)
APART_AND_NOW = {
    "apart": Candidate(norms_apart=True),
    "late": Candidate(is_early=False),
    "behind": Candidate(most_programs=0),
    "beside": Candidate(most_programs=1 << 30),
    "any rows": Candidate(most_rows=1 << 30),
    "now": Candidate(),
}
CANDIDATES: Mapping[str, Mapping[str, Candidate]] = {
    "8b": APART_AND_NOW | {
        "eight warps": Candidate(attention={Launch(64, 4, 3): Launch(64, 8, 3)}),
        # o by a tile, so that gate and up need no norm; at 32 rows they need none already, so qkv
        "a": Candidate({
            OUT: ((4, 8, _tile(16, 32, 64, 2, 9)), (32, 64, _tile(64, 32, 64, 1, 9))),
            QKV: ((16, 32, _tile(32, 64, 64, 1, 9)),),
        }),
        # qkv as well
        "b": Candidate({
            OUT: ((4, 8, _tile(16, 32, 64, 2, 9)), (32, 64, _tile(64, 32, 64, 1, 9))),
            QKV: ((4, 16, _tile(16, 64, 64, 2, 5)), (16, 32, _tile(32, 32, 128, 1, 6)), (32, 64, _tile(64, 32, 128, 1, 4))),
        }),
        # qkv alone; at 64 rows with other tiles for o and down
        "c": Candidate({
            OUT: ((32, 64, _tile(64, 32, 128, 1, 4)),),
            DOWN: ((32, 64, _tile(64, 32, 64, 1, 9)),),
            QKV: ((4, 16, _tile(16, 64, 64, 2, 5)), (16, 32, _tile(32, 64, 128, 1, 4)), (32, 64, _tile(64, 64, 64, 1, 6))),
        }),
    },
    "smollm2": APART_AND_NOW | {
        # gate and up by a tile as long as what stands around them; at 256 rows everything
        "a": Candidate({
            SMALL_GATE_UP: ((64, 128, _tile(64, 32, 64, 1, 10)), (128, 256, _tile(64, 64, 64, 1, 6))),
            SMALL_QKV: ((16, 32, _tile(32, 16, 64, 1, 10)), (128, 256, _tile(64, 32, 64, 1, 10))),
            SMALL_OUT: ((128, 256, _tile(64, 32, 64, 1, 10)),),
            SMALL_DOWN: ((128, 256, _tile(64, 32, 64, 1, 10)),),
        }),
        "b": Candidate({
            SMALL_GATE_UP: ((64, 128, _tile(64, 64, 64, 1, 6)),),
            SMALL_QKV: ((16, 32, _tile(32, 8, 128, 1, 6)), (128, 256, _tile(64, 32, 64, 1, 10))),
            SMALL_DOWN: ((128, 256, _tile(64, 32, 64, 1, 10)),),
        }),
    },
    "toy": APART_AND_NOW,
}  # fmt: skip
ROWS = {"8b": (1, 8, 32, 64, 256), "smollm2": (1, 8, 32, 64, 128, 256), "toy": (1, 2)}

Say = Callable[[str], None]
Times = dict[int, dict[str, list[float]]]  # rows -> candidate, or "linear" -> ms of each wave


def start(models: Models, candidate: Candidate, rows: Sequence[int], width: int) -> LLM:
    """An engine that records steps of these numbers of rows, width + 1 of each sequence, and of no prompts."""
    sequences = sorted(count // (width + 1) for count in rows)
    few = patch.multiple(shapes, SEQUENCES=tuple(sequences), PREFILL_ROWS=(), PREFILL_SEQUENCES=())
    speculative = (
        SpeculativeConfig.for_mode("static", draft_model=str(models.drafter_name), num_speculative_tokens=width)
        if width else SpeculativeConfig()
    )  # fmt: skip
    with few, candidate.in_force():
        return LLM(
            models, speculative=speculative, backend="triton", max_num_seqs=sequences[-1], prefix_caching=False,
            max_model_len=min(MAX_MODEL_LEN, models.target.spec.max_position_embeddings),
        )  # fmt: skip


def measure(
    models: Models, candidates: Mapping[str, Candidate], rows: Sequence[int], width: int, waves: int, deadline: float,
    say: Say,
) -> Times:  # fmt: skip
    """Every candidate at every number of rows in each wave; waves after the first only where time is left."""
    engines = {}
    for name, candidate in candidates.items():
        begun = time.monotonic()
        engines[name] = start(models, candidate, rows, width)
        say(f"engine {name}: {time.monotonic() - begun:.1f} s")
    weights = linear_weights(models.target)
    context, repeats = (CONTEXT, 15) if models.device.type == "cuda" else (SMALL_CONTEXT, 1)
    times: Times = {count: {name: [] for name in ("linear", *candidates)} for count in rows}
    wave_s = 0.0
    for wave in range(waves):
        begun = time.monotonic()
        if wave and begun + wave_s > deadline:
            say(f"no time for more than {wave} waves")
            break
        for count in rows:
            times[count]["linear"].append(linear_ms(weights, count, F.linear))
            for name, candidate in candidates.items():
                with candidate.in_force():  # which matters where nothing is recorded
                    took = time_step(
                        engines[name].engine, num_sequences=count // (width + 1), width=width, context=context,
                        repeats=repeats,
                    )  # fmt: skip
                times[count][name].append(took.verify_ms)
        wave_s = time.monotonic() - begun
    return times


def rows_of(model: str, times: Times) -> list[dict[str, Any]]:
    median = statistics.median
    return [
        {
            "model": model, "rows": count, "candidate": name, "step_ms": median(each), "step_ms_min": min(each),
            "step_ms_max": max(each), "waves": each, "linear_ms": median(found["linear"]),
            "x_linear": median(each) / median(found["linear"]), "x_apart": median(each) / median(found["apart"]),
        }
        for count, found in times.items() for name, each in found.items() if name != "linear"
    ]  # fmt: skip


def table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| model | rows | candidate | step ms (min - max) | x linear | x apart |", "|---|---:|---|---|---:|---:|"]
    for row in found:
        lines.append(
            f"| {row['model']} | {row['rows']} | {row['candidate']} | {row['step_ms']:.3f} ({row['step_ms_min']:.3f} - "
            f"{row['step_ms_max']:.3f}) | {row['x_linear']:.3f} | {row['x_apart']:.3f} |"
        )
    return lines


def load(model: str, small: str, width: int) -> Models:
    target, drafter = ("random:qwen3-8b", "random") if model == "8b" else (small, "smollm2-135m-dspark")
    return load_models(target, drafter if width else None)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("8b", "smollm2"))
    parser.add_argument("--small", default="smollm2-135m", help="where the small model is, if not installed")
    parser.add_argument("--rows", help="1,32: instead of all")
    parser.add_argument("--width", type=int, default=0, help="drafts of each sequence that are verified (0)")
    parser.add_argument("--only", help="apart,now,a: instead of all candidates; apart is always there")
    parser.add_argument("--waves", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=110, help="no wave is begun that would end later")
    parser.add_argument("--smoke", action="store_true", help="a toy")
    parser.add_argument("--out", type=Path, default=Path("runs/tune-step.json"))
    asked = parser.parse_args(arguments)
    begun, model = time.monotonic(), "toy" if asked.smoke else asked.model
    models = tiny_models("dspark" if asked.width else None) if asked.smoke else load(model, asked.small, asked.width)
    rows = ROWS[model] if asked.rows is None else tuple(int(part) for part in asked.rows.split(","))
    if any(count % (asked.width + 1) for count in rows):
        parser.error(f"--rows {asked.rows}: with width {asked.width} a sequence has {asked.width + 1} of them")
    wanted = {"apart", *(CANDIDATES[model] if asked.only is None else asked.only.split(","))}
    candidates = {name: each for name, each in CANDIDATES[model].items() if name in wanted}
    say(f"loaded: {time.monotonic() - begun:.1f} s")
    times = measure(models, candidates, rows, asked.width, asked.waves, begun + asked.seconds, say)
    found = rows_of(model, times)
    command = f"python -m bench.tune_step {' '.join(arguments or sys.argv[1:])}"
    body = {
        "command": command, **machine.provenance(models.device), "seconds": time.monotonic() - begun,
        "tables": {name: {str(size): repr(each) for size, each in c.replaced.items()} for name, c in candidates.items()},
        "rows": found,
    }  # fmt: skip
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(plain_json(body), indent=1) + "\n")
    print("\n".join(table(found)), f"\n{time.monotonic() - begun:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
