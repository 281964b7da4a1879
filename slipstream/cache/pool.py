"""KV memory of one network: keys and values by layer and page. Written by slot, read by page.

A *KV slot* is page * page_size + offset. Target and drafter each have a pool; both are indexed by the same page table.
What a page's former owner left (NaN included) must not reach masked places: plain torch zeroes a page that gets a new
owner (`device.state.load`), kernels leave out what they mask.
"""

import torch
from torch import Tensor


class KVPool:
    def __init__(
        self, *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        shape = (num_layers, num_pages, page_size, num_kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.page_size = page_size
        # Views by layer, made once: (keys, values) by page and by KV slot.
        self.by_page = list(zip(self.keys, self.values, strict=True))
        self._by_slot = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in self.by_page]

    @staticmethod
    def page_bytes(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize

    def write(self, layer: int, kv_slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [R, num_kv_heads, head_dim] at kv_slots [R]."""
        key_slots, value_slots = self._by_slot[layer]
        key_slots.index_copy_(0, kv_slots, keys)
        value_slots.index_copy_(0, kv_slots, values)

    def clear(self, pages: Tensor) -> None:
        """Zero the given pages [n] in every layer."""
        self.keys.index_fill_(1, pages, 0)
        self.values.index_fill_(1, pages, 0)
