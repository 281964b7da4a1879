"""Coupled acceptance on the device against the torch ops, over ragged mixes with padding on every side."""

from typing import Any

import pytest
import torch

from slipstream.kernels.accept import accept_coupled, apply, row_best
from tests.kernels.acceptance import Case, make_case

# Interpreted kernels are numpy, which warns of the infinities that masked lanes compute with.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SLOW = pytest.mark.slow  # interpreted
SAMPLING = ("slots", "num_given", "context", "temperature", "seed")


@pytest.mark.parametrize("seed", range(4))
def test_a_ragged_mix_equals_the_reference(device: str, dtype: torch.dtype, seed: int) -> None:
    case = make_case(device, seed=seed, dtype=dtype)
    case.check(case.accept())
    accepted, widths = case.expected().num_accepted, case.tensors["widths"].tolist()
    assert max(accepted) > 0 and any(n < width for n, width in zip(accepted, widths, strict=False))


@pytest.mark.parametrize("num_token_ids", [2, 17, 1024, 1025, 2500])
def test_any_vocabulary(device: str, dtype: torch.dtype, num_token_ids: int) -> None:
    case = make_case(device, num_token_ids=num_token_ids, dtype=dtype)
    case.check(case.accept())


def test_coarse_tiles_give_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(device, num_token_ids=1300)
    coarse = case.accept()
    monkeypatch.setattr("slipstream.kernels.accept.tile_size", lambda rows, token_ids: 512)
    assert torch.equal(coarse, case.accept())


@pytest.mark.parametrize("emits", [True, False])
def test_one_sequence_without_drafts(device: str, emits: bool) -> None:
    case = make_case(device, widths=(0,), heat=(1.0,), emits=(emits,), num_padding=1)
    case.check(case.accept())


def test_no_drafter_at_all(device: str) -> None:
    case = make_case(device, widths=(0, 0, 0), heat=(1.0, 0.0, 0.5), emits=(True,) * 3, num_padding=0)
    result = torch.full((3, 4), -7, dtype=torch.int32, device=device)
    accept_coupled(case.logits, case.num_token_ids, **case.tensors, drafts=case.drafts[:, :0], result=result)
    assert result[:, 3:].tolist() == case.expected().emitted
    assert (result[:, :3] == 0).all()


def test_greedy_takes_the_first_of_equals_within_and_across_tiles(device: str, dtype: torch.dtype) -> None:
    case = make_case(device, num_token_ids=2500, heat=(0.0,) * 7, dtype=dtype)
    case.logits[:, [2400, 1500, 700, 650]] = 50.0
    assert (case.accept()[:6, 3] == 650).all()


def test_rows_at_a_temperature_near_0_are_exact(device: str) -> None:
    """Far below what logit / temperature could hold in fp32."""
    case = make_case(device, heat=(2e-38,) * 7, num_token_ids=2500)
    case.check(case.accept())


@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_row_that_is_not_finite_ends_its_request_only_where_it_is_used(
    device: str, fault: float, heat: float
) -> None:
    case = make_case(device, heat=(heat,) * 7, agreement=1.0)
    # Sequence 2 meets the fault in its last used row, 0 in a row behind its rejected draft.
    case.drafts[0, 1] = (case.drafts[0, 1] + 1) % case.num_token_ids
    first = case.tensors["cu_outputs"].tolist()
    entries = slice(None) if fault == -torch.inf else slice(3, 4)
    case.logits[first[2] + 3, entries] = fault
    case.logits[first[0] + 2, entries] = fault
    result = case.accept()
    assert result[:7, 2].tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert result[:7, 1].tolist() == [1, 0, 3, 5, 0, 1, 0]
    assert (result[:, 3:] >= 0).all() and (result[:, 3:] < case.num_token_ids).all()


def test_minus_infinity_is_a_logit_like_others(device: str) -> None:
    case = make_case(device)
    known = case.logits[:, : case.num_token_ids]
    known[known < 1] = -torch.inf
    case.check(case.accept())


def filtering(device: str, **options: Any) -> Case:
    """A case in which most sequences filter, the greedy ones in vain; hot, so that it makes a difference."""
    case = make_case(device, **{"heat": (0.0, 3.0, 2.7, 0.0, 3.3, 1e-9, 0.0), **options})
    slots = case.tensors["slots"][: case.count]
    case.top_k[slots] = torch.tensor([0, 5, 20, 3, 0, 1, 0], device=device)
    case.top_p[slots] = torch.tensor([1.0, 0.9, 1.0, 0.5, 0.6, 1.0, 1.0], device=device)
    case.min_p[slots] = torch.tensor([0.1, 0.0, 0.05, 0.0, 0.0, 0.0, 1.0], device=device)
    return case


def test_filters(device: str, dtype: torch.dtype) -> None:
    case = filtering(device, dtype=dtype)
    plain, ours = case.accept(), case.accept(cut=case.cut())
    case.check(ours)
    assert not torch.equal(ours, plain), "the control"


@SLOW
def test_filters_over_several_tiles_of_acceptance(device: str, dtype: torch.dtype) -> None:
    """Tiles in which nothing is left, the last one among them."""
    case = filtering(device, dtype=dtype, num_token_ids=2500)
    case.logits[:, 300:2400:3] -= 9.0
    case.check(case.accept(cut=case.cut()))


def test_rows_that_are_not_finite_are_flagged_though_others_are_cut(device: str) -> None:
    case = filtering(device, heat=(1.0,) * 7, num_token_ids=60)
    first = case.tensors["cu_outputs"].tolist()
    case.logits[first[2], 3], case.logits[first[3], 3], case.logits[first[4]] = torch.nan, torch.inf, -torch.inf
    result = case.accept(cut=case.cut())
    assert result[:7, 2].tolist() == [0, 0, 1, 1, 1, 0, 0]
    assert (result[:, 3:] >= 0).all() and (result[:, 3:] < case.num_token_ids).all()


def test_apply_moves_the_slots_and_nothing_else(device: str) -> None:
    case = make_case(device)
    named, expected = case.tensors, case.expected()
    context, token_ids = named["context"].clone(), case.token_ids.clone()
    for b, (n, emitted) in enumerate(zip(expected.num_accepted, expected.emitted, strict=True)):
        slot, given = int(named["slots"][b]), int(named["num_given"][b])
        start = int(context[slot]) + given
        token_ids[slot, start : start + len(emitted)] = torch.tensor(emitted, dtype=torch.int32)
        context[slot] = start + n
    moving = {name: named[name] for name in ("slots", "num_given", "emits", "context")}
    apply(case.accept(), **moving, token_ids=case.token_ids)
    assert torch.equal(named["context"], context)
    assert torch.equal(case.token_ids, token_ids)


def test_a_rows_token_does_not_depend_on_how_many_rows_there_are(device: str) -> None:
    """What a verify row chooses is what plain decoding would have chosen at that position."""
    case = make_case(device, agreement=1.0)
    together = case.accept()
    row = int(case.tensors["cu_outputs"][2]) + 1  # sequence 2 at offset 1
    alone = {name: case.tensors[name][row : row + 1] for name in ("output_sequence", "output_offset")}
    sampling = {name: case.tensors[name] for name in SAMPLING}
    _, scores, ids = row_best(case.logits[row : row + 1], case.num_token_ids, **alone, **sampling)
    assert int(ids[0, scores[0].argmax()]) == int(together[2, 4])


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [False, True])
def test_a_replayed_graph_equals_the_eager_call(filters: bool) -> None:
    case = filtering("cuda", dtype=torch.bfloat16)
    eager = case.accept(cut=case.cut() if filters else None)
    result = torch.zeros_like(eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cut = case.cut() if filters else None
        accept_coupled(case.logits, case.num_token_ids, **case.tensors, drafts=case.drafts, result=result, cut=cut)
    for _ in range(2):
        graph.replay()
        assert torch.equal(result, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_filters_over_a_whole_vocabulary(dtype: torch.dtype, seed: int) -> None:
    case = filtering("cuda", dtype=dtype, num_token_ids=151_936, seed=seed)
    case.check(case.accept(cut=case.cut()))
