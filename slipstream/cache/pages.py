"""Who owns which page of KV memory. Knows counts and numbers, never tensors; called by the scheduler.

A page holds `page_size` consecutive tokens of one request, target and drafter KV alike. Two pages are never handed
out: page 0 is the null page (always zero, what an unset page table entry points to: it may be read, never written) and
page 1 the scratch page (rejected and padding rows are written there, nobody reads it).
"""

NULL_PAGE = 0
SCRATCH_PAGE = 1
NUM_RESERVED_PAGES = 2


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
