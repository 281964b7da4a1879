"""The table of `slipstream verify-exact`, and what is said below it. Torch-free."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from slipstream.lab.tables import new_table, share, shown

COLORS = {"exact": "green", "differs": "bold red", "inconclusive": "yellow"}
_HEADS = (
    "check",
    "rule",
    "mode",
    "drafted",
    "accepted",
    "rejected",
    "pruned",
    "equal",
    "p",
    "bias",
    "chance",
    "verdict",
)


def checks_table(report: Mapping[str, Any]) -> Table:
    conditions = report["conditions"]
    title = f"{report['model']} with {report['draft']}, {conditions['dtype']}, on {report['device']['name']}"
    table = new_table(title, _HEADS, ["check", "rule", "mode", "verdict"])
    for check in report["checks"]:
        plain = check["mode"] == "off"
        counts = ["-" if plain else f"{check[name]:,}" for name in ("drafted", "accepted", "rejected", "pruned")]
        equal = share(check["equal"], check["requests"]) if "equal" in check else "-"
        law = [shown(check.get("p_value"), ".2g"), shown(check.get("bias"), ".3f"), shown(check.get("chance"), ".3f")]
        verdict = Text(check["verdict"], COLORS[check["verdict"]])
        table.add_row(check["check"], check["acceptance"], check["mode"], *counts, equal, *law, verdict)
    return table


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
            f"variation and chance what that is on average in a right engine. A right engine is called wrong in 1 of "
            f"{1 / conditions['false_alarm']:,.0f} runs ({conditions['tests']} tests, each at {conditions['odds_per_test']:.1e}). "
            f"A bias that moves a cell of probability 1/2 by {few:.3f} is found 9 times in 10 at any token, by {best:.3f} over all."
        )
    return lines
