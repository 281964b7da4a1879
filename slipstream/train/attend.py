"""Attention over packed rows: of whole documents for the target, of draft blocks over their document's past.

Two backends of one signature: `Dense` (a boolean mask and plain attention; CPU, validation) and `Flex` (FlexAttention,
whose kernel skips the tiles that nothing sees; a GPU's training steps). Masks are written once, as functions of (row,
head, query, key), beside the spans of keys within which a query sees anything. They implement the models' `Attend` and
`BlockAttend`; nothing here is cached between steps.

Shapes: B packed rows, T tokens per row, Q block rows per row, K keys, nh, nkv, hd heads, KV heads, head size.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from slipstream.models.decoder import Decoder
from slipstream.train.data import Blocks, PackedRows

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (row, head, query, key) indices -> bool
Span = tuple[Tensor, Tensor]  # first and end [B, Q] of a range of keys
ContextKV = list[tuple[Tensor, Tensor]]  # per layer: k and v, each [B * T, nkv, hd]
TILE = 128  # queries and keys that FlexAttention's kernel takes at a time


class Backend(Protocol):
    """How masked attention is computed."""

    def mask(self, visible: MaskFunction, spans: Sequence[Span], num_keys: int) -> Any:
        """Whatever `attend` needs to apply `visible`; no query sees a key outside its spans."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """q [B, nh, Q, hd], k and v [B, nh, K, hd] -> [B, nh, Q, hd]."""
        ...


class Dense:
    """A whole boolean mask: Q x K bytes per row."""

    def mask(self, visible: MaskFunction, spans: Sequence[Span], num_keys: int) -> Tensor:
        (rows, queries), device = spans[0][0].shape, spans[0][0].device
        sizes = (rows, 1, queries, num_keys)
        index = [
            torch.arange(size, device=device).view([-1 if d == i else 1 for d in range(4)])
            for i, size in enumerate(sizes)
        ]
        return visible(*index)  # [B, 1, Q, K]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Flex:
    """Block-sparse attention in one kernel where the caller is compiled; uncompiled it is a slow reference for tests.

    torch's own `create_block_mask` evaluates the whole mask to find the tiles, which took 22 of a step's 86 ms (H200,
    16 rows of 1024 tokens and 2048 block rows). The bounds of the spans tell nearly the same at no cost.
    """

    def mask(self, visible: MaskFunction, spans: Sequence[Span], num_keys: int) -> BlockMask:
        seen = torch.stack([_tiles(first, end, num_keys) for first, end in spans]).any(dim=0)  # [B, Q tiles, K tiles]
        counts = seen.sum(dim=-1, dtype=torch.int32)
        order = seen.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)  # seen tiles first
        lengths = (spans[0][0].shape[1], num_keys)
        return BlockMask.from_kv_blocks(
            counts[:, None], order[:, None], BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=lengths
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        out: Any = flex_attention(q, k, v, block_mask=mask)
        return out  # type: ignore[no-any-return]


def _tiles(first: Tensor, end: Tensor, num_keys: int) -> Tensor:
    """[B, Q] ranges -> [B, Q tiles, K tiles] whether the tile may hold a key of a query's range."""
    missing = -first.shape[1] % TILE
    low = F.pad(first, (0, missing), value=num_keys).view(len(first), -1, TILE).amin(dim=-1)
    high = F.pad(end, (0, missing), value=0).view(len(end), -1, TILE).amax(dim=-1)
    starts = torch.arange(0, num_keys, TILE, device=first.device)
    held: Tensor = (starts < high[..., None]) & (starts + TILE > low[..., None])
    return held


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

        end = torch.arange(1, tokens + 1, device=starts.device).expand_as(starts)
        windows = {self.spec.window(layer) for layer in range(self.spec.num_layers)}
        self.masks = {w: backend.mask(visible(w), [(starts, end)], tokens) for w in windows}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = self.spec.num_heads // self.spec.num_kv_heads
        q, k, v = (t.view(*self.shape, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))  # [B, heads, T, hd]
        out = self.backend.attend(
            q, repeat_heads(k, group), repeat_heads(v, group), self.masks[self.spec.window(layer)]
        )
        return out.transpose(1, 2).reshape(q.shape[0] * q.shape[2], -1)


def packed_block_mask(rows: PackedRows, blocks: Blocks, backend: Backend) -> Any:
    """Block rows see the document before their anchor, and their block in both directions."""
    anchors, block, tokens = blocks.anchors, blocks.block_of_row, rows.starts.shape[1]
    first = rows.starts.gather(1, anchors)  # [B, Q] start of the anchor's document
    last_block = block.shape[0] - 1
    own = [tokens + torch.searchsorted(block, block, right=right).expand_as(anchors) for right in (False, True)]

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        before = (kv >= first[b, q]) & (kv < anchors[b, q])  # an anchor is a column, so kv < T is implied
        inside = (kv >= tokens) & (block[(kv - tokens).clamp(0, last_block)] == block[q])
        return before | inside

    return backend.mask(visible, [(first, anchors), (own[0], own[1])], tokens + block.shape[0])


class PackedBlockAttend:
    """The drafter's attention under a `packed_block_mask`.

    A `BlockAttend` whose N "blocks" are the packed rows: its n = Q block rows are many blocks side by side.
    """

    def __init__(self, context: ContextKV, mask: Any, backend: Backend) -> None:
        self.context, self.mask, self.backend = context, mask, backend

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
