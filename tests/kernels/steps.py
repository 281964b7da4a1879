"""Made-up steps for the tests of attention: paged KV, tiles, and attention by the definition, row by row in float64."""

import dataclasses
import itertools

import torch
from torch import Tensor

from slipstream.kernels.attention import Launch, Tiles, Workspace, attention_workspace

NAN = float("nan")
TINY_LAUNCH = Launch(chunk_n=16, num_warps=2, num_stages=2, min_split_tokens=16)


@dataclasses.dataclass(frozen=True)
class Shape:
    num_kv_heads: int = 2
    group: int = 3
    head_dim: int = 8
    page_size: int = 4

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def heads_dim(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


class Step:
    """A made-up step: context and rows of every sequence; KV in shuffled pages; NaN wherever nobody may look."""

    def __init__(self, shape: Shape, context: list[int], rows: list[int], dtype: torch.dtype, device: str) -> None:
        self.shape, self.rows = shape, rows
        generator = torch.Generator().manual_seed(sum(context) + sum(rows))
        ps, num_slots = shape.page_size, len(context) + 2
        lengths = [c + r for c, r in zip(context, rows, strict=True)]
        counts = [-(-n // ps) for n in lengths]
        order = torch.randperm(sum(counts) + 3, generator=generator) + 2  # 3 pages that nobody owns
        self.slots = torch.randperm(num_slots - 1, generator=generator)[: len(context)]
        self.context = torch.full((num_slots,), 10**6)
        self.context[self.slots] = torch.tensor(context)
        table = torch.zeros(num_slots, max(counts) + 1, dtype=torch.int64)
        pages = torch.full((2, int(order.max()) + 1, ps, shape.num_kv_heads, shape.head_dim), NAN)
        pages[:, 0] = 0
        self.kv = []  # per sequence: [2, length, nkv, hd]
        for slot, count, length in zip(self.slots.tolist(), counts, lengths, strict=True):
            own, order = order[:count], order[count:]
            table[slot, :count] = own
            kv = torch.randn(2, length, shape.num_kv_heads, shape.head_dim, generator=generator).to(dtype)
            at = torch.arange(length)
            pages[:, own[at // ps], at % ps] = kv.float()
            self.kv.append(kv.double())
        self.table = table.to(device)
        self.key_pages, self.value_pages = (x.contiguous() for x in pages.to(device, dtype))
        self.context, self.slots = self.context.to(device), self.slots.to(device)
        qkv = torch.randn(sum(rows) + 3, shape.heads_dim, generator=generator).to(dtype)  # 3 padding rows
        self.qkv = qkv.to(device)
        self.starts = [0, *itertools.accumulate(rows)]

    def heads(self, first: int, count: int) -> Tensor:
        """[R, count, hd], a strided view of qkv."""
        hd = self.shape.head_dim
        return self.qkv[:, first * hd : (first + count) * hd].view(len(self.qkv), count, hd)

    def tiles(self, block_q: int, num_splits: int) -> Tiles:
        context, made = self.context[self.slots].tolist(), []
        for b, (slot, count) in enumerate(zip(self.slots.tolist(), self.rows, strict=True)):
            for first in range(0, count, block_q):
                made.append([self.starts[b] + first, min(block_q, count - first), slot, context[b] + first])
        return self.records([*made[:1], 4 * [0], *made[1:], 4 * [0]], block_q, num_splits)  # unused tiles anywhere

    def blocks(self, n: int, num_splits: int) -> Tiles:
        """Of n rows for each sequence."""
        pairs = zip(self.slots.tolist(), self.context[self.slots].tolist(), strict=True)
        return self.records([[b * n, n, slot, start] for b, (slot, start) in enumerate(pairs)], n, num_splits)

    def records(self, made: list[list[int]], block_q: int, num_splits: int) -> Tiles:
        return Tiles(torch.tensor(made, dtype=torch.int32, device=self.qkv.device), block_q, num_splits)

    def expected(self, window: int | None) -> Tensor:
        """Rows of all sequences by the definition, float64 [R, nh * hd]."""
        q = self.heads(0, self.shape.num_heads).double().cpu()
        out, row = [], 0
        for kv, count in zip(self.kv, self.rows, strict=True):
            for last in range(kv.shape[1] - count, kv.shape[1]):
                first = 0 if window is None else max(0, last - window + 1)
                out.append(one_row(q[row], kv[0, first : last + 1], kv[1, first : last + 1]))
                row += 1
        return torch.stack(out)


def one_row(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q [nh, hd] over keys, values [L, nkv, hd], all visible."""
    group = q.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    weights = torch.einsum("hd,lhd->hl", q, keys).mul(q.shape[1] ** -0.5).softmax(-1)
    return torch.einsum("hl,lhd->hd", weights, values).flatten()


def workspace(shape: Shape, block_q: int, device: str) -> Workspace:
    """Full of NaN: nothing that a launch did not write may be read."""
    made = attention_workspace(shape.num_heads, shape.num_kv_heads, shape.head_dim, block_q, device, max_programs=1024)
    made.partials.fill_(NAN)
    made.stats.fill_(NAN)
    return made


def assert_close(got: Tensor, expected: Tensor) -> None:
    tolerance = 2e-2 if got.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(got.double().cpu(), expected, rtol=tolerance, atol=tolerance)
