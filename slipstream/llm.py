"""The face of the engine: give prompts, get answers, whole or as streams.

    llm = LLM("smollm2-135m", speculative=SpeculativeConfig.for_mode("lag", draft_model="smollm2-135m-dspark"))
    print(llm.chat([[{"role": "user", "content": "Why is the sky blue?"}]])[0].text)

`load` turns names into weights and `build` options into an engine, `host` prompts into requests; here these are run.
Several LLMs may share the loaded weights (`Models`); each has its own engine.
"""

import gc
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.backends import Adapt
from slipstream.build import build_engine
from slipstream.commit import Delta
from slipstream.config import EngineConfig, SamplingParams, SpeculativeConfig, from_mapping
from slipstream.decide.policy import Policy
from slipstream.device.events import EventPool, NullRecorder, Recorder
from slipstream.device.staging import compute_stream
from slipstream.draft.base import Drafter
from slipstream.errors import ConfigError, EngineError, RequestError
from slipstream.grammars import XGrammars
from slipstream.host import Facts, Host, Message
from slipstream.load import Models, Note, load_models
from slipstream.logprobs import TokenLogprob
from slipstream.metrics import SpecCounters, Timing
from slipstream.request import FinishReason, Request
from slipstream.sizes import WHOLE, Share
from slipstream.stream import Chunk, StopStrings

log = logging.getLogger("slipstream")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished answer. The text ends before a stop string, the tokens with the one that completed it."""

    text: str
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]  # per token: it was an accepted draft
    finish_reason: FinishReason
    prompt_tokens: int
    spec: SpecCounters
    timing: Timing
    error: str | None = None  # why, when finish_reason is "error"
    stop_reason: int | str | None = None  # the token or the stop string that ended it, when finish_reason is "stop"
    index: int = 0  # among the answers to its prompt
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token, if they were asked for
    # One per prompt token, None for the first, if they were asked for; fewer when an error ended the answer.
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def usage(self) -> dict[str, int]:
        """Of this answer alone. Answers to one prompt share its tokens: see `usage_of`."""
        return usage_of([self])


class LLM(Host):
    """A target model with a way of speculating.

    model: a name, or Models that are loaded already. speculative: None for plain decoding. drafter, policy: objects of
    your own in place of those that `speculative` would make (its draft_model is then only a name). adapt: a wrapper of
    the parts that the backend made, for measurements. The other options are the fields of `EngineConfig`. What was
    chosen, and why, stands in `notes`. share: the part of the memory at hand that this LLM may have, where several are
    made one after another. One thread at a time: streams may be read in turn, but not from several threads.
    """

    def __init__(
        self,
        model: str | Models,
        *,
        speculative: SpeculativeConfig | None = None,
        drafter: Drafter | None = None,
        policy: Policy | None = None,
        adapt: Adapt | None = None,
        share: Share = WHOLE,
        **engine_options: Any,
    ) -> None:
        self.speculative = SpeculativeConfig() if speculative is None else speculative
        if not isinstance(self.speculative, SpeculativeConfig):
            raise ConfigError(f"speculative is {speculative!r}; give a SpeculativeConfig, or None for plain decoding")
        self.config = from_mapping(EngineConfig, engine_options)
        if isinstance(model, str | os.PathLike):
            model = load_models(
                str(model), self.speculative.draft_model if drafter is None else None, dtype=self.config.dtype,
                device=self.config.device, layout=self.speculative.draft_layout,
            )  # fmt: skip
        if not isinstance(model, Models):
            raise ConfigError(f"model is {model!r}; give a name, a path or loaded Models")
        self.models = model
        self.notes: list[Note] = list(model.notes)
        self._given = drafter, policy, adapt
        self.engine, self._pool = build_engine(model, self.speculative, self.config, self.notes, *self._given, share)
        self.engine.totals.mode = self.speculative.mode
        self._events = EventPool(stream=compute_stream(model.device)) if model.device.type == "cuda" else None
        grammars = XGrammars(model.tokenizer, model.vocab_size, model.eos_token_ids)
        super().__init__(model.tokenizer, self._facts(), grammars)
        for field, value, reason in self.notes:
            log.info("%s = %s (%s)", field, value, reason)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answers to raw texts or token ids, in the order of the prompts.

        With `SamplingParams.n` above 1 a prompt's answers stand next to each other, numbered by `Completion.index`.
        Answer i to a prompt with seed s is the one that seed `request.sibling_seed(s, i)` gives alone (sampled under
        rejection: one of the same law, for drafts and widths have a part in it there).
        """
        if not isinstance(prompts, Iterable):
            raise RequestError(f"prompts is {prompts!r}; give a text, or a list of texts or token ids")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        given = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else _listed(params)
        if len(given) != len(prompts):
            raise RequestError(f"params: {len(given)} SamplingParams for {len(prompts)} prompts; give one, or one each")
        # All are checked before the first is added, so that a bad one disturbs nobody.
        requests = [each for pair in zip(prompts, given, strict=True) for each in self._requests(*pair, self._go_on)]
        self._run(requests)
        return [self._completion(request) for request in requests]

    def chat(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answers to conversations (lists of {"role", "content"}), through the model's chat template."""
        return self.generate([self.chat_ids(messages) for messages in conversations], params)

    def stream(
        self, prompt: str | Sequence[int] | Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[Chunk]:
        """The answer to one raw text or conversation, step by step. Closing the iterator ends the request.

        With `SamplingParams.n` above 1 chunks of all answers come in turn; `Chunk.index` says whose.
        """
        is_chat = isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        given = self.chat_ids(prompt) if is_chat else prompt  # type: ignore[arg-type]
        return self._stream(self._requests(given, params, self._go_on))  # type: ignore[arg-type]

    def record(self) -> Recorder:
        """Switch on the recording of stage spans; see `slipstream.device.events`. On a GPU it waits for the device."""
        self.engine.recorder = Recorder(self._events)
        return self.engine.recorder

    def stop_recording(self) -> None:
        """What was recorded stays with whoever holds the recorder."""
        self.engine.recorder = NullRecorder()

    def restart(self) -> None:
        """A new engine over the same weights, with the totals of the old one, whose requests are lost.

        Its KV pool is as large. A drafter or a policy of your own is used again as it stands. Where there is no room for it
        (CapacityError), there is no engine until a later call succeeds.
        """
        if hasattr(self, "engine"):  # the one before may have found no room
            self._counted = self.engine.totals, self.engine.num_decode_steps
            del self.engine
        gc.collect()  # on a device there may be no room for two
        if self.models.device.type == "cuda":
            torch.cuda.empty_cache()
        notes = list(self.notes)  # they are not said again
        self.engine, _ = build_engine(self.models, self.speculative, self.config, notes, *self._given, pool=self._pool)
        self.engine.totals, self.engine.num_decode_steps = self._counted
        self.facts = self._facts()

    # ------------------------------------------------------------------ for its own methods

    def _facts(self) -> Facts:
        scheduler, models = self.engine.scheduler, self.models
        return Facts(
            vocab_size=models.vocab_size,
            eos_token_ids=models.eos_token_ids,
            dtype=str(models.dtype).removeprefix("torch."),
            speculative=self.speculative,
            seed=self.config.seed,
            limits=scheduler.limits,
            page_size=scheduler.pages.page_size,
            num_pages=scheduler.pages.num_usable,
        )

    def _stream(self, requests: list[Request]) -> Iterator[Chunk]:
        texts = {request.uid: self.text_stream(request) for request in requests}
        inbox: deque[Delta] = deque()  # filled by any caller's steps: streams may be read in turn
        try:
            for request in requests:
                self.engine.add(request, inbox)
            while inbox or not all(request.is_finished for request in requests):
                if not inbox:
                    self.engine.step()
                elif (delta := inbox.popleft()).token_ids or delta.finish_reason:
                    yield texts[delta.request.uid].chunk(delta)
            if errors := [request.error for request in requests if request.error]:
                raise EngineError(errors[0])
        finally:
            self._end(requests)

    def _run(self, requests: list[Request]) -> None:
        try:
            for request in requests:
                self.engine.add(request)
            for request in requests:  # of thousands, those that have ended are not looked at in every step
                while not request.is_finished:
                    self.engine.step()
        finally:
            self._end(requests)

    def _end(self, requests: list[Request]) -> None:
        """Abort what an interruption left behind."""
        for request in requests:
            self.engine.abort(request.uid)
        self.engine.drain()

    def _request(self, prompt: str | Sequence[int], params: SamplingParams | None) -> Request:
        """The first, or only, answer that is asked for."""
        return self._requests(prompt, params)[0]

    def _go_on(self) -> bool:
        """A step for those who run while a grammar is compiled; whether there was one."""
        if not self.engine.has_work:
            return False
        self.engine.step()
        return True

    def _text(self, request: Request) -> str:
        watcher = request.watcher
        return watcher.text() if isinstance(watcher, StopStrings) else self.tokenizer.answer(request.output_ids)

    def _completion(self, request: Request) -> Completion:
        assert request.finish_reason is not None
        return Completion(
            text=self._text(request),
            token_ids=tuple(request.output_ids),
            accepted=tuple(request.accepted),
            finish_reason=request.finish_reason,
            prompt_tokens=len(request.prompt_ids),
            spec=request.counters,
            timing=Timing(
                submitted_s=request.submitted_s, first_token_s=request.first_token_s,
                last_token_s=request.last_token_s, num_tokens=len(request.output_ids),
            ),
            error=request.error,
            stop_reason=request.stop_reason,
            index=request.index,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
        )  # fmt: skip


def usage_of(answers: Sequence[Completion]) -> dict[str, int]:
    """Tokens of answers to one prompt, as servers count them: the prompt once, the answers all."""
    return {
        "prompt_tokens": max((answer.prompt_tokens for answer in answers), default=0),
        "completion_tokens": sum(answer.completion_tokens for answer in answers),
    }


def _listed(params: object) -> list[SamplingParams | None]:
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise RequestError(f"params is {params!r}; give a SamplingParams, or a list with one for each prompt")
    return list(params)
