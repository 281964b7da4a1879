"""The face of the engine: load models, resolve options, generate or stream.

    llm = LLM("smollm2-135m", speculative=SpeculativeConfig.for_mode("lag", draft_model="smollm2-135m-dspark"))
    print(llm.chat([[{"role": "user", "content": "Why is the sky blue?"}]])[0].text)

This is where options become objects: a mode turns into a Policy, an acceptance rule into a Rule, sizes into pools.
Below this file nobody compares a mode. Several LLMs may share the loaded weights (`Models`); each has its own engine.
"""

import logging
import os
import platform
import random
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.cache.pages import NUM_RESERVED_PAGES, PageAllocator
from slipstream.cache.pool import KVPool
from slipstream.commit import Delta
from slipstream.config import (
    DEFAULT_MAX_DRAFTS,
    NGRAM,
    EngineConfig,
    SamplingParams,
    SpeculativeConfig,
    from_mapping,
)
from slipstream.decide.cost import CostModel, CostProfile
from slipstream.decide.policy import FullWidth, Policy, make_policy
from slipstream.decide.survival import find_calibration
from slipstream.device.events import Recorder
from slipstream.device.state import make_slot_state
from slipstream.draft.base import Drafter
from slipstream.draft.block import BlockDraft
from slipstream.draft.ngram import NGramDraft
from slipstream.engine import Engine
from slipstream.errors import CapacityError, CheckpointError, ConfigError, EngineError, RequestError, SlipstreamError
from slipstream.lab.profile import measure, profile_key, stored_profile
from slipstream.metrics import SpecCounters, Timing
from slipstream.models.checkpoint import DrafterSpec
from slipstream.models.decoder import Decoder
from slipstream.models.drafters import BlockDrafter, load_drafter
from slipstream.models.layers import prepack_networks
from slipstream.models.locate import resolve_drafter, resolve_target
from slipstream.models.probe import PROMPT, layout_agreement
from slipstream.models.spec import DecoderSpec
from slipstream.models.tokenizer import Tokenizer, load_tokenizer
from slipstream.models.weights import load_decoder
from slipstream.request import FinishReason, Request
from slipstream.scheduler import Scheduler, SchedulerLimits
from slipstream.stream import Chunk, TextStream
from slipstream.verify.accept import CoupledRule, RejectionRule
from slipstream.verify.target import Target

log = logging.getLogger("slipstream")

Message = Mapping[str, str]
Note = tuple[str, object, str]  # field, value, reason


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """Loaded weights and the tokenizer; read-only, so that several engines can share them."""

    target: Decoder
    tokenizer: Tokenizer
    network: BlockDrafter | None
    target_name: str
    drafter_name: str | None
    drafter_path: Path | None
    notes: tuple[Note, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.target.head_weight.dtype

    @property
    def device(self) -> torch.device:
        return self.target.head_weight.device

    @property
    def vocab_size(self) -> int:
        """Ids that mean something; the target's table may be padded beyond them."""
        return min(self.tokenizer.vocab_size, self.target.spec.vocab_size)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.eos_token_ids) | frozenset(self.target.spec.eos_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished answer."""

    text: str
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]  # per token: it was an accepted draft
    finish_reason: FinishReason
    prompt_tokens: int
    spec: SpecCounters
    timing: Timing
    error: str | None = None  # why, when finish_reason is "error"


def load_models(
    model: str, draft_model: str | None = None, *, dtype: str = "auto", device: str = "auto", layout: str = "auto"
) -> Models:
    """Load a target (folder, .gguf file or built-in name), its tokenizer, and a drafter (folder, built-in name, or ngram).

    `layout` other than auto overrides what the drafter says about its rows (`SpeculativeConfig.draft_layout`).
    """
    notes: list[Note] = []
    on = _device(device, notes)
    kind = _dtype(dtype, on, notes)
    path = resolve_target(model)
    target = load_decoder(path, kind, on)
    tokenizer = load_tokenizer(path)
    folder = None if draft_model is None or draft_model == NGRAM else resolve_drafter(draft_model)
    asked = None if layout == "auto" else layout
    network = None if folder is None else load_drafter(folder, target, kind, on, asked)
    if network is not None:
        notes.append(("layout", network.spec.layout, network.spec.layout_reason))
    if prepack_networks(target, *([network] if network else [])):
        notes.append(("weights", "prepacked", "in the order in which this CPU multiplies bf16 matrices"))
    if network is not None and network.spec.dialect != "slipstream":  # our own files say twice how they are read
        notes.append(_probe(target, network, tokenizer))
    return Models(target, tokenizer, network, model, draft_model, folder, tuple(notes))


def _probe(target: Decoder, network: BlockDrafter, tokenizer: Tokenizer) -> Note:
    """Whether the drafter's rows are read rightly; a layout that the target's own tokens contradict is warned of."""
    try:
        prompt = tokenizer.chat([{"role": "user", "content": PROMPT}])
    except SlipstreamError:  # no chat template, or one that wants other messages
        prompt = PROMPT
    found = layout_agreement(target, network, tokenizer.encode(prompt))
    if found is None:
        return ("layout_probe", "not run", "the target is too slow, or a context too short, to compare with its answer")
    if found.verdict == "contradicts":
        log.warning("the drafter's layout is probably wrong: %s; set draft_layout to %s", found, found.other_layout)
    return ("layout_probe", found.verdict, str(found))


class LLM:
    """A target model with a way of speculating.

    model: a name, or Models that are loaded already. speculative: None for plain decoding. drafter, policy: objects of
    your own in place of those that `speculative` would make (its draft_model is then only a name). The other options
    are the fields of `EngineConfig`. What was chosen, and why, stands in `notes`. One thread at a time: streams may be
    read in turn, but not from several threads.
    """

    def __init__(
        self,
        model: str | Models,
        *,
        speculative: SpeculativeConfig | None = None,
        drafter: Drafter | None = None,
        policy: Policy | None = None,
        **engine_options: Any,
    ) -> None:
        self.speculative = SpeculativeConfig() if speculative is None else speculative
        if not isinstance(self.speculative, SpeculativeConfig):
            raise ConfigError(f"speculative is {speculative!r}; give a SpeculativeConfig, or None for plain decoding")
        self.config = from_mapping(EngineConfig, engine_options)
        if isinstance(model, str | os.PathLike):
            draft_model = self.speculative.draft_model if drafter is None else None
            sort, layout = self.config.dtype, self.speculative.draft_layout
            model = load_models(str(model), draft_model, dtype=sort, device=self.config.device, layout=layout)
        if not isinstance(model, Models):
            raise ConfigError(f"model is {model!r}; give a name, a path or loaded Models")
        self.models = model
        self.tokenizer = model.tokenizer
        self.notes: list[Note] = list(model.notes)
        self.engine = build_engine(model, self.speculative, self.config, self.notes, drafter, policy)
        self.engine.totals.mode = self.speculative.mode
        self._seeds = random.Random(self.config.seed)
        self._next_uid = 0
        for field, value, reason in self.notes:
            log.info("%s = %s (%s)", field, value, reason)

    @property
    def max_model_len(self) -> int:
        return self.engine.scheduler.limits.max_model_len

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answers to raw texts or token ids, in the order of the prompts."""
        if not isinstance(prompts, Iterable):
            raise RequestError(f"prompts is {prompts!r}; give a text, or a list of texts or token ids")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        given = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else _listed(params)
        if len(given) != len(prompts):
            raise RequestError(f"params: {len(given)} SamplingParams for {len(prompts)} prompts; give one, or one each")
        # All are checked before the first is added, so that a bad one disturbs nobody.
        requests = [self._request(prompt, each) for prompt, each in zip(prompts, given, strict=True)]
        self._run(requests)
        return [self._completion(request) for request in requests]

    def chat(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answers to conversations (lists of {"role", "content"}), through the model's chat template."""
        return self.generate([self._chat_ids(messages) for messages in conversations], params)

    def stream(
        self, prompt: str | Sequence[int] | Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[Chunk]:
        """The answer to one raw text or conversation, step by step. Closing the iterator ends the request."""
        is_chat = isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        given = self._chat_ids(prompt) if is_chat else prompt  # type: ignore[arg-type]
        return self._stream(self._request(given, params))  # type: ignore[arg-type]

    def record(self) -> Recorder:
        """Switch on the recording of stage spans; see `slipstream.device.events`."""
        self.engine.recorder = Recorder()
        return self.engine.recorder

    def _stream(self, request: Request) -> Iterator[Chunk]:
        text = TextStream(self.tokenizer.stream())
        inbox: deque[Delta] = deque()  # filled by any caller's steps: streams may be read in turn
        self.engine.add(request, inbox)
        try:
            while inbox or not request.is_finished:
                if not inbox:
                    self.engine.step()
                elif (delta := inbox.popleft()).token_ids or delta.finish_reason:
                    yield text.chunk(delta)
            if request.error:
                raise EngineError(request.error)
        finally:
            self.engine.abort(request.uid)
            self.engine.drain()

    def _run(self, requests: list[Request]) -> None:
        try:
            for request in requests:
                self.engine.add(request)
            while not all(request.is_finished for request in requests):
                self.engine.step()
        finally:
            for request in requests:
                self.engine.abort(request.uid)  # only what an interruption left behind
            self.engine.drain()

    def _chat_ids(self, messages: Sequence[Message]) -> list[int]:
        return self.tokenizer.encode(self.tokenizer.chat(messages))

    def _request(self, prompt: str | Sequence[int], params: SamplingParams | None) -> Request:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is {params!r}; give a SamplingParams")
        if not isinstance(prompt, Iterable):
            raise RequestError(f"prompt is {prompt!r}; give a text or a list of token ids")
        token_ids = self.tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else list(prompt)
        check_prompt(token_ids, self.models.vocab_size, self.max_model_len)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        self._next_uid += 1
        return Request(
            uid=self._next_uid,
            prompt_ids=tuple(token_ids),
            params=params,
            seed=seed,
            eos_token_ids=self.models.eos_token_ids,
            counters=SpecCounters(mode=self.speculative.mode),
        )

    def _completion(self, request: Request) -> Completion:
        assert request.finish_reason is not None
        return Completion(
            text=self.tokenizer.decode(request.output_ids),
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
        )  # fmt: skip


def _listed(params: object) -> list[SamplingParams | None]:
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise RequestError(f"params is {params!r}; give a SamplingParams, or a list with one for each prompt")
    return list(params)


def check_prompt(token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """RequestError unless the prompt has tokens, all of them known, and leaves room for an answer."""
    if not token_ids:
        raise RequestError("prompt is empty; give at least one token")
    for token in token_ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise RequestError(f"prompt holds {token!r}; token ids are whole numbers from 0 to {vocab_size - 1}")
    if len(token_ids) >= max_model_len:
        raise RequestError(
            f"prompt has {len(token_ids)} tokens and max_model_len is {max_model_len}, answer included: shorten it"
        )


# ---------------------------------------------------------------------------------------------- options become objects


def build_engine(
    models: Models, speculative: SpeculativeConfig, config: EngineConfig, notes: list[Note],
    drafter: Drafter | None = None, policy: Policy | None = None,
) -> Engine:  # fmt: skip
    """Pools, scheduler, policy and rule for these options."""
    device, vocab_size = models.device, models.vocab_size
    looks_up = speculative.draft_model == NGRAM and drafter is None  # whatever network was loaded beside it
    if looks_up:
        drafter = NGramDraft(device)
        notes.append(("draft_model", NGRAM, "drafts are looked up in each request's own tokens; it has no weights"))
    if speculative.mode != "off" and drafter is None and models.network is None:
        raise ConfigError(f"draft_model {speculative.draft_model!r} was not loaded: pass it to load_models")
    network = models.network if speculative.mode != "off" and drafter is None else None
    _check_loaded(models, config)
    if network is not None and speculative.draft_layout not in ("auto", network.spec.layout):
        raise ConfigError(
            f"draft_layout is {speculative.draft_layout!r}, but the drafter was loaded as {network.spec.layout}; "
            "ask load_models for it"
        )
    sizes = _sizes(config, models, network, notes)
    target_pool, draft_pool = _pools(models, network, sizes.num_pages, sizes.page_size)
    if draft_pool is not None and network is not None:
        _check_draft_vocabulary(network, vocab_size)
        drafter = BlockDraft(network, draft_pool, vocab_size)
    _check_algorithm(speculative, models, looks_up)
    num_drafts = _num_drafts(speculative, drafter, notes)
    samples = speculative.draft_sampling != "greedy"
    try:
        state = make_slot_state(sizes.max_num_seqs, sizes.max_model_len, sizes.page_size, device)
    except (RuntimeError, TypeError, MemoryError) as error:  # torch's words for too large, far too large
        raise CapacityError(
            f"max_num_seqs {sizes.max_num_seqs} with max_model_len {sizes.max_model_len} does not fit in memory; "
            "lower one of them"
        ) from error
    engine = Engine(
        target=Target(models.target, target_pool, drafter.tap_layers if drafter else (), vocab_size),
        drafter=drafter,
        pools=(target_pool,) if draft_pool is None else (target_pool, draft_pool),
        state=state,
        policy=policy or FullWidth(num_drafts),
        rule=CoupledRule(samples) if speculative.acceptance == "coupled" else RejectionRule(samples),
        scheduler=Scheduler(
            SchedulerLimits(
                max_num_seqs=sizes.max_num_seqs,
                max_num_batched_tokens=sizes.max_num_batched_tokens,
                max_model_len=sizes.max_model_len,
                max_drafts=num_drafts,
                max_draft_context=drafter.max_position if drafter else 0,
            ),
            PageAllocator(sizes.num_pages, sizes.page_size),
        ),
        vocab_size=vocab_size,
        device=device,
        overlap=config.overlap,
    )
    if policy is None and drafter is not None:
        engine.policy, reasons = make_policy(
            speculative,
            num_drafts=num_drafts,
            has_head=drafter.has_confidence_head,
            drafts_sampled=samples and not looks_up,
            cost=_cost_model(speculative, engine, models, notes),
            calibration=_calibration(speculative, models),
        )
        notes += reasons
    return engine


def _check_loaded(models: Models, config: EngineConfig) -> None:
    """Weights that are loaded already stay what and where they are."""
    dtype = str(models.dtype).removeprefix("torch.")
    if config.dtype not in ("auto", dtype):
        raise ConfigError(f"dtype is {config.dtype!r}, but the models were loaded as {dtype}; ask load_models for it")
    if config.device not in ("auto", str(models.device), models.device.type):
        raise ConfigError(
            f"device is {config.device!r}, but the models were loaded on {models.device}; ask load_models for it"
        )


def _device(asked: str, notes: list[Note]) -> torch.device:
    if asked != "auto":
        if asked.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"device is {asked!r}, but torch sees no GPU; use device auto or cpu")
        try:
            return torch.device(asked)
        except RuntimeError as error:
            raise ConfigError(f"device is {asked!r}; choose auto, cpu, cuda or cuda:N") from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    notes.append(("device", str(device), "a GPU is there" if device.type == "cuda" else "torch sees no GPU"))
    return device


def _dtype(asked: str, device: torch.device, notes: list[Note]) -> torch.dtype:
    if asked != "auto":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[asked]
    if device.type == "cuda" or _cpu_has_bf16():
        notes.append(("dtype", "bfloat16", f"the {device.type} computes it natively"))
        return torch.bfloat16
    notes.append(("dtype", "float32", "this CPU has no bf16 instructions"))
    return torch.float32


def _cpu_has_bf16() -> bool:
    """Whether matrix products in bf16 are native: emulated, they are many times slower than fp32."""
    if platform.system() != "Linux":
        return platform.machine() == "arm64"
    flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int


def _sizes(config: EngineConfig, models: Models, network: BlockDrafter | None, notes: list[Note]) -> _Sizes:
    on_gpu, limit = models.device.type == "cuda", models.target.spec.max_position_embeddings
    max_num_seqs = config.max_num_seqs or (256 if on_gpu else 64)
    max_model_len = config.max_model_len or limit
    if max_model_len > limit:
        raise ConfigError(f"max_model_len is {max_model_len}, the target knows {limit} positions; lower it")
    if max_model_len < 2:
        raise ConfigError(f"max_model_len is {max_model_len}; a prompt token and one answer token need 2")
    batched_tokens = config.max_num_batched_tokens or max(8192 if on_gpu else 512, 2 * max_num_seqs)
    if batched_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {batched_tokens}, less than max_num_seqs ({max_num_seqs}): requests that decode "
            f"could fill every step and no prompt would be read; raise the one or lower the other"
        )
    page_bytes = _page_bytes(models, network, config.page_size)
    pages_each = -(-max_model_len // config.page_size)
    budget = config.kv_memory or _memory_at_hand(models.device)
    num_pages = min(budget // page_bytes, max_num_seqs * pages_each + NUM_RESERVED_PAGES)
    if num_pages < NUM_RESERVED_PAGES + 1:
        raise CapacityError(
            f"{budget} bytes of KV memory hold {num_pages} pages of {page_bytes} bytes, and "
            f"{NUM_RESERVED_PAGES + 1} are the least that works: raise kv_memory or lower page_size"
        )
    tokens = (num_pages - NUM_RESERVED_PAGES) * config.page_size
    reason = "as asked" if config.kv_memory else "a quarter of the free memory at most"
    notes.append(("kv_memory", num_pages * page_bytes, f"{tokens} tokens of KV; {reason}"))
    return _Sizes(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched_tokens,
        max_model_len=max_model_len,
        page_size=config.page_size,
        num_pages=num_pages,
    )


def _memory_at_hand(device: torch.device) -> int:
    """A quarter of what is free, in bytes: other engines and the activations need theirs."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 4
    meminfo = Path("/proc/meminfo")  # what sysconf calls available leaves out the page cache, which fills with uptime
    found = re.search(r"^MemAvailable: +(\d+) kB", meminfo.read_text(), re.MULTILINE) if meminfo.is_file() else None
    return int(found[1]) * 1024 // 4 if found else 2 << 30


def _page_bytes(models: Models, network: BlockDrafter | None, page_size: int) -> int:
    specs: list[DecoderSpec | DrafterSpec] = [models.target.spec, *([network.spec] if network else [])]
    return sum(
        KVPool.page_bytes(spec.num_layers, page_size, spec.num_kv_heads, spec.head_dim, models.dtype) for spec in specs
    )


def _pools(
    models: Models, network: BlockDrafter | None, num_pages: int, page_size: int
) -> tuple[KVPool, KVPool | None]:
    def pool(spec: DecoderSpec | DrafterSpec) -> KVPool:
        return KVPool(
            num_layers=spec.num_layers, num_pages=num_pages, page_size=page_size, num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim, dtype=models.dtype, device=models.device,
        )  # fmt: skip

    return pool(models.target.spec), None if network is None else pool(network.spec)


def _check_algorithm(speculative: SpeculativeConfig, models: Models, looks_up: bool) -> None:
    asked, name, found = speculative.speculative_algorithm, models.drafter_name, None
    if looks_up:
        name = found = NGRAM
    elif models.network is not None:
        found = models.network.spec.algorithm
    if found is not None and asked not in ("auto", found):
        raise ConfigError(
            f"speculative_algorithm is {asked!r}, but {name} is a {found} drafter; use auto, or name another drafter"
        )


def _check_draft_vocabulary(network: BlockDrafter, vocab_size: int) -> None:
    """Noise and rejection go by the ids that the tokenizer knows; a padding id of the table has no place there."""
    highest = int(network.draft_token_ids[-1])  # they ascend
    if network.spec.draft_vocab_size is not None and highest >= vocab_size:
        raise CheckpointError(
            f"d2t maps to token id {highest}, which only pads the target's table: the tokenizer knows {vocab_size} ids; "
            "use a drafter made for this tokenizer"
        )


def _num_drafts(speculative: SpeculativeConfig, drafter: Drafter | None, notes: list[Note]) -> int:
    """S."""
    if drafter is None:
        return 0
    most, asked = drafter.max_draft_tokens, speculative.num_speculative_tokens
    if asked is None:
        notes.append(("num_speculative_tokens", min(most, DEFAULT_MAX_DRAFTS), f"the drafter drafts {most}"))
        return min(most, DEFAULT_MAX_DRAFTS)
    if asked > most:
        raise ConfigError(f"num_speculative_tokens is {asked}, the drafter drafts at most {most}; lower it")
    return asked


def _cost_model(speculative: SpeculativeConfig, engine: Engine, models: Models, notes: list[Note]) -> CostModel | None:
    """What steps cost: from the file named, else the profile stored for this pair and machine, else measured now."""
    if not speculative.enable_adaptive_speculative_decode or speculative.cost_model == "none":
        return None
    if speculative.cost_model != "auto":
        notes.append(("cost_model", speculative.cost_model, "as asked"))
        return CostProfile.load(Path(speculative.cost_model)).model()
    drafter = NGRAM if speculative.draft_model == NGRAM else str(models.drafter_name)
    key = profile_key(models.target_name, drafter, models.device, models.dtype)
    profile = stored_profile(key, engine)
    reason = "stored for this machine and pair"
    if profile is None:
        profile, reason = measure(engine, key), "measured at start and stored"
        try:
            profile.save()
        except OSError as error:  # a home that cannot be written to costs the next start some seconds, no more
            reason = f"measured at start, not stored: {error}"
            log.warning("the cost model measured at start was not stored: %s", error)
    notes.append(("cost_model", str(key.path()), reason))
    return profile.model()


def _calibration(speculative: SpeculativeConfig, models: Models) -> Path | None:
    # ngram has no folder, and that of a network beside it is not for it.
    folder = None if speculative.draft_model == NGRAM else models.drafter_path
    return find_calibration(speculative.calibration, folder)
