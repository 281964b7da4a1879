"""RMS normalisation over the last dimension, in fp32 inside whatever the input's dtype.

Plain torch: `F.rms_norm` is one fused kernel on a GPU and a handful of vectorised passes on a CPU.
Called by every layer of the target and of the drafters; knows nothing of either.
"""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`, x [..., H], weight [H]; returns x's shape and dtype."""
    return F.rms_norm(x, weight.shape, weight, eps)
