"""The serial draw under rejection: what drafts were drawn from is kept, and the draws are those of the torch ops."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.kernels.draft import ConfidenceHead, draft_chain, draft_workspace
from slipstream.kernels.reject import KeptLaw
from slipstream.ops.noise import CounterSource
from slipstream.ops.reject import DraftLaw, draft_sample
from tests.kernels.test_draft import MAX_DRAFTS, NUM_SLOTS, VOCAB, Case, _case

# Interpreted kernels are numpy, which warns of the infinities that masked lanes compute with.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
UNTOUCHED = -77.0


def _kept(case: Case) -> KeptLaw:
    """Room for any step of the case, marked."""
    device, num_ids = case.base.device, VOCAB if case.token_ids is not None else case.num_columns
    law = KeptLaw.make(NUM_SLOTS, MAX_DRAFTS, case.token_ids, num_ids, case.base.dtype, device)
    for values in (law.logits, law.peak, law.mass):
        values.fill_(UNTOUCHED)
    return law


def _run(case: Case, law: KeptLaw) -> tuple[Tensor, Tensor, Tensor]:
    """drafts, prob, previous [D, S]."""
    shape, device = (len(case.base), MAX_DRAFTS), case.base.device
    out = [torch.full(shape, -7, dtype=kind, device=device) for kind in (torch.int64, torch.float32, torch.int64)]
    workspace = draft_workspace(NUM_SLOTS, MAX_DRAFTS, device)
    _draw(case, law, *out, workspace)
    assert (workspace == -(2**63)).all()
    return out[0], out[1], out[2]


def _draw(case: Case, law: KeptLaw, drafts: Tensor, prob: Tensor, previous: Tensor, workspace: Tensor) -> None:
    draft_chain(
        case.base, case.w1, case.w2, case.anchors, case.token_ids, case.num_columns, slots=case.slots,
        context=case.context, temperature=case.temperature, seed=case.seed, sample=True, signal=case.signal,
        drafts=drafts, prob=prob, previous=previous, workspace=workspace, head=case.head, law=law,
    )  # fmt: skip


def _expected(case: Case) -> tuple[Tensor, DraftLaw]:
    """Drafts [D, d] and their law by the torch ops, as `BlockDraft` asks for them; the bias is rounded once."""
    heat, seed, anchor = (x[case.slots] for x in (case.temperature, case.seed, case.context))
    previous, laws = [case.anchors], []
    for j in range(case.base.shape[1]):
        logits = case.base[:, j, : case.num_columns].float()
        if case.w1 is not None and case.w2 is not None:
            logits = logits + (case.w1[previous[-1]].float() @ case.w2.float().T)[:, : case.num_columns]
        rounded = logits.to(case.base.dtype)
        drawn, law = draft_sample(rounded, heat, seed, anchor, j, CounterSource(), token_ids=case.token_ids)
        previous.append(drawn)
        laws.append(law)
    return torch.stack(previous[1:], 1), DraftLaw.join(laws)


def _check(case: Case) -> KeptLaw:
    """Drafts, and the law of sequences that are drawn; nobody else's is written."""
    kept = _kept(case)
    (count, num_drafts), num_columns = case.base.shape[:2], case.num_columns
    drafts, prob, previous = _run(case, kept)
    expected, law = _expected(case)
    assert torch.equal(drafts[:, :num_drafts], expected)
    assert case.w1 is None or torch.equal(previous[:, 1:num_drafts], expected[:, :-1])
    hot, eps = law.is_drawn, torch.finfo(case.base.dtype).eps
    assert hot.any() and not hot.all(), "greedy sequences beside sampled ones"
    logits = kept.logits[:count, :num_drafts]
    torch.testing.assert_close(
        logits[hot].float(), law.logits[hot].float(), rtol=max(1e-5, eps), atol=max(1e-5, 4 * eps)
    )
    assert (logits[~hot] == UNTOUCHED).all()
    assert (kept.logits[count:] == UNTOUCHED).all() and (kept.logits[:, num_drafts:] == UNTOUCHED).all()
    # Of the very logits that were kept, to the rounding of fp32 sums.
    x, divisor = logits[hot].float(), law.divisor[hot][:, None]
    peak, mass = kept.peak[:count, :num_drafts], kept.mass[:count, :num_drafts]
    assert torch.equal(peak[hot], x.amax(-1))
    torch.testing.assert_close(
        mass[hot], ((x - peak[hot][..., None]) / divisor[..., None]).exp().sum(-1), rtol=1e-5, atol=0
    )
    assert kept.logits.shape == (NUM_SLOTS, MAX_DRAFTS, num_columns)
    if case.signal in ("peak", "drawn"):
        read = 1 / law.mass if case.signal == "peak" else law.read(expected)
        torch.testing.assert_close(prob[:, :num_drafts], read, rtol=max(1e-4, 16 * eps), atol=1e-6)
    elif case.head is not None:
        torch.testing.assert_close(
            prob[:, :num_drafts], case.confidence(previous[:, :num_drafts]), rtol=1e-4, atol=1e-5
        )
    else:
        assert (prob[:, :num_drafts] == 0).all()
    return kept


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize(("rank", "num_sequences"), [(0, 5), (8, 3), (8, 20)])
def test_a_block_and_its_law_equal_the_reference(
    device: str, dtype: torch.dtype, rank: int, num_sequences: int, is_mapped: bool
) -> None:
    num_drafts = 4 if num_sequences < 10 else 2
    _check(_case(device, num_sequences, rank=rank, num_drafts=num_drafts, is_mapped=is_mapped, dtype=dtype))


@pytest.mark.parametrize("signal", ["none", "drawn"])
def test_every_signal(device: str, signal: str) -> None:
    _check(replace(_case(device), signal=signal))


def test_a_confidence_head(device: str) -> None:
    case = _case(device)
    hidden, weight = torch.randn(3, 4, 40, device=device), torch.randn(1, 48, device=device) / 40**0.5
    _check(replace(case, signal="head", head=ConfidenceHead(hidden, weight, None, True)))


def test_programs_that_loop_over_their_columns(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.kernels.draft._NUM_PROGRAMS", 3)
    _check(_case(device, 3, rank=128, num_columns=300))


def test_logits_are_rounded_before_the_draw(device: str) -> None:
    """A law of half the bits: drafts are drawn again from what was kept, though nobody ever saw more of it."""
    case = _case(device, 5)
    case.temperature.fill_(0.9)
    law = _kept(case)
    law = replace(law, logits=law.logits.to(torch.bfloat16))
    drafts = _run(case, law)[0]
    slots, again, source = case.slots, 0, CounterSource()
    for j in range(4):
        named = (case.temperature[slots], case.seed[slots], case.context[slots], j, source)
        drawn, one = draft_sample(law.logits[:5, j].clone(), *named)
        assert torch.equal(drawn, drafts[:, j])
        torch.testing.assert_close(law.mass[:5, j], one.mass[:, 0])
        again += int((drawn != law.logits[:5, j].argmax(-1)).sum())
    assert again > 0


def test_padding_sequences_write_no_logits(device: str) -> None:
    """They read the slot beyond the last, which is greedy."""
    case = _case(device, 5)
    case.temperature[NUM_SLOTS], case.slots[3:], case.anchors[3:] = 0.0, NUM_SLOTS, 0
    case.base[3:] = torch.nan
    law = _kept(case)
    drafts = _run(case, law)[0]
    assert (law.logits[3:] == UNTOUCHED).all()
    assert (drafts[:, :4] >= 0).all() and (drafts[:, :4] < case.num_columns).all()
    live = replace(case, base=case.base[:3], slots=case.slots[:3], anchors=case.anchors[:3])
    assert torch.equal(drafts[:3, :4], _expected(live)[0])


def test_draws_have_the_law_that_is_kept(device: str) -> None:
    """Chi-square of pairs of drafts, the second of which goes by the first; a right kernel fails once in 100,000 runs."""
    count = 400 if device == "cpu" else 20_000
    generator = torch.Generator().manual_seed(4)
    base, w1, w2 = (0.6 * torch.randn(size, generator=generator).to(device) for size in ((2, 3), (3, 4), (3, 4)))
    each = torch.arange(count, device=device)
    case = Case(
        base=base.expand(count, 2, 3).contiguous(), w1=w1, w2=w2, anchors=0 * each, token_ids=None, num_columns=3,
        slots=each, context=each % 2 + 9, temperature=0 * each + 0.8, seed=each // 2 + 5,
    )  # fmt: skip
    law = KeptLaw.make(count, 2, None, 3, torch.float32, base.device)
    out = [torch.zeros(count, 2, dtype=kind, device=device) for kind in (torch.int64, torch.float32, torch.int64)]
    _draw(case, law, *out, draft_workspace(count, 2, device))
    pairs = torch.bincount(3 * out[0][:, 0] + out[0][:, 1], minlength=9).double().cpu()
    first, second = ((base[0] + w1[:1] @ w2.T) / 0.8).softmax(-1), ((base[1] + w1 @ w2.T) / 0.8).softmax(-1)
    expected = count * (first.T * second).flatten().double().cpu()
    assert expected.min() > 4
    assert ((pairs - expected) ** 2 / expected).sum() < 37.4  # 8 degrees of freedom
    q = ((law.logits - law.peak[..., None]) / 0.8).exp() / law.mass[..., None]
    torch.testing.assert_close(q[:, 0], first.expand(count, 3))
    torch.testing.assert_close(q[:, 1], second[out[0][:, 0]])


def test_a_draft_made_again_at_a_position_has_other_noise(device: str) -> None:
    """Even logits, so that noise alone decides: drafts for one position from two anchors agree no more than by chance."""
    case = _case(device, 24, num_drafts=3, padding=0)
    assert case.w2 is not None
    case.base.zero_(), case.w2.zero_()
    case.temperature.fill_(1.0)
    early, late = (_run(replace(case, context=case.context + n), _kept(case))[0][:, :3] for n in (0, 1))
    coupled = case.run()[0][:, :3]
    for a, b in ((early[:, 1:], late[:, :-1]), (early, late), (early, coupled), (early[:, 1:], early[:, :-1])):
        assert (a == b).float().mean() < 0.06  # 0.005 by chance


@pytest.mark.gpu
@pytest.mark.parametrize("num_sequences", [1, 20, 70])
def test_a_replayed_graph_equals_the_eager_call(num_sequences: int) -> None:
    case = _case("cuda", num_sequences, dtype=torch.bfloat16)
    case.temperature.fill_(0.9)
    eager_law, law = _kept(case), _kept(case)
    eager = _run(case, eager_law)
    out = [torch.full_like(values, -7) for values in eager]
    workspace = draft_workspace(NUM_SLOTS, MAX_DRAFTS, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _draw(case, law, *out, workspace)
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(out, eager, strict=True))
        for ours, theirs in ((law.logits, eager_law.logits), (law.peak, eager_law.peak), (law.mass, eager_law.mass)):
            assert torch.equal(ours, theirs)
