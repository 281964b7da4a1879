"""What a request asks besides temperature and filters, by its definition: penalties, biases, and what a grammar allows.

Whole rows over the whole vocabulary, counted from the tokens before them: nothing is shared with the engine's own
`ops.shape_logits`, which follows drafts. A grammar's place is found anew for every prefix. Called by `verify_exact_law`
and, for whether answers have their form, by `verify_exact`.

Letters in shapes: R rows, V token ids.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.config import SamplingParams
from slipstream.constraint import num_words
from slipstream.grammars import Grammars, XGrammars, idle
from slipstream.load import Models

# Fields of a request that this is about, beside those of temperature and filters.
FIELDS = frozenset({"repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "structured"})
Tokens = Sequence[int]


def grammars_of(models: Models) -> Grammars:
    return XGrammars(models.tokenizer, models.vocab_size, models.eos_token_ids)


class Shape:
    def __init__(self, models: Models, params: SamplingParams, grammars: Grammars | None = None) -> None:
        self._params, self._vocab_size = params, models.vocab_size
        self._make = None
        if params.structured is not None:
            self._make = (grammars or grammars_of(models)).compile(
                params.structured, params.ends(models.eos_token_ids), idle
            )
        self._allowed: dict[tuple[int, ...], Tensor] = {}  # by prefix: samples have many in common

    @property
    def is_neutral(self) -> bool:
        return not self.follows_output and not self._params.logit_bias

    @property
    def follows_output(self) -> bool:
        """Whether a row's shape depends on the tokens before it: a bias does not."""
        asked = self._params
        penalties = asked.repetition_penalty, asked.frequency_penalty, asked.presence_penalty
        return penalties != (1, 0, 0) or asked.structured is not None

    def __call__(self, logits: Tensor, prompt: Tokens, outputs: Sequence[Tokens]) -> Tensor:
        """[R, V] fp32 -> [R, V] of what plain decoding filters and samples behind a prompt and each of R outputs."""
        if self.is_neutral:
            return logits
        counts = torch.stack([self._counts(output) for output in outputs]).to(logits)
        known = (counts > 0) | (self._counts(prompt) > 0).to(logits.device)
        asked, logits = self._params, logits.clone()
        repeated = torch.where(logits > 0, logits / asked.repetition_penalty, logits * asked.repetition_penalty)
        logits = torch.where(known, repeated, logits)
        logits -= asked.frequency_penalty * counts + asked.presence_penalty * (counts > 0)
        for token, bias in asked.logit_bias.items():
            logits[:, token] += bias
        if self._make is not None:
            allowed = torch.stack([self._allowed_after(tuple(output)) for output in outputs])
            logits = logits.masked_fill(~allowed.to(logits.device), -torch.inf)
        return logits

    def breaks(self, output: Tokens) -> bool:
        """Whether an answer, or the beginning of one, has not the form that was asked for."""
        if self._make is None:
            return False
        return any(not self._allowed_after(tuple(output[:place]))[token] for place, token in enumerate(output))

    def _counts(self, tokens: Tokens) -> Tensor:
        return torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=self._vocab_size)

    def _allowed_after(self, output: tuple[int, ...]) -> Tensor:
        """[V] bool. Behind what the grammar does not have, everything: that one is counted by `breaks`."""
        assert self._make is not None
        if output not in self._allowed:
            constraint, mask = self._make(), np.zeros((1, num_words(self._vocab_size)), np.int32)
            assert constraint is not None
            constraint.read(output)
            if constraint.fill([], mask):
                mask[:] = -1
            bits = np.unpackbits(mask.view(np.uint8)[0], bitorder="little")[: self._vocab_size]
            self._allowed[output] = torch.from_numpy(bits.astype(np.bool_))
        return self._allowed[output]
