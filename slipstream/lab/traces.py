"""Drafting traces: what the drafter said of every draft, and what became of it, at full width.

`collect_trace` serves conversations on the real engine under `TraceRecorder`, a policy that verifies all there is and
writes down signal, width and accepted run of each decode step. `replay` then makes the survivals that an engine would
have worked with, step by step. Nothing is fitted or judged here: `calibrate` and `evaluate` do that.

Letters in shapes: n rows (decode steps of requests that drafted, in the engine's order), S draft positions.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.config import NGRAM, SamplingParams, Signal, SpeculativeConfig
from slipstream.decide.make import resolve_signal
from slipstream.decide.policy import FullWidth, WaitsFor
from slipstream.decide.survival import SurvivalModel
from slipstream.draft.base import Drafter
from slipstream.errors import ConfigError
from slipstream.lab.measure import sizes
from slipstream.lab.quality import outcomes
from slipstream.llm import LLM, Completion
from slipstream.load import Models
from slipstream.plan import DraftReport, StepPlan, StepResult
from slipstream.prompts import Messages

Floats: TypeAlias = NDArray[np.float64]
Float32s: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftTrace:
    """One row per decode step of a request in which a draft was made, in the order in which the engine took the steps.

    Where an answer ends inside an accepted run (a stop token, or the limit), `widths_np` and `accepted_np` end there
    too: nothing is known of the drafts behind it. Rows behind the end of an answer are left out.
    """

    signal: Signal
    signal_np: Float32s  # [n, S] raw, as the drafter said it
    widths_np: Ints  # [n] drafts that were verified and belong to the answer
    accepted_np: Ints  # [n] of them accepted
    request_np: Ints  # [n] index of the conversation
    step_np: Ints  # [n] decode step of the request since it was admitted; a jump: no draft, or a preemption, between
    engine_step_np: Ints  # [n] not falling; equal: served together
    sampled_np: Bools  # [n] temperature above 0
    completions: tuple[Completion, ...]  # of all conversations, in their order
    num_drafts: int  # S

    def __len__(self) -> int:
        return len(self.widths_np)

    @property
    def class_np(self) -> Ints:
        """[n] 0 greedy, 1 sampled, as `SurvivalModel` wants it."""
        return self.sampled_np.astype(np.int64)

    @property
    def survived_np(self) -> Bools:
        """[n, S] drafts 1..j were all accepted; says something only where `known_np` is true."""
        return outcomes(self.accepted_np, self.widths_np, self.num_drafts)[0]

    @property
    def known_np(self) -> Bools:
        """[n, S] draft j was verified, see `quality.outcomes`."""
        return outcomes(self.accepted_np, self.widths_np, self.num_drafts)[1]

    @property
    def previous_np(self) -> Ints:
        """[n] the row of the same request's latest decode step; -1 where that made no draft, or there was none."""
        previous = np.full(len(self), -1, dtype=np.int64)
        latest: dict[int, int] = {}
        for row, request in enumerate(self.request_np.tolist()):
            before = latest.get(request)
            if before is not None and self.step_np[before] + 1 == self.step_np[row]:
                previous[row] = before
            latest[request] = row
        return previous

    def rows(self, chosen_np: Bools | Ints) -> "DraftTrace":
        """The trace of some rows only; completions stay, since `request_np` refers to them."""
        names = ("signal_np", "widths_np", "accepted_np", "request_np", "step_np", "engine_step_np", "sampled_np")
        return replace(self, **{name: getattr(self, name)[chosen_np] for name in names})


class _Row(NamedTuple):
    """A decode step of a request; `start`: tokens of its answer before it."""

    uid: int
    engine_step: int
    step: int
    start: int
    width: int
    accepted: int
    sampled: int


class TraceRecorder(FullWidth):
    """The policy that verifies every draft and keeps what was said of it. One engine each; `trace` when all is served."""

    # The step's own report, so that it is there before the result in both loops, for a request's last step as well.
    waits_for: WaitsFor = "fresh"
    signal: Signal

    def __init__(self, signal: Signal) -> None:
        super().__init__(0)
        self.signal = signal
        self._reports: dict[int, Float32s] = {}  # step -> signal of its decoding rows, until the result comes
        self._num_emitted: Counter[int] = Counter()  # by uid
        self._signals: list[Float32s] = []
        self._rows: list[_Row] = []

    def draft_length(self, plan: StepPlan) -> int:
        return plan.draft_length if plan.num_decode else 0

    def observe(self, plan: StepPlan, report: DraftReport) -> None:
        self._reports[plan.step] = report.signal_np

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        signal = self._reports.pop(plan.step, None)
        valid = plan.emits_np & ~result.invalid_np
        for row in np.flatnonzero(valid).tolist():
            uid, accepted = int(plan.uids_np[row]), int(result.num_accepted_np[row])
            if signal is not None and row < plan.num_decode:
                self._signals.append(signal[row])
                self._rows.append(_Row(
                    uid=uid, engine_step=plan.step, step=int(plan.decode_steps_np[row]), start=self._num_emitted[uid],
                    width=int(result.widths_np[row]), accepted=accepted, sampled=int(plan.sampled_np[row]),
                ))  # fmt: skip
            self._num_emitted[uid] += accepted + 1

    def trace(self, completions: Sequence[Completion], num_drafts: int) -> DraftTrace:
        """The rows that belong to answers. `completions` are those of all requests of the engine, in their order."""
        rows: Any = _Row(*np.array(self._rows, dtype=np.int64).reshape(-1, len(_Row._fields)).T)  # columns now
        request = rows.uid - 1  # the first request of an engine has uid 1
        lengths = np.array([len(completion.token_ids) for completion in completions], dtype=np.int64)
        left = lengths[request] - rows.start  # tokens of the answer from this step on
        cut = left <= rows.accepted  # the left-th token was an accepted draft and ended the answer
        whole = DraftTrace(
            signal=self.signal,
            signal_np=np.array(self._signals, dtype=np.float32).reshape(-1, num_drafts),
            widths_np=np.where(cut, left, rows.width),
            accepted_np=np.where(cut, left, rows.accepted),
            request_np=request,
            step_np=rows.step,
            engine_step_np=rows.engine_step,
            sampled_np=rows.sampled.astype(np.bool_),
            completions=tuple(completions),
            num_drafts=num_drafts,
        )
        return whole.rows(left > 0)


def collect_trace(
    models: Models,
    speculative: SpeculativeConfig,
    conversations: Sequence[Messages],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    signal: Signal | Literal["auto"] = "auto",
    concurrency: int = 8,
    drafter: Drafter | None = None,
    **engine: Any,
) -> DraftTrace:
    """Answer the conversations, `concurrency` at a time, with every draft verified.

    `speculative` names the drafter, S, acceptance and draft sampling; its mode must be static. `engine` are further
    fields of EngineConfig (`seed` for repeatable sampled answers, `max_model_len`). `drafter` is one of your own.
    """
    if speculative.mode != "static":
        raise ConfigError(f"a trace is taken at full width (mode static), not in mode {speculative.mode}")
    network = models.network
    has_head = speculative.draft_model == NGRAM or (network is not None and network.confidence_head is not None)
    if drafter is not None:
        has_head = drafter.has_confidence_head
    recorder = TraceRecorder(resolve_signal(signal, has_head=has_head)[0])
    longest = max(each.max_tokens for each in ([params] if isinstance(params, SamplingParams) else params))
    room = sizes(models, conversations, longest, engine)
    llm = LLM(models, speculative=speculative, drafter=drafter, policy=recorder, max_num_seqs=concurrency, **room)
    completions = llm.chat(conversations, params)
    return recorder.trace(completions, llm.engine.scheduler.limits.max_drafts)


# ---------------------------------------------------------------------------------------------------------------- replay


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """The survivals of a trace's rows, as an engine in service would have had them at the time."""

    fresh_np: Floats  # [n, S] from the step's own signal
    lagged_np: Floats  # [n, S] from the last step's, through the lag map; the prior where nothing was known
    lag_known_np: Bools  # [n] there was a last step


def replay(trace: DraftTrace, scale_np: Floats | None = None, *, learns: bool = True) -> Replay:
    """Predict, then teach, step by step.

    `scale_np` [2, S] is a calibration file's (`Calibration.scale_np`), None for none. The order is that of the
    overlapped loop in mode lag: what is said of a step knows the outcomes up to the one before the last. With `learns`
    off, survivals follow file and signal alone, and a lagged one is taken as it is.
    """
    model = SurvivalModel(trace.num_drafts, scale_np, learns=learns)
    previous = trace.previous_np
    fresh, lagged, told = np.zeros((3, len(trace), trace.num_drafts))  # told: fresh, as of when the engine heard of it
    bounds = np.flatnonzero(np.diff(trace.engine_step_np, prepend=-1, append=-1))
    taught: NDArray[np.intp] | None = None
    for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        rows = np.arange(first, end)
        if taught is not None:
            told[taught] = model.fresh(trace.signal_np[taught], trace.class_np[taught])
        fresh[rows] = model.fresh(trace.signal_np[rows], trace.class_np[rows])
        lagged[rows] = _predict(model, trace, rows, told)
        if taught is not None:
            _teach(model, trace, taught, told)
        taught = rows
    return Replay(fresh_np=fresh, lagged_np=lagged, lag_known_np=previous >= 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Foretold:
    """What could have been said of each draft's survival, by name, as `evaluate` and `calibrate` report it."""

    # [n, S] raw (the signal alone), file (with the calibration file), fresh (as served: file, corrected by outcomes),
    # lagged (as served, from the step before)
    survival_np: dict[str, Floats]
    lag_known_np: Bools  # [n] there was a step before


def foretell(trace: DraftTrace, scale_np: Floats | None) -> Foretold:
    """`scale_np` [2, S] as `replay` takes it. Learning goes on over all rows, a step being foretold before it teaches."""
    served = replay(trace, scale_np)
    survival = {
        "raw": replay(trace, learns=False).fresh_np,
        "file": replay(trace, scale_np, learns=False).fresh_np,
        "fresh": served.fresh_np,
        "lagged": served.lagged_np,
    }
    return Foretold(survival_np=survival, lag_known_np=served.lag_known_np)


def _predict(model: SurvivalModel, trace: DraftTrace, rows: Ints, told: Floats) -> Floats:
    """`told` [n, S]: survivals of earlier steps; of rows without one: anything, it is not used."""
    classes, previous = trace.class_np[rows], trace.previous_np[rows]
    last = told[previous]
    return np.where((previous >= 0)[:, None], model.predict(last, classes), model.prior(classes))


def _teach(model: SurvivalModel, trace: DraftTrace, rows: Ints, told: Floats) -> None:
    """What `Adaptive` teaches from a step: first survivals, then outcomes."""
    classes, previous = trace.class_np[rows], trace.previous_np[rows]
    teaches = trace.widths_np[rows] > 0
    lengths = np.where(previous >= 0, trace.num_drafts, 0)
    confidence = model.confidence(trace.signal_np[rows], classes)
    model.teach_survival(told[rows], told[previous], lengths, classes, teaches)
    model.teach_outcomes(confidence, trace.widths_np[rows], trace.accepted_np[rows], classes, teaches)
