"""A grammar for tiny models, as an automaton, and what plain decoding answers by definition."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.config import SamplingParams
from slipstream.load import Models
from slipstream.structured import StructuredOutput
from slipstream.testing import TableGrammars
from tests.lossless.harness import scores_after

EOS = 1  # of the tiny models
ANY = StructuredOutput(grammar="root ::= [a-z]*")  # what is asked does not matter to a TableGrammars
FINAL = {3}


def automaton(vocab_size: int, num_states: int = 5) -> NDArray[np.int64]:
    """[state, token]: every third token is forbidden, others in every state; in one state all but two are."""
    state, token = np.arange(num_states)[:, None], np.arange(vocab_size)
    after = (state + token) % num_states
    after[(state + token) % 3 == 0] = -1
    after[4, :] = -1
    after[4, [5, 6]] = 3, 2
    after[:, EOS] = -1
    return after


def grammars(vocab_size: int) -> TableGrammars:
    return TableGrammars(automaton(vocab_size), FINAL)


def allowed_after(output: Sequence[int], vocab_size: int) -> NDArray[np.bool_]:
    """[V]"""
    after, state = automaton(vocab_size), 0
    for token in output:
        state = int(after[state, token])
        assert state >= 0, f"{output} is not in the grammar"
    allowed: NDArray[np.bool_] = after[state] >= 0
    allowed[EOS] = state in FINAL
    return allowed


def plain_answer(models: Models, prompt: Sequence[int], params: SamplingParams) -> tuple[tuple[int, ...], float]:
    """By dense forwards: the answer, and the least gap between the best token and the next."""
    output: list[int] = []
    gap = float("inf")
    while len(output) < params.max_tokens and output[-1:] != [EOS]:
        allowed = None if params.structured is None else torch.from_numpy(allowed_after(output, models.vocab_size))
        scores = scores_after(models, [*prompt, *output], params, len(prompt), allowed)
        best = scores.topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        output.append(int(best.indices[0]))
    return tuple(output), gap
