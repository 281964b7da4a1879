"""Tokens that a sequence may not emit at a place are struck from its rows of logits: masks of bits become -inf.

Work goes by the sequences that have masks. No host reads: which row belongs to a place is known on the device alone.
Called between verify and accept; knows nothing of grammars.
"""

import torch
from torch import Tensor

_ELEMENTS_AT_ONCE = 1 << 25  # of places times vocabulary: what is made meanwhile stays below half a GiB


def strike(logits: Tensor, masks: Tensor, sequences: Tensor, cu_outputs: Tensor, widths: Tensor) -> Tensor:
    """logits [O, V] -> a new [O, V], -inf where a mask forbids. NaN and +inf become NaN there, and stay elsewhere.

    masks [M, P, W] int32: bit t % 32 of word t // 32 is set where token t may stand at place j of sequences[m] [M] int64;
    32 W >= V. The rows of sequence b are cu_outputs[b] .. + widths[b] [B + 1], [B], of places 0 .. widths[b], the last
    ones at most P - 1; each of `sequences` has rows.
    """
    struck = logits.clone()
    places = torch.arange(masks.shape[1], device=logits.device)
    place = torch.minimum(places, widths[sequences][:, None])  # those beyond the last repeat it
    row = (cu_outputs[sequences][:, None] + place).flatten()
    words = masks.gather(1, place[..., None].expand_as(masks)).flatten(0, 1)
    at_once = max(_ELEMENTS_AT_ONCE // logits.shape[1], 1)
    for first in range(0, len(row), at_once):
        part = slice(first, first + at_once)
        rows = logits.index_select(0, row[part])
        rows = torch.where(_bits(words[part], logits.shape[1]), rows, rows - torch.inf)
        struck.index_copy_(0, row[part], rows)
    return struck


def _bits(words: Tensor, count: int) -> Tensor:
    """[R, W] int32 -> [R, count] bool, lowest bit first."""
    bit = 2 ** torch.arange(8, dtype=torch.uint8, device=words.device)
    return (words.contiguous().view(torch.uint8)[..., None] & bit).flatten(1)[:, :count] > 0
