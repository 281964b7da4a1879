"""Host time of scheduling and committing: the real scheduler, and a device that answers at once.

    python bench/host.py --requests 1 32 256 --out runs/host.json

Decode steps of requests that speculate, in the order of the overlapped loop: plan step t, then commit t - 1. Which
drafts are accepted is drawn; no request ends, none waits. Besides the steps: what one admission and one end cost, and
what it costs to read every delta, as streams do. Medians and 95th percentiles in microseconds; no torch, no GPU.
"""

import argparse
import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.cache.pages import NUM_RESERVED_PAGES, PageAllocator
from slipstream.commit import commit
from slipstream.config import SamplingParams
from slipstream.plan import StepPlan, StepResult
from slipstream.request import Request
from slipstream.scheduler import Scheduler, SchedulerLimits

PAGE_SIZE = 16
PROMPT = 128  # tokens
EOS = 2
WARM_UP = 20  # steps
GOAL_US = {1: 50, 32: 90, 256: 144}  # both; a small model's step must be longer, on a host half as fast too


class Clock:
    """Durations by name, in microseconds."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def time(self, name: str, shared_by: int = 1) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.times[name].append(1e6 * (time.perf_counter() - start) / shared_by)

    def forget(self, *names: str) -> None:
        for name in names:
            self.times[name].clear()

    def summary(self) -> dict[str, dict[str, float]]:
        return {
            name: {"median_us": float(np.median(times)), "p95_us": float(np.percentile(times, 95))}
            for name, times in self.times.items()
        }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 32, 256], help="running at once")
    parser.add_argument("--drafts", type=int, default=7, help="S, all of them verified")
    parser.add_argument("--accept", type=float, default=0.6, help="chance of a draft, given those before it")
    parser.add_argument("--steps", type=int, default=300, help="steps that are timed, per number of requests")
    parser.add_argument("--pages", type=int, default=None, help="KV pages; few: caps are cut and requests preempted")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    return parser.parse_args()


def make_scheduler(options: argparse.Namespace, count: int, max_tokens: int) -> Scheduler:
    longest = PROMPT + max_tokens + 1
    limits = SchedulerLimits(
        max_num_seqs=count, max_num_batched_tokens=count * PROMPT, max_model_len=longest, max_drafts=options.drafts,
        max_draft_context=longest,
    )  # fmt: skip
    pages = options.pages or count * (1 + longest // PAGE_SIZE)
    return Scheduler(limits, PageAllocator(pages + NUM_RESERVED_PAGES, PAGE_SIZE))


def make_results(options: argparse.Namespace) -> Callable[[StepPlan], StepResult]:
    rng = np.random.default_rng(0)

    def result(plan: StepPlan) -> StepResult:
        stands = rng.random((plan.num_sequences, options.drafts)) < options.accept
        run = np.cumprod(stands, axis=1).sum(axis=1, dtype=np.int32) if options.drafts else np.zeros_like(plan.caps_np)
        return StepResult(
            step=plan.step,
            widths_np=plan.caps_np,
            num_accepted_np=np.minimum(run, plan.caps_np),
            token_ids_np=rng.integers(EOS + 1, 50_000, (plan.num_sequences, options.drafts + 1), np.int32),
            invalid_np=np.zeros(plan.num_sequences, np.bool_),
        )

    return result


def make_requests(count: int, max_tokens: int) -> list[Request]:
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=max_tokens)
    ends = frozenset([EOS])
    return [Request(uid, (5,) * PROMPT, params, seed=uid, eos_token_ids=ends) for uid in range(count)]


def measure(options: argparse.Namespace, count: int) -> dict[str, dict[str, float]]:
    """Times of `count` requests: prefill in one step, decode steps of which the first are not counted, an abort of all."""
    max_tokens = (options.drafts + 1) * (options.steps + WARM_UP + 2)
    scheduler, answer, clock = make_scheduler(options, count, max_tokens), make_results(options), Clock()
    requests = make_requests(count, max_tokens)
    with clock.time("admission", shared_by=count):
        for request in requests:
            scheduler.add(request)
        previous = scheduler.schedule()
    for step in range(options.steps + WARM_UP):
        if step == WARM_UP:
            clock.forget("schedule", "commit", "reading every delta")
        with clock.time("schedule"):
            plan = scheduler.schedule()
        if isinstance(previous, StepPlan):
            result = answer(previous)
            with clock.time("commit"):
                gains = commit(previous, result, scheduler)
            with clock.time("reading every delta"):
                list(gains)
        previous = plan
    with clock.time("end", shared_by=count):
        for request in requests:
            scheduler.finish(request, "abort")
    return clock.summary()


def show(count: int, parts: dict[str, dict[str, float]]) -> None:
    both = parts["schedule"]["median_us"] + parts["commit"]["median_us"]
    goal = f"; goal {GOAL_US[count]}" if count in GOAL_US else ""
    print(f"{count} requests: schedule + commit {both:.0f} us a step{goal}")
    for name, times in parts.items():
        per = " (each)" if name in ("admission", "end") else ""
        print(f"    {name + per:22}{times['median_us']:9.1f} us   p95 {times['p95_us']:9.1f}")


def main() -> None:
    options = arguments()
    report: dict[str, Any] = {
        "conditions": {
            "drafts": options.drafts, "accept": options.accept, "steps": options.steps, "pages": options.pages,
            "prompt": PROMPT, "page_size": PAGE_SIZE, "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(), "numpy": np.__version__,
        },
        "requests": {},
    }  # fmt: skip
    for count in options.requests:
        report["requests"][count] = measure(options, count)
        show(count, report["requests"][count])
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
