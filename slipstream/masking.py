"""What the host adds to a step between verify and accept: masks of the tokens that each place may have.

Only steps in which a constrained request gains tokens come here. Such a step's drafts are exported, and the step before
is collected early, so that every answer is known; the masks are made while the target's forward runs, for every
place that a draft could reach, whatever the widths are. Called by the engine only.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from slipstream.constraint import num_words
from slipstream.device.batch import Batch
from slipstream.device.staging import Uploader
from slipstream.ops.allowed import strike
from slipstream.plan import Int64s, StepPlan
from slipstream.request import Request


class Constrainer:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words = num_words(vocab_size)
        self._uploader = Uploader(device)

    def masks(self, plan: StepPlan, drafts_np: Int64s | None, requests: Mapping[int, Request]) -> dict[str, Tensor]:
        """`masks` [M, d + 1, W] and `sequences` [M] of the M constrained requests that gain tokens, on the device.

        drafts_np [D, d]; requests by their ids, those that have ended left out. Nothing where M is 0. A request that
        can have no token is told why (`Request.error`): its row chooses nothing, and that ends it when the step is collected.
        """
        bound = [
            (row, request) for row, uid in enumerate(plan.uids_np.tolist())
            if plan.emits_np[row] and (request := requests.get(uid)) and request.constraint
        ]  # fmt: skip
        if not bound:
            return {}
        masks = np.empty((len(bound), plan.draft_length + 1, self._words), np.int32)
        for mask, (row, request) in zip(masks, bound, strict=True):
            constraint = request.constraint
            assert constraint is not None
            constraint.read(request.output_since(constraint.num_read))
            drafts = drafts_np[row].tolist() if drafts_np is not None and row < plan.num_decode else []
            request.error = constraint.fill(drafts, mask) or request.error
        sequences = np.array([row for row, _ in bound], np.int64)
        return self._uploader.upload({"masks": masks, "sequences": sequences})


def struck(batch: Batch, logits: Tensor, masks: Mapping[str, Tensor]) -> Tensor:
    """logits [O, V] after the masks; the same where there are none."""
    return strike(logits, **masks, cu_outputs=batch.cu_outputs, widths=batch.widths) if masks else logits
