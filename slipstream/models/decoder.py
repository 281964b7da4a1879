"""One dense decoder for the Llama, Qwen2 and Qwen3 families; what differs between them are flags of its spec.

It maps token ids and positions to hidden states and logits, and on request hands out the residual stream after
given layers (the features that drafters read). It does not know requests, caches or masks: attention is an `Attend`
given with each call. Called by the engine's target stage, the trainer and the answer generator.

Shapes: R rows, H hidden size, V vocabulary, K taps, hd head size.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.layers import Attend, PackedLinear, RMSNorm, Rotary
from slipstream.models.spec import DecoderSpec
from slipstream.ops.rope import apply_rope

Dtype = torch.dtype | None
Device = torch.device | str | None


class Attention(nn.Module):
    """Projections, head norms and RoPE around one call of `attend`."""

    def __init__(self, spec: DecoderSpec, layer: int, dtype: Dtype = None, device: Device = None) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        rows = (spec.num_q_dims, spec.num_kv_dims, spec.num_kv_dims)
        self.qkv_proj = PackedLinear(spec.hidden_size, rows, spec.qkv_bias, dtype, device)
        self.o_proj = PackedLinear(spec.num_q_dims, (spec.hidden_size,), spec.o_bias, dtype, device)
        self.qk_norm = spec.qk_norm
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, dtype, device)
            self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, dtype, device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x [R, H], cos and sin [R, hd] -> [R, H]."""
        num_qk = self.num_heads + self.num_kv_heads
        heads: Tensor = self.qkv_proj(x).view(-1, num_qk + self.num_kv_heads, self.head_dim)
        qk, v = heads[:, :num_qk], heads[:, num_qk:]
        if self.qk_norm:
            qk = torch.cat((self.q_norm(qk[:, : self.num_heads]), self.k_norm(qk[:, self.num_heads :])), dim=1)
        qk = apply_rope(qk, cos, sin)  # queries and keys share positions: one rotation for both
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        out: Tensor = self.o_proj(attend(self.layer, q, k, v))
        return out


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up packed."""

    def __init__(self, spec: DecoderSpec, dtype: Dtype = None, device: Device = None) -> None:
        super().__init__()
        inner = spec.intermediate_size
        self.gate_up_proj = PackedLinear(spec.hidden_size, (inner, inner), spec.mlp_bias, dtype, device)
        self.down_proj = PackedLinear(inner, (spec.hidden_size,), spec.mlp_bias, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside the residual stream."""

    def __init__(self, spec: DecoderSpec, layer: int, dtype: Dtype = None, device: Device = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, device)
        self.self_attn = Attention(spec, layer, dtype, device)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, device)
        self.mlp = MLP(spec, dtype, device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """A target model. Its weights are frozen; arbitrary until loaded (`models.weights`) or drawn (`init_random`)."""

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
        tapped = {-1: x} if -1 in taps else {}
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, attend)
            if index in taps:
                tapped[index] = x
        hidden: Tensor = self.norm(x)
        return hidden, torch.cat([tapped[tap] for tap in taps], dim=-1) if taps else None

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., V] in the model's dtype."""
        return F.linear(hidden, self.head_weight)

    @torch.no_grad()
    def init_random(self, seed: int, std: float = 0.02) -> "Decoder":
        """Normal weights and biases of deviation `std`, norms around 1; equal for equal seeds on every device."""
        generator = torch.Generator(device="cpu").manual_seed(seed)
        for name, parameter in itertools.chain(self.named_parameters(), self.named_buffers()):
            if name == "rotary.cos_sin":
                continue
            drawn = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(drawn + 1.0 if name.endswith("norm.weight") else drawn)
        return self
