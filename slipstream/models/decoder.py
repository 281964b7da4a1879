"""One dense decoder for the Llama, Qwen2 and Qwen3 families; what differs between them are flags of its spec.

It maps token ids and positions to hidden states and logits, and on request hands out the residual stream after
given layers (the features that drafters read). It does not know requests, caches or masks: attention is an `Attend`
given with each call. Called by the engine's target stage, the trainer and the answer generator.

Shapes: R rows, H hidden size, V vocabulary, K taps, hd head size.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.layers import Attend, Map, PackedLinear, RMSNorm, Rotary
from slipstream.models.spec import DecoderSpec
from slipstream.ops.linear import linear
from slipstream.ops.rope import apply_rope

Dtype = torch.dtype | None
Device = torch.device | str | None
# A layer as a function: (x [R, H], cos [R, hd], sin [R, hd], attend) -> [R, H]
LayerFunction = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]


class Attention(nn.Module):
    """Projections, head norms and RoPE around one call of `attend`."""

    def __init__(self, spec: DecoderSpec, layer: int, dtype: Dtype = None, device: Device = None) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        rows = (spec.num_q_dims, spec.num_kv_dims, spec.num_kv_dims)
        self.qkv_proj = PackedLinear(spec.hidden_size, rows, spec.qkv_bias, dtype, device)
        self.o_proj = PackedLinear(spec.num_q_dims, (spec.hidden_size,), spec.o_bias, dtype, device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, dtype, device)
            self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, dtype, device)

    def bind(self) -> LayerFunction:
        project, project_out, layer, shape = self.qkv_proj.bind(), self.o_proj.bind(), self.layer, (-1, self.head_dim)
        norm_heads = self._bind_head_norms()
        q_and_k = (self.num_heads, self.num_kv_heads)
        qk_and_v = (self.num_heads + self.num_kv_heads, self.num_kv_heads)

        def attention(x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
            heads = project(x).view(x.shape[0], *shape)
            qk, v = heads.split_with_sizes(qk_and_v, 1)
            if norm_heads is not None:
                qk = norm_heads(qk)
            q, k = apply_rope(qk, cos, sin).split_with_sizes(q_and_k, 1)  # one rotation: they share positions
            return project_out(attend(layer, q, k, v))

        return attention

    def _bind_head_norms(self) -> Map | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        norm_q, norm_k, sizes = self.q_norm.bind(), self.k_norm.bind(), (self.num_heads, self.num_kv_heads)

        def norm_heads(qk: Tensor) -> Tensor:
            q, k = qk.split_with_sizes(sizes, 1)
            return torch.cat((norm_q(q), norm_k(k)), dim=1)

        return norm_heads


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up packed."""

    def __init__(self, spec: DecoderSpec, dtype: Dtype = None, device: Device = None) -> None:
        super().__init__()
        inner = spec.intermediate_size
        self.gate_up_proj = PackedLinear(spec.hidden_size, (inner, inner), spec.mlp_bias, dtype, device)
        self.down_proj = PackedLinear(inner, (spec.hidden_size,), spec.mlp_bias, dtype, device)

    def bind(self) -> Map:
        project, project_down = self.gate_up_proj.bind(), self.down_proj.bind()

        def mlp(x: Tensor) -> Tensor:
            gate, up = project(x).chunk(2, dim=-1)
            return project_down(F.silu(gate) * up)

        return mlp


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside the residual stream."""

    def __init__(self, spec: DecoderSpec, layer: int, dtype: Dtype = None, device: Device = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, device)
        self.self_attn = Attention(spec, layer, dtype, device)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, device)
        self.mlp = MLP(spec, dtype, device)

    def bind(self) -> LayerFunction:
        attention, mlp = self.self_attn.bind(), self.mlp.bind()
        norm_attention, norm_mlp = self.input_layernorm.bind(), self.post_attention_layernorm.bind()

        def layer(x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
            x = x + attention(norm_attention(x), cos, sin, attend)
            return x + mlp(norm_mlp(x))

        return layer


class Decoder(nn.Module):
    """A target model. Its weights are frozen, and arbitrary until loaded (`models.weights`) or drawn by `init_random`.

    The modules hold the weights under the names of files; what runs is `functions`, the layers bound to them (see
    `PackedLinear.bind`), so hooks of the layers are not called.
    """

    def __init__(self, spec: DecoderSpec, dtype: Dtype = None, device: Device = None) -> None:
        super().__init__()
        self.spec = spec
        table = torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size, _weight=table)  # [V, H]
        self.layers = nn.ModuleList(Layer(spec, layer, dtype, device) for layer in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, device)
        self.lm_head: PackedLinear | None = None
        if not spec.tie_word_embeddings:
            self.lm_head = PackedLinear(spec.hidden_size, (spec.vocab_size,), False, dtype, device)
        self.rotary = Rotary(spec.rope, spec.head_dim, spec.max_position_embeddings, device)
        self.requires_grad_(False)
        self.eval()
        self.functions = self._bind()

    def _bind(self) -> list[LayerFunction]:
        return [layer.bind() for layer in self.layers if isinstance(layer, Layer)]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles bind anew: a function would keep the weights of the original."""
        return {name: value for name, value in self.__dict__.items() if name != "functions"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.functions = self._bind()

    @property
    def head_weight(self) -> Tensor:
        """The output head [V, H]; the embedding table itself when the two are tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [...] -> [..., H]."""
        return F.embedding(token_ids, self.embed_tokens.weight)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states after the final norm [R, H], and the tapped features [R, K * H] in the order of `taps`.

        Tap i is the residual stream after layer i (0-based), for the last layer before the final norm; -1 is the
        embedding's output.
        """
        cos, sin = self.rotary.table(positions)
        x = self.embed(token_ids)
        tapped = {-1: x}
        for index, layer in enumerate(self.functions):
            x = layer(x, cos, sin, attend)
            if index in taps:
                tapped[index] = x
        hidden: Tensor = self.norm(x)
        return hidden, torch.cat([tapped[tap] for tap in taps], dim=-1) if taps else None

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., V] in the model's dtype."""
        return linear(hidden, self.head_weight)

    @torch.no_grad()
    def init_random(self, seed: int, std: float = 0.02) -> Self:
        """Normal weights and biases of deviation `std`, norms around 1; equal for equal seeds on every device."""
        generator = torch.Generator(device="cpu").manual_seed(seed)
        for name, parameter in itertools.chain(self.named_parameters(), self.named_buffers()):
            if name == "rotary.cos_sin":
                continue
            drawn = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(drawn + 1.0 if name.endswith("norm.weight") else drawn)
        return self
