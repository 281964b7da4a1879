"""Penalties and edits in kernels against the torch op, over ragged steps, tiles, long histories and rows of nobody."""

import dataclasses
import math
import random

import pytest
import torch
from torch import Tensor

from slipstream.kernels import shape_logits as kernels
from slipstream.kernels.accept import accept_coupled, row_best
from slipstream.kernels.shape_logits import Shaper, count_tokens, shape_logits
from slipstream.ops import shape_logits as ops
from slipstream.ops.shape_logits import Histories, Shaping
from slipstream.plan import FOREVER, MAX_EDITS
from tests.kernels.acceptance import MAX_DRAFTS, NUM_SLOTS, Case, make_case

# Interpreted kernels are numpy, which warns of the infinities that masked lanes compute with.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
STEP = ("output_sequence", "output_offset", "slots", "num_given", "emits", "context")
NEUTRAL = 3  # the sequence that asks for nothing


def wishes(case: Case, seed: int = 0, only: str = "all") -> Shaping:
    """Whatever the owners of slots may ask for; one of them for nothing."""
    pick, asked = random.Random(seed), Shaping.neutral(NUM_SLOTS + 1, MAX_EDITS, torch.device("cpu"))
    for sequence, slot in enumerate(case.tensors["slots"][: case.count].tolist()):
        known = int(case.tensors["context"][slot] + case.tensors["num_given"][sequence])
        asked.num_prompt[slot] = pick.randint(1, max(known, 1))
        if sequence == NEUTRAL:
            continue
        if only != "edits":
            asked.repetition[slot] = pick.choice([1.0, 0.7, 1.3, 5.0])
            asked.frequency[slot] = pick.choice([0.0, pick.uniform(-2, 2)])
            asked.presence[slot] = pick.choice([0.0, pick.uniform(-2, 2)])
        if only != "penalties":
            edits = pick.sample(range(case.num_token_ids), min(pick.choice([0, 1, 5, 40]), case.num_token_ids))
            asked.num_edits[slot] = len(edits)
            for place, token in enumerate(edits):
                asked.edit_ids[slot, place] = token
                asked.edit_values[slot, place] = pick.choice([-math.inf, pick.uniform(-9, 9)])
                asked.edit_until[slot, place] = pick.choice([FOREVER, pick.randint(0, 9)])
    moved = (getattr(asked, field.name).to(case.logits.device) for field in dataclasses.fields(asked))
    return Shaping(*moved)


def shaper_of(case: Case, asked: Shaping) -> Shaper:
    """Counts hold anything: a step writes what it reads."""
    shaper = Shaper.make(asked, case.token_ids, case.num_token_ids)
    counts = torch.full((len(case.drafts), case.num_token_ids), -5, dtype=torch.int32, device=case.logits.device)
    return dataclasses.replace(shaper, counts=counts)


def expected(case: Case, asked: Shaping, rows: Tensor) -> Tensor:
    named = case.tensors
    sequence = named["output_sequence"][rows]
    slots = named["slots"][sequence]
    histories = Histories(
        case.token_ids, case.token_ids.shape[1], slots, named["context"][slots] + named["num_given"][sequence],
        case.drafts, sequence, named["output_offset"][rows],
    )  # fmt: skip
    return ops.shape_logits(case.logits[rows, : case.num_token_ids], asked, histories)


def check(case: Case, asked: Shaping) -> None:
    raw = case.logits.clone()
    step = {name: case.tensors[name] for name in STEP}
    found = shape_logits(case.logits, case.num_token_ids, shaper_of(case, asked), **step, drafts=case.drafts)
    assert torch.equal(case.logits.nan_to_num(7.0), raw.nan_to_num(7.0)), "the target's logits are not written to"
    rows = (case.tensors["output_sequence"] >= 0).nonzero().flatten()
    wanted = expected(case, asked, rows)
    torch.testing.assert_close(found[rows], wanted, rtol=1e-6, atol=2e-6)
    assert not torch.equal(wanted, case.logits[rows, : case.num_token_ids].float()), "nothing was asked for"
    free = rows[case.tensors["output_sequence"][rows] == NEUTRAL]
    assert len(free) and torch.equal(found[free], case.logits[free, : case.num_token_ids].float())


@pytest.mark.parametrize("only", ["all", "penalties", "edits"])
@pytest.mark.parametrize("seed", range(3))
def test_a_ragged_mix_equals_the_reference(device: str, dtype: torch.dtype, seed: int, only: str) -> None:
    """Few ids, so that histories repeat themselves and drafts repeat them."""
    case = make_case(device, seed=seed, num_token_ids=23, dtype=dtype)
    check(case, wishes(case, seed, only))


@pytest.mark.parametrize("num_token_ids", [2, 17, 300, pytest.param(1025, marks=pytest.mark.slow)])
def test_any_vocabulary(device: str, num_token_ids: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 64)
    monkeypatch.setattr(kernels, "_CLEARED_AT_ONCE", 64)
    case = make_case(device, num_token_ids=num_token_ids)
    check(case, wishes(case))


def test_histories_of_many_turns(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program goes over several parts of a history, the last of which is not full."""
    monkeypatch.setattr(kernels, "_CHUNKS", 2)
    monkeypatch.setattr(kernels, "_TOKENS_AT_ONCE", 4)
    case = make_case(device, num_token_ids=11)
    case.tensors["context"] += 27
    check(case, wishes(case))


def test_counts_are_those_of_prompt_and_output(device: str) -> None:
    case = make_case(device, num_token_ids=5)
    asked = wishes(case, only="penalties")
    slot, sequence = int(case.tensors["slots"][0]), 0
    asked.repetition[slot], asked.num_prompt[slot] = 2.0, 2
    case.tensors["context"][slot], case.tensors["num_given"][sequence] = 5, 1
    case.token_ids[slot, :7] = torch.tensor([4, 0, 1, 4, 1, 1, 3])  # the last one is not known
    shaper = shaper_of(case, asked)
    count_tokens(shaper, **{name: case.tensors[name] for name in ("slots", "num_given", "emits", "context")})
    prompt = int(kernels.IN_PROMPT.value)
    assert shaper.counts[0].tolist() == [prompt, 3, 0, 0, prompt + 1]
    assert (shaper.counts[NEUTRAL] == -5).all(), "who asks for nothing is not counted"
    assert (shaper.counts[6] == -5).all(), "who emits nothing is not counted"


@pytest.mark.parametrize("block", [None, 64])
@pytest.mark.parametrize("seed", range(2))
def test_acceptance_shapes_what_it_reads(device: str, dtype: torch.dtype, seed: int, block: int | None) -> None:
    """The verdict is that of logits which were shaped before; rows of others have their own."""
    case = make_case(device, seed=seed, num_token_ids=40, dtype=dtype)
    asked = wishes(case, seed)
    result = torch.full((len(case.drafts), MAX_DRAFTS + 4), -7, dtype=torch.int32, device=device)
    accept_coupled(
        case.logits, case.num_token_ids, **case.tensors, drafts=case.drafts, result=result, block=block,
        shaper=shaper_of(case, asked),
    )  # fmt: skip
    rows = (case.tensors["output_sequence"] >= 0).nonzero().flatten()
    unshaped = case.accept(block=block)
    case.logits = case.logits.float()
    case.logits[rows, : case.num_token_ids] = expected(case, asked, rows)
    case.check(result)
    assert not torch.equal(result, unshaped)


@pytest.mark.parametrize("num_token_ids", [40, 3000])
def test_a_row_has_the_same_bits_shaped_while_it_is_read_or_before(
    device: str, dtype: torch.dtype, num_token_ids: int
) -> None:
    """Whoever filters in a step decides which it is; and who asks for nothing has the bits of a step of nobody's wishes."""
    case = make_case(device, num_token_ids=num_token_ids, dtype=dtype)
    asked, named = wishes(case), case.tensors
    step = {name: named[name] for name in STEP}
    sampling = {name: named[name] for name in (*step, "temperature", "seed") if name != "emits"}
    shaper = shaper_of(case, asked)
    before = shape_logits(case.logits, num_token_ids, shaper, **step, drafts=case.drafts)
    rows = named["output_sequence"] >= 0
    apart = row_best(before, num_token_ids, **sampling, block=2048)
    inside = row_best(case.logits, num_token_ids, **sampling, block=2048, shaping=(shaper, case.drafts))
    plain = row_best(case.logits, num_token_ids, **sampling, block=2048)
    free = named["output_sequence"] == NEUTRAL
    for a, b, c in zip(apart, inside, plain, strict=True):
        assert torch.equal(a[rows], b[rows])
        assert torch.equal(b[free], c[free])
    assert not torch.equal(inside[0][rows], plain[0][rows])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", range(6))
def test_fault_14_a_row_that_is_not_finite_stays_so(device: str, value: float, place: int) -> None:
    """In a token that is penalised, banned, biased or nothing: its request ends, and nobody else notices."""
    case = make_case(device, num_token_ids=6, agreement=0.0, num_padding=0)
    asked = wishes(case, 1)
    slot = int(case.tensors["slots"][0])
    asked.repetition[slot], asked.frequency[slot], asked.num_edits[slot] = 2.0, 1.0, 2
    asked.edit_ids[slot, :2], asked.edit_until[slot, :2] = torch.tensor([1, 4]), FOREVER
    asked.edit_values[slot, :2] = torch.tensor([-math.inf, -100.0])
    case.logits[0, place] = value
    result = torch.zeros(len(case.drafts), MAX_DRAFTS + 4, dtype=torch.int32, device=device)
    accept_coupled(
        case.logits, 6, **case.tensors, drafts=case.drafts, result=result, shaper=shaper_of(case, asked)
    )  # fmt: skip
    assert result[:, 2].tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert (result[:, 3:] >= 0).all() and (result[:, 3:] < 6).all()


def test_an_edit_beyond_the_vocabulary_reaches_nobody(device: str) -> None:
    case = make_case(device, num_token_ids=20)
    asked = wishes(case, only="penalties")
    slots = case.tensors["slots"][: case.count]
    asked.num_edits[slots], asked.edit_ids[slots, 0] = 1, 21
    asked.edit_values[slots, 0], asked.edit_until[slots, 0] = 50.0, FOREVER
    result = torch.zeros(len(case.drafts), MAX_DRAFTS + 4, dtype=torch.int32, device=device)
    accept_coupled(
        case.logits, 20, **case.tensors, drafts=case.drafts, result=result, shaper=shaper_of(case, asked)
    )  # fmt: skip
    asked.num_edits.zero_()
    rows = (case.tensors["output_sequence"] >= 0).nonzero().flatten()
    case.logits[rows, :20] = expected(case, asked, rows)
    case.check(result)
