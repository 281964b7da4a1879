"""What comes over a connection before there is a request: upgrades, heads without end, bytes that are no HTTP."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from slipstream.load import Models
from tests.serve.conftest import COMPLETIONS, Running, make_llm, serving

TIMEOUT_S = 0.4
H2C = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def served(tiny_pair: Models) -> Iterator[Running]:
    with serving(make_llm(tiny_pair), body_timeout_s=TIMEOUT_S) as running:
        yield running
        running.settle()


class Client:
    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.file = connection, connection.makefile("rb")

    def send(self, *segments: bytes) -> None:
        for segment in segments:
            self.connection.sendall(segment)
            time.sleep(0.02)  # it is read before the next one comes

    def answer(self) -> tuple[int, dict[str, str], Any]:
        status = int(self.file.readline().split()[1])
        lines = iter(lambda: self.file.readline().decode().strip(), "")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        return status, headers, json.loads(self.file.read(int(headers["content-length"])))

    def refusal(self, status: int) -> dict[str, Any]:
        """The last thing on this connection."""
        got, headers, body = self.answer()
        assert got == status, body
        assert headers["content-type"] == "application/json"
        assert headers["x-request-id"]
        assert headers["connection"] == "close"
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert self.file.read() == b""
        return body["error"]


@contextmanager
def connected(served: Running) -> Iterator[Client]:
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
        client = Client(connection)
        with client.file:
            yield client


def post(extra: str = "", *, chunked: bool = False, **fields: Any) -> bytes:
    body = json.dumps({"prompt": "once", "max_tokens": 2, "temperature": 0} | fields).encode()
    length = "transfer-encoding: chunked" if chunked else f"content-length: {len(body)}"
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{extra}{length}\r\n\r\n"
    return head.encode() + (b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body)


def split(data: bytes, *places: int) -> list[bytes]:
    return [data[begin:end] for begin, end in zip((0, *places), (*places, len(data)), strict=True)]


BODY = post(H2C).index(b"\r\n\r\n") + 4


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("places", [(), (60,), (BODY - 2,), (BODY,), (30, 90, BODY - 1, BODY + 3)])
def test_an_upgrade_is_ignored(served: Running, places: tuple[int, ...], chunked: bool) -> None:
    with connected(served) as client:
        client.send(post())
        plain = client.answer()
        client.send(*split(post(H2C, chunked=chunked), *places))
        status, headers, body = client.answer()
        assert (status, body["choices"]) == (200, plain[2]["choices"])
        assert "upgrade" not in headers
        client.send(post())  # and what follows is HTTP/1.1 as ever
        assert client.answer()[2]["choices"] == plain[2]["choices"]


def test_upgrades_in_a_pipeline(served: Running) -> None:
    with connected(served) as client:
        client.send(post() + post(H2C, max_tokens=3) + post(H2C, max_tokens=4, chunked=True) + post(H2C, max_tokens=5))
        usages = [client.answer()[2]["usage"]["completion_tokens"] for _ in range(4)]
        assert usages == [2, 3, 4, 5]


def test_an_upgrade_beside_close_and_without_a_body(served: Running) -> None:
    with connected(served) as client:
        client.send(MODELS.replace(b"\r\n\r\n", b"\r\n" + H2C.encode() + b"\r\n"))
        assert client.answer()[0] == 200
        client.send(post(H2C.replace("Upgrade,", "Upgrade, close,")) + MODELS)
        status, headers, _ = client.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert client.file.read() == b""


def test_an_upgrade_among_trailers(served: Running) -> None:
    with connected(served) as client:
        client.send(post(chunked=True)[:-2] + H2C.encode() + b"\r\n")
        assert client.answer()[0] == 200
        client.send(post())
        assert client.answer()[0] == 200


def test_an_upgrade_to_web_sockets_is_none_either(served: Running) -> None:
    with connected(served) as client:
        client.send(post("connection: upgrade\r\nupgrade: websocket\r\n"))
        assert client.answer()[0] == 200


@pytest.mark.parametrize(
    "head",
    [
        b"x: " + b"x" * (70 << 10) + b"\r\n\r\n",  # complete
        b"x: " + b"x" * (4 << 20),  # not yet
        b"x: y\r\n" * (12 << 10) + b"\r\n",
    ],
)
@pytest.mark.parametrize("upgrade", ["", H2C])
def test_a_head_too_large(served: Running, head: bytes, upgrade: str) -> None:
    before = served.metric("http_problems_total", status="431")
    with connected(served) as client:
        client.send(MODELS)
        assert client.answer()[0] == 200
        client.send(MODELS[:-2] + upgrade.encode() + head)
        assert client.refusal(431)["code"] == "head_too_large"
    assert served.metric("http_problems_total", status="431") == before + 1


def test_a_target_and_trailers_too_large(served: Running) -> None:
    with connected(served) as client:
        client.send(b"GET /" + b"x" * (70 << 10) + b" HTTP/1.1\r\n\r\n")
        client.refusal(431)
    with connected(served) as client:
        client.send(post(chunked=True)[:-2], b"x: " + b"x" * (2 << 20))
        client.refusal(431)


def test_a_head_that_is_large_enough(served: Running) -> None:
    with connected(served) as client:
        client.send(*split(MODELS[:-2] + b"x: " + b"x" * (60 << 10) + b"\r\n\r\n", 500, 40_000))
        assert client.answer()[0] == 200


def test_a_large_body_before_the_next_head(served: Running) -> None:
    """One segment has the end of a body and the beginning of a head."""
    with connected(served) as client:
        client.send(post(prompt="x" * 200_000) + MODELS[:20], MODELS[20:])
        assert client.answer()[0] == 400  # too long for the model
        assert client.answer()[0] == 200


@pytest.mark.parametrize("first", [b"", MODELS])
def test_a_head_without_end(served: Running, first: bytes) -> None:
    with connected(served) as client:
        if first:
            client.send(first)
            assert client.answer()[0] == 200
        start = time.monotonic()
        client.send(MODELS[:10])
        for byte in (b"a", b"b", b"c"):  # however it trickles
            time.sleep(TIMEOUT_S / 8)
            client.send(byte)
        assert client.refusal(408)["code"] == "slow_head"
        assert TIMEOUT_S * 0.9 < time.monotonic() - start < 5


def test_nothing_at_all_is_closed_without_an_answer(served: Running) -> None:
    with connected(served) as client:
        assert client.file.read() == b""
    with connected(served) as client:
        client.send(b"\r\n")
        assert client.file.read() == b""


def test_a_head_in_time_may_have_an_answer_that_takes_longer(served: Running) -> None:
    with connected(served) as client:
        client.send(MODELS[:10], MODELS[10:])
        assert client.answer()[0] == 200
        time.sleep(TIMEOUT_S * 1.5)
        client.send(MODELS)  # the time of the first head is not that of the connection
        assert client.answer()[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02 garbage\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n"
        + H2C.encode()
        + b"\r\n",
    ],
)
def test_what_is_no_http(served: Running, data: bytes) -> None:
    with connected(served) as client:
        client.send(data)
        error = client.refusal(400)
        assert (error["type"], error["code"]) == ("invalid_request_error", "bad_http")


def test_a_body_that_is_no_http(served: Running) -> None:
    with connected(served) as client:
        client.send(post(chunked=True).replace(b"\r\n\r\n", b"\r\n\r\nno size\r\n", 1))
        client.refusal(400)


def test_an_answer_in_flight_is_not_disturbed(served: Running) -> None:
    with connected(served) as client:
        client.send(post(max_tokens=40, ignore_eos=True) + b"no http\r\n\r\n")
        status, _, body = client.answer()
        assert (status, body["usage"]["completion_tokens"]) == (200, 40)
        assert client.file.read() == b""
