"""Mixed precision and the optimiser: fp32 masters behind a bf16 network; Muon for the body's matrices, AdamW otherwise.

Muon (Jordan et al., 2024) moves a matrix along its momentum made orthogonal by a Newton-Schulz iteration; the factor
0.2 sqrt(max(rows, columns)) gives its update the RMS of Adam's (Liu et al., arXiv 2502.16982). Packed matrices are
taken apart: queries and keys are not one matrix. The state is plain tensors by name, so checkpoints need no pickle.
Called by the trainer.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from slipstream.models.layers import PackedLinear
from slipstream.train.options import OptimOptions

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic coefficients of the Muon authors
ADAM_EPS = 1e-10
BODY = ("fc.", "layers.")  # whose matrices Muon moves


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrices, roughly: singular values end between about 0.7 and 1.2.

    [..., rows, columns]; wide matrices, rows <= columns, cost least.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x.mT if tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    out: Tensor = (x.mT if tall else x).to(matrices.dtype)
    return out


class MasterOptimizer:
    """Holds the fp32 masters of a network, steps them and writes them back in the network's dtype."""

    def __init__(self, network: nn.Module, options: OptimOptions) -> None:
        self.options = options
        self.parameters = dict(network.named_parameters())
        self.masters = {name: p.detach().float().clone() for name, p in self.parameters.items()}
        self.parts = {
            f"{name}.weight": module.parts
            for name, module in network.named_modules()
            if isinstance(module, PackedLinear)
        }
        body = [name for name in self.parts if name.startswith(BODY) and name in self.parameters]
        self.muon = body if options.method == "muon" else []
        self.adam = [name for name in self.parameters if name not in self.muon]
        self.first = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.second = {name: torch.zeros_like(self.masters[name]) for name in self.adam}
        self.steps = 0

    @torch.no_grad()
    def step(self, scale: float, add_up: Callable[[Sequence[Tensor]], None] | None = None) -> Tensor:
        """One update at `scale` times the top rates, from the network's gradients, which it clears.

        `add_up` sums the gradients (fp32) of several processes in place. Returns their norm.
        """
        grads = {name: p.grad.float() for name, p in self.parameters.items() if p.grad is not None}
        if add_up is not None:
            add_up(list(grads.values()))
        for parameter in self.parameters.values():
            parameter.grad = None
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads.values()))))
        if self.options.clip:
            factor = (self.options.clip / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(list(grads.values()), factor)
        self.steps += 1
        muon, adam = ([name for name in names if name in grads] for names in (self.muon, self.adam))
        self._decay(muon, self.options.muon_lr * scale)
        self._decay(adam, self.options.adam_lr * scale)
        self._step_muon({name: grads[name] for name in muon}, self.options.muon_lr * scale)
        self._step_adam(adam, grads, self.options.adam_lr * scale)
        torch._foreach_copy_(list(self.parameters.values()), list(self.masters.values()))
        return norm

    def _decay(self, names: list[str], lr: float) -> None:
        matrices = [self.masters[name] for name in names if self.masters[name].ndim > 1]
        if self.options.weight_decay and matrices:
            torch._foreach_mul_(matrices, 1 - lr * self.options.weight_decay)

    def _step_muon(self, grads: Mapping[str, Tensor], lr: float) -> None:
        """Matrices of one shape are made orthogonal together: alone, they are too small to keep a GPU busy."""
        if not grads:
            return
        momenta = [self.first[name] for name in grads]
        torch._foreach_lerp_(momenta, list(grads.values()), 1 - self.options.momentum)
        ahead = torch._foreach_lerp(list(grads.values()), momenta, self.options.momentum)
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}  # update and master of each part
        for name, update in zip(grads, ahead, strict=True):
            for pair in zip(self._wide_parts(name, update), self._wide_parts(name, self.masters[name]), strict=True):
                by_shape.setdefault(pair[0].shape, []).append(pair)
        for shape, pairs in by_shape.items():
            moved = orthogonal(torch.stack([part for part, _ in pairs]))
            rate = lr * 0.2 * max(shape) ** 0.5
            torch._foreach_add_([master for _, master in pairs], list(moved.unbind()), alpha=-rate)

    def _wide_parts(self, name: str, matrix: Tensor) -> list[Tensor]:
        """Views of a packed matrix's parts, each with no more rows than columns."""
        parts = torch.split(matrix, list(self.parts[name]))
        return [part if part.shape[0] <= part.shape[1] else part.mT for part in parts]

    def _step_adam(self, names: list[str], grads: Mapping[str, Tensor], lr: float) -> None:
        if not names:
            return
        beta1, beta2 = self.options.betas
        grad = [grads[name] for name in names]
        first, second = [self.first[name] for name in names], [self.second[name] for name in names]
        torch._foreach_lerp_(first, grad, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grad, grad, 1 - beta2)
        spread = torch._foreach_sqrt(second)
        torch._foreach_mul_(spread, (1 - beta2**self.steps) ** -0.5)
        torch._foreach_add_(spread, ADAM_EPS)
        torch._foreach_addcdiv_([self.masters[name] for name in names], first, spread, -lr / (1 - beta1**self.steps))

    def state(self) -> dict[str, Tensor]:
        """Masters and moments by name."""
        named = {"master": self.masters, "first": self.first, "second": self.second}
        return {f"{kind}.{name}": tensor for kind, tensors in named.items() for name, tensor in tensors.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], steps: int) -> None:
        """The opposite of `state`; also writes the masters into the network."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        torch._foreach_copy_(list(self.parameters.values()), list(self.masters.values()))
        self.steps = steps
