"""Chat templates, run where they can do no harm: in a sandbox, and the sandbox in a process that can be killed.

A template is a program that comes with a model. The sandbox keeps it from Python's own attributes and from what it is
given; a loop without end and a text without bounds are ended from outside, after seconds and within a fixed memory. One
process serves all tokenizers of ours, and starts at the first conversation. Called by `tokenizer`. No torch.
"""

import atexit
import functools
import json
import pickle
import signal
import sys
import threading
from collections.abc import Mapping
from datetime import datetime
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from subprocess import Popen
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.child import limit_memory, spawn
from slipstream.errors import CheckpointError, EngineError, RequestError

MOST_SECONDS = 4.0  # for one conversation, which takes a small part of a millisecond
MOST_START_SECONDS = 60.0
MOST_MEMORY_BYTES = 1 << 29  # that the child may take on top of its own
MOST_CHARACTERS = 1 << 25  # of a prompt: no context holds as many
_MOST_REASON = 1000  # characters of what a template says about messages that it refuses

# What comes back, as the first byte: a text, or what went wrong.
_TEXT, _MALFORMED, _REFUSED, _TOO_MUCH = b"t", b"m", b"r", b"x"


class Renderer:
    """The parent's end. For any threads, which take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def render(self, template: str, values: Mapping[str, Any], source: str) -> str:
        """The text that a template makes. `source` is what messages call the model.

        CheckpointError where the template is at fault, RequestError where it refuses the values.
        """
        try:
            job = pickle.dumps((template, dict(values)))
        except Exception as error:  # whatever an object of the caller's raises
            raise RequestError(
                f"messages and variables of a chat must be texts, numbers, lists and dicts: {error}"
            ) from error
        with self._lock:
            try:
                kind, text = self._answer(job, source)
            except BaseException:  # an answer may be on its way, which nobody will read
                self.close()
                raise
        if kind == _TEXT:
            return text
        if kind == _MALFORMED:
            raise CheckpointError(f"{source}: the chat template is malformed: {text}")
        if kind == _TOO_MUCH:
            raise CheckpointError(f"{source}: the chat template {text}; mend it, or give raw text instead of messages")
        raise RequestError(f"the chat template of {source} refuses these messages: {text}")

    def _answer(self, job: bytes, source: str) -> tuple[bytes, str]:
        pipe = self._sent(job)
        if not pipe.poll(MOST_SECONDS):
            self.close()
            return _TOO_MUCH, f"takes longer than {MOST_SECONDS:g} s"
        try:
            raw = pipe.recv_bytes()
        except (EOFError, OSError):
            self.close()
            return _TOO_MUCH, "ends the process that renders it"
        return raw[:1], raw[1:].decode("utf-8", "surrogatepass")

    def _sent(self, job: bytes) -> Connection:
        """The pipe that the answer will come through."""
        pipe = self._started()
        try:
            pipe.send_bytes(job)
        except OSError:  # the child was killed a moment ago
            self.close()
            pipe = self._started()
            pipe.send_bytes(job)
        return pipe

    def _started(self) -> Connection:
        """The pipe to a child that listens."""
        if self._pipe is not None and self._child is not None and self._child.poll() is None:
            return self._pipe
        self.close()
        self._pipe, far_end = Pipe()
        with far_end:
            self._child = spawn(__name__, far_end.fileno())
        try:
            ready = self._pipe.poll(MOST_START_SECONDS) and self._pipe.recv_bytes()
        except (EOFError, OSError):
            ready = False
        if not ready:
            raise EngineError(
                f"the process that renders chat templates did not start: see `{sys.executable} -m {__name__} 0`"
            )
        return self._pipe

    def close(self) -> None:
        """Kill the child, if there is one."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        if self._pipe is not None:
            self._pipe.close()
        self._child = self._pipe = None


@functools.cache
def shared_renderer() -> Renderer:
    """Of this process; its child ends with it."""
    renderer = Renderer()
    atexit.register(renderer.close)
    return renderer


# ---------------------------------------------------------------------------------------------------- the child's end


def serve(pipe: Connection) -> None:
    """Render what is asked for until the parent is gone."""
    limit_memory(MOST_MEMORY_BYTES)
    pipe.send_bytes(b"ready")
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            return
        signal.alarm(int(MOST_SECONDS) + 5)  # an orphan ends too: nothing catches this signal
        kind, text = _outcome(job)
        pipe.send_bytes(kind + text.encode("utf-8", "surrogatepass"))
        signal.alarm(0)


def _outcome(job: bytes) -> tuple[bytes, str]:
    try:
        template, values = pickle.loads(job)
    except Exception as error:  # an object of a class that only the caller's program has
        return _REFUSED, f"a value cannot be read elsewhere: {error}"[:_MOST_REASON]
    return rendered(template, values)


def rendered(template: str, values: Mapping[str, Any]) -> tuple[bytes, str]:
    """A text, or what is wrong."""
    try:
        text = _template(template).render(values)
    except jinja2.TemplateSyntaxError as error:
        return _MALFORMED, str(error)[:_MOST_REASON]
    except MemoryError:
        return _TOO_MUCH, f"takes more than {MOST_MEMORY_BYTES >> 20} MB of memory"
    except RecursionError:
        return _TOO_MUCH, "is nested too deeply, or calls itself without end"
    except Exception as error:  # a template may raise whatever its expressions do
        return _REFUSED, (str(error) or repr(error))[:_MOST_REASON]
    if len(text) > MOST_CHARACTERS:
        return _TOO_MUCH, f"makes a text of {len(text)} characters, more than any context holds"
    return _TEXT, text


@functools.lru_cache(maxsize=16)
def _template(text: str) -> jinja2.Template:
    """Compiled once: that takes much longer than rendering a conversation."""
    return _environment().from_string(text)


def _environment() -> ImmutableSandboxedEnvironment:
    """Where chat templates run: files from strangers, so no attribute of Python's own and no change to its input."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def main() -> NoReturn:
    serve(Connection(int(sys.argv[1])))
    sys.exit(0)


if __name__ == "__main__":
    main()
