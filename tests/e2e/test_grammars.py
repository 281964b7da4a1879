"""What the library makes of a form, on vocabularies small enough to walk; what it cannot compile is refused in time."""

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import SamplingParams, StructuredOutput, compiler
from slipstream.compiler import Trials, XMatcher, shared_trials
from slipstream.constraint import Constraint, allows, num_words
from slipstream.errors import ConfigError, RequestError
from slipstream.grammars import XGrammars
from slipstream.testing import assert_nothing_left, tiny_tokenizer
from tests.e2e.engines import VOCAB, ScriptedDrafter, greedy, make_llm, plain_answers, prompts_of
from tests.e2e.test_endings import PIECES, byte_tokenizer

EOS = 40
# Beyond what `byte_tokenizer` has, so that JSON and the words below can be written in several ways.
ENDS = frozenset([EOS])


class Pieces:
    """A tokenizer that is a list of bytes."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = [*pieces, *[b""] * (EOS + 1 - len(pieces))]
        self.special_ids = frozenset([EOS])
        self.eos_token_ids = (EOS,)

    def pieces(self, count: int) -> list[bytes]:
        return [*self._pieces, *[b""] * count][:count]


TOKENS = (
    b"{", b"}", b'"', b"a", b'":', b"1", b"2", b",", b" ", b"no", b"n", b"o", b"yes", b"ye", b"s", b"\xc3", b"\xa9", b"-",
    b'{"a', b'{"a":', b"1}", b"12", b"ab", b"b", b"\n", b"s!", b"[", b"]",
)  # fmt: skip


def made(*pieces: bytes) -> XGrammars:
    return XGrammars(Pieces(*(pieces or TOKENS)), EOS + 1, ENDS)  # type: ignore[arg-type]


def made_for_tiny_models() -> XGrammars:
    """The second of their tokens is the end."""
    tokenizer = Pieces(b"", b"", *TOKENS)
    tokenizer.special_ids = frozenset([0, 1])
    return XGrammars(tokenizer, VOCAB, frozenset([1]))  # type: ignore[arg-type]


@cache
def library() -> XGrammars:
    return made()


def answers(asked: StructuredOutput, longest: int = 4) -> set[bytes]:
    """Every complete text of at most so many tokens, by walking the masks."""
    make, found = made().compile(asked, ENDS), set()

    def walk(output: list[int]) -> None:
        constraint, mask = make(), np.zeros((1, num_words(EOS + 1)), np.int32)
        constraint.read(output)
        constraint.fill([], mask)
        for token in np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: EOS + 1]).tolist():
            if token == EOS:
                found.add(b"".join(TOKENS[each] for each in output))
            elif len(output) < longest:
                walk([*output, token])

    walk([])
    return found


def test_a_choice_is_one_of_the_texts():
    assert answers(StructuredOutput(choice=("yes", "no"))) == {b"yes", b"no"}
    assert answers(StructuredOutput(choice=("é", 'a"', "\n", "-"))) == {"é".encode(), b'a"', b"\n", b"-"}


def test_an_expression_is_the_whole_text():
    pattern = re.compile("[ab]{1,3}(1|é)?")
    texts = {b"".join(parts) for count in range(5) for parts in product(TOKENS, repeat=count) if count < 4}
    expected = {text for text in texts if (shown := text.decode(errors="replace")) and pattern.fullmatch(shown)}
    assert answers(StructuredOutput(regex=pattern.pattern), 3) == expected
    assert len(expected) > 20


def test_a_grammar_may_go_in_circles():
    found = answers(StructuredOutput(grammar='root ::= "a" | "[" root "]"'), 5)
    assert found == {b"a", b"[a]", b"[[a]]"}


def test_json_follows_its_schema():
    schema = {"type": "object", "properties": {"a": {"enum": [1, 12]}}, "required": ["a"]}
    found = answers(StructuredOutput(json=schema), 4)
    assert {json.dumps(json.loads(text)) for text in found} == {'{"a": 1}', '{"a": 12}'}
    assert any(b" " in text for text in found) and any(b" " not in text for text in found)


def test_blanks_between_parts_of_json_come_to_an_end():
    constraint = made().compile(StructuredOutput(json=True), ENDS)()
    constraint.read([0])
    mask, blank = np.zeros((1, num_words(EOS + 1)), np.int32), TOKENS.index(b" ")
    for count in range(compiler.MOST_WHITESPACE + 1):
        constraint.fill([], mask)
        allowed = mask[0, blank // 32] >> blank % 32 & 1
        if not allowed:
            assert count == compiler.MOST_WHITESPACE
            return
        constraint.read([blank])
    pytest.fail("there may be more")


def test_special_stop_ids_end_a_complete_answer_too():
    tokenizer = Pieces(*TOKENS, b"<end>")
    tokenizer.special_ids = frozenset([28, EOS])
    constraint = XGrammars(tokenizer, EOS + 1, ENDS).compile(StructuredOutput(regex="(ab)+"), frozenset([28, EOS]))()  # type: ignore[arg-type]
    mask = np.zeros((2, num_words(EOS + 1)), np.int32)
    constraint.fill([22], mask)
    bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, : EOS + 1]
    assert [np.flatnonzero(row).tolist() for row in bits] == [[3, 22], [3, 22, 28, EOS]]


def test_a_stop_id_that_writes_text_is_refused():
    """It would end the answer anywhere, and stand in it."""
    with pytest.raises(RequestError, match="stop_token_ids has 12, which writes 'yes'"):
        library().compile(StructuredOutput(choice=("yes", "no")), frozenset([12, EOS]))


def test_ends_beyond_the_vocabulary_are_left_out():
    constraint = library().compile(StructuredOutput(regex="a"), frozenset([EOS, 10**6]))()
    mask = np.zeros((2, num_words(EOS + 1)), np.int32)
    constraint.fill([3], mask)
    assert allows(mask[1], EOS) and not allows(mask[0], EOS)


def test_what_was_compiled_is_not_compiled_again(monkeypatch):
    maker, calls = made(), []
    run = Trials.run
    monkeypatch.setattr(Trials, "run", lambda *args: calls.append(1) or run(*args))
    for after in (None, "a", "b", None):
        maker.compile(StructuredOutput(regex="ab*", after=after), ENDS)
    assert len(calls) == 1


def test_special_tokens_are_no_text():
    tokenizer = Pieces(b"a", b"<s>", b"<", b"s>")
    tokenizer.special_ids = frozenset([1, EOS])
    constraint = XGrammars(tokenizer, EOS + 1, ENDS).compile(StructuredOutput(regex="<s>"), ENDS)()  # type: ignore[arg-type]
    mask = np.zeros((1, num_words(EOS + 1)), np.int32)
    constraint.fill([], mask)
    assert np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: EOS + 1]).tolist() == [2]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["[ab]{2,6}", "(a|ab|\\[b\\])*1", "(yes|no)(, (yes|no)s?)*", "a"]))
def test_looking_ahead_is_going_there_and_back(seed, regex):
    """Masks of a block are those that the library gives token by token, and the place has not moved."""
    make, draw = library().compile(StructuredOutput(regex=regex), ENDS), random.Random(seed)
    constraint, output = make(), []

    def mask_after(tokens):
        there, mask = make(), np.zeros((1, num_words(EOS + 1)), np.int32)
        there.read(tokens)
        there.fill([], mask)
        return mask[0]

    for _ in range(4):
        drafts, masks = [], np.zeros((5, num_words(EOS + 1)), np.int32)
        while len(drafts) < 4:  # mostly what is allowed
            likely = [token for token in range(EOS) if allows(mask_after([*output, *drafts]), token)]
            if not likely or draw.random() < 0.2:
                break
            drafts.append(draw.choice(likely))
        block = [*drafts, *(draw.randrange(EOS + 1) for _ in range(4 - len(drafts)))]
        constraint.fill(block, masks)
        for place in range(5):
            before = [*output, *block[:place]]
            reached = EOS not in block[:place] and all(
                allows(mask_after(before[:k]), before[k]) for k in range(len(output), len(before))
            )
            assert masks[place].tolist() == (mask_after(before).tolist() if reached else [-1] * masks.shape[1])
        output += drafts[:2]
        constraint.read(drafts[:2])


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "json cannot be compiled: .*Invalid range"),
        ({"json": {"$ref": "#"}}, r"json cannot be compiled: .*Circular \$ref"),
        ({"json": {"properties": {"a": False}}}, "json cannot be compiled: .*cannot accept any value"),
        ({"regex": "(a"}, "regex cannot be compiled: .*parenthesis"),
        ({"regex": "(?=a)b"}, "regex cannot be compiled: .*Lookahead"),
        ({"regex": r"(a)\1"}, "regex cannot be compiled: .*Backreference"),
        ({"regex": "(" * 3000 + "a" + ")*" * 3000}, "regex cannot be compiled: .*[Nn]est"),
        ({"grammar": "root ::= foo"}, "grammar cannot be compiled: .*foo"),
        ({"grammar": 'a ::= "b"'}, "grammar cannot be compiled: .*root"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_before_it_is_queued(fields, says):
    llm = make_llm("off")
    llm.grammars = made_for_tiny_models()
    asked = SamplingParams(structured=StructuredOutput(**fields))
    prompts = prompts_of(4, 5)
    stream = llm.stream(prompts[0], greedy(8))
    chunks = [next(stream)]
    with pytest.raises(RequestError, match=rf"structured\.{says}"):
        llm.generate(prompts, [greedy(4), asked])
    assert sum((chunk.token_ids for chunk in [*chunks, *stream]), ()) == plain_answers(prompts, greedy(8))[0]
    assert_nothing_left(llm.engine)


def test_a_tokenizer_of_words_is_refused():
    llm = make_llm("off")
    with pytest.raises(RequestError, match="tiny has a tokenizer whose tokens are not made of bytes"):
        llm.generate(prompts_of(4), SamplingParams(structured=StructuredOutput(regex="a")))


def test_a_model_without_an_end_is_refused():
    maker = XGrammars(tiny_tokenizer(), 64, frozenset())
    with pytest.raises(RequestError, match="needs a token that ends the answer"):
        maker.compile(StructuredOutput(regex="a"), frozenset())


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ConfigError, match=r"pip install 'slipstream\[structured\]'"):
        made().compile(StructuredOutput(regex="a"), ENDS)


BOMB = StructuredOutput(  # minutes, and gigabytes
    json={"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1000)}, "minProperties": 500}
)


@pytest.fixture
def impatient(monkeypatch):
    """A running child, and little time for the next grammar."""
    library().compile(StructuredOutput(regex="a"), ENDS)
    monkeypatch.setattr(compiler, "MOST_COMPILE_SECONDS", 1.5)


def test_a_grammar_that_explodes_is_refused_and_that_is_remembered(impatient):
    maker, child = made(), shared_trials()._child
    for most_s in (4.0, 0.1):
        begun = time.perf_counter()
        with pytest.raises(RequestError, match=r"structured\.json takes longer than 1\.5 s to compile"):
            maker.compile(BOMB, ENDS)
        assert time.perf_counter() - begun < most_s
    assert child is not None and child.poll() is not None, "what explodes goes on"
    assert [thread.name for thread in threading.enumerate() if "grammar" in thread.name] == []
    maker.compile(StructuredOutput(regex="ab"), ENDS)


def test_others_go_on_while_a_grammar_is_compiled(impatient):
    llm = make_llm("off")
    llm.grammars = made_for_tiny_models()
    prompts = prompts_of(4, 5)
    stream = llm.stream(prompts[0], greedy(40))
    chunks = [next(stream)]
    with pytest.raises(RequestError, match="takes longer"):
        llm.generate(prompts[1:], SamplingParams(structured=BOMB))
    assert not llm.engine.requests, "the stream's request has run to its end meanwhile"
    assert sum((chunk.token_ids for chunk in [*chunks, *stream]), ()) == plain_answers(prompts, greedy(40))[0]
    assert_nothing_left(llm.engine)


def test_who_prepares_a_request_beside_the_engine_takes_no_step(impatient):
    """A server does it in another thread than the one that drives the engine."""
    llm = make_llm("off")
    llm.grammars = made_for_tiny_models()
    stream = llm.stream(prompts_of(4)[0], greedy(40))
    next(stream)
    num_steps = llm.engine.num_decode_steps
    with pytest.raises(RequestError, match="takes longer"):
        llm.prepare(prompts_of(5)[0], SamplingParams(structured=BOMB))
    assert llm.engine.num_decode_steps == num_steps
    stream.close()


def test_an_interrupt_while_a_grammar_is_compiled_leaves_no_answer_behind():
    def interrupt() -> bool:
        raise KeyboardInterrupt

    maker = made()
    with pytest.raises(KeyboardInterrupt):
        maker.compile(BOMB, ENDS, interrupt)
    assert answers(StructuredOutput(choice=("yes", "no"))) == {b"yes", b"no"}


AMBIGUOUS = ['root ::= s\ns ::= s s | s s s | "a"', 'root ::= s\ns ::= s s | "a" | "b" | ""',
             'root ::= (a? b? c? d?)*\na ::= "a"* b\nb ::= "a"* c\nc ::= "a"* d\nd ::= "a"*']  # fmt: skip


@pytest.mark.parametrize("grammar", AMBIGUOUS)
def test_an_ambiguous_grammar_costs_others_little(grammar):
    """It is refused when it is tried, or ended when it gets slow: every step before that is a short one."""
    maker = made(*TOKENS, b"a" * 4, b"a" * 8, b"a" * 6, b"aaa")
    try:
        make = maker.compile(StructuredOutput(grammar=grammar), ENDS)
    except RequestError as error:
        reason = str(error)
    else:
        reason = slow_answer(make())
    assert "its grammar takes too long" in reason


def slow_answer(constraint: Constraint) -> str:
    mask, spent = np.zeros((1, num_words(EOS + 1)), np.int32), 0.0
    for _ in range(300):
        begun = time.thread_time()
        constraint.read([29])
        reason = constraint.fill([], mask)
        took = time.thread_time() - begun
        spent += took
        assert took < 3.0
        if reason:
            return reason
    pytest.fail(f"it took {spent:.1f} s")


def test_a_matcher_that_fails_ends_its_request_alone(monkeypatch):
    prompts, calls = prompts_of(4, 5), []
    plain = plain_answers(prompts, greedy(20))
    llm = make_llm("lag", ScriptedDrafter([[*p, *a] for p, a in zip(prompts, plain, strict=True)]))
    llm.grammars = made_for_tiny_models()

    def fails(self, drafts, masks_np):
        calls.append(1)
        raise RuntimeError("the library is confused")

    monkeypatch.setattr(XMatcher, "look_ahead", fails)
    params = [greedy(20), SamplingParams(structured=StructuredOutput(regex="[a-z]*"), max_tokens=20, temperature=0.0)]
    free, bound = llm.generate(prompts, params)
    assert calls and free.token_ids == plain[0]
    assert bound.finish_reason == "error" and bound.error == "its grammar failed: the library is confused"
    assert_nothing_left(llm.engine)


LEAVES = """
import sys
from tests.e2e.test_grammars import BOMB, ENDS, made
from slipstream import StructuredOutput, compiler
from slipstream.errors import RequestError
compiler.MOST_COMPILE_SECONDS = 1.5
maker = made()
for asked in (BOMB, StructuredOutput(regex="a")):
    try:
        maker.compile(asked, ENDS)
    except RequestError as error:
        print(error, flush=True)
print("child", compiler.shared_trials()._child.pid, flush=True)
"""


@pytest.mark.slow
def test_nothing_is_left_when_the_process_ends():
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done
    assert "takes longer than" in done.stdout
    pid = int(done.stdout.split("child ")[1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("form", ["regex", "grammar"])
def test_what_crashes_the_library_is_refused(form):
    """As thirty thousand parentheses do to its parser, where it does not count them."""
    text = "(" * 30000 + ('"a"' if form == "grammar" else "a") + ")" * 30000
    with pytest.raises(RequestError, match=rf"structured\.{form} (cannot|is more|takes longer)"):
        made().compile(StructuredOutput(**{form: text}), ENDS)


def test_a_grammar_that_no_token_begins_is_refused():
    with pytest.raises(RequestError, match="cannot be used: no token of the vocabulary"):
        made().compile(StructuredOutput(regex="q"), ENDS)


def test_pieces_are_the_bytes_of_tokens():
    assert byte_tokenizer().pieces(len(PIECES) + 2) == [*PIECES, b"", b""]
