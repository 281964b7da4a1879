"""What a request's parameters do to a row of logits, token by token as their definitions say, in plain Python.

The engine's own op (`slipstream.ops.shape_logits`) is compared with this; so are its answers, through `plain_law`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.config import SamplingParams
from slipstream.ops.sample import filter_logits
from slipstream.ops.shape_logits import Shaping
from slipstream.plan import FOREVER


def plain_shape(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], params: SamplingParams, ends: Sequence[int]
) -> list[float]:
    """The logits of the token after prompt and output, after penalties, bias and bans; `ends` would end the answer."""
    shaped = []
    for token, x in enumerate(logits):
        if token in prompt or token in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * list(output).count(token)
        x -= params.presence_penalty * (token in output)
        x += params.logit_bias.get(token, 0.0)
        shaped.append(-math.inf if token in ends and len(output) < params.min_tokens else x)
    return shaped


def plain_law(
    logits: Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams, ends: Sequence[int] = ()
) -> Tensor:
    """[V] of the token after prompt and output -> [1, V] scores whose argmax, with noise added, is that token."""
    shaped = torch.tensor([plain_shape(logits.tolist(), prompt, output, params, ends)], dtype=logits.dtype)
    top_k, heat, top_p, min_p = (
        torch.tensor([x]) for x in (params.top_k, params.temperature, params.top_p, params.min_p)
    )
    flags = {"any_top_k": params.top_k > 0, "any_top_p": params.top_p < 1}
    return filter_logits(shaped, heat, top_k, top_p, min_p=min_p, **flags)


def asked_by(
    params: Sequence[SamplingParams], num_prompt: Sequence[int], ends: Sequence[Sequence[int]], dtype: torch.dtype
) -> Shaping:
    """As slot state holds it, one history for each."""
    edits = [
        [
            *((token, bias, FOREVER) for token, bias in p.logit_bias.items()),
            *((t, -math.inf, p.min_tokens) for t in end),
        ]
        for p, end in zip(params, ends, strict=True)
    ]
    made = Shaping.neutral(len(params), max(1, *map(len, edits)), torch.device("cpu"))
    values = made.edit_values.to(dtype)
    for row, own in enumerate(edits):
        for column, (token, value, until) in enumerate(own):
            made.edit_ids[row, column], made.edit_until[row, column] = token, until
            values[row, column] = value
    return Shaping(
        *(torch.tensor([getattr(p, f"{name}_penalty") for p in params], dtype=dtype)
          for name in ("repetition", "frequency", "presence")),
        torch.tensor(num_prompt), torch.tensor([len(own) for own in edits]), made.edit_ids, values,
        made.edit_until,
    )  # fmt: skip
