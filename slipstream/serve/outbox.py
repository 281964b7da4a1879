"""What requests gained and clients were not told yet: of short steps they are told of several at a time.

An event for every stream after every step of a millisecond is more than the loop can make. So what a request gained
waits for what it gains next: for an interval that grows with the number of requests. Only beginnings and ends go out at
once. Deltas are made when they go out, one of all that a request has gained, unless it wants to hear of every step. Used
by `desk` alone. Knows no loop and no clock.
"""

from collections import defaultdict
from collections.abc import Collection

from slipstream.commit import Delta, Gains, joined
from slipstream.request import Request

EACH_S = 0.0005  # of the interval, for each request of a step: well more than its event costs


class Outbox:
    def __init__(self, interval_s: float) -> None:
        """interval_s: the shortest one. 0: nothing waits."""
        self._interval_s, self.due_s = interval_s, 0.0  # due: when all of it goes out
        self.stretch = 1.0  # of the interval
        self._steps: list[Gains] = []
        self._told: dict[int, int] = {}  # uid -> how many of these steps it has heard of, or will not hear of
        self._urgent: list[Request] = []  # that began or ended in the last step
        self._by_step: set[int] = set()  # uids

    @property
    def is_empty(self) -> bool:
        return not self._steps

    def add(self, requests: Collection[Request], by_step: bool) -> None:
        """Requests from which steps will come; by_step: each of them is a delta of its own."""
        if by_step:
            self._by_step.update(request.uid for request in requests)

    def put(self, gains: Gains) -> None:
        """What a step gave."""
        self._steps.append(gains)
        self._urgent += gains.ended
        if gains.num_decode < len(gains.requests):  # those that got something from their prompt
            self._urgent += gains.requests[gains.num_decode :]

    def take(self, now_s: float, *, all_of_it: bool = False) -> list[Delta]:
        """What goes out now. All of it: nobody knows when there will be a next step."""
        if not self._steps:
            return []
        if all_of_it or now_s >= self.due_s:
            interval_s = max(self._interval_s, EACH_S * len(self._steps[-1])) if self._interval_s else 0.0
            self.due_s = now_s + self.stretch * interval_s
            out = self._all()
            self._steps, self._told = [], {}
        else:
            out = [delta for request in dict.fromkeys(self._urgent) for delta in self._of(request)]
        self._urgent.clear()
        self._by_step.difference_update(delta.request.uid for delta in out if delta.finish_reason is not None)
        return out

    def forget(self, uids: Collection[int]) -> None:
        """Nobody wants to hear of these requests any more."""
        self._told.update(dict.fromkeys(uids, len(self._steps)))
        self._by_step.difference_update(uids)

    def clear(self) -> None:
        """The engine is gone."""
        self._steps, self._told = [], {}
        self._urgent.clear()

    def _all(self) -> list[Delta]:
        rows: defaultdict[int, list[tuple[Gains, int]]] = defaultdict(list)
        told = self._told
        for number, gains in enumerate(self._steps):
            for index, request in enumerate(gains.requests):
                if not told or number >= told.get(request.uid, 0):
                    rows[request.uid].append((gains, index))
        return [delta for uid, found in rows.items() for delta in self._deltas(uid, found)]

    def _of(self, request: Request) -> list[Delta]:
        """Of one request, which hears of all steps by that."""
        first = self._told.get(request.uid, 0)
        self._told[request.uid] = len(self._steps)
        found = [(gains, gains.requests.index(request)) for gains in self._steps[first:] if request in gains.requests]
        return self._deltas(request.uid, found)

    def _deltas(self, uid: int, rows: list[tuple[Gains, int]]) -> list[Delta]:
        deltas = [gains[index] for gains, index in rows] if uid in self._by_step else [joined(rows)] if rows else []
        return [delta for delta in deltas if delta.token_ids or delta.finish_reason is not None]
