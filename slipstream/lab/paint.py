"""Answers for eyes: the text of each token, green where an accepted draft brought it. Torch-free."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from slipstream.models.tokenizer import Tokenizer
from slipstream.stream import Piece

ACCEPTED = "green"  # style of text that accepted drafts brought


def pieces_of(tokenizer: Tokenizer, token_ids: Sequence[int], accepted: Sequence[bool]) -> list[Piece]:
    """A whole answer, split by token as a stream would have split it."""
    decoder = tokenizer.stream()
    pieces = [Piece(decoder.push(token), draft) for token, draft in zip(token_ids, accepted, strict=True)]
    return [*pieces, Piece(decoder.flush(), pieces[-1].accepted if pieces else False)]


def show(out: Console, pieces: Iterable[Piece]) -> None:
    """Print an answer, or a part of one, without a line end: painted on a terminal, byte for byte anywhere else."""
    if out.is_terminal:
        out.print(painted(pieces), end="", soft_wrap=True)
    else:
        out.file.write("".join(piece.text for piece in pieces))
        out.file.flush()


def painted(pieces: Iterable[Piece]) -> Text:
    text = Text()
    for piece in pieces:
        text.append(piece.text, style=ACCEPTED if piece.accepted else "")
    return text
