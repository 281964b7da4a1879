"""Rotary positions as a value: which frequencies, read from a Hugging Face config and checked.

`models.gguf` makes the same value from GGUF metadata, `models.layers.inverse_frequencies` turns it into numbers. No
torch here. Called by `spec`, `gguf` and `checkpoint`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import CheckpointError

_DEFAULT_THETA = 10000.0  # where a file is silent
_MOST_POSITIONS = 2**31  # before scaling; far above every real model


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary frequencies. `models.layers.inverse_frequencies` turns them into numbers."""

    theta: float
    scaling: str = "none"  # none | linear | dynamic | llama3 | yarn | factors
    factor: float = 1.0  # linear, llama3, yarn; dynamic acts only beyond max_position_embeddings, which is never served
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 0  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    divisors: tuple[float, ...] = ()  # factors: one per frequency, from a GGUF `rope_freqs` tensor  [head_dim / 2]

    def __post_init__(self) -> None:
        _check_rope(self)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "RopeSpec":
        """From `rope_parameters` (newer files) or `rope_theta` and `rope_scaling` (older ones)."""
        given = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(given, Mapping):
            raise CheckpointError(f"config.json: rope_scaling must be an object or null, found {short(given)}")
        given = dict(given)
        if any(isinstance(value, Mapping) for value in given.values()):
            raise CheckpointError("config.json: rope_parameters differ by layer type, which is not supported")
        kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
        given.pop("type", None)
        theta = float(given.pop("rope_theta", None) or config.get("rope_theta") or _DEFAULT_THETA)
        partial = given.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
        if partial != 1.0:
            raise CheckpointError(f"config.json: partial_rotary_factor {partial} is not supported, only 1.0")
        if not isinstance(kind, str) or kind not in _ROPE_READERS:
            known = ", ".join(["default", *(name for name in _ROPE_READERS if name != "default")])
            raise CheckpointError(f"config.json: rope type {kind!r} is not supported (known: {known})")
        positions = int(config.get("max_position_embeddings") or 0)
        return _ROPE_READERS[kind](theta, given, config, positions)


def _rope_none(theta: float, given: dict[str, Any], config: Mapping[str, Any], positions: int) -> RopeSpec:
    # A left-over `factor` or `original_max_position_embeddings` beside type "default" has no effect in transformers.
    return RopeSpec(theta=theta)


def _rope_linear(theta: float, given: dict[str, Any], config: Mapping[str, Any], positions: int) -> RopeSpec:
    return RopeSpec(theta=theta, scaling="linear", factor=_rope_number(given, "linear", "factor"))


def _rope_dynamic(theta: float, given: dict[str, Any], config: Mapping[str, Any], positions: int) -> RopeSpec:
    original = given.get("original_max_position_embeddings")
    if original is not None and int(original) < positions:
        raise CheckpointError(
            f"config.json: dynamic RoPE scaling from {original} to {positions} positions depends on the length of each "
            "request and is not supported; set max_position_embeddings to the original length, or use yarn"
        )
    return RopeSpec(theta=theta, scaling="dynamic", factor=_rope_number(given, "dynamic", "factor"))


def _rope_llama3(theta: float, given: dict[str, Any], config: Mapping[str, Any], positions: int) -> RopeSpec:
    return RopeSpec(
        theta=theta,
        scaling="llama3",
        factor=_rope_number(given, "llama3", "factor"),
        low_freq_factor=_rope_number(given, "llama3", "low_freq_factor"),
        high_freq_factor=_rope_number(given, "llama3", "high_freq_factor"),
        original_max_position=_original_positions(given, config, positions),
    )


def _rope_yarn(theta: float, given: dict[str, Any], config: Mapping[str, Any], positions: int) -> RopeSpec:
    original = _original_positions(given, config, positions)
    factor = float(given.get("factor") or positions / min(original, _MOST_POSITIONS))
    return RopeSpec(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=bool(given.get("truncate", True)),
        attention_factor=_yarn_attention_factor(given, factor),
    )


_ROPE_READERS = {
    "default": _rope_none,
    "none": _rope_none,
    "linear": _rope_linear,
    "dynamic": _rope_dynamic,
    "llama3": _rope_llama3,
    "yarn": _rope_yarn,
}


def _rope_number(given: Mapping[str, Any], kind: str, key: str) -> float:
    value = given.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"config.json: rope type {kind} needs {key} as a number above 0, found {value!r}")
    return float(value)


def _original_positions(given: Mapping[str, Any], config: Mapping[str, Any], positions: int) -> int:
    keys = "original_max_position_embeddings"
    original = int(config.get(keys) or given.get(keys) or positions)
    if original <= 0:
        raise CheckpointError(f"config.json: {keys} must be above 0, found {original}")
    return original


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """The growth of attention logits that YaRN compensates: 0.1 weight ln(factor) + 1 (arXiv 2309.00071, eq. 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    over, under = given.get("mscale"), given.get("mscale_all_dim")
    if over and under:
        return yarn_magnitude(factor, float(over)) / yarn_magnitude(factor, float(under))
    return yarn_magnitude(factor)


def _check_rope(rope: RopeSpec) -> None:
    """Raise for values that would leave a frequency without a finite number."""
    above_zero = {
        name: getattr(rope, name) for name in ("theta", "factor", "attention_factor", "beta_fast", "beta_slow")
    }
    above_zero |= {f"rope_freqs[{index}]": divisor for index, divisor in enumerate(rope.divisors)}
    for name, value in above_zero.items():
        if not 0 < value < math.inf:
            raise CheckpointError(f"RoPE {name} must be a finite number above 0, found {value!r}; fetch the file again")
    if rope.scaling == "yarn" and rope.theta <= 1:
        raise CheckpointError(f"RoPE theta must be above 1 for yarn, found {rope.theta!r}; mend it")
    if not 0 < rope.low_freq_factor < rope.high_freq_factor < math.inf:
        raise CheckpointError(
            f"RoPE low_freq_factor {rope.low_freq_factor!r} must be above 0 and below high_freq_factor "
            f"{rope.high_freq_factor!r}; mend them"
        )
    if not 0 <= rope.original_max_position <= _MOST_POSITIONS:
        raise CheckpointError(
            f"RoPE original_max_position_embeddings must be a whole number from 1 to {_MOST_POSITIONS}, found "
            f"{short(rope.original_max_position)}; mend it"
        )


def short(value: Any) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
