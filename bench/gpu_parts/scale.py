"""Sizes of a run of bench/gpu.py: those of its goals, and tiny ones that only show that every phase runs.

A Pair says how target and drafter are loaded and what is asked of them. Knows nothing of engines.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.load import Models, load_models
from slipstream.prompts import read_prompts, user
from slipstream.testing import tiny_models, tiny_spec

GSM8K = Path(__file__).parents[1] / "data" / "prompts" / "gsm8k.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    name: str  # in reports
    draft: str
    load: Callable[[], Models]
    prompts_name: str
    prompts: Callable[[Models, int], list[list[int]]]  # (models, how many) -> token ids
    max_model_len: int
    cost_model: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    large: Pair
    small: Pair
    drafts: tuple[int, ...]  # S, the usual one first
    rows: tuple[int, ...] | None  # of the ceilings; None: what `ceilings` measures
    output_tokens: int
    table_tokens: int  # output of the runs that stand beside published figures
    probe_tokens: int
    large_at: tuple[int, ...]  # concurrencies of plain decoding
    probed_at: tuple[int, ...]  # concurrencies whose critical path is measured
    verify_at: int  # sequences of the step that is held against its ceiling
    small_at: tuple[int, ...]
    requests: tuple[int, ...]  # of the small model's modes, for each of `small_at`
    waves: int
    attention: tuple[int, int]  # sequences, context
    attention_heads: tuple[int, int, int]  # heads, KV heads, head size
    agreement_prompts: int
    delay_s: float  # of every decision, where it is slowed on purpose
    beside_tokens: int  # output beside somebody else's code, which takes long for each
    patience_s: float  # with it, for it may hang

    @property
    def large_slots(self) -> int:
        return max(self.probed_at)


def gsm8k(models: Models, count: int) -> list[list[int]]:
    """Questions in the model's chat form; from the beginning again where more are asked for than there are."""
    texts = read_prompts(GSM8K)
    encoded = [models.tokenizer.encode(models.tokenizer.chat(user(text))) for text in texts[:count]]
    return [encoded[i % len(encoded)] for i in range(count)]


def random_ids(length: int) -> Callable[[Models, int], list[list[int]]]:
    def prompts(models: Models, count: int) -> list[list[int]]:
        source = random.Random(0)
        return [[source.randrange(models.vocab_size) for _ in range(length)] for _ in range(count)]

    return prompts


def full(small_model: str = "smollm2-135m", large_model: str = "random:qwen3-8b", device: str = "auto") -> Scale:
    """The sizes that the goals speak of."""
    draft = "smollm2-135m-dspark"
    return Scale(
        large=Pair(
            name=large_model, draft="random", load=lambda: load_models(large_model, "random", device=device),
            prompts_name="random, 128 tokens", prompts=random_ids(128), max_model_len=128 + 256 + 48,
        ),
        small=Pair(
            name="smollm2-135m", draft=draft, load=lambda: load_models(small_model, draft, device=device),
            prompts_name="gsm8k", prompts=gsm8k, max_model_len=512,
        ),
        drafts=(7, 16), rows=(1, 8, 32, 128, 256, 512, 1024, 2048), output_tokens=256, table_tokens=128, probe_tokens=48,
        large_at=(1, 32, 256), probed_at=(8, 32, 128), verify_at=32, small_at=(1, 32, 256), requests=(8, 96, 512), waves=3,
        attention=(32, 4096), attention_heads=(32, 8, 128), agreement_prompts=128, delay_s=0.005,
        beside_tokens=64, patience_s=15.0,
    )  # fmt: skip


def tiny() -> Scale:
    """Everything runs in seconds on a CPU, and no figure means anything."""

    def pair(name: str) -> Pair:
        return Pair(
            name=name, draft="dspark", load=lambda: tiny_models("dspark", spec=tiny_spec(tie_word_embeddings=False)),
            prompts_name="random, 6 tokens", prompts=random_ids(6), max_model_len=64, cost_model="none",
        )  # fmt: skip

    return Scale(
        large=pair("tiny-large"), small=pair("tiny-small"), drafts=(3, 7), rows=(1, 2, 8), output_tokens=8, table_tokens=6,
        probe_tokens=6, large_at=(1, 2), probed_at=(1, 2), verify_at=2, small_at=(1, 2), requests=(1, 2), waves=1,
        attention=(2, 40), attention_heads=(4, 2, 8), agreement_prompts=2, delay_s=0.005,
        beside_tokens=8, patience_s=2.0,
    )  # fmt: skip


def chosen(values: Sequence[int], wanted: int) -> int:
    """`wanted` where it is among the values, else the largest of them."""
    return wanted if wanted in values else max(values)
