"""Attention over packed rows: of whole documents for the target, of draft blocks over their document's past.

Two backends of one signature: `Dense` (a boolean mask and plain attention; CPU, validation) and `Flex` (FlexAttention,
whose block mask skips what nothing sees; a GPU's training steps). Masks are written once, as functions of (row, head,
query, key). They implement the models' `Attend` and `BlockAttend`; nothing here is cached between steps.

Shapes: B packed rows, T tokens per row, Q block rows per row, nh, nkv, hd heads, KV heads, head size.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from slipstream.models.decoder import Decoder
from slipstream.train.data import Blocks, PackedRows

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (row, head, query, key) indices -> bool
ContextKV = list[tuple[Tensor, Tensor]]  # per layer: k and v, each [B * T, nkv, hd]


class Backend(Protocol):
    """How masked attention is computed."""

    def mask(self, visible: MaskFunction, rows: int, queries: int, keys: int, device: torch.device) -> Any:
        """Whatever `attend` needs to apply `visible`."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """q [B, nh, Q, hd], k and v [B, nh, K, hd] -> [B, nh, Q, hd]."""
        ...


class Dense:
    """A whole boolean mask: Q x K bytes per row."""

    def mask(self, visible: MaskFunction, rows: int, queries: int, keys: int, device: torch.device) -> Tensor:
        sizes = (rows, 1, queries, keys)
        index = [
            torch.arange(size, device=device).view([-1 if d == i else 1 for d in range(4)])
            for i, size in enumerate(sizes)
        ]
        return visible(*index)  # [B, 1, Q, K]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Flex:
    """Block-sparse attention in one kernel, compiled on a GPU; uncompiled it is a slow reference for tests."""

    def __init__(self, compiled: bool) -> None:
        kernel: Any = flex_attention
        self.kernel = torch.compile(kernel, dynamic=False) if compiled else kernel

    def mask(self, visible: MaskFunction, rows: int, queries: int, keys: int, device: torch.device) -> Any:
        return create_block_mask(visible, rows, None, queries, keys, device=device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        out: Tensor = self.kernel(q, k, v, block_mask=mask)
        return out


class PackedAttend:
    """The target's attention over packed rows: causal within each document. An `Attend`."""

    def __init__(self, target: Decoder, rows: PackedRows, backend: Backend) -> None:
        self.backend, self.spec, self.shape = backend, target.spec, rows.starts.shape
        starts, tokens = rows.starts, rows.starts.shape[1]

        def visible(window: int | None) -> MaskFunction:
            def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
                seen = (kv <= q) & (kv >= starts[b, q])
                return seen if window is None else seen & (kv > q - window)

            return within

        windows = {self.spec.window(layer) for layer in range(self.spec.num_layers)}
        self.masks = {w: backend.mask(visible(w), self.shape[0], tokens, tokens, starts.device) for w in windows}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = self.spec.num_heads // self.spec.num_kv_heads
        q, k, v = (t.view(*self.shape, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))  # [B, heads, T, hd]
        out = self.backend.attend(
            q, repeat_heads(k, group), repeat_heads(v, group), self.masks[self.spec.window(layer)]
        )
        return out.transpose(1, 2).reshape(q.shape[0] * q.shape[2], -1)


class PackedBlockAttend:
    """The drafter's attention: a block's rows see the document before their anchor, and their block in both directions.

    A `BlockAttend` whose N "blocks" are the packed rows: its n = Q block rows are many blocks side by side.
    """

    def __init__(self, rows: PackedRows, blocks: Blocks, context: ContextKV, backend: Backend) -> None:
        self.backend, self.context = backend, context
        num_rows, tokens = rows.starts.shape
        anchors, block = blocks.anchors, blocks.block_of_row
        first = rows.starts.gather(1, anchors)  # [B, Q] start of the anchor's document
        last_block = block.shape[0] - 1

        def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            before = (kv >= first[b, q]) & (kv < anchors[b, q])  # an anchor is a column, so kv < T is implied
            inside = (kv >= tokens) & (block[(kv - tokens).clamp(0, last_block)] == block[q])
            return before | inside

        self.mask = backend.mask(visible, num_rows, block.shape[0], tokens + block.shape[0], rows.starts.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_rows, group = q.shape[0], q.shape[2] // k.shape[2]
        context_k, context_v = (part.view(num_rows, -1, *part.shape[1:]) for part in self.context[layer])
        keys = repeat_heads(torch.cat((context_k, k), dim=1).transpose(1, 2), group)
        values = repeat_heads(torch.cat((context_v, v), dim=1).transpose(1, 2), group)
        out = self.backend.attend(q.transpose(1, 2), keys, values, self.mask)
        return out.transpose(1, 2).flatten(2)


def repeat_heads(x: Tensor, group: int) -> Tensor:
    """[B, nkv, K, hd] -> [B, nkv * group, K, hd]: FlexAttention's own grouping wants groups that are powers of two."""
    return x if group == 1 else x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)
