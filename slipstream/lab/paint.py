"""Answers for eyes: the text of each token, green where an accepted draft brought it. Torch-free."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from rich.text import Text

from slipstream.stream import IncrementalDecoder, Piece

ACCEPTED = "green"  # style of text that accepted drafts brought


class Detokenizer(Protocol):
    def stream(self) -> IncrementalDecoder: ...

    def is_special(self, token_id: int) -> bool: ...


def pieces_of(tokenizer: Detokenizer, token_ids: Sequence[int], accepted: Sequence[bool]) -> list[Piece]:
    """A whole answer, split by token as a stream would have split it."""
    decoder = tokenizer.stream()
    pieces = [
        Piece("" if tokenizer.is_special(token) else decoder.push(token), draft)
        for token, draft in zip(token_ids, accepted, strict=True)
    ]
    return [*pieces, Piece(decoder.flush(), pieces[-1].accepted if pieces else False)]


def painted(pieces: Iterable[Piece]) -> Text:
    text = Text()
    for piece in pieces:
        text.append(piece.text, style=ACCEPTED if piece.accepted else "")
    return text
