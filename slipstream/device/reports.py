"""Stage `report` of what a step emits, over buffers at fixed addresses, so that it can be captured once for each B.

Who asks, and for how many top tokens, goes down when that changes; which rows it means is found on the device. Used by
the Triton backend; prompts are reported elsewhere (`verify.report`).
"""

import numpy as np
import torch
from torch import Tensor

from slipstream.config import MAX_LOGPROBS
from slipstream.device.staging import Mailbox
from slipstream.kernels import logprobs
from slipstream.logprobs import Wanted, num_columns


class OutputReports:
    def __init__(self, num_slots: int, num_drafts: int, device: torch.device) -> None:
        self._num_places = num_drafts + 1
        self._asked = Mailbox({"turns": ((num_slots,), np.int64), "num_top": ((1,), np.int64)}, device)
        self._post(0, np.zeros(0, np.int64), 0)
        self._wanted: Wanted | None = None  # what was posted last
        most = num_slots * self._num_places * num_columns(MAX_LOGPROBS, MAX_LOGPROBS)
        self._reports = torch.zeros(most, dtype=torch.int32, device=device)
        self._recorded: tuple[int, int] | None = None  # addresses of logits and verdicts that captured stages read

    def ask(self, wanted: Wanted, num_sequences: int, num_token_ids: int) -> None:
        """The same requests ask by the same object from step to step, so most steps post nothing."""
        if wanted is not self._wanted:
            self._post(num_sequences, wanted.sequences_np, min(wanted.num_top, num_token_ids))
            self._wanted = wanted

    def _post(self, num_sequences: int, sequences_np: np.ndarray, num_top: int) -> None:
        turns_np = np.full(num_sequences, -1, np.int64)
        turns_np[sequences_np] = np.arange(len(sequences_np))
        self._asked.post({"turns": turns_np, "num_top": np.array([num_top], np.int64)}, {"turns": -1})

    def stage(self, logits: Tensor, cu_outputs: Tensor, result: Tensor) -> None:
        """logits [O, V], cu_outputs [B + 1], result a verdict of B sequences."""
        asked = self._asked.received
        logprobs.report_outputs(
            logits, result, cu_outputs=cu_outputs, turns=asked["turns"][: len(result)], num_top=asked["num_top"],
            out=self._reports,
        )  # fmt: skip

    def record(self, logits: Tensor, result: Tensor) -> None:
        """Captured stages read these, of whatever number of rows."""
        self._recorded = logits.data_ptr(), result.data_ptr()

    def are_recorded(self, logits: Tensor, result: Tensor) -> bool:
        return self._recorded == (logits.data_ptr(), result.data_ptr())

    def sent(self, wanted: Wanted, num_token_ids: int) -> Tensor:
        """[A * (S + 1) * columns] of those who asked; overwritten by the next step that reports."""
        count = len(wanted.sequences_np) * self._num_places
        return self._reports[: count * num_columns(wanted.num_top, num_token_ids)]
