"""Stage `verify` in Triton: the target's forward over padded rows.

It goes by device values and shapes alone, so it can be captured. `verify.target.Target` is the reference.
"""

import torch
from torch import Tensor

from slipstream.cache.pool import KVPool
from slipstream.device.batch import Batch
from slipstream.device.shapes import VerifyShape
from slipstream.device.state import SlotState
from slipstream.device.triton import DETERMINISTIC_BLOCK_Q, TiledBatch
from slipstream.kernels.attention import Launch, Workspace, deterministic_launch, paged_attention
from slipstream.kernels.linear import DETERMINISTIC, FUSED
from slipstream.kernels.own_attention import decode_attention
from slipstream.kernels.rope import DETERMINISTIC_HEADS, rope_and_store
from slipstream.models.decoder import Decoder
from slipstream.models.fused import FusedDecoder
from slipstream.verify.target import Forwarded

# Pairs of sequence and KV head up to which rows turn and store their keys inside attention. H200, rotation apart against
# within, us: Qwen3-8B at 32 x 256 tokens 15.2 / 14.1, at 256 x 256 76.6 / 86.9 (fewer programs fit beside each other).
MOST_FUSED_PAIRS = 1024


class FusedTarget:
    """`verify.target.Target` on a GPU. What it returns lies in buffers of its own."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, taps: tuple[int, ...], num_token_ids: int, state: SlotState,
        workspace: Workspace, max_rows: int, max_outputs: int, deterministic: bool = False,
    ) -> None:  # fmt: skip
        """deterministic: every kernel is cut one way only, whatever the step, so that a row's logits are the row's alone."""
        spec, device, dtype = decoder.spec, pool.keys.device, pool.keys.dtype
        self.pool = pool
        self._deterministic = deterministic
        self._forward = FusedDecoder(decoder, DETERMINISTIC if deterministic else FUSED)
        self._launch: Launch | None = None  # None: by the step
        self._heads_per_program: int | None = None
        if deterministic:
            group = spec.num_heads // spec.num_kv_heads
            self._launch = deterministic_launch(DETERMINISTIC_BLOCK_Q, group, spec.head_dim, dtype)
            self._heads_per_program = DETERMINISTIC_HEADS
        self._spec, self._state, self._workspace, self._taps = spec, state, workspace, taps
        self._num_token_ids = num_token_ids
        self._norms = [self._forward.head_norms(layer) for layer in range(spec.num_layers)]
        self._logits = torch.empty(max_outputs, spec.vocab_size, dtype=dtype, device=device)
        self._stream = torch.empty(max_rows, spec.hidden_size, dtype=dtype, device=device)
        self._features = torch.empty(max_rows, len(taps), spec.hidden_size, dtype=dtype, device=device)

    def verify(self, batch: Batch, token_ids: Tensor, shape: VerifyShape) -> Forwarded:
        assert isinstance(batch, TiledBatch)
        features = self._features[: shape.num_rows]
        taps = {layer: features[:, i] for i, layer in enumerate(self._taps)}

        def attend(layer: int, qkv: Tensor) -> Tensor:
            return self._attend(batch, shape, layer, qkv)

        x = stream = self._forward.forward(token_ids, attend, taps, self._stream[: shape.num_rows])
        assert stream.data_ptr() == self._stream.data_ptr(), "layers work in place: reports find the rows there"
        if not shape.decode_only:
            x = x.index_select(0, batch.output_rows)
        logits = self._forward.logits(x, self._logits[: shape.num_outputs])
        return Forwarded(logits[:, : self._num_token_ids], features.flatten(1) if taps else None, stream)

    def head(self, hidden: Tensor) -> Tensor:
        return self._forward.logits(hidden)[:, : self._num_token_ids]

    def _attend(self, batch: TiledBatch, shape: VerifyShape, layer: int, qkv: Tensor) -> Tensor:
        spec, (keys, values), table = self._spec, self.pool.by_page[layer], self._state.page_table
        turn = self._forward.cos_sin, *self._norms[layer], spec.rms_norm_eps
        scale: float = spec.head_dim**-0.5
        window = spec.window(layer)
        # One tile a sequence: nobody waits for the keys of another tile.
        fits = shape.decode_only and shape.num_sequences * spec.num_kv_heads <= MOST_FUSED_PAIRS
        if fits and not self._deterministic:
            return decode_attention(
                qkv, keys, values, batch.tiles, table, *turn, batch.kv_slots, scale, window, self._workspace
            )
        rope_and_store(
            qkv, batch.positions, *turn, keys, values, batch.kv_slots, spec.num_heads,
            heads_per_program=self._heads_per_program,
        )  # fmt: skip
        q = qkv[:, : spec.num_q_dims].view(len(qkv), spec.num_heads, spec.head_dim)
        return paged_attention(q, keys, values, batch.tiles, table, scale, window, self._workspace, launch=self._launch)
