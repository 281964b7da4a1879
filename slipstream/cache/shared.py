"""Pages that several requests own, found again by what is in them. Knows numbers and keys, never tensors or requests.

A full page has a *key*, the hash of its tokens and of the key of the page before it: equal keys mean equal prefixes.
Called by the scheduler and by `prefixes`.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from slipstream.cache.pages import PageAllocator
from slipstream.plan import Int32s


def page_keys(token_ids_np: Int32s, page_size: int, before: bytes = b"") -> list[bytes]:
    """Keys [n // page_size] of the full pages of tokens [n] behind the page with key `before`; 16 bytes each."""
    keys, tokens, size = [], token_ids_np.tobytes(), token_ids_np.itemsize * page_size
    for start in range(0, len(tokens) - size + 1, size):
        before = blake2b(tokens[start : start + size], digest_size=16, key=before).digest()
        keys.append(before)
    return keys


class SharedPages(PageAllocator):
    """An allocator that keeps what has a key: such a page may have several owners, and lives on when it has none.

    A page without owners counts as free. Memory is taken from those pages once no other is left, longest unused first.
    """

    shares = True

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._num_owners: dict[int, int] = {}  # of pages that had a key when they were given to somebody
        # Known, without owners; longest unused first. The first of a dict is found by a walk over all that went before.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return super().num_free + len(self._idle)

    def take(self, count: int) -> list[int]:
        for _ in range(count - super().num_free):
            self._evict(next(iter(self._idle)))
        return super().take(count)

    def give(self, pages: list[int]) -> None:
        """One owner less. Of a prefix, what comes last is evicted first."""
        super().give([page for page in pages if page not in self._num_owners])
        for page in reversed(pages):
            if page in self._num_owners:
                self._leave(page)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest prefix that is known."""
        return list(self._known(keys))

    def num_idle(self, pages: Sequence[int]) -> int:
        return sum(page in self._idle for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """One owner more for each of what was found."""
        for page in pages:
            self._idle.pop(page, None)
            self._num_owners[page] = self._num_owners.get(page, 0) + 1

    def publish(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        """Make pages known that have one owner each; where a key is known, the page it had stays."""
        for page, key in zip(pages, keys, strict=True):
            if key not in self._page_of and page not in self._key_of:
                self._key_of[page], self._page_of[key] = key, page
                self._num_owners.setdefault(page, 1)

    def withdraw(self, pages: Sequence[int]) -> None:
        """Nobody finds them any more."""
        for page in pages:
            if page in self._key_of:
                self._forget(page)
            if page in self._idle:
                self._evict_idle(page)

    def withdraw_all(self) -> None:
        self.withdraw(list(self._key_of))

    def _known(self, keys: Sequence[bytes]) -> Iterator[int]:
        for key in keys:
            if key not in self._page_of:
                return
            yield self._page_of[key]

    def _leave(self, page: int) -> None:
        self._num_owners[page] -= 1
        if self._num_owners[page]:
            return
        del self._num_owners[page]
        if page in self._key_of:
            self._idle[page] = None
        else:
            super().give([page])

    def _evict(self, page: int) -> None:
        self._forget(page)
        self._evict_idle(page)

    def _evict_idle(self, page: int) -> None:
        del self._idle[page]
        super().give([page])

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
