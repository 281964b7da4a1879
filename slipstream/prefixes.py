"""Prefixes in the cache: whoever's tokens begin like those of somebody before finds the KV of these pages there.

Target and drafter KV share pages, so that a hit gives the drafts of a cold run too. Pages become known when a step
that computes them is booked, since later steps run after it, and when their request leaves its slot, with its answer.
Nobody writes to a page that is known: rows are written behind the committed context only. Called by the scheduler.
"""

from collections.abc import Sequence

import numpy as np

from slipstream.cache.pages import PageAllocator
from slipstream.cache.shared import page_keys
from slipstream.request import Request


class PrefixCache:
    """What the scheduler asks about requests and their pages; without `SharedPages` nothing is ever found."""

    def __init__(self, pages: PageAllocator) -> None:
        self.num_queried = 0  # tokens of requests that got a slot
        self.num_hits = 0  # those of them that had not to be computed
        self._pages = pages
        self._coming: dict[bytes, int] = {}  # what the step that is being planned computes

    def pages_for(self, request: Request) -> list[int]:
        """Pages of the longest prefix that can be had; the last known token is always computed, for its logits."""
        return self._pages.find(self._usable(request)) if self._pages.shares else []

    def grows(self, request: Request, cached: Sequence[int]) -> bool:
        """Whether the step that is being planned computes the page that comes next: it can be had one step later."""
        if not self._coming:
            return False
        usable = self._usable(request)
        return len(cached) < len(usable) and usable[len(cached)] in self._coming

    def count(self, num_tokens: int, num_cached: int) -> None:
        self.num_queried += num_tokens
        self.num_hits += num_cached

    def plan(self, request: Request, pages: Sequence[int], start: int, end: int) -> None:
        """Known tokens start..end of a request, whose pages these are, are rows of the step that is being planned."""
        if self._pages.shares:
            size = self._pages.page_size
            part = slice(start // size, end // size)
            self._coming.update(zip(self._keys(request)[part], pages[part], strict=True))

    def book(self) -> None:
        """What was planned will be computed before anything that is planned later."""
        self._pages.publish(list(self._coming.values()), list(self._coming))
        self._coming.clear()

    def keep(self, request: Request, pages: Sequence[int], context: int) -> None:
        """A request leaves the pages of its committed context to others."""
        if self._pages.shares:
            count = min(context, request.num_known) // self._pages.page_size
            self._pages.publish(pages[:count], self._keys(request)[:count])

    def discard(self, pages: Sequence[int]) -> None:
        """Pages that may hold anything, NaN included."""
        self._pages.withdraw(pages)

    def discard_all(self) -> None:
        self._coming.clear()
        self._pages.withdraw_all()

    def _usable(self, request: Request) -> list[bytes]:
        """Keys of pages that it need not compute."""
        limit = request.num_known - 1
        if request.wants_prompt_report:  # which is made from rows
            limit = min(limit, request.prompt_logbook.num_tokens)
        return self._keys(request)[: limit // self._pages.page_size]

    def _keys(self, request: Request) -> list[bytes]:
        """Of all full pages of its known tokens; each is made once."""
        keys, size = request.page_keys, self._pages.page_size
        if (len(keys) + 1) * size <= request.num_known:
            tokens = np.array(request.known_since(len(keys) * size), np.int32)
            keys += page_keys(tokens, size, keys[-1] if keys else b"")
        return keys
