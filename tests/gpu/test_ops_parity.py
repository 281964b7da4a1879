"""The sampling ops on a CUDA device against the CPU: integers and decisions equal, floats to rounding."""

import pytest
import torch

from slipstream.ops.noise import CounterSource, Purpose, gumbel, philox
from slipstream.ops.rank import rank
from slipstream.ops.reject import DraftLaw, draft_sample, reject
from slipstream.ops.sample import coupled_targets, filter_logits

pytestmark = pytest.mark.gpu

SEEDS = torch.tensor([0, 1, -1, 2**32, 2**63 - 1, -(2**63), 123456789012345, 77])
POSITIONS = torch.tensor([0, 7, 2**31, 2**32 + 5, 2**40, 1, 4095, 8])


def test_noise_is_the_same() -> None:
    counters = torch.arange(12_288)
    on_gpu = philox(SEEDS.cuda(), POSITIONS.cuda(), counters.cuda())
    assert torch.equal(on_gpu.cpu(), philox(SEEDS, POSITIONS, counters))
    torch.testing.assert_close(gumbel(SEEDS.cuda(), POSITIONS.cuda(), 49_152).cpu(), gumbel(SEEDS, POSITIONS, 49_152))


def test_filters_and_targets_are_the_same() -> None:
    logits = (4 * torch.randn(8, 49_152, generator=torch.Generator().manual_seed(0))).round(decimals=1)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.3, 0.7, 1.0, 0.2, 2.0])
    top_k, top_p = torch.tensor([5, 50, 0, 20, 0, 0, 3, 1000]), torch.tensor([0.5, 0.9, 0.95, 1.0, 0.5, 1.0, 0.8, 0.99])
    inputs = (logits, temperature, top_k, top_p)
    here, there = filter_logits(*inputs), filter_logits(*(x.cuda() for x in inputs)).cpu()
    cut = (here == -torch.inf) != (there == -torch.inf)
    assert int(cut.sum()) <= 2  # a softmax summed in another order may move a cut by one token
    torch.testing.assert_close(there[~cut], here[~cut])
    noise = gumbel(SEEDS, POSITIONS, 49_152)
    on_gpu = coupled_targets(there.cuda(), temperature.cuda(), noise.cuda())
    assert torch.equal(on_gpu.cpu(), coupled_targets(there, temperature, noise))


def test_decisions_are_the_same() -> None:
    generator = torch.Generator().manual_seed(1)
    size, num_drafts, vocab = 64, 7, 1000
    logits = 3 * torch.randn(num_drafts + 1, size, vocab, generator=generator, dtype=torch.float64)
    seeds, widths = torch.arange(size), torch.randint(0, num_drafts + 1, (size,), generator=generator)
    survival = torch.randint(1, 4, (size, num_drafts), generator=generator).div(3).cumprod(1)

    def step(device: str) -> list[torch.Tensor]:
        seed, source, heat = seeds.to(device), CounterSource(), torch.ones(size, device=device)
        pairs = [draft_sample(logits[j].to(device), heat, seed, seed, j, source) for j in range(num_drafts)]
        drafts = torch.stack([drawn for drawn, _ in pairs], dim=1)
        law = DraftLaw.join([law for _, law in pairs])
        target = (logits + 0.3).mul(0.9).softmax(-1).transpose(0, 1).to(device)
        verdict = reject(drafts, law, target, widths.to(device), seed, seed, source)
        uniform = source.bernoulli(heat / 2, seed, seed, seed, Purpose.ACCEPT)
        return [drafts, *verdict, uniform, rank(survival.to(device), widths.to(device), 99)]

    for here, there in zip(step("cpu"), step("cuda"), strict=True):
        assert torch.equal(here, there.cpu())
