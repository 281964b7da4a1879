"""Options become objects: sizes turn into pools, a mode into a Policy, an acceptance rule into a Rule.

Which drafter serves is decided once (`DraftSource`), with all that depends on it. Below this file nobody compares a
mode, an algorithm or a name. Called by `llm`; knows nothing of prompts and answers.
"""

import logging
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.cache.pages import NUM_RESERVED_PAGES, PageAllocator
from slipstream.cache.pool import KVPool
from slipstream.config import DEFAULT_MAX_DRAFTS, NGRAM, EngineConfig, SpeculativeConfig
from slipstream.decide.cost import CostModel, CostProfile
from slipstream.decide.policy import FullWidth, Policy, make_policy
from slipstream.decide.survival import find_calibration
from slipstream.device.state import SlotState, make_slot_state
from slipstream.draft.base import Drafter
from slipstream.draft.block import BlockDraft
from slipstream.draft.ngram import NGramDraft
from slipstream.engine import Engine
from slipstream.errors import CapacityError, CheckpointError, ConfigError
from slipstream.lab.profile import measure, profile_key, stored_profile
from slipstream.load import Models, Note
from slipstream.models.checkpoint import DrafterSpec
from slipstream.models.drafters import BlockDrafter
from slipstream.models.headers import weights_digest
from slipstream.models.spec import DecoderSpec
from slipstream.scheduler import Scheduler, SchedulerLimits
from slipstream.verify.accept import CoupledRule, RejectionRule, Rule
from slipstream.verify.target import Target

log = logging.getLogger("slipstream")


def build_engine(
    models: Models, speculative: SpeculativeConfig, config: EngineConfig, notes: list[Note],
    drafter: Drafter | None = None, policy: Policy | None = None,
) -> Engine:  # fmt: skip
    """An idle engine for these options. `drafter` and `policy` are the caller's own, in place of those asked for."""
    _check_loaded(models, config)
    source = _draft_source(models, speculative, drafter, notes)
    sizes = _sizes(config, models, source.network, notes)
    pools = _pools(models, source.network, sizes)
    drafter = _drafter(source, pools, models.vocab_size)
    num_drafts = _num_drafts(speculative, drafter, notes)
    engine = Engine(
        target=Target(models.target, pools[0], drafter.tap_layers if drafter else (), models.vocab_size),
        drafter=drafter,
        pools=pools,
        state=_slot_state(sizes, models.device),
        policy=policy or FullWidth(num_drafts),
        rule=_rule(speculative, source.samples),
        scheduler=_scheduler(sizes, num_drafts, drafter.max_position if drafter else 0),
        vocab_size=models.vocab_size,
        device=models.device,
        overlap=config.overlap,
    )
    if policy is None and drafter is not None:  # afterwards: a cost model may have to be measured on the engine
        engine.policy = _policy(speculative, source, engine, models, notes)
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


# --------------------------------------------------------------------------------------------------------------- drafter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftSource:
    """Where drafts come from: a drafter of the caller's own, look-up, the network that was loaded, or nowhere."""

    made: Drafter | None = None  # a drafter that needs nothing more
    network: BlockDrafter | None = None  # or one that needs a KV pool
    name: str = "none"  # what its cost profile is filed under
    folder: Path | None = None  # where its calibration may lie
    algorithm: str | None = None  # what speculative_algorithm has to agree with; None: anything
    samples: bool = True  # sampled requests get drafts drawn at random


def _draft_source(
    models: Models, speculative: SpeculativeConfig, own: Drafter | None, notes: list[Note]
) -> DraftSource:
    source, asked = _source_asked_for(models, speculative, own), speculative.speculative_algorithm
    if source.algorithm is not None and asked not in ("auto", source.algorithm):
        raise ConfigError(
            f"speculative_algorithm is {asked!r}, but {source.name} is a {source.algorithm} drafter; use auto, or name "
            "another drafter"
        )
    if source.algorithm == NGRAM:
        notes.append(("draft_model", NGRAM, "drafts are looked up in each request's own tokens; it has no weights"))
    return source


def _source_asked_for(models: Models, speculative: SpeculativeConfig, own: Drafter | None) -> DraftSource:
    samples = speculative.draft_sampling != "greedy"
    if own is not None:  # its draft_model is only a name; a network that was loaded beside it has no part in it
        return DraftSource(made=own, name=str(speculative.draft_model), samples=samples)
    if speculative.draft_model == NGRAM:
        return DraftSource(made=NGramDraft(models.device), name=NGRAM, algorithm=NGRAM, samples=False)
    if speculative.mode == "off":
        return DraftSource()
    if models.network is None:
        raise ConfigError(f"draft_model {speculative.draft_model!r} was not loaded: pass it to load_models")
    spec = models.network.spec
    if speculative.draft_layout not in ("auto", spec.layout):
        raise ConfigError(
            f"draft_layout is {speculative.draft_layout!r}, but the drafter was loaded as {spec.layout}; "
            "ask load_models for it"
        )
    return DraftSource(
        network=models.network, name=str(models.drafter_name), folder=models.drafter_path, algorithm=spec.algorithm,
        samples=samples,
    )  # fmt: skip


def _drafter(source: DraftSource, pools: tuple[KVPool, ...], vocab_size: int) -> Drafter | None:
    if source.network is None:
        return source.made
    _check_draft_vocabulary(source.network, vocab_size)
    return BlockDraft(source.network, pools[1], vocab_size)


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


# ----------------------------------------------------------------------------------------------------------------- sizes


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
    most_pages = max_num_seqs * -(-max_model_len // config.page_size) + NUM_RESERVED_PAGES
    return _Sizes(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched_tokens,
        max_model_len=max_model_len,
        page_size=config.page_size,
        num_pages=_num_pages(config, models, network, most_pages, notes),
    )


def _num_pages(config: EngineConfig, models: Models, network: BlockDrafter | None, most: int, notes: list[Note]) -> int:
    """What the KV memory holds, but no more than all requests at their longest would fill."""
    page_bytes = _page_bytes(models, network, config.page_size)
    budget = config.kv_memory or _memory_at_hand(models.device)
    num_pages = min(budget // page_bytes, most)
    if num_pages < NUM_RESERVED_PAGES + 1:
        raise CapacityError(
            f"{budget} bytes of KV memory hold {num_pages} pages of {page_bytes} bytes, and "
            f"{NUM_RESERVED_PAGES + 1} are the least that works: raise kv_memory or lower page_size"
        )
    tokens = (num_pages - NUM_RESERVED_PAGES) * config.page_size
    reason = "as asked" if config.kv_memory else "a quarter of the free memory at most"
    notes.append(("kv_memory", num_pages * page_bytes, f"{tokens} tokens of KV; {reason}"))
    return num_pages


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


def _pools(models: Models, network: BlockDrafter | None, sizes: _Sizes) -> tuple[KVPool, ...]:
    """The target's, and a second one for a drafter that keeps KV of its own."""

    def pool(spec: DecoderSpec | DrafterSpec) -> KVPool:
        return KVPool(
            num_layers=spec.num_layers, num_pages=sizes.num_pages, page_size=sizes.page_size,
            num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=models.dtype, device=models.device,
        )  # fmt: skip

    return (pool(models.target.spec),) if network is None else (pool(models.target.spec), pool(network.spec))


def _slot_state(sizes: _Sizes, device: torch.device) -> SlotState:
    try:
        return make_slot_state(sizes.max_num_seqs, sizes.max_model_len, sizes.page_size, device)
    except (RuntimeError, TypeError, MemoryError) as error:  # torch's words for too large, far too large
        raise CapacityError(
            f"max_num_seqs {sizes.max_num_seqs} with max_model_len {sizes.max_model_len} does not fit in memory; "
            "lower one of them"
        ) from error


def _scheduler(sizes: _Sizes, num_drafts: int, max_draft_context: int) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        max_drafts=num_drafts,
        max_draft_context=max_draft_context,
    )
    return Scheduler(limits, PageAllocator(sizes.num_pages, sizes.page_size))


# --------------------------------------------------------------------------------------------------------- rule, policy


def _rule(speculative: SpeculativeConfig, samples: bool) -> Rule:
    return CoupledRule(samples) if speculative.acceptance == "coupled" else RejectionRule(samples)


def _policy(
    speculative: SpeculativeConfig, source: DraftSource, engine: Engine, models: Models, notes: list[Note]
) -> Policy:
    assert engine.drafter is not None
    calibration = find_calibration(speculative.calibration, source.folder)
    policy, reasons = make_policy(
        speculative,
        num_drafts=engine.scheduler.limits.max_drafts,
        has_head=engine.drafter.has_confidence_head,
        drafts_sampled=source.samples,
        cost=_cost_model(speculative, source.name, engine, models, notes),
        calibration=calibration,
        weights=weights_digest(source.folder) if calibration and source.folder else None,
    )
    notes += reasons
    return policy


def _cost_model(
    speculative: SpeculativeConfig, drafter: str, engine: Engine, models: Models, notes: list[Note]
) -> CostModel | None:
    """What steps cost: from the file named, else the profile stored for this pair and machine, else measured now."""
    if not speculative.enable_adaptive_speculative_decode or speculative.cost_model == "none":
        return None
    if speculative.cost_model != "auto":
        notes.append(("cost_model", speculative.cost_model, "as asked"))
        return CostProfile.load(Path(speculative.cost_model)).model()
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
