"""Who owns which page of KV memory. Knows counts and numbers, never tensors; called by the scheduler.

A page holds `page_size` consecutive tokens of one request, target and drafter KV alike. Two pages are never handed
out: page 0 is the null page (always zero, what an unset page table entry points to: it may be read, never written) and
page 1 the scratch page (rejected and padding rows are written there, nobody reads it).
`PageAllocator` knows which pages are free, `PageTable` which slot has the others, and what the device lacks of that.
"""

import numpy as np

from slipstream.plan import Int32s, Int64s

NULL_PAGE = 0
SCRATCH_PAGE = 1
NUM_RESERVED_PAGES = 2

_NO_WRITES = np.zeros((0, 3), np.int32)


class PageAllocator:
    """A free list. Every page is either free or owned by exactly one request."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > NUM_RESERVED_PAGES, num_pages
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, NUM_RESERVED_PAGES - 1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - NUM_RESERVED_PAGES - self.num_free

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        assert 0 <= count <= self.num_free, (count, self.num_free)
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken[::-1]

    def give(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))
        assert self.num_free <= self.num_pages - NUM_RESERVED_PAGES, "a page was given back twice"


class PageTable:
    """The host's copy of the device's page table: slot i holds its pages in [0, num_pages[i]), behind them is NULL_PAGE.

    Several slots are changed at once. The device is told through `take_writes`; of a slot, what it lacks is always one
    run of entries, so that no entry is written twice by one call, whatever was appended and cut in between.
    """

    def __init__(self, num_slots: int, pages_per_slot: int) -> None:
        self.num_pages = np.zeros(num_slots, np.int32)
        self._pages = np.full((num_slots, pages_per_slot), NULL_PAGE, np.int32)
        self._changed_from = np.zeros(num_slots, np.int32)  # entries [from, to) have changed since the last writes
        self._changed_to = np.zeros(num_slots, np.int32)
        self._slots = np.arange(num_slots)

    def append(self, slots: Int64s, counts: Int32s, pages: list[int]) -> None:
        """Give `counts` [n] more pages to each of `slots` [n] (no slot twice), from `pages` in that order."""
        start = self.num_pages[slots]
        self._pages[np.repeat(slots, counts), _runs(start, counts)] = pages
        self.num_pages[slots] = end = start + counts
        self._changed_to[slots] = np.maximum(self._changed_to[slots], end)

    def cut(self, slots: Int64s, keep: Int32s) -> list[int]:
        """Leave each of `slots` [n] (no slot twice) its first `keep` [n] pages, which it has; return the others."""
        counts = self.num_pages[slots] - keep
        places = np.repeat(slots, counts), _runs(keep, counts)
        pages: list[int] = self._pages[places].tolist()
        self._pages[places] = NULL_PAGE  # it must not keep pointing at pages that others may own by then
        self.num_pages[slots] = keep
        self._changed_from[slots] = np.minimum(self._changed_from[slots], keep)
        return pages

    def clear(self, slot: int) -> list[int]:
        """Take everything from a slot, and forget what the device was to be told: an admission resets the entries."""
        pages = self.of(slot)
        self._pages[slot, : len(pages)] = NULL_PAGE
        self.num_pages[slot] = self._changed_from[slot] = self._changed_to[slot] = 0
        return pages

    def of(self, slot: int) -> list[int]:
        pages: list[int] = self._pages[slot, : self.num_pages[slot]].tolist()
        return pages

    def take_writes(self) -> Int32s:
        """[n, 3] (slot, index, page): entries that have changed since the last call, each once."""
        counts = self._changed_to - self._changed_from
        if not np.count_nonzero(counts):
            return _NO_WRITES
        slots, index = np.repeat(self._slots, counts), _runs(self._changed_from, counts)
        self._changed_from[:] = self._changed_to[:] = self.num_pages
        return np.stack((slots, index, self._pages[slots, index]), axis=1).astype(np.int32)


def _runs(start: Int32s, counts: Int32s) -> Int64s:
    """start[0], start[0] + 1, ... (counts[0] of them), start[1], ..."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(start - ends + counts, counts)
