"""Coupled acceptance on the device against the torch ops, over ragged mixes with padding on every side."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from slipstream.kernels.accept import accept_coupled, apply, row_best
from slipstream.ops.noise import gumbel
from slipstream.ops.reject import count_accepted_coupled
from slipstream.ops.sample import coupled_targets, filter_logits, invalid_rows

# Interpreted kernels are numpy, which warns of the infinities that masked lanes compute with.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NUM_SLOTS, MAX_LEN, MAX_DRAFTS = 9, 64, 7
SAMPLING = ("slots", "num_given", "context", "temperature", "seed")


@dataclass
class Expected:
    num_accepted: list[int]
    emitted: list[list[int]]  # y_0 .. y_n; nothing where nothing is emitted
    invalid: list[bool]


@dataclass
class Case:
    """A step before acceptance: `count` sequences, and padding behind them."""

    count: int
    num_token_ids: int
    logits: Tensor  # [O, V + 5], NaN wherever nobody may look
    drafts: Tensor  # [B, S]
    token_ids: Tensor  # [N + 1, L + 1] int32
    tensors: dict[str, Tensor]  # the other arguments, by name
    top_k: Tensor  # [N + 1]
    top_p: Tensor  # [N + 1]

    def filtered(self) -> Tensor:
        """[O, V] after temperature and filters; padding rows as whatever comes out."""
        slots = self.tensors["slots"][self.tensors["output_sequence"].clamp(min=0)]
        known, top_k, top_p = self.logits[:, : self.num_token_ids].float(), self.top_k[slots], self.top_p[slots]
        flags = {"any_top_k": bool(top_k.any()), "any_top_p": bool((top_p < 1).any())}
        return filter_logits(known, self.tensors["temperature"][slots], top_k, top_p, **flags)

    def chosen(self) -> Tensor:
        """[O] the target's token of every row."""
        named = self.tensors
        owner = named["output_sequence"].clamp(min=0)
        slots = named["slots"][owner]
        positions = named["context"][slots] + named["num_given"][owner] + named["output_offset"]
        noise = gumbel(named["seed"][slots], positions, self.num_token_ids)
        return coupled_targets(self.filtered(), named["temperature"][slots], noise)

    def rows(self, sequence: int) -> slice:
        return slice(*self.tensors["cu_outputs"][sequence : sequence + 2].tolist())

    def expected(self) -> Expected:
        chosen, invalid = self.chosen(), invalid_rows(self.logits[:, : self.num_token_ids])
        found = Expected([], [], [])
        for b in range(self.count):
            rows, width = self.rows(b), self.tensors["widths"][b : b + 1]
            is_emitting = rows.stop > rows.start
            targets = chosen[rows][None] if is_emitting else self.drafts[b : b + 1, :0]
            n = int(count_accepted_coupled(self.drafts[b : b + 1, : int(width)], targets, width))
            found.num_accepted.append(n)
            found.emitted.append(targets[0, : n + 1].tolist())
            found.invalid.append(bool(invalid[rows][: n + 1].any()))
        return found

    def accept(self, **options: object) -> Tensor:
        result = torch.full((len(self.drafts), MAX_DRAFTS + 4), -7, dtype=torch.int32, device=self.logits.device)
        logits = options.pop("logits", self.logits)
        accept_coupled(logits, self.num_token_ids, **self.tensors, drafts=self.drafts, result=result, **options)  # type: ignore[arg-type]
        return result

    def check(self, result: Tensor) -> None:
        expected, count = self.expected(), self.count
        assert result[:, 0].tolist() == self.tensors["widths"].tolist()
        assert result[:count, 1].tolist() == expected.num_accepted
        assert result[:count, 2].tolist() == expected.invalid
        for row, emitted in zip(result.tolist(), expected.emitted, strict=False):
            assert row[3 : 3 + len(emitted)] == emitted
        assert (result[count:, :3] == 0).all(), "padding sequences"
        assert (result[:, 3:] >= 0).all() and (result[:, 3:] < self.num_token_ids).all()


def _case(
    device: str,
    *,
    seed: int = 0,
    num_token_ids: int = 300,
    dtype: torch.dtype = torch.float32,
    widths: tuple[int, ...] = (7, 0, 3, 5, 0, 1, 0),
    heat: tuple[float, ...] = (0.0, 1.0, 0.7, 0.0, 1.3, 1e-9, 0.0),
    emits: tuple[bool, ...] = (True, True, True, True, True, True, False),
    num_padding: int = 2,
    agreement: float = 0.8,
) -> Case:
    """Sequences of random contexts; a draft is what the target would emit with probability `agreement`."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    count = len(widths)
    slots = torch.randperm(NUM_SLOTS, generator=generator)[:count]
    temperature = torch.zeros(NUM_SLOTS + 1)
    temperature[slots] = torch.tensor(heat)
    outputs = torch.where(torch.tensor(emits), torch.tensor(widths) + 1, 0)
    num_outputs = int(outputs.sum())
    starts = outputs.cumsum(0) - outputs
    owner = torch.repeat_interleave(torch.arange(count), outputs)

    def padded(values: Tensor, fill: int) -> Tensor:
        return torch.cat([values, values.new_full((num_padding,), fill)])

    tensors = {
        "output_sequence": padded(owner, -1),
        "output_offset": padded(torch.arange(num_outputs) - starts[owner], 0),
        "cu_outputs": torch.cat([starts, torch.full((num_padding + 1,), num_outputs)]),
        "widths": padded(torch.tensor(widths), 0),
        "emits": padded(torch.tensor(emits), False),
        "slots": padded(slots, NUM_SLOTS),
        "num_given": padded(torch.where(torch.tensor(emits), integers(1, 4, count), 6), 0),
        "context": integers(0, 30, NUM_SLOTS + 1),
        "temperature": temperature,
        "seed": integers(-(2**62), 2**62, NUM_SLOTS + 1),
    }
    logits = torch.full((num_outputs + num_padding, num_token_ids + 5), torch.nan)
    logits[:num_outputs, :num_token_ids] = 3 * torch.randn(num_outputs, num_token_ids, generator=generator)
    case = Case(
        count, num_token_ids, logits.to(device, dtype),
        integers(0, num_token_ids, count + num_padding, MAX_DRAFTS).to(device),
        integers(0, num_token_ids, NUM_SLOTS + 1, MAX_LEN + 1).int().to(device),
        {name: tensor.to(device) for name, tensor in tensors.items()},
        torch.zeros(NUM_SLOTS + 1, dtype=torch.int64, device=device), torch.ones(NUM_SLOTS + 1, device=device),
    )  # fmt: skip
    chosen = case.chosen()
    for sequence, agrees in enumerate(torch.rand(count, MAX_DRAFTS, generator=generator).to(device) < agreement):
        targets = chosen[case.rows(sequence)][:MAX_DRAFTS]
        drafts = case.drafts[sequence, : len(targets)]
        drafts.copy_(torch.where(agrees[: len(targets)], targets, drafts))
    return case


@pytest.mark.parametrize("seed", range(4))
def test_a_ragged_mix_equals_the_reference(device: str, dtype: torch.dtype, seed: int) -> None:
    case = _case(device, seed=seed, dtype=dtype)
    case.check(case.accept())
    accepted, widths = case.expected().num_accepted, case.tensors["widths"].tolist()
    assert max(accepted) > 0 and any(n < width for n, width in zip(accepted, widths, strict=False))


@pytest.mark.parametrize("num_token_ids", [2, 17, 1024, 1025, 2500])
def test_any_vocabulary(device: str, dtype: torch.dtype, num_token_ids: int) -> None:
    case = _case(device, num_token_ids=num_token_ids, dtype=dtype)
    case.check(case.accept())


def test_coarse_tiles_give_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _case(device, num_token_ids=1300)
    coarse = case.accept()
    monkeypatch.setattr("slipstream.kernels.accept._block", lambda rows, token_ids: 512)
    assert torch.equal(coarse, case.accept())


@pytest.mark.parametrize("emits", [True, False])
def test_one_sequence_without_drafts(device: str, emits: bool) -> None:
    case = _case(device, widths=(0,), heat=(1.0,), emits=(emits,), num_padding=1)
    case.check(case.accept())


def test_no_drafter_at_all(device: str) -> None:
    case = _case(device, widths=(0, 0, 0), heat=(1.0, 0.0, 0.5), emits=(True,) * 3, num_padding=0)
    result = torch.full((3, 4), -7, dtype=torch.int32, device=device)
    accept_coupled(case.logits, case.num_token_ids, **case.tensors, drafts=case.drafts[:, :0], result=result)
    assert result[:, 3:].tolist() == case.expected().emitted
    assert (result[:, :3] == 0).all()


def test_greedy_takes_the_first_of_equals_within_and_across_tiles(device: str, dtype: torch.dtype) -> None:
    case = _case(device, num_token_ids=2500, heat=(0.0,) * 7, dtype=dtype)
    case.logits[:, [2400, 1500, 700, 650]] = 50.0
    assert (case.accept()[:6, 3] == 650).all()


def test_rows_at_a_temperature_near_0_are_exact(device: str) -> None:
    """Far below what logit / temperature could hold in fp32."""
    case = _case(device, heat=(2e-38,) * 7, num_token_ids=2500)
    case.check(case.accept())


@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_row_that_is_not_finite_ends_its_request_only_where_it_is_used(
    device: str, fault: float, heat: float
) -> None:
    case = _case(device, heat=(heat,) * 7, agreement=1.0)
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
    case = _case(device)
    known = case.logits[:, : case.num_token_ids]
    known[known < 1] = -torch.inf
    case.check(case.accept())


def test_filtered_logits_are_not_divided_again(device: str) -> None:
    case = _case(device)
    slots = case.tensors["slots"][: case.count]
    case.top_k[slots] = torch.tensor([0, 5, 20, 3, 0, 1, 0], device=device)
    case.top_p[slots] = torch.tensor([1.0, 0.9, 1.0, 0.5, 0.6, 1.0, 1.0], device=device)
    case.check(case.accept(logits=case.filtered(), is_filtered=True))


@pytest.mark.parametrize("in_one_launch", [True, False])
def test_apply_moves_the_slots_and_nothing_else(device: str, in_one_launch: bool) -> None:
    case = _case(device)
    named, expected = case.tensors, case.expected()
    context, token_ids = named["context"].clone(), case.token_ids.clone()
    for b, (n, emitted) in enumerate(zip(expected.num_accepted, expected.emitted, strict=True)):
        slot, given = int(named["slots"][b]), int(named["num_given"][b])
        start = int(context[slot]) + given
        token_ids[slot, start : start + len(emitted)] = torch.tensor(emitted, dtype=torch.int32)
        context[slot] = start + n
    result = case.accept(token_ids=case.token_ids if in_one_launch else None)
    if not in_one_launch:
        moving = {name: named[name] for name in ("slots", "num_given", "emits", "context")}
        apply(result, **moving, token_ids=case.token_ids)
    assert torch.equal(named["context"], context)
    assert torch.equal(case.token_ids, token_ids)


def test_a_rows_token_does_not_depend_on_how_many_rows_there_are(device: str) -> None:
    """What a verify row chooses is what plain decoding would have chosen at that position."""
    case = _case(device, agreement=1.0)
    together = case.accept()
    row = int(case.tensors["cu_outputs"][2]) + 1  # sequence 2 at offset 1
    alone = {name: case.tensors[name][row : row + 1] for name in ("output_sequence", "output_offset")}
    sampling = {name: case.tensors[name] for name in SAMPLING}
    _, scores, ids = row_best(case.logits[row : row + 1], case.num_token_ids, **alone, **sampling)
    assert int(ids[0, scores[0].argmax()]) == int(together[2, 4])
