"""The tables of `slipstream verify-exact`, and what is said below it. Torch-free."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from slipstream.lab.tables import new_table, share, shown

COLORS = {"exact": "green", "differs": "bold red", "inconclusive": "yellow"}
_HEADS = ("check", "mode", "accepted", "rejected", "pruned", "found", "bias", "verdict")


def checks_tables(report: Mapping[str, Any]) -> list[Table]:
    """One for each rule of acceptance, of at most 80 columns."""
    pair = f"{report['model']} with {report['draft']}, {report['conditions']['dtype']}"
    rules = dict.fromkeys(check["acceptance"] for check in report["checks"])
    return [_table(report, rule, f"{pair}: {rule} acceptance") for rule in rules]


def _table(report: Mapping[str, Any], rule: str, title: str) -> Table:
    table = new_table(title, _HEADS)
    for column in (table.columns[0], table.columns[1], table.columns[-1]):
        column.justify = "left"
    for check in report["checks"]:
        if check["acceptance"] == rule:
            table.add_row(*_cells(check), Text(check["verdict"], COLORS[check["verdict"]]))
    return table


def _cells(check: Mapping[str, Any]) -> list[str]:
    plain = check["mode"] == "off"
    counts = ["-" if plain else f"{check[name]:,}" for name in ("accepted", "rejected", "pruned")]
    if "equal" in check:
        return [check["check"], check["mode"], *counts, share(check["equal"], check["requests"]), "-"]
    p_value = check.get("p_value")
    found = shown(p_value, ".2f" if p_value is None or p_value >= 0.005 else ".0e")
    bias = "/".join(shown(check.get(name), ".2f").removeprefix("0") for name in ("bias", "chance"))
    return [check["check"], check["mode"], *counts, found, bias]


def notes(report: Mapping[str, Any]) -> list[str]:
    """Why a check is not plainly exact, and what the odds are."""
    lines = [f"{c['check']}, {c['acceptance']}, {c['mode']}: {c['why']}" for c in report["checks"] if c["why"]]
    conditions = report["conditions"]
    laws = [test for check in report["checks"] for test in check.get("tests", ()) if test["visible"] is not None]
    if laws:
        few, best = max(test["visible"] for test in laws), min(test["visible"] for test in laws)
        lines.append(
            f"law: {conditions['samples']:,} answers a mode to {conditions['law_prompts']} prompts, tokens "
            f"{', '.join(map(str, conditions['positions']))} and the ranks of all; p is the smallest of these, bias its total "
            f"variation and, behind the stroke, what that is on average in a right engine. A right engine is called wrong in 1 of "
            f"{1 / conditions['false_alarm']:,.0f} runs ({conditions['tests']} tests, each at {conditions['odds_per_test']:.1e}). "
            f"A bias that moves a cell of probability 1/2 by {few:.3f} is found 9 times in 10 at any token, by {best:.3f} over all."
        )
    return lines
