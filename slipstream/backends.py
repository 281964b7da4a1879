"""The two ways in which an engine is put together: in plain torch, or of fused kernels under CUDA graphs.

A constructor takes loaded models and sizes and returns the parts that the engine runs. Called by `build`; below it
nobody asks which backend there is. Triton is imported only by who uses it: an installation for a CPU has none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from slipstream.cache.pool import KVPool
from slipstream.device.backend import Backend, TorchBackend
from slipstream.device.memory import memory_of, must_fit
from slipstream.device.state import SlotState, make_slot_state
from slipstream.draft.base import Drafter
from slipstream.draft.block import BlockDraft
from slipstream.errors import CapacityError, CheckpointError
from slipstream.load import Models
from slipstream.models.checkpoint import DrafterSpec
from slipstream.models.drafters import BlockDrafter
from slipstream.models.spec import DecoderSpec
from slipstream.sizes import Sizes, page_bytes
from slipstream.verify.accept import CoupledRule, RejectionRule, Rule
from slipstream.verify.target import Target, TargetForward

if TYPE_CHECKING:
    from slipstream.kernels.attention import Workspace
    from slipstream.kernels.reject import KeptLaw


TOO_MANY_PAGES = "a KV pool of {} pages does not fit in memory: lower kv_memory (on a GPU, or gpu_memory_utilization)"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ingredients:
    """What an engine is made of."""

    models: Models
    sizes: Sizes
    made: Drafter | None  # a drafter of the caller's own, or look-up
    network: BlockDrafter | None  # or a network that drafts
    coupled: bool  # the acceptance rule: coupled, or rejection
    samples: bool  # sampled requests get drafts drawn at random
    prunes: bool  # widths below the draft's length are common
    deterministic: bool = False  # a row's logits must not depend on what shares its step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """What a backend supplies: the device half of an engine, beside scheduler and policy."""

    target: TargetForward
    drafter: Drafter | None
    backend: Backend
    rule: Rule


Adapt: TypeAlias = Callable[[Parts], Parts]  # wraps what an engine is about to be made of


def torch_parts(given: Ingredients) -> Parts:
    """Exact sizes, every operation launched by itself; on any device."""
    assert not given.deterministic, "refused by `build`"
    models, sizes = given.models, given.sizes
    state, pools = _slot_state(sizes, models.device), _make_pools(given)  # pools last: they take all there is
    drafter = given.made
    if given.network is not None:
        drafter = BlockDraft(given.network, pools[1], models.vocab_size)
    taps = drafter.tap_layers if drafter else ()
    return Parts(
        target=Target(models.target, pools[0], taps, models.vocab_size),
        drafter=drafter,
        backend=TorchBackend(state, sizes.page_size, pools, models.device),
        rule=CoupledRule(given.samples) if given.coupled else RejectionRule(given.samples),
    )


def triton_parts(given: Ingredients) -> Parts:
    """Padded sizes, fused kernels, and on a GPU every stage as a CUDA graph (see `slipstream.capture`)."""
    from slipstream.device.graphs import Graphs
    from slipstream.device.shapes import Buckets
    from slipstream.device.triton import TritonBackend
    from slipstream.draft.fused import FusedBlockDraft
    from slipstream.kernels.shape_logits import Shaper
    from slipstream.verify.fused import FusedTarget
    from slipstream.verify.fused_rules import FusedCoupledRule, FusedRejectionRule

    models, sizes = given.models, given.sizes
    state, pools = _slot_state(sizes, models.device), _make_pools(given)  # pools last: they take all there is
    backend = TritonBackend(
        state,
        page_size=sizes.page_size,
        num_kv_heads=models.target.spec.num_kv_heads,
        buckets=Buckets(
            max_num_seqs=sizes.max_num_seqs, max_drafts=sizes.num_drafts, max_rows=sizes.max_rows, prunes=given.prunes
        ),
        max_rows=sizes.max_rows,
        num_drafts=sizes.num_drafts,
        pads_drafts=given.network is not None,
        graphs=Graphs(models.device) if models.device.type == "cuda" else None,
        deterministic=given.deterministic,
    )
    drafter, law = given.made, None
    if given.network is not None:
        workspace = _workspace(given.network.spec, given)
        law = None if given.coupled or not given.samples else _law_buffers(given.network, given)
        drafter = FusedBlockDraft(given.network, pools[1], models.vocab_size, state, workspace, backend.buffers, law)
    taps = drafter.tap_layers if drafter else ()
    max_outputs = sizes.max_num_seqs * (sizes.num_drafts + 1)
    shaper = Shaper.make(state.shaping, state.token_ids, models.vocab_size)
    rule: Rule
    if given.coupled:
        rule = FusedCoupledRule(given.samples, backend.buffers, shaper, given.deterministic)
    else:
        draws = given.made is not None and given.samples
        rule = FusedRejectionRule(given.samples, backend.buffers, shaper, law, draws)
    return Parts(
        target=FusedTarget(
            models.target, pools[0], taps, models.vocab_size, state, _workspace(models.target.spec, given),
            sizes.max_rows, max_outputs, given.deterministic,
        ),
        drafter=drafter,
        backend=backend,
        rule=rule,
    )  # fmt: skip


BACKENDS: dict[str, Callable[[Ingredients], Parts]] = {"torch": torch_parts, "triton": triton_parts}


def _make_pools(given: Ingredients) -> tuple[KVPool, ...]:
    """The target's, and a second one for a drafter that keeps KV of its own."""
    models, sizes = given.models, given.sizes

    def pool(spec: DecoderSpec | DrafterSpec) -> KVPool:
        return KVPool(
            num_layers=spec.num_layers, num_pages=sizes.num_pages, page_size=sizes.page_size,
            num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=models.dtype, device=models.device,
        )  # fmt: skip

    specs: list[DecoderSpec | DrafterSpec] = [models.target.spec]
    if given.network is not None:
        _check_draft_vocabulary(given.network, models.vocab_size)
        specs.append(given.network.spec)
    needed = sizes.num_pages * page_bytes(models, given.network, sizes) if models.device.type == "cpu" else 0
    with must_fit(lambda: f"{TOO_MANY_PAGES.format(sizes.num_pages)}; {memory_of(models.device)}", needed):
        return tuple(pool(spec) for spec in specs)


def _check_draft_vocabulary(network: BlockDrafter, vocab_size: int) -> None:
    """Noise and rejection go by the ids that the tokenizer knows; a padding id of the table has no place there."""
    highest = int(network.draft_token_ids[-1])  # they ascend
    if network.spec.draft_vocab_size is not None and highest >= vocab_size:
        raise CheckpointError(
            f"d2t maps to token id {highest}, which only pads the target's table: the tokenizer knows {vocab_size} ids; "
            "use a drafter made for this tokenizer"
        )


def _slot_state(sizes: Sizes, device: torch.device) -> SlotState:
    does_not_fit = (
        f"max_num_seqs {sizes.max_num_seqs} with max_model_len {sizes.max_model_len} does not fit in memory; "
        "lower one of them"
    )
    columns = 4 * sizes.max_model_len + 8 * -(-sizes.max_model_len // sizes.page_size)  # tokens, pages
    try:
        with must_fit(lambda: does_not_fit, sizes.max_num_seqs * columns if device.type == "cpu" else 0):
            return make_slot_state(sizes.max_num_seqs, sizes.max_model_len, sizes.page_size, device)
    except (RuntimeError, TypeError, MemoryError) as error:  # torch's words for too large, far too large
        raise CapacityError(does_not_fit) from error


def _law_buffers(network: BlockDrafter, given: Ingredients) -> "KeptLaw":
    """As large as the logits of all drafts of a step."""
    from slipstream.kernels.reject import KeptLaw

    models, sizes = given.models, given.sizes
    token_ids = None if network.spec.draft_vocab_size is None else network.draft_token_ids
    dtype = network.head_weight.dtype
    return KeptLaw.make(sizes.max_num_seqs, sizes.num_drafts, token_ids, models.vocab_size, dtype, models.device)


def _workspace(spec: DecoderSpec | DrafterSpec, given: Ingredients) -> "Workspace":
    from slipstream.device.triton import PREFILL_BLOCK_Q, decode_block_q
    from slipstream.kernels.attention import attention_workspace

    # A drafter's block is a tile too, of as many rows as drafts, or (fill-in) one more: no more than verification has.
    most_rows = max(PREFILL_BLOCK_Q, decode_block_q(given.sizes.num_drafts))
    return attention_workspace(spec.num_heads, spec.num_kv_heads, spec.head_dim, most_rows, given.models.device)
