"""Norm and rotation against their formulas, in the shapes and types that the networks use."""

import math

import pytest
import torch

from slipstream.models.layers import Rotary
from slipstream.models.rope import RopeSpec
from slipstream.ops.norm import rms_norm
from slipstream.ops.rope import apply_rope


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 576), (5, 3, 64), (2, 7, 4, 8)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 30).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = rms_norm(x, weight, 1e-5)
    assert (got.dtype, got.shape) == (dtype, x.shape)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def test_rms_norm_survives_the_outliers_that_first_tokens_have() -> None:
    x = torch.full((1, 576), 0.01, dtype=torch.bfloat16)
    x[0, 3] = 16000.0  # its square overflows fp16 and eats every other value's in bf16
    got = rms_norm(x, torch.ones(576, dtype=torch.bfloat16), 1e-5)
    assert math.isclose(float(got[0, 3]), 24.0, rel_tol=1e-2)
    assert math.isclose(float(got[0, 0]), 0.01 * 24 / 16000, rel_tol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_turns_each_pair_by_its_angle(dtype: torch.dtype) -> None:
    rotary = Rotary(RopeSpec(theta=100.0), 8, 64)
    positions = torch.tensor([[0, 1], [5, 63]])
    x = torch.randn(2, 2, 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = apply_rope(x, *rotary.table(positions))
    assert (got.dtype, got.shape) == (dtype, x.shape)
    angles = positions[..., None, None] * 100.0 ** (-torch.arange(4) / 4)
    turned = torch.complex(x[..., :4].float(), x[..., 4:].float()) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((turned.real, turned.imag), dim=-1).to(dtype)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_rotated_scores_depend_on_the_distance_alone() -> None:
    rotary = Rotary(RopeSpec(theta=1e4), 16, 64)
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0))

    def score(at: int, back: int) -> float:
        turned_q = apply_rope(q, *rotary.table(torch.tensor([at])))
        turned_k = apply_rope(k, *rotary.table(torch.tensor([at - back])))
        return float((turned_q * turned_k).sum())

    assert math.isclose(score(9, 4), score(60, 4), rel_tol=1e-4)
    assert not math.isclose(score(9, 4), score(9, 5), rel_tol=1e-3)
