"""Philox against its published vectors, what a draw's name holds, and the laws of what comes out."""

import math

import pytest
import torch
from torch import Tensor

from slipstream.ops.noise import CounterSource, Purpose, _gumbel_from_uint32, _philox4x32, draft_gumbel, gumbel, philox

SEEDS = torch.tensor([0, 1, -1, 2**32, 2**63 - 1, -(2**63), 123456789012345])


def _ids(*values: int) -> Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: str) -> None:
    words = _philox4x32(tuple(_ids(c)[None] for c in counter), (_ids(key[0])[None], _ids(key[1])[None]))
    assert " ".join(f"{int(word):08x}" for word in words) == expected


def _philox_plain(counter: list[int], key: list[int]) -> list[int]:
    mask = 0xFFFFFFFF
    for _ in range(10):
        one, two = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [(two >> 32) ^ counter[1] ^ key[0], two & mask, (one >> 32) ^ counter[3] ^ key[1], one & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter


def test_philox_puts_seed_position_and_token_where_the_docstring_says() -> None:
    positions = torch.tensor([0, 7, 2**31, 2**32 + 5, 2**40, 1, 4095])
    words = philox(SEEDS, positions, _ids(0, 3, 12287), Purpose.ACCEPT)
    assert words.shape == (7, 3, 4)
    for i, (seed, position) in enumerate(zip(SEEDS.tolist(), positions.tolist(), strict=True)):
        for j, counter in enumerate((0, 3, 12287)):
            key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
            name = [counter, position & 0xFFFFFFFF, int(Purpose.ACCEPT), position >> 32]
            assert words[i, j].tolist() == _philox_plain(name, key)


def test_noise_is_a_function_of_seed_position_and_token_alone() -> None:
    vocab, positions = 1003, torch.arange(7) + 5
    whole = gumbel(SEEDS, positions, vocab)
    assert whole.shape == (7, vocab)
    for row in range(7):  # alone, in another batch, as a subset, for a larger vocabulary
        torch.testing.assert_close(gumbel(SEEDS[row : row + 1], positions[row : row + 1], vocab)[0], whole[row])
    assert torch.equal(philox(SEEDS.flip(0), positions.flip(0), _ids(9)), philox(SEEDS, positions, _ids(9)).flip(0))
    ids = _ids(0, 1002, 17, 4, 17)
    torch.testing.assert_close(gumbel(SEEDS, positions, vocab, ids), whole[:, ids])
    per_row = torch.arange(14).view(7, 2) * 71
    torch.testing.assert_close(gumbel(SEEDS, positions, vocab, per_row), whole.gather(1, per_row))
    torch.testing.assert_close(gumbel(SEEDS, positions, 1500)[:, :vocab], whole)
    torch.testing.assert_close(gumbel(SEEDS, positions, vocab, dtype=torch.float64).float(), whole)


def test_tiles_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, positions = torch.arange(9), torch.arange(9) * 3
    whole = gumbel(seeds, positions, 402)
    monkeypatch.setattr("slipstream.ops.noise._TILE", 250)
    torch.testing.assert_close(gumbel(seeds, positions, 402), whole)


def test_different_names_give_different_noise() -> None:
    seeds = torch.arange(40).repeat_interleave(40) - 20
    positions = torch.arange(40).repeat(40)
    rows = gumbel(seeds, positions, 8)
    assert len(torch.unique(rows, dim=0)) == len(rows)
    streams = [philox(SEEDS, SEEDS.abs() >> 33, _ids(5), purpose) for purpose in Purpose]
    assert len(torch.unique(torch.cat(streams)[:, 0], dim=0)) == len(Purpose) * len(SEEDS)


def test_gumbel_is_finite_and_right_at_the_ends_of_the_integers() -> None:
    edges = [0, 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 2, 2**32 - 1]
    g = _gumbel_from_uint32(torch.tensor(edges, dtype=torch.float64), torch.float32)
    exact = [-math.log(-math.log1p(-(r + 0.5) * 2.0**-32)) for r in edges]
    torch.testing.assert_close(g.double(), torch.tensor(exact, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    assert exact[0] < 22.88
    assert exact[-1] > -3.14


def test_gumbel_law() -> None:
    """400k values: mean and variance within 4 standard errors, and a Kolmogorov distance that fails once in 10^4."""
    g = gumbel(torch.arange(100), torch.arange(100) ** 2, 4000).double().flatten()
    n = len(g)
    assert abs(g.mean() - 0.5772156649) < 4 * math.sqrt(math.pi**2 / 6 / n)
    assert abs(g.var() - math.pi**2 / 6) < 4 * math.sqrt(4.4 * (math.pi**2 / 6) ** 2 / n)  # kurtosis 5.4
    uniform = torch.exp(-torch.exp(-g.sort().values))
    assert (uniform - (torch.arange(n) + 0.5) / n).abs().max() < 2.2 / math.sqrt(n)
    lanes = g.view(100, 1000, 4)
    correlation = torch.corrcoef(lanes.reshape(-1, 4).T) - torch.eye(4)
    assert correlation.abs().max() < 5 / math.sqrt(n / 4)


# ------------------------------------------------------------------------------------------------------- CounterSource

SOURCE = CounterSource()


def _chi_square(drawn: Tensor, prob: Tensor) -> float:
    """Statistic over its threshold at about 1e-5 for few degrees of freedom; below 1 passes."""
    support = prob > 0
    counts = torch.bincount(drawn, minlength=len(prob)).double()
    assert counts[~support].sum() == 0
    expected = prob[support].double() * len(drawn)
    freedom = int(support.sum()) - 1
    return float(((counts[support] - expected) ** 2 / expected).sum()) / (freedom + 6.5 * math.sqrt(2 * freedom) + 8)


def test_categorical_law_and_support() -> None:
    prob = torch.tensor([0.0, 0.4, 0.0, 0.3, 0.2, 0.1, 0.0])
    count = torch.arange(20_000)
    for seed, anchor, offset in (
        (count, 0 * count, 0 * count),
        (0 * count, count, 0 * count),
        (0 * count, 7 + 0 * count, count),
    ):
        for purpose in (Purpose.DRAFT, Purpose.RESIDUAL):
            drawn = SOURCE.categorical(prob.expand(len(count), -1), seed, anchor, offset, purpose)
            assert _chi_square(drawn, prob) < 1


def test_categorical_takes_weights_that_do_not_sum_to_one() -> None:
    seed = torch.arange(64)
    prob = torch.rand(64, 9, generator=torch.Generator().manual_seed(0))
    drawn = [SOURCE.categorical(prob * scale, seed, seed, seed, Purpose.DRAFT) for scale in (1.0, 1e-3, 50.0)]
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


def test_bernoulli_law_and_its_certain_cases() -> None:
    seed = torch.arange(20_000)
    zeros = torch.zeros_like(seed)
    for prob in (0.0, 0.03, 0.5, 0.97, 1.0):
        hits = SOURCE.bernoulli(torch.full((20_000,), prob), seed, zeros, zeros, Purpose.ACCEPT).double().mean()
        assert abs(hits - prob) <= 5 * math.sqrt(prob * (1 - prob) / 20_000)


def test_purposes_are_independent_streams() -> None:
    """A draft and the accept draw of the same seed, anchor and offset must not know each other."""
    seed = torch.arange(20_000)
    zeros, half = torch.zeros_like(seed), torch.full((20_000, 2), 0.5)
    bits = torch.stack(
        [SOURCE.categorical(half, seed, zeros, zeros + offset, purpose) for purpose in Purpose for offset in (0, 1)]
    )
    correlation = torch.corrcoef(bits.double()) - torch.eye(len(bits))
    assert correlation.abs().max() < 5 / math.sqrt(20_000)


def test_every_draft_has_noise_of_its_own() -> None:
    """Drafts for one position from different anchors, of different places from one anchor, and coupled noise there.

    Correlations of 40,000 values each: one as large as that comes up once in 2 million.
    """
    seed = torch.arange(5_000)
    position = torch.full_like(seed, 12)
    rows = [gumbel(seed, position, 8)]
    for anchor in (9, 10, 11):
        for offset in (position - 1 - anchor, position - anchor):
            rows.append(draft_gumbel(seed, torch.full_like(seed, anchor), offset, 8))
    correlation = torch.corrcoef(torch.stack(rows).flatten(1)) - torch.eye(len(rows))
    assert correlation.abs().max() < 5 / math.sqrt(40_000)


def test_noise_of_drafts_is_that_of_its_counter_words() -> None:
    """Column // 4, the anchor and 1 + 256 * offset, so that no other draw of the request has the same."""
    seed, anchor, offset = torch.tensor([7, -3]), torch.tensor([5, 2**32 + 5]), torch.tensor([0, 6])
    words = torch.tensor([[2, 5, 1, 0], [2, 5, 1 + 256 * 6, 1]])
    key = (seed[:, None], seed[:, None] >> 32)
    lanes = torch.cat(_philox4x32(tuple(words[:, i : i + 1] for i in range(4)), key), dim=1)
    found = draft_gumbel(seed, anchor, offset, 12)[:, 8:]
    assert torch.equal(found, _gumbel_from_uint32(lanes.double(), torch.float32))


def test_rows_that_are_not_finite_give_an_id_and_leave_the_others_alone() -> None:
    seed = torch.arange(4)
    prob = torch.full((4, 5), 0.2)
    clean = SOURCE.categorical(prob, seed, seed, seed, Purpose.DRAFT)
    prob[1, 2], prob[2], prob[3] = torch.nan, torch.inf, 0.0
    drawn = SOURCE.categorical(prob, seed, seed, seed, Purpose.DRAFT)
    assert drawn[0] == clean[0]
    assert bool(((drawn >= 0) & (drawn < 5)).all())
