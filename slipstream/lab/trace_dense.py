"""Dense traces from the real engine: answers given one token a step, with a block drafted from every token.

`TokenByToken` is a policy that drafts S tokens in every step and verifies none, so that every token of an answer is an
anchor once. Around the engine's drafter lies one that keeps what was drafted, and said of it, on the device, by slot and
anchor; it goes by device values alone and is captured like the drafter itself. The host reads a slot when its tenant
has gone. Runs are made here, from drafts and the tokens that followed. Called by `slipstream trace`.

Letters in shapes: n tokens of an answer, S draft positions, N slots, L positions of a request.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.backends import Parts
from slipstream.config import SamplingParams, SpeculativeConfig
from slipstream.decide.policy import FullWidth
from slipstream.device.state import SlotState
from slipstream.draft.base import Draft, Drafter, DraftView, Sampler
from slipstream.errors import SlipstreamError
from slipstream.lab import machine
from slipstream.lab.around import AroundDrafter
from slipstream.lab.dense import DenseTrace, Halfs, Int8s, Int32s, Int64s
from slipstream.lab.measure import answer, load, request_params, sampling_facts, sizes
from slipstream.lab.trace_options import TraceOptions
from slipstream.llm import LLM, Completion
from slipstream.load import Models
from slipstream.models.headers import weights_digest
from slipstream.models.locate import resolve_target
from slipstream.models.shapes import shape_name
from slipstream.plan import Decision, StepPlan, StepResult
from slipstream.prompts import Prompt, read_prompts, user

log = logging.getLogger(__name__)

Say = Callable[[str], None]
Advance = Callable[[int, int], None]  # tokens so far, and at most in all

# Answered beyond the limit and cut off: where an answer is about to end the engine drafts nothing, and a trace wants it.
MORE_TOKENS = 2


def run(options: TraceOptions, say: Say, advance: Advance, command: str = "") -> DenseTrace:
    """Answer the prompts and keep the trace at `options.out`; `command` stands in it as where it came from."""
    sets = [read_prompts(path, limit=options.requests) for path in options.sets]
    models = load(options.model, options.draft, options.engine, options.speculative)
    prompts = [user(text) for texts in sets for text in texts]
    say(f"tracing {options.draft}: {len(prompts)} answers of at most {options.sampling.max_tokens} tokens")
    trace = collect_dense(
        models, options.speculative_config(options.num_speculative_tokens), prompts,
        request_params(options.sampling, len(prompts)), concurrency=options.concurrency, advance=advance,
        set_names=options.set_names, sets_np=np.repeat(np.arange(len(sets), dtype=np.int32), [len(s) for s in sets]),
        about=about(options, models, command), **options.engine,
    )  # fmt: skip
    trace.save(options.out)
    return trace


def collect_dense(
    models: Models, speculative: SpeculativeConfig, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *,
    concurrency: int = 8, advance: Advance = lambda done, most: None, set_names: tuple[str, ...] = ("all",),
    sets_np: Int32s | None = None, about: dict[str, Any] | None = None, **engine: Any,
) -> DenseTrace:  # fmt: skip
    """Answer the prompts, `concurrency` at a time, one token a step.

    `speculative` names the drafter and S (None: all that it drafts); its mode must be static, its acceptance coupled.
    sets_np [prompts] says which of `set_names` each belongs to. `engine` are further fields of EngineConfig.
    """
    network = models.network
    assert network is not None and speculative.mode == "static" and speculative.acceptance == "coupled", speculative
    num_drafts = speculative.num_speculative_tokens or network.spec.max_draft_tokens
    speculative = replace(speculative, num_speculative_tokens=num_drafts)
    limits = [each.max_tokens for each in params]
    longer = [replace(each, max_tokens=each.max_tokens + MORE_TOKENS) for each in params]
    signals = ("head", "peak") if network.confidence_head is not None else ("peak",)
    policy = TokenByToken(num_drafts, signals, lambda done: advance(done, sum(limits)))
    room = sizes(models, prompts, max(limits) + MORE_TOKENS, engine)
    llm = LLM(
        models, speculative=speculative, policy=policy, adapt=policy.adapt, **{**room, "max_num_seqs": concurrency}
    )
    answers = []
    for uid, (completion, limit) in enumerate(zip(answer(llm, prompts, longer), limits, strict=True), 1):
        answers.append(_answer(completion, limit, policy.take(uid)))
    advance(sum(limits), sum(limits))
    sets_np = np.zeros(len(prompts), np.int32) if sets_np is None else sets_np
    found = {"num_speculative_tokens": num_drafts, "tokens_without_drafts": _num_without(answers)}
    return join(answers, set_names, sets_np, {**found, **(about or {})})


# ------------------------------------------------------------------------------------------------------ while it serves


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """What was drafted from anchors one after the other."""

    token_ids_np: Int32s  # [n, S], -1 where nothing was drafted
    signals: dict[str, Halfs]  # [n, S], 0 there

    def anchors(self, first: int, count: int) -> "Drafts":
        rows = slice(first, first + count)
        return Drafts(self.token_ids_np[rows], {name: values[rows] for name, values in self.signals.items()})

    def and_nothing(self) -> "Drafts":
        """One anchor more, without drafts."""
        signals = {name: np.pad(values, ((0, 1), (0, 0))) for name, values in self.signals.items()}
        return Drafts(np.pad(self.token_ids_np, ((0, 1), (0, 0)), constant_values=-1), signals)

    def with_those_of(self, other: "Drafts") -> "Drafts":
        """Where the other has drafts they count."""
        there = other.token_ids_np >= 0
        signals = {name: np.where(there, other.signals[name], values) for name, values in self.signals.items()}
        return Drafts(np.where(there, other.token_ids_np, self.token_ids_np), signals)


class RecordingDrafter(AroundDrafter):
    """Drafts once with each signal, and keeps drafts and confidences on the device by slot and anchor."""

    def __init__(self, inner: Drafter, state: SlotState, num_drafts: int, signals: Sequence[str]) -> None:
        super().__init__(inner)
        shape, device = (*state.token_ids.shape, num_drafts), state.token_ids.device
        self._token_ids = torch.full(shape, -1, dtype=torch.int32, device=device)  # [N + 1, L + 1, S]
        self._signals = {name: torch.zeros(shape, dtype=torch.float16, device=device) for name in signals}

    def propose(self, view: DraftView, num_drafts: int, sampler: Sampler, signal: str) -> Draft:
        """The signal asked for is of no account: nobody decides anything by it."""
        place = view.slots * self._token_ids.shape[1] + view.context
        for name, kept in self._signals.items():
            draft = self.inner.propose(view, num_drafts, sampler, name)
            _keep(kept, place, draft.signal)
        _keep(self._token_ids, place, draft.token_ids)
        return draft

    def take(self, slot: int) -> Drafts:
        """[L + 1, S] of a slot, which is empty then. Waits for the device."""
        token_ids = self._token_ids[slot].cpu().numpy().copy()
        self._token_ids[slot].fill_(-1)
        nothing = np.float16(0)  # signals of a former tenant may be there
        signals = {name: np.where(token_ids < 0, nothing, v[slot].cpu().numpy()) for name, v in self._signals.items()}
        return Drafts(token_ids, signals)


def _keep(kept: Tensor, place: Tensor, values: Tensor) -> None:
    kept.flatten(0, 1)[:, : values.shape[1]].index_copy_(0, place, values.to(kept.dtype))


class TokenByToken(FullWidth):
    """The policy that drafts S tokens from every anchor and verifies none. One engine each, with `adapt`."""

    def __init__(self, num_drafts: int, signals: Sequence[str], advance: Callable[[int], None]) -> None:
        super().__init__(num_drafts)
        self._signals = signals
        self._advance = advance
        self._num_tokens = 0
        self._drafter: RecordingDrafter | None = None  # from when the engine is built
        self._tenants: dict[int, int] = {}  # slot -> uid whose drafts are there
        self._taken: dict[int, Drafts] = {}  # by uid

    def adapt(self, parts: Parts) -> Parts:
        assert parts.drafter is not None
        self._drafter = RecordingDrafter(parts.drafter, parts.backend.state, self.num_drafts, self._signals)
        return replace(parts, drafter=self._drafter)

    def decide(self, plan: StepPlan) -> Decision:
        """A slot's new tenant drafts in a later step: what is there is still the former one's, and all of it."""
        uids = dict(zip(plan.slots_np.tolist(), plan.uids_np.tolist(), strict=True))
        for admission in plan.admissions:
            self._clear(admission.slot)
            self._tenants[admission.slot] = uids[admission.slot]
        return Decision(widths_np=np.zeros_like(plan.caps_np), budget=None, caps_np=plan.caps_np)

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        self._num_tokens += int(np.count_nonzero(plan.emits_np))
        self._advance(self._num_tokens)

    def take(self, uid: int) -> Drafts:
        """What was drafted for a request, by anchor, from position 0 on; once it has been answered."""
        for slot in [slot for slot, tenant in self._tenants.items() if tenant == uid]:
            self._clear(slot)
        return self._taken.pop(uid)

    def _clear(self, slot: int) -> None:
        uid = self._tenants.pop(slot, None)
        if uid is not None:
            assert self._drafter is not None
            drafts, former = self._drafter.take(slot), self._taken.get(uid)
            self._taken[uid] = drafts if former is None else former.with_those_of(drafts)  # it was preempted


# ------------------------------------------------------------------------------------------------------------ afterwards


@dataclass(frozen=True, slots=True, eq=False)
class TracedAnswer:
    prompt_length: int
    token_ids_np: Int32s  # [n]
    drafts: Drafts  # of n anchors


def _answer(completion: Completion, limit: int, drafts: Drafts) -> TracedAnswer:
    """Cut to `limit` tokens; the first one stands behind the prompt.

    From the last token nobody drafts, though the engine may not yet have known that it was the last.
    """
    if completion.error is not None:
        raise SlipstreamError(
            f"a prompt of {completion.prompt_tokens} tokens could not be answered: {completion.error}"
        )
    token_ids = np.array(completion.token_ids[:limit], np.int32)
    return TracedAnswer(
        completion.prompt_tokens, token_ids, drafts.anchors(completion.prompt_tokens, len(token_ids) - 1).and_nothing()
    )


def _num_without(answers: Sequence[TracedAnswer]) -> int:
    """Tokens, but for last ones, from which no block could be drafted."""
    count = sum(int((a.drafts.token_ids_np[:-1, 0] < 0).sum()) for a in answers)
    if count:
        log.warning(
            "no drafts from %d tokens: close to the end of the context, or at a preemption; their runs are 0", count
        )
    return count


def runs_of(token_ids_np: Int32s, drafts_np: Int32s) -> Int8s:
    """[n] leading drafts of [n, S] that equal what followed each of the tokens [n], as far as the answer goes."""
    count, num_drafts = drafts_np.shape
    beyond = np.full(num_drafts, -2, np.int32)  # equals no draft, and no missing one
    behind = np.concatenate([token_ids_np[1:], beyond])
    followed = np.lib.stride_tricks.sliding_window_view(behind, num_drafts)[:count]
    runs: Int8s = np.cumprod(drafts_np == followed, axis=1).sum(axis=1).astype(np.int8)
    return runs


def join(
    answers: Sequence[TracedAnswer], set_names: tuple[str, ...], sets_np: Int32s, about: dict[str, Any]
) -> DenseTrace:
    names = answers[0].drafts.signals
    return DenseTrace(
        starts_np=np.concatenate([[0], np.cumsum([len(a.token_ids_np) for a in answers])]).astype(np.int64),
        prompt_lengths_np=np.array([a.prompt_length for a in answers], np.int32),
        token_ids_np=np.concatenate([a.token_ids_np for a in answers]),
        runs_np=np.concatenate([runs_of(a.token_ids_np, a.drafts.token_ids_np) for a in answers]),
        signals={name: np.concatenate([a.drafts.signals[name] for a in answers]) for name in names},
        set_names=set_names, sets_np=sets_np, about=about,
    )  # fmt: skip


def steps_at(trace: DenseTrace, width: int) -> Int64s:
    """[A] decode steps of each answer if every step verifies `width` drafts."""
    anchor, end = trace.starts_np[:-1].copy(), trace.starts_np[1:] - 1
    steps = np.zeros(trace.num_answers, np.int64)
    while len(going := np.flatnonzero(anchor < end)):
        steps[going] += 1
        anchor[going] += np.minimum(trace.runs_np[anchor[going]], width) + 1
    return steps


def tokens_per_step(trace: DenseTrace, width: int) -> float | None:
    """The mean accepted length at a fixed width, the first token of each answer not counted: prefill gives that."""
    steps = int(steps_at(trace, width).sum())
    return (len(trace.token_ids_np) - trace.num_answers) / steps if steps else None


def summary(trace: DenseTrace, widths: Iterable[int]) -> list[dict[str, Any]]:
    """A row for each set, and for all together where there are several."""
    parts = [(name, trace.of_sets([name])) for name in trace.set_names]
    return [
        {
            "prompts": name, "answers": part.num_answers, "tokens": len(part.token_ids_np),
            "mean_run": float(part.runs_np.mean()) if len(part.runs_np) else None,
            "mean_accepted_length": {str(width): tokens_per_step(part, width) for width in widths},
        }
        for name, part in [*parts, *([("all", trace)] if len(parts) > 1 else [])]
    ]  # fmt: skip


def about(options: TraceOptions, models: Models, command: str) -> dict[str, Any]:
    """Where a trace came from."""
    sampling = options.sampling
    return {
        **machine.provenance(models.device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "model": options.model,
        "model_digest": _target_digest(options.model),
        "draft": options.draft,
        "draft_digest": None if models.drafter_path is None else weights_digest(models.drafter_path),
        "dtype": str(models.dtype).removeprefix("torch."),
        "acceptance": "coupled",
        "prompts": {name: str(path or "built in") for name, path in zip(options.set_names, options.sets, strict=True)},
        "requests": options.requests,
        "concurrency": options.concurrency,
        "sampling": sampling_facts(sampling),
    }  # fmt: skip


def _target_digest(name: str) -> str | None:
    """None for weights drawn at random."""
    if shape_name(name) is not None:
        return None
    path = resolve_target(name)
    return weights_digest(path) if path.is_dir() else _file_digest(path)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
