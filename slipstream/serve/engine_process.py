"""Engines in a process of their own, for a server that is not to share its interpreter with them.

The process (`engine_main`) has weights, engines and GPU; this one, which serves, gets to know their `Facts` and makes
requests and texts from these. A process that ends, whatever ended it, is an engine that failed: who was in it is told,
and there is a new one, or the server gives up, as `ServeOptions` say. Called by `commands.serve`, through `app`.
"""

import asyncio
import logging
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from slipstream.child import spawn
from slipstream.errors import EngineError
from slipstream.grammars import XGrammars
from slipstream.host import Facts, Host
from slipstream.request import Request
from slipstream.serve.desk import Desk
from slipstream.serve.driver import Dead, Driver, Failed, Message, RestartBudget, Restarted
from slipstream.serve.options import ServeOptions
from slipstream.serve.wire import Asked, Beat, Channel, Maker, Order, Ready, Unpacker

log = logging.getLogger("slipstream.serve")

END_S = 10.0  # for a process to end that was told to, or has closed its end


class EngineProcess:
    def __init__(self, make: Maker, *arguments: Any, options: ServeOptions) -> None:
        """Starts the process and waits until its engines are there: `make(*arguments)`, which is called there.

        make: a function that a module has by its name. SlipstreamError or OSError: what it raised.
        """
        log_level = logging.getLogger().getEffectiveLevel()
        self._order = Order(
            make, arguments, options.on_engine_error, options.stream_interval_s, options.stall_s, log_level
        )
        self._end = _ProcessEnd()
        ready = self._end.start(self._order)
        facts = ready.facts[0]
        grammars = XGrammars(ready.tokenizer, facts.vocab_size, facts.eos_token_ids, makes=False)
        self.hosts = [Host(ready.tokenizer, each, grammars) for each in ready.facts]
        self._desks: list[RemoteEngine] = []
        self._on_error = options.on_engine_error
        self._budget = RestartBudget()
        self._unsent: list[tuple[Any, ...]] = []  # commands
        self._is_stopping = False
        self._restarting: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """None: there is no process now."""
        return self._end.pid

    def start(self, options: ServeOptions, on_dead: Callable[[], None]) -> "list[RemoteEngine]":
        """On the loop that talks to them; once."""
        assert not self._desks, "the engines of a process are served once"
        self._loop = asyncio.get_running_loop()
        self._desks = [
            RemoteEngine(self, number, host, on_dead, options.stall_s, options.stream_interval_s)
            for number, host in enumerate(self.hosts)
        ]
        self._attach()
        return self._desks

    def send(self, *command: Any) -> None:
        """On the loop, at the end of its turn: what comes together goes together."""
        if not self._unsent:
            self._loop.call_soon(self._send_all)
        self._unsent.append(command)

    def _send_all(self) -> None:
        """What was not sent; a process that is not there yet gets it when it is."""
        if self._end.channel is not None and self._unsent:
            unsent, self._unsent = self._unsent, []
            self._end.channel.send(unsent)

    async def stop(self) -> None:
        """Until it is gone. What it was told before, it has done then."""
        self._is_stopping = True
        self._send_all()
        if self._restarting is not None:
            self.end()
        if self._end.channel is not None:
            await asyncio.to_thread(self._end.wait)
        self._detach()
        self._end.close()

    def end(self) -> None:
        """On the loop: at once, and there will be no other one; whoever waits for either does not wait long."""
        self._is_stopping = True
        if self._restarting is not None:
            self._restarting.cancel()
        self._end.end()

    def kill(self) -> None:
        """Have a new one, as if it had ended by itself."""
        self._end.kill()

    def close(self) -> None:
        """End it at once, if it is there; from anywhere, once the loop is over."""
        self._end.close()

    # ------------------------------------------------------------------ on the loop

    def _attach(self) -> None:
        assert self._end.channel is not None
        for desk in self._desks:
            desk.renew()
        self._loop.add_reader(self._end.channel.fileno(), self._read)

    def _detach(self) -> None:
        if self._end.channel is not None:
            self._loop.remove_reader(self._end.channel.fileno())

    def _read(self) -> None:
        assert self._end.channel is not None
        received = self._end.channel.received()
        if received is None:
            self._detach()
            if not self._is_stopping and any(desk.state not in ("dead", "stopped") for desk in self._desks):
                self._restarting = self._loop.create_task(self._recover())
            return
        for each in received:
            if isinstance(each, Beat):
                for desk, busy_since in zip(self._desks, each.busy_since, strict=True):
                    desk.beat(busy_since)
            else:
                self._desks[each[0]].receive(*each[1:])

    async def _recover(self) -> None:
        """The process is gone: all that was in it has failed."""
        self._end.abandon()
        for desk in self._desks:
            desk.lose("the engine's process ended")
        self._unsent.clear()
        reason = f"the engine's process ended {await asyncio.to_thread(self._end.reap)}"
        log.error("engine_process_ended", extra={"fields": {"reason": reason}})
        for desk in self._desks:
            desk.failure = reason
        may_go_on = self._budget.spend() and self._on_error == "restart"
        facts = await self._new_process() if may_go_on else None
        for number, desk in enumerate(self._desks):
            if facts is None:
                desk.handle(Dead(reason))
            else:
                desk.handle(Restarted(facts[number]))
        self._restarting = None

    async def _new_process(self) -> list[Facts] | None:
        """What is known of its engines; None where it could not be."""
        try:
            ready = await asyncio.to_thread(self._end.start, self._order)
        except Exception:
            log.exception("engine_restart_failed")
            return None
        log.warning("engine_restarted", extra={"fields": {"num_failures": self._desks[0].num_failures}})
        self._attach()
        self._send_all()
        return ready.facts


class _ProcessEnd:
    """The process, and the channel to it."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self, order: Order) -> Ready:
        """Waits until its engines are there. What they could not be made by is raised."""
        near, far = socket.socketpair()
        channel = Channel(near)
        with far:
            self._process = spawn("slipstream.serve.engine_main", far.fileno(), is_quiet=False)
        try:
            if self._is_over:
                raise EngineError("there is nobody to serve any more")
            channel.send(order)
            ready = next(channel.receive(), None)
            if ready is None:
                raise EngineError(f"the engine's process ended {self.reap()} before it was ready")
            if isinstance(ready, Exception):
                raise ready
        except BaseException:
            channel.close()
            self.close()
            raise
        assert isinstance(ready, Ready)
        self.channel = channel
        return ready

    def abandon(self) -> None:
        """The channel leads nowhere."""
        if self.channel is not None:
            self.channel.close()
        self.channel = None

    def wait(self) -> None:
        """Until it has ended, or has had its time."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)

    def kill(self) -> None:
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> None:
        """There will be no other one: from any thread, while another one starts it."""
        self._is_over = True
        self.kill()

    def reap(self) -> str:
        """Wait for its end, or make one. Returns how it ended."""
        assert self._process is not None
        self.wait()
        self._process.kill()
        code = self._process.wait()
        self._process = None
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"

    def close(self) -> None:
        self.abandon()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None


class RemoteEngine(Desk):
    """One of a process's engines."""

    def __init__(
        self, process: EngineProcess, number: int, host: Host, on_dead: Callable[[], None], stall_s: float,
        interval_s: float,
    ) -> None:  # fmt: skip
        super().__init__(host, on_dead=on_dead, stall_s=stall_s, interval_s=interval_s)
        self._process, self._send = process, partial(process.send, number)
        self._requests: dict[int, Request] = {}  # by uid, of those that somebody waits for
        self._unpacker = Unpacker(self._requests)
        self._since: float | None = None

    def lose(self, reason: str) -> None:
        """All that is waited for has failed."""
        self.handle(Failed(reason, list(self._mailboxes)))
        for answer in list(self._answers.values()):
            if not answer.done():
                answer.set_exception(EngineError(reason))

    def renew(self) -> None:
        """The process is a new one."""
        self._unpacker, self._since = Unpacker(self._requests), time.monotonic()

    def beat(self, busy_since: float | None) -> None:
        """It lives. A process from which nothing comes is like a step that does not end."""
        self._since = time.monotonic() if busy_since is None else busy_since

    def receive(self, *message: Any) -> None:
        if len(message) > 1:
            steps = self._unpacker.unpack(*message)
            for gains in steps.gains:
                for request in gains.ended:
                    self._requests.pop(request.uid, None)
            self.handle(steps)
        else:
            self.handle(message[0])

    def handle(self, message: Message) -> None:
        if isinstance(message, Failed):
            self._hand_over(all_of_it=True)  # what they gained before
        if isinstance(message, Dead) and not message.is_final:
            self._process.kill()  # what cannot be mended there, a GPU's context, say, a new process does not have
            return
        super().handle(message)

    @property
    def _busy_since(self) -> float | None:
        return self._since

    def _add(self, requests: Sequence[Request]) -> None:
        self._requests.update((request.uid, request) for request in requests)
        self._send("add", [Asked.of(request) for request in requests])

    def _abort(self, uids: Sequence[int]) -> None:
        for uid in uids:
            self._requests.pop(uid, None)
        self._send("abort", uids)

    def _ask(self, key: int, function: Callable[[Driver], Any]) -> None:
        self._send("ask", key, function)

    async def _end(self) -> None:
        self._send("stop")
        await self._process.stop()
