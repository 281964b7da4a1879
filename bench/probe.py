"""What the layout probe says of the shipped drafters, for its own prompt and for two that are hard to draft.

    python bench/probe.py --out bench/results/layout-probe.json

Each drafter is read as its file says; the probe compares its rows under both readings, so this shows how far apart the
right and the wrong one are. `models/probe.py` and docs/formats.md take their figures from the file that comes out.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from slipstream import load_models
from slipstream.lab import machine
from slipstream.load import Models
from slipstream.models.locate import TARGETS, built_in_drafters
from slipstream.models.probe import PROMPT, layout_agreement

PROMPTS = (PROMPT, "Why is the sky blue?", "Write a short story about a lighthouse keeper.")


def rows(models: Models) -> list[dict[str, Any]]:
    assert models.network is not None
    found = []
    for prompt in PROMPTS:
        ids = models.tokenizer.encode(models.tokenizer.chat([{"role": "user", "content": prompt}]))
        began = time.perf_counter()
        agreement = layout_agreement(models.target, models.network, ids, seconds=60.0)
        assert agreement is not None
        found.append({
            "drafter": models.drafter_name, "prompt": prompt, "layout": agreement.layout, "as_read": agreement.as_read,
            "other": agreement.other, "num_compared": agreement.num_compared, "verdict": agreement.verdict,
            "seconds": time.perf_counter() - began,
        })  # fmt: skip
        print(f"{models.drafter_name}: {agreement}: {agreement.verdict}; {prompt}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    target = next(iter(TARGETS))
    every = [load_models(target, name) for name in sorted(built_in_drafters())]
    report = {
        **machine.provenance(every[0].device),
        "conditions": {"target": target, "dtype": str(every[0].dtype).removeprefix("torch.")},
        "rows": [row for models in every for row in rows(models)],
    }
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
