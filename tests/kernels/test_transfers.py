"""What a step sends down: only what differs from what lies on the device already."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.config import SamplingParams, SpeculativeConfig
from slipstream.llm import LLM
from slipstream.plan import Decision
from slipstream.testing import tiny_models, tiny_spec
from tests.lossless.harness import on

# The interpreter is NumPy, which warns of what padding rows do.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def engine(device: str, mode: str, slots: int = 4) -> LLM:
    speculative = SpeculativeConfig()
    if mode != "off":
        speculative = SpeculativeConfig.for_mode(mode, draft_model="tiny", num_speculative_tokens=2)
    models = on(device, tiny_models("dspark", spec=tiny_spec(vocab_size=20)))
    return LLM(models, speculative=speculative, backend="triton", max_model_len=64, page_size=8, max_num_seqs=slots)


def counted(box: Any) -> list[set[str]]:
    """The names of what is posted from now on, post by post."""
    posts: list[set[str]] = []
    usual = box.post

    def post(arrays: dict[str, Any], padding: dict[str, int]) -> None:
        posts.append(set(arrays))
        usual(arrays, padding)

    box.post = post
    return posts


@pytest.mark.slow
def test_plain_steps_send_nothing_but_new_pages_and_who_takes_part(device: str) -> None:
    llm = engine(device, "off")
    backend: Any = llm.engine.backend
    plans, decisions = counted(backend._plan), counted(backend._decision)
    made = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=18, ignore_eos=True))
    assert len(made[0].token_ids) == 18
    # The prompt with its page, decoding, a page each at positions 8 and 16; the next token's page may come a step early.
    assert 3 <= len(plans) <= 5
    assert not decisions


@pytest.mark.slow
def test_whoever_is_not_ranked_has_no_width_left_from_former_steps(device: str) -> None:
    """Three sequences of which one prefills are padded to 8, and to 4 where they are ranked."""
    backend: Any = engine(device, "lag-budget", slots=8).engine.backend
    mixed = backend.buckets.verify(3, 6, 3, decode_only=False).num_sequences
    assert mixed > backend.buckets.pad_sequences(3)
    for width in (2, 1, 2, 1):  # all buffers that take turns
        widths = np.full(8, width, np.int32)
        backend.place(Decision(widths_np=widths, budget=None, caps_np=widths))
    caps = np.array([2, 2, 0], np.int32)
    plan = SimpleNamespace(num_sequences=3, draft_length=2)
    for _ in range(4):
        decision = Decision(widths_np=None, budget=3, caps_np=caps)
        found = backend.rank(plan, decision, torch.empty(0), np.zeros((2, 2, 2), np.float32)).tolist()
        assert sum(found[:2]) == 3 and found[2:] == [0] * 6


def test_widths_lie_where_they_are_read_whatever_was_there(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = engine(device, "static").engine.backend
    posts, random = counted(backend._decision), np.random.default_rng(0)

    def ranked(shape: object) -> torch.Tensor:
        backend._decision.received["widths"].fill_(9)
        return torch.empty(0)

    monkeypatch.setattr(backend, "rank_stage", ranked)
    num_placed = 40
    for _ in range(num_placed):
        widths = random.integers(2, size=random.integers(1, 4)).astype(np.int32)
        placed = backend.place(Decision(widths_np=widths, budget=None, caps_np=widths))
        assert placed.tolist() == [*widths.tolist(), *[0] * (4 - len(widths))]
        if random.integers(4) == 0:
            plan = SimpleNamespace(num_sequences=len(widths), draft_length=2)
            decision = Decision(widths_np=None, budget=1, caps_np=widths)
            backend.rank(plan, decision, torch.empty(0), np.zeros((2, 2, 2), np.float32))
    num_sent = sum("caps" not in names for names in posts)
    assert 0 < num_sent < num_placed
