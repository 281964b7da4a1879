"""A request on the host: what was asked, the tokens so far, and the slot while it runs. Host code: no tensors.

Only the scheduler moves a request between states. What changes with every step (tokens, context, what lies in flight)
stands in the scheduler's ledger while the request runs, its pages in the scheduler's page table, by slot.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, NamedTuple, Protocol, TypeAlias

from slipstream.config import SamplingParams
from slipstream.constraint import Constraint
from slipstream.logprobs import Logbook, TokenLogprob
from slipstream.metrics import SpecCounters

FinishReason = Literal["stop", "length", "abort", "error"]


class Written(Protocol):
    """Where the tokens of running requests are: what came since a slot was given to its tenant."""

    def token_ids_of(self, slot: int, since: int = 0) -> list[int]: ...
    def accepted_of(self, slot: int) -> list[bool]: ...
    def last_token_s_of(self, slot: int) -> float: ...


class TextStop(NamedTuple):
    """An answer ends by its text."""

    num_tokens: int  # of those just read: they count, and the last of them completed the text
    text: str  # the stop string


# Reads an answer's tokens as they are committed, each once and in order, up to where it says that the answer ends.
Watcher: TypeAlias = Callable[[Sequence[int]], TextStop | None]


def sibling_seed(seed: int, index: int) -> int:
    """The seed of answer `index` of several to one prompt: the first has the seed itself, in 64 bits."""
    if index == 0:
        return seed
    key = (seed % 2**64).to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


@dataclass(slots=True, eq=False)
class Request:
    uid: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams  # not changed once it was added
    seed: int
    constrained: bool = False  # something besides the target decides what may be emitted
    constraint: Constraint | None = None  # and this is it
    eos_token_ids: frozenset[int] = frozenset()
    watcher: Watcher | None = None  # where stop strings may end the answer
    index: int = 0  # among the answers to its prompt
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token or the text that ended it, when finish_reason is "stop"
    error: str | None = None
    counters: SpecCounters = field(default_factory=SpecCounters)  # up to when it last left its slot
    submitted_s: float = field(default_factory=time.perf_counter)
    first_token_s: float = 0.0
    slot: int | None = None  # while it runs
    # Of the output's tokens, and of the prompt's but the first, where log-probabilities are wanted.
    logbook: Logbook = field(init=False, default_factory=Logbook)
    prompt_logbook: Logbook = field(init=False, default_factory=Logbook)
    stop_ids: frozenset[int] = field(init=False)  # tokens that end the answer
    # Tokens that had not to be computed when it got its first slot; in later ones it finds its own. None: it has had none.
    num_cached: int | None = field(init=False, default=None)
    page_keys: list[bytes] = field(init=False, default_factory=list)  # of its first full pages, see `cache.shared`
    _output_ids: list[int] = field(init=False, default_factory=list)  # these three: when it last left its slot
    _accepted: list[bool] = field(init=False, default_factory=list)
    _last_token_s: float = field(init=False, default=0.0)
    _written: Written | None = field(init=False, default=None)  # while it runs

    def __post_init__(self) -> None:
        self.constrained |= self.constraint is not None
        self.stop_ids = self.params.ends(self.eos_token_ids)

    @property
    def output_ids(self) -> list[int]:
        """The answer so far; collected when it is read, while the request runs."""
        if self._written is None or self.slot is None:
            return self._output_ids
        return self._output_ids + self._written.token_ids_of(self.slot)

    def output_since(self, count: int) -> list[int]:
        """The answer without its first `count` tokens."""
        before = self._output_ids[count:]
        if self._written is None or self.slot is None:
            return before
        return before + self._written.token_ids_of(self.slot, max(count - len(self._output_ids), 0))

    def known_since(self, count: int) -> Sequence[int]:
        """Prompt and answer without the first `count` tokens."""
        num_prompt = len(self.prompt_ids)
        return (*self.prompt_ids[count:], *self.output_since(max(count - num_prompt, 0)))

    @property
    def wants_prompt_report(self) -> bool:
        """Log-probabilities of its prompt are wanted, and some have not been made."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and self.prompt_logbook.num_tokens < len(self.prompt_ids) - 1

    @property
    def accepted(self) -> list[bool]:
        """Per output token: it was an accepted draft."""
        if self._written is None or self.slot is None:
            return self._accepted
        return self._accepted + self._written.accepted_of(self.slot)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """One per output token; None if they were not asked for."""
        most = self.params.logprobs
        return None if most is None else self.logbook.entries(self.output_ids, most)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """One per prompt token that was reported, None for the first; None if they were not asked for."""
        most, book = self.params.prompt_logprobs, self.prompt_logbook
        return None if most is None else (None, *book.entries(self.prompt_ids[1 : 1 + book.num_tokens], most))

    @property
    def last_token_s(self) -> float:
        if self._written is None or self.slot is None:
            return self._last_token_s
        return self._written.last_token_s_of(self.slot)

    def attach(self, written: Written) -> None:
        """It has got its slot: further tokens are written there."""
        self._written = written

    def detach(self) -> None:
        """It is about to leave its slot, and keeps what was written."""
        self._output_ids, self._accepted, self._last_token_s = self.output_ids, self.accepted, self.last_token_s
        self._written = None

    @property
    def num_known(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None
