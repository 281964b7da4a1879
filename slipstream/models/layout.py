"""Which row of a drafter's block predicts which token, decided in one place and with its reason.

The two layouts have equal tensors, equal inputs and equal positions; only the reading of the rows differs. A wrong
choice loads cleanly and drafts at under 1% acceptance, so every decision says where it came from: the user, a flag, the
number of drafts that the file proposes, or the class name, in that order. Torch-free; called by `checkpoint`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.errors import CheckpointError

Layout = Literal["fill_in", "anchor_first"]  # row k predicts the token at anchor + k; at anchor + k + 1

# Flag -> whether it is inverted. Upright and true means anchor_first.
LAYOUT_FLAGS = {"sample_from_anchor": False, "query_zero_predicts_next": False, "dspark_bonus_anchor": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutDecision:
    layout: Layout
    reason: str


def decide_layout(config: Mapping[str, Any], block_size: int, override: str | None = None) -> LayoutDecision:
    """The layout of a drafter's config.json; raises CheckpointError where the file contradicts itself."""
    if override is not None:
        if override not in ("fill_in", "anchor_first"):
            raise CheckpointError(f"layout {override!r} is unknown; use fill_in or anchor_first")
        return LayoutDecision(layout=_layout(override == "anchor_first"), reason="set by the user")
    flags = _by_flags(config)
    counted = _by_count(config, block_size, flagged=bool(flags))
    if len({one.layout for one in flags}) > 1:
        raise CheckpointError(
            f"layout flags contradict each other ({', '.join(one.reason for one in flags)}); keep the right one"
        )
    if flags and counted is not None and flags[0].layout != counted.layout:
        raise CheckpointError(
            f"layout {flags[0].layout} ({flags[0].reason}) contradicts layout {counted.layout} ({counted.reason}); "
            "correct the wrong one in config.json, or choose the layout yourself"
        )
    if flags:
        return flags[0]
    return counted or _by_class(config)


def _layout(anchor_first: bool) -> Layout:
    return "anchor_first" if anchor_first else "fill_in"


def _by_flags(config: Mapping[str, Any]) -> list[LayoutDecision]:
    found = []
    for place, values in (("", config), ("dflash_config.", config.get("dflash_config") or {})):
        for key, inverted in LAYOUT_FLAGS.items():
            value = values.get(key)
            if value is None:
                continue
            if not isinstance(value, bool):
                raise CheckpointError(f"layout flag {place}{key} is {value!r}; it must be true or false")
            reason = f"flag {place}{key}={str(value).lower()}"
            found.append(LayoutDecision(layout=_layout(value != inverted), reason=reason))
    return found


def _by_count(config: Mapping[str, Any], block_size: int, flagged: bool) -> LayoutDecision | None:
    """The number of drafts that the file proposes: B - 1 leaves row 0 out, B uses it.

    Fewer are a default for serving, which says nothing; that will do where a flag decides.
    """
    count, proposed = config.get("speculative_tokens"), _proposed(config.get("speculators_config"))
    if None not in (count, proposed) and count != proposed:
        raise CheckpointError(
            f"speculative_tokens is {count!r} at the top level and {proposed!r} in speculators_config; keep the right one"
        )
    count = proposed if count is None else count
    if count is None:
        return None
    if flagged and type(count) is int and 0 < count < block_size - 1:
        return None
    if type(count) is not int or count not in (block_size - 1, block_size):
        raise CheckpointError(
            f"speculative_tokens {count!r} fits neither layout of block_size {block_size}; "
            f"it must be {block_size - 1} (fill_in) or {block_size} (anchor_first)"
        )
    reason = f"speculative_tokens={count} with block_size={block_size}"
    return LayoutDecision(layout=_layout(count == block_size), reason=reason)


def _proposed(speculators_config: Any) -> Any:
    """The number of drafts of a speculators file's first proposal method, None where it names none."""
    if not isinstance(speculators_config, dict):
        return None
    methods = speculators_config.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    return first.get("speculative_tokens") if isinstance(first, dict) else None


def _by_class(config: Mapping[str, Any]) -> LayoutDecision:
    if config.get("speculators_model_type"):
        reason = "speculators file without sample_from_anchor, so older than that flag"
        return LayoutDecision(layout="fill_in", reason=reason)
    name = next(iter(config.get("architectures") or ()), None)
    if name == "Qwen3DSparkModel":
        reason = "architectures Qwen3DSparkModel, whatever its Markov rank"
    elif (config.get("dflash_config") or {}).get("projector_type") == "dspark":
        reason = "dflash_config.projector_type dspark"
    elif name == "DSparkDraftModel":
        reason = "architectures DSparkDraftModel"
    else:
        return LayoutDecision(layout="fill_in", reason=f"architectures {name} without a layout flag")
    return LayoutDecision(layout="anchor_first", reason=reason)
