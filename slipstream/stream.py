"""From deltas to text that can be shown at once: tokens are decoded as they come, half characters are held back.

`StopStrings` makes the text of a request that ends at stop strings: `commit` lets one read the tokens, and `LLM` takes
the text from it; a stream has one of its own. Other requests are decoded when somebody reads them. Host code without
tensors. Joined over a request, the chunks' text equals the text of the whole answer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.commit import Delta
from slipstream.logprobs import TokenLogprob
from slipstream.request import FinishReason, TextStop


class IncrementalDecoder(Protocol):
    def push(self, token_id: int, /) -> str:
        """Text that became certain with this token; empty while a character is unfinished."""

    def flush(self) -> str:
        """What was held back at the end of the answer."""


class ForkingDecoder(Protocol):
    """An incremental decoder that can take several tokens at once (if it reads ahead), and try them first."""

    @property
    def reads_ahead(self) -> bool: ...
    @property
    def is_whole(self) -> bool: ...
    def push(self, *token_ids: int) -> str: ...
    def flush(self) -> str: ...
    def fork(self) -> "ForkingDecoder": ...


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
    stop_reason: int | str | None = None  # the token or the text that ended the answer, with finish_reason "stop"
    index: int = 0  # among the answers to the prompt
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token, if they were asked for
    # Of the prompt's tokens, None for the first of them, if they were asked for; in the first chunk only.
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    drafted: int = 0  # in the step; 0 also where the prompt gave the token

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class TextStream:
    """Turns the deltas of one request into chunks."""

    def __init__(self, decoder: IncrementalDecoder | ForkingDecoder, by_token: bool = True) -> None:
        """by_token: every token has a piece of the text. Else a chunk's text is one piece, which takes less time."""
        self._decoder = decoder
        self._read_at_once = None if by_token or not getattr(decoder, "reads_ahead", False) else decoder.push
        self._is_first = True

    def chunk(self, delta: Delta) -> Chunk:
        if self._read_at_once is not None:
            pieces = [Piece(self._read_at_once(*delta.token_ids), False)] if delta.token_ids else []
        else:
            tokens = zip(delta.token_ids, delta.accepted, strict=True)
            pieces = [Piece(self._decoder.push(token), accepted) for token, accepted in tokens]
        if delta.finish_reason is not None and (rest := self._decoder.flush()):
            pieces.append(Piece(rest, pieces[-1].accepted if pieces else False))
        request = delta.request
        prompt_logprobs = request.prompt_logprobs if self._is_first else None
        self._is_first = False
        stop_reason = request.stop_reason if delta.finish_reason == "stop" else None
        return Chunk(
            delta.token_ids, delta.accepted, tuple(pieces), delta.width, delta.finish_reason, stop_reason, request.index,
            delta.logprobs, prompt_logprobs, delta.drafted,
        )  # fmt: skip


class StopStrings:
    """The text of one answer, which ends where a stop string is complete.

    Called with new tokens it is the watcher of its request, and `text` is the answer. With `push` and `flush` it is a
    decoder, which holds back what may still become a stop string. Text is searched when it is certain: a character whose
    last byte is missing completes nothing. Of stop strings that one character completes, the longest counts.
    """

    def __init__(
        self, decoder: ForkingDecoder, stops: Sequence[str], include: bool = False, min_tokens: int = 0
    ) -> None:
        """include: the text ends with the stop string, not before it. The first min_tokens tokens complete none."""
        self._decoder, self._include = decoder, include
        self._reads_ahead = decoder.reads_ahead
        self._num_exempt = min_tokens  # tokens to come that complete none
        self._searches = [_Search(stop) for stop in stops]
        self._held = ""  # the longest end of the text that a stop string begins with
        self._parts: list[str] = []  # what stands before it
        self._ended = False

    def __call__(self, token_ids: Sequence[int]) -> TextStop | None:
        """Read new tokens, up to one that completes a stop string."""
        if len(token_ids) > 1 and self._reads_ahead and self._num_exempt <= 0 and self._read_at_once(token_ids):
            return None
        for place, token in enumerate(token_ids):
            stop = self._read(self._decoder.push(token))
            self._num_exempt -= 1
            if stop is not None:
                return TextStop(place + 1, stop)
        return None

    def push(self, token_id: int, /) -> str:
        """Read a token; the text that became certain with it and will not be taken back."""
        self([token_id])
        return self._parts[-1]

    def flush(self) -> str:
        """What was held back at the end of an answer that no stop string ended."""
        if self._ended:
            return ""
        held, self._held = self._held, ""
        return held + self._decoder.flush()

    def text(self) -> str:
        """The whole answer, once it has ended."""
        self._parts.append(self.flush())
        return "".join(self._parts)

    def _read_at_once(self, token_ids: Sequence[int]) -> bool:
        """The same for several tokens, in less time. False: one of them may end the answer, and none was read."""
        decoder = self._decoder.fork()
        new = decoder.push(*token_ids)
        text = self._held + new
        if not decoder.is_whole or any(search.stop in text for search in self._searches):
            return False
        self._decoder = decoder
        self._read(new)
        return True

    def _read(self, new: str) -> str | None:
        text = self._held + new
        end, stop = self._completed(new)
        if stop is not None:
            self._ended = True
            end += len(self._held)
            self._parts.append(text[: end if self._include else end - len(stop)])
            return stop
        held = max(search.matched for search in self._searches)
        self._parts.append(text[: len(text) - held])
        self._held = text[len(text) - held :]
        return None

    def _completed(self, new: str) -> tuple[int, str | None]:
        """How many new characters there are up to the first that completes stop strings, and the longest of those."""
        if not self._held and not any(search.stop[0] in new for search in self._searches):
            return len(new), None
        for place, char in enumerate(new):
            found = [search.stop for search in self._searches if search.completes(char)]
            if found and self._num_exempt <= 0:
                return place + 1, max(found, key=len)
        return len(new), None


class _Search:
    """A stop string in a text that comes one character at a time, after Knuth, Morris and Pratt."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # length of the longest end of the text that `stop` begins with
        # [j] the longest such end of stop[:j] itself, shorter than j: what still stands when the next character does not.
        self._shorter = [0, 0]
        for char in stop[1:]:
            self._shorter.append(self._longer(self._shorter[-1], char))

    def completes(self, char: str) -> bool:
        self.matched = self._longer(self.matched, char)
        if self.matched < len(self.stop):
            return False
        self.matched = self._shorter[-1]  # for a text that goes on
        return True

    def _longer(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self._shorter[matched]
        return matched + (self.stop[matched] == char)


def cut(pieces: Iterable[Piece], num_chars: int) -> Iterator[Piece]:
    """The first so many characters of them: pieces made of an answer's tokens may go on behind a stop string."""
    for piece in pieces:
        yield Piece(piece.text[:num_chars], piece.accepted)
        num_chars = max(0, num_chars - len(piece.text))
