"""What stop strings do to an answer, by definition: all of its tokens are there, and every prefix is decoded anew."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.models.tokenizer import TextStream

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Ending:
    num_tokens: int  # that count
    text: str
    stop: str | None  # None: no stop string ended it


class Pieces:
    """A tokenizer whose token n is the n-th piece of a byte string: pieces may end anywhere in a character."""

    has_byte_fallback = False

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")

    def stream(self) -> TextStream:
        return TextStream(self)  # type: ignore[arg-type]


def certain(text: str) -> str:
    """Without a character whose last byte is missing."""
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


def ending(
    decode: Decode, ids: Sequence[int], stops: Sequence[str], include: bool = False, min_tokens: int = 0
) -> Ending:
    """The answer ends with the first token, after min_tokens, after which the text has a stop string that it had not
    before; of several with the one that ends first, and of those with the longest."""
    before = 0
    for count in range(1, len(ids) + 1):
        text = certain(decode(ids[:count]))
        places = [
            (end, -len(stop), stop)
            for stop in stops
            for end in range(max(len(stop), before + 1), len(text) + 1)
            if text[end - len(stop) : end] == stop
        ]
        if places and count > min_tokens:
            end, _, stop = min(places)
            return Ending(count, text[:end] if include else text[: end - len(stop)], stop)
        before = max(before, len(text))
    return Ending(len(ids), decode(ids), None)
