"""Networks with weights drawn at random, for benches of real sizes without real weights.

A matrix gets the deviation 1 / sqrt(columns), so that a product keeps the scale of its input at any width: features and
logits stay finite in every dtype, and logits deviate by about 1. Norms are 1, biases 0. Weights are drawn where they
lie, in their own dtype, which takes well under a second for 16 GB on a GPU; equal seeds give equal weights on one kind of device.
Knows no names of shapes (`shapes`); called by `load`.
"""

import os

import torch
from torch import nn

from slipstream.errors import CapacityError
from slipstream.models.checkpoint import DrafterSpec
from slipstream.models.decoder import Decoder
from slipstream.models.drafters import BlockDrafter
from slipstream.models.shapes import num_values
from slipstream.models.spec import DecoderSpec
from slipstream.models.weights import empty_decoder


def random_decoder(spec: DecoderSpec, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Decoder:
    """A target of this shape, frozen and in evaluation mode. Raises CapacityError where it does not fit in memory."""
    if torch.device(device).type == "cpu":
        _check_memory("target", num_values(spec) * dtype.itemsize)
    decoder = empty_decoder(spec, dtype, device)
    draw(decoder, seed)
    return decoder


def random_drafter(spec: DrafterSpec, target: Decoder, seed: int = 1) -> BlockDrafter:
    """A drafter of this shape beside its target, in the target's dtype and on its device; frozen, ready to serve.

    A reduced vocabulary is spread evenly over the target's. Raises CapacityError where it does not fit in memory.
    """
    table = target.embed_tokens.weight
    if table.device.type == "cpu":
        shapes = BlockDrafter(spec, table.dtype, "meta").parameters()
        _check_memory("drafter", sum(parameter.nbytes for parameter in shapes))
    drafter = BlockDrafter(spec, table.dtype, table.device)
    draw(drafter, seed)
    if spec.draft_vocab_size is not None:
        ids = torch.arange(spec.draft_vocab_size, device=table.device)
        drafter.set_draft_vocabulary(ids * spec.vocab_size // spec.draft_vocab_size)
    drafter.share(target)
    return drafter.requires_grad_(False).eval()


@torch.no_grad()
def draw(network: nn.Module, seed: int) -> None:
    """Fill the parameters of a network that lies on one device, in the order in which it holds them."""
    parameters = dict(network.named_parameters())
    generator = torch.Generator(next(iter(parameters.values())).device).manual_seed(seed)
    for name, parameter in parameters.items():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)


def _check_memory(whose: str, num_bytes: int) -> None:
    """Linux promises memory that it does not have, and ends the process that uses it."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > installed:
        raise CapacityError(
            f"the {whose}'s weights take {num_bytes / 1e9:.1f} GB and this machine has {installed / 1e9:.1f} GB; "
            "choose a smaller shape"
        )
