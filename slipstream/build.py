"""Options become objects: sizes turn into pools, a mode into a Policy, an acceptance rule into a Rule.

Which drafter serves is decided once (`DraftSource`), with all that depends on it. Below this file nobody compares a
mode, an algorithm or a name. Called by `llm`; knows nothing of prompts and answers.
"""

import importlib.util
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console
from rich.progress import Progress

from slipstream.backends import BACKENDS, Adapt, Ingredients
from slipstream.cache.pages import PageAllocator
from slipstream.cache.shared import SharedPages
from slipstream.config import DEFAULT_MAX_DRAFTS, NGRAM, NOT_DETERMINISTIC, EngineConfig, Signal, SpeculativeConfig
from slipstream.decide.calibration import find_calibration
from slipstream.decide.cost import CostModel, CostProfile
from slipstream.decide.make import draft_signal, make_policy
from slipstream.decide.pace import draft_lengths
from slipstream.decide.policy import FullWidth, Policy
from slipstream.device.memory import memory_of, must_fit
from slipstream.draft.base import Drafter
from slipstream.draft.ngram import NGramDraft
from slipstream.engine import Engine
from slipstream.errors import ConfigError
from slipstream.lab.profile import measure, profile_key, stored_profile
from slipstream.load import Models, Note
from slipstream.models.drafters import BlockDrafter
from slipstream.models.headers import weights_digest
from slipstream.peak import free_use, measure_peak, promise
from slipstream.scheduler import Scheduler, SchedulerLimits
from slipstream.sizes import WHOLE, Peak, PoolSize, Share, Sizes, engine_sizes, pool_request, size_pool

log = logging.getLogger("slipstream")

NO_ROOM_FOR_POSITIONS = "rotary tables of {} positions do not fit in memory: lower max_model_len"
NO_ROOM_FOR_BUFFERS = "an engine's buffers and graphs do not fit beside its KV pool: lower kv_memory or max_num_seqs"


class Built(NamedTuple):
    engine: Engine
    pool: PoolSize


def build_engine(
    models: Models, speculative: SpeculativeConfig, config: EngineConfig, notes: list[Note],
    drafter: Drafter | None = None, policy: Policy | None = None, adapt: Adapt | None = None, share: Share = WHOLE,
    pool: PoolSize | None = None,
) -> Built:  # fmt: skip
    """An idle engine for these options. `drafter` and `policy` are the caller's own, in place of those asked for.

    `adapt` is given the parts that the backend made and says what the engine runs in their place. `share` is the
    engine's part of the memory at hand, where several are made. `pool`: as large as one before, whatever is at hand.
    """
    _check_loaded(models, config)
    source = _draft_source(models, speculative, drafter, notes)
    num_drafts = _num_drafts(speculative, source, notes)
    recipe = _Recipe(
        models=models, source=source, backend=_backend(config, models, notes),
        prunes=speculative.enable_adaptive_speculative_decode or policy is not None,
        coupled=speculative.acceptance == "coupled", config=config,
        signal=draft_signal(speculative, has_head=source.has_head, drafts_sampled=source.samples),
    )  # fmt: skip
    lengths = draft_lengths(num_drafts) if recipe.prunes else (num_drafts,)
    sizes = engine_sizes(config, models, num_drafts)
    _reach_positions(models, source.network, sizes)
    if pool is None:
        pool = _pool_size(sizes, recipe, lengths, share, notes)
    if config.deterministic:
        rejects = speculative.acceptance == "rejection"
        notes.append(
            ("deterministic", True, "of greedy texts; sampled ones depend on drafts" if rejects else "as asked")
        )
    taken_before = 0 if pool.beside is None else free_use(models.device).taken
    with must_fit(lambda: f"{NO_ROOM_FOR_BUFFERS}; {memory_of(models.device)}"):
        engine = recipe.engine(replace(sizes, num_pages=pool.num_pages), policy, adapt)
        _capture(engine, lengths, notes)
    if pool.beside is not None:
        promise(engine, taken_before + pool.num_bytes + pool.beside - free_use(models.device).taken)
    if policy is None and engine.drafter is not None:  # at last: a cost model may have to be measured on the engine
        engine.policy = _policy(speculative, source, engine, models, notes, config.deterministic)
    return Built(engine, pool)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Recipe:
    """All of an engine but its sizes."""

    models: Models
    source: "DraftSource"
    config: EngineConfig
    backend: str
    signal: Signal | Literal["none"]
    coupled: bool
    prunes: bool

    def engine(self, sizes: Sizes, policy: Policy | None = None, adapt: Adapt | None = None) -> Engine:
        source, models = self.source, self.models
        parts = BACKENDS[self.backend](
            Ingredients(
                models=models, sizes=sizes, made=source.made, network=source.network, samples=source.samples,
                coupled=self.coupled, prunes=self.prunes, deterministic=self.config.deterministic,
            )
        )  # fmt: skip
        parts = parts if adapt is None else adapt(parts)
        return Engine(
            target=parts.target,
            drafter=parts.drafter,
            backend=parts.backend,
            policy=policy or FullWidth(sizes.num_drafts, self.signal),
            rule=parts.rule,
            scheduler=_scheduler(sizes, source.max_position, self.config.prefix_caching),
            vocab_size=models.vocab_size,
            device=models.device,
            overlap=models.device.type == "cuda" if self.config.overlap is None else self.config.overlap,
        )

    @property
    def rehearsed(self) -> "_Recipe":
        """With look-up in place of a drafter of the caller's own, which is to see real requests only."""
        if self.source.made is None or self.source.algorithm == NGRAM:
            return self
        return replace(
            self, source=DraftSource(made=NGramDraft(self.models.device), samples=self.source.samples), signal="none"
        )


def _reach_positions(models: Models, network: BlockDrafter | None, sizes: Sizes) -> None:
    """Rotary tables go as far as a context, and the block that is drafted behind it."""
    wanted = sizes.max_model_len + sizes.num_drafts + 1
    for each in (models.target, network):
        if each is not None:
            needed = each.rotary.bytes_to_reach(wanted)
            with must_fit(
                lambda: f"{NO_ROOM_FOR_POSITIONS.format(sizes.max_model_len)}; {memory_of(models.device)}", needed
            ):
                each.rotary.reach(wanted)


def _pool_size(sizes: Sizes, recipe: _Recipe, lengths: Sequence[int], share: Share, notes: list[Note]) -> PoolSize:
    """On a GPU by what an engine of these sizes is seen to take, unless the pool's bytes were asked for."""
    device = recipe.models.device
    asked = pool_request(recipe.config, recipe.models, recipe.source.network, sizes, share)

    def peak() -> Peak:
        return measure_peak(partial(recipe.rehearsed.engine, sizes), device, lengths, asked.least)

    return size_pool(recipe.config, asked, partial(free_use, device) if device.type == "cuda" else None, peak, notes)


def _backend(config: EngineConfig, models: Models, notes: list[Note]) -> str:
    on_gpu, has_triton = models.device.type == "cuda", importlib.util.find_spec("triton") is not None
    if config.backend == "auto":
        found = "triton" if on_gpu and has_triton else "torch"
        if config.deterministic and found == "torch":
            raise ConfigError(f"deterministic on {models.device}: {NOT_DETERMINISTIC}")
        reason = "fused kernels and CUDA graphs" if found == "triton" else "no triton" if on_gpu else "no GPU"
        notes.append(("backend", found, reason))
        return found
    if config.backend == "triton" and not has_triton:
        raise ConfigError("backend is 'triton', which is not installed: pip install triton, or use backend auto")
    if config.backend == "triton" and not on_gpu:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError("backend is 'triton', which needs a GPU; use backend auto")
        notes.append(("backend", "triton", "interpreted, as tests do it"))
    return config.backend


def _capture(engine: Engine, lengths: Sequence[int], notes: list[Note]) -> None:
    """Stages become CUDA graphs, where the backend has any."""
    if engine.backend.captures:
        from slipstream.capture import capture

        console = Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
            task = bar.add_task("recording CUDA graphs")
            count = capture(engine, lengths, lambda done, total: bar.update(task, completed=done, total=total))
        notes.append(("graphs", count, "one for each stage and padded shape"))


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

    @property
    def max_draft_tokens(self) -> int:
        """S at most; 0 where nothing drafts."""
        if self.network is not None:
            return self.network.spec.max_draft_tokens
        return self.made.max_draft_tokens if self.made else 0

    @property
    def max_position(self) -> int:
        """A block must end before this position."""
        if self.network is not None:
            return self.network.spec.max_position_embeddings
        return self.made.max_position if self.made else 0

    @property
    def has_head(self) -> bool:
        if self.network is not None:
            return self.network.confidence_head is not None
        return self.made is not None and self.made.has_confidence_head


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


def _num_drafts(speculative: SpeculativeConfig, source: DraftSource, notes: list[Note]) -> int:
    """S."""
    most, asked = source.max_draft_tokens, speculative.num_speculative_tokens
    if most == 0:
        return 0
    if asked is None:
        notes.append(("num_speculative_tokens", min(most, DEFAULT_MAX_DRAFTS), f"the drafter drafts {most}"))
        return min(most, DEFAULT_MAX_DRAFTS)
    if asked > most:
        raise ConfigError(f"num_speculative_tokens is {asked}, the drafter drafts at most {most}; lower it")
    return asked


# ------------------------------------------------------------------------------------------------ scheduler, policy


def _scheduler(sizes: Sizes, max_draft_context: int, prefix_caching: bool) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        max_drafts=sizes.num_drafts,
        max_draft_context=max_draft_context,
    )
    allocator = SharedPages if prefix_caching else PageAllocator
    return Scheduler(limits, allocator(sizes.num_pages, sizes.page_size))


def _policy(
    speculative: SpeculativeConfig, source: DraftSource, engine: Engine, models: Models, notes: list[Note],
    deterministic: bool,
) -> Policy:  # fmt: skip
    assert engine.drafter is not None
    calibration = find_calibration(speculative.calibration, source.folder)
    policy, reasons = make_policy(
        speculative,
        num_drafts=engine.scheduler.limits.max_drafts,
        has_head=engine.drafter.has_confidence_head,
        drafts_sampled=source.samples,
        cost=_cost_model(speculative, source.name, engine, models, notes, deterministic),
        calibration=calibration,
        weights=weights_digest(source.folder) if calibration and source.folder else None,
    )
    notes += reasons
    return policy


def _cost_model(
    speculative: SpeculativeConfig, drafter: str, engine: Engine, models: Models, notes: list[Note],
    deterministic: bool,
) -> CostModel | None:  # fmt: skip
    """What steps cost: from the file named, else the profile stored for this pair and machine, else measured now."""
    if not speculative.enable_adaptive_speculative_decode or speculative.cost_model == "none":
        return None
    # min_gain is a rule of the linear price alone.
    linear = bool(speculative.adaptive_speculative_min_gain) and speculative.mode != "lag-budget"
    if speculative.cost_model != "auto":
        notes.append(("cost_model", speculative.cost_model, "as asked"))
        return CostProfile.load(Path(speculative.cost_model)).model(linear=linear)
    key = profile_key(models.target_name, drafter, models.device, models.dtype, deterministic=deterministic)
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
    return profile.model(linear=linear)
