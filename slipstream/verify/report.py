"""Stage `report`: log-probabilities of what a step emitted and of the prompts it computed, where a request wants them.

It runs after acceptance, on the logits as the target gave them: nothing before it may edit those in place. The host
knows who asks and how many rows a sequence has at most; which row a token came from is found on the device. What outputs
need may be replayed, prompts never are. The arithmetic is the backend's (`ops.logprobs` and its kernel).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from slipstream.device.backend import Backend
from slipstream.logprobs import PromptPart, Wanted
from slipstream.plan import Decision
from slipstream.verify.target import TargetForward, VerifiedRows

LOGITS_AT_ONCE = 1 << 25  # of a prompt's rows times vocabulary: those logits are made, reported and forgotten


def report(
    wanted: Wanted, decision: Decision, rows: VerifiedRows, result: Tensor, target: TargetForward, backend: Backend
) -> Tensor:
    """All that is wanted as one vector int32 (`logprobs.Reported.of`), outputs first; result: the verdict's [B, ...]."""
    parts = []
    if len(wanted.sequences_np):
        parts.append(backend.report_outputs(wanted, decision, rows.batch, rows.logits, result))
    for part in wanted.prompts:
        parts += [x.flatten() for x in _of_prompt(part, wanted.num_prompt_top, decision, rows, target, backend)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _of_prompt(
    part: PromptPart, num_top: int, decision: Decision, rows: VerifiedRows, target: TargetForward, backend: Backend
) -> Iterator[Tensor]:
    """[n, columns] of a few rows at a time. Drafts stand before all prompts, so the host knows where its rows are."""
    assert rows.hidden is not None
    start = part.row + decision.num_draft_rows
    hidden = rows.hidden[start : start + part.num_rows]
    known = backend.state.token_ids[part.slot, part.position + 1 : part.position + 1 + part.num_rows].long()
    at_once = max(LOGITS_AT_ONCE // rows.logits.shape[1], 1)
    for first in range(0, part.num_rows, at_once):
        logits = target.head(hidden[first : first + at_once])
        each = torch.arange(len(logits), device=logits.device)
        yield backend.report(logits, each, known[first : first + at_once], num_top)
