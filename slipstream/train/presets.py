"""Published training recipes by name: losses, masks, row weights, normaliser, anchors, noise, optimiser, schedule.

A preset is a set of values that lie under those of a config file; nothing else knows its name, and a drafter records the
values. It says nothing about sizes (batch, steps, layers, vocabulary) or about what the answers are. Torch-free; called
by the command line, and by whoever builds `TrainOptions` from a mapping.

Sources: DSpark, arXiv 2607.05147, and DeepSpec; DFlash, arXiv 2602.06036, as SpecForge trains it; vLLM's speculators.
"""

from collections.abc import Mapping
from typing import Any

from slipstream.errors import ConfigError

_ADAMW = {"method": "adamw", "adam_lr": 6e-4, "betas": [0.9, 0.999], "weight_decay": 0.0, "clip": 1.0}
_EXPONENTIAL = {"weights": "exponential", "normalise": "weights"}
_NO_TERMS = {"ce": 0.0, "l1": 0.0, "tv": 0.0, "kl": 0.0, "confidence": 0.0}
# Speculators adds its noise to raw features; here it is relative to each column's RMS.
_SPECULATORS = {
    "optim": {
        "method": "muon", "muon_lr": 1e-3, "adam_lr": 1e-4, "momentum": 0.95, "betas": [0.9, 0.999], "weight_decay": 0.1,
    },
    "schedule": "linear",
    "anchors": "scored",
    "feature_noise": 0.05,
}  # fmt: skip
_SPECULATORS_LOSSES = {**_NO_TERMS, "label": "teacher", "normalise": "rows", "cumulative_mask": False}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "slipstream": {},
    "deepspec-dspark": {
        "algorithm": "dspark",
        "block_size": 7,
        "recipe": {
            "losses": {
                **_NO_TERMS, **_EXPONENTIAL, "ce": 0.1, "l1": 0.9, "confidence": 1.0, "label": "data", "gamma": 4.0,
                "cumulative_mask": True,
            },
            "optim": _ADAMW, "schedule": "cosine", "warmup": 0.04, "anchors": "next_scored", "feature_noise": 0.0,
        },
    },
    "zlab-dflash": {
        "algorithm": "dflash",
        "block_size": 16,
        "recipe": {
            "losses": {
                **_NO_TERMS, **_EXPONENTIAL, "ce": 1.0, "label": "data", "gamma": 7.0, "cumulative_mask": False,
            },
            "optim": _ADAMW, "schedule": "cosine", "warmup": 0.04, "anchors": "next_scored", "feature_noise": 0.0,
        },
    },
    "speculators-dflash": {
        "algorithm": "dflash",
        "block_size": 16,
        "recipe": {**_SPECULATORS, "losses": {**_SPECULATORS_LOSSES, "ce": 1.0, "weights": "dpace", "alpha": 0.5}},
    },
    "speculators-dspark": {
        "algorithm": "dspark",
        "block_size": 8,
        "recipe": {
            **_SPECULATORS,
            "losses": {
                **_SPECULATORS_LOSSES, "kl": 1.0, "confidence": 1.0, "weights": "exponential", "gamma": 4.0,
            },
        },
    },
}  # fmt: skip


def with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` (fields of TrainOptions, tables as mappings) over those of the preset that their key `preset` names."""
    given = {name: value for name, value in values.items() if name != "preset"}
    name = values.get("preset", "slipstream")
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"preset is {name!r}; choose {', '.join(PRESETS)}")
    return _over(PRESETS[name], given)


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, `above` where they differ; tables are merged key by key."""
    merged = {**below, **above}
    for name in below.keys() & above.keys():
        if isinstance(below[name], Mapping) and isinstance(above[name], Mapping):
            merged[name] = _over(below[name], above[name])
    return merged
