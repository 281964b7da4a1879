"""From deltas to text that can be shown at once: tokens are decoded as they come, half characters are held back.

Host code without tensors. Joined over a request, the chunks' text equals the decoding of the whole answer.
"""

from dataclasses import dataclass
from typing import Protocol

from slipstream.commit import Delta
from slipstream.request import FinishReason


class IncrementalDecoder(Protocol):
    def push(self, token_id: int) -> str:
        """Text that became certain with this token; empty while a character is unfinished."""

    def flush(self) -> str:
        """What was held back at the end of the answer."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one token (possibly empty), and whether it was an accepted draft."""

    text: str
    accepted: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a stream yields for one step of a request."""

    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]  # per token: it was an accepted draft
    pieces: tuple[Piece, ...]  # the text, split by token
    width: int  # drafts that were verified in the step
    finish_reason: FinishReason | None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class TextStream:
    """Turns the deltas of one request into chunks."""

    def __init__(self, decoder: IncrementalDecoder) -> None:
        self._decoder = decoder

    def chunk(self, delta: Delta) -> Chunk:
        tokens = zip(delta.token_ids, delta.accepted, strict=True)
        pieces = [Piece(self._decoder.push(token), accepted) for token, accepted in tokens]
        if delta.finish_reason is not None and (rest := self._decoder.flush()):
            pieces.append(Piece(rest, pieces[-1].accepted if pieces else False))
        return Chunk(delta.token_ids, delta.accepted, tuple(pieces), delta.width, delta.finish_reason)
