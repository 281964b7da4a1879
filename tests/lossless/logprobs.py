"""Log-probabilities by definition: a dense forward over the whole sequence, log-softmax, and a look at every token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.llm import Completion
from slipstream.load import Models
from slipstream.logprobs import TokenLogprob
from slipstream.models.layers import DenseAttend

NEAR = 1e-4  # what fp32 kernels that sum in another order may differ by


@torch.inference_mode()
def dense_logprobs(models: Models, token_ids: Sequence[int]) -> Tensor:
    """[n, V]: row i is of the token after token_ids[: i + 1]."""
    rows, target = torch.tensor(token_ids), models.target
    hidden, _ = target(rows, torch.arange(len(rows)), DenseAttend(target.spec))
    return target.logits(hidden)[:, : models.vocab_size].float().log_softmax(-1)


def check_entry(entry: TokenLogprob, token: int, row: Tensor, num_top: int) -> None:
    """Against the row [V] that says it all; ranks may differ where logits are within rounding of each other."""
    own = float(row[token])
    assert entry.token_id == token
    assert abs(entry.logprob - own) < NEAR, (entry, own)
    assert 1 + int((row > own + NEAR).sum()) <= entry.rank <= int((row > own - NEAR).sum()), (entry, own)
    best = row.sort(descending=True).values[:num_top].tolist()
    assert len(entry.top) == len(best)
    for (at, value), wanted in zip(entry.top, best, strict=True):
        assert abs(value - wanted) < NEAR and abs(value - float(row[at])) < NEAR, (entry.top, best)
    assert len({at for at, _ in entry.top}) == len(best)
    if entry.rank <= len(best):
        assert entry.top[entry.rank - 1] == (token, entry.logprob)


def check_answer(models: Models, prompt: Sequence[int], answer: Completion, num_top: int | None) -> None:
    """One entry for each token that counts, each as the definition has it."""
    if num_top is None:
        assert answer.logprobs is None
        return
    assert answer.logprobs is not None and len(answer.logprobs) == answer.completion_tokens
    rows = dense_logprobs(models, [*prompt, *answer.token_ids])[len(prompt) - 1 :]
    for entry, token, row in zip(answer.logprobs, answer.token_ids, rows, strict=False):
        check_entry(entry, token, row, num_top)


def check_prompt(models: Models, prompt: Sequence[int], answer: Completion, num_top: int | None) -> None:
    if num_top is None:
        assert answer.prompt_logprobs is None
        return
    assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == len(prompt)
    assert answer.prompt_logprobs[0] is None
    rows = dense_logprobs(models, prompt)
    for entry, token, row in zip(answer.prompt_logprobs[1:], prompt[1:], rows, strict=False):
        assert entry is not None
        check_entry(entry, token, row, num_top)
