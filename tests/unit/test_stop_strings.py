"""Stop strings against their definition, whatever the texts, the tokens and the steps that these came in."""

import random
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers.models import WordLevel

from slipstream.commit import Delta
from slipstream.config import MAX_SIBLINGS, MAX_STOPS, SamplingParams
from slipstream.errors import RequestError
from slipstream.models.tokenizer import Tokenizer
from slipstream.request import TextStop, sibling_seed
from slipstream.stream import Piece, StopStrings, TextStream, cut
from tests.unit.scheduling import make_request
from tests.unit.stops import Ending, Pieces, certain, ending


def pieces_of(data: bytes, cuts: set[int]) -> list[bytes]:
    places = [0, *sorted(place for place in cuts if 0 < place < len(data)), len(data)]
    return [data[a:b] for a, b in pairwise(places)]


def read(tokenizer, ids, stops, steps, include=False, min_tokens=0) -> tuple[Ending, list[str]]:
    """What a request makes of its answer, read `steps` tokens at a time: how it ends, and the text of its chunks."""
    stops_of = StopStrings(tokenizer.stream(), stops, include, min_tokens)
    request, text = make_request(0), TextStream(StopStrings(tokenizer.stream(), stops, include, min_tokens))
    chunks, done, found = [], 0, None
    while done < len(ids) and found is None:
        new = ids[done : done + next(steps)]
        found = stops_of(new)
        kept = tuple(new if found is None else new[: found.num_tokens])
        done += len(kept)
        reason = "stop" if found else "length" if done == len(ids) else None
        request.stop_reason = found and found.text
        chunks.append(text.chunk(Delta(request, kept, (False,) * len(kept), 0, reason)))
        assert chunks[-1].stop_reason == (found.text if found else None)
    whole = "".join(chunk.text for chunk in chunks)
    assert whole == stops_of.text() == stops_of.text()
    return Ending(done, whole, found and found.text), [chunk.text for chunk in chunks]


def ones():
    while True:
        yield 1


ALPHABET = "aab.é漢🙂 "


@st.composite
def answers(draw):
    """Bytes cut into tokens anywhere (now and then with bytes that are no text), and stop strings that may be in them."""
    parts = draw(
        st.lists(st.one_of(st.text(ALPHABET, max_size=8), st.sampled_from([b"\xff", b"\xe6\xbc", b"\xa9"])), max_size=6)
    )
    data = b"".join(part if isinstance(part, bytes) else part.encode() for part in parts)
    pieces = pieces_of(data, draw(st.sets(st.integers(1, max(1, len(data))))))
    whole = certain(data.decode(errors="replace"))
    inside = [whole[a:b] for a in range(len(whole)) for b in range(a + 1, min(a + 5, len(whole)) + 1)]
    inside = [text for text in inside if "\N{REPLACEMENT CHARACTER}" not in text]
    kinds = [st.text(ALPHABET, min_size=1, max_size=4), *([st.sampled_from(inside)] if inside else [])]
    return pieces, draw(st.lists(st.one_of(kinds), min_size=1, max_size=3))


@given(answers(), st.booleans(), st.integers(0, 4), st.randoms(use_true_random=False))
@example(([b"x\xe6", b"\xbc\xa2y"], ["x"]), False, 0, random.Random(0))
@example(([b"aaab"], ["aab", "b"]), False, 0, random.Random(0))
def test_streamed_is_whole_is_the_definition(answer, include, min_tokens, rng):
    pieces, stops = answer
    tokenizer, ids = Pieces(pieces), list(range(len(pieces)))
    expected = ending(tokenizer.decode, ids, stops, include, min_tokens)
    steps = iter(lambda: rng.randint(1, 5), None)
    found, chunks = read(tokenizer, ids, stops, steps, include, min_tokens)
    one_by_one, _ = read(tokenizer, ids, stops, ones(), include, min_tokens)
    at_once, _ = read(tokenizer, ids, stops, iter(lambda: 99, None), include, min_tokens)
    assert found == one_by_one == at_once == expected if ids else found.text == ""
    assert "".join(chunks) == expected.text
    unread = StopStrings(tokenizer.stream(), stops, include, min_tokens)
    unread(ids)
    assert unread.text() == expected.text


@given(answers(), st.randoms(use_true_random=False))
def test_no_chunk_holds_what_is_taken_back_later(answer, rng):
    """At every cut the chunks so far are the beginning of the answer, and nothing is held back without need."""
    pieces, stops = answer
    tokenizer, ids = Pieces(pieces), list(range(len(pieces)))
    expected, shown = ending(tokenizer.decode, ids, stops), ""
    stops_of = StopStrings(tokenizer.stream(), stops)
    for count in range(1, expected.num_tokens + 1):
        shown += stops_of.push(ids[count - 1])
        assert expected.text.startswith(shown)
        if count < expected.num_tokens:
            rest = certain(tokenizer.decode(ids[:count]))[len(shown) :]
            assert not rest or any(stop.startswith(rest) and stop != rest for stop in stops)


def test_every_place_of_a_string_in_steps_of_every_size():
    text = "one END two"
    tokenizer, ids = Pieces([bytes([byte]) for byte in text.encode()]), list(range(len(text)))
    for size in range(1, 12):
        found, chunks = read(tokenizer, ids, ["END"], iter(lambda size=size: size, None))
        assert found == Ending(7, "one ", "END")
        assert not any("E" in chunk for chunk in chunks)
        assert read(tokenizer, ids, ["END"], iter(lambda size=size: size, None), True)[0] == Ending(7, "one END", "END")


@pytest.mark.parametrize("stops", [["END", "ENDING"], ["ENDING", "END"]])
def test_of_a_string_and_its_beginning_the_beginning_ends_the_answer(stops):
    """Whether they come letter by letter or in one token; the order in which they were given says nothing."""
    for pieces in ([b"x", b"ENDING", b"y"], [b"x", *[bytes([byte]) for byte in b"ENDING"], b"y"]):
        found, _ = read(Pieces(pieces), list(range(len(pieces))), stops, ones())
        assert (found.text, found.stop) == ("x", "END")


def test_of_strings_that_end_together_the_longest_counts():
    found, _ = read(Pieces([b"a stop"]), [0], ["op", "stop", "p"], ones())
    assert found == Ending(1, "a ", "stop")


def test_what_stands_behind_the_string_in_its_token_is_no_part_of_the_answer():
    tokenizer = Pieces([b"one", b".\n\ntwo", b"three"])
    assert read(tokenizer, [0, 1, 2], ["\n"], ones())[0] == Ending(2, "one.", "\n")
    assert read(tokenizer, [0, 1, 2], ["\n"], ones(), include=True)[0] == Ending(2, "one.\n", "\n")


@pytest.mark.parametrize("cut_at", range(1, 4))
def test_a_string_that_begins_or_ends_within_a_character(cut_at):
    smile = "🙂".encode()
    pieces = [b"x", smile[:cut_at], smile[cut_at:] + b"y"]
    found, chunks = read(Pieces(pieces), [0, 1, 2], ["🙂"], ones())
    assert found == Ending(3, "x", "🙂") and chunks == ["x", "", ""]
    assert read(Pieces([b"x\xf0", smile[1:]]), [0, 1], ["x"], ones())[0] == Ending(1, "", "x")


def test_half_a_character_at_the_end_completes_nothing():
    found, _ = read(Pieces([b"x", b"\xe6\xbc"]), [0, 1], ["\N{REPLACEMENT CHARACTER}"], ones())
    assert found == Ending(2, "x\N{REPLACEMENT CHARACTER}", None)


def test_what_is_held_back_comes_with_the_end():
    found, chunks = read(Pieces([b"on", b"e E", b"N"]), [0, 1, 2], ["END"], ones())
    assert (found.text, found.stop, chunks) == ("one EN", None, ["on", "e ", "EN"])


def test_long_strings_are_found_in_time():
    stops = ["a" * 20_000 + str(i) for i in range(4)]
    stops_of = StopStrings(Pieces([b"a" * 50]).stream(), stops)
    for _ in range(500):
        assert stops_of([0]) is None
    assert len(stops_of.text()) == 25_000


def test_a_watcher_counts_within_what_it_reads():
    stops_of = StopStrings(Pieces([b"a", b"b", b"c"]).stream(), ["bc"])
    assert stops_of([]) is None and stops_of([0, 1]) is None
    assert stops_of([2, 0, 0]) == TextStop(1, "bc")


def test_pieces_are_cut_where_the_text_ends():
    pieces = [Piece("ab", True), Piece("", False), Piece("cd", False), Piece("e", True)]
    assert [piece.text for piece in cut(pieces, 3)] == ["ab", "", "c", ""]
    assert list(cut(pieces, 5)) == pieces


# ---------------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    "stop", [None, 5, b"x", {"a"}, {"a": 1}, "", [""], ["a", ""], [5], [None], [["a"]], ["a"] * (MAX_STOPS + 1), "\ud800"]
)  # fmt: skip
def test_a_stop_that_is_no_text_is_refused(stop):
    with pytest.raises(RequestError, match=r"^stop "):
        SamplingParams(stop=stop)


@pytest.mark.parametrize("n", [0, -1, MAX_SIBLINGS + 1, 10**6, 1.0, True, "2", None])
def test_a_number_of_answers_out_of_range_is_refused(n):
    with pytest.raises(RequestError, match=r"^n is "):
        SamplingParams(n=n)


def test_the_option_to_include_is_true_or_false():
    with pytest.raises(RequestError, match=r"^include_stop_str_in_output is 1"):
        SamplingParams(include_stop_str_in_output=1)


def test_one_text_and_a_list_of_one_are_the_same():
    assert SamplingParams(stop="a") == SamplingParams(stop=["a"]) == SamplingParams(stop=("a",))
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop="a"))
    assert SamplingParams().stop == SamplingParams(stop=[]).stop == ()
    assert SamplingParams(stop=["a"] * MAX_STOPS).stop == ("a",) * MAX_STOPS


def test_seeds_of_siblings():
    """They are part of the interface: a sibling can be asked for alone."""
    assert sibling_seed(7, 0) == 7 and sibling_seed(-1, 0) == -1
    assert sibling_seed(-1, 3) == sibling_seed(2**64 - 1, 3)  # the same 64 bits
    seeds = {sibling_seed(seed, index) for seed in range(50) for index in range(MAX_SIBLINGS)}
    assert len(seeds) == 50 * MAX_SIBLINGS
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert (sibling_seed(0, 1), sibling_seed(7, 2)) == (8118103383084794603, 4504606891059362275)


@given(answers())
def test_a_decoder_holds_back_half_a_character_and_nothing_before_it(answer):
    tokenizer, out = Pieces(answer[0]), ""
    stream = tokenizer.stream()
    for count in range(1, len(tokenizer.pieces) + 1):
        out += stream.push(count - 1)
        assert out == certain(tokenizer.decode(range(count)))
    assert out + stream.flush() == tokenizer.decode(range(len(tokenizer.pieces)))


def byte_fallback() -> Tokenizer:
    """As SentencePiece has it: a token for every byte, and a few for characters. A run of bytes is text or it is not."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581a": 256, "b": 257, "\u2581": 258, "é": 259}
    backend = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="b"))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(source="bytes", backend=backend, vocab_size=260, special_ids=frozenset())


BYTE_FALLBACK = byte_fallback()
CHARACTERS = st.lists(
    st.one_of(st.integers(256, 259).map(lambda n: [n]), st.sampled_from("é漢🙂\n").map(lambda c: list(c.encode())))
)


@given(
    CHARACTERS,
    st.integers(0, 3),
    st.sampled_from(["é", "a", "b漢", "\n", " a", "🙂\n"]),
    st.randoms(use_true_random=False),
)
def test_bytes_that_fit_nowhere_do_not_make_the_steps_show(characters, missing, stop, rng):
    """An answer may end, or go wrong, within a character: whole text before that stays what it was."""
    ids = [token for character in characters for token in character]
    ids = [*ids[: max(0, len(ids) - missing)], *([] if rng.random() < 0.5 else [0xE6, 257, 256])]
    steps = iter(lambda: rng.randint(1, 6), None)
    found, _ = read(BYTE_FALLBACK, ids, [stop], steps)
    if not ids:
        return
    assert found == read(BYTE_FALLBACK, ids, [stop], ones())[0]
    unstopped, _ = read(BYTE_FALLBACK, ids, ["never"], steps)
    assert unstopped.text == BYTE_FALLBACK.answer(ids)
    assert found.text == unstopped.text or (found.stop == stop and unstopped.text.startswith(found.text + stop))
