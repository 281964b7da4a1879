"""Chat templates from strangers: no attribute of Python's, no end of time, of memory or of text, and no process left."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from slipstream.errors import CheckpointError, RequestError, SlipstreamError
from slipstream.models import template
from slipstream.models.template import Renderer, shared_renderer

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    made = Renderer()
    yield made
    made.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MOST_SECONDS", 0.4)


def render(renderer: Renderer, text: str, **values: Any) -> str:
    return renderer.render(text, {"messages": MESSAGES, **values}, "the model")


def test_a_template_makes_a_text(renderer: Renderer) -> None:
    text = "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}{{ x }}{% endfor %}"
    assert render(renderer, text, x="\ud800 é 🙂") == "user: hello\ud800 é 🙂"
    began = time.perf_counter()
    for _ in range(100):
        render(renderer, text, x=1)
    assert (time.perf_counter() - began) / 100 < 0.01  # a tenth of a millisecond where nobody else is


WITHOUT_END = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "text of loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "a power": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "a power of a value": "{{ n ** (n ** (n ** n)) }}",
}
TOO_MUCH = {
    "a long text": "{{ 'x' * 9999999999 }}",
    "a long text of a value": "{{ messages[0].content * 999999999999 }}",
    "a wide format": "{{ '%9999999999d' % 1 }}",
    "a wide filter": "{{ 'x' | center(9999999999) }}",
    "a wide method": "{{ 'x'.ljust(9999999999) }}",
    "a text of texts": "{{ ('x' * 9999999).replace('x', 'x' * 9999999) }}",
    "a text that doubles": (
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"
    ),
    "a list that doubles": (
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s | length }}"
    ),
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "blocks in blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
}
REFUSED = {
    "a class": "{{ ''.__class__.__mro__ }}",
    "a frame": "{{ messages.__init__.__globals__ }}",
    "globals of a function": "{{ raise_exception.__globals__.os }}",
    "builtins": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "a format of attributes": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}",
    "a wide range": "{{ range(999999999) | list }}",
    "a change of messages": "{{ messages.append(1) }}",
    "division": "{{ 1 / 0 }}",
    "an unknown filter": "{{ messages | eval }}",
}


@pytest.mark.parametrize("case", WITHOUT_END)
def test_what_does_not_end_is_ended(case: str, renderer: Renderer, impatient: None) -> None:
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"the model: the chat template .*; mend it, or give raw text"):
        render(renderer, WITHOUT_END[case], n=9)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("case", TOO_MUCH)
def test_what_takes_too_much_is_refused(case: str, renderer: Renderer) -> None:
    began = time.monotonic()
    with pytest.raises(SlipstreamError, match="chat template"):
        render(renderer, TOO_MUCH[case])
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_sandbox_does_not_have_is_refused(case: str, renderer: Renderer) -> None:
    with pytest.raises(SlipstreamError, match="the model") as caught:
        render(renderer, REFUSED[case])
    assert "root:" not in str(caught.value)


def test_a_reason_is_short_whatever_a_template_says(renderer: Renderer) -> None:
    with pytest.raises(RequestError, match="refuses these messages") as caught:
        render(renderer, "{{ raise_exception('\x1b[2J' * 99999) }}")
    assert len(str(caught.value)) < 2500
    assert str(caught.value).isprintable()


def test_a_child_that_was_killed_is_replaced_and_threads_take_turns(renderer: Renderer) -> None:
    assert render(renderer, "a") == "a"
    assert renderer._child is not None
    renderer._child.kill()
    renderer._child.wait()
    assert render(renderer, "b") == "b"
    found: list[str] = []
    threads = [Thread(target=lambda n=n: found.append(render(renderer, "{{ n }}", n=n))) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(int, found)) == list(range(16))


def test_values_that_cannot_be_sent_are_refused(renderer: Renderer) -> None:
    with pytest.raises(RequestError, match="must be texts, numbers, lists and dicts"):
        render(renderer, "x", f=lambda: 1)
    assert render(renderer, "{{ t }} {{ n }}", t=(1, 2), n=None) == "(1, 2) None"


def test_a_forked_process_has_a_child_of_its_own() -> None:
    assert shared_renderer().render("a", {}, "x") == "a"
    pid = os.fork()
    if pid == 0:  # in the fork: nothing of pytest's may run
        try:
            ok = shared_renderer().render("b", {}, "x") == "b"
            shared_renderer().close()
        finally:
            os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert shared_renderer().render("c", {}, "x") == "c"


def test_modules_in_the_current_folder_are_not_imported(tmp_path: Path) -> None:
    """A model's folder may be where the command is run, and may have a file called json.py."""
    for name in ("json", "jinja2", "pickle", "threading"):
        (tmp_path / f"{name}.py").write_text("import os; open(os.environ['CANARY'], 'w').close(); raise SystemExit")
    code = "from slipstream.models.template import shared_renderer; print(shared_renderer().render('{{ 1 }}', {}, 'x'))"
    environment = os.environ | {"CANARY": str(tmp_path / "canary"), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"
    assert not (tmp_path / "canary").exists()


def test_nothing_is_left_when_the_process_ends() -> None:
    code = "from slipstream.models.template import shared_renderer as r;r().render('a', {}, 'x'); print(r()._child.pid)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not Path(f"/proc/{done.stdout.strip()}").exists()
