"""Who is told when: a loop that tells many requests what they gained looks for new ones in between."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from slipstream.commit import Gains
from slipstream.request import Request
from slipstream.serve.desk import AT_ONCE, Desk, Mailbox
from slipstream.serve.driver import Steps
from tests.serve.test_outbox import request, step_of


class Idle(Desk):
    """No engine: a test says what it says."""

    _busy_since = None

    def _add(self, requests: Sequence[Request]) -> None: ...
    def _abort(self, uids: Sequence[int]) -> None: ...
    def _ask(self, key: int, function: Any) -> None: ...
    async def _end(self) -> None: ...


def ids_of(mailbox: Mailbox) -> list[int]:
    return [token for delta in mailbox._deltas for token in delta.token_ids]


async def opened(count: int) -> tuple[Idle, list[Request], list[Mailbox]]:
    host: Any = SimpleNamespace()
    desk = Idle(host, on_dead=lambda: None, stall_s=1.0, interval_s=0.0)
    requests, mailboxes = [request(uid) for uid in range(count)], [Mailbox(99) for _ in range(count)]
    for each, mailbox in zip(requests, mailboxes, strict=True):
        desk.submit([each], mailbox)
    return desk, requests, mailboxes


def said(gains: Gains, is_last: bool = False) -> Steps:
    return Steps([gains], is_last)


def test_many_are_told_in_several_turns_and_ends_first() -> None:
    async def scene() -> None:
        desk, requests, boxes = await opened(3 * AT_ONCE)
        ended = requests[-1]
        desk.handle(said(step_of(dict.fromkeys(requests, (1,)), ends={ended: "stop"})))
        assert [bool(ids_of(box)) for box in boxes].count(True) == AT_ONCE and ids_of(boxes[-1]) == [1]
        # Who ends meanwhile has heard of all that came before.
        desk.handle(said(step_of({requests[-2]: (2, 3)}, ends={requests[-2]: "length"})))
        assert ids_of(boxes[-2]) == [1, 2, 3]
        for _ in range(3):
            await asyncio.sleep(0)
        assert all(map(ids_of, boxes)) and not desk._due

    asyncio.run(scene())


def test_the_last_step_is_told_to_all_at_once() -> None:
    async def scene() -> None:
        desk, requests, boxes = await opened(3 * AT_ONCE)
        desk.handle(said(step_of(dict.fromkeys(requests, (1,)))))
        desk.handle(said(step_of({requests[0]: (2,)}), is_last=True))
        assert [ids_of(box) for box in boxes] == [[1, 2]] + [[1]] * (3 * AT_ONCE - 1)
        await asyncio.sleep(0)

    asyncio.run(scene())


def test_who_has_left_is_told_nothing() -> None:
    async def scene() -> None:
        desk, requests, boxes = await opened(2 * AT_ONCE)
        desk.handle(said(step_of(dict.fromkeys(requests, (1,)))))
        desk.release(requests[-1:])
        await desk.stop()
        await asyncio.sleep(0)
        assert not ids_of(boxes[-1])

    asyncio.run(scene())
