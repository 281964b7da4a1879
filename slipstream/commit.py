"""From a step's result to the requests' tokens: stop conditions, counters, and what each request gained.

Stops are looked at token by token inside a step, in the order stop, then length, so that a request ends exactly where
it would without drafts. A row whose slot has a new generation by now belongs to nobody and is dropped. Torch-free.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.plan import StepPlan, StepResult
from slipstream.request import FinishReason, Request
from slipstream.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Delta:
    """What one request gained in one step."""

    request: Request
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]  # per token: it was an accepted draft
    width: int  # drafts verified in this step
    finish_reason: FinishReason | None


def commit(plan: StepPlan, result: StepResult, requests: Mapping[int, Request], scheduler: Scheduler) -> list[Delta]:
    """Apply a collected step. `requests` are the live ones by uid; those that end here leave the scheduler."""
    deltas = []
    for row, uid in enumerate(plan.uids_np.tolist()):
        request = requests.get(uid)
        if request is None or request.slot != plan.slots_np[row] or request.generation != plan.generations_np[row]:
            continue  # ended or preempted while this step was in flight
        booked = request.in_flight.popleft()
        assert booked.step == plan.step, (booked, plan.step)
        deltas.append(_commit_row(plan, result, row, request, scheduler))
    return deltas


def _commit_row(plan: StepPlan, result: StepResult, row: int, request: Request, scheduler: Scheduler) -> Delta:
    if result.invalid_np[row]:
        request.error = "the target's logits were not finite (NaN or infinite): check the weights and the dtype"
        scheduler.finish(request, "error")
        return Delta(request, (), (), 0, "error")
    num_given, width = int(plan.num_given_np[row]), int(result.widths_np[row])
    if not plan.emits_np[row]:
        request.context += num_given
        return Delta(request, (), (), width, None)
    num_accepted = int(result.num_accepted_np[row])
    token_ids = result.token_ids_np[row, : num_accepted + 1].tolist()
    kept, reason = _until_stop(token_ids, request, scheduler.limits.max_model_len)
    accepted = tuple(j < num_accepted for j in range(kept))
    _append(request, token_ids[:kept], accepted)
    request.context += num_given + num_accepted
    if row < plan.num_decode:
        request.counters.count_step(plan.draft_length, width, sum(accepted), kept)
    if reason is not None:
        scheduler.finish(request, reason)
    else:
        scheduler.settle(request)
    return Delta(request, tuple(token_ids[:kept]), accepted, width, reason)


def _until_stop(token_ids: list[int], request: Request, max_model_len: int) -> tuple[int, FinishReason | None]:
    """How many of the tokens belong to the answer, and why it ends there, if it does."""
    params, known = request.params, request.num_known
    for count, token in enumerate(token_ids, start=1):
        if token in params.stop_token_ids or (token in request.eos_token_ids and not params.ignore_eos):
            return count, "stop"
        if len(request.output_ids) + count >= params.max_tokens or known + count >= max_model_len:
            return count, "length"
    return len(token_ids), None


def _append(request: Request, token_ids: list[int], accepted: tuple[bool, ...]) -> None:
    request.last_token_s = time.perf_counter()
    if not request.output_ids:
        request.first_token_s = request.last_token_s
    request.output_ids += token_ids
    request.accepted += accepted
