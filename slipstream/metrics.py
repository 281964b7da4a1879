"""Counters of speculation and clocks of a request. Counts are stored, everything else is derived from them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _at_least(histogram: Sequence[int]) -> dict[int, int]:
    """j = 1.. -> how many were j or more; zeros are left out."""
    totals = accumulate(reversed(histogram[1:]))
    return {j: total for j, total in zip(range(len(histogram) - 1, 0, -1), totals, strict=True) if total}


@dataclass(slots=True)
class SpecCounters:
    """What happened to drafts, in decode steps only; per request, and merged into totals.

    The target's own token that ends a step is emitted but is no accepted draft; tokens cut off by a stop are neither.
    """

    mode: str = "off"
    steps: int = 0
    drafted: int = 0
    verified: int = 0  # sum of widths
    accepted: int = 0  # sum of accepted drafts
    emitted: int = 0
    width_histogram: Counter[int] = field(default_factory=Counter)
    verified_at: Counter[int] = field(default_factory=Counter)  # position j = 1.. -> times verified
    reached_at: Counter[int] = field(default_factory=Counter)  # times verified after an accepted prefix, in the answer
    accepted_at: Counter[int] = field(default_factory=Counter)
    unpruned: Counter[str] = field(default_factory=Counter)  # engine's steps not pruned, by `Decision.reason`

    def count_step(self, drafted: int, width: int, accepted: int, emitted: int) -> None:
        """One decode step of one sequence; `accepted` and `emitted` after stops have cut the step."""
        assert 0 <= accepted <= width <= drafted, (drafted, width, accepted)
        assert 0 <= emitted <= width + 1, (emitted, width)
        self.steps += 1
        self.drafted += drafted
        self.verified += width
        self.accepted += accepted
        self.emitted += emitted
        self.width_histogram[width] += 1
        self.verified_at.update(range(1, width + 1))
        self.reached_at.update(range(1, min(emitted, width) + 1))  # behind the end of an answer nothing is known
        self.accepted_at.update(range(1, accepted + 1))

    def count_steps(self, drafted: int, widths: Sequence[int], reached: Sequence[int], accepted: Sequence[int]) -> None:
        """Many decode steps in which every token was kept: drafts in all, and histograms over 0..S of the steps."""
        steps, verified_at, accepted_at = sum(widths), _at_least(widths), _at_least(accepted)
        num_accepted = sum(accepted_at.values())
        self.steps += steps
        self.drafted += drafted
        self.verified += sum(verified_at.values())
        self.accepted += num_accepted
        self.emitted += steps + num_accepted
        self.width_histogram.update({width: count for width, count in enumerate(widths) if count})
        self.verified_at.update(verified_at)
        self.reached_at.update(_at_least(reached))
        self.accepted_at.update(accepted_at)

    def merge(self, other: "SpecCounters") -> None:
        for name in ("steps", "drafted", "verified", "accepted", "emitted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.width_histogram.update(other.width_histogram)
        self.verified_at.update(other.verified_at)
        self.reached_at.update(other.reached_at)
        self.accepted_at.update(other.accepted_at)
        self.unpruned.update(other.unpruned)

    @property
    def acceptance_rate(self) -> float | None:
        return _ratio(self.accepted, self.verified)

    @property
    def acceptance_at(self) -> list[float | None]:
        """Draft 1, 2, ... accepted, of the times that it was verified and those before it accepted; None: it never was."""
        most = max(self.verified_at, default=0)
        return [_ratio(self.accepted_at[j], self.reached_at[j]) for j in range(1, most + 1)]

    @property
    def mean_accepted_length(self) -> float | None:
        return _ratio(self.emitted, self.steps)

    @property
    def wasted_share(self) -> float | None:
        return _ratio(self.verified - self.accepted, self.verified)

    def as_dict(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "steps": self.steps,
            "drafted": self.drafted,
            "verified": self.verified,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "acceptance_rate": self.acceptance_rate,
            "mean_accepted_length": self.mean_accepted_length,
            "width_histogram": {str(w): n for w, n in sorted(self.width_histogram.items())},
            **({"unpruned": dict(self.unpruned)} if self.unpruned else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Clocks of one request, in seconds since an arbitrary start; the figures of the field derived from them."""

    submitted_s: float
    first_token_s: float
    last_token_s: float
    num_tokens: int

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token."""
        return 1e3 * (self.first_token_s - self.submitted_s) if self.num_tokens else None

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first."""
        return _ratio(1e3 * (self.last_token_s - self.first_token_s), max(self.num_tokens - 1, 0))

    @property
    def tok_per_s(self) -> float | None:
        return _ratio(self.num_tokens, self.last_token_s - self.submitted_s) if self.num_tokens else None

    def as_dict(self) -> dict[str, float | None]:
        return {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "tok_per_s": self.tok_per_s}
