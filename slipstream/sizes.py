"""How an engine is sized: slots, rows, positions and KV pages, from options and the memory at hand.

Arithmetic only: what a GPU holds and what a step takes of it come as numbers (`device.memory`, `peak`). Called by
`build`; knows models by their shapes only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from slipstream.cache.pages import NUM_RESERVED_PAGES
from slipstream.cache.pool import KVPool
from slipstream.config import EngineConfig
from slipstream.device.memory import DeviceUse, in_words, memory_at_hand
from slipstream.errors import CapacityError, ConfigError
from slipstream.load import Models, Note
from slipstream.models.checkpoint import DrafterSpec
from slipstream.models.drafters import BlockDrafter
from slipstream.models.spec import DecoderSpec

DEFAULT_UTILIZATION = 0.9  # the rest is for steps of other shapes than the one measured, and for other programs
FEWEST_PAGES = NUM_RESERVED_PAGES + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int
    num_drafts: int  # S

    @property
    def max_rows(self) -> int:
        """Rows of a step at most: given rows, and the drafts of all."""
        return self.max_num_batched_tokens + self.max_num_seqs * self.num_drafts

    @property
    def most_pages(self) -> int:
        """What all slots at their longest would fill."""
        return self.max_num_seqs * -(-self.max_model_len // self.page_size) + NUM_RESERVED_PAGES


class Share(NamedTuple):
    """An engine among several that split the memory at hand and are made one after another."""

    place: int = 0  # engines made before it
    among: int = 1

    @property
    def to_come(self) -> int:
        """This one, and those after it."""
        return self.among - self.place


WHOLE = Share()


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What an engine takes of a GPU beside its pages, in bytes."""

    step: int  # its buffers, and its largest step
    graphs: int


def engine_sizes(config: EngineConfig, models: Models, num_drafts: int) -> Sizes:
    """What was asked for, and what the machine suggests where nothing was, with as few pages as work.

    ConfigError names the field.
    """
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
    if config.gpu_memory_utilization is not None and not on_gpu:
        raise ConfigError(
            f"gpu_memory_utilization has no effect on {models.device}; drop it, or give the KV pool's size as kv_memory"
        )
    return Sizes(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched_tokens,
        max_model_len=max_model_len,
        page_size=config.page_size,
        num_pages=FEWEST_PAGES,
        num_drafts=num_drafts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """All that the size of the KV pool depends on, but for the device's memory. Bytes."""

    sizes: Sizes
    page_bytes: int  # of a page of target and drafter
    weights: int  # of target and drafter, on the device already
    logits: int  # of all rows that a step may want them of
    utilization: float = DEFAULT_UTILIZATION
    share: Share = WHOLE

    @property
    def least(self) -> int:
        """Of a pool that works."""
        return FEWEST_PAGES * self.page_bytes

    def pages(self, budget: int) -> int:
        """In so many bytes, but no more than all requests at their longest would fill; may be too few to work."""
        return min(budget // self.page_bytes, self.sizes.most_pages)

    def tokens(self, num_pages: int) -> int:
        return (num_pages - NUM_RESERVED_PAGES) * self.sizes.page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """How large a KV pool was made: an engine that is made again gets the same, whatever others have taken since."""

    num_pages: int
    num_bytes: int
    beside: int | None = None  # bytes that its engine takes beside it at its worst; None: that was not measured


def left_below_mark(asked: PoolRequest, use: DeviceUse) -> int:
    """Bytes that this engine may take, pages and all. use: before it is made, weights in place."""
    return (int(use.total * asked.utilization) - use.taken) // asked.share.to_come


def is_roomy(asked: PoolRequest, use: DeviceUse) -> bool:
    """Whether slots and steps need so little of what is left that nothing has to be measured.

    What a step takes is mostly logits, in a dozen forms at the worst: where rejection filters.
    """
    left = left_below_mark(asked, use)
    return asked.sizes.most_pages * asked.page_bytes <= left // 4 and 32 * asked.logits <= left


def gpu_budget(asked: PoolRequest, use: DeviceUse, peak: Peak) -> int:
    """Bytes for pages: this engine's share of what is left below the mark, less what it takes beside them.

    CapacityError says all numbers where too little is left.
    """
    budget = left_below_mark(asked, use) - peak.step - peak.graphs
    if budget < asked.least:
        raise CapacityError(_too_little(asked, use, peak, budget))
    return budget


def _too_little(asked: PoolRequest, use: DeviceUse, peak: Peak, budget: int) -> str:
    sizes, others = asked.sizes, max(use.taken - asked.weights, 0)
    parts = asked.share.to_come
    split = f", of what is left one of {parts} equal parts by this engine" if parts > 1 else ""
    left = f"{in_words(budget)} are left for the KV pool" if budget > 0 else f"{in_words(-budget)} are missing"
    return (
        f"{left}, and {in_words(asked.least)} are the least that works. Of the GPU's {in_words(use.total)} "
        f"gpu_memory_utilization {asked.utilization:g} lets {in_words(int(use.total * asked.utilization))} be taken"
        f"{split}: weights take {in_words(asked.weights)}, whatever else is on the GPU {in_words(others)}, a step at its "
        f"worst ({sizes.max_num_seqs} sequences of {sizes.num_drafts + 1} rows, {sizes.max_num_batched_tokens} given "
        f"tokens) {in_words(peak.step)}, graphs {in_words(peak.graphs)}. Raise gpu_memory_utilization, lower max_num_seqs, "
        "max_num_batched_tokens or max_model_len, or take a smaller model"
    )


def size_pool(
    config: EngineConfig, asked: PoolRequest, use: Callable[[], DeviceUse] | None, peak: Callable[[], Peak],
    notes: list[Note],
) -> PoolSize:  # fmt: skip
    """The pool of an engine. use: of its GPU, None on a CPU. peak: measures, and is called only where that is needed."""
    beside = None
    if config.kv_memory is not None:
        assert isinstance(config.kv_memory, int), "the config makes it a number"
        budget, reason = config.kv_memory, "as asked"
    elif use is None:
        budget, reason = memory_at_hand() // 4 // asked.share.among, "a quarter of the free memory at most"
        reason += f", split by {asked.share.among} engines" if asked.share.among > 1 else ""
    else:
        (budget, beside), reason = _gpu_pool(asked, use(), peak, notes), "what that leaves below the mark"
    num_pages = asked.pages(budget)
    if num_pages < FEWEST_PAGES:
        raise CapacityError(
            f"{budget} bytes of KV memory hold {num_pages} pages of {asked.page_bytes} bytes, and {FEWEST_PAGES} are the "
            "least that works: raise kv_memory or lower page_size"
        )
    if num_pages == asked.sizes.most_pages and config.kv_memory is None:
        reason = "all that the slots can use"
    num_bytes = num_pages * asked.page_bytes
    notes.append(("kv_memory", num_bytes, f"{asked.tokens(num_pages)} tokens of KV; {reason}"))
    return PoolSize(num_pages=num_pages, num_bytes=num_bytes, beside=beside)


def _gpu_pool(
    asked: PoolRequest, use: DeviceUse, peak: Callable[[], Peak], notes: list[Note]
) -> tuple[int, int | None]:
    """Bytes for pages, and what the engine takes beside them, if that was measured."""
    how = f"{in_words(use.taken)} of {in_words(use.total)} are taken, {in_words(asked.weights)} of it by weights; "
    if is_roomy(asked, use):
        budget, beside = asked.sizes.most_pages * asked.page_bytes, None
        how += "no step was measured: slots can use less than a quarter of what is left"
    else:
        found = peak()
        budget, beside = gpu_budget(asked, use, found), found.step + found.graphs
        how += f"a step at its worst takes {in_words(found.step)}, graphs {in_words(found.graphs)}"
    notes.append(("gpu_memory_utilization", asked.utilization, how))
    return budget, beside


def pool_request(
    config: EngineConfig, models: Models, network: BlockDrafter | None, sizes: Sizes, share: Share
) -> PoolRequest:
    logits = sizes.max_num_seqs * (sizes.num_drafts + 1) * models.target.spec.vocab_size * models.dtype.itemsize
    return PoolRequest(
        sizes=sizes, page_bytes=page_bytes(models, network, sizes), logits=logits, share=share,
        weights=weight_bytes(models.target, models.network),
        utilization=config.gpu_memory_utilization or DEFAULT_UTILIZATION,
    )  # fmt: skip


def page_bytes(models: Models, network: BlockDrafter | None, sizes: Sizes) -> int:
    """Of a page of target and drafter."""
    specs: list[DecoderSpec | DrafterSpec] = [models.target.spec, *([network.spec] if network else [])]
    return sum(
        KVPool.page_bytes(spec.num_layers, sizes.page_size, spec.num_kv_heads, spec.head_dim, models.dtype)
        for spec in specs
    )


def weight_bytes(*networks: nn.Module | None) -> int:
    """Of parameters and tables; what networks share counts once."""
    found = dict[int, int]()
    for network in networks:
        if network is not None:
            found |= {t.data_ptr(): t.nbytes for t in (*network.parameters(), *network.buffers())}
    return sum(found.values())
