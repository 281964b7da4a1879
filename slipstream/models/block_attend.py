"""The seam between a drafter and its KV cache, and the plainest thing that fits it.

The engine supplies paged attention, a GPU trainer block-sparse attention; `DenseBlockAttend` serves tests, probes and
training on a CPU. Context keys and values come from `BlockDrafter.context_kv`.

Shapes: N blocks, n rows of a block, R context rows; nh, nkv, hd heads, KV heads, head size; W sliding window.
"""

from typing import Protocol

import torch
from torch import Tensor

from slipstream.models.checkpoint import DrafterSpec

ContextKV = list[tuple[Tensor, Tensor]]  # per layer: k and v, each [R, nkv, hd]


class BlockAttend(Protocol):
    """The seam between a drafter and its KV cache: attention of the rows of N blocks over their context and themselves.

    RoPE and the q/k norms are applied already. A full layer's rows see the whole context and the whole block, in both
    directions; a sliding layer's row at position p sees context from p - (W - 1) on, and the block's rows up to itself.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, n, nh, hd], k and v [N, n, nkv, hd] -> [N, n, nh * hd]."""
        ...


class DenseBlockAttend:
    """Attention of blocks over context that lies in plain tensors: for tests, probes and training on a CPU.

    All blocks share one packed context; documents say which context rows a block may see (None: there is one document).
    """

    def __init__(
        self,
        spec: DrafterSpec,
        context: ContextKV,  # per layer k and v [R, nkv, hd]
        context_positions: Tensor,  # [R]
        anchors: Tensor,  # [N] position of row 0; context at or after it is not seen
        context_docs: Tensor | None = None,  # [R]
        block_docs: Tensor | None = None,  # [N]
    ) -> None:
        self.spec, self.context = spec, context
        self.context_positions, self.anchors = context_positions, anchors
        self.same_doc = None  # [N, R]
        if context_docs is not None and block_docs is not None:
            self.same_doc = block_docs[:, None] == context_docs

    def mask(self, num_rows: int, window: int | None) -> Tensor:
        """What each row sees of the context and then of its block: [N, n, R + n] bool."""
        rows = torch.arange(num_rows, device=self.anchors.device)
        seen = (self.context_positions < self.anchors[:, None])[:, None, :].expand(-1, num_rows, -1)
        if self.same_doc is not None:
            seen = seen & self.same_doc[:, None, :]
        inside = torch.ones(num_rows, num_rows, dtype=torch.bool, device=rows.device)
        if window is not None:
            oldest = self.anchors[:, None] + rows - (window - 1)  # [N, n]
            seen = seen & (self.context_positions >= oldest[..., None])
            age = rows[:, None] - rows
            inside = (age >= 0) & (age < window)
        return torch.cat((seen, inside.expand(len(self.anchors), -1, -1)), dim=-1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks, rows, heads, width = q.shape
        keys, values = self.context[layer]
        split = keys.shape[0]
        grouped = q.view(blocks, rows, k.shape[2], heads // k.shape[2], width)  # [N, n, nkv, group, hd]
        to_context = torch.einsum("bigxd,rgd->bgxir", grouped, keys)
        to_block = torch.einsum("bigxd,bjgd->bgxij", grouped, k)
        scores = torch.cat((to_context, to_block), dim=-1).float() * width**-0.5  # [N, nkv, group, n, R + n]
        mask = self.mask(rows, self.spec.window(layer))[:, None, None]
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1).to(v.dtype)
        out = torch.einsum("bgxir,rgd->bigxd", weights[..., :split], values)
        out = out + torch.einsum("bgxij,bjgd->bigxd", weights[..., split:], v)
        return out.reshape(blocks, rows, heads * width)
