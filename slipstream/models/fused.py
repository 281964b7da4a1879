"""The networks of `decoder` and `drafters` as sequences of fused kernels: what runs on a GPU.

Same weights, same arithmetic up to rounding; a layer is four products, each with its norm, activation or residual
inside, and one call of `attend`, which rotates, stores and attends. The residual stream is updated in place; half of the
norm that reads it next is made where it is written, see `ops.fused.HalfNormed`. The plain modules stay the reference,
what trains and what runs on a CPU. Knows neither pages nor steps.

Shapes: R rows, H hidden size, O output rows, V vocabulary, K taps, L drafter layers, nh, nkv, hd heads and their size.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.models.decoder import Decoder
from slipstream.models.drafters import BlockDrafter
from slipstream.models.layers import RMSNorm
from slipstream.ops.fused import Following, HalfNormed, Products


class PackedAttend(Protocol):
    """Everything between the projections of a layer, given by whoever owns the keys and values."""

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """qkv [R, (nh + 2 nkv) hd] as projected, which may be overwritten -> [R, nh * hd]."""
        ...


class FusedDecoder:
    """A target's forward."""

    def __init__(self, decoder: Decoder, products: Products) -> None:
        self.spec = decoder.spec
        self.embedding = decoder.embed_tokens.weight
        self.cos_sin = decoder.rotary.cos_sin
        self._head, self._norm = decoder.head_weight, decoder.norm
        self._layers: list[Any] = list(decoder.layers)
        self._products = products

    def head_norms(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Weights [hd] of the q and k norms, if there are any."""
        attention = self._layers[layer].self_attn
        return _weight(attention.q_norm), _weight(attention.k_norm)

    def forward(self, token_ids: Tensor, attend: PackedAttend, taps: dict[int, Tensor], stream: Tensor) -> Tensor:
        """token_ids [R] -> the residual stream [R, H] before the final norm, in `stream`.

        taps: layer -> where its residual stream goes, [R, H]; -1 is the embedding's output (`Decoder.forward`).
        """
        x = torch.index_select(self.embedding, 0, token_ids, out=stream)
        if -1 in taps:
            taps[-1].copy_(x)
        half = None
        for index, layer in enumerate(self._layers):
            half = _run_layer(self._products, layer, index, x, half, attend, _following(self._layers, index))
            if index in taps:
                taps[index].copy_(x)
        return x

    def logits(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows x [O, H] of the residual stream -> out [O, V], new if none is given."""
        return self._products.linear(x, self._head, norm=self._norm.weight, eps=self._norm.eps, out=out)


class FusedDrafter:
    """A block drafter's forward and its context projection. Heads that draw are the caller's."""

    def __init__(self, network: BlockDrafter, products: Products) -> None:
        self.network = network
        self.cos_sin = network.rotary.cos_sin
        self.eps = network.spec.rms_norm_eps
        self._layers: list[Any] = list(network.layers)
        self._products = products
        attentions = [layer.self_attn for layer in self._layers]
        # Context rows need keys and values only, of all layers: their weights side by side make one product.
        self._context_weight = torch.cat([a.qkv_proj.weight[a.q_rows :] for a in attentions])  # [L * 2 nkv hd, H]
        biases = [a.qkv_proj.bias for a in attentions]
        biases = [a.qkv_proj.bias[a.q_rows :] for a in attentions if a.qkv_proj.bias is not None]
        self._context_bias = torch.cat(biases) if biases else None
        self.k_norms = torch.stack([a.k_norm.weight for a in attentions])  # [L, hd]

    def head_norms(self, layer: int) -> tuple[Tensor, Tensor]:
        attention = self._layers[layer].self_attn
        return attention.q_norm.weight, attention.k_norm.weight

    def hidden(self, input_ids: Tensor, attend: PackedAttend) -> Tensor:
        """Target ids [R] of the rows of blocks, one after another -> [R, H] after the final norm."""
        network = self.network
        x = F.embedding(input_ids, network.embedding_weight).to(network.dtype)
        half = None
        for index, layer in enumerate(self._layers):
            half = _run_layer(self._products, layer, index, x, half, attend, _following(self._layers, index))
        out: Tensor = network.norm(x)
        return out

    def base_logits(self, hidden: Tensor) -> Tensor:
        """[R, H] after the final norm -> [R, Vd]."""
        head = self.network.head_weight
        return self._products.linear(hidden.to(head.dtype), head)

    def context_kv(self, features: Tensor) -> Tensor:
        """features [R, K * Ht] -> keys and values of all layers, neither normed nor rotated, [R, L * 2 nkv hd]."""
        network = self.network
        c = self._products.linear(features.to(network.dtype), network.fc.weight)
        norm = network.hidden_norm
        return self._products.linear(c, self._context_weight, self._context_bias, norm=norm.weight, eps=norm.eps)


def _run_layer(
    products: Products, layer: Any, index: int, x: Tensor, half: HalfNormed | None, attend: PackedAttend,
    following: Following | None,
) -> HalfNormed | None:  # fmt: skip
    """One pre-norm layer, of a target or a drafter: x [R, H], half normed already or not, is overwritten with the result.

    Returns the result half normed for `following`, or None, see `ops.fused.add_linear`.
    """
    attention, mlp = layer.self_attn, layer.mlp
    before, between = layer.input_layernorm, layer.post_attention_layernorm
    qkv, o, gate_up, down = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
    heads = products.linear(x, qkv.weight, qkv.bias, norm=before.weight, eps=before.eps, half=half)
    half = products.add(attend(index, heads), o.weight, o.bias, x, (between.weight, gate_up.weight))
    inner = products.linear(
        x, gate_up.weight, gate_up.bias, norm=between.weight, eps=between.eps, gated=True, half=half
    )
    return products.add(inner, down.weight, down.bias, x, following)


def _following(layers: list[Any], index: int) -> Following | None:
    """Who reads what this layer adds to the stream; the norm behind the last layer is nobody's prologue."""
    if index + 1 == len(layers):
        return None
    layer = layers[index + 1]
    return layer.input_layernorm.weight, layer.self_attn.qkv_proj.weight


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight
