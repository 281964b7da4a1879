"""`slipstream serve` as a process: signals, exit codes, and mistakes that are noticed before a model is loaded."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from slipstream.cli import main
from slipstream.config import SamplingParams
from slipstream.load import Models
from slipstream.serve.app import bind, run
from slipstream.serve.options import ServeOptions
from tests.serve.conftest import COMPLETIONS, make_llm, serving

# In whichever process the engine is: see `make_slow`.
SLOW = """
import functools, sys
from slipstream.cli import main
import slipstream.commands.serve as serve
from tests.serve import engines
serve.make_engines = functools.partial(engines.make_slow, sys.argv[1])
main(sys.argv[2:])
"""
READER = """
import sys, httpx2
with httpx2.stream("POST", sys.argv[1], json=eval(sys.argv[2]), timeout=60) as response:
    lines = response.iter_lines()
    print(next(lines), flush=True)
    for _ in lines:
        pass
"""
LONG = {"prompt": "once", "max_tokens": 150, "ignore_eos": True, "seed": 1, "return_token_ids": True}


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A command that is called here sets them up for its process."""
    loggers = [logging.getLogger(name) for name in ("slipstream.serve", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (logger.handlers, logger.propagate, level) in zip(loggers, before, strict=True):
        logger.setLevel(level)


@contextmanager
def process(folders: tuple[Path, Path], flag: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server, and its address."""
    target, drafter = map(str, folders)
    arguments = ["serve", "--model", target, "--draft", drafter, "--dtype", "float32", "--port", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SLOW, str(flag), *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as running:
        try:
            assert running.stderr is not None
            line = next(line for line in running.stderr if '"serving"' in line)
            yield running, f"http://127.0.0.1:{json.loads(line)['port']}"
        finally:
            if running.poll() is None:
                running.kill()


def begin(url: str, client: httpx2.Client, **fields: Any) -> Any:
    """A stream that has begun; used as a context."""
    return client.stream("POST", url + COMPLETIONS, json={**LONG, "stream": True, **fields})


def events_of(lines: Iterator[str]) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_sigterm_lets_answers_end(tiny_folders: tuple[Path, Path], tiny_pair: Models, tmp_path: Path) -> None:
    params = SamplingParams(temperature=1, seed=1, max_tokens=150, ignore_eos=True)
    (expected,) = make_llm(tiny_pair, "off").generate(["once"], params)
    options = ("--also", "off")  # in whichever engine they are
    with process(tiny_folders, tmp_path / "break", *options) as (running, url), httpx2.Client(timeout=60) as client:
        assert client.get(url + "/version").json()["modes"] == ["static", "off"]
        with begin(url, client, verify="off") as response:
            lines = response.iter_lines()
            first = events_of(iter([next(lines)]))
            running.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            refused = client.post(url + COMPLETIONS, json={"prompt": "x"})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            assert client.get(url + "/ready").status_code == 503
            assert client.get(url + "/health").status_code == 200
            events = [*first, *events_of(lines)]
        tokens = [token for event in events for token in event["choices"][0]["token_ids"]]
        assert tokens == list(expected.token_ids)
        assert running.wait(20) == 0


@pytest.mark.parametrize("apart", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sigterm_without_grace(apart: bool, tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    config = tmp_path / "serve.json"
    config.write_text(json.dumps({"grace_s": 0.1, "engine_process": apart}))
    with (
        process(tiny_folders, tmp_path / "break", "--config", str(config)) as (running, url),
        httpx2.Client(timeout=60) as client,
        begin(url, client) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        children = children_of(running.pid)
        assert bool(children) == apart
        for pid in children:  # systemd tells all of them
            os.kill(pid, signal.SIGTERM)
        running.send_signal(signal.SIGTERM)
        assert events_of(lines)[-1]["error"]["code"] == "unavailable"
        assert running.wait(20) == 0
        assert not any(map(is_alive, children))


def test_sigterm_while_it_loads(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Its log has said so, and nobody stays behind. The first process of a container would not heed a signal that it has no
    handler for.
    """
    target, drafter = map(str, tiny_folders)
    command = [sys.executable, "-m", "slipstream", "serve", "--model", target, "--draft", drafter, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        assert json.loads(next(running.stderr))["event"] == "loading"
        end = time.monotonic() + 20
        while not children_of(running.pid):
            assert time.monotonic() < end
            time.sleep(0.01)
        children = children_of(running.pid)
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 128 + signal.SIGTERM
        assert not running.stderr.read()
        wait_for_ends(children)


def test_a_second_signal_ends_it_at_once(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Who has got nothing of an answer is told so in the shape of all errors."""
    with (
        process(tiny_folders, tmp_path / "break") as (running, url),
        httpx2.Client(base_url=url, timeout=60) as client,
        begin(url, client) as response,
        ThreadPoolExecutor() as pool,
    ):
        lines = response.iter_lines()
        next(lines)
        whole = pool.submit(client.post, COMPLETIONS, json={**LONG, "n": 3})
        wait_for(client, 4)
        (engine,) = children_of(running.pid)
        running.send_signal(signal.SIGINT)
        assert running.stderr is not None
        assert '"draining"' in next(running.stderr)
        running.send_signal(signal.SIGINT)
        refused = whole.result(20)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert running.wait(20) == 0
        assert "Traceback" not in running.stderr.read()
        assert not is_alive(engine)


@pytest.mark.slow
def test_a_second_signal_while_a_grammar_is_compiled(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Python waits for threads that work, and this one has 20 s."""
    names = (f"p{number}" for number in range(200))
    schema = {"type": "object", "properties": {name: {"type": "string", "pattern": ".{0,900}"} for name in names}}
    with process(tiny_folders, tmp_path / "break") as (running, url), httpx2.Client(timeout=60) as client:

        def ask() -> None:
            with suppress(httpx2.HTTPError):
                client.post(url + COMPLETIONS, json={"prompt": "x", "structured": {"json": schema}})

        thread = threading.Thread(target=ask)
        thread.start()
        end = time.monotonic() + 20
        while len(children_of(running.pid)) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        children = children_of(running.pid)
        for _ in range(2):
            time.sleep(0.2)
            running.send_signal(signal.SIGTERM)
        assert running.wait(8) == 0
        thread.join(20)
        wait_for_ends(children)


def test_a_server_that_is_killed_leaves_nobody_behind(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    with (
        process(tiny_folders, tmp_path / "break") as (running, url),
        httpx2.Client(timeout=60) as client,
        begin(url, client) as response,
    ):
        next(response.iter_lines())
        (engine,) = children_of(running.pid)
        running.kill()
        running.wait(20)
        wait_for_ends([engine])


def wait_for_ends(pids: list[int]) -> None:
    end = time.monotonic() + 10
    while any(map(is_alive, pids)):
        assert time.monotonic() < end
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def is_alive(pid: int) -> bool:
    """Not so are zombies: whoever should have buried them is dead, and init may take its time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_client_that_is_killed_and_an_engine_that_fails_for_good(
    tiny_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    flag = tmp_path / "break"
    with (
        process(tiny_folders, flag, "--on-engine-error", "exit") as (running, url),
        httpx2.Client(base_url=url, timeout=60) as client,
    ):
        fields = {**LONG, "n": 3, "stream": True}
        other = subprocess.Popen(
            [sys.executable, "-c", READER, url + COMPLETIONS, repr(fields)], stdout=subprocess.PIPE
        )
        assert other.stdout is not None
        with other.stdout as output:
            assert output.readline().startswith(b"data: ")  # in the middle of its stream
        wait_for(client, 3)
        other.send_signal(signal.SIGKILL)
        other.wait()
        wait_for(client, 0)
        assert client.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200
        flag.touch()
        response = client.post(COMPLETIONS, json={"prompt": "x"})
        assert response.status_code == 500
        assert "on purpose" in response.json()["error"]["message"]
        assert running.wait(20) == 1
        assert "the engine has failed" in (running.stderr.read() if running.stderr else "")


def wait_for(client: httpx2.Client, num_running: int) -> None:
    end = time.monotonic() + 20
    while not re.search(rf"num_requests_running{{.*}} {num_running}\.0", client.get("/metrics").text):
        assert time.monotonic() < end
        time.sleep(0.01)


# ------------------------------------------------------------------------------------ before a model is loaded


def refused(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--model", "/does/not/exist", *arguments])
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert refused("--port", str(taken.getsockname()[1])) == 1
    assert "cannot be bound" in capsys.readouterr().err


def test_a_port_for_which_somebody_else_is_loading() -> None:
    """It is taken, although nobody listens there yet."""
    with bind(ServeOptions(port=0)) as first, pytest.raises(OSError, match="cannot be bound"):
        bind(ServeOptions(port=first.getsockname()[1])).close()


def test_a_port_is_free_when_its_server_has_ended(tiny_pair: Models) -> None:
    with serving(
        make_llm(tiny_pair, "off")
    ) as running:  # whose end closes a connection first, so that the system keeps it
        assert running.http.get("/health").status_code == 200
        port = running.port
    bind(ServeOptions(port=port)).close()


def test_a_port_at_which_somebody_else_listens_by_now(tiny_pair: Models, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback of it."""
    with socket.socket() as bound, socket.socket() as other:
        for each in (bound, other):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        other.bind(bound.getsockname())
        other.listen()
        with pytest.raises(OSError, match="cannot listen: Address already in use"):
            run(make_llm(tiny_pair, "off"), ServeOptions(), "tiny", bound)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("library", ["fastapi", "uvicorn", "prometheus_client"])
def test_a_library_that_is_missing(
    library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    assert refused("--port", "0") == 2
    assert 'pip install -e ".[serve]"' in capsys.readouterr().err
    assert library in refused_text(capsys, "--port", "0")


def refused_text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    refused(*arguments)
    return capsys.readouterr().err


def test_products_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each number of rows torch keeps code, for as long as a server runs."""
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    refused("--port", "0")
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"
    assert int(os.environ["LRU_CACHE_CAPACITY"]) < 1024


def test_wrong_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "serve.json"
    empty = tmp_path / "keys"
    empty.write_text("# none\n")
    for arguments, says in (
        (["--port", "70000"], "port"), (["--on-engine-error", "hope"], "on_engine_error"),
        (["--also", "off,of"], "also holds 'of'"), (["--request-timeout", "0"], "request_timeout_s"),
        (["--api-keys", str(tmp_path / "none")], "api_keys"), (["--api-keys", str(empty)], "api_keys"),
        (["--config", '{"grace_s": -1}'], "grace_s"), (["--config", '{"stall_s": 0}'], "stall_s"),
        (["--config", '{"max_backlog": 0}'], "max_backlog"),
        (["--config", '{"grace_s": "long"}'], "grace_s"), (["--config", '{"temperature": 1}'], "temperature"),
        (["--config", '{"gracious": 1}'], "gracious"), (["--config", '{"host": ""}'], "host"),
    ):  # fmt: skip
        if arguments[0] == "--config":
            config.write_text(arguments[1])
            arguments = ["--config", str(config)]
        assert refused(*arguments) == 2
        assert says in capsys.readouterr().err


def test_keys_are_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("very-secret\n")
    options = ServeOptions(api_keys=file)
    assert options.keys == ("very-secret",)
    assert "very-secret" not in repr(options)
