"""The process in which grammars are compiled and tried, by the library xgrammar; both of its ends.

What strangers ask for may keep the library busy for hours, fill the memory or crash it, and nothing within a process
can end that. So it is tried in a child, which is killed when it does not answer in time; what went well there is
compiled once more by who asked (a big grammar takes milliseconds to compile, and a minute to be sent). One child serves
all LLMs of a process. The library, and torch with it, is imported at the first use.
"""

import atexit
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np

from slipstream.child import limit_memory, spawn
from slipstream.constraint import Constraint, allows, num_words
from slipstream.errors import ConfigError, EngineError, RequestError
from slipstream.plan import Int32s, Int64s
from slipstream.schema import as_compiled

MOST_COMPILE_SECONDS = 20.0  # for a grammar to be compiled and tried, on a machine that may be busy
MOST_PAUSE_SECONDS = 2.0  # of these for compiling alone: while that is done once more, others wait
MOST_START_SECONDS = 120.0  # for the child to import the library
MOST_MEMORY_BYTES = 1 << 32  # that the child may take on top of the library's own
MOST_WHITESPACE = 16  # characters between two parts of JSON: a model that likes blanks must get on
TRIED_TOKENS = 64  # of each walk
TRIED_AT_RANDOM = 4  # walks
TRIED_SECONDS = 0.5  # a walk's patience: less than an answer has
_CHARS_OF_LIMITED, _CHARS_OF_JSON = r"::= (([^\"\\\r\n]))", r"::= (([^\0-\x1f\"\\]))"  # as the library prints them
_CACHE_BYTES = 1 << 26  # of the library's own
_POLL_SECONDS = 0.05
_END_SECONDS = 5.0  # for a child that has closed its pipe to be gone

Ask = tuple[str, tuple[str, ...], tuple[int, ...]]  # a form, its texts, and the tokens that end an answer


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """pieces [V]: the bytes of each token, none of those that no text is made of."""

    pieces: tuple[bytes, ...]
    eos_token_ids: tuple[int, ...]

    def compiler(self) -> Any:
        """The library's."""
        xgrammar = library()
        info = xgrammar.TokenizerInfo(
            list(self.pieces), xgrammar.VocabType.RAW, vocab_size=len(self.pieces),
            stop_token_ids=list(self.eos_token_ids),
        )  # fmt: skip
        return xgrammar.GrammarCompiler(info, cache_limit_bytes=_CACHE_BYTES)


class Trials:
    """The parent's end. A child is started for the first grammar, and again after one that had to be killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # LLMs may be used by a thread each
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._sender: threading.Thread | None = None  # of the last question
        self._vocabulary: Vocabulary | None = None  # that the child has
        self._is_over = False

    def run(self, vocabulary: Vocabulary, ask: Ask, meanwhile: Callable[[], bool]) -> None:
        """RequestError, which says why, for a grammar that cannot be had.

        `meanwhile` is called while nothing has come back, and says whether it did something.
        """
        with self._lock:
            try:
                self._run(vocabulary, ask, meanwhile)
            except RequestError:
                raise
            except BaseException:  # an answer may be on its way, which nobody will read
                self.close()
                raise

    def _run(self, vocabulary: Vocabulary, ask: Ask, meanwhile: Callable[[], bool]) -> None:
        form = ask[0]
        for may_fail in (True, False):
            try:
                outcome = self._tried(vocabulary, ask, meanwhile)
                break
            except (EOFError, OSError):
                if not (self._was_killed() and may_fail):  # once it need not be this grammar's fault
                    raise RequestError(
                        f"structured.{form} is more than the library can compile: make it smaller"
                    ) from None
        if outcome is None:
            self.close()
            seconds = f"{MOST_COMPILE_SECONDS:g} s"
            raise RequestError(f"structured.{form} takes longer than {seconds} to compile and try: make it smaller")
        if outcome:
            raise RequestError(f"structured.{form} {outcome}")

    def _tried(self, vocabulary: Vocabulary, ask: Ask, meanwhile: Callable[[], bool]) -> Any:
        """What the child says; None where it says nothing in time. EOFError or OSError where it ends."""
        pipe = self._started(meanwhile)
        told = None if vocabulary is self._vocabulary else vocabulary
        # A vocabulary is more than a pipe holds, and a child that has been stopped reads nothing.
        self._sender = threading.Thread(target=_send, args=(pipe, (told, ask, MOST_COMPILE_SECONDS)), daemon=True)
        self._sender.start()
        self._vocabulary = vocabulary
        return _answer(pipe, MOST_COMPILE_SECONDS, meanwhile)

    def _started(self, meanwhile: Callable[[], bool]) -> Connection:
        """The pipe to a child that listens."""
        if self._pipe is not None and self._child is not None and self._child.poll() is None:
            return self._pipe
        for may_fail in (True, False):
            self.close()
            pipe, far_end = Pipe()
            with far_end:
                self._pipe, self._child = pipe, spawn(__name__, far_end.fileno())
            if self._is_over:
                self.close()
                raise EngineError("this process ends, and compiles no more grammars")
            try:
                if _answer(pipe, MOST_START_SECONDS, meanwhile) is not None:
                    return pipe
            except (EOFError, OSError):
                if may_fail and self._was_killed():
                    continue
            break
        raise EngineError("the process that compiles grammars did not start: see that `import xgrammar` works")

    def _was_killed(self) -> bool:
        """Whether it was others that ended the child, which has closed its end of the pipe."""
        assert self._child is not None
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(_END_SECONDS)
        was_killed = self._child.returncode in (-signal.SIGKILL, -signal.SIGTERM)
        self.close()
        return was_killed

    def end(self) -> None:
        """For good, whoever waits for a grammar: from any thread. Python waits for that thread before it ends."""
        self._is_over = True
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """Kill the child, if there is one."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        if self._sender is not None:
            self._sender.join()  # nobody is there to read what it has left
        if self._pipe is not None:
            self._pipe.close()
        self._child = self._pipe = self._sender = self._vocabulary = None


@cache
def shared_trials() -> Trials:
    """Of this process; its child ends with it."""
    trials = Trials()
    atexit.register(trials.close)
    return trials


def _send(pipe: Connection, message: object) -> None:
    with suppress(OSError):  # who waits for the answer finds that the child is gone
        pipe.send(message)


def _answer(pipe: Connection, seconds: float, meanwhile: Callable[[], bool]) -> Any:
    """What comes back; None where nothing does in time."""
    end = time.monotonic() + seconds
    busy = False
    while not pipe.poll(0 if busy else _POLL_SECONDS):
        if time.monotonic() > end:
            return None
        busy = meanwhile()
    return pipe.recv()


# ---------------------------------------------------------------------------------------------------- the child's end


def serve(pipe: Connection) -> None:
    """Compile what is asked for until the parent is gone."""
    library()
    limit_memory(MOST_MEMORY_BYTES)
    pipe.send("ready")
    while True:
        try:
            vocabulary, ask, seconds = pipe.recv()
        except EOFError:
            return
        signal.alarm(int(seconds) + 5)  # an orphan ends too: nothing catches this signal
        if vocabulary is not None:
            known = vocabulary
            lengths_np = np.array([len(piece) for piece in known.pieces])
            compiler = known.compiler()
        pipe.send(_outcome(compiler, lengths_np, ask))
        signal.alarm(0)


def _outcome(compiler: Any, lengths_np: Int64s, ask: Ask) -> str:
    """Why there is no such grammar; empty where there is one."""
    begun = time.monotonic()
    try:
        compiled = compiled_by(compiler, ask)
        if time.monotonic() - begun > MOST_PAUSE_SECONDS:
            return f"takes longer than {MOST_PAUSE_SECONDS:g} s to compile: make it smaller"
        return _try(compiled, ask[2], lengths_np) or ""
    except Exception as error:  # the library raises RuntimeError for whatever it cannot read
        said = str(error).strip()
        return f"cannot be compiled: {said.partition(': ')[2] or said or repr(error)}"


def _try(compiled: Any, ends: tuple[int, ...], lengths_np: Int64s) -> str | None:
    """Walk through the grammar, by ways that make it expensive; why it is refused."""
    draw = random.Random(0)
    ways: list[Callable[[Int64s], int]] = [
        lambda allowed_np: int(lengths_np[allowed_np].argmax()),
        lambda allowed_np: int(lengths_np[allowed_np].argmin()),
        *[lambda allowed_np: draw.randrange(len(allowed_np))] * TRIED_AT_RANDOM,
    ]
    mask_np = np.empty((1, num_words(len(lengths_np))), np.int32)
    for choose in ways:
        constraint = Constraint(XMatcher(compiled, ends), frozenset(ends), len(lengths_np), patience=TRIED_SECONDS)
        for step in range(TRIED_TOKENS):
            reason = constraint.fill([], mask_np)
            if reason and (step == 0 or constraint.failed):
                return f"cannot be used: {reason}"
            allowed_np = _allowed(mask_np, ends, len(lengths_np))
            if not len(allowed_np):
                break
            constraint.read([int(allowed_np[choose(allowed_np)])])
    return None


def _allowed(mask_np: Int32s, ends: tuple[int, ...], vocab_size: int) -> Int64s:
    bits = np.unpackbits(mask_np.view(np.uint8)[0], bitorder="little")[:vocab_size]
    bits[list(ends)] = 0
    return bits.nonzero()[0]


# ------------------------------------------------------------------------------------------- the library, at both ends


class XMatcher:
    """A `Matcher` by the library's. ends: below V."""

    def __init__(self, compiled: Any, ends: Sequence[int]) -> None:
        self._matcher = library().GrammarMatcher(compiled, override_stop_tokens=sorted(ends))

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def look_ahead(self, drafts: Sequence[int], masks_np: Int32s) -> None:
        """Drafts are a tree without branches to the library; a node that is forbidden gets an empty mask from it."""
        follower, sibling = _chain(len(drafts) + 1)
        self._matcher.traverse_draft_tree(follower, sibling, np.array([0, *drafts]), masks_np)
        for place, draft in enumerate(drafts):
            if not allows(masks_np[place], draft):
                masks_np[place + 1] = -1
                break


@lru_cache(maxsize=64)
def _chain(count: int) -> tuple[Int64s, Int64s]:
    """Of each of so many nodes the one that follows, and the one beside it; -1: none."""
    return np.append(np.arange(1, count), -1), np.full(count, -1)


def _compile_schema(compiler: Any, texts: tuple[str, ...]) -> Any:
    """Strings of a limited length may hold control characters in the library's grammar, and not in JSON."""
    text = json.dumps(as_compiled(json.loads(texts[0])), ensure_ascii=False)
    if not ('"minLength"' in text or '"maxLength"' in text):
        return compiler.compile_json_schema(text, max_whitespace_cnt=MOST_WHITESPACE)
    grammar = str(library().Grammar.from_json_schema(text, max_whitespace_cnt=MOST_WHITESPACE))
    return compiler.compile_grammar(grammar.replace(_CHARS_OF_LIMITED, _CHARS_OF_JSON))


def _compile_choice(compiler: Any, texts: tuple[str, ...]) -> Any:
    quoted = " | ".join('"' + "".join(map(_quoted, text)) + '"' for text in texts)
    return compiler.compile_grammar(f"root ::= {quoted}")


def _quoted(char: str) -> str:
    """A character within quotes of EBNF."""
    return char if char.isprintable() and char not in '"\\' else f"\\U{ord(char):08x}"


_COMPILE: dict[str, Callable[[Any, tuple[str, ...]], Any]] = {
    "json": _compile_schema,
    "regex": lambda compiler, texts: compiler.compile_regex(texts[0]),
    "grammar": lambda compiler, texts: compiler.compile_grammar(texts[0]),
    "choice": _compile_choice,
}


def compiled_by(compiler: Any, ask: Ask) -> Any:
    """The library's grammar; it raises RuntimeError where it cannot make one."""
    form, texts, _ = ask
    return _COMPILE[form](compiler, texts)


def library() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise _missing(error) from error
    return xgrammar


def require_library() -> None:
    """ConfigError where it is not installed. It is not imported."""
    if find_spec("xgrammar") is None:
        raise _missing("it is not installed")


def _missing(why: object) -> ConfigError:
    return ConfigError(f"structured output needs the library xgrammar ({why}): pip install 'slipstream[structured]'")


def main() -> NoReturn:
    serve(Connection(int(sys.argv[1])))
    sys.exit(0)


if __name__ == "__main__":
    main()
