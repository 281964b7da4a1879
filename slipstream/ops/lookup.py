"""Prompt lookup: draft what followed the last time the sequence read as it does now.

The end of each sequence (its newest tokens, the anchor last) is matched against all of its earlier tokens; the longest
match wins, of equals the latest. The drafts are what followed the match and go on past the anchor with the same period,
so that a loop is drafted to any length. Called by `draft/ngram.py`; knows nothing of acceptance or confidence, reads
nothing on the host, and never looks beyond the anchor, where a slot's former tokens may stand.

Shapes: N slots, L positions, D sequences, d drafts, C = columns that may hold known tokens.
"""

import torch
from torch import Tensor


def lookup(
    history: Tensor, slots: Tensor, context: Tensor, max_context: int, num_drafts: int, max_match: int
) -> tuple[Tensor, Tensor]:
    """Drafts [D, d] int64 and the length of the match [D] int64 that they come from, 0 to max_match.

    history [N, L + 1] int32, of which column context[i] of row slots[i] is the anchor of sequence i; context [D] int64,
    at most max_context. A sequence whose anchor is new to it has match length 0 and drafts the anchor over and over.
    """
    known = history[:, : max_context + 1].index_select(0, slots)  # [D, C]
    length, end = _longest_match(known, context, max_match)
    period = torch.where(length > 0, context - end, 1)
    steps = torch.arange(num_drafts, device=known.device)
    source = (context + 1 - period)[:, None] + steps % period[:, None]
    return known.gather(1, source).long(), length


def _longest_match(known: Tensor, context: Tensor, max_match: int) -> tuple[Tensor, Tensor]:
    """known [D, C], context [D] -> length of the best match [D], column of its last token [D]; both int64.

    Per column the count of equal tokens is kept as a byte, one pass for each token of the suffix.
    """
    size, num_columns = known.shape
    columns = torch.arange(num_columns, device=known.device)
    num_passes = min(max_match, num_columns)
    # Columns before the start are asked for only where no match of that length fits; what is read there is not used.
    suffix = known.gather(1, (context[:, None] - columns[:num_passes]).clamp(min=0))  # newest first
    length = torch.zeros(size, num_columns, dtype=torch.uint8, device=known.device)
    matches = columns < context[:, None]  # of columns back, back + 1, ...: a match of `back` tokens ends here
    for back in range(num_passes):
        matches = matches[:, min(back, 1) :] & (known[:, : num_columns - back] == suffix[:, back, None])
        length[:, back:] += matches
    # Longest first, then latest, as one number: 31 bits are enough for lengths up to 16 and 100 million columns.
    best = (length.int() * num_columns + columns.int()).amax(1).long()
    return best // num_columns, best % num_columns
