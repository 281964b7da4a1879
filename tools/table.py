"""A bench's JSON as the Markdown table of the README, conditions first.

Usage: python tools/table.py bench/results/NAME.json
"""

import json
import sys
from pathlib import Path
from typing import Any

COLUMNS = ("mode", "S", "at", "tok/s (min - max)", "x off", "tokens/step", "accepted", "rows/step", "same text")


def conditions(report: dict[str, Any]) -> str:
    row, device = report["rows"][0], report["device"]
    where = device["name"] + (f", {device['threads']} threads" if device["type"] == "cpu" else "")
    how = "greedy" if row["temperature"] == 0 else f"temperature {row['temperature']}"
    return (
        f"{report['model']} with {report['draft']}, {row['dtype']}, {where}, torch {report['versions']['torch']}, "
        f"{row['requests']} prompts of {row['prompts']}, {how}, median of {row['waves']} interleaved waves, commit {report['git']}"
    )


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["mode"],
        shown(row["num_speculative_tokens"], "d"),
        str(row["concurrency"]),
        f"{row['tok_per_s']:.1f} ({row['tok_per_s_min']:.1f} - {row['tok_per_s_max']:.1f})",
        shown(row["ratio_to_off"], ".2f"),
        shown(row["mean_accepted_length"], ".2f"),
        shown(row["acceptance_rate"], ".0%"),
        shown(row["rows_per_step"], ".2f"),
        "-" if row["same_as_off"] is None else f"{row['same_as_off']}/{row['requests']}",
    )


def shown(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def main(path: Path) -> None:
    report = json.loads(path.read_text(encoding="utf-8"))
    print(conditions(report) + f" ([JSON]({path})):\n")
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---|" + "---:|" * (len(COLUMNS) - 1))
    for row in report["rows"]:
        print("| " + " | ".join(cells(row)) + " |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
