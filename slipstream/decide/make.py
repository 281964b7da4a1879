"""From options to a policy: the signal that it goes by, a calibration, a cost model, and why each was chosen."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

from slipstream.config import Signal, SpeculativeConfig
from slipstream.decide.calibration import Calibration
from slipstream.decide.cost import CostModel, TableCost
from slipstream.decide.policy import NO_COST_MODEL, Adaptive, FullWidth, Policy
from slipstream.decide.record import DecisionRecord
from slipstream.decide.survival import SurvivalModel
from slipstream.errors import ConfigError

Reason: TypeAlias = tuple[str, Any, str]  # field, value chosen, why

log = logging.getLogger(__name__)


def draft_signal(config: SpeculativeConfig, *, has_head: bool, drafts_sampled: bool) -> Signal | Literal["none"]:
    """What drafters report in this mode, see `make_policy`."""
    if config.mode in ("off", "static"):
        return "none"
    return _signal(config, has_head, drafts_sampled)[0]


def _signal(config: SpeculativeConfig, has_head: bool, drafts_sampled: bool) -> tuple[Signal, str]:
    drawn_biases = config.mode in ("adaptive", "lag-budget") and config.acceptance == "rejection" and drafts_sampled
    return resolve_signal(config.confidence_signal, has_head=has_head, drawn_biases=drawn_biases)


def resolve_signal(
    asked: Signal | Literal["auto"], *, has_head: bool, drawn_biases: bool = False
) -> tuple[Signal, str]:
    """The confidence that is used, and why.

    `drawn_biases`: whether a draft is verified depends on its own step's confidence, in a way that would bias the output
    if that were its own draw.
    """
    if asked == "auto":
        return (
            ("head", "the drafter has a confidence head")
            if has_head
            else ("peak", "the drafter has no confidence head")
        )
    if asked == "head" and not has_head:
        raise ConfigError("confidence_signal is 'head', but the drafter has no confidence head; use auto or peak")
    if asked == "drawn" and drawn_biases:
        return "peak", (
            "whether a sampled draft is verified may not depend on its own draw under rejection, "
            "so 'drawn' would bias the output; 'peak' is used instead"
        )
    return asked, "as asked"


def make_policy(
    config: SpeculativeConfig,
    *,
    num_drafts: int,
    has_head: bool = False,
    drafts_sampled: bool = True,
    cost: CostModel | None = None,
    calibration: Path | None = None,
    weights: str | None = None,
    learns: bool = True,
    on_record: Callable[[DecisionRecord], None] | None = None,
) -> tuple[Policy, list[Reason]]:
    """The policy that `config` asks for, and (field, value, reason) for what was chosen on the way.

    `num_drafts` is S. `drafts_sampled`: sampled requests get sampled drafts. `calibration` is a file or None, `weights` the
    digest of the weights that it has to be for, if there are any. Without `learns`, confidence is used as it is (a lagged
    one too), which tests with scripted confidence need.
    """
    if config.mode in ("off", "static"):
        return FullWidth(num_drafts if config.mode == "static" else 0), []
    signal, why = _signal(config, has_head, drafts_sampled)
    reasons: list[Reason] = [("confidence_signal", signal, why)]
    if cost is None:
        reasons.append(("cost_model", None, NO_COST_MODEL))
        log.warning("%s; mode %s then is static with more to do", NO_COST_MODEL, config.mode)
    elif config.adaptive_speculative_min_gain and isinstance(cost.step, TableCost):
        raise ConfigError(
            "adaptive_speculative_min_gain works with a linear cost model only, and this one is a table; set it to 0"
        )
    scale = None
    if calibration is not None:
        table = Calibration.load(calibration)
        scale = table.scale_np(signal, num_drafts)
        why = "as found" if table.covers(signal) else f"it has nothing on signal '{signal}'"
        if any(key[0] == signal for key in table.of_other_weights(weights)):
            why = "made for other weights of the drafter; run slipstream calibrate again"
            log.warning("calibration %s was %s", calibration, why)
        reasons.append(("calibration", str(calibration), why))
    policy = Adaptive(
        num_drafts=num_drafts,
        waits_for="lagged" if config.enable_lag_confidence else "fresh",
        budget=config.mode == "lag-budget",
        signal=signal,
        cost=cost,
        survival=SurvivalModel(num_drafts, scale, learns=learns),
        causal=config.acceptance == "rejection" and drafts_sampled,
        min_gain=config.adaptive_speculative_min_gain,
        on_record=on_record,
    )
    return policy, reasons


@contextmanager
def cost_model_follows() -> Iterator[None]:
    """Policies that are made meanwhile get their cost model later, or are there to measure one: nobody is warned."""

    def other(record: logging.LogRecord) -> bool:
        return NO_COST_MODEL not in record.getMessage()

    log.addFilter(other)
    try:
        yield
    finally:
        log.removeFilter(other)
