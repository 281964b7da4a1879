"""Who owns which page of KV memory. Knows counts and numbers, never tensors; called by the scheduler.

A page holds `page_size` consecutive tokens of one request, target and drafter KV alike. Two pages are never handed
out: page 0 is the null page (always zero, what an unset page table entry points to: it may be read, never written) and
page 1 the scratch page (rejected and padding rows are written there, nobody reads it).
`PageAllocator` knows which pages are free, `PageTable` which slot has the others, and what the device lacks of that.
"""

from collections.abc import Sequence

import numpy as np

from slipstream.plan import Int32s, Int64s

NULL_PAGE = 0
SCRATCH_PAGE = 1
NUM_RESERVED_PAGES = 2

_NO_WRITES = np.zeros((0, 3), np.int32)


class PageAllocator:
    """A free list. Every page is either free or owned by exactly one request; `shared.SharedPages` lets them share."""

    shares = False

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > NUM_RESERVED_PAGES, num_pages
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, NUM_RESERVED_PAGES - 1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Pages that requests can own, free or not."""
        return self.num_pages - NUM_RESERVED_PAGES

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_usable * self.page_size

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

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

    # What an allocator that shares does; here nothing is ever found.

    def find(self, keys: Sequence[bytes]) -> list[int]:
        return []

    def num_idle(self, pages: Sequence[int]) -> int:
        """How many of them are counted as free."""
        return 0

    def share(self, pages: Sequence[int]) -> None:
        assert not pages, pages

    def publish(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        pass

    def withdraw(self, pages: Sequence[int]) -> None:
        pass

    def withdraw_all(self) -> None:
        pass


class PageTable:
    """The host's copy of the device's page table: a slot has pages for `capacity` tokens, behind them is NULL_PAGE.

    Several slots are changed at once. The device is told through `take_writes`; of a slot, what it lacks is always one
    run of entries, so that no entry is written twice by one call, whatever was appended and cut in between.
    """

    def __init__(self, num_slots: int, pages_per_slot: int, page_size: int) -> None:
        self.page_size = page_size
        self.capacity = np.zeros(num_slots, np.int32)  # tokens; num_pages * page_size
        self._num_pages = np.zeros(num_slots, np.int32)
        self._pages = np.full((num_slots, pages_per_slot), NULL_PAGE, np.int32)
        self._num_right = np.zeros(num_slots, np.int32)  # leading entries that the device has as they are
        self._num_told = np.zeros(num_slots, np.int32)  # entries that it has; some may have changed or be NULL_PAGE now

    def append(self, slots: Int64s, counts: Int32s, pages: list[int]) -> None:
        """Give `counts` [n] more pages to each of `slots` [n] (n > 0, no slot twice), from `pages` in that order."""
        start = self._num_pages[slots]
        self._pages[_entries(slots, start, counts)] = pages
        self._set_num_pages(slots, start + counts)

    def cut(self, slots: Int64s, keep: Int32s) -> list[int]:
        """Leave each of `slots` [n] (n > 0, no slot twice) its first `keep` [n] pages, which it has; return the others."""
        entries = _entries(slots, keep, self._num_pages[slots] - keep)
        pages: list[int] = self._pages[entries].tolist()
        self._pages[entries] = NULL_PAGE  # it must not keep pointing at pages that others may own by then
        self._set_num_pages(slots, keep)
        self._num_right[slots] = np.minimum(self._num_right[slots], keep)
        return pages

    def clear(self, slot: int) -> list[int]:
        """Take everything from a slot, and forget what the device was to be told: an admission resets the entries."""
        pages = self.of(slot)
        self._pages[slot, : len(pages)] = NULL_PAGE
        self._num_pages[slot] = self.capacity[slot] = self._num_right[slot] = self._num_told[slot] = 0
        return pages

    def of(self, slot: int) -> list[int]:
        pages: list[int] = self._pages[slot, : self._num_pages[slot]].tolist()
        return pages

    def take_writes(self) -> Int32s:
        """[n, 3] (slot, index, page): entries that have changed since the last call, each once."""
        counts = np.maximum(self._num_told, self._num_pages) - self._num_right
        slots = counts.nonzero()[0]
        if not len(slots):
            return _NO_WRITES
        owners, index = _entries(slots, self._num_right[slots], counts[slots])
        self._num_right[:] = self._num_told[:] = self._num_pages
        writes = np.empty((len(owners), 3), np.int32)
        writes[:, 0], writes[:, 1], writes[:, 2] = owners, index, self._pages[owners, index]
        return writes

    def _set_num_pages(self, slots: Int64s, num_pages: Int32s) -> None:
        self._num_pages[slots] = num_pages
        self.capacity[slots] = num_pages * self.page_size


def _entries(slots: Int64s, start: Int32s, counts: Int32s) -> tuple[Int64s, Int32s | Int64s]:
    """Entries [start, start + count) of each of the slots, in turn: slots, and indices in their page tables."""
    if not np.count_nonzero(counts > 1):  # one of each
        return slots, start
    ends = counts.cumsum()
    return slots.repeat(counts), (start - ends + counts).repeat(counts) + np.arange(ends[-1])
