"""Timed waves and what is counted in them, for `bench` and `evaluate` alike. Torch-free.

A wave is one pass of one case over all requests. Cases take turns wave by wave, so a speed is the median over waves that
lay between those of the other cases. Knows no case, drafter or report; `measure` makes waves, `report` and `scores` rows.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from slipstream.lab.critical_path import CriticalPath
from slipstream.metrics import SpecCounters, Timing
from slipstream.repetition import ends_in_loop

NO_CRITICAL_PATH = CriticalPath(decide_us=None, decide_hidden_us=None, build_us=None, gap_us=None, device_busy=None)


class Answered(Protocol):
    """The part of a completion that is counted."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def spec(self) -> SpecCounters: ...


AnyAnswer = TypeVar("AnyAnswer", bound=Answered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is kept of one completion."""

    token_ids: tuple[int, ...]
    spec: SpecCounters
    ttft_ms: float  # from when its turn came
    tpot_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    wall_s: float  # from the first submit to the last token, prefill included
    num_steps: int  # engine steps in which something decoded
    answers: tuple[Answer, ...]  # in the order of the requests
    critical_path: CriticalPath = field(default=NO_CRITICAL_PATH)

    @property
    def output_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tok_per_s(self) -> float:
        return self.output_tokens / self.wall_s


def ttft_in_turn_ms(timings: Sequence[Timing], concurrency: int) -> list[float]:
    """Time to first token of each request, from when its turn came.

    All requests of a wave are submitted at once and served in order, `concurrency` at a time: request i begins when the
    (i - concurrency)-th answer is complete, and what it waited before that says nothing about the engine.
    """
    ends = sorted(timing.last_token_s for timing in timings)
    begins = [t.submitted_s if i < concurrency else ends[i - concurrency] for i, t in enumerate(timings)]
    return [1e3 * (t.first_token_s - begin) for t, begin in zip(timings, begins, strict=True)]


def median(values: Sequence[float | None]) -> float | None:
    """Of the values that exist."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def total(answers: Sequence[Answered]) -> SpecCounters:
    """The counters of all answers together."""
    counters = SpecCounters(mode=answers[0].spec.mode if answers else "off")
    for answer in answers:
        counters.merge(answer.spec)
    return counters


def straight(answers: Sequence[AnyAnswer]) -> list[AnyAnswer]:
    """Those that do not end in a loop, which is easy to draft."""
    return [answer for answer in answers if not ends_in_loop(answer.token_ids)]


def speed(waves: Sequence[Wave], plain: Sequence[Wave]) -> dict[str, Any]:
    """Median over waves, and relative to plain decoding; null where there are none."""
    speeds = [wave.tok_per_s for wave in waves]
    ours, off = median(speeds), median([wave.tok_per_s for wave in plain])
    return {"wave_tok_per_s": speeds, "tok_per_s": ours, "ratio_to_off": ours / off if ours and off else None}


def same_answers(waves: Sequence[Wave], plain: Sequence[Wave]) -> int | None:
    """How many answers equal plain decoding's. In fp32 all do but for near ties, in bf16 but for ties of rounding."""
    if not waves or not plain:
        return None
    pairs = zip(waves[0].answers, plain[0].answers, strict=True)
    return sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs)
