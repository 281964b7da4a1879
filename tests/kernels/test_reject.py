"""Rejection on the device against the torch ops and their random numbers; the laws themselves are proved elsewhere."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels.reject import accept_rejection
from slipstream.ops.noise import CounterSource
from slipstream.ops.reject import reject
from slipstream.ops.sample import invalid_rows, probabilities
from tests.kernels.acceptance import MAX_DRAFTS, Case, make_case

# Interpreted kernels are numpy, which warns of the infinities that masked lanes compute with.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SAMPLED = (1.0, 0.7, 1.3, 0.9, 1.0, 0.8, 1.1)


def _draft_prob(case: Case, is_certain: bool, likeness: float = 1.0) -> Tensor:
    """[B, S, V] what drafts are drawn from: like the target's rows where there are any; one-hot if certain."""
    num_sequences, num_drafts = case.drafts.shape
    generator = torch.Generator().manual_seed(9)
    logits = 3 * torch.randn(num_sequences, num_drafts, case.num_token_ids, generator=generator)
    for b in range(case.count):
        rows = case.logits[case.rows(b), : case.num_token_ids][:num_drafts].float().cpu()
        logits[b, : len(rows)] = likeness * rows + (1 - likeness) * logits[b, : len(rows)]
    prob = logits.softmax(-1)
    drawn = torch.multinomial(prob.flatten(0, 1), 1, generator=generator).view(num_sequences, num_drafts)
    case.drafts.copy_(drawn)
    certain = torch.zeros_like(prob).scatter_(2, drawn[..., None], 1)
    return (certain if is_certain else prob).to(case.drafts.device)


def _expected(case: Case, prob: Tensor) -> tuple[list[int], list[list[int]], list[bool]]:
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
            case.drafts[b : b + 1, :width], prob[b : b + 1, :width], target[None], named["widths"][b : b + 1],
            named["seed"][slot][None], anchor[None], CounterSource(),
        )  # fmt: skip
        counts.append(int(n))
        tokens.append([*case.drafts[b, : int(n)].tolist(), int(following)])
        invalid.append(bool(invalid_rows(case.logits[rows, : case.num_token_ids])[: int(n) + 1].any()))
    return counts, tokens, invalid


def _run(case: Case, prob: Tensor | None, **options: object) -> Tensor:
    result = torch.full((len(case.drafts), MAX_DRAFTS + 4), -7, dtype=torch.int32, device=case.logits.device)
    logits = options.pop("logits", case.logits)
    accept_rejection(
        logits, case.num_token_ids, **case.tensors, drafts=case.drafts, draft_prob=prob, result=result, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return result


def _check(case: Case, prob: Tensor, result: Tensor) -> list[int]:
    counts, tokens, invalid = _expected(case, prob)
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
    prob = _draft_prob(case, is_certain, likeness=0.9)
    _check(case, prob, _run(case, None if is_certain else prob))


@pytest.mark.parametrize("num_token_ids", [2, 17, 1025, 2500])
def test_any_vocabulary(device: str, dtype: torch.dtype, num_token_ids: int) -> None:
    case = make_case(device, num_token_ids=num_token_ids, dtype=dtype, heat=SAMPLED)
    prob = _draft_prob(case, is_certain=False, likeness=0.8)
    _check(case, prob, _run(case, prob))


def test_drafts_from_the_targets_own_law_all_stand(device: str) -> None:
    """Nothing is left of max(p - q, 0) then, and after a full pass nothing is taken away either."""
    case = make_case(device, heat=(1.0,) * 7)
    prob = _draft_prob(case, is_certain=False)
    assert _check(case, prob, _run(case, prob)) == [7, 0, 3, 5, 0, 1, 0]


def test_drafts_that_their_own_law_excludes_are_refused(device: str) -> None:
    case = make_case(device, heat=SAMPLED)
    prob = _draft_prob(case, is_certain=False)
    prob.scatter_(2, case.drafts[..., None], 0)
    assert _check(case, prob, _run(case, prob)) == [0] * 7


def test_filtered_logits_are_not_divided_again(device: str) -> None:
    case = make_case(device, heat=SAMPLED)
    slots = case.tensors["slots"][: case.count]
    case.top_k[slots] = torch.tensor([0, 5, 20, 3, 0, 1, 0], device=device)
    case.top_p[slots] = torch.tensor([1.0, 0.9, 1.0, 0.5, 0.6, 1.0, 1.0], device=device)
    prob = _draft_prob(case, is_certain=False, likeness=0.9)
    _check(case, prob, _run(case, prob, logits=case.filtered(), is_filtered=True))


@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_ends_its_own_request_only(device: str, fault: float) -> None:
    case = make_case(device, heat=SAMPLED)
    prob = _draft_prob(case, is_certain=False)
    case.logits[case.rows(1).start, slice(None) if fault == -torch.inf else slice(3, 4)] = fault
    result = _run(case, prob)
    assert result[:7, 2].tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert (result[:, 3:] >= 0).all() and (result[:, 3:] < case.num_token_ids).all()
