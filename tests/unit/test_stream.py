"""Deltas to text: nothing is lost, nothing comes twice, half characters wait."""

import pytest

from slipstream.commit import Delta
from slipstream.stream import Piece, TextStream
from tests.unit.scheduling import make_request


class Bytes:
    """Token n is the byte n; a character comes when its last byte is there."""

    def __init__(self):
        self.held = b""

    def push(self, token_id):
        self.held += bytes([token_id])
        try:
            text = self.held.decode()
        except UnicodeDecodeError:
            return ""
        self.held = b""
        return text

    def flush(self):
        text, self.held = self.held.decode(errors="replace"), b""
        return text


REQUEST = make_request(0)


def delta(*token_ids, accepted=None, width=3, reason=None):
    flags = tuple(accepted or [True] * (len(token_ids) - 1) + [False])[: len(token_ids)]
    return Delta(REQUEST, token_ids, flags, width, reason)


def test_a_chunk_tells_token_by_token_what_was_drafted():
    chunk = TextStream(Bytes()).chunk(delta(*b"abc", width=4))
    assert chunk.pieces == (Piece("a", True), Piece("b", True), Piece("c", False))
    assert (chunk.text, chunk.token_ids, chunk.accepted) == ("abc", tuple(b"abc"), (True, True, False))
    assert (chunk.width, chunk.finish_reason) == (4, None)


@pytest.mark.parametrize("cut", range(1, 10))
def test_chunks_joined_are_the_whole_text(cut):
    data = "añ漢🙂".encode()
    assert len(data) == 10
    stream = TextStream(Bytes())
    chunks = [stream.chunk(delta(*data[:cut])), stream.chunk(delta(*data[cut:], reason="stop"))]
    assert "".join(chunk.text for chunk in chunks) == "añ漢🙂"
    assert sum(len(chunk.pieces) for chunk in chunks) == 10


def test_a_chunk_in_one_piece_has_the_same_text():
    class AtOnce(Bytes):
        reads_ahead = True

        def push(self, *token_ids):
            return "".join(map(super().push, token_ids))

    data = "añ漢🙂".encode()
    for cut in range(len(data) + 1):
        stream = TextStream(AtOnce(), by_token=False)
        chunks = [stream.chunk(delta(*data[:cut])), stream.chunk(delta(*data[cut:], reason="stop"))]
        assert "".join(chunk.text for chunk in chunks) == "añ漢🙂"
        assert all(len(chunk.pieces) <= 1 for chunk in chunks)
        assert [len(chunk.token_ids) for chunk in chunks] == [cut, len(data) - cut]


def test_what_is_held_back_comes_with_the_end():
    stream = TextStream(Bytes())
    half = "é".encode()[:1]
    assert stream.chunk(delta(*half)).text == ""
    last = stream.chunk(delta(*b"x"[:0], accepted=[], reason="abort"))
    assert last.text == "�"
    assert last.pieces == (Piece("�", False),)


def test_the_rest_belongs_to_the_last_token():
    half = "é".encode()[:1]
    chunk = TextStream(Bytes()).chunk(delta(*b"x", *half, accepted=[False, True], reason="length"))
    assert chunk.pieces == (Piece("x", False), Piece("", True), Piece("�", True))


def test_an_end_without_tokens_has_no_text():
    chunk = TextStream(Bytes()).chunk(Delta(REQUEST, (), (), 0, "error"))
    assert (chunk.text, chunk.pieces, chunk.finish_reason) == ("", (), "error")
