"""Hand a budget of drafts out by survival, on the device.

The host chose how many drafts the step verifies; which ones is decided here, from survivals that the host has not
seen. Called by lag-budget's `rank` stage; reads nothing on the host, and never looks at what was drafted.
"""

import torch
from torch import Tensor


def rank(survival: Tensor, caps: Tensor, total: int) -> Tensor:
    """Widths [B] int64 of the `total` drafts with the largest survival; they sum to min(total, sum of caps).

    survival [B, S], not increasing along a row (then a sequence's drafts are taken in order); caps [B], at most
    that many of a row. Ties go to the earlier position, then the earlier row, never by anything that depends on a
    draft's value. NaN counts as 0.
    """
    size, num_drafts = survival.shape
    allowed = torch.arange(num_drafts, device=survival.device) < caps[:, None]
    value = torch.where(allowed, survival.nan_to_num(0.0), -torch.inf)
    order = value.t().reshape(-1).sort(descending=True, stable=True).indices[: max(total, 0)]  # position-major
    taken = torch.zeros(num_drafts * size, dtype=torch.bool, device=survival.device).index_fill_(0, order, True)
    return (taken.view(num_drafts, size).t() & allowed).sum(1)
