"""Where answers end (fault 16 in docs/faults.md, for texts): the same in every mode, whatever steps the tokens came in.

What must come out is computed from the whole answer of plain decoding, by definition (tests/unit/stops.py). Tokens are
pieces of bytes, so that characters and stop strings span tokens, and blocks of them.
"""

import dataclasses
import itertools
from functools import cache

import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers.models import WordLevel

from slipstream.config import SamplingParams
from slipstream.errors import EngineError, RequestError
from slipstream.llm import Completion
from slipstream.load import Models
from slipstream.models.tokenizer import Tokenizer
from slipstream.testing import assert_nothing_left
from tests.e2e.engines import (
    SPECULATING,
    ScriptedDrafter,
    greedy,
    known,
    make_llm,
    models_with,
    never,
    plain_answers,
    pool_bytes,
    prompts_of,
)
from tests.unit.stops import certain, ending

LOOPS = pytest.mark.parametrize(
    "overlap", [pytest.param(True, id="overlapped"), pytest.param(False, id="plain", marks=pytest.mark.slow)]
)
MODES = pytest.mark.parametrize("mode", ["off", *SPECULATING])
PIECES = (
    b"a", b"b", b" ", b"ab", b"\xc3", b"\xa9", b"\xc3\xa9", b"\xf0\x9f", b"\x99\x82", b"a\xf0", b"\x9f\x99\x82", b"\xa9b",
    b"\xe6\xbc", b"\xa2", b". ", b"\n\n", b"bb", b"x\xc3", b"END", b"EN",
)  # fmt: skip
WRONG = {"none": never, "some": lambda position: position % 3 == 0, "all": lambda position: position < 0}
CASES = pytest.mark.parametrize(("mode", "drafts"), [("off", "all"), *itertools.product(SPECULATING, WRONG)])
PROMPTS = prompts_of(5, 8)
LENGTH = 24


def byte_tokenizer() -> Tokenizer:
    """Token n is the n-th of PIECES."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    spelling = {byte: chr(byte) for byte in shown} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    vocabulary = {"".join(spelling[byte] for byte in piece): n for n, piece in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(source="bytes", backend=backend, vocab_size=len(PIECES), special_ids=frozenset())


@cache
def byte_models() -> Models:
    return dataclasses.replace(models_with(), tokenizer=byte_tokenizer())


def decode(token_ids) -> str:
    return b"".join(PIECES[token] for token in token_ids).decode(errors="replace")


@cache
def whole(temperature: float = 0.0) -> tuple[tuple[int, ...], ...]:
    """The answers that nothing ends."""
    return tuple(plain_answers(PROMPTS, greedy(LENGTH, temperature=temperature, seed=5)))


@cache
def engine(mode: str, drafts: str, overlap: bool, temperature: float = 0.0):
    scripted = None
    if mode != "off":
        sequences = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, whole(temperature), strict=True)]
        scripted = ScriptedDrafter(sequences, wrong=WRONG[drafts])
    return make_llm(mode, scripted, models=byte_models(), overlap=overlap)


def ends_of(answer: Completion) -> tuple[object, ...]:
    return answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, answer.usage


def expected(prompt, token_ids, params: SamplingParams, ids_end=()) -> tuple[object, ...]:
    """What plain decoding's whole answer becomes, token by token: stop ids, then stop strings, then length."""
    by_text = ending(decode, token_ids, params.stop, params.include_stop_str_in_output)
    by_id = next(
        (n + 1 for n, token in enumerate(token_ids) if token in {*params.stop_token_ids, *ids_end}), LENGTH + 1
    )
    count, text, reason = by_text.num_tokens, by_text.text, by_text.stop
    if by_text.stop is None or by_id <= count:
        count, reason = min(by_id, len(token_ids)), token_ids[by_id - 1] if by_id <= len(token_ids) else None
        if by_text.stop is None or by_id < by_text.num_tokens:
            text = decode(token_ids[:count])
    if count > params.max_tokens:
        count, text, reason = params.max_tokens, decode(token_ids[: params.max_tokens]), None
    usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
    return token_ids[:count], text, "length" if reason is None else "stop", reason, usage


def check(llm, params: list[SamplingParams], temperature: float = 0.0) -> list[Completion]:
    """Whole and streamed answers are those of the definition, which is returned as it came."""
    cases = list(zip(PROMPTS, whole(temperature), params, strict=True))
    wanted = [expected(*case) for case in cases]
    answers = llm.generate(PROMPTS, params)
    assert [ends_of(answer) for answer in answers] == wanted
    for answer in answers:
        assert answer.completion_tokens == len(answer.accepted) == answer.timing.num_tokens
        assert answer.spec.emitted == len(answer.token_ids) - 1  # the first is the prefill's
        assert answer.spec.accepted == sum(answer.accepted) <= answer.spec.verified
    chunks = list(llm.stream(PROMPTS[0], params[0]))
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == wanted[0][0]
    assert "".join(chunk.text for chunk in chunks) == wanted[0][1]
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == wanted[0][2:4]
    assert {(chunk.finish_reason, chunk.stop_reason) for chunk in chunks[:-1]} <= {(None, None)}
    assert_nothing_left(llm.engine)
    return answers


def string_at(token_ids, place: int) -> str:
    """A text of one to three characters that this token completes (or, where it completes no character, one before)."""
    return certain(decode(token_ids[: place + 1]))[-1 - place % 3 :] or "END"


# ------------------------------------------------------------------------------------------- 16: strings in every place


@LOOPS
@CASES
def test_fault_16_a_string_that_any_token_completes(mode, drafts, overlap):
    """Each token in turn completes a stop string: within blocks and across steps, with drafts of every quality."""
    llm, ended = engine(mode, drafts, overlap), set()
    for place in range(LENGTH):
        fields = {"include_stop_str_in_output": place % 2 > 0}
        params = [greedy(LENGTH, stop=string_at(answer, place), **fields) for answer in whole()]
        ended |= {len(answer.token_ids) for answer in check(llm, params) if answer.finish_reason == "stop"}
    assert len(ended) > LENGTH // 2
    totals = llm.engine.totals
    if mode != "off":
        assert totals.verified > 0
        assert (totals.accepted == 0) == (drafts == "none") and (totals.accepted == totals.verified) <= (
            drafts == "all"
        )


@LOOPS
@CASES
def test_fault_16_each_token_in_turn_is_the_end_of_the_model(mode, drafts, overlap):
    """EOS, a stop id and a stop string on one token; EOS comes first, and its text is cut at the string all the same."""
    llm = engine(mode, drafts, overlap)
    facts = llm.facts
    for place in range(0, LENGTH, 3):
        eos = whole()[0][place]
        llm.facts = dataclasses.replace(facts, eos_token_ids=facts.eos_token_ids | {eos})
        params = SamplingParams(max_tokens=LENGTH, stop=string_at(whole()[0], place), ignore_eos=False)
        answers = llm.generate(PROMPTS, params)
        for case, answer in zip(zip(PROMPTS, whole(), strict=True), answers, strict=True):
            assert ends_of(answer) == expected(*case, params, llm.facts.eos_token_ids)
    llm.facts = facts


@pytest.mark.parametrize("mode", ["static", "lag"])
def test_the_order_of_stops(mode):
    """On one token: an id before a string before the length; elsewhere whatever comes first."""
    llm, answer = engine(mode, "all", True), whole()[0]
    seen = set()
    for place in range(4, LENGTH, 3):
        for id_at in (place - 2, place, place + 2):
            for most in (place, place + 1, place + 2):
                stops = {"stop": string_at(answer, place), "stop_token_ids": (answer[min(id_at, LENGTH - 1)],)}
                (found, *_) = check(llm, [greedy(most, **stops), greedy(LENGTH)])
                seen.add((found.finish_reason, type(found.stop_reason)))
    assert seen >= {("stop", int), ("stop", str)}


@given(
    mode=st.sampled_from(SPECULATING), drafts=st.sampled_from(list(WRONG)), overlap=st.booleans(), include=st.booleans(),
    temperature=st.sampled_from([0.0, 1.0]), most=st.integers(1, LENGTH), data=st.data(),
)  # fmt: skip
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_stops_in_any_mode(mode, drafts, overlap, include, temperature, most, data):
    text = "".join(certain(decode(answer)) for answer in whole(temperature))
    inside = st.builds(lambda a, n: text[a : a + n], st.integers(0, len(text) - 1), st.integers(1, 5))
    stops = st.lists(st.one_of(inside, st.sampled_from(["END", "EN", "\n", "é", "🙂b", "zz"])), max_size=4)
    stop_ids = st.lists(st.integers(0, len(PIECES) - 1), max_size=1).map(tuple)
    params = [
        greedy(
            most, stop=[one for one in data.draw(stops) if "\N{REPLACEMENT CHARACTER}" not in one],
            stop_token_ids=data.draw(stop_ids), include_stop_str_in_output=include, temperature=temperature, seed=5,
        )
        for _ in PROMPTS
    ]  # fmt: skip
    check(engine(mode, drafts, overlap, temperature), params, temperature)


# --------------------------------------------------------------------------------------- who runs beside, and what fails


@pytest.mark.parametrize("mode", ["off", "static", "lag"])
@LOOPS
def test_a_preempted_request_ends_at_its_string(mode, overlap):
    """Tokens are read once, whatever is recomputed of them."""
    prompts = prompts_of(9, 6, 11)
    plain = plain_answers(prompts, greedy(26))
    params = [greedy(26, stop=certain(decode(answer[:25]))[-9:]) for answer in plain]

    def llm_with(**options):
        scripted = ScriptedDrafter(known(prompts, greedy(26)), wrong=WRONG["some"]) if mode != "off" else None
        return make_llm(mode, scripted, models=byte_models(), overlap=overlap, max_num_seqs=3, **options)

    llm = llm_with(kv_memory=pool_bytes(10, llm_with()))
    answers = llm.generate(prompts, params)
    assert llm.engine.scheduler.num_preemptions >= 1
    for answer, token_ids, each in zip(answers, plain, params, strict=True):
        end = ending(decode, token_ids, each.stop)
        assert (answer.token_ids, answer.text, answer.stop_reason) == (token_ids[: end.num_tokens], end.text, end.stop)
    assert all(answer.stop_reason for answer in answers)
    assert_nothing_left(llm.engine)


@MODES
def test_streams_with_and_without_strings_side_by_side(mode):
    """Read in turn, one closed on the way: each has its own end, and nothing is left."""
    llm = engine(mode, "some", True)
    params = greedy(LENGTH, stop=string_at(whole()[1], 15))
    first, second = llm.stream(PROMPTS[0], greedy(LENGTH)), llm.stream(PROMPTS[1], params)
    closed = llm.stream(PROMPTS[1], params)
    next(closed)
    got = [next(first)], [next(second)]
    with pytest.raises(RequestError, match="stop"):
        llm.generate(PROMPTS, greedy(LENGTH, stop=""))
    closed.close()
    got[1].extend(second)
    got[0].extend(first)
    assert "".join(chunk.text for chunk in got[0]) == decode(whole()[0])
    _, text, reason, stop, _ = expected(PROMPTS[1], whole()[1], params)
    assert "".join(chunk.text for chunk in got[1]) == text
    assert (got[1][-1].finish_reason, got[1][-1].stop_reason) == (reason, stop)
    assert_nothing_left(llm.engine)


def test_fault_18_an_abort_and_the_same_id_again_with_strings():
    """Text that the first one had read says nothing about the second."""
    llm = engine("static", "all", True)
    answer = whole()[0]
    stop = certain(decode(answer[:18]))[-6:]
    params = greedy(LENGTH, stop=stop)
    old = llm._request(PROMPTS[0], params)
    llm.engine.add(old)
    while len(old.output_ids) < 4:
        llm.engine.step()
    new = llm._request(PROMPTS[0], params)
    new.uid = old.uid
    llm.engine.abort(old.uid)
    llm.engine.add(new)
    while not new.is_finished:
        llm.engine.step()
    llm.engine.drain()
    assert old.finish_reason == "abort" and old.stop_reason is None
    assert tuple(new.output_ids) == expected(PROMPTS[0], answer, params)[0] and new.stop_reason == stop
    assert decode(old.output_ids) == llm._completion(old).text
    assert_nothing_left(llm.engine)


def test_a_failing_request_keeps_the_text_that_was_held_back():
    llm = make_llm("static", ScriptedDrafter(known(PROMPTS, greedy(LENGTH))), models=byte_models())
    verify = llm.engine.target.verify

    def spoiled(batch, token_ids, segments):
        logits, *rest = verify(batch, token_ids, segments)
        return torch.where((batch.positions[batch.output_rows] > 14)[:, None], torch.nan, logits), *rest

    llm.engine.target.verify = spoiled
    answer = llm.generate([PROMPTS[0]], greedy(LENGTH))[0]
    text = certain(decode(answer.token_ids))
    held = llm.generate([PROMPTS[0]], greedy(LENGTH, stop=text[-3:] + "?"))[0]
    assert held.finish_reason == "error" and held.stop_reason is None
    assert (held.token_ids, held.text) == (answer.token_ids, answer.text)
    chunks = []
    with pytest.raises(EngineError, match="not finite"):
        chunks.extend(llm.stream(PROMPTS[0], greedy(LENGTH, stop=text[-3:] + "?")))
    assert_nothing_left(llm.engine)


def test_strings_within_the_least_tokens_end_nothing():
    llm, answer = engine("static", "all", True), whole()[0]
    stop = string_at(answer, 3)
    first = ending(decode, answer, [stop])
    for least in range(first.num_tokens - 1, LENGTH):
        end = ending(decode, answer, [stop], min_tokens=least)
        found = llm.generate([PROMPTS[0]], greedy(LENGTH, stop=stop, min_tokens=least))[0]
        assert (found.token_ids, found.text, found.stop_reason) == (answer[: end.num_tokens], end.text, end.stop)


def test_requests_without_strings_read_nothing():
    llm = engine("static", "all", True)
    request = llm._request(PROMPTS[0], greedy(LENGTH))
    assert request.watcher is None
    llm.engine.add(request)
    llm.engine.step()
    assert llm.engine.scheduler.ledger.answers.num_watched == 0
    other = llm._request(PROMPTS[1], greedy(LENGTH, stop="zz"))
    llm.engine.add(other)
    llm.engine.step()
    assert llm.engine.scheduler.ledger.answers.num_watched == 1
    llm.engine.abort(other.uid)
    assert llm.engine.scheduler.ledger.answers.num_watched == 0
    llm.engine.abort(request.uid)
    llm.engine.drain()
    assert_nothing_left(llm.engine)
