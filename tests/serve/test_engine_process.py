"""Engines in a process of their own: what a server owes its clients holds there too, and a process may end."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from slipstream.child import spawn
from slipstream.config import SamplingParams
from slipstream.errors import CheckpointError, EngineError
from slipstream.load import Models
from slipstream.serve import engine_process
from slipstream.serve.engine_process import EngineProcess
from slipstream.serve.options import ServeOptions
from tests.serve.conftest import CHAT, COMPLETIONS, Running, serving, serving_apart
from tests.serve.engines import (
    break_for_good,
    break_next,
    die,
    fail,
    make_engines,
    make_late,
    make_llm,
    modules_there,
    slow_down,
    unsendable,
)

LONG = {"prompt": "once", "max_tokens": 200, "ignore_eos": True, "seed": 1, "temperature": 1, "return_token_ids": True}
SHORT = {**LONG, "max_tokens": 60}
MODES = ("static", "off", "lag")


@pytest.fixture(scope="module")
def apart(tiny_folders: tuple[Path, Path]) -> Iterator[Running]:
    with serving_apart(tiny_folders, *MODES) as running:
        yield running
        running.settle()


@pytest.fixture(scope="module")
def beside(tiny_pair: Models) -> Iterator[Running]:
    """The same in threads."""
    with serving([make_llm(tiny_pair, mode) for mode in MODES]) as running:
        yield running


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def engine_of(running: Running) -> int:
    assert running.process is not None and running.process.pid is not None
    return running.process.pid


# ------------------------------------------------------------------------------------------------ answers

SCHEMA = {"type": "object", "properties": {"name": {"enum": ["ann", "bob"]}}, "required": ["name"]}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "long": (COMPLETIONS, LONG),
    "lag": (COMPLETIONS, {**LONG, "verify": "lag"}),
    "several": (COMPLETIONS, {**LONG, "n": 3, "prompt": ["once", "upon"], "max_tokens": 20}),
    "stop": (COMPLETIONS, {"prompt": "once", "seed": 3, "stop": ["e", "a"], "max_tokens": 200}),
    "stop_token_ids": (COMPLETIONS, {"prompt": "x", "seed": 3, "stop_token_ids": list(range(60)), "max_tokens": 90}),
    "logprobs": (COMPLETIONS, {**LONG, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 30, "prompt": "o" * 40}),
    "chat": (CHAT, {"messages": [{"role": "user", "content": "hi"}], "seed": 5, "logprobs": True, "max_tokens": 40}),
    "shaped": (COMPLETIONS, {**LONG, "logit_bias": {"97": 3}, "frequency_penalty": 1, "top_p": 0.9, "min_tokens": 3}),
    "steps": (COMPLETIONS, {**LONG, "return_steps": True, "max_tokens": 60}),
}


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_of_a_thread(name: str, apart: Running, beside: Running) -> None:
    path, fields = ASKED[name]
    one, other = apart.post(path, **fields).json(), beside.post(path, **fields).json()
    assert one["choices"] == other["choices"]
    assert one["usage"]["total_tokens"] == other["usage"]["total_tokens"]


def test_streams_join_to_the_whole(apart: Running) -> None:
    whole = apart.post(COMPLETIONS, **LONG).json()["choices"][0]
    with apart.http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    assert [choice["finish_reason"] for choice in choices][-1] == "length"


@pytest.mark.slow
def test_structured(apart: Running) -> None:
    """Grammars are tried by the server, and compiled where the engine is."""
    fields = {"prompt": "x", "seed": 1, "max_tokens": 100, "n": 2}
    for choice in apart.post(COMPLETIONS, **fields, structured={"json": SCHEMA}).json()["choices"]:
        assert json.loads(choice["text"])["name"] in ("ann", "bob")
    refused = apart.post(COMPLETIONS, **fields, structured={"grammar": "root ::= ("})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "structured")
    assert apart.ask(modules_there) == ["xgrammar"]


def test_prefixes_are_found_again(apart: Running) -> None:
    for least in (0, 32):
        usage = apart.post(COMPLETIONS, prompt="the same again and again, and so it goes", max_tokens=2).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= least


def test_figures(apart: Running) -> None:
    apart.post(COMPLETIONS, **LONG)
    assert apart.metric("generation_tokens_total", mode="static") >= 200
    assert apart.metric("spec_decode_num_drafts_total", mode="static") > 0
    assert apart.metric("engine_step_seconds_count", mode="static") > 0
    modes = apart.http.get("/stats").json()["modes"]
    assert list(modes) == list(MODES)
    assert modes["static"]["state"] == "running" and sum(modes["static"]["widths"]) > 0
    assert apart.http.get("/health").status_code == 200


def test_a_client_that_leaves(apart: Running) -> None:
    with apart.http.stream("POST", COMPLETIONS, json={**LONG, "stream": True, "n": 3}) as response:
        next(response.iter_lines())
    apart.settle()


def test_what_is_asked_is_answered_or_raised(apart: Running) -> None:
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        apart.ask(fail)
    with pytest.raises(EngineError, match="pickle"):
        apart.ask(unsendable)
    assert apart.http.get("/health").status_code == 200


# ------------------------------------------------------------------------------------------------ ends


def test_a_step_that_fails_and_one_that_takes_too_long(tiny_folders: tuple[Path, Path], tiny_pair: Models) -> None:
    """The engine is made anew in its process, and requests that wait go on."""
    params = SamplingParams(temperature=1, seed=1, max_tokens=60, ignore_eos=True)
    (expected,) = make_llm(tiny_pair, "off").generate(["once"], params)
    options = {"stall_s": 0.2, "request_timeout_s": 2.5}
    with serving_apart(tiny_folders, engine={"max_num_seqs": 2}, **options) as running:
        before = engine_of(running)
        running.ask(partial(slow_down, seconds=0.01))
        answers = break_while_busy(running)
        assert sorted(status for status, _ in answers[:-1]) == [200, 200, 500]
        for status, body in answers[:-1]:
            if status == 200:
                assert body["choices"][0]["token_ids"] == list(expected.token_ids)
        assert "on purpose" in answers[-1][1]["error"]["message"]
        assert running.http.get("/health").json()["failures"] == 1
        assert engine_of(running) == before
        running.settle()
        running.ask(partial(slow_down, seconds=0.5))
        statuses: list[int] = []
        thread = threading.Thread(target=lambda: statuses.append(running.post(COMPLETIONS, **LONG).status_code))
        thread.start()
        running.wait_until(lambda: running.http.get("/health").status_code == 503)
        thread.join(30)
        assert statuses == [504]


def break_while_busy(running: Running) -> list[tuple[int, dict[str, Any]]]:
    """Four requests for two slots, and a stream that has begun; the answers to all, the stream last."""
    answers: list[tuple[int, dict[str, Any]]] = []

    def ask() -> None:
        response = running.post(COMPLETIONS, **SHORT)
        answers.append((response.status_code, response.json()))

    with running.http.stream("POST", COMPLETIONS, json={**SHORT, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        running.wait_until(lambda: running.metric("num_requests_waiting") == 2)
        running.ask(break_next)
        rest = [line for line in lines if line]
        for thread in threads:
            thread.join(60)
    return [*answers, (response.status_code, json.loads(rest[-1].removeprefix("data: ")))]


def test_a_process_that_is_killed_is_made_anew(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    may_start = tmp_path / "may-start"
    may_start.touch()
    with serving_apart(tiny_folders, "static", "off", make=make_late, before=[may_start]) as running:
        expected = running.post(COMPLETIONS, **LONG).json()["choices"][0]["token_ids"]
        running.ask(partial(slow_down, seconds=0.02))
        before, late = engine_of(running), []
        with running.http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            may_start.unlink()
            with pytest.raises(EngineError, match="process ended"):
                running.ask(partial(die, number=signal.SIGKILL))
            rest = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        assert (rest[-1]["error"]["type"], rest[-1]["error"]["code"]) == ("server_error", "engine_error")
        for path in ("/health", "/ready"):
            assert running.http.get(path).status_code == 503
        thread = threading.Thread(target=lambda: late.append(running.post(COMPLETIONS, **LONG)))
        thread.start()
        running.wait_until(lambda: running.service.engine.num_open == 1)
        assert not late
        may_start.touch()
        thread.join(60)
        assert late[0].json()["choices"][0]["token_ids"] == expected
        health = running.http.get("/health")
        assert (health.status_code, health.json()["modes"]["off"]["failures"]) == (200, 1)
        assert "SIGKILL" in health.json()["last_failure"]
        assert running.metric("engine_failures_total", mode="static") == 1
        assert engine_of(running) != before and not is_alive(before)
        running.settle()
        may_start.write_text("no more")  # there will be no third one
        os.kill(engine_of(running), signal.SIGKILL)
        running.wait_until(lambda: running.service.engine.state == "dead")
        running.wait_until(lambda: running.server.should_exit)
        assert running.server.has_failed


def test_a_server_that_ends_while_a_process_is_started(
    tiny_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for what nobody needs any more."""
    may_start = tmp_path / "may-start"
    may_start.touch()
    started: list[subprocess.Popen[bytes]] = []
    with serving_apart(tiny_folders, make=make_late, before=[may_start]) as running:
        assert running.post(COMPLETIONS, **LONG).status_code == 200
        may_start.unlink()
        is_starting = threading.Event()

        def late(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
            is_starting.set()
            time.sleep(1)
            started.append(spawn(*arguments, **options))
            return started[0]

        monkeypatch.setattr(engine_process, "spawn", late)
        os.kill(engine_of(running), signal.SIGKILL)
        assert is_starting.wait(10)
    assert started[0].poll() is not None
    assert not running.server.has_failed


@pytest.mark.slow
def test_an_engine_that_cannot_be_mended_gets_a_new_process(tiny_folders: tuple[Path, Path]) -> None:
    with serving_apart(tiny_folders, "static", "off") as running:
        before = engine_of(running)
        running.ask(break_for_good)
        assert running.post(COMPLETIONS, **LONG).status_code == 500
        assert running.post(COMPLETIONS, **LONG).status_code in (200, 500)  # as it came before the end, or after it
        running.wait_until(lambda: running.http.get("/health").status_code == 200)
        assert engine_of(running) != before
        assert running.post(COMPLETIONS, **LONG).status_code == 200
        running.settle()


@pytest.mark.slow
def test_a_process_that_is_killed_is_the_end_by_option(tiny_folders: tuple[Path, Path]) -> None:
    with serving_apart(tiny_folders, on_engine_error="exit") as running:
        running.ask(partial(slow_down, seconds=0.02))
        statuses: list[int] = []
        thread = threading.Thread(target=lambda: statuses.append(running.post(COMPLETIONS, **LONG).status_code))
        thread.start()
        running.wait_until(lambda: running.service.engine.num_open == 1)
        time.sleep(0.1)
        os.kill(engine_of(running), signal.SIGKILL)
        thread.join(30)
        assert statuses == [500]
        running.wait_until(lambda: running.server.has_failed)
        with pytest.raises(httpx2.HTTPError):
            running.wait_until(lambda: running.post(COMPLETIONS, **LONG).status_code == 0)


def test_a_process_whose_server_has_ended_already(capfd: pytest.CaptureFixture[str]) -> None:
    near, far = socket.socketpair()
    near.close()
    with far:
        process = spawn("slipstream.serve.engine_main", far.fileno(), is_quiet=False)
    assert process.wait(60) == 0
    assert capfd.readouterr().err == ""


def test_engines_that_cannot_be_made(tmp_path: Path, tiny_folders: tuple[Path, Path]) -> None:
    """The error is the one that was raised there."""
    options = ServeOptions()
    with pytest.raises(CheckpointError, match="nowhere"):
        EngineProcess(make_engines, (tmp_path / "nowhere", tmp_path), ("off",), {}, options=options)
    reason = tmp_path / "reason"
    reason.write_text("no luck")
    with pytest.raises(EngineError, match="RuntimeError: no luck"):
        EngineProcess(make_late, reason, options=options)
