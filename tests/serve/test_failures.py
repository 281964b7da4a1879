"""An engine that fails: who is told what, what goes on, and when the server gives up."""

import dataclasses
import json
import threading
from typing import Any

import httpx2
import pytest

from slipstream.config import SamplingParams
from slipstream.errors import RequestError
from slipstream.llm import LLM
from slipstream.load import Models
from slipstream.models import template
from slipstream.serve import driver
from slipstream.serve.render import Renderer
from slipstream.serve.service import Service
from slipstream.testing import assert_nothing_left
from tests.serve.conftest import CHAT, COMPLETIONS, Running, make_llm, serving, slowed

LONG = {"prompt": "once", "max_tokens": 200, "ignore_eos": True, "seed": 1, "temperature": 1, "return_token_ids": True}


def break_engine(llm: LLM, always: bool = False) -> None:
    """The next step fails half-way: the draft is launched, nothing is verified."""
    intact = llm.engine.launch_verify

    def broken(*args: Any) -> Any:
        if not always:
            llm.engine.launch_verify = intact  # type: ignore[method-assign]
        raise ArithmeticError("on purpose")

    llm.engine.launch_verify = broken  # type: ignore[method-assign]


def break_while_busy(running: Running) -> list[tuple[int, dict[str, Any]]]:
    """Four requests for two slots, and a stream that has begun; the answers to all, the stream last."""
    answers: list[tuple[int, dict[str, Any]]] = []

    def ask() -> None:
        response = running.post(COMPLETIONS, **LONG)
        answers.append((response.status_code, response.json()))

    with running.http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        running.wait_until(lambda: running.service.engine.num_open == 4)
        running.wait_until(lambda: running.metric("num_requests_waiting") == 2)
        break_engine(running.llm)
        rest = [line for line in lines if line]
        for thread in threads:
            thread.join(60)
    return [*answers, (response.status_code, json.loads(rest[-1].removeprefix("data: ")))]


def test_a_chat_template_without_end_fails_its_own_request(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """And texts go on meanwhile."""
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    endless = dataclasses.replace(served.llm.tokenizer, chat_template=loops)
    monkeypatch.setattr(served.llm, "tokenizer", endless)
    monkeypatch.setattr(template, "MOST_SECONDS", 1.0)
    answers: list[Any] = []
    chat = {"messages": [{"role": "user", "content": "once"}], "max_tokens": 2}
    thread = threading.Thread(target=lambda: answers.append(served.post(CHAT, **chat)))
    thread.start()
    assert served.post(COMPLETIONS, prompt="once", max_tokens=2).status_code == 200
    assert not answers
    thread.join(60)
    assert answers[0].status_code == 500
    assert "the chat template takes longer than 1 s" in answers[0].json()["error"]["message"]
    assert served.http.get("/health").status_code == 200
    monkeypatch.undo()
    assert served.post(CHAT, **chat).status_code == 200


def test_those_in_a_slot_fail_and_the_others_go_on(tiny_pair: Models) -> None:
    llm = make_llm(tiny_pair, max_num_seqs=2)
    (expected,) = make_llm(tiny_pair, "off").generate(
        ["once"], SamplingParams(temperature=1, seed=1, max_tokens=200, ignore_eos=True)
    )
    before = llm.engine
    with serving(llm) as running:
        with slowed(llm, 0.01):
            answers = break_while_busy(running)
        assert sorted(status for status, _ in answers[:-1]) == [200, 200, 500]
        for status, body in answers[:-1]:
            if status == 200:
                assert body["choices"][0]["token_ids"] == list(expected.token_ids)
            else:
                assert "on purpose" in body["error"]["message"]
                assert body["error"]["code"] == "engine_error"
        assert answers[-1][0] == 200  # it had begun
        assert "on purpose" in answers[-1][1]["error"]["message"]
        assert llm.engine is not before
        health = running.http.get("/health")
        assert (health.status_code, health.json()["failures"]) == (200, 1)
        assert "on purpose" in health.json()["last_failure"]
        assert running.metric("engine_failures_total") == 1
        assert running.post(COMPLETIONS, **LONG).json()["choices"][0]["token_ids"] == list(expected.token_ids)
        running.settle()


def test_health_is_red_while_the_engine_is_made_anew(tiny_pair: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(tiny_pair)
    may_go_on, restart = threading.Event(), llm.restart

    def slow_restart() -> None:
        assert may_go_on.wait(20)
        restart()

    monkeypatch.setattr(llm, "restart", slow_restart)
    with serving(llm) as running:
        break_engine(llm)
        assert running.post(COMPLETIONS, **LONG).status_code == 500
        for path in ("/health", "/ready"):
            assert running.http.get(path).status_code == 503
        assert running.http.get("/metrics").status_code == 200  # of what was known before
        waiting: list[int] = []
        thread = threading.Thread(target=lambda: waiting.append(running.post(COMPLETIONS, **LONG).status_code))
        thread.start()
        running.wait_until(lambda: running.service.engine.num_open == 1)
        may_go_on.set()
        thread.join(30)
        assert waiting == [200]
        assert running.http.get("/health").status_code == 200
        running.settle()


def test_health_is_red_while_a_step_does_not_end(tiny_pair: Models) -> None:
    llm, may_go_on = make_llm(tiny_pair), threading.Event()
    step = llm.engine.step

    def stuck() -> Any:
        assert may_go_on.wait(20)
        return step()

    llm.engine.step = stuck  # type: ignore[method-assign]
    statuses: list[int] = []
    with serving(llm, stall_s=0.1) as running:
        thread = threading.Thread(target=lambda: statuses.append(running.post(COMPLETIONS, **LONG).status_code))
        thread.start()
        for path in ("/health", "/ready"):
            running.wait_until(lambda path=path: running.http.get(path).status_code == 503)
        assert running.http.get("/health").json()["status"] == "running"
        may_go_on.set()
        thread.join(30)
        assert statuses == [200]
        assert running.http.get("/health").status_code == 200
        running.settle()


def test_an_engine_that_fails_for_good(tiny_pair: Models) -> None:
    """By option at once; else when it fails again and again."""
    for options, failures in (({"on_engine_error": "exit"}, 1), ({}, driver.MAX_RESTARTS + 1)):
        llm = make_llm(tiny_pair)
        original = llm.restart

        def restart(llm: LLM = llm, original: Any = original) -> None:
            original()
            break_engine(llm)

        llm.restart = restart  # type: ignore[method-assign]
        break_engine(llm)
        with serving(llm, **options) as running:
            for _ in range(failures):
                assert running.service.engine.state in ("running", "restarting")
                assert running.post(COMPLETIONS, **LONG).status_code == 500
            running.wait_until(lambda: running.service.engine.state == "dead")
            running.wait_until(lambda: running.server.should_exit)
            assert running.server.has_failed


def test_an_engine_that_cannot_be_made_anew(tiny_pair: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(tiny_pair)

    def restart() -> None:
        raise MemoryError

    monkeypatch.setattr(llm, "restart", restart)
    break_engine(llm)
    with serving(llm) as running:
        assert running.post(COMPLETIONS, **LONG).status_code == 500
        running.wait_until(lambda: running.service.engine.state == "dead")
        assert running.server.has_failed


def test_an_answer_that_cannot_go_on(tiny_pair: Models) -> None:
    """Logits that are not finite end their request alone."""
    llm = make_llm(tiny_pair)
    with serving(llm) as running:
        bias = {str(token): -100.0 for token in range(259)}
        assert running.post(COMPLETIONS, prompt="x", logit_bias=bias).status_code in (200, 400)
        running.settle()


# ------------------------------------------------------------------------------------------ bugs of the server


def bug(*_: Any) -> Any:
    raise ArithmeticError("on purpose")


def reported(caplog: pytest.LogCaptureFixture, request_id: str) -> list[dict[str, Any]]:
    """What the log says of a request, each line's fields; bugs with what was raised."""
    records = [record for record in caplog.records if getattr(record, "fields", {}).get("request_id") == request_id]
    return [record.fields | {"raised": record.exc_info and record.exc_info[0]} for record in records]


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
def test_a_bug_before_the_headers(
    path: str, served: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the framework finds the route or the server does. The connection, which uvicorn closes, is nobody else's."""
    monkeypatch.setattr(Renderer, "whole", bug)
    monkeypatch.setattr(Service, "in_pool", bug)
    with caplog.at_level("INFO", logger="slipstream.serve"):
        response = httpx2.post(served.url + path, json={"prompt": "once"}, headers={"x-request-id": "mine"})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "on purpose" not in response.text
        assert response.headers["x-request-id"] == "mine"
        served.wait_until(lambda: len(reported(caplog, "mine")) == 2)
    one, other = reported(caplog, "mine")
    assert one["raised"] is ArithmeticError
    assert other["status"] == 500
    monkeypatch.undo()
    assert served.post(COMPLETIONS, prompt="once", max_tokens=2).status_code == 200
    served.settle()


def test_a_bug_after_the_headers(
    served: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream ends as one that is not whole; no second answer begins."""
    monkeypatch.setattr(Renderer, "chunk", bug)
    before = served.metric("http_problems_total", status="500")
    body, own_id = {**LONG, "stream": True}, {"x-request-id": "mine"}
    with caplog.at_level("INFO", logger="slipstream.serve"):
        with httpx2.stream("POST", served.url + COMPLETIONS, json=body, headers=own_id) as response:
            assert (response.status_code, response.headers["x-request-id"]) == (200, "mine")
            with pytest.raises(httpx2.RemoteProtocolError):
                response.read()
        served.wait_until(lambda: len(reported(caplog, "mine")) == 2)
    one, other = reported(caplog, "mine")
    assert one["raised"] is ArithmeticError
    assert (other["status"], other["problem_status"]) == (200, 500)  # the first is that of the answer that began
    assert served.metric("http_problems_total", status="500") == before + 1
    monkeypatch.undo()
    assert served.post(COMPLETIONS, prompt="once", max_tokens=2).status_code == 200
    served.settle()


# ------------------------------------------------------------------------------- what the server needs of an LLM


def test_a_new_engine_over_the_same_weights(tiny_pair: Models) -> None:
    llm = make_llm(tiny_pair)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    answers, notes = llm.generate(["a", "b"], params), list(llm.notes)
    steps = llm.engine.totals.steps
    llm.restart()
    assert llm.engine.totals.steps == steps > 0
    assert llm.notes == notes
    assert [answer.token_ids for answer in llm.generate(["a", "b"], params)] == [answer.token_ids for answer in answers]
    assert llm.engine.totals.steps > steps
    assert_nothing_left(llm.engine)


def test_requests_are_checked_before_they_are_added(tiny_pair: Models) -> None:
    llm = make_llm(tiny_pair)
    requests = llm.prepare("abc", SamplingParams(n=3, seed=5))
    assert [request.index for request in requests] == [0, 1, 2]
    assert len({request.uid for request in requests}) == 3
    with pytest.raises(RequestError, match="max_model_len"):
        llm.prepare("x" * 300)
    with pytest.raises(RequestError, match="min_tokens"):
        llm.prepare("x", SamplingParams(min_tokens=1, stop_token_ids=tuple(range(250))))
    assert not llm.engine.has_work
    assert llm.room_for_answer(6) == llm.max_model_len - 6
    assert llm.room_for_answer(10**6) == 1
    small = make_llm(tiny_pair, kv_memory=1 << 15, max_num_seqs=1)
    assert small.room_for_answer(0) == small.engine.scheduler.pages.num_usable * 8 < small.max_model_len
    assert small.prepare("x", SamplingParams(max_tokens=small.room_for_answer(1)))


def test_whoever_waits_for_a_grammar_need_not(tiny_pair: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hostile ones take 20 s each, one after another: time runs meanwhile, and clients leave."""
    llm, may_go_on = make_llm(tiny_pair), threading.Event()

    def compile_slowly(*_: Any) -> Any:
        may_go_on.wait(30)
        raise RequestError("structured is too late")

    monkeypatch.setattr(llm.grammars, "compile", compile_slowly)
    fields = {"prompt": "x", "structured": {"regex": "a"}}
    with serving(llm, request_timeout_s=0.5) as running:
        try:
            for stream in (False, True):
                response = running.post(COMPLETIONS, **fields, stream=stream)
                assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
            running.service.options = dataclasses.replace(running.service.options, request_timeout_s=60)
            for lane in running.service.lanes.values():
                lane.options = running.service.options
            with pytest.raises(httpx2.TimeoutException):
                running.http.post(COMPLETIONS, json=fields, timeout=0.3)
            running.wait_until(lambda: running.service.num_open == 0)
            assert running.post(COMPLETIONS, prompt="x", max_tokens=3).status_code == 200
        finally:
            may_go_on.set()
        running.settle()
