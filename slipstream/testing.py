"""Doubles for tests, ours and users': tiny random models, a scripted drafter, and a guard against hidden device reads.

Everything is small enough for a CPU and random by seed. The scripted drafter is an ordinary `Drafter`: its drafts come
from a table next[token], its confidence from a function of position, so that a test can say beforehand which widths a
policy must choose; it is right whenever the target happens to continue a token the way the table says.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.constraint import Constraint, Marker, num_words
from slipstream.draft.base import Draft, DraftView, Sampler
from slipstream.engine import Engine
from slipstream.load import Models
from slipstream.models.checkpoint import DrafterSpec, spec_from_config
from slipstream.models.decoder import Decoder
from slipstream.models.drafters import BlockDrafter
from slipstream.models.spec import DecoderSpec
from slipstream.models.tokenizer import Tokenizer
from slipstream.ops.reject import DraftLaw
from slipstream.plan import Int32s
from slipstream.structured import StructuredOutput

# Confidence of drafts 0..d-1 at a step: (context [D], number of drafts) -> [D, d].
ConfidenceScript = Callable[[Tensor, int], Tensor]


def tiny_spec(family: str = "llama", **changes: Any) -> DecoderSpec:
    """A two-layer decoder of 32 dimensions over 64 tokens."""
    config = {
        "model_type": family, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 1,
    }  # fmt: skip
    return DecoderSpec.from_hf({**config, **changes})


def tiny_target(seed: int = 0, spec: DecoderSpec | None = None, std: float = 0.3) -> Decoder:
    """fp32, random; the deviation is large enough for answers that do not repeat one token."""
    decoder = Decoder(spec or tiny_spec(), dtype=torch.float32)
    decoder.init_random(seed, std)
    return decoder


def tiny_tokenizer(vocab_size: int = 64, eos_token_id: int = 1) -> Tokenizer:
    """Words "t0", "t1", ... with a chat template that joins the messages."""
    words = {f"t{i}": i for i in range(vocab_size)}
    backend = tokenizers.Tokenizer(WordLevel(words, unk_token="t0"))
    backend.pre_tokenizer = WhitespaceSplit()
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    return Tokenizer(
        source="tiny", backend=backend, vocab_size=vocab_size, special_ids=frozenset([eos_token_id]),
        eos_token_ids=(eos_token_id,), chat_template=template,
    )  # fmt: skip


def tiny_drafter_spec(target: DecoderSpec, algorithm: str = "dspark", **changes: Any) -> DrafterSpec:
    """Two layers that read both of a tiny target's; block 8, so that DSpark drafts 8 and DFlash 7."""
    config = {
        "architectures": ["Qwen3DSparkModel" if algorithm == "dspark" else "DFlashDraftModel"], "model_type": "qwen3",
        "block_size": 8, "num_hidden_layers": 2, "hidden_size": target.hidden_size, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 256, "vocab_size": target.vocab_size, "num_target_layers": target.num_layers,
        "target_layer_ids": [0, 1], "mask_token_id": 2, "attention_bias": False,
    }  # fmt: skip
    if algorithm == "dspark":
        config |= {"markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True,
                   "confidence_head_with_markov": True}  # fmt: skip
    return spec_from_config({**config, **changes})


def tiny_models(
    algorithm: str | None = None, *, seed: int = 0, spec: DecoderSpec | None = None, **drafter: Any
) -> Models:
    """A tiny target, and with an algorithm (dspark, dflash) a random drafter that fits it."""
    target = tiny_target(seed, spec)
    network = None
    if algorithm is not None:
        network = BlockDrafter(tiny_drafter_spec(target.spec, algorithm, **drafter)).eval().requires_grad_(False)
        network.init_random(seed + 1, std=0.3)
        network.share(target)
    return Models(target, tiny_tokenizer(target.spec.vocab_size), network, "tiny", algorithm, None)


class TableDrafter:
    """Drafts next[anchor], next[next[anchor]], ...; absorbs nothing. The confidence script stands in for a head."""

    max_position = 1 << 30
    tap_layers: tuple[int, ...] = ()
    has_confidence_head = True

    def __init__(self, table: Sequence[int], max_draft_tokens: int, confidence: ConfidenceScript | None = None) -> None:
        self.max_draft_tokens = max_draft_tokens
        self._next = torch.tensor(table)
        self._confidence = confidence or varied_confidence

    def propose(self, view: DraftView, num_drafts: int, sampler: Sampler, signal: str) -> Draft:
        """Under rejection the table is a very peaked distribution, and drafts are drawn from it as the rule says."""
        previous, drafts, laws = view.anchor_ids, [], []
        for j in range(num_drafts):
            logits = torch.zeros(len(previous), len(self._next)).scatter_(1, self._next[previous][:, None], 6.0)
            previous, law = sampler.draw(logits, j, None)
            drafts.append(previous)
            laws += [] if law is None else [law]
        return Draft(
            torch.stack(drafts, dim=1),
            self._confidence(view.context, num_drafts).float(),
            DraftLaw.join(laws) if laws else None,
        )

    def absorb(self, features: Tensor, positions: Tensor, kv_slots: Tensor) -> None:
        pass

    def settle(self, draft: Draft, widths: Tensor, num_accepted: Tensor, teaches: Tensor) -> None:
        pass


def varied_confidence(context: Tensor, num_drafts: int) -> Tensor:
    """Anything between .05 and .95, changing with position and draft, so that every width occurs."""
    steps = torch.arange(num_drafts)
    return 0.05 + 0.9 * ((context[:, None] * 7 + steps * 3) % 11) / 10


def next_token_table(answers: Sequence[Sequence[int]], vocab_size: int) -> list[int]:
    """For every token its most frequent successor in the answers (itself where it has none)."""
    counts = torch.zeros(vocab_size, vocab_size)
    for answer in answers:
        for token, successor in pairwise(answer):
            counts[token, successor] += 1
    best = counts.argmax(dim=1)
    return torch.where(counts.sum(1) > 0, best, torch.arange(vocab_size)).tolist()


class TableMatcher:
    """A grammar that is an automaton over tokens: a `Matcher` without any library.

    after[s, t] is the state after token t in state s, below 0 where it is forbidden; it begins in state 0, and is
    complete, so that `ends` may come, in the states `final`.
    """

    def __init__(self, after: NDArray[np.int64], final: Collection[int], ends: Collection[int]) -> None:
        self._after, self._final, self._ends = after, final, ends
        self._state = 0

    def accept(self, token_id: int) -> bool:
        state = int(self._after[self._state, token_id])
        self._state = state if state >= 0 else self._state
        return state >= 0

    def look_ahead(self, drafts: Sequence[int], masks_np: Int32s) -> None:
        state = self._state
        masks_np[0] = packed(self._allowed(state))
        for place, draft in enumerate(drafts):
            state = int(self._after[state, draft])
            if state < 0:
                return
            masks_np[place + 1] = packed(self._allowed(state))

    def _allowed(self, state: int) -> NDArray[np.bool_]:
        allowed: NDArray[np.bool_] = self._after[state] >= 0
        allowed[[token for token in self._ends if token < len(allowed)]] |= state in self._final
        return allowed


class TableGrammars:
    """Makes constraints of one automaton, whatever is asked for; `after` is looked for in the pieces, if there are any."""

    def __init__(self, after: NDArray[np.int64], final: Collection[int], pieces: Sequence[bytes] = ()) -> None:
        self._after, self._final, self._pieces = after, final, pieces

    def compile(
        self, asked: StructuredOutput, ends: frozenset[int], meanwhile: Callable[[], bool]
    ) -> Callable[[], Constraint]:
        marker = None if asked.after is None else Marker(asked.after, self._pieces)
        vocab_size = self._after.shape[1]
        return lambda: Constraint(TableMatcher(self._after, self._final, ends), ends, vocab_size, marker)


def packed(allowed: NDArray[np.bool_]) -> Int32s:
    """[V] as a mask of bits; those beyond V are set."""
    bits = np.ones(32 * num_words(len(allowed)), np.bool_)
    bits[: len(allowed)] = allowed
    mask: Int32s = np.packbits(bits, bitorder="little").view(np.int32)
    return mask


_READS = ("item", "tolist", "numpy", "nonzero", "cpu", "__bool__", "__int__", "__float__", "__index__", "__dlpack__")


class HiddenRead(AssertionError):
    """A device value was read on the host outside `take_confidence` and `collect`."""


@contextmanager
def forbid_hidden_reads() -> Iterator[None]:
    """Raise on every call that would make the host wait for the device, on a CPU too."""
    names = [name for name in _READS if hasattr(torch.Tensor, name)]
    originals = {name: getattr(torch.Tensor, name) for name in names}

    def refusing(name: str) -> Callable[..., Any]:
        def read(self: Tensor, *args: object, **kwargs: object) -> Any:
            raise HiddenRead(f"Tensor.{name} on a tensor of shape {list(self.shape)}")

        return read

    try:
        for name in names:
            setattr(torch.Tensor, name, refusing(name))
        with _NoDynamicShapes():  # type: ignore[no-untyped-call]
            yield
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)


class _NoDynamicShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Catches reads from inside torch: scalars of tensors, boolean masks, shapes that depend on data."""

    _OPS = (
        "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount",
        "repeat_interleave.Tensor", "equal", "allclose",
    )  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        if name.split(".")[0] in self._OPS or name in self._OPS:
            raise HiddenRead(f"aten::{name}")
        if name.startswith(("index.", "index_put")) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        ):
            raise HiddenRead(f"aten::{name} with a boolean mask")
        return func(*args, **(kwargs or {}))


def assert_nothing_left(engine: Engine) -> None:
    """After the last request: every slot and page is free, nothing is in flight."""
    scheduler = engine.scheduler
    assert not engine.has_work
    assert not engine.requests
    assert scheduler.pages.num_used == 0, f"{scheduler.pages.num_used} pages leaked"
    assert scheduler.num_free_slots == scheduler.limits.max_num_seqs
