"""The engine: launch, collect, and the two loops around them.

A step is `launch_draft`, a decision, `launch_verify`, and later `collect`; each launch calls one function per stage, in
device order. Only `take_confidence` and `collect` wait for the device. In the overlapped loop the host plans,
decides and launches step t while step t - 1 is still running, and collects t - 1 afterwards; the plain loop makes the
same calls and collects at once. What decides about widths is a Policy; the engine knows from when its confidence must
be (nothing, the last step, this step) and nothing else about it.
"""

import dataclasses
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.cache.pool import KVPool
from slipstream.commit import Delta, commit
from slipstream.decide.policy import Policy
from slipstream.device.batch import committed_kv_slots, fill, layout
from slipstream.device.events import Kind, Mark, NullRecorder, Recorder, Stopwatch
from slipstream.device.staging import Export, Exporter, Uploader
from slipstream.device.state import PlanOnDevice, SlotState, apply_verdict, load
from slipstream.draft.base import Draft, Drafter, DraftView
from slipstream.errors import EngineError
from slipstream.metrics import SpecCounters
from slipstream.ops.attention import Segment
from slipstream.ops.rank import rank
from slipstream.ops.survival import fresh_survival
from slipstream.plan import Decision, DraftReport, StepPlan, StepResult
from slipstream.request import Request
from slipstream.scheduler import Scheduler
from slipstream.verify.accept import Rule, StepRule, silent_verdict, view_sampling
from slipstream.verify.target import Target


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """A step between its two launches."""

    plan: StepPlan
    on_device: PlanOnDevice
    rule: StepRule
    draft: Draft | None  # None: draft length 0, or nobody decodes
    report: Export | None  # its confidence on the way to the host
    marks: tuple[Mark, Mark]  # around the launch


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A step that was launched and not collected."""

    drafted: Drafted
    decision: Decision
    result: Export
    marks: tuple[Mark, Mark]  # around the second launch

    @property
    def device_ms(self) -> float:
        """Time of the two launches; known once the step is collected."""
        return Stopwatch.elapsed_ms(*self.drafted.marks) + Stopwatch.elapsed_ms(*self.marks)


class Engine:
    def __init__(
        self, *, target: Target, drafter: Drafter | None, pools: tuple[KVPool, ...], state: SlotState, policy: Policy,
        rule: Rule, scheduler: Scheduler, vocab_size: int, device: torch.device, overlap: bool,
        recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self.target = target
        self.drafter = drafter
        self.policy = policy
        self.scheduler = scheduler
        self.state = state
        self.overlap = overlap
        self.recorder = recorder or NullRecorder()
        self.totals = SpecCounters()
        self.requests: dict[int, Request] = {}
        self._inboxes: dict[int, deque[Delta]] = {}
        self.num_decode_steps = 0  # launched steps in which somebody decoded
        self._rule = rule
        self._vocab_size = vocab_size
        self._device = device
        self._pools = pools
        self._page_size = target.pool.page_size
        self._uploader = Uploader(device)
        self._exporter = Exporter(device)
        self._stopwatch = Stopwatch(device.type == "cuda")
        self._previous: Flight | None = None  # overlapped: in flight; plain: kept for its confidence

    # ------------------------------------------------------------------ the two loops

    def step(self) -> list[Delta]:
        """One turn of the loop: launches a step if one can be planned, returns what requests gained.

        An exception of a part (a drafter, a policy, an interrupt) leaves a step half-way. It ends every running request
        with an error and is raised; the engine can go on with others.
        """
        try:
            return self._step_overlapped() if self.overlap else self._step_plain()
        except BaseException as error:
            self._abandon(error)
            raise

    def _step_plain(self) -> list[Delta]:
        plan = self._schedule()
        if plan is None:
            return self._stuck()
        if self.policy.waits_for == "lagged":
            self.take_confidence(self._previous.drafted if self._previous else None)
        drafted = self.launch_draft(self._with_draft_length(plan))
        if self.policy.waits_for == "fresh":
            self.take_confidence(drafted)
        decision = self.decide(drafted)
        self._previous = self.launch_verify(drafted, decision)
        return self.collect(self._previous)

    def _step_overlapped(self) -> list[Delta]:
        plan = self._schedule()
        previous, self._previous = self._previous, None
        if self.policy.waits_for == "lagged":
            self.take_confidence(previous.drafted if previous else None)
        if plan is None:  # nothing can be launched before the step in flight is known
            return self.collect(previous) if previous else self._stuck()
        deltas = []
        drafted = self.launch_draft(self._with_draft_length(plan))
        if self.policy.waits_for == "fresh":
            deltas = self.collect(previous)
            self.take_confidence(drafted)
        decision = self.decide(drafted)
        self._previous = self.launch_verify(drafted, decision)
        return deltas if self.policy.waits_for == "fresh" else self.collect(previous)

    def _stuck(self) -> list[Delta]:
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

    def _with_draft_length(self, plan: StepPlan) -> StepPlan:
        """The plan with this step's draft length d, which lagged data chose, and caps within it."""
        if self.drafter is None or plan.num_decode == 0 or not plan.caps_np.any():
            return dataclasses.replace(plan, draft_length=0, caps_np=np.zeros_like(plan.caps_np))
        length = self.policy.draft_length(plan)
        return dataclasses.replace(plan, draft_length=length, caps_np=np.minimum(plan.caps_np, np.int32(length)))

    def decide(self, drafted: Drafted) -> Decision:
        with self._span(drafted.plan.step, "decide", "host"):
            return self.policy.decide(drafted.plan)

    # ------------------------------------------------------------------ launch: one function per stage

    @torch.inference_mode()
    def launch_draft(self, plan: StepPlan) -> Drafted:
        step, start = plan.step, self._stopwatch.mark()
        self.num_decode_steps += plan.num_decode > 0
        with self._span(step, "load", "device"):
            on_device = load(self.state, plan, self._uploader, self._pools)
            rule = self._rule.begin(view_sampling(self.state, on_device, plan), self._vocab_size)
        if plan.draft_length == 0:
            return Drafted(plan, on_device, rule, None, None, (start, self._stopwatch.mark()))
        assert self.drafter is not None
        with self._span(step, "draft", "device"):
            draft = self.drafter.propose(self._draft_view(plan, on_device), plan.draft_length, rule, self.policy.signal)
        report = None
        if self.policy.waits_for != "nothing":
            with self._span(step, "export_confidence", "device"):
                report = self._exporter.start({"signal": draft.signal})
        return Drafted(plan, on_device, rule, draft, report, (start, self._stopwatch.mark()))

    @torch.inference_mode()
    def launch_verify(self, drafted: Drafted, decision: Decision) -> Flight:
        plan, on_device, draft = drafted.plan, drafted.on_device, drafted.draft
        step, start = plan.step, self._stopwatch.mark()
        widths = self._widths(drafted, decision)
        with self._span(step, "layout", "device"):
            num_drafts = decision.num_draft_rows
            num_rows, num_outputs = plan.num_given + num_drafts, plan.num_emitting + num_drafts
            batch = layout(self.state, on_device, widths, num_rows, num_outputs, self._page_size)
        with self._span(step, "fill", "device"):
            token_ids = batch.token_ids if draft is None else fill(batch, draft.token_ids)
        with self._span(step, "verify", "device"):
            logits, features = self.target.verify(batch, token_ids, self._segments(plan, decision))
        with self._span(step, "accept", "device"):
            verdict = silent_verdict(batch)
            if num_outputs:
                drafts, prob = (draft.token_ids, draft.prob) if draft else (self._no_drafts(plan), None)
                verdict = drafted.rule.judge(batch, logits, drafts, prob)
        with self._span(step, "apply", "device"):
            apply_verdict(self.state, on_device, verdict.num_accepted, verdict.emitted)
            if self.drafter is not None and features is not None:
                kv_slots = committed_kv_slots(batch, verdict.num_accepted, self._page_size)
                self.drafter.absorb(features, batch.positions, kv_slots)
            if self.drafter is not None and draft is not None:
                count = plan.num_decode
                teaches = on_device.teaches[:count] & ~verdict.invalid[:count]
                self.drafter.settle(draft, widths[:count], verdict.num_accepted[:count], teaches)
        end = self._stopwatch.mark()  # before the export: whoever waited for that has waited for this mark too
        with self._span(step, "export", "device"):
            result = self._exporter.start({
                "widths": widths, "num_accepted": verdict.num_accepted, "emitted": verdict.emitted,
                "invalid": verdict.invalid,
            })  # fmt: skip
        return Flight(drafted, decision, result, (start, end))

    # ------------------------------------------------------------------ the two functions that wait

    def take_confidence(self, drafted: Drafted | None) -> None:
        """Wait for the confidence of a draft call and hand it to the policy."""
        if drafted is None or drafted.report is None:
            return
        with self._span(drafted.plan.step, "take_confidence", "wait"):
            signal = drafted.report.wait()["signal"]
        self.policy.observe(drafted.plan, DraftReport(step=drafted.plan.step, signal_np=signal))

    def collect(self, flight: Flight | None) -> list[Delta]:
        """Wait for a step's result and commit it."""
        if flight is None:
            return []
        plan = flight.drafted.plan
        with self._span(plan.step, "collect", "wait"):
            values = flight.result.wait()
        result = StepResult(
            step=plan.step,
            widths_np=values["widths"].astype(np.int32),
            num_accepted_np=values["num_accepted"].astype(np.int32),
            token_ids_np=values["emitted"].astype(np.int32),
            invalid_np=values["invalid"],
        )
        with self._span(plan.step, "commit", "host"):
            self.policy.learn(plan, result)
            self.policy.timed(plan, flight.decision, flight.device_ms)
            deltas = commit(plan, result, self.requests, self.scheduler)
        for delta in deltas:
            if (inbox := self._inboxes.get(delta.request.uid)) is not None:
                inbox.append(delta)
            if delta.finish_reason is not None:
                self._forget(delta.request)
        return deltas

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
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def drain(self) -> None:
        """With nobody left to go on, collect what is still in flight: it belongs to requests that have ended."""
        if not self.has_work:
            previous, self._previous = self._previous, None
            if self.overlap:
                self.collect(previous)

    def _abandon(self, error: BaseException) -> None:
        """End all that may have taken part in a step that failed; requests that wait in the queue did not."""
        self._previous = None
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
        """Upload the decision; with a budget, hand it out by this step's survival (stage `rank`)."""
        if decision.widths_np is not None:
            return self._uploader.upload({"widths": decision.widths_np.astype(np.int64)})["widths"]
        assert decision.budget is not None
        moved = self._uploader.upload(
            {"caps": decision.caps_np.astype(np.int64), "calibration": self.policy.calibration_np}
        )
        if drafted.draft is None:
            return torch.zeros_like(moved["caps"])
        with self._span(drafted.plan.step, "rank", "device"):
            num_decode = drafted.plan.num_decode
            sampled = self.state.temperature[drafted.on_device.slots[:num_decode]] > 0
            survival = fresh_survival(drafted.draft.signal, moved["calibration"], sampled)
            widths = torch.zeros_like(moved["caps"])
            widths[:num_decode] = rank(survival, moved["caps"][:num_decode], decision.budget)
            return widths

    def _draft_view(self, plan: StepPlan, on_device: PlanOnDevice) -> DraftView:
        slots = on_device.slots[: plan.num_decode]
        context = self.state.context[slots]
        return DraftView(
            slots=slots,
            context=context,
            anchor_ids=self.state.token_ids[slots, context].long(),
            page_table=self.state.page_table[slots],
            sampled=self.state.temperature[slots] > 0,
            history=self.state.token_ids,
            max_context=int(plan.context_upper_bound_np[: plan.num_decode].max()),
            step=plan.step,
        )

    @staticmethod
    def _segments(plan: StepPlan, decision: Decision) -> tuple[Segment, ...]:
        """Decoding sequences are attended together, every prefill chunk by itself; bounds the host knows."""
        drafts = decision.caps_np if decision.widths_np is None else decision.widths_np
        rows = plan.num_given_np + drafts
        kv = plan.context_upper_bound_np + rows
        count = plan.num_decode
        decode = [Segment(0, count, int(rows[:count].max()), int(kv[:count].max()))] if count else []
        chunks = [Segment(i, i + 1, int(rows[i]), int(kv[i])) for i in range(count, plan.num_sequences)]
        return tuple(decode + chunks)

    def _no_drafts(self, plan: StepPlan) -> torch.Tensor:
        return torch.zeros(plan.num_decode, 0, dtype=torch.int64, device=self._device)

    def _span(self, step: int, name: str, kind: Kind) -> AbstractContextManager[None]:
        return self.recorder.span(step, name, kind)
