"""The engine: launch, collect, and the two loops around them.

A step is `launch_draft`, a decision, `launch_verify`, and later `collect`; each launch calls one function per stage, in
device order. Only `take_confidence` and `collect` wait for the device, and `take_drafts` in steps with constrained
requests. In the overlapped loop the host plans, decides and launches step t while step t - 1 is still running, and
collects t - 1 afterwards; the plain loop makes the same calls and collects at once. What decides about widths is a
Policy; the engine knows from when its confidence must be (nothing, the last step, this step) and nothing else about it.
"""

import dataclasses
import logging
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.commit import Delta, Gains, commit
from slipstream.decide.policy import Policy, with_draft_length
from slipstream.device.backend import Backend
from slipstream.device.events import EventPool, Kind, Mark, NullRecorder, Recorder, Stopwatch
from slipstream.device.memory import is_out_of_memory, release_cached
from slipstream.device.shapes import DraftShape, Stage, VerifyShape
from slipstream.device.staging import Export, Exporter, compute_stream
from slipstream.device.state import PlanOnDevice, SlotState
from slipstream.draft.base import Draft, Drafter, DraftView
from slipstream.errors import EngineError
from slipstream.logprobs import Reported
from slipstream.masking import Constrainer, struck
from slipstream.metrics import SpecCounters
from slipstream.plan import Decision, DraftReport, StepPlan, StepResult
from slipstream.request import Request
from slipstream.scheduler import Scheduler
from slipstream.verify.accept import Rule, StepRule, Verdict
from slipstream.verify.report import report
from slipstream.verify.target import TargetForward, VerifiedRows

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """A step between its two launches."""

    plan: StepPlan
    loaded: PlanOnDevice
    rule: StepRule
    draft: Draft | None = None  # None: draft length 0, or nobody decodes
    report: Export | None = None  # its confidence on the way to the host
    token_ids: Export | None = None  # the drafts themselves, where a request is constrained
    marks: tuple[Mark, Mark] | None = None  # around the launch, where it is timed


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A step that was launched and not collected."""

    drafted: Drafted
    decision: Decision
    result: Export
    logprobs: Export | None  # of those who want them
    marks: tuple[Mark, Mark] | None  # around the second launch

    @property
    def device_ms(self) -> tuple[float, float] | None:
        """Times of the two launches, if they were timed; known once the step is collected."""
        if self.drafted.marks is None or self.marks is None:
            return None
        return Stopwatch.elapsed_ms(*self.drafted.marks), Stopwatch.elapsed_ms(*self.marks)


class Engine:
    def __init__(
        self, *, target: TargetForward, drafter: Drafter | None, backend: Backend, policy: Policy, rule: Rule,
        scheduler: Scheduler, vocab_size: int, device: torch.device, overlap: bool, recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self.target = target
        self.drafter = drafter
        self.policy = policy
        self.scheduler = scheduler
        self.backend = backend
        self.overlap = overlap
        self.recorder = recorder or NullRecorder()
        self.totals = SpecCounters()
        self.requests: dict[int, Request] = {}
        self._inboxes: dict[int, deque[Delta]] = {}
        self.listener: Callable[[Gains], object] | None = None  # told of what every step gave
        self.num_decode_steps = 0  # launched steps in which somebody decoded
        self.rule = rule
        self.vocab_size = vocab_size
        self._device = device
        self._exporter = Exporter(device)
        self._constrainer = Constrainer(vocab_size, device)
        self._stopwatch = Stopwatch(device.type == "cuda", EventPool(stream=compute_stream(device)))
        self._is_launching = False  # outside of launches a lack of memory leaves something half committed
        self._previous: Flight | None = None  # overlapped: in flight; plain: kept for its confidence

    # ------------------------------------------------------------------ the two loops

    @torch.inference_mode()
    def step(self) -> Sequence[Delta]:
        """One turn of the loop: launches a step if one can be planned, returns what requests gained.

        An exception of a part (a drafter, a policy, an interrupt) leaves a step half-way. It ends every running request
        with an error and is raised; the engine can go on with others. Where a launch finds no memory, smaller steps are
        tried instead; what was collected before it is in the inboxes then, and not returned.
        """
        try:
            return self._step_overlapped() if self.overlap else self._step_plain()
        except BaseException as error:
            if self._is_launching and is_out_of_memory(error):
                return self._retreat(error)
            self._abandon(error)
            raise

    def _step_plain(self) -> Sequence[Delta]:
        plan = self._schedule()
        if plan is None:
            return self._stuck()
        if self.policy.waits_for == "lagged":
            self.take_confidence(self._previous.drafted if self._previous else None)
        drafted = self.launch_draft(with_draft_length(plan, self.policy), self.policy.times(plan))
        if self.policy.waits_for == "fresh":
            self.take_confidence(drafted)
        decision = self.decide(drafted)
        self._previous = self.launch_verify(drafted, decision)
        return self.collect(self._previous)

    def _step_overlapped(self) -> Sequence[Delta]:
        plan = self._schedule()
        previous, self._previous = self._previous, None
        if self.policy.waits_for == "lagged":
            self.take_confidence(previous.drafted if previous else None)
        if plan is None:  # nothing can be launched before the step in flight is known
            return self.collect(previous) if previous else self._stuck()
        drafted = self.launch_draft(with_draft_length(plan, self.policy), self.policy.times(plan))
        early = self.policy.waits_for == "fresh" or plan.any_constrained
        deltas = self.collect(previous) if early else []
        if self.policy.waits_for == "fresh":
            self.take_confidence(drafted)
        decision = self.decide(drafted)
        self._previous = self.launch_verify(drafted, decision)
        return deltas if early else self.collect(previous)

    def _stuck(self) -> Sequence[Delta]:
        """No step can be planned and nothing is in flight: fine without work, a fault with it, never a busy loop."""
        if self.has_work:
            raise EngineError(
                f"schedule: {len(self.requests)} requests and no step that any of them could take part in"
            )
        return []

    # ------------------------------------------------------------------ host stages

    def _schedule(self) -> StepPlan | None:
        with self._span(self.scheduler.next_step, "schedule", "host"):
            plan = self.scheduler.schedule()
        return plan if isinstance(plan, StepPlan) else None

    def decide(self, drafted: Drafted) -> Decision:
        with self._span(drafted.plan.step, "decide", "host"):
            decision = self.policy.decide(drafted.plan)
        if decision.reason:
            self.totals.unpruned[decision.reason] += 1
        return decision

    # ------------------------------------------------------------------ launch: one function per stage

    def launch_draft(self, plan: StepPlan, timed: bool) -> Drafted:
        self._is_launching = True
        start = self._stopwatch.mark() if timed else None
        self.num_decode_steps += plan.num_decode > 0
        with self._span(plan.step, "load", "device"):
            loaded = self.backend.load(plan)
            rule = self.rule.begin(self.backend.state, loaded, plan, self.vocab_size)
        draft, report, token_ids = None, None, None
        if plan.draft_length:
            assert self.drafter is not None
            self.backend.before("draft", self._exporter)
            shape = self.backend.draft_shape(plan)
            draft = self._run("draft", shape, partial(self.draft_stage, shape, loaded, rule, plan.step), plan.step)
            if self.policy.waits_for != "nothing":
                with self._span(plan.step, "export_confidence", "copy"):
                    report = self._exporter.start("confidence", draft.signal[: plan.num_decode])
            if plan.any_constrained:
                token_ids = self._exporter.start("drafts", draft.token_ids[: plan.num_decode])
        marks = None if start is None else (start, self._stopwatch.mark())
        self._is_launching = False
        return Drafted(plan, loaded, rule, draft, report, token_ids, marks)

    def draft_stage(self, shape: DraftShape, loaded: PlanOnDevice, rule: StepRule, step: int) -> Draft:
        assert self.drafter is not None
        with self._span(step, "draft", "device"):
            view = DraftView(loaded.slots[: shape.num_sequences], self.backend.state, shape.max_context, step)
            draft = self.drafter.propose(view, shape.draft_length, rule, self.policy.signal)
            self.backend.hold(draft.token_ids, draft.signal)
            return draft

    def launch_verify(self, drafted: Drafted, decision: Decision) -> Flight:
        self._is_launching = True
        plan, step = drafted.plan, drafted.plan.step
        start = None if drafted.marks is None else self._stopwatch.mark()
        widths = self._widths(drafted, decision)
        shape = self.backend.verify_shape(plan, decision)
        rows = self._run("verify", shape, partial(self.verify_stages, shape, drafted, widths), step)
        judged = self._constrain(drafted, rows) if plan.any_constrained else rows
        self.backend.before("accept", self._exporter)
        verdict = self._run("accept", shape, partial(self.accept_stages, shape, drafted, judged), step)
        self._settle(drafted, verdict)
        logprobs = None if plan.logprobs is None else self._report(drafted, decision, rows, verdict)
        # Marked before the export: whoever waited for that has waited for this mark too.
        marks = None if start is None else (start, self._stopwatch.mark())
        with self._span(step, "export", "copy"):
            result = self._exporter.start("result", verdict.result[: plan.num_sequences])
        self._is_launching = False
        # What drafts were drawn from, as large as the logits, must not outlive its step on the device.
        return Flight(dataclasses.replace(drafted, draft=None), decision, result, logprobs, marks)

    def verify_stages(self, shape: VerifyShape, drafted: Drafted, widths: torch.Tensor) -> VerifiedRows:
        step, draft = drafted.plan.step, drafted.draft
        with self._span(step, "layout", "device"):
            batch = self.backend.layout(drafted.loaded, widths, shape)
        with self._span(step, "fill", "device"):
            token_ids = self.backend.fill(batch, None if draft is None else draft.token_ids)
        with self._span(step, "verify", "device"):
            return VerifiedRows(batch, *self.target.verify(batch, token_ids, shape))

    def _constrain(self, drafted: Drafted, rows: VerifiedRows) -> VerifiedRows:
        """The rows without what grammars forbid; the host finds out while verify runs."""
        drafts_np = self.take_drafts(drafted)
        with self._span(drafted.plan.step, "constrain", "host"):
            masks = self._constrainer.masks(drafted.plan, drafts_np, self.requests)
        return dataclasses.replace(rows, logits=struck(rows.batch, rows.logits, masks))

    def accept_stages(self, shape: VerifyShape, drafted: Drafted, rows: VerifiedRows) -> Verdict:
        draft, step = drafted.draft, drafted.plan.step
        drafts, law = (None, None) if draft is None else (draft.token_ids, draft.law)
        with self.backend.beside(partial(self._absorb, rows, step)):
            with self._span(step, "accept", "device"):
                verdict = drafted.rule.judge(rows.batch, rows.logits, drafts, law, shape)
            with self._span(step, "apply", "device"):
                self.backend.apply(drafted.loaded, verdict.result)
        return verdict

    def _absorb(self, rows: VerifiedRows, step: int) -> None:
        """The features of all rows become draft context, whatever is accepted: see docs/architecture.md."""
        if self.drafter is not None and rows.features is not None:
            with self._span(step, "absorb", "device"):
                self.drafter.absorb(rows.features, rows.batch.positions, rows.batch.kv_slots)

    def _report(self, drafted: Drafted, decision: Decision, rows: VerifiedRows, verdict: Verdict) -> Export:
        """Log-probabilities, from the target's own logits."""
        wanted, step = drafted.plan.logprobs, drafted.plan.step
        assert wanted is not None
        self.backend.before("report", self._exporter)
        with self._span(step, "report", "device"):
            reported = report(wanted, decision, rows, verdict.result, self.target, self.backend)
        with self._span(step, "export_logprobs", "copy"):
            return self._exporter.start("logprobs", reported)

    def _settle(self, drafted: Drafted, verdict: Verdict) -> None:
        """A drafter that learns in service hears what became of its block; never part of a graph."""
        draft, count = drafted.draft, drafted.plan.num_decode
        if self.drafter is None or draft is None or draft.evidence is None:
            return
        with self._span(drafted.plan.step, "settle", "device"):
            teaches = drafted.loaded.teaches[:count] & ~verdict.invalid[:count]
            self.drafter.settle(draft, verdict.widths[:count], verdict.num_accepted[:count], teaches)

    def _run(self, stage: Stage, shape: DraftShape | VerifyShape, function: Callable[[], Any], step: int) -> Any:
        """A stage as it is, or its replay where it was captured at this shape."""
        replay = self.backend.replay(stage, shape)
        if replay is None:
            return function()
        with self.recorder.span(step, stage, "device", one_launch=True):
            return replay()

    # ------------------------------------------------------------------ the functions that wait

    def take_confidence(self, drafted: Drafted | None) -> None:
        """Wait for the confidence of a draft call and hand it to the policy."""
        if drafted is None or drafted.report is None:
            return
        with self._span(drafted.plan.step, "take_confidence", "wait"):
            signal = drafted.report.wait().copy()  # policies keep it; the buffer is written again
        self.policy.observe(drafted.plan, DraftReport(step=drafted.plan.step, signal_np=signal))

    def take_drafts(self, drafted: Drafted) -> NDArray[np.int64] | None:
        """Wait for the tokens [D, d] of a draft call whose report was asked for; None where nothing was drafted."""
        if drafted.token_ids is None:
            return None
        with self._span(drafted.plan.step, "take_drafts", "wait"):
            return drafted.token_ids.wait()

    def collect(self, flight: Flight | None) -> Sequence[Delta]:
        """Wait for a step's result and commit it."""
        if flight is None:
            return []
        plan = flight.drafted.plan
        with self._span(plan.step, "collect", "wait"):
            result_np = flight.result.wait()
            logprobs_np = None if flight.logprobs is None else flight.logprobs.wait()
        result = StepResult.of(plan.step, result_np)
        with self._span(plan.step, "commit", "host"):
            self.policy.learn(plan, result)
            if (device_ms := flight.device_ms) is not None:
                self.policy.timed(plan, flight.decision, sum(device_ms))
            reported = None
            if plan.logprobs is not None and logprobs_np is not None:
                reported = Reported.of(plan.logprobs, logprobs_np, self.vocab_size)
            gains = commit(plan, result, self.scheduler, reported)
        self._hand_out(gains)
        return gains

    def _hand_out(self, gains: Gains) -> None:
        """Deltas for those who have an inbox, before those that have ended are forgotten."""
        if self.listener is not None:
            self.listener(gains)
        if self._inboxes:
            for index, request in enumerate(gains.requests):
                if (inbox := self._inboxes.get(request.uid)) is not None:
                    inbox.append(gains[index])
        for request in gains.ended:
            self._forget(request)

    # ------------------------------------------------------------------ requests

    def add(self, request: Request, inbox: deque[Delta] | None = None) -> None:
        """Queue a request. What it gains is put into its inbox as well, whoever drives the loop then."""
        self.scheduler.add(request)
        self.requests[request.uid] = request
        if inbox is not None:
            self._inboxes[request.uid] = inbox

    def abort(self, uid: int) -> None:
        """End a request at once, wherever it is; what of it lies in flight is dropped. Unknown ids are ignored."""
        request = self.requests.get(uid)
        if request is not None:
            self.scheduler.finish(request, "abort")
            self._forget(request)

    @property
    def state(self) -> SlotState:
        return self.backend.state

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def drain(self) -> None:
        """With nobody left to go on, collect what is still in flight: it belongs to requests that have ended."""
        if not self.has_work:
            previous, self._previous = self._previous, None
            if self.overlap:
                self.collect(previous)

    def _retreat(self, error: BaseException) -> Sequence[Delta]:
        """Everybody goes back to the queue, to be computed again in smaller steps; who has no memory alone ends."""
        log.warning(
            "no memory for a step, the next are smaller; lower max_num_batched_tokens or max_num_seqs: %s", error
        )
        self._previous, self._is_launching = None, False
        alone = self.scheduler.shrink()
        self.scheduler.prefixes.discard_all()
        for request in alone:
            request.error = f"no memory for a step of this request alone: {error!r}"
            self.scheduler.finish(request, "error")
        gains = Gains.of_failed(alone)
        self._hand_out(gains)
        traceback.clear_frames(error.__traceback__)  # they hold what the step had made until then
        release_cached(self._device)
        return gains

    def _abandon(self, error: BaseException) -> None:
        """End all that may have taken part in a step that failed; requests that wait in the queue did not."""
        self._previous, self._is_launching = None, False
        self.scheduler.prefixes.discard_all()
        for request in list(self.requests.values()):
            if request.slot is not None or request.is_finished:
                request.error = f"a step failed: {error!r}"
                self.scheduler.finish(request, "error")
                self._forget(request)

    def _forget(self, request: Request) -> None:
        del self.requests[request.uid]
        self._inboxes.pop(request.uid, None)
        self.totals.merge(request.counters)

    # ------------------------------------------------------------------ what the stages are given

    def _widths(self, drafted: Drafted, decision: Decision) -> torch.Tensor:
        """The decision on the device; with a budget, handed out by this step's survival (stage `rank`)."""
        if decision.widths_np is not None:
            return self.backend.place(decision)
        plan, draft = drafted.plan, drafted.draft
        if draft is None:
            return self.backend.place(dataclasses.replace(decision, widths_np=np.zeros_like(plan.caps_np), budget=None))
        with self._span(plan.step, "rank", "device"):
            return self.backend.rank(plan, decision, draft.signal, self.policy.calibration_np)

    def _span(self, step: int, name: str, kind: Kind) -> AbstractContextManager[None]:
        return self.recorder.span(step, name, kind)
