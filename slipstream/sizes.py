"""How an engine is sized: slots, rows, positions and KV pages, from options and the memory at hand.

Called by `build`; knows models by their shapes only.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.cache.pages import NUM_RESERVED_PAGES
from slipstream.cache.pool import KVPool
from slipstream.config import EngineConfig
from slipstream.errors import CapacityError, ConfigError
from slipstream.load import Models, Note
from slipstream.models.checkpoint import DrafterSpec
from slipstream.models.drafters import BlockDrafter
from slipstream.models.spec import DecoderSpec


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


def engine_sizes(
    config: EngineConfig, models: Models, network: BlockDrafter | None, num_drafts: int, notes: list[Note]
) -> Sizes:
    """What was asked for, and what the machine suggests where nothing was. ConfigError, CapacityError name the field."""
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
    return Sizes(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched_tokens,
        max_model_len=max_model_len,
        page_size=config.page_size,
        num_pages=_num_pages(config, models, network, most_pages, notes),
        num_drafts=num_drafts,
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
