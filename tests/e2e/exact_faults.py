"""Engines that are wrong on purpose, each in one way that published engines were, for `verify-exact` to find.

`python -m tests.e2e.exact_faults` prints the table of docs/EXACT.md: what each fault does to the tokens of a tiny pair.
A fault is put in from outside (a source of noise, a policy, an op of stage accept); the engine has no switch for it.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.config import SamplingParams
from slipstream.decide.cost import CostModel, DraftTimes, TableCost
from slipstream.decide.policy import Adaptive, Policy
from slipstream.decide.survival import SurvivalModel
from slipstream.draft.base import Draft, DraftView, Sampler
from slipstream.lab.verify_exact import verify
from slipstream.lab.verify_exact_engines import RandomWidths, price, start
from slipstream.lab.verify_exact_options import ExactOptions
from slipstream.load import Models
from slipstream.models.layers import DenseAttend
from slipstream.ops.noise import CounterSource, Purpose, gumbel
from slipstream.ops.reject import DraftLaw, draft_sample, reject
from slipstream.plan import Decision, DraftReport, StepPlan
from slipstream.testing import tiny_models, tiny_spec
from slipstream.verify import accept

S = 3
VOCAB = 8  # few tokens, so that some are likely
SURE = 1.3
SURELY = 0.3
CLIFF = 2.2
PROMPTS = ("t3 t4 t3 t9", "t5 t7", "t6 t6 t8", "t9 t11 t12 t2")


class NearTarget:
    """Drafts with the target itself, made a little too sure: mostly right, which is where a bias of selection shows most."""

    max_draft_tokens = S
    max_position = 1 << 30
    tap_layers: tuple[int, ...] = ()
    has_confidence_head = True

    def __init__(self, models: Models) -> None:
        self._target, self._vocab_size = models.target, models.vocab_size
        self._memory: dict[tuple[int, ...], Tensor] = {}

    def propose(self, view: DraftView, num_drafts: int, sampler: Sampler, signal: str) -> Draft:
        history = view.history[view.slots].tolist()
        known = [tuple(row[: length + 1]) for row, length in zip(history, view.context.tolist(), strict=True)]
        drafts, signals, laws = [], [], []
        for j in range(num_drafts):
            logits = SURE * self._logits(known)
            drawn, law = sampler.draw(logits, j, None)
            own = logits.softmax(-1)
            drafts.append(drawn)
            signals.append(self._signal(signal, own, drawn, j))
            laws += [] if law is None else [law]
            known = [(*tokens, token) for tokens, token in zip(known, drawn.tolist(), strict=True)]
        return Draft(torch.stack(drafts, 1), torch.stack(signals, 1), DraftLaw.join(laws) if laws else None)

    def _signal(self, name: str, prob: Tensor, drawn: Tensor, offset: int) -> Tensor:
        """A head may look at the drafts before; this one makes much of the first."""
        if name == "drawn":
            return prob.gather(1, drawn[:, None])[:, 0]
        if name == "peak" or offset == 0:
            self._first = drawn
            return prob.amax(-1) if name == "peak" else torch.full_like(drawn, 0.6, dtype=torch.float32)
        return torch.where(self._first % 2 == 0, 0.95, 0.05)

    def _logits(self, known: list[tuple[int, ...]]) -> Tensor:
        """[D, V]; whatever was asked before is remembered, for with few tokens the same beginnings come again."""
        if missing := list({tokens for tokens in known if tokens not in self._memory}):
            lengths = [len(tokens) for tokens in missing]
            rows, positions = (
                torch.tensor([t for tokens in missing for t in tokens]),
                [torch.arange(n) for n in lengths],
            )
            hidden, _ = self._target(rows, torch.cat(positions), DenseAttend(self._target.spec, lengths))
            last = torch.tensor(lengths).cumsum(0) - 1
            logits = self._target.logits(hidden[last])[:, : self._vocab_size].float()
            self._memory |= zip(missing, logits, strict=True)
        return torch.stack([self._memory[tokens] for tokens in known])

    def absorb(self, features: Tensor, positions: Tensor, kv_slots: Tensor) -> None:
        raise AssertionError("a drafter without taps absorbs nothing")

    def settle(self, draft: Draft, widths: Tensor, num_accepted: Tensor, teaches: Tensor) -> None:
        pass


@cache
def tiny(algorithm: str | None = None) -> Models:
    return tiny_models(algorithm, spec=tiny_spec(vocab_size=VOCAB))


@cache
def near_target() -> NearTarget:
    return NearTarget(tiny())


# ---------------------------------------------------------------------------------------------------- rules and noise


def one_hot_residual(drafts: Tensor, law: DraftLaw | None, *rest: Any) -> tuple[Tensor, Tensor]:
    """Accepts by p / q, but draws the replacement as if the draft had been certain."""
    own = torch.ones(drafts.shape)
    if law is not None:
        own[: len(law.logits)] = law.of(drafts[: len(law.logits)])
    own, source = own.reshape(-1), rest[-1]

    class AcceptByRatio:
        categorical = staticmethod(source.categorical)

        @staticmethod
        def bernoulli(prob: Tensor, *name: Any) -> Tensor:
            return source.bernoulli((prob / own).clamp(max=1), *name)  # the op divided by 1

    return reject(drafts, None, *rest[:-1], AcceptByRatio())


def scored_at_another_temperature(*given: Any, **options: Any) -> tuple[Tensor, DraftLaw]:
    """Draws at the request's temperature, and reports the probabilities of twice that."""
    tokens, _ = draft_sample(*given, **options)
    _, flat = draft_sample(given[0] / 2, *given[1:], **options)
    return tokens, flat


def argmax_scored_as_drawn(logits: Tensor, *given: Any, **options: Any) -> tuple[Tensor, DraftLaw]:
    """Drafts the likeliest token, and reports the distribution that it was not drawn from."""
    _, law = draft_sample(logits, *given, **options)
    return logits.argmax(-1), law


class OnePurpose(CounterSource):
    """Draft, acceptance and replacement of a place take the same number."""

    def bernoulli(self, prob: Tensor, seed: Tensor, anchor: Tensor, offset: Tensor, purpose: Purpose) -> Tensor:
        return super().bernoulli(prob, seed, anchor, offset, Purpose.ACCEPT)

    def categorical(self, prob: Tensor, seed: Tensor, anchor: Tensor, offset: Tensor, purpose: Purpose) -> Tensor:
        return super().categorical(prob, seed, anchor, offset, Purpose.ACCEPT)


class KeyedByPosition(CounterSource):
    """Names a draft by the position it is for, whichever step draws it."""

    def categorical(self, prob: Tensor, seed: Tensor, anchor: Tensor, offset: Tensor, purpose: Purpose) -> Tensor:
        if purpose is Purpose.DRAFT:
            anchor, offset = anchor + offset, torch.zeros_like(offset)
        return super().categorical(prob, seed, anchor, offset, purpose)


def noise_of_the_anchor(view: accept.SamplingView, vocab_size: int) -> Tensor:
    """Coupled noise by the position of the step instead of the token's own."""
    count, places = view.num_decode, view.draft_length + 1

    def spread(values: Tensor) -> Tensor:
        return torch.cat([values[:count].repeat_interleave(places), values[count:]])

    return gumbel(spread(view.seed), spread(view.first_position), vocab_size)


def all_accepted(drafts: Tensor, targets: Tensor, widths: Tensor) -> Tensor:
    """Takes every draft for good."""
    return widths.clone()


# ----------------------------------------------------------------------------------------------------------- policies


class LooksBack(RandomWidths):
    """Verifies all or nothing, by what the last step's second draft said of itself. Exact, as long as noise is not reused."""

    waits_for = "lagged"
    signal = "drawn"

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[int, float] = {}

    def observe(self, plan: StepPlan, report: DraftReport) -> None:
        if report.signal_np.shape[1] > 1:
            self._last |= dict(zip(plan.uids_np.tolist(), report.signal_np[:, 1].tolist(), strict=False))

    def decide(self, plan: StepPlan) -> Decision:
        full = super().decide(plan)
        sure = np.array([self._last.get(uid, 0.0) > SURELY for uid in plan.uids_np.tolist()])
        return replace(full, widths_np=np.where(sure, full.caps_np, 0).astype(np.int32))


def adaptive(signal: str, *, cost: CostModel, causal: bool = True, budget: bool = False) -> Policy:
    """The engine's own policy, without the care that `make_policy` takes; every step drafts S."""
    policy = Adaptive(
        num_drafts=S, waits_for="lagged" if budget else "fresh", budget=budget, signal=signal, cost=cost,
        survival=SurvivalModel(S, learns=False), causal=causal,
    )  # fmt: skip
    policy.draft_length = lambda plan: S if plan.num_decode else 0
    return policy


def cliff(concurrency: int) -> CostModel:
    """A step of few rows, or one of many: whether the first draft is worth it depends on the later ones."""
    few, most = concurrency, concurrency * (S + 1)
    return CostModel(TableCost((few, most), (3.0, 3.0 * CLIFF)), DraftTimes.constant(0.1), corrects=False)


# ------------------------------------------------------------------------------------------------------------- faults

Change = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong, and the check that has to find it."""

    mode: str = "static"
    rule: str = "rejection"
    check: str = "law"
    change: Change = lambda patch: None
    source: CounterSource | None = None
    policy: Callable[[int], Policy] | None = None  # from the number of requests at a time
    near: bool = False  # drafted by `NearTarget`; else by a random network, mostly wrong
    samples: int = 1000
    concurrency: int = 64


def patched(name: str, value: object) -> Change:
    return lambda patch: patch.setattr(accept, name, value)


FAULTS: dict[str, Fault] = {
    "residual as if the draft had been certain": Fault(change=patched("reject", one_hot_residual)),
    "drafts scored at another temperature": Fault(change=patched("draft_sample", scored_at_another_temperature)),
    "likeliest drafts scored as drawn ones": Fault(change=patched("draft_sample", argmax_scored_as_drawn)),
    "one noise for draft, acceptance and residual": Fault(source=OnePurpose()),
    "draft noise keyed by position alone, under lag": Fault(
        near=True, samples=1500, mode="lag", source=KeyedByPosition(), policy=lambda _: LooksBack()
    ),
    "widths from this step's `drawn`": Fault(
        near=True, samples=400, mode="adaptive", policy=lambda count: adaptive("drawn", cost=price(count, S))
    ),
    "budget handed out by this step's `drawn`": Fault(
        near=True, samples=1000, mode="lag-budget", policy=lambda count: adaptive("drawn", cost=price(count, S), budget=True)
    ),
    "best of all budgets of this step's `head`": Fault(
        near=True, samples=250, mode="adaptive", policy=lambda count: adaptive("head", cost=cliff(count), causal=False), concurrency=1
    ),
    "coupled noise keyed by step": Fault(
        rule="coupled", check="seeded",
        change=lambda patch: patch.setattr(accept.CoupledRule, "_noise", staticmethod(noise_of_the_anchor)),
    ),
    "every draft accepted": Fault(
        rule="coupled", check="greedy", change=patched("count_accepted_coupled", all_accepted)
    ),
}  # fmt: skip


@contextmanager
def prompts_file(*texts: str) -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.jsonl"
        path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
        yield path


def tiny_options(prompts: Path, fault: Fault, samples: int) -> ExactOptions:
    return ExactOptions(
        model="tiny", draft="tiny", prompts=prompts, requests=len(PROMPTS), samples=samples, positions=(2, 3),
        modes=(fault.mode,), rules=(fault.rule,), concurrency=fault.concurrency,
        sampling=SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, seed=0),
    )  # fmt: skip


def report_of(fault: Fault, samples: int, *, right: bool = False) -> dict[str, Any]:
    """What `verify-exact` says of it; `right`: of its twin with the engine's own rule and noise, and the policy kept."""

    def adapt(parts: Any) -> Any:
        return parts if fault.source is None else replace(parts, rule=replace(parts.rule, source=fault.source))

    with prompts_file(*PROMPTS) as path, pytest.MonkeyPatch.context() as patch:
        options, models = tiny_options(path, fault, samples), tiny(None if fault.near else "dspark")

        def begin(mode: str, rule: str) -> Any:
            policy = fault.policy(fault.concurrency) if fault.policy and mode != "off" else None
            return start(
                models,
                options,
                mode,
                rule,
                policy=policy,
                adapt=None if right else adapt,
                drafter=near_target() if fault.near else None,
            )

        if not right:
            fault.change(patch)
        return verify(models, options, begin=begin)


def found(fault: Fault, report: dict[str, Any]) -> dict[str, Any]:
    """The check that is meant to find it."""
    return next(c for c in report["checks"] if (c["check"], c["mode"]) == (fault.check, fault.mode))


def main(times: int) -> None:
    print("| what is wrong | mode | check | bias | by chance | p | verdict |\n|---|---|---|---:|---:|---:|---|")
    for name, fault in FAULTS.items():
        check = found(fault, report_of(fault, times * fault.samples))
        if fault.check == "law":
            worst = max((t for t in check["tests"]), key=lambda t: t["bias"] - t["chance"])
            figures = f"{worst['bias']:.3f} ({worst['where']}) | {worst['chance']:.3f} | {check['p_value']:.0e}"
        else:
            figures = f"{check['requests'] - check['equal']} of {check['requests']} texts | 0 | -"
        print(f"| {name} | {fault.mode} | {fault.check} | {figures} | {check['verdict']} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
