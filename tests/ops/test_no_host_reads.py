"""No sampling op reads a device value on the host: seen from below, where every such read passes."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.ops.allowed import strike
from slipstream.ops.logprobs import report
from slipstream.ops.noise import CounterSource, gumbel
from slipstream.ops.rank import rank
from slipstream.ops.reject import DraftLaw, count_accepted_coupled, draft_sample, reject
from slipstream.ops.sample import coupled_targets, filter_logits, invalid_rows, probabilities
from slipstream.ops.shape_logits import Histories, Shaping, shape_logits


class NoHostReads(TorchDispatchMode):
    """Raises where a result would have to leave the device, or has a shape that depends on values."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "item", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not any(name == wait or name.startswith(f"{wait}_") for wait in self.WAITS), (
            f"{name} waits for the device"
        )
        return func(*args, **(kwargs or {}))


def test_a_step_of_every_op_reads_nothing() -> None:
    size, num_drafts, vocab = 3, 2, 17
    logits = torch.randn(size * (num_drafts + 1), vocab)
    rows = torch.full((len(logits),), 0.8)
    seeds, heat = torch.arange(size), torch.tensor([0.0, 1.0, 0.7])
    source, widths = CounterSource(), torch.tensor([2, 0, 1])
    owner, asked = seeds.repeat_interleave(3), Shaping.neutral(4, 5, torch.device("cpu"))
    with NoHostReads():
        known = Histories(
            torch.ones(4, 8, dtype=torch.int32), 6, owner, widths[owner] + 2, seeds[:, None], owner, owner
        )
        shaped = shape_logits(logits, asked, known)
        masks = torch.full((2, 3, 1), 5, dtype=torch.int32)
        strike(logits, masks, seeds[1:], torch.arange(4) * 3, widths)
        filtered = filter_logits(shaped, rows, torch.full((9,), 5), torch.full((9,), 0.9), min_p=torch.full((9,), 0.1))
        noise = gumbel(seeds.repeat(3), torch.arange(9), vocab)
        gumbel(seeds, seeds, vocab, torch.tensor([3, 1]))
        targets = coupled_targets(filtered, rows, noise).view(size, -1)
        invalid_rows(logits)
        report(logits, owner, targets.flatten(), 5)
        pairs = [draft_sample(logits[:size], heat, seeds, seeds, j, source) for j in range(num_drafts)]
        drafts = torch.stack([drawn for drawn, _ in pairs], dim=1)
        law = DraftLaw.join([law for _, law in pairs])
        count_accepted_coupled(drafts, targets, widths)
        reject(drafts, law, probabilities(filtered, rows).view(size, -1, vocab), widths, seeds, seeds, source)
        rank(torch.rand(size, num_drafts).cumprod(1), widths, 3)
