"""The engine's loops over a dense trace: real scheduler, real commits, real policies, no device.

`TraceDevice` is what the device knows of each slot, and answers by table look-up; `VirtualEngine` has the stages of
`Engine`, in its order, and a clock that the prices of a profile move. A step takes draft + verify; what of the host no
device work hides is given from outside. Nothing is learned, chosen or reported here. Numpy only; called by `simulate`.

Letters in shapes: B sequences of the step, D of them decode, S positions, d the draft length, N anchors of the trace.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from slipstream.cache.pages import NUM_RESERVED_PAGES, PageAllocator
from slipstream.commit import commit
from slipstream.config import SamplingParams
from slipstream.decide import controller
from slipstream.decide.controller import AnyInts
from slipstream.decide.cost import DraftTimes, StepCost
from slipstream.decide.policy import Policy, with_draft_length
from slipstream.errors import ConfigError
from slipstream.lab.dense import DenseTrace
from slipstream.lab.waves import Answer, Wave, ttft_in_turn_ms
from slipstream.metrics import Timing
from slipstream.plan import EDGE, Decision, DraftReport, StepPlan, StepResult
from slipstream.request import Request
from slipstream.scheduler import Scheduler, SchedulerLimits

Floats: TypeAlias = NDArray[np.float64]
Float32s: TypeAlias = NDArray[np.float32]
Int32s: TypeAlias = NDArray[np.int32]
Int64s: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

BEYOND = 32  # positions behind the longest answer, as a bench leaves them
NO_LIMIT = 1 << 30  # of the drafter's positions


@runtime_checkable
class Foresees(Protocol):
    """A policy that no engine could have."""

    def foresee(self, runs_np: AnyInts) -> None:
        """[D] drafts that would be accepted in the step that is decided next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What the clock goes by."""

    step: StepCost
    draft: DraftTimes
    mixed: StepCost | None = None  # of steps with rows of prompts; None: they cost what others do
    exposed_ms: float = 0.0  # of every step
    prefill: bool = True  # False: rows of prompts are free


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A step that was launched and not collected."""

    plan: StepPlan
    report: DraftReport | None
    decision: Decision
    result: StepResult
    device_ms: float | None  # where it is timed
    end_ms: float  # on the virtual clock


class TraceDevice:
    """Where each slot's request stands in the trace, step by step: ahead of what the scheduler knows."""

    def __init__(self, trace: DenseTrace, num_drafts: int, num_slots: int, signal: str, prices: Prices) -> None:
        self._runs_np = np.minimum(trace.runs_np, num_drafts).astype(np.int32)
        self._starts_np = trace.starts_np
        self._prices = prices
        self._signal_np = trace.signals[signal][:, :num_drafts].astype(np.float32) if signal != "none" else None
        behind = np.zeros(num_drafts + 1, np.int32)
        # [N, S + 1] the tokens that follow an anchor, which a step may emit
        self._following_np = sliding_window_view(np.concatenate([trace.token_ids_np, behind]), num_drafts + 1)
        self._anchor_np = np.zeros(num_slots, np.int64)  # row of the newest token
        self._last_np = np.zeros(num_slots, np.int64)  # row of the answer's last token
        self._context_np = np.zeros(num_slots, np.int64)

    def load(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._context_np[admission.slot] = 0

    def runs(self, plan: StepPlan) -> Int32s:
        """[D] drafts that would be accepted; 0 where the answer has ended."""
        slots = plan.slots_np[: plan.num_decode]
        anchors = self._anchor_np[slots]
        return self._runs_np[anchors] * (anchors < self._last_np[slots])

    def draft(self, plan: StepPlan) -> DraftReport:
        assert self._signal_np is not None
        rows = self._anchor_np[plan.slots_np[: plan.num_decode]]
        return DraftReport(step=plan.step, signal_np=self._signal_np[rows, : plan.draft_length])

    def verify(self, plan: StepPlan, widths_np: Int32s, answers_np: Int64s) -> tuple[StepResult, float, float]:
        """Result, ms of the two launches, and how much of them is counted. answers_np [B - D]: of prompts in the plan."""
        count, slots = plan.num_decode, plan.slots_np
        contexts, anchors = self._context_np[slots], self._anchor_np[slots[:count]]
        accepted = np.zeros(plan.num_sequences, np.int32)
        np.minimum(widths_np[:count], self._runs_np[anchors], out=accepted[:count])
        ms = self._ms(plan, plan.num_given_np, contexts, widths_np)
        counted = ms
        rows = anchors + 1
        if count < plan.num_sequences:
            starts = self._starts_np[answers_np]
            rows = np.concatenate([rows, starts])
            self._anchor_np[slots[count:]] = starts
            self._last_np[slots[count:]] = self._starts_np[answers_np + 1] - 1
            if not self._prices.prefill:
                counted = (
                    self._ms(plan, plan.num_given_np[:count], contexts[:count], widths_np[:count]) if count else 0.0
                )
        result = StepResult(
            step=plan.step, widths_np=widths_np, num_accepted_np=accepted, token_ids_np=self._following_np[rows],
            invalid_np=np.zeros(plan.num_sequences, np.bool_),
        )  # fmt: skip
        # Behind the end of an answer, which the host learns of a step later, the next one begins, as in a replay.
        self._anchor_np[slots[:count]] = np.minimum(anchors + accepted[:count] + 1, len(self._runs_np) - 1)
        self._context_np[slots] = contexts + plan.num_given_np + accepted
        return result, ms, counted

    def _ms(self, plan: StepPlan, given_np: Int32s, contexts_np: Int64s, widths_np: Int32s) -> float:
        prices = self._prices
        draft_ms = prices.draft.at(plan.draft_length, plan.num_decode)
        step = prices.step if len(given_np) == plan.num_decode or prices.mixed is None else prices.mixed
        return draft_ms + step.step_ms(given_np.astype(np.int64), contexts_np, widths_np.astype(np.int64))


class VirtualEngine:
    """`Engine` without a device: the same calls of a policy in the same order, in either of its loops.

    Answers are cut at `max_tokens`.
    """

    def __init__(
        self, trace: DenseTrace, policy: Policy, prices: Prices, *, num_drafts: int, concurrency: int,
        max_num_batched_tokens: int, max_tokens: int | None = None, overlap: bool = True,
    ) -> None:  # fmt: skip
        if policy.signal != "none" and policy.signal not in trace.signals:
            raise ConfigError(f"signals: the trace has no {policy.signal!r}; it has {', '.join(trace.signals)}")
        self.trace = trace
        self.policy = policy
        self.overlap = overlap
        self.scheduler = _scheduler(trace, num_drafts, concurrency, max_num_batched_tokens)
        self.device = TraceDevice(trace, num_drafts, concurrency, policy.signal, prices)
        self.num_steps = 0
        self.num_decode_steps = 0  # in which somebody decoded
        self.now_ms = 0.0  # when the newest step was launched, and the host plans the next one
        self._free_ms = 0.0  # when the device is done with all that was launched
        self._exposed_ms = prices.exposed_ms
        self._oracle = policy if isinstance(policy, Foresees) else None
        self._previous: Flight | None = None  # as in `Engine`: in flight, or kept for its confidence
        temperature = float(trace.about.get("sampling", {}).get("temperature") or 0.0)
        limits = np.minimum(trace.lengths_np, max_tokens or NO_LIMIT).tolist()
        self._params = [SamplingParams(max_tokens=limit, ignore_eos=True, temperature=temperature) for limit in limits]
        self._answers_np = np.zeros(0, np.int64)  # by uid
        self._first_token_ms: dict[int, float] = {}  # by uid
        self._last_token_ms: dict[int, float] = {}

    # ------------------------------------------------------------------ a wave

    def serve(self, answers_np: Int64s, arrivals_ms: Floats | None = None) -> Wave:
        """These answers of the trace, a request each: all at once, or when they arrive (ms from now, rising)."""
        start_ms, steps_before = self._free_ms, self.num_decode_steps
        arrivals_np = start_ms + (np.zeros(len(answers_np)) if arrivals_ms is None else arrivals_ms)
        requests = self._requests(answers_np)
        waiting = deque(zip(arrivals_np.tolist(), requests, strict=True))
        self.now_ms = start_ms
        while waiting or self.scheduler.has_work:
            if not self.scheduler.has_work and waiting:
                self.drain()
                self.now_ms = max(self._free_ms, waiting[0][0])
            while waiting and waiting[0][0] <= self.now_ms:
                self.scheduler.add(waiting.popleft()[1])
            self.step()
        self.drain()
        return self._wave(requests, arrivals_np, start_ms, closed=arrivals_ms is None, before=steps_before)

    def _requests(self, answers_np: Int64s) -> list[Request]:
        first_uid = len(self._answers_np)
        self._answers_np = np.concatenate([self._answers_np, answers_np])
        lengths = self.trace.prompt_lengths_np[answers_np].tolist()
        return [
            Request(uid=first_uid + i, prompt_ids=(0,) * length, params=self._params[answer], seed=0)
            for i, (answer, length) in enumerate(zip(answers_np.tolist(), lengths, strict=True))
        ]

    def _wave(
        self, requests: list[Request], arrivals_np: Floats, start_ms: float, *, closed: bool, before: int
    ) -> Wave:
        timings = [
            Timing(
                submitted_s=arrival / 1e3, first_token_s=self._first_token_ms[request.uid] / 1e3,
                last_token_s=self._last_token_ms[request.uid] / 1e3, num_tokens=request.params.max_tokens,
            )
            for request, arrival in zip(requests, arrivals_np.tolist(), strict=True)
        ]  # fmt: skip
        at_once = self.scheduler.limits.max_num_seqs if closed else len(requests)
        answers = tuple(
            Answer(token_ids=tuple(request.output_ids), spec=request.counters, ttft_ms=ttft, tpot_ms=timing.tpot_ms)
            for request, timing, ttft in zip(requests, timings, ttft_in_turn_ms(timings, at_once), strict=True)
        )
        wall_s = max(timing.last_token_s for timing in timings) - start_ms / 1e3
        return Wave(wall_s=wall_s, num_steps=self.num_decode_steps - before, answers=answers)

    # ------------------------------------------------------------------ a step, as in `Engine`

    def step(self) -> None:
        plan = self.scheduler.schedule()
        previous, self._previous = self._previous, None
        if self.policy.waits_for == "lagged":
            self.take_confidence(previous)
        in_flight = previous if self.overlap else None
        if not isinstance(plan, StepPlan):  # nothing can be launched before the step in flight is known
            assert in_flight is not None, "requests, and no step that any of them could take part in"
            self.now_ms = in_flight.end_ms
            return self.collect(in_flight)
        if self._oracle is not None:
            self._oracle.foresee(self.device.runs(plan))
        plan, timed = with_draft_length(plan, self.policy), self.policy.times(plan)
        report = self.launch_draft(plan)
        if self.policy.waits_for == "fresh":
            self.collect(in_flight)
            self.observe(plan, report)
        decision = self.policy.decide(plan)
        self._previous = self.launch_verify(plan, report, decision, timed)
        if not self.overlap:
            self.now_ms = self._previous.end_ms
            return self.collect(self._previous)
        return self.collect(in_flight) if self.policy.waits_for != "fresh" else None

    def launch_draft(self, plan: StepPlan) -> DraftReport | None:
        """What the drafter says, if anybody wants to know."""
        self.num_steps += 1
        self.num_decode_steps += plan.num_decode > 0
        self.device.load(plan)
        return self.device.draft(plan) if plan.draft_length and self.policy.signal != "none" else None

    def launch_verify(self, plan: StepPlan, report: DraftReport | None, decision: Decision, timed: bool) -> Flight:
        widths = self._widths(plan, report, decision)
        answers = self._answers_np[plan.uids_np[plan.num_decode :]]
        result, device_ms, counted_ms = self.device.verify(plan, widths, answers)
        self.now_ms = max(self._free_ms, self.now_ms)
        self._free_ms = self.now_ms + counted_ms + self._exposed_ms
        return Flight(plan, report, decision, result, device_ms if timed else None, self._free_ms)

    def _widths(self, plan: StepPlan, report: DraftReport | None, decision: Decision) -> Int32s:
        """[B] as the device has them: decided, or handed out by this step's survival."""
        if decision.widths_np is not None:
            return decision.widths_np
        if report is None:
            return np.zeros_like(plan.caps_np)
        return hand_out(plan, decision, report.signal_np, self.policy.calibration_np)

    def take_confidence(self, flight: Flight | None) -> None:
        if flight is not None:
            self.observe(flight.plan, flight.report)

    def observe(self, plan: StepPlan, report: DraftReport | None) -> None:
        if report is not None and self.policy.waits_for != "nothing":
            self.policy.observe(plan, report)

    def collect(self, flight: Flight | None) -> None:
        if flight is None:
            return
        plan, result = flight.plan, flight.result
        self.policy.learn(plan, result)
        if flight.device_ms is not None:
            self.policy.timed(plan, flight.decision, flight.device_ms)
        gains = commit(plan, result, self.scheduler)
        for row in range(plan.num_decode, plan.num_sequences):
            if plan.emits_np[row]:
                self._first_token_ms[int(plan.uids_np[row])] = flight.end_ms
        if gains.finish_reasons:
            self._last_token_ms.update(dict.fromkeys((request.uid for request in gains.ended), flight.end_ms))

    def drain(self) -> None:
        previous, self._previous = self._previous, None
        if self.overlap:
            self.collect(previous)


def _scheduler(trace: DenseTrace, num_drafts: int, concurrency: int, batched_tokens: int) -> Scheduler:
    """One that never lacks a page or a position: a request has one page, as long as the longest of them, and leaves one."""
    longest = int((trace.prompt_lengths_np + trace.lengths_np).max()) + BEYOND
    limits = SchedulerLimits(
        max_num_seqs=concurrency, max_num_batched_tokens=max(batched_tokens, 2 * concurrency), max_model_len=longest,
        max_drafts=num_drafts, max_draft_context=NO_LIMIT,
    )  # fmt: skip
    return Scheduler(
        limits, PageAllocator(2 * concurrency + NUM_RESERVED_PAGES, page_size=longest + num_drafts + BEYOND)
    )


def hand_out(plan: StepPlan, decision: Decision, signal_np: Float32s, calibration_np: Float32s) -> Int32s:
    """[B] what the device's stage `rank` makes of a budget, by signals [D, d]."""
    count = plan.num_decode
    survival = fresh_survival(signal_np, calibration_np, plan.sampled_np[:count]).astype(np.float64)
    widths = np.zeros(plan.num_sequences, np.int32)
    budget = decision.budget or 0
    widths[:count] = controller.widths_of_largest(survival, decision.caps_np[:count], budget)
    return widths


def fresh_survival(signal_np: Float32s, calibration_np: Float32s, sampled_np: Bools) -> Float32s:
    """[D, d] as the device has it: `ops.survival.fresh_survival` in numpy."""
    table = calibration_np[:, : signal_np.shape[1]]
    rows = table[sampled_np.astype(np.int64)] if np.count_nonzero(sampled_np) else table[:1]  # [D or 1, d, 2]
    finite = np.isfinite(signal_np)
    all_finite = np.count_nonzero(finite) == signal_np.size
    edge = np.float32(EDGE)
    kept = (signal_np if all_finite else np.where(finite, signal_np, np.float32(0))).clip(edge, 1 - edge)
    odds = np.log((1 - kept) / kept)
    odds *= rows[..., 0]
    odds -= rows[..., 1]
    confidence = 1 / (1 + np.exp(odds))
    if not all_finite:
        confidence *= np.logical_and.accumulate(finite, axis=1)
    survival: Float32s = np.multiply.accumulate(confidence, axis=1)
    return survival
