"""The process that serves the engines: it makes them, steps them, and says through a socket what requests gain.

Nothing here knows a text: requests come as token ids, and grammars that were tried by who sent them. It ends when it is
told to, or when who started it is gone; signals are for the other one. Started by `engine_process`.
"""

import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn

from slipstream.errors import EngineError, SlipstreamError
from slipstream.grammars import XGrammars, idle
from slipstream.request import Request
from slipstream.serve.driver import Answered, Driver, Message, Steps
from slipstream.serve.logs import configure_logging
from slipstream.serve.wire import SWITCH_INTERVAL_S, Asked, Beat, Channel, Order, Packer, Ready

if TYPE_CHECKING:
    from slipstream.llm import LLM

log = logging.getLogger("slipstream.serve")

MOST_BEAT_S = 1.0


class Engines:
    def __init__(self, llms: "Sequence[LLM]", channel: Channel, order: Order) -> None:
        self._channel = channel
        self._stations = [_Station(number, llm, channel, order) for number, llm in enumerate(llms)]
        self._beat_s = min(MOST_BEAT_S, order.stall_s / 4)

    def run(self) -> None:
        """Until all are told to stop, or have failed for good."""
        for station in self._stations:
            station.thread.start()
        while any(station.thread.is_alive() for station in self._stations):
            self._channel.send(Beat([station.driver.busy_since for station in self._stations]))
            for station in self._stations:
                station.thread.join(self._beat_s / len(self._stations))

    def obey(self, command: tuple[Any, ...]) -> None:
        """What the server sends: the number of an engine, what it is to do, and with what."""
        number, name, *arguments = command
        station = self._stations[number]
        {"add": station.add, "abort": station.abort, "ask": station.driver.ask, "stop": station.driver.stop}[name](
            *arguments
        )


class _Station:
    """An engine, and how its messages are sent."""

    def __init__(self, number: int, llm: "LLM", channel: Channel, order: Order) -> None:
        self.driver = Driver(llm, self._post, on_error=order.on_error, ship_s=order.interval_s / 4)
        self.thread = threading.Thread(target=self.driver.run, name=f"slipstream-{llm.mode}", daemon=True)
        self._number, self._llm, self._channel = number, llm, channel
        self._packer = Packer()
        self._pool = ThreadPoolExecutor(1, "slipstream-form")
        self._is_compiling: set[int] = set()  # uids, with the lock
        self._lock = threading.Lock()

    def add(self, asked: Sequence[Asked]) -> None:
        if asked[0].params.structured is None:
            self.driver.add([self._request(one, None) for one in asked])
            return
        with self._lock:
            self._is_compiling.update(one.uid for one in asked)
        self._pool.submit(self._compile, asked)

    def abort(self, uids: Sequence[int]) -> None:
        with self._lock:
            self._is_compiling.difference_update(uids)
        self.driver.abort(uids)

    def _compile(self, asked: Sequence[Asked]) -> None:
        """In the pool: requests with a grammar, which steps do not wait for."""
        params, requests = asked[0].params, []
        assert params.structured is not None
        try:
            made = self._llm.grammars.compile(params.structured, params.ends(self._llm.facts.eos_token_ids), idle)
            requests = [self._request(one, made()) for one in asked]
        except Exception as error:
            known = error if isinstance(error, SlipstreamError) else EngineError(f"its grammar failed: {error!r}")
            self.driver.refuse([one.uid for one in asked], known)
        with self._lock:
            wanted = [request for request in requests if request.uid in self._is_compiling]
            self._is_compiling.difference_update(one.uid for one in asked)
            if wanted:
                self.driver.add(wanted)

    def _request(self, asked: Asked, constraint: Any) -> Request:
        return self._llm.request(asked.uid, asked.prompt_ids, asked.params, asked.seed, asked.sibling, constraint)

    def _post(self, message: Message) -> None:
        """In the driver's thread."""
        if isinstance(message, Steps):
            self._channel.send((self._number, *self._packer.pack(message)))
            return
        try:
            self._channel.send((self._number, message))
        except Exception as error:  # what was asked for cannot be sent
            assert isinstance(message, Answered), message
            self._channel.send((self._number, Answered(message.key, None, EngineError(repr(error)))))


def serve(channel: Channel) -> None:
    incoming = channel.receive()
    order: Order | None = next(incoming, None)
    if order is None:  # whoever started this has ended since
        return
    configure_logging(order.log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    engines: list[Engines] = []
    threading.Thread(target=_listen, args=(incoming, engines), name="slipstream-listen", daemon=True).start()
    llms = _made(order)
    if isinstance(llms, SlipstreamError | OSError):
        channel.send(llms)
        return
    engines.append(Engines(llms, channel, order))
    channel.send(Ready(llms[0].tokenizer, [llm.facts for llm in llms]))
    engines[0].run()


def _listen(incoming: Any, engines: Sequence[Engines]) -> None:
    """In a thread from the start: whoever is gone while engines are made is gone."""
    try:
        for commands in incoming:
            for command in commands:
                engines[0].obey(command)  # nothing is sent before they are there
    except Exception:
        log.exception("deaf")
    os._exit(1)  # nobody is left to serve, or can be heard; a step may never end


def _made(order: Order) -> "Sequence[LLM] | SlipstreamError | OSError":
    import slipstream.llm  # noqa: F401

    gc.freeze()  # collections leave alone what was imported: they would take longer than many steps
    try:
        llms = order.make(*order.arguments)
    except (SlipstreamError, OSError) as error:
        return error
    except Exception as error:
        log.exception("no_engine")
        return EngineError(f"the engine could not be made: {type(error).__name__}: {error}")
    models = llms[0].models
    grammars = XGrammars(models.tokenizer, models.vocab_size, models.eos_token_ids, tries=False)
    for llm in llms:
        llm.grammars = grammars
    return llms


def main() -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    serve(channel)
    channel.flush()
    logging.shutdown()
    os._exit(0)  # libraries' threads may be busy still, and nothing is left to be written


if __name__ == "__main__":
    main()
