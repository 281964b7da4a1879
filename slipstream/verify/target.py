"""The target's forward over the ragged batch: stage `verify`. One code path for prefill, decode and verification."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from slipstream.cache.pool import KVPool
from slipstream.device.batch import Batch, RaggedBatch
from slipstream.device.shapes import VerifyShape
from slipstream.models.decoder import Decoder
from slipstream.ops.attention import paged_attention, plan_paged


class TargetForward(Protocol):
    """What the engine runs as its target."""

    pool: KVPool

    def verify(self, batch: Batch, token_ids: Tensor, shape: VerifyShape) -> "Forwarded":
        """token_ids [R]."""

    def head(self, hidden: Tensor) -> Tensor:
        """Rows [n, H] of `Forwarded.hidden` -> new logits [n, V]."""


class Forwarded(NamedTuple):
    logits: Tensor  # [O, V] of the output rows, in the model's dtype
    features: Tensor | None  # [R, K * H] of all rows, if there are taps
    hidden: Tensor | None  # [R, H] what `TargetForward.head` takes; at least where `VerifyShape.keeps_hidden`


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedRows:
    """What the target's forward leaves behind."""

    batch: Batch
    logits: Tensor  # [O, V]
    features: Tensor | None  # [R, K * H] for the drafter
    hidden: Tensor | None  # [R, H] at least where prompts are reported


class Target:
    """The decoder, its KV pool and the taps that the drafter reads."""

    def __init__(self, decoder: Decoder, pool: KVPool, taps: tuple[int, ...], num_token_ids: int) -> None:
        spec = decoder.spec
        self.decoder = decoder
        self.pool = pool
        self.taps = taps
        self._num_token_ids = num_token_ids  # ids from this one on are padding of the table
        self._windows = [spec.window(layer) for layer in range(spec.num_layers)]
        self._scale = spec.head_dim**-0.5

    def verify(self, batch: Batch, token_ids: Tensor, shape: VerifyShape) -> Forwarded:
        assert isinstance(batch, RaggedBatch)
        plan = plan_paged(
            shape.segments, batch.cu_rows, batch.context, batch.page_table, batch.row_sequence, batch.row_offset,
            self.pool.page_size, frozenset(self._windows), self.pool.keys.dtype,
        )  # fmt: skip

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.pool.write(layer, batch.kv_slots, k, v)
            return paged_attention(q, *self.pool.by_page[layer], plan, self._scale, self._windows[layer])

        hidden, features = self.decoder(token_ids, batch.positions, attend, self.taps)
        logits = self.head(hidden.index_select(0, batch.output_rows))
        return Forwarded(logits, features, hidden if shape.keeps_hidden else None)

    def head(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)[:, : self._num_token_ids]
