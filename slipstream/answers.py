"""Tokens of the running requests, one row per slot: a step's tokens are written by one assignment for all of them.

What a request gained since it got its slot stands here and is read when somebody asks, and once when it leaves. Stops
are only screened: whether a token ends its request's answer, and what follows from that, `commit` knows. Torch-free.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from slipstream.plan import Int32s, Int64s
from slipstream.request import Request


class Answers:
    """Memory is taken by what was ever written, not by the whole columns; `slots` arguments name no slot twice."""

    STOP_CLASSES = 1 << 16  # token ids are screened by their low bits, so that no vocabulary need be known

    def __init__(self, num_slots: int, max_model_len: int, max_drafts: int) -> None:
        # A step's tokens are written whole, also behind the last one that is kept: the next step's cover those.
        length = max_model_len + max_drafts + 1
        self._token_ids = np.zeros(num_slots * length, np.int32)  # flat [slot, token]
        self._windows = sliding_window_view(self._token_ids, max_drafts + 1, writeable=True)  # [place, S + 1]
        self._is_own = np.zeros(num_slots * length, np.bool_)  # the token was the target's own: it ends a step
        self._begins = np.arange(num_slots) * length
        self._ends = self._begins.copy()
        self._leading = np.tri(max_drafts + 2, max_drafts + 1, -1, np.bool_)  # [count, offset]: offset < count
        self._num_stops = np.zeros(self.STOP_CLASSES, np.int32)  # stop ids of tenants, by class
        self.last_token_s = np.zeros(num_slots)
        self.num_watched = 0  # tenants with a watcher
        self._is_watched = np.zeros(num_slots, np.bool_)

    def admit(self, slot: int, request: Request) -> None:
        self._ends[slot] = self._begins[slot]
        self.last_token_s[slot] = request.last_token_s
        self._count_stops(request, 1)
        self._is_watched[slot] = request.watcher is not None
        self.num_watched += request.watcher is not None
        request.attach(self)

    def release(self, slot: int, request: Request) -> None:
        """The request takes along what it gained."""
        request.detach()
        self._is_own[self._begins[slot] : self._ends[slot] + self._windows.shape[1]] = False
        self._count_stops(request, -1)
        self._is_watched[slot] = False
        self.num_watched -= request.watcher is not None

    def token_ids_of(self, slot: int, since: int = 0) -> list[int]:
        """Without the first `since`."""
        token_ids: list[int] = self._token_ids[self._begins[slot] + since : self._ends[slot]].tolist()
        return token_ids

    def accepted_of(self, slot: int) -> list[bool]:
        accepted: list[bool] = (~self._is_own[self._begins[slot] : self._ends[slot]]).tolist()
        return accepted

    def last_token_s_of(self, slot: int) -> float:
        return float(self.last_token_s[slot])

    def may_stop(self, token_ids: Int32s, kept: Int32s) -> list[int]:
        """Rows of token_ids [n, W + 1] that may hold a tenant's stop id among their first kept [n]; no other row does."""
        stops = self._num_stops.take(token_ids & (self.STOP_CLASSES - 1))
        if not np.count_nonzero(stops):
            return []
        found = (stops * self._leading.take(kept, axis=0)[:, : stops.shape[1]]).sum(axis=1)
        rows: list[int] = found.nonzero()[0].tolist()
        return rows

    def watched(self, slots: Int64s, kept: Int32s) -> list[int]:
        """Rows [n] with tokens, whose tenants have a watcher."""
        rows: list[int] = (self._is_watched[slots] & (kept > 0)).nonzero()[0].tolist()
        return rows

    def write(self, slots: Int64s, token_ids: Int32s, num_accepted: Int32s, kept: Int32s) -> None:
        """Append the first kept [n] of token_ids [n, W + 1]; the first num_accepted [n] were drafts."""
        ends = self._ends[slots]
        self._windows[:, : token_ids.shape[1]][ends] = token_ids
        self._is_own[ends + num_accepted] = True
        self._ends[slots] = ends + kept

    def _count_stops(self, request: Request, change: int) -> None:
        for token in request.stop_ids:
            self._num_stops[token & (self.STOP_CLASSES - 1)] += change
