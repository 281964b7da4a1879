"""Small specs of drafters and the target they fit, for tests that change one field at a time."""

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.models.checkpoint import DrafterSpec
from slipstream.models.rope import RopeSpec
from slipstream.models.spec import FULL, DecoderSpec


@pytest.fixture
def target_spec() -> DecoderSpec:
    return DecoderSpec(
        family="llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2,
        head_dim=8, rms_norm_eps=1e-6, rope=RopeSpec(theta=1e4), max_position_embeddings=128, layer_types=(FULL,) * 4,
        tie_word_embeddings=True,
    )  # fmt: skip


@pytest.fixture
def drafter_spec() -> Callable[..., DrafterSpec]:
    def make(**changes: Any) -> DrafterSpec:
        fields: dict[str, Any] = {
            "algorithm": "dflash", "layout": "fill_in", "layout_reason": "test", "block_size": 5, "num_layers": 2,
            "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
            "rms_norm_eps": 1e-6, "rope": RopeSpec(theta=1e4), "max_position_embeddings": 128,
            "layer_types": (FULL,) * 2, "target_layer_ids": (0, 2), "num_target_layers": 4, "target_hidden_size": 32,
            "vocab_size": 64, "mask_token_id": 3,
        }  # fmt: skip
        return DrafterSpec(**(fields | changes))

    return make


DSPARK: dict[str, Any] = {
    "algorithm": "dspark",
    "layout": "anchor_first",
    "markov_rank": 6,
    "confidence_head": True,
    "confidence_with_markov": True,
}


@pytest.fixture
def dspark_spec(drafter_spec: Callable[..., DrafterSpec]) -> Callable[..., DrafterSpec]:
    return lambda **changes: drafter_spec(**(DSPARK | changes))
