"""Rejection on the device against the torch ops and their random numbers; the laws themselves are proved elsewhere."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels.reject import KeptLaw, accept_rejection
from slipstream.ops.noise import CounterSource
from slipstream.ops.reject import DraftLaw, reject
from slipstream.ops.sample import invalid_rows, probabilities
from tests.kernels.acceptance import MAX_DRAFTS, Case, make_case

# Interpreted kernels are numpy, which warns of the infinities that masked lanes compute with.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SAMPLED = (1.0, 0.7, 1.3, 0.9, 1.0, 0.8, 1.1)


def _law(case: Case, likeness: float = 1.0, token_ids: Tensor | None = None) -> DraftLaw:
    """[B, S, V] what drafts are drawn from, at their sequence's temperature: like the target's rows where there are any.

    Greedy ones are taken. In the dtype of the case; token_ids: all that the drafter knows.
    """
    (num_sequences, num_drafts), device = case.drafts.shape, case.drafts.device
    generator = torch.Generator().manual_seed(9)
    logits = 3 * torch.randn(num_sequences, num_drafts, case.num_token_ids, generator=generator)
    for b in range(case.count):
        rows = case.logits[case.rows(b), : case.num_token_ids][:num_drafts].float().cpu()
        logits[b, : len(rows)] = likeness * rows + (1 - likeness) * logits[b, : len(rows)]
    logits = logits if token_ids is None else logits[..., token_ids]
    logits = logits.to(case.logits.dtype)
    heat = case.tensors["temperature"][case.tensors["slots"]].cpu()
    divisor = torch.where(heat > 0, heat, 1)
    peak = logits.float().amax(-1)
    weight = ((logits.float() - peak[..., None]) / divisor[:, None, None]).exp()
    drawn = torch.multinomial(weight.flatten(0, 1), 1, generator=generator).view(num_sequences, num_drafts)
    drawn = torch.where((heat > 0)[:, None], drawn, logits.float().argmax(-1))
    case.drafts.copy_(drawn if token_ids is None else token_ids[drawn])
    of_law = (logits, peak, weight.sum(-1), divisor, heat > 0)
    return DraftLaw(*(x.to(device) for x in of_law), None if token_ids is None else token_ids.to(device))


def _part(law: DraftLaw | None, sequence: int, width: int) -> DraftLaw | None:
    if law is None:
        return None
    one = slice(sequence, sequence + 1)
    block = (x[one, :width] for x in (law.logits, law.peak, law.mass))
    return DraftLaw(*block, law.divisor[one], law.is_drawn[one], law.token_ids)


def _expected(case: Case, law: DraftLaw | None) -> tuple[list[int], list[list[int]], list[bool]]:
    """Accepted drafts, emitted tokens, invalid; nothing for sequences that do not emit."""
    named, counts, tokens, invalid = case.tensors, [], [], []
    filtered = case.filtered()
    for b in range(case.count):
        rows, width = case.rows(b), int(named["widths"][b])
        if rows.start == rows.stop:
            counts.append(0), tokens.append([]), invalid.append(False)
            continue
        slot = named["slots"][b]
        target = probabilities(filtered[rows], named["temperature"][slot].expand(width + 1))
        anchor = named["context"][slot] + named["num_given"][b] - 1
        n, following = reject(
            case.drafts[b : b + 1, :width], _part(law, b, width), target[None], named["widths"][b : b + 1],
            named["seed"][slot][None], anchor[None], CounterSource(),
        )  # fmt: skip
        counts.append(int(n))
        tokens.append([*case.drafts[b, : int(n)].tolist(), int(following)])
        invalid.append(bool(invalid_rows(case.logits[rows, : case.num_token_ids])[: int(n) + 1].any()))
    return counts, tokens, invalid


def _run(case: Case, law: DraftLaw | None, **options: object) -> Tensor:
    return _judged(case, None if law is None else KeptLaw.of(law, case.num_token_ids), **options)


def _judged(case: Case, law: KeptLaw | None, **options: object) -> Tensor:
    result = torch.full((len(case.drafts), MAX_DRAFTS + 4), -7, dtype=torch.int32, device=case.logits.device)
    logits = options.pop("logits", case.logits)
    accept_rejection(
        logits, case.num_token_ids, **case.tensors, drafts=case.drafts, law=law, result=result, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return result


def _check(case: Case, law: DraftLaw | None, result: Tensor) -> list[int]:
    counts, tokens, invalid = _expected(case, law)
    assert result[:, 0].tolist() == case.tensors["widths"].tolist()
    assert result[: case.count, 1].tolist() == counts
    assert result[: case.count, 2].tolist() == invalid
    for row, emitted in zip(result.tolist(), tokens, strict=False):
        assert row[3 : 3 + len(emitted)] == emitted
    assert (result[case.count :, :3] == 0).all(), "padding sequences"
    assert (result[:, 3:] >= 0).all() and (result[:, 3:] < case.num_token_ids).all()
    return counts


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_certain", [False, True])
def test_a_ragged_mix_equals_the_reference(device: str, dtype: torch.dtype, is_certain: bool, seed: int) -> None:
    case = make_case(device, seed=seed, dtype=dtype)
    law = _law(case, likeness=0.9)  # drawn, too, where that is nobody's business
    law = None if is_certain else law
    assert 0 < sum(_check(case, law, _run(case, law))) < 16


@pytest.mark.parametrize("num_token_ids", [2, 17, 1025, 2500])
def test_any_vocabulary(device: str, dtype: torch.dtype, num_token_ids: int) -> None:
    case = make_case(device, num_token_ids=num_token_ids, dtype=dtype, heat=SAMPLED)
    law = _law(case, likeness=0.8)
    _check(case, law, _run(case, law))


@pytest.mark.parametrize("num_token_ids", [17, 1500])
def test_a_reduced_vocabulary_stays_reduced(device: str, dtype: torch.dtype, num_token_ids: int) -> None:
    """Ids that the drafter lacks have q = 0: what follows a refused draft may be any of them."""
    case = make_case(device, num_token_ids=num_token_ids, dtype=dtype, heat=SAMPLED)
    law = _law(case, likeness=0.9, token_ids=torch.arange(1, num_token_ids, 3))
    assert law.logits.shape[2] < num_token_ids // 2
    _check(case, law, _run(case, law))


def test_a_law_of_fewer_sequences_and_drafts_than_there_is_room_for(device: str, dtype: torch.dtype) -> None:
    """Those that decode stand first; a step may draft less than its buffers hold; rows may lie apart."""
    case = make_case(device, dtype=dtype, heat=SAMPLED, widths=(3, 2, 3, 0, 0, 0, 0))
    whole = _law(case, likeness=0.8)
    small = DraftLaw(
        whole.logits[:3, :3], whole.peak[:3, :3].contiguous(), whole.mass[:3, :3].contiguous(), whole.divisor[:3],
        whole.is_drawn[:3],
    )  # fmt: skip
    assert torch.equal(_run(case, small), _run(case, whole))
    _check(case, whole, _run(case, small))


def test_drafts_from_the_targets_own_law_all_stand(device: str) -> None:
    """Nothing is left of max(p - q, 0) then, and after a full pass nothing is taken away either."""
    case = make_case(device, heat=(1.0,) * 7)
    law = _law(case)
    assert _check(case, law, _run(case, law)) == [7, 0, 3, 5, 0, 1, 0]


def test_drafts_that_their_own_law_excludes_are_refused(device: str) -> None:
    case = make_case(device, heat=SAMPLED)
    law = _law(case)
    law.logits.scatter_(2, case.drafts[..., None], -torch.inf)
    assert _check(case, law, _run(case, law)) == [0] * 7


def test_filtered_logits_are_not_divided_again(device: str) -> None:
    case = make_case(device, heat=SAMPLED)
    slots = case.tensors["slots"][: case.count]
    case.top_k[slots] = torch.tensor([0, 5, 20, 3, 0, 1, 0], device=device)
    case.top_p[slots] = torch.tensor([1.0, 0.9, 1.0, 0.5, 0.6, 1.0, 1.0], device=device)
    law = _law(case, likeness=0.9)
    _check(case, law, _run(case, law, logits=case.filtered(), is_filtered=True))


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_law_in_buffers_of_any_step(device: str, dtype: torch.dtype, is_mapped: bool) -> None:
    """Made once, larger than the step; what lies behind it is of others, and of greedy sequences nothing is read."""
    case = make_case(device, dtype=dtype, widths=(7, 0, 3, 5, 2, 1, 0))
    token_ids = torch.arange(1, case.num_token_ids, 2) if is_mapped else None
    law = _law(case, likeness=0.9, token_ids=token_ids)
    sizes = (len(case.drafts) + 3, MAX_DRAFTS + 2, law.token_ids, case.num_token_ids, dtype, case.logits.device)
    kept = KeptLaw.make(*sizes)
    for values in (kept.logits, kept.peak, kept.mass):
        values.fill_(torch.nan)
    kept.hold(law)
    for values in (kept.logits, kept.peak, kept.mass):
        values[: len(law.is_drawn)][~law.is_drawn] = torch.nan
    assert sum(_check(case, law, _judged(case, kept))) > 0


@pytest.mark.gpu
def test_a_replayed_graph_equals_the_eager_call() -> None:
    """Recorded over a law of one step, replayed over that of another."""
    case = make_case("cuda", dtype=torch.bfloat16, heat=SAMPLED)
    sizes = (len(case.drafts), MAX_DRAFTS, None, case.num_token_ids, torch.bfloat16, case.logits.device)
    kept, result = KeptLaw.make(*sizes), torch.zeros(len(case.drafts), MAX_DRAFTS + 4, dtype=torch.int32, device="cuda")

    def judge() -> None:
        accept_rejection(case.logits, case.num_token_ids, **case.tensors, drafts=case.drafts, law=kept, result=result)  # type: ignore[arg-type]

    kept.hold(_law(case, likeness=0.2))
    judge()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        judge()
    law = _law(case, likeness=0.9)
    kept.hold(law)
    for _ in range(2):
        result.fill_(-7)
        graph.replay()
        assert sum(_check(case, law, result)) > 0


@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_ends_its_own_request_only(device: str, fault: float) -> None:
    case = make_case(device, heat=SAMPLED)
    law = _law(case)
    case.logits[case.rows(1).start, slice(None) if fault == -torch.inf else slice(3, 4)] = fault
    result = _run(case, law)
    assert result[:7, 2].tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert (result[:, 3:] >= 0).all() and (result[:, 3:] < case.num_token_ids).all()


def test_a_law_that_is_not_finite_accepts_nothing(device: str) -> None:
    """A draft without a law has no right to pass; what follows is the target's own."""
    case = make_case(device, heat=SAMPLED)
    law = _law(case)
    law.mass[0] = torch.nan
    assert _check(case, law, _run(case, law)) == [0, 0, 3, 5, 0, 1, 0]


def test_padding_behind_the_last_draft_is_not_read(device: str, dtype: torch.dtype) -> None:
    case = make_case(device, dtype=dtype, heat=SAMPLED)
    law = _law(case, likeness=0.9)
    clean = _run(case, law)
    for b in range(len(case.drafts)):
        width = int(case.tensors["widths"][b])
        law.logits[b, width:], law.peak[b, width:], law.mass[b, width:] = torch.nan, torch.nan, torch.nan
    assert torch.equal(_run(case, law), clean)
