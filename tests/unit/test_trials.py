"""The process that grammars are tried in may end, be ended or stop at any time: doubles of it, without the library."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream import compiler
from slipstream.child import spawn
from slipstream.compiler import Trials, Vocabulary
from slipstream.errors import EngineError, RequestError

SCRIPT = """
import os, signal, sys, time
from multiprocessing.connection import Connection
pipe, does = Connection(int(sys.argv[1])), sys.argv[2]
if does == "killed early":
    os.kill(os.getpid(), signal.SIGKILL)
if does == "broken":
    sys.exit(1)
pipe.send("ready")
if does == "stopped":
    time.sleep(60)
pipe.recv_bytes()
if does in ("killed", "crashed"):
    os.kill(os.getpid(), signal.SIGKILL if does == "killed" else signal.SIGSEGV)
pipe.send("")
pipe.recv_bytes()
"""
SMALL, BIG = (Vocabulary(tuple([b"a"] * count), (0,)) for count in (1, 1_000_000))
ASK = ("regex", ("a",), (0,))


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[tuple[Trials, list[str]]]:
    """Children that do what the list says, one after the other."""
    todo = list(request.param)

    def spawn_double(module: str, fd: int) -> Any:
        return subprocess.Popen([sys.executable, "-S", "-c", SCRIPT, str(fd), todo.pop(0)], pass_fds=(fd,))

    monkeypatch.setattr(compiler, "spawn", spawn_double)
    monkeypatch.setattr(compiler, "MOST_COMPILE_SECONDS", 1.0)
    made = Trials()
    yield made, todo
    made.close()


def run(trials: Trials, vocabulary: Vocabulary = SMALL) -> None:
    trials.run(vocabulary, ASK, lambda: False)


@pytest.mark.parametrize("trials", [["answers"], ["killed", "answers"], ["killed early", "answers"]], indirect=True)
def test_a_child_that_others_ended_is_no_refusal(trials: tuple[Trials, list[str]]) -> None:
    run(trials[0])
    assert trials[1] == []


@pytest.mark.parametrize("trials", [["answers", "answers"]], indirect=True)
def test_a_child_that_was_killed_while_it_waited_is_replaced(trials: tuple[Trials, list[str]]) -> None:
    for _ in range(2):
        run(trials[0])
        assert trials[0]._child is not None
        trials[0]._child.kill()  # and not waited for: it may still look alive
    assert trials[1] == []


@pytest.mark.parametrize("trials", [["crashed", "not reached"], ["killed", "killed"]], indirect=True)
def test_what_ends_the_child_is_refused(trials: tuple[Trials, list[str]]) -> None:
    with pytest.raises(RequestError, match="more than the library can compile"):
        run(trials[0])
    assert trials[1] in ([], ["not reached"])


@pytest.mark.parametrize("trials", [["stopped"]], indirect=True)
@pytest.mark.parametrize("vocabulary", [SMALL, BIG])
def test_a_child_that_does_not_read_holds_nobody(trials: tuple[Trials, list[str]], vocabulary: Vocabulary) -> None:
    """Not even with a vocabulary that the pipe does not hold."""
    with pytest.raises(RequestError, match="takes longer than 1 s"):
        run(trials[0], vocabulary)


@pytest.mark.parametrize("trials", [["broken"], ["killed early", "killed early"]], indirect=True)
def test_a_child_that_does_not_start_is_an_error(trials: tuple[Trials, list[str]]) -> None:
    with pytest.raises(EngineError, match="did not start"):
        run(trials[0])
    assert trials[1] == []


def test_the_child_imports_nothing_from_the_working_directory(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be anything: a script of any name."""
    (tmp_path / "this.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert spawn("this", 0).wait(20) == 0  # any module that is quick to start
