"""Do a row's logits hang on anything but the tokens before it? Every row that an engine verifies, by those tokens.

Engines of the Triton backend without graphs: what is replayed does not come by here. Several engines may be recorded by
one `SameBits`; rows of different batches, modes and chunkings then meet where their tokens are the same.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.backends import Parts
from slipstream.device.batch import Batch
from slipstream.device.shapes import VerifyShape
from slipstream.device.state import SlotState
from slipstream.device.triton import TiledBatch
from slipstream.verify.target import TargetForward


@dataclass
class SameBits:
    rows: dict[tuple[int, ...], Tensor] = field(
        default_factory=dict
    )  # tokens before a row -> its logits, when first seen
    num_again: int = 0  # rows whose tokens had been seen
    differing: list[tuple[int, float]] = field(default_factory=list)  # of those: how many tokens, largest difference
    shapes: set[tuple[int, int, bool]] = field(default_factory=set)  # sequences, rows and whether all decode

    def adapt(self, parts: Parts) -> Parts:
        if parts.backend.captures:
            parts.backend.graphs, parts.backend.captures = None, False  # type: ignore[attr-defined]
        return replace(parts, target=_Recorded(parts.target, parts.backend.state, self))

    def note(self, tokens: tuple[int, ...], logits: Tensor) -> None:
        first = self.rows.setdefault(tokens, logits)
        if first is logits:
            return
        self.num_again += 1
        if not torch.equal(first, logits):
            self.differing.append((len(tokens), float((first.float() - logits.float()).abs().max())))


class _Recorded:
    def __init__(self, target: TargetForward, state: SlotState, found: SameBits) -> None:
        self.pool = target.pool
        self._target, self._state, self._found = target, state, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def verify(self, batch: Batch, token_ids: Tensor, shape: VerifyShape) -> tuple[Tensor, Tensor | None]:
        logits, *rest = self._target.verify(batch, token_ids, shape)
        assert isinstance(batch, TiledBatch)
        ids, rows, row = token_ids.tolist(), logits.cpu(), 0
        columns = (x.tolist() for x in (batch.slots, batch.num_given, batch.widths, batch.emits, batch.cu_outputs[:-1]))
        for slot, given, width, emits, output in zip(*columns, strict=True):
            context = int(self._state.context[slot])
            before = self._state.token_ids[slot, :context].tolist()
            for j in range(width + 1 if emits else 0):
                self._found.note((*before, *ids[row : row + given + j]), rows[output + j].clone())
            row += given + width
        self._found.shapes.add((shape.num_sequences, shape.num_rows, shape.decode_only))
        return logits, *rest
