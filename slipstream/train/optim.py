"""Mixed precision and the optimiser: fp32 masters behind a bf16 network; Muon for the body's matrices, Adam otherwise.

Muon (Jordan et al., 2024) moves a matrix along its momentum made orthogonal by a Newton-Schulz iteration; the factor
0.2 sqrt(max(rows, columns)) gives its update the RMS of Adam's (Liu et al., arXiv 2502.16982). Packed matrices are
taken apart: queries and keys are not one matrix. The state is plain tensors by name, so checkpoints need no pickle.
Called by the trainer.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from slipstream.models.layers import PackedLinear
from slipstream.train.options import OptimOptions

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic coefficients of the Muon authors
ADAM_EPS = 1e-10
BODY = ("fc.", "layers.")  # whose matrices Muon moves


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrix, roughly: singular values end between about 0.7 and 1.2. [rows, columns]."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    out: Tensor = (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)
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
        self.muon = [name for name in self.parts if name.startswith(BODY) and name in self.parameters]
        self.adam = [name for name in self.parameters if name not in self.muon]
        self.first = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.second = {name: torch.zeros_like(self.masters[name]) for name in self.adam}
        self.steps = 0

    @torch.no_grad()
    def step(self, scale: float) -> Tensor:
        """One update at `scale` times the top rates, from the network's gradients, which it clears.

        Returns their norm.
        """
        grads = {name: p.grad.float() for name, p in self.parameters.items() if p.grad is not None}
        for parameter in self.parameters.values():
            parameter.grad = None
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads.values()))))
        if self.options.clip:
            factor = (self.options.clip / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(list(grads.values()), factor)
        self.steps += 1
        self._step_muon({name: grads[name] for name in self.muon if name in grads}, self.options.muon_lr * scale)
        self._step_adam([name for name in self.adam if name in grads], grads, self.options.adam_lr * scale)
        torch._foreach_copy_(list(self.parameters.values()), list(self.masters.values()))
        return norm

    def _step_muon(self, grads: Mapping[str, Tensor], lr: float) -> None:
        for name, grad in grads.items():
            momentum = self.first[name]
            momentum.lerp_(grad, 1 - self.options.momentum)
            ahead = grad.lerp(momentum, self.options.momentum)
            parts = list(self.parts[name])
            for update, master in zip(torch.split(ahead, parts), torch.split(self.masters[name], parts), strict=True):
                master.add_(orthogonal(update), alpha=-lr * 0.2 * max(update.shape) ** 0.5)

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
