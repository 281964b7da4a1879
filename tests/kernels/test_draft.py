"""The serial draw against a plain loop over torch ops, with and without a Markov head, over padded and odd sizes."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.draft import ConfidenceHead, draft_chain, draft_workspace
from slipstream.ops.noise import gumbel
from slipstream.ops.sample import coupled_targets

# Interpreted kernels are numpy, which warns of the infinities that masked lanes compute with.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NUM_SLOTS, MAX_DRAFTS, VOCAB = 80, 6, 400


@dataclass
class Case:
    base: Tensor  # [D, d, Vd], NaN from num_columns on
    w1: Tensor | None
    w2: Tensor | None
    anchors: Tensor
    token_ids: Tensor | None
    num_columns: int
    slots: Tensor
    context: Tensor
    temperature: Tensor
    seed: Tensor
    sample: bool = True
    signal: str = "peak"
    head: ConfidenceHead | None = None

    def run(self, workspace: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """drafts, prob, previous [D, S]."""
        shape, device = (len(self.base), MAX_DRAFTS), self.base.device
        out = [torch.full(shape, -7, dtype=kind, device=device) for kind in (torch.int64, torch.float32, torch.int64)]
        workspace = draft_workspace(NUM_SLOTS, MAX_DRAFTS, device) if workspace is None else workspace
        self.draw(*out, workspace)
        assert (workspace == -(2**63)).all()
        return out[0], out[1], out[2]

    def draw(self, drafts: Tensor, prob: Tensor, previous: Tensor, workspace: Tensor) -> None:
        draft_chain(
            self.base, self.w1, self.w2, self.anchors, self.token_ids, self.num_columns, slots=self.slots,
            context=self.context, temperature=self.temperature, seed=self.seed, sample=self.sample, signal=self.signal,
            drafts=drafts, prob=prob, previous=previous, workspace=workspace, head=self.head,
        )  # fmt: skip

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """drafts, prob, previous [D, d]."""
        heat = self.temperature[self.slots]
        divisor = torch.where(heat > 0, heat, 1.0)
        previous, drafts, probs = [self.anchors], [], []
        for j in range(self.base.shape[1]):
            logits = self.base[:, j, : self.num_columns].float()
            if self.w1 is not None and self.w2 is not None:
                logits = logits + (self.w1[previous[-1]].float() @ self.w2.float().T)[:, : self.num_columns]
            noise = gumbel(self.seed[self.slots], self.context[self.slots] + 1 + j, VOCAB)
            noise = noise[:, : self.num_columns] if self.token_ids is None else noise[:, self.token_ids]
            scaled = logits / divisor[:, None]
            columns = coupled_targets(scaled, heat, noise) if self.sample else logits.argmax(-1)
            share = scaled.softmax(-1)
            read = share.amax(-1) if self.signal == "peak" else share.gather(1, columns[:, None])[:, 0]
            drafts.append(columns if self.token_ids is None else self.token_ids[columns])
            probs.append(read)
            previous.append(drafts[-1])
        return torch.stack(drafts, 1), torch.stack(probs, 1), torch.stack(previous[:-1], 1)

    def confidence(self, previous: Tensor) -> Tensor:
        """[D, d] of the head, in float64."""
        assert self.head is not None
        inputs, bias = self.head.hidden.double(), self.head.bias
        if self.head.has_markov:
            assert self.w1 is not None
            inputs = torch.cat([inputs, self.w1[previous].double()], -1)
        return (
            F.linear(inputs, self.head.weight.double(), None if bias is None else bias.double())[..., 0]
            .sigmoid()
            .float()
        )

    def check(self) -> None:
        num_drafts = self.base.shape[1]
        drafts, prob, previous = self.run()
        want_drafts, want_prob, want_previous = self.expected()
        assert torch.equal(drafts[:, :num_drafts], want_drafts)
        assert self.w1 is None or torch.equal(previous[:, :num_drafts], want_previous)
        if self.head is not None:
            want_prob = self.confidence(want_previous)
        torch.testing.assert_close(
            prob[:, :num_drafts],
            torch.zeros_like(want_prob) if self.signal == "none" else want_prob,
            rtol=1e-4,
            atol=1e-5,
        )
        for values in (drafts, prob, previous):
            assert (values[:, num_drafts:] == -7).all(), "columns from d on are others'"


def _case(
    device: str,
    num_sequences: int = 3,
    *,
    rank: int = 8,
    num_drafts: int = 4,
    num_columns: int = 200,
    padding: int = 6,
    is_mapped: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    padding = 0 if is_mapped else padding

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(device)

    base = 2 * normal(num_sequences, num_drafts, num_columns + padding)
    base[..., num_columns:] = torch.nan
    heat = torch.tensor([0.0, 0.8, 1.0, 0.0, 1.4]).repeat(NUM_SLOTS)[: NUM_SLOTS + 1]
    token_ids = torch.randperm(VOCAB, generator=generator)[:num_columns].sort().values.to(device)
    return Case(
        base=base,
        w1=normal(VOCAB, rank) if rank else None,
        w2=normal(num_columns + padding, rank) if rank else None,
        anchors=integers(0, VOCAB, num_sequences),
        token_ids=token_ids if is_mapped else None,
        num_columns=num_columns,
        slots=torch.randperm(NUM_SLOTS, generator=generator)[:num_sequences].to(device),
        context=integers(0, 10_000, NUM_SLOTS + 1),
        temperature=heat.to(device),
        seed=integers(-(2**62), 2**62, NUM_SLOTS + 1),
    )


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize(("rank", "num_sequences"), [(0, 1), (0, 5), (8, 1), (8, 3), (8, 13), (8, 20), (8, 70)])
def test_a_block_equals_the_loop(
    device: str, dtype: torch.dtype, rank: int, num_sequences: int, is_mapped: bool
) -> None:
    num_drafts = 4 if num_sequences < 10 else 2
    _case(device, num_sequences, rank=rank, num_drafts=num_drafts, is_mapped=is_mapped, dtype=dtype).check()


@pytest.mark.parametrize("rank", [1, 16, 24, 256])
@pytest.mark.parametrize("num_sequences", [1, 20])
def test_any_rank(device: str, dtype: torch.dtype, rank: int, num_sequences: int) -> None:
    case = _case(device, num_sequences, rank=rank, num_drafts=2, dtype=dtype)
    assert case.w1 is not None
    case.w1 *= (4 / rank) ** 0.5
    case.check()


def test_sequences_that_share_w2_equal_sequences_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A W2 too big for the cache: 16 sequences per program, however few there are."""
    monkeypatch.setattr("slipstream.kernels.draft._SMALL_W2", 0)
    _case(device, 3).check()


@pytest.mark.parametrize("num_programs", [1, 3])
def test_programs_that_loop_over_their_columns(device: str, num_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.kernels.draft._NUM_PROGRAMS", num_programs)
    for signal in ("peak", "drawn"):
        replace(_case(device, 1, rank=128, num_columns=300), signal=signal).check()


@pytest.mark.parametrize("signal", ["none", "peak", "drawn"])
@pytest.mark.parametrize("rank", [0, 8])
def test_every_signal(device: str, signal: str, rank: int) -> None:
    replace(_case(device, rank=rank), signal=signal).check()


def test_greedy_drafts_of_sampled_requests(device: str) -> None:
    replace(_case(device), sample=False, signal="drawn").check()


def test_the_first_of_equal_columns_is_drawn_also_across_programs(device: str) -> None:
    case = replace(_case(device, rank=8, num_columns=390), sample=False)
    case.base[:] = -50.0
    case.base[..., [385, 200, 130, 129]] = 50.0
    assert case.w1 is not None
    case.w1.zero_()
    assert (case.run()[0][:, :4] == 129).all()


def test_views_of_larger_tensors(device: str) -> None:
    """Block rows behind the anchor's (fill-in), columns of a padded head."""
    case = _case(device)
    rows = torch.full((3, 6, 300), torch.nan, device=device)
    rows[:, 2:, :206] = case.base
    expected = case.expected()[0]
    assert torch.equal(replace(case, base=rows[:, 2:, :206]).run()[0][:, :4], expected)


def test_padding_sequences_draw_something_harmless(device: str) -> None:
    case = _case(device, 5)
    case.slots[3:] = NUM_SLOTS
    case.base[3:] = torch.nan
    case.anchors[3:] = 0
    drafts, prob, _ = case.run()
    assert (drafts[:, :4] >= 0).all() and (drafts[:, :4] < case.num_columns).all()
    live = replace(case, base=case.base[:3], slots=case.slots[:3], anchors=case.anchors[:3])
    assert torch.equal(drafts[:3, :4], live.expected()[0])
    assert prob[3:, :4].isnan().all()


def test_a_workspace_serves_calls_of_all_sizes(device: str) -> None:
    workspace = draft_workspace(NUM_SLOTS, MAX_DRAFTS, device)
    for num_sequences, num_drafts in ((13, 2), (3, 4), (13, 4), (1, 1)):
        case = _case(device, num_sequences, num_drafts=num_drafts, seed=num_sequences)
        assert torch.equal(case.run(workspace)[0][:, :num_drafts], case.expected()[0])


@pytest.mark.gpu
@pytest.mark.parametrize("num_sequences", [1, 20, 70])
def test_a_replayed_graph_equals_the_eager_call(num_sequences: int) -> None:
    case = _case("cuda", num_sequences, dtype=torch.bfloat16)
    eager = case.run()
    out = [torch.full_like(values, -7) for values in eager]
    workspace = draft_workspace(NUM_SLOTS, MAX_DRAFTS, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.draw(*out, workspace)
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(out, eager, strict=True))


@pytest.mark.parametrize(("rank", "has_markov"), [(0, False), (12, False), (12, True)])
@pytest.mark.parametrize(
    ("width", "has_bias", "is_mapped"), [(24, False, False), (24, True, True), (5000, True, False)]
)
def test_confidence_equals_the_head(
    device: str, dtype: torch.dtype, rank: int, has_markov: bool, width: int, has_bias: bool, is_mapped: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    case = _case(device, 5, rank=rank, num_drafts=3, is_mapped=is_mapped, dtype=dtype)
    block = torch.randn(5, 6, width, generator=generator).to(device, dtype)
    weight = (torch.randn(1, width + 12 * has_markov, generator=generator) / width**0.5).to(device, dtype)
    bias = torch.randn(1, generator=generator).to(device, dtype) if has_bias else None
    hidden = block[:, 3:]  # fill-in: the first rows predict nothing
    replace(case, signal="head", head=ConfidenceHead(hidden, weight, bias, has_markov)).check()
