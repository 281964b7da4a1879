"""The block drafter: DFlash and DSpark are one network, DSpark adds a Markov head and a confidence head.

Target features become *context* (one normed projection `c`, then keys and values per layer); a block of rows
[anchor, mask, ...] attends to it and to itself. The same module is trained (autograd) and served. It knows neither
pages nor masks: attention is a `BlockAttend` that the engine, the trainer or a test supplies. It does not sample
either; `draft/block.py` runs the serial loop.

Shapes: N blocks, n rows of a block, d drafts, R context rows, H hidden size, K tapped layers of width Ht, V target
vocabulary, Vd draft vocabulary, r Markov rank; nh, nkv, hd heads, KV heads, head size.

The dtype rule, in one place: everything runs in the dtype of the weights, except that norms and RoPE are fp32 inside,
the Markov bias is added to *fp32* base logits (`base_logits(h).float() + bias`; a bf16 sum would round differences
away), and the confidence head is fp32 arithmetic throughout.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from slipstream.errors import CheckpointError
from slipstream.models.block_attend import BlockAttend, ContextKV
from slipstream.models.checkpoint import DrafterSpec, check_fit, expected_tensors, read_checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.dialect_configs import config_from_spec
from slipstream.models.folder import naming
from slipstream.models.headers import TensorHeader
from slipstream.models.layers import PackedLinear, RMSNorm, Rotary
from slipstream.models.weights import copy, destinations
from slipstream.models.write import write_folder
from slipstream.ops.linear import linear
from slipstream.ops.rope import apply_rope

Dtype = torch.dtype | None
Device = torch.device | str | None


class DrafterAttention(nn.Module):
    """Projections of one layer. Block rows use q, k and v; context rows k and v, the tail of the same packed weight."""

    def __init__(self, spec: DrafterSpec, dtype: Dtype = None, device: Device = None) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.qkv_proj = PackedLinear(
            spec.hidden_size, (self.q_rows, kv_rows, kv_rows), spec.attention_bias, dtype, device
        )
        self.o_proj = PackedLinear(self.q_rows, (spec.hidden_size,), spec.attention_bias, dtype, device)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, dtype, device)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, dtype, device)

    def context(self, c: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of context rows: c [R, H] -> k, v [R, nkv, hd]. c does not pass input_layernorm."""
        bias = None if self.qkv_proj.bias is None else self.qkv_proj.bias[self.q_rows :]
        kv = F.linear(c, self.qkv_proj.weight[self.q_rows :], bias).view(-1, 2 * self.num_kv_heads, self.head_dim)
        k, v = kv.chunk(2, dim=1)
        return apply_rope(self.k_norm(k), cos, sin), v

    def forward(self, layer: int, u: Tensor, cos: Tensor, sin: Tensor, attend: BlockAttend) -> Tensor:
        """u [N, n, H], cos and sin [N, n, hd] -> [N, n, H]."""
        nh, nkv = self.num_heads, self.num_kv_heads
        heads = self.qkv_proj(u).view(*u.shape[:2], nh + 2 * nkv, self.head_dim)
        q, k, v = torch.split(heads, [nh, nkv, nkv], dim=2)
        qk = apply_rope(torch.cat((self.q_norm(q), self.k_norm(k)), dim=2), cos, sin)
        q, k = torch.split(qk, [nh, nkv], dim=2)
        out: Tensor = self.o_proj(attend(layer, q, k, v))
        return out


class DrafterMLP(nn.Module):
    """down(silu(gate x) * up x), gate and up packed."""

    def __init__(self, spec: DrafterSpec, dtype: Dtype = None, device: Device = None) -> None:
        super().__init__()
        inner = spec.intermediate_size
        self.gate_up_proj = PackedLinear(spec.hidden_size, (inner, inner), False, dtype, device)
        self.down_proj = PackedLinear(inner, (spec.hidden_size,), False, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class DrafterLayer(nn.Module):
    """One pre-norm layer over block rows."""

    def __init__(self, spec: DrafterSpec, dtype: Dtype = None, device: Device = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, device)
        self.self_attn = DrafterAttention(spec, dtype, device)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, device)
        self.mlp = DrafterMLP(spec, dtype, device)

    def forward(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor, attend: BlockAttend) -> Tensor:
        """x [N, n, H], cos and sin [N, n, hd] -> [N, n, H]."""
        x = x + self.self_attn(layer, self.input_layernorm(x), cos, sin, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MarkovHead(nn.Module):
    """The bias that the previous token puts on the next draft's logits; W1 is read by target ids, W2 speaks draft ids.

    With e = W1[prev], h the draft's hidden row and s the state of the recurrence (0 at the start of a block):
        vanilla   b = W2 e
        gated     b = W2 (sigmoid(Wg [h ; e] + bg) * e)
        rnn       [gate, candidate, output] = J [s ; e ; h] + bJ;  b = W2 tanh(output)
                  s' = sigmoid(gate) * s + (1 - sigmoid(gate)) * tanh(candidate)
    """

    def __init__(self, spec: DrafterSpec, dtype: Dtype = None, device: Device = None) -> None:
        super().__init__()
        rank = spec.markov_rank
        self.kind = spec.markov_head_type
        self.markov_w1 = _table(spec.vocab_size, rank, dtype, device)  # [V, r]
        self.markov_w2 = PackedLinear(rank, (spec.num_draft_logits,), False, dtype, device)  # [Vd, r]
        if self.kind == "gated":
            self.gate_proj = PackedLinear(spec.hidden_size + rank, (rank,), True, dtype, device)
        elif self.kind == "rnn":
            self.joint_proj = PackedLinear(2 * rank + spec.hidden_size, (rank, rank, rank), True, dtype, device)

    def step(self, state: Tensor | None, prev_token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """One draft: prev_token_ids [...] target ids, hidden [..., H], state [..., r] -> bias [..., Vd], next state."""
        e = F.embedding(prev_token_ids, self.markov_w1.weight)
        if self.kind == "vanilla":
            return linear(e, self.markov_w2.weight), None
        if self.kind == "gated":
            return linear(torch.sigmoid(self.gate_proj(torch.cat((hidden, e), -1))) * e, self.markov_w2.weight), None
        state = torch.zeros_like(e) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat((state, e, hidden), -1)).chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        next_state = keep * state + (1 - keep) * torch.tanh(candidate)
        return linear(torch.tanh(output), self.markov_w2.weight), next_state


class ConfidenceHead(nn.Module):
    """Logit of P(draft accepted | drafts before it accepted) from [h ; W1[prev]] or from h alone; fp32 arithmetic."""

    def __init__(self, spec: DrafterSpec, dtype: Dtype = None, device: Device = None) -> None:
        super().__init__()
        width = spec.hidden_size + (spec.markov_rank if spec.confidence_with_markov else 0)
        self.proj = PackedLinear(width, (1,), spec.confidence_bias, dtype, device)

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs [..., H (+ r)] -> [...] fp32."""
        bias = None if self.proj.bias is None else self.proj.bias.float()
        with torch.autocast(inputs.device.type, enabled=False):
            return F.linear(inputs.float(), self.proj.weight.float(), bias).squeeze(-1)


class BlockDrafter(nn.Module):
    """A DFlash or DSpark network. Without own tables, `share(target)` comes before the first forward."""

    draft_token_ids: Tensor  # [Vd] int64, draft id -> target id, ascending
    d2t: Tensor  # [Vd] int64, the same as offsets: target id - draft id

    def __init__(self, spec: DrafterSpec, dtype: Dtype = None, device: Device = None) -> None:
        super().__init__()
        self.spec = spec
        features = len(spec.target_layer_ids) * spec.target_hidden_size
        self.fc = PackedLinear(features, (spec.hidden_size,), False, dtype, device)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, device)
        self.layers = nn.ModuleList(DrafterLayer(spec, dtype, device) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, device)
        self.rotary = Rotary(spec.rope, spec.head_dim, spec.max_position_embeddings, device)
        self.markov_head = MarkovHead(spec, dtype, device) if spec.markov_rank else None
        self.confidence_head = ConfidenceHead(spec, dtype, device) if spec.confidence_head else None
        if spec.own_embedding:
            self.embed_tokens = _table(spec.vocab_size, spec.hidden_size, dtype, device)
        if spec.own_head:
            self.lm_head = PackedLinear(spec.hidden_size, (spec.num_draft_logits,), False, dtype, device)
        self.set_draft_vocabulary(torch.arange(spec.num_draft_logits, device=device))
        # Borrowed from the target: plain attributes, so that they are in no state dict, optimiser or dtype change.
        self._shared_embedding: Tensor | None = None  # [V, H]
        self._shared_head: Tensor | None = None  # [Vd, H]

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @torch.no_grad()
    def init_random(self, seed: int, std: float = 0.02) -> "BlockDrafter":
        """Normal matrices of deviation `std`, unit norms, zero biases; equal for equal seeds on every device."""
        generator = torch.Generator(device="cpu").manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        return self

    def set_draft_vocabulary(self, draft_token_ids: Tensor) -> None:
        """Which target ids [Vd] the draft ids stand for; they must ascend. Call before `share`."""
        ids = draft_token_ids.to(torch.int64)
        self.register_buffer("draft_token_ids", ids, persistent=False)
        self.register_buffer("d2t", ids - torch.arange(len(ids), device=ids.device), persistent=False)

    def share(self, target: Decoder) -> None:
        """Borrow the embedding and the output head of the target where the file has none of its own.

        With a reduced vocabulary the kept head rows are copied once, side by side; otherwise nothing is copied.
        Call it again after moving the drafter or the target to another device.
        """
        check_fit(self.spec, target.spec)
        if not self.spec.own_embedding:
            self._shared_embedding = target.embed_tokens.weight.detach().to(self.device)
        if not self.spec.own_head:
            head = target.head_weight.detach()
            if self.spec.draft_vocab_size is not None:
                head = head[self.draft_token_ids.to(head.device)].contiguous()
            self._shared_head = head.to(self.device)

    @property
    def embedding_weight(self) -> Tensor:
        """[V, H] the file's own table or the target's."""
        table = self.embed_tokens.weight if self.spec.own_embedding else self._shared_embedding
        assert table is not None, "share(target) was not called"
        return table

    @property
    def head_weight(self) -> Tensor:
        """[Vd, H] the file's own head or the kept rows of the target's."""
        head = self.lm_head.weight if self.spec.own_head else self._shared_head
        assert head is not None, "share(target) was not called"
        return head

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [...] target ids -> [..., H] in the drafter's dtype."""
        return F.embedding(token_ids, self.embedding_weight).to(self.dtype)

    def context_kv(self, features: Tensor, positions: Tensor) -> ContextKV:
        """features [R, K * Ht] in tap order, positions [R] -> per layer k, v [R, nkv, hd], row by row independent."""
        c = self.hidden_norm(self.fc(features.to(self.dtype)))
        cos, sin = self.rotary.table(positions)
        return [layer.self_attn.context(c, cos, sin) for layer in self._layers()]

    def hidden(self, embeds: Tensor, positions: Tensor, attend: BlockAttend) -> Tensor:
        """embeds [N, n, H] of [anchor, mask, ...], positions [N, n] -> [N, n, H] after the final norm."""
        cos, sin = self.rotary.table(positions)
        x = embeds
        for index, layer in enumerate(self._layers()):
            x = layer(index, x, cos, sin, attend)
        out: Tensor = self.norm(x)
        return out

    def base_logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] after the final norm -> [..., Vd] in the head's dtype, without the Markov bias."""
        head = self.head_weight
        return linear(hidden.to(head.dtype), head)

    def markov_start(self, hidden: Tensor, anchor_ids: Tensor) -> Tensor | None:
        """State before the first draft: hidden [N, n, H] of all rows, anchor_ids [N] -> [N, r], or None if stateless.

        In the fill-in layout row 0 predicts nothing, yet it advances the recurrence with the anchor as previous token.
        """
        if self.markov_head is None or self.markov_head.kind != "rnn":
            return None
        if self.spec.layout == "anchor_first":
            return hidden.new_zeros(hidden.shape[0], self.spec.markov_rank)
        return self.markov_head.step(None, anchor_ids, hidden[:, 0])[1]

    def markov_step(self, state: Tensor | None, prev_token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Bias of one draft: prev_token_ids [N] target ids, hidden [N, H] of its row -> [N, Vd], next state."""
        assert self.markov_head is not None, "this drafter has no Markov head"
        return self.markov_head.step(state, prev_token_ids, hidden)

    def markov_bias(self, prev_token_ids: Tensor, hidden: Tensor, state: Tensor | None = None) -> Tensor:
        """Teacher-forced biases of whole blocks: prev_token_ids [N, m], hidden [N, m, H] -> [N, m, Vd].

        Rows are either all rows of a block (fill-in: rows 0 and 1 both have the anchor as previous token) or, with
        `state` from `markov_start`, the rows that predict drafts.
        """
        assert self.markov_head is not None, "this drafter has no Markov head"
        if self.markov_head.kind != "rnn":
            return self.markov_head.step(None, prev_token_ids, hidden)[0]
        biases = []
        for row in range(hidden.shape[1]):
            bias, state = self.markov_head.step(state, prev_token_ids[:, row], hidden[:, row])
            biases.append(bias)
        return torch.stack(biases, dim=1)

    def confidence(self, hidden: Tensor, prev_token_ids: Tensor) -> Tensor:
        """hidden [N, d, H] of the rows that predict drafts, prev_token_ids [N, d] target ids -> logits [N, d] fp32."""
        assert self.confidence_head is not None, "this drafter has no confidence head"
        if self.spec.confidence_with_markov:
            assert self.markov_head is not None
            hidden = torch.cat((hidden, F.embedding(prev_token_ids, self.markov_head.markov_w1.weight)), dim=-1)
        return self.confidence_head(hidden)  # type: ignore[no-any-return]

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids [...] -> target ids [...]; the identity for a full vocabulary."""
        return draft_ids if self.spec.draft_vocab_size is None else self.draft_token_ids[draft_ids]

    def _layers(self) -> Sequence[DrafterLayer]:
        return self.layers  # type: ignore[return-value]


def _table(rows: int, width: int, dtype: Dtype, device: Device) -> nn.Embedding:
    """An uninitialised table that can be trained."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width, dtype=dtype, device=device))


# --- files ------------------------------------------------------------------------------------------------------------


def load_drafter(
    folder: Path, target: Decoder, dtype: Dtype = None, device: Device = None, layout: str | None = None
) -> BlockDrafter:
    """Read a drafter folder and let it share the target's embedding and head; frozen, ready to serve.

    dtype and device default to the target's. Own tables that equal the target's are dropped and shared. `layout`
    ("fill_in" or "anchor_first") overrides the file's. Raises CheckpointError naming the field or tensor at fault.
    """
    table = target.embed_tokens.weight
    dtype, device = dtype or table.dtype, device or table.device
    spec, headers = read_checkpoint(Path(folder), layout)
    check_fit(spec, target.spec)
    with ExitStack() as stack, torch.no_grad():
        read = tensor_reader(stack, headers)
        with naming(Path(folder)):
            ids = None if spec.draft_vocab_size is None else draft_token_ids(read("d2t"), spec.vocab_size)
        drafter = BlockDrafter(_without_copies(spec, read, ids, target), dtype, device)
        for name, place in destinations(drafter).items():
            copy(place, read(name), headers[name].name, str(folder))
    if ids is not None:
        drafter.set_draft_vocabulary(ids.to(device))
    drafter.share(target)
    return drafter.requires_grad_(False).eval()


def tensor_reader(stack: ExitStack, headers: Mapping[str, TensorHeader]) -> Callable[[str], Tensor]:
    """A function from canonical name to tensor; every file is opened once, memory-mapped."""
    files = {}
    for path in {header.file for header in headers.values()}:
        try:
            files[path] = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except SafetensorError as error:
            raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error

    def read(name: str) -> Tensor:
        header = headers[name]
        tensor: Tensor = files[header.file].get_tensor(header.name)
        return tensor

    return read


def draft_token_ids(d2t: Tensor, vocab_size: int) -> Tensor:
    """Target ids [Vd] of the draft ids from their offsets."""
    ids = torch.arange(len(d2t)) + d2t.to(torch.int64)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise CheckpointError(
            f"d2t maps to target ids {low}..{high}, outside 0..{vocab_size - 1}; "
            "it must hold offsets (target id - draft id)"
        )
    if not bool((ids.diff() > 0).all()):
        raise CheckpointError("d2t must map to ascending target ids without repetition; it holds offsets, not ids")
    return ids


def _without_copies(
    spec: DrafterSpec, read: Callable[[str], Tensor], ids: Tensor | None, target: Decoder
) -> DrafterSpec:
    """The spec without own tables that only repeat the target's."""
    head = target.head_weight if ids is None else target.head_weight[ids.to(target.head_weight.device)]
    return dataclasses.replace(
        spec,
        own_embedding=spec.own_embedding and not same_table(read("embed_tokens.weight"), target.embed_tokens.weight),
        own_head=spec.own_head and not same_table(read("lm_head.weight"), head),
    )


def same_table(stored: Tensor, table: Tensor) -> bool:
    """Whether a stored table is a copy of the target's, be it in fewer bits or in more than the target is held in."""
    table = table.cpu()
    if stored.shape != table.shape:
        return False
    return torch.equal(stored.to(table.dtype), table) or torch.equal(stored, table.to(stored.dtype))


def save_drafter(
    drafter: BlockDrafter,
    folder: Path,
    extra_config: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int | None = None,
) -> None:
    """Write config.json and the weights; what is shared with the target is not written.

    Each file appears whole or not at all, config.json last. `extra_config` goes under the key "slipstream", which also
    marks the file as ours; its contents are not read back. `max_shard_bytes` splits the weights, see `write_folder`.
    """
    weights = {name: weight.to("cpu", dtype).contiguous() for name, weight in destinations(drafter).items()}
    if drafter.spec.draft_vocab_size is not None:
        weights["d2t"] = drafter.d2t.cpu()
    config = config_from_spec(drafter.spec)
    config |= {"torch_dtype": str(dtype).removeprefix("torch."), "slipstream": dict(extra_config or {})}
    ordered = {name: weights[name] for name in expected_tensors(drafter.spec)}
    write_folder(Path(folder), ordered, config, max_shard_bytes)
