"""Made-up steps before acceptance, ragged and padded on every side, and what coupled acceptance must say of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.accept import accept_coupled
from slipstream.kernels.filters import Cut, cut_rows
from slipstream.ops.noise import gumbel
from slipstream.ops.reject import count_accepted_coupled
from slipstream.ops.sample import coupled_targets, filter_logits, invalid_rows

NUM_SLOTS, MAX_LEN, MAX_DRAFTS = 9, 64, 7


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
    min_p: Tensor  # [N + 1]

    def filtered(self) -> Tensor:
        """[O, V] after temperature and filters; padding rows as whatever comes out."""
        slots = self.tensors["slots"][self.tensors["output_sequence"].clamp(min=0)]
        known, top_k, top_p = self.logits[:, : self.num_token_ids].float(), self.top_k[slots], self.top_p[slots]
        flags = {"any_top_k": bool(top_k.any()), "any_top_p": bool((top_p < 1).any())}
        return filter_logits(known, self.tensors["temperature"][slots], top_k, top_p, min_p=self.min_p[slots], **flags)

    def cut(self) -> Cut:
        """The same for kernels."""
        named = {name: self.tensors[name] for name in ("output_sequence", "slots", "temperature")}
        asked = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return cut_rows(self.logits, self.num_token_ids, **named, **asked)

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


def make_case(
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
        torch.zeros(NUM_SLOTS + 1, device=device),
    )  # fmt: skip
    chosen = case.chosen()
    for sequence, agrees in enumerate(torch.rand(count, MAX_DRAFTS, generator=generator).to(device) < agreement):
        targets = chosen[case.rows(sequence)][:MAX_DRAFTS]
        drafts = case.drafts[sequence, : len(targets)]
        drafts.copy_(torch.where(agrees[: len(targets)], targets, drafts))
    return case
