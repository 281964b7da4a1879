"""What requests gained and clients were not told yet: of short steps they are told of several at a time.

An event for every stream after every step of a millisecond is more than the loop can make. So what a request gained
waits for what it gains next: for an interval that grows with the number of requests. Only beginnings and ends go out at
once. Deltas are made when they go out, one of all that a request has gained, unless it wants to hear of every step. Used
by `desk` alone. Knows no loop and no clock.
"""

from collections.abc import Collection

from slipstream.commit import Delta, Gains, all_joined, joined
from slipstream.request import Request

EACH_S = 0.0005  # of the interval, for each request of a step: well more than its event costs


class Outbox:
    def __init__(self, interval_s: float) -> None:
        """interval_s: the shortest one. 0: nothing waits."""
        self._interval_s, self.due_s = interval_s, 0.0  # due: when all of it goes out
        self.stretch = 1.0  # of the interval
        self._steps: list[Gains] = []
        self._places: list[dict[int, int]] = []  # of requests in each of them, by uid
        self._place: dict[int, int] = {}  # in the last one
        self._told: dict[int, int] = {}  # uid -> how many of these steps it has heard of, or will not hear of
        self._urgent: list[Request] = []  # that began or ended in the last step
        # By uid, whose deltas are made by themselves, and whether each step is one of its own.
        self._apart: dict[int, tuple[Request, bool]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._steps

    def add(self, requests: Collection[Request], by_step: bool) -> None:
        """Requests from which steps will come; by_step: each of them is a delta of its own."""
        for request in requests:
            if by_step or request.params.logprobs is not None:
                self._apart[request.uid] = request, by_step

    def put(self, gains: Gains) -> None:
        """What a step gave."""
        if not self._steps or gains.requests is not self._steps[-1].requests:
            self._place = {request.uid: index for index, request in enumerate(gains.requests)}
        self._steps.append(gains)
        self._places.append(self._place)
        self._urgent += gains.ended
        if gains.num_decode < len(gains.requests):  # those that got something from their prompt
            self._urgent += gains.requests[gains.num_decode :]

    def take(self, now_s: float, *, all_of_it: bool = False) -> list[Delta]:
        """What goes out now, beginnings and ends first. All of it: nobody knows when there will be a next step."""
        if not self._steps:
            return []
        out = [delta for request in dict.fromkeys(self._urgent) for delta in self._of(request)]
        if all_of_it or now_s >= self.due_s:
            interval_s = max(self._interval_s, EACH_S * len(self._steps[-1])) if self._interval_s else 0.0
            self.due_s = now_s + self.stretch * interval_s
            out += self._all()
            self._steps, self._places, self._told = [], [], {}
        self._urgent.clear()
        for delta in out:
            if delta.finish_reason is not None:
                self._apart.pop(delta.request.uid, None)
        return out

    def forget(self, uids: Collection[int]) -> None:
        """Nobody wants to hear of these requests any more."""
        self._told.update(dict.fromkeys(uids, len(self._steps)))
        for uid in uids:
            self._apart.pop(uid, None)

    def clear(self) -> None:
        """The engine is gone."""
        self._steps, self._places, self._told = [], [], {}
        self._urgent.clear()

    def _all(self) -> list[Delta]:
        out = [delta for request, _ in self._apart.values() for delta in self._of(request)]
        return out + list(filter(_says_something, all_joined(self._steps, self._told)))

    def _of(self, request: Request) -> list[Delta]:
        """Of one request, which hears of all steps by that."""
        first = self._told.get(request.uid, 0)
        self._told[request.uid] = len(self._steps)
        steps = zip(self._steps[first:], self._places[first:], strict=True)
        rows = [(gains, places[request.uid]) for gains, places in steps if request.uid in places]
        _, by_step = self._apart.get(request.uid, (request, False))
        deltas = [gains[index] for gains, index in rows] if by_step else [joined(rows)] if rows else []
        return list(filter(_says_something, deltas))


def _says_something(delta: Delta) -> bool:
    return bool(delta.token_ids) or delta.finish_reason is not None
