"""Where the kernels cut rows, against `filter_logits` and against float64 sums of a sorted row; small tiles, so that rows have many."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.kernels import filters
from slipstream.kernels.filters import Cut, cut_rows
from slipstream.ops.sample import filter_logits

# Interpreted kernels are numpy, which warns of the infinities that masked lanes compute with.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BF16 = pytest.param(torch.bfloat16, id="bfloat16")
BOTH = pytest.mark.parametrize("kind", [BF16, pytest.param(torch.float32, id="float32")])
# Interpreted, a search among all of fp32 takes seconds; `make test` has it in the other tests.
SLOWLY = pytest.mark.parametrize("kind", [BF16, pytest.param(torch.float32, id="float32", marks=pytest.mark.slow)])
NEAR = 1e-5  # shares of a row that are this close to what was asked for may be cut on either side


@dataclass(frozen=True)
class Wish:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


WISHES = [
    Wish(), Wish(0.0, 3, 0.5, 0.1), Wish(top_k=1), Wish(top_k=7), Wish(0.3, top_k=40), Wish(top_k=10**6), Wish(top_p=1e-7),
    Wish(top_p=0.5), Wish(0.7, top_p=0.9), Wish(3.0, top_p=0.999), Wish(100.0, top_p=0.3), Wish(1e-38, top_p=0.9),
    Wish(1e-38, 5), Wish(min_p=0.05), Wish(2.0, min_p=1.0), Wish(1.3, 20, 0.8), Wish(0.5, 300, 0.95, 0.02),
    Wish(top_k=12, min_p=0.3), Wish(top_p=0.9, min_p=1e-4), Wish(1e38, 9, 0.5),
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one program for a row, which interpreted is the fastest."""
    monkeypatch.setattr(filters, "TILE", 64)
    monkeypatch.setattr(filters, "_PROGRAMS", 1)


def columns(wishes: list[Wish], device: str) -> dict[str, Tensor]:
    """Of slots 0 .. R - 1, and the padding slot."""
    kinds = {"temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
    every = [*wishes, Wish(0.0)]
    return {name: torch.tensor([getattr(w, name) for w in every], dtype=kinds[name], device=device) for name in kinds}


def cut_of(logits: Tensor, wishes: list[Wish], device: str) -> Cut:
    """Row r is of sequence r in slot R - 1 - r; logits in a wider matrix, NaN behind them, rows of nobody below."""
    count, vocab = logits.shape
    wide = torch.full((count + 2, vocab + 3), torch.nan, dtype=logits.dtype, device=device)
    wide[:count, :vocab] = logits
    rows = torch.arange(count + 2, device=device)
    cut = cut_rows(
        wide, vocab, output_sequence=torch.where(rows < count, rows, -1), slots=rows[:count].flip(0),
        **columns(wishes[::-1], device),
    )  # fmt: skip
    return Cut(cut.floor[:count], cut.last[:count])


def kept_by(cut: Cut, logits: Tensor) -> Tensor:
    """[R, V] of what is above -inf at all."""
    x, floor = logits.float(), cut.floor[:, None]
    is_tied = (x == floor) & (torch.arange(x.shape[1], device=x.device) <= cut.last[:, None])
    return ((x > floor) | is_tied) & (x > -torch.inf)


def kept_by_reference(logits: Tensor, wishes: list[Wish]) -> Tensor:
    temperature, top_k, top_p, min_p = (x[:-1] for x in columns(wishes, str(logits.device)).values())
    return filter_logits(logits, temperature, top_k, top_p, min_p=min_p) > -torch.inf


def lengths(row: Tensor, wish: Wish) -> tuple[int, int]:
    """The shortest and the longest prefix of the sorted row [V] float64 that may stay, by sums that rounding has no part in."""
    count, every = int((row > -torch.inf).sum()), len(row)
    if wish.temperature == 0:
        return count, count
    left = wish.top_k if 0 < wish.top_k < every else every
    weights = ((row[:left] - row[0]) / wish.temperature).exp()
    sums = weights.cumsum(0)
    found = []
    for near in (-NEAR, NEAR):
        share = 1.0 if wish.top_p == 1 else min(wish.top_p + near, 1.0)
        by_share = left if wish.top_p == 1 or share == 1 else int((sums < share * sums[-1] * (1 - 1e-12)).sum()) + 1
        by_least = left if wish.min_p == 0 else int((weights >= wish.min_p * (1 - near)).sum())
        found.append(min(max(by_share, 1), max(by_least, 1), left, count))
    return found[0], found[1]


def check(logits: Tensor, wishes: list[Wish], device: str) -> None:
    logits = logits.to(device)
    ours, theirs = kept_by(cut_of(logits, wishes, device), logits), kept_by_reference(logits, wishes)
    for row, wish, mine, other in zip(logits.double(), wishes, ours, theirs, strict=True):
        order = row.argsort(descending=True, stable=True)
        shortest, longest = lengths(row[order], wish)
        count = int(mine.sum())
        assert shortest <= count <= longest, (wish, shortest, count, longest)
        assert bool(mine[order[:count]].all()), (wish, "not a prefix")
        has_weight = row - row.max() >= -60 * wish.temperature  # the reference divides, and cuts what overflows
        assert shortest < longest or wish.temperature == 0 or torch.equal(mine[has_weight], other[has_weight]), wish


def drawn(count: int, vocab: int, kind: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers that bf16 has, with ties, on both sides of 0."""
    generator = torch.Generator().manual_seed(seed)
    return (24 * torch.randn(count, vocab, generator=generator)).round().div(8).to(kind)


@SLOWLY
@pytest.mark.parametrize("vocab", [5, 133])
def test_every_wish_beside_all_others(device: str, kind: torch.dtype, vocab: int) -> None:
    check(drawn(len(WISHES), vocab, kind), WISHES, device)


@SLOWLY
def test_ties_at_the_cut_go_by_token_id(device: str, kind: torch.dtype) -> None:
    logits = torch.full((6, 200), -3.0, dtype=kind)
    logits[:, [190, 3, 70, 71, 140]] = 2.0
    logits[:, 100] = 5.0
    wishes = [Wish(top_k=k) for k in (1, 2, 4, 6, 8)] + [Wish(top_p=0.93)]
    check(logits, wishes, device)
    kept = kept_by(cut_of(logits.to(device), wishes, device), logits.to(device))
    assert [row.nonzero().flatten().tolist() for row in kept[:3]] == [[100], [3, 100], [3, 70, 71, 100]]
    assert kept[4].nonzero().flatten().tolist() == [0, 1, 3, 70, 71, 100, 140, 190]


@SLOWLY
def test_top_p_among_the_ties_that_top_k_left(device: str, kind: torch.dtype) -> None:
    """A search that is over before it begins knows all the same how many of them top-k left out."""
    logits = torch.zeros(6, 130, dtype=kind)
    logits[:, [5, 60, 100]] = 8.0
    logits[:, [70, 20]] = 7.0
    wishes = [Wish(1.0, k, 0.4) for k in (1, 2, 3)] + [Wish(1.0, k, 0.97) for k in (3, 4, 5)]
    check(logits, wishes, device)
    kept = kept_by(cut_of(logits.to(device), wishes, device), logits.to(device))
    assert kept.sum(1).tolist() == [1, 1, 2, 3, 4, 5]


@SLOWLY
def test_rows_of_equals(device: str, kind: torch.dtype) -> None:
    wishes = [Wish(top_k=3), Wish(top_p=0.5), Wish(0.1, top_p=0.25), Wish(min_p=0.5), Wish(1.0, 100, 0.5), Wish()]
    for value in (-0.0, -17.0):
        logits = torch.full((len(wishes), 128), value, dtype=kind)
        check(logits, wishes, device)
    zeros = torch.zeros(1, 128, dtype=kind)
    zeros[0, ::2] = -0.0
    assert cut_of(zeros.to(device), [Wish(top_k=3)], device).last.tolist() == [2]


@BOTH
def test_numbers_of_any_size(device: str, kind: torch.dtype) -> None:
    """From the smallest to the largest: the search ends whatever the bits are."""
    bits = torch.randint(-(2**31), 2**31 - 1, (8, 150), generator=torch.Generator().manual_seed(2)).int()
    logits = bits.view(torch.float32).nan_to_num(0.5, 1.0, -1.0).to(kind).nan_to_num(0.5, 2.0, -torch.inf)
    wishes = [Wish(top_k=k) for k in (1, 2, 40, 75, 110, 149)] + [Wish(top_p=0.5), Wish(1e35, 90, 0.9)]
    ours = kept_by(cut_of(logits.to(device), wishes, device), logits.to(device)).cpu()
    for row, wish, kept in zip(logits[:6].float(), wishes, ours, strict=False):
        order = row.argsort(descending=True, stable=True)[: wish.top_k]
        assert set(kept.nonzero().flatten().tolist()) == set(order[row[order] > -torch.inf].tolist())


@SLOWLY
def test_fault_1_rows_that_are_not_finite_get_some_cut(device: str, kind: torch.dtype) -> None:
    logits = drawn(8, 200, kind)
    logits[0, 7], logits[1, 7], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 50:] = -torch.inf
    logits[4] = torch.nan
    logits[5, 3:] = -torch.inf
    wishes = [Wish(1.0, 5, 0.9, 0.1)] * 5 + [Wish(top_k=20)] + [Wish(0.7, 5, 0.9, 0.1)] * 2
    cut = cut_of(logits.to(device), wishes, device)
    assert cut.floor[[0, 1, 2, 4]].tolist() == [-torch.inf] * 4
    fine = torch.tensor([3, 5, 6, 7])
    check(logits[fine], [wishes[i] for i in fine], device)


def same(a: Cut, b: Cut) -> bool:
    return torch.equal(a.floor, b.floor) and torch.equal(a.last, b.last)


@SLOWLY
def test_a_rows_cut_is_its_own_whatever_shares_the_step(
    device: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, among others, and with a program for each tile in place of one for a whole row."""
    generator = torch.Generator().manual_seed(5)
    logits = (4 * torch.randn(4, 130, generator=generator)).to(kind).to(device)
    wishes = [Wish(0.7, top_p=0.9), Wish(1.1, 60, 0.9), Wish(top_k=33), Wish(1.3, top_p=0.8)]
    together = cut_of(logits, wishes, device)
    for row in (1, 3):
        alone = cut_of(logits[row : row + 1], wishes[row : row + 1], device)
        assert same(alone, Cut(together.floor[row : row + 1], together.last[row : row + 1]))
    monkeypatch.setattr(filters, "_PROGRAMS", 4096)
    assert same(cut_of(logits, wishes, device), together)


def test_the_same_in_both_dtypes(device: str) -> None:
    """Penalties of a neighbour make a step's logits fp32."""
    logits = (4 * torch.randn(4, 200, generator=torch.Generator().manual_seed(6))).bfloat16().to(device)
    wishes = [Wish(0.7, top_p=0.9), Wish(1.1, 60, 0.9), Wish(1.4, top_p=0.99), Wish(min_p=0.1)]
    assert same(cut_of(logits, wishes, device), cut_of(logits.float(), wishes, device))


def test_fp16(device: str) -> None:
    logits = (4 * torch.randn(3, 200, generator=torch.Generator().manual_seed(8))).half().to(device)
    wishes = [Wish(0.7, top_p=0.9), Wish(1.1, 60, 0.9), Wish(top_k=7)]
    assert same(cut_of(logits, wishes, device), cut_of(logits.float(), wishes, device))


def test_logits_that_lie_at_the_bounds_of_the_search(device: str) -> None:
    """Whoever adds up and whoever reads the sums must mean the same bounds, to the last bit: neighbours in fp32 tell."""
    count, generator = 4 if device == "cpu" else 2000, torch.Generator().manual_seed(9)
    peak = 40 * torch.rand(count, generator=generator) - 10
    place = torch.randint(1, 15, (count,), generator=generator)
    bound = peak - ((place - 15) / 14) ** 2 * filters._WEIGHTLESS.value
    around = (bound.view(torch.int32)[:, None] + torch.arange(-8, 9, dtype=torch.int32)).view(torch.float32)
    logits = torch.cat([peak[:, None], around, peak[:, None] - 500 + torch.zeros(count, 12)], dim=1).to(device)
    wishes = [Wish(top_k=int(k)) for k in torch.randint(2, 18, (count,), generator=generator)]
    kept = kept_by(cut_of(logits, wishes, device), logits).sum(1)
    assert kept.tolist() == [wish.top_k for wish in wishes]


def test_no_rows(device: str) -> None:
    assert cut_of(torch.zeros(0, 30), [], device).floor.shape == (0,)


@st.composite
def cases(draw: Any) -> tuple[Tensor, list[Wish]]:
    vocab = draw(st.integers(2, 90))
    spread = draw(st.sampled_from([1, 4, 100, 255]))  # of eighths: at 1 nearly all are ties
    number = st.one_of(st.integers(-spread, spread).map(lambda n: n / 8), st.just(-torch.inf))
    rows = draw(st.lists(st.lists(number, min_size=vocab, max_size=vocab), min_size=1, max_size=3))
    wish = st.builds(
        Wish, st.sampled_from([0.0, 0.05, 0.7, 1.0, 2.5, 30.0]), st.sampled_from([0, 1, 2, 5, vocab - 1, vocab, vocab + 1]),
        st.sampled_from([1.0, 1e-6, 0.3, 0.8, 0.95, 0.9999]), st.sampled_from([0.0, 0.01, 0.4, 1.0]),
    )  # fmt: skip
    logits = torch.tensor(rows)
    logits[:, draw(st.integers(0, vocab - 1))] = draw(st.integers(-spread, spread)) / 8  # something to take
    return logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16]))), [draw(wish) for _ in rows]


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_row_and_any_wish(device: str, case: tuple[Tensor, list[Wish]]) -> None:
    check(*case, device)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [49_152, 151_936])
@pytest.mark.parametrize("count", [1, 8, 300])
@BOTH
def test_whole_vocabularies(kind: torch.dtype, count: int, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaked rows and flat ones, at the size of tiles that engines have; launched anew and replayed, the bits are equal."""
    monkeypatch.undo()
    generator = torch.Generator("cuda").manual_seed(count)
    sigma = torch.tensor([0.01, 1.0, 3.0, 6.0], device="cuda").repeat(count // 4 + 1)[:count, None]
    logits = (sigma * torch.randn(count, vocab, generator=generator, device="cuda")).to(kind)
    wishes = [WISHES[i % len(WISHES)] for i in range(count)]
    check(logits, wishes, "cuda")
    rows = torch.arange(count, device="cuda")
    asked = {"output_sequence": rows, "slots": rows, **columns(wishes, "cuda")}
    eager, graph = cut_rows(logits, vocab, **asked), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = cut_rows(logits, vocab, **asked)
    for _ in range(3):
        graph.replay()
        assert same(eager, replayed)
