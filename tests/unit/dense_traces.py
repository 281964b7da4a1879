"""Made-up dense traces: confidences are drawn, correlated along an answer, and runs are drawn from them."""

from typing import Any

import numpy as np

from slipstream.lab.dense import DenseTrace


def made_up(
    num_answers: int = 24, num_drafts: int = 7, seed: int = 0, mean_length: int = 60, prompt: int = 20, **about: Any
) -> DenseTrace:
    """Head says the truth, peak is sure of itself. A walk of its own makes stretches of each answer easy or hard."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(mean_length // 2, mean_length * 3 // 2 + 1, num_answers)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ease = np.empty(starts[-1])
    state = 0.0
    for row in range(len(ease)):
        state = 0.9 * state + rng.normal(0, 0.55)
        ease[row] = state
    logit = np.linspace(2.2, 0.8, num_drafts) + 1.2 * ease[:, None] + 0.5 * rng.normal(size=(len(ease), num_drafts))
    confidence = 1 / (1 + np.exp(-logit))
    runs = np.cumprod(rng.random(confidence.shape) < confidence, axis=1).sum(axis=1)
    left = np.repeat(starts[1:], lengths) - np.arange(starts[-1]) - 1
    return trace_of(
        lengths.tolist(), np.minimum(runs, left), {"head": confidence, "peak": confidence**0.5},
        prompt_lengths=rng.integers(prompt // 2, prompt * 2, num_answers), **about,
    )  # fmt: skip


def trace_of(lengths: list[int], runs: Any, signals: dict[str, Any], prompt_lengths: Any, **about: Any) -> DenseTrace:
    """Token i of the trace is 100 + i. The first half of the answers are to prompts of set a, the others of b."""
    count = len(lengths)
    trace = DenseTrace(
        starts_np=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompt_lengths_np=np.asarray(prompt_lengths, np.int32), token_ids_np=np.arange(sum(lengths), dtype=np.int32) + 100,
        runs_np=np.asarray(runs, np.int8), signals={name: np.asarray(v, np.float16) for name, v in signals.items()},
        set_names=("a", "b"), sets_np=(np.arange(count) >= (count + 1) // 2).astype(np.int32), about=about,
    )  # fmt: skip
    assert trace.fault() is None, trace.fault()
    return trace
