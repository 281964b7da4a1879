"""Chaos: random requests, aborts and faults against engines with too little memory, checked after every step.

    python -m tests.soak.chaos --requests 10000 --out runs/chaos.json
    python -m tests.soak.chaos --model smollm2-135m --draft smollm2-135m-dspark --device cuda --requests 2000 --jobs 8

Each engine (a mode, a rule, a loop) gets its share of the requests. After every step pages are owned as often as they say
and free + used = all; at the end nothing is left. Whoever was neither aborted nor hit by a fault has the answer of plain
decoding, alone in an engine with room (`--beside 1`): ids, text and reasons; where two tokens are within rounding of each
other there it may differ, for one request in a hundred. Under rejection that is asked of greedy requests only. The run is
repeatable from its seed, but for what a GPU's sums do.
"""

import argparse
import gc
import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from slipstream.config import SamplingParams, SpeculativeConfig
from slipstream.errors import SlipstreamError
from slipstream.lab import machine
from slipstream.llm import LLM, Completion
from slipstream.load import Models
from slipstream.request import Request, sibling_seed
from slipstream.testing import assert_nothing_left
from tests.e2e.engines import make_llm, models_with
from tests.e2e.grammars import ANY, allowed_after, grammars
from tests.e2e.test_endings import byte_tokenizer
from tests.lossless.harness import GAP, NearTies, scores_after
from tests.soak.faults import Faults, InjectedFault
from tests.soak.traffic import Traffic, Wish
from tests.unit.scheduling import check_invariants

ENGINES = (
    ("off", "coupled", True), ("static", "coupled", True), ("adaptive", "coupled", True), ("lag", "coupled", True),
    ("lag-budget", "coupled", True), ("lag", "coupled", False), ("lag", "rejection", True), ("static", "rejection", False),
)  # fmt: skip
PAGE_SIZE = 8
STUCK = 20_000  # turns that a request may take


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the engines serve, and how little memory they have."""

    models: Models
    tiny: bool  # with the grammar and the drafters that tests have
    draft: str = "tiny"
    seed: int = 0
    slots: int = 8
    longest: int = 96
    pages: int = 14  # the longest request needs 12
    beside: int = 8  # requests at a time in the engine whose answers are compared
    fault_rate: float = 0.01  # per turn
    abort_rate: float = 0.02

    @property
    def traffic(self) -> Traffic:
        return Traffic(self.seed, self.models.vocab_size, self.longest, ANY if self.tiny else None)

    def engine(self, mode: str, rule: str, overlap: bool) -> LLM:
        sizes = {
            "max_num_seqs": self.slots,
            "max_model_len": self.longest + 1,
            "page_size": PAGE_SIZE,
            "overlap": overlap,
        }
        made = make_llm if self.tiny else self._real
        # Which says what a page takes; without graphs, which take longer to record than some shares take to serve.
        small = made(mode, acceptance=rule, models=self.models, max_num_batched_tokens=48, backend="torch", **sizes)
        taken = next(value for name, value, _ in small.notes if name == "kv_memory")
        pages = small.engine.scheduler.pages
        memory = (self.pages + pages.num_pages - pages.num_usable) * (taken // pages.num_pages)
        llm = made(mode, acceptance=rule, models=self.models, max_num_batched_tokens=48, kv_memory=memory, **sizes)
        return self._with_grammars(llm)

    def reference(self) -> LLM:
        sizes = {"max_num_seqs": self.beside, "max_model_len": self.longest + 1, "prefix_caching": False}
        return self._with_grammars(LLM(self.models, page_size=PAGE_SIZE, **sizes))

    def _with_grammars(self, llm: LLM) -> LLM:
        if self.tiny:
            llm.grammars = grammars(self.models.vocab_size)
        return llm

    def _real(self, mode: str, *, acceptance: str, models: Models, **sizes: Any) -> LLM:
        fields = {} if mode == "off" else {"draft_model": self.draft, "acceptance": acceptance}
        return LLM(models, speculative=SpeculativeConfig.for_mode(mode, **fields), **sizes)


@dataclass(eq=False)
class Open:
    """A wish that was granted, and what became of its requests."""

    wish: Wish
    requests: list[Request]
    since: int  # the turn
    aborted: set[int] = field(default_factory=set)  # uids

    @property
    def is_over(self) -> bool:
        return all(request.is_finished for request in self.requests)


class Chaos:
    """One engine, and what is done to it."""

    def __init__(self, setting: Setting, kind: tuple[str, str, bool]) -> None:
        self.setting, self.rule = setting, kind[1]
        self.llm = setting.engine(*kind)
        self.counts: Counter[str] = Counter()
        self.near_ties = NearTies()
        self._rng = random.Random(f"{setting.seed}/{kind}")
        self._faults = Faults(self.llm.engine)
        self._open: list[Open] = []
        self._done: list[Open] = []
        self._turn = 0
        self._plain = setting.reference()

    def serve(self, wishes: Iterator[Wish]) -> None:
        """All of them, to the end."""
        exhausted = False
        while not exhausted or self._open:
            while not exhausted and len(self._open) < 3 * self.setting.slots and self._rng.random() < 0.5:
                wish = next(wishes, None)
                exhausted = wish is None
                if wish is not None:
                    self._submit(wish)
            self._disturb()
            self._step()
            self._look_after()
        self.llm.engine.drain()
        assert_nothing_left(self.llm.engine)
        self._compare()
        totals, scheduler = self.llm.engine.totals, self.llm.engine.scheduler
        self.counts.update(
            steps=self.llm.engine.num_decode_steps, preemptions=scheduler.num_preemptions, drafted=totals.drafted,
            verified=totals.verified, accepted=totals.accepted, cached_tokens=scheduler.prefixes.num_hits,
        )  # fmt: skip
        self.counts.update({f"fault in {stage}": count for stage, count in self._faults.raised.items()})

    def _submit(self, wish: Wish) -> None:
        self.counts["requests"] += 1
        try:
            requests = self.llm.prepare(wish.prompt, wish.params)
        except SlipstreamError:
            assert wish.is_bad, wish
            self.counts["refused"] += 1
            return
        assert not wish.is_bad, f"nobody refused {wish}"
        for request in requests:
            self.llm.engine.add(request)
        self._open.append(Open(wish, requests, self._turn))

    def _disturb(self) -> None:
        if self._rng.random() < self.setting.fault_rate:
            self._faults.arm(self._rng)
        if self._open and self._rng.random() < self.setting.abort_rate:
            victim = self._rng.choice(self._open)
            request = self._rng.choice(victim.requests)
            if not request.is_finished:
                self.llm.engine.abort(request.uid)
                victim.aborted.add(request.uid)

    def _step(self) -> None:
        self._turn += 1
        engine = self.llm.engine
        ran = [request for request in engine.requests.values() if request.slot is not None]
        num_preempted = engine.scheduler.num_preemptions
        try:
            engine.step()
        except (InjectedFault, torch.OutOfMemoryError):  # no memory for a single row
            going_on = sum(not request.is_finished for request in ran)
            preempted = engine.scheduler.num_preemptions - num_preempted  # to make room for that step
            assert going_on <= preempted, "a step failed, and somebody who took part goes on"
            assert not engine.scheduler.running
        check_invariants(engine.scheduler)

    def _look_after(self) -> None:
        for each in self._open:
            assert self._turn - each.since < STUCK, f"stuck: {each.wish}"
        self._done += [each for each in self._open if each.is_over]
        self._open = [each for each in self._open if not each.is_over]
        if len(self._done) >= 256:
            self._compare()

    def _compare(self) -> None:
        """With plain decoding, which is told of no fault."""
        done, self._done = self._done, []
        expected = iter(self._plain.generate([e.wish.prompt for e in done], [e.wish.params for e in done]))
        for each in done:
            for request in each.requests:
                self._judge(each, request, next(expected))

    def _judge(self, each: Open, request: Request, plain: Completion) -> None:
        counters = request.counters
        assert 0 <= counters.accepted <= counters.verified <= counters.drafted, counters
        if request.uid in each.aborted or request.finish_reason == "error":
            self.counts["aborted" if request.uid in each.aborted else "failed"] += 1
            assert request.uid in each.aborted or "injected" in str(request.error), request.error
            return
        params = each.wish.params
        if self.rule == "rejection" and params.temperature > 0:
            self.counts["sampled under rejection"] += 1
            return
        found = self.llm._completion(request)
        excused = 0
        if said(found) != said(plain):
            excused = int(self._is_near_tie(each.wish.prompt, params, plain, found))
            assert excused, (each.wish, said(plain), said(found))
        assert params.logprobs is None or len(found.logprobs or ()) == len(found.token_ids)
        self.near_ties.count(1, excused)
        self.counts["near ties" if excused else "equal"] += 1

    def _is_near_tie(self, prompt: Sequence[int], params: SamplingParams, one: Completion, two: Completion) -> bool:
        pairs = zip(one.token_ids, two.token_ids, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            return False
        before = list(one.token_ids[:first])
        allowed = None
        if params.structured is not None:
            allowed = torch.from_numpy(allowed_after(before, self.setting.models.vocab_size))
        params = replace(params, seed=sibling_seed(params.seed or 0, one.index))
        best = scores_after(self.setting.models, [*prompt, *before], params, len(prompt), allowed).topk(2).values
        return float(best[0] - best[1]) < GAP


def said(answer: Completion) -> tuple[object, ...]:
    return answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, answer.index


@dataclass(frozen=True, slots=True)
class Share:
    """What one engine saw."""

    counts: Counter[str]
    near_ties: NearTies
    resident_mb: float  # afterwards


def run(setting: Setting, num_requests: int, kinds: Sequence[tuple[str, str, bool]] = ENGINES) -> dict[str, Any]:
    """Every engine with its share, one after another; AssertionError at the first thing that is wrong."""
    return summary([serve_share(setting, num_requests, number, kinds) for number in range(len(kinds))])


def serve_share(
    setting: Setting, num_requests: int, number: int, kinds: Sequence[tuple[str, str, bool]] = ENGINES
) -> Share:
    chaos = Chaos(setting, kinds[number])
    chaos.serve(map(setting.traffic.wish, range(number, num_requests, len(kinds))))
    counts, near_ties = chaos.counts, chaos.near_ties
    del chaos
    gc.collect()
    return Share(counts, near_ties, resident_mb())


def summary(shares: Sequence[Share]) -> dict[str, Any]:
    """What was seen, by name."""
    counts, near_ties = Counter[str](), NearTies()
    for share in shares:
        counts += share.counts
        near_ties.count(share.near_ties.requests, share.near_ties.excused)
    assert not near_ties.too_many, near_ties
    return {**counts, "resident_mb": [share.resident_mb for share in shares]}


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def tiny_setting(**fields: Any) -> Setting:
    return Setting(models=replace(models_with("dspark"), tokenizer=byte_tokenizer()), tiny=True, **fields)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default=None, help="a real target in place of the tiny pair; in fp32")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--beside", type=int, default=1, help="requests at a time in the plain engine")
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time, each in a process of its own")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    return parser.parse_args()


def setting_of(options: argparse.Namespace) -> Setting:
    if options.model is None:
        torch.set_num_threads(1)  # such small models are slower on more
        return tiny_setting(seed=options.seed, beside=options.beside)
    from slipstream.load import load_models

    models = load_models(options.model, options.draft, dtype="float32", device=options.device)
    return Setting(
        models=models, tiny=False, draft=options.draft, seed=options.seed, beside=options.beside, slots=16,
        longest=128, pages=100,
    )  # fmt: skip


def job(options: argparse.Namespace, number: int) -> tuple[Share, dict[str, Any]]:
    """In a process of its own: a share, and what machine it ran on."""
    setting = setting_of(options)
    share = serve_share(setting, options.requests, number)
    print(f"{' '.join(map(str, ENGINES[number]))}: {dict(share.counts)}", flush=True)
    return share, machine.provenance(setting.models.device)


def main() -> None:
    options = arguments()
    numbers = range(len(ENGINES))
    if options.jobs == 1:
        done = [job(options, number) for number in numbers]
    else:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
            done = list(pool.map(partial(job, options), numbers))
    found = summary([share for share, _ in done])
    print(json.dumps(found, indent=1))
    if options.out:
        report = {**done[0][1], "conditions": vars(options) | {"out": str(options.out)}}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**report, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
