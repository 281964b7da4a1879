"""Fresh survival on the device, for handing out a budget: the same calibration as the host's, in a few tensor ops.

Called by lag-budget's `rank` stage. The host's side of it, which also learns, is `decide/survival.py`.
"""

import torch
from torch import Tensor

from slipstream.plan import EDGE


def fresh_survival(signal: Tensor, calibration: Tensor, sampled: Tensor) -> Tensor:
    """signal [D, d] raw confidence, calibration [2, S, 2] (greedy and sampled; scale and shift of the logit per
    position), sampled [D] bool -> survival [D, d], not increasing along a row; 0 from the first non-finite signal on.
    """
    finite = signal.isfinite().to(signal.dtype).cumprod(-1)
    scale, shift = calibration[sampled.long(), : signal.shape[1]].unbind(-1)
    clamped = signal.nan_to_num(0.0).clamp(EDGE, 1 - EDGE)
    confidence = torch.sigmoid(torch.logit(clamped) * scale + shift)
    return (confidence * finite).cumprod(-1)
