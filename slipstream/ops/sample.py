"""From logits to tokens: temperature, top-k, top-p, min-p, and the Gumbel-max rule of coupled acceptance.

All functions are row-wise, so a row's result does not depend on its neighbours, and read nothing on the host.
Order within a row is always logit descending, token id ascending. Temperature 0 is greedy: the row passes through
every function untouched and its token is the argmax, first index on ties. A row that holds NaN or +inf, or nothing
but -inf, gives some id in [0, V) and raises its own flag in `invalid_rows`; the other rows do not notice.
A padded vocabulary is cut off by the caller: pass `logits[:, :vocab_size]`, a view.
Called by verify (target rows) and draft (draft rows); knows nothing of slots, positions or acceptance.
"""

import torch
from torch import Tensor

_RADIX_BITS = 11


def invalid_rows(logits: Tensor) -> Tensor:
    """[R, V] -> [R] bool: the row holds NaN or +inf, or nothing but -inf, and no token may be taken from it."""
    return ~logits.amax(-1).isfinite()


def filter_logits(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    *,
    min_p: Tensor | None = None,
    any_top_k: bool = True,
    any_top_p: bool = True,
) -> Tensor:
    """Logits of the distribution to sample from: divided by the temperature, -inf outside top-k, top-p and min-p.

    logits [R, V]; temperature, top_p [R] float; top_k [R] int. top_k 0 and top_p 1 mean off. top_p keeps the
    smallest prefix, of what top_k left, whose share is at least top_p. min_p [R] float, 0 = off, None where nobody
    asks: tokens stay whose probability is at least that share of the largest one. The two flags say on the host
    whether any row asks; where none does, nothing is selected. Returns a new [R, V], at least fp32; sampled rows are shifted
    so that their largest entry is 0, which no sampling rule can see and no small temperature can overflow.
    """
    logits = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    sampled = (temperature > 0)[:, None]
    shift = torch.where(sampled, logits.amax(-1, keepdim=True), 0)
    scaled = (logits - shift).div_(torch.where(sampled, temperature[:, None], 1).to(logits.dtype))
    key, bits = _order_key(scaled) if any_top_k or any_top_p else (None, 0)
    if any_top_k and key is not None:
        kept = _smallest_prefix(key, bits, torch.ones_like(scaled, dtype=torch.float64), top_k.double())
        scaled.masked_fill_(~kept & sampled & (top_k > 0)[:, None], -torch.inf)
    if any_top_p and key is not None:
        share = scaled.softmax(-1).double()
        kept = _smallest_prefix(key, bits, share, (top_p.double() * share.sum(-1)).clamp_(min=1e-300))
        scaled.masked_fill_(~kept & sampled & (top_p < 1)[:, None], -torch.inf)
    if min_p is not None:
        scaled.masked_fill_((scaled < min_p.to(scaled.dtype).log()[:, None]) & sampled, -torch.inf)
    return scaled


def coupled_targets(logits: Tensor, temperature: Tensor, noise: Tensor | None) -> Tensor:
    """The plain decoder's token of every row: argmax of logits + noise where temperature > 0, else of logits.

    logits [R, V] from `filter_logits`; temperature [R]; noise [R, V] from `ops.noise.gumbel`, or None when every
    row is greedy. Returns [R] int64 in [0, V). Drafts under coupled acceptance come from the same call, on the
    drafter's logits and the same noise (its columns, under a reduced draft vocabulary).
    """
    if noise is None:
        return logits.argmax(-1)
    return torch.addcmul(logits, noise.to(logits.dtype), (temperature > 0)[:, None].to(logits.dtype)).argmax(-1)


def probabilities(logits: Tensor, temperature: Tensor) -> Tensor:
    """The distribution that a row is sampled from, for rejection: softmax, or one-hot where temperature is 0.

    logits [R, V] from `filter_logits`; temperature [R]. Returns [R, V].
    """
    greedy = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1)
    return torch.where((temperature > 0)[:, None], logits.softmax(-1), greedy)


def _smallest_prefix(key: Tensor, bits: int, weight: Tensor, need: Tensor) -> Tensor:
    """Mask [R, V] of the shortest prefix in order (key, id) whose weights sum to at least `need` [R]; all if none do.

    Finds the last key of the prefix by radix selection, at a fifth of the cost of sorting the row: a histogram of
    weights over 11 bits of the key, then over the next 11 within the bucket that crosses `need`. Sums are float64,
    in which fp32 weights above 2^-29 add up exactly, in any order.
    key [R, V] non-negative integers of `bits` bits; weight [R, V] float64, among equal keys one value or 0. Keys of
    NaN and of unsampled rows give an arbitrary mask, never an error.
    """
    prefix = torch.zeros_like(key[:, :1])
    need = need[:, None]
    while bits > 0:
        width = min(_RADIX_BITS, bits)
        bits -= width
        size = 1 << width
        # Three runs of `size` buckets: keys before those that start with `prefix`, these by their next digit, and
        # keys after. The outer runs are spread over all digits because adding into one bucket is serial and slow.
        high = key >> bits
        side = (high >> width).sub_(prefix).clamp_(-1, 1).add_(1)
        bucket = side.mul_(size).add_(high.bitwise_and_(size - 1)).long()
        histogram = torch.zeros(key.shape[0], 3 * size, dtype=torch.float64, device=key.device)
        cumulative = histogram.scatter_add_(1, bucket, weight).cumsum(1)
        crossing = (cumulative < need).sum(1, keepdim=True).clamp_(size, 2 * size - 1)
        prefix = (prefix << width) + (crossing - size).to(key.dtype)
    before, through = cumulative.gather(1, crossing - 1), cumulative.gather(1, crossing)
    tied = (key == prefix) & (weight > 0)
    tie_rank = tied.cumsum(1, dtype=torch.int32)  # among equal logits the lower ids come first
    num_ties_kept = ((need - before) / (through - before) * tie_rank[:, -1:]).ceil()
    return (key < prefix) | tied & (tie_rank <= num_ties_kept)


def _order_key(logits: Tensor) -> tuple[Tensor, int]:
    """Integer keys that grow from 0 as logits fall from 0, and the number of bits in use."""
    if logits.dtype == torch.float64:
        return logits.abs().view(torch.int64), 63
    return logits.abs().view(torch.int32), 31
