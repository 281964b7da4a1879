"""Which token plain decoding chooses behind given ones, by a dense forward: how near a tie was, and what hangs on drafts.

Called by `verify_exact` where texts are compared. Letters in shapes: R rows, V token ids.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.config import SamplingParams
from slipstream.lab.verify_exact_law import filtered
from slipstream.lab.verify_exact_shape import Shape
from slipstream.load import Models
from slipstream.models.layers import DenseAttend
from slipstream.ops.noise import gumbel


def perturbed_gap(
    models: Models, prompt: Sequence[int], output: Sequence[int], params: SamplingParams, shape: Shape
) -> float:
    """Difference of the two best candidates for the token after these, the noise of its position included."""
    rows = _Rows(models, prompt, output, [len(output)], params)
    best = rows.scores(shape, [len(output)]).topk(2).values[0]
    return float(best[0] - best[1])


def hangs_on_drafts(
    models: Models, prompt: Sequence[int], output: Sequence[int], accepted: Sequence[bool], params: SamplingParams,
    shape: Shape,
) -> bool:  # fmt: skip
    """Whether penalties, biases or masks that missed the drafts of its own step would choose another token somewhere.

    accepted [T]: which tokens of the output were drafts. A step is a run of them and the token behind.
    """
    behind = [place for place in range(1, len(output)) if accepted[place - 1]]
    if not behind:
        return False
    committed, begins = [], 0
    for place in range(len(output)):
        begins = begins if place and accepted[place - 1] else place
        committed.append(begins)
    rows = _Rows(models, prompt, output, behind, params)
    right = rows.scores(shape, behind).argmax(-1)
    return not torch.equal(right, rows.scores(shape, [committed[place] for place in behind]).argmax(-1))


class _Rows:
    """The target's rows in front of some tokens of an output."""

    @torch.inference_mode()
    def __init__(
        self, models: Models, prompt: Sequence[int], output: Sequence[int], places: Sequence[int],
        params: SamplingParams,
    ) -> None:  # fmt: skip
        """places [R]: indices into the output, its length for the token that would come next."""
        tokens = torch.tensor([*prompt, *output[: max(places)]], device=models.device)
        hidden, _ = models.target(
            tokens, torch.arange(len(tokens), device=models.device), DenseAttend(models.target.spec)
        )
        positions = len(prompt) + torch.tensor(places)
        self._logits = models.target.logits(hidden[positions - 1])[:, : models.vocab_size].float()
        self._prompt, self._output, self._params = prompt, output, params
        self._noise = torch.zeros(())
        if params.temperature > 0:
            self._noise = gumbel(torch.tensor([params.seed or 0]).expand(len(places)), positions, models.vocab_size)

    @torch.inference_mode()
    def scores(self, shape: Shape, num_seen: Sequence[int]) -> Tensor:
        """[R, V] what is largest is chosen, if the shape of row r goes by so many tokens of the output."""
        shaped = shape(self._logits, self._prompt, [self._output[:count] for count in num_seen])
        return filtered(shaped, self._params) + self._noise.to(self._logits.device)
