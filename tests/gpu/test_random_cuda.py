"""Random weights are drawn on the GPU at its own speed, and are the same for equal seeds."""

import time

import pytest
import torch

from slipstream.models.layers import DenseAttend
from slipstream.models.random_weights import random_decoder, random_drafter
from slipstream.models.shapes import num_values, published_dspark, target_shape

pytestmark = pytest.mark.gpu


def test_weights_are_drawn_fast_equal_and_finite() -> None:
    spec = target_shape("qwen3-0.6b")
    first = random_decoder(spec, torch.bfloat16, "cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    target = random_decoder(spec, torch.bfloat16, "cuda")
    torch.cuda.synchronize()
    rate = 2 * num_values(spec) / (time.perf_counter() - start)
    assert rate > 4e9, f"{rate / 1e9:.1f} GB/s: qwen3-8b would take more than 5 s"
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), target.parameters(), strict=True))
    ids = torch.arange(64, device="cuda")
    hidden, features = target(ids, ids, DenseAttend(spec), taps=(1, 25))
    logits = target.logits(hidden).float()
    assert features is not None
    assert bool(features.isfinite().all() & logits.isfinite().all())
    assert 0.5 < float(logits.std()) < 2


def test_a_drafter_is_drawn_beside_its_target() -> None:
    target = random_decoder(target_shape("qwen3-0.6b"), torch.bfloat16, "cuda")
    drafter = random_drafter(published_dspark(target.spec), target)
    assert (drafter.device.type, drafter.dtype) == ("cuda", torch.bfloat16)
    assert drafter.head_weight.data_ptr() == target.head_weight.data_ptr()
