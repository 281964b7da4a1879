"""The half of an `LLM` that needs no weights: requests are made and checked here, and texts of their tokens.

It knows an engine by its `Facts` alone, so that it may stand in another process than the engine: a server's. Several
threads may prepare requests at a time. Torch-free. `llm` adds the engine; `serve` uses either.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.config import SamplingParams, SpeculativeConfig
from slipstream.constraint import Constraint
from slipstream.errors import RequestError
from slipstream.grammars import Grammars, idle
from slipstream.metrics import SpecCounters
from slipstream.models.tokenizer import Tokenizer
from slipstream.request import Request, sibling_seed
from slipstream.scheduler import SchedulerLimits, check
from slipstream.stream import IncrementalDecoder, StopStrings, TextStream

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of an engine without having it: plain values, which another process can be sent."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    dtype: str
    speculative: SpeculativeConfig
    seed: int | None  # of those seeds that requests do not bring
    limits: SchedulerLimits
    page_size: int
    num_pages: int  # that requests can own


class Host:
    def __init__(self, tokenizer: Tokenizer, facts: Facts, grammars: Grammars) -> None:
        self.tokenizer, self.facts, self.grammars = tokenizer, facts, grammars
        self._seeds = random.Random(facts.seed)
        self._uids = itertools.count(1)

    @property
    def max_model_len(self) -> int:
        return self.facts.limits.max_model_len

    @property
    def mode(self) -> str:
        return self.facts.speculative.mode

    def prepare(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> list[Request]:
        """The requests for one raw text or its token ids, checked and not yet added: as many as `params.n` asks for.

        From any thread, while another one drives the engine. RequestError or CapacityError where the prompt or what is
        asked of it cannot be honoured.
        """
        requests, facts = self._requests(prompt, params), self.facts
        for request in requests:
            check(request, facts.limits, facts.page_size, facts.num_pages)
        return requests

    def chat_ids(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """The prompt of a conversation; `variables` reach the model's chat template."""
        return self.tokenizer.encode(self.tokenizer.chat(messages, **variables))

    def room_for_answer(self, num_prompt: int) -> int:
        """Most tokens that an answer to so many can have, in this context and this KV pool; at least 1."""
        return max(1, min(self.max_model_len, self.facts.num_pages * self.facts.page_size) - num_prompt)

    def text_stream(self, request: Request, by_token: bool = True) -> TextStream:
        """What makes chunks of a request's deltas; by_token: of every token a piece of text."""
        return TextStream(self._decoder(request.params), by_token)

    def request(
        self, uid: int, prompt_ids: tuple[int, ...], params: SamplingParams, seed: int, index: int,
        constraint: Constraint | None,
    ) -> Request:  # fmt: skip
        """One that was checked, here or by a host of the same facts. seed: its own, not its first sibling's."""
        return Request(
            uid=uid,
            prompt_ids=prompt_ids,
            params=params,
            seed=seed,
            eos_token_ids=self.facts.eos_token_ids,
            constraint=constraint,
            watcher=self._stop_strings(params) if params.stop else None,
            index=index,
            counters=SpecCounters(mode=self.mode),
        )

    # ------------------------------------------------------------------ for its own methods, and the LLM's

    def _requests(
        self, prompt: str | Sequence[int], params: SamplingParams | None, meanwhile: Callable[[], bool] = idle
    ) -> list[Request]:
        """As many as `params.n` asks for. meanwhile: what is done while a grammar is compiled."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is {params!r}; give a SamplingParams")
        if not isinstance(prompt, Iterable):
            raise RequestError(f"prompt is {prompt!r}; give a text or a list of token ids")
        token_ids = self.tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else list(prompt)
        check_prompt(token_ids, self.facts.vocab_size, self.max_model_len)
        params.check_token_ids(self.facts.vocab_size)
        seed, prompt_ids = self._seeds.getrandbits(64) if params.seed is None else params.seed, tuple(token_ids)
        constraints = self._constraints(params, meanwhile)
        return [
            self.request(next(self._uids), prompt_ids, params, sibling_seed(seed, index), index, constraint)
            for index, constraint in enumerate(constraints)
        ]

    def _constraints(self, params: SamplingParams, meanwhile: Callable[[], bool]) -> Sequence[Constraint | None]:
        """One for each answer, where a form is asked for."""
        if params.structured is None:
            return [None] * params.n
        made = self.grammars.compile(params.structured, params.ends(self.facts.eos_token_ids), meanwhile)
        return [made() for _ in range(params.n)]

    def _stop_strings(self, params: SamplingParams) -> StopStrings:
        include, min_tokens = params.include_stop_str_in_output, params.min_tokens
        return StopStrings(self.tokenizer.stream(), params.stop, include, min_tokens)

    def _decoder(self, params: SamplingParams) -> IncrementalDecoder:
        """Of an answer that is read while it is made."""
        return self._stop_strings(params) if params.stop else self.tokenizer.stream()


def check_prompt(token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """RequestError unless the prompt has tokens, all of them known, and leaves room for an answer."""
    if not token_ids:
        raise RequestError("prompt is empty; give at least one token")
    if set(map(type, token_ids)) != {int} or min(token_ids) < 0 or max(token_ids) >= vocab_size:
        for token in token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise RequestError(f"prompt holds {token!r}; token ids are whole numbers from 0 to {vocab_size - 1}")
    if len(token_ids) >= max_model_len:
        raise RequestError(
            f"prompt has {len(token_ids)} tokens and max_model_len is {max_model_len}, answer included: shorten it",
            code="context_length_exceeded",
        )
