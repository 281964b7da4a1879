"""What a drafter folder says about itself: config.json -> DrafterSpec, in one vocabulary for all dialects.

Dialects: this project's and DeepSpec's flat files (`Qwen3DSparkModel`), z-lab's `DFlashDraftModel` with a
`dflash_config`, SpecForge's `DSparkDraftModel`, and speculators files. All describe one network. A key that would
change the arithmetic and is not understood is refused by name; a value that stands in two places must agree. Nothing
here imports torch or reads a weight; `layout` decides which row predicts which token, `dialect_configs` writes. Called
by `drafters`, `inspect` and `export`, and by the trainer, which builds a DrafterSpec itself.
"""

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import CheckpointError
from slipstream.models.dialects import (
    CAUSAL_KEYS,
    MASK_ID_KEYS,
    MASK_TEXT_KEY,
    dialect_of,
    need,
    refuse_foreign_files,
    refuse_foreign_tensor,
    refuse_other_networks,
    section,
)
from slipstream.models.folder import member, naming, read_json
from slipstream.models.headers import TensorHeader, read_headers
from slipstream.models.layout import Layout, decide_layout
from slipstream.models.rope import RopeSpec
from slipstream.models.spec import FULL, SLIDING, DecoderSpec, most_of

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSpec:
    """A block drafter, whatever dialect its file speaks."""

    algorithm: Literal["dflash", "dspark"]  # dspark: it has a Markov head or a confidence head
    layout: Layout  # fill_in: row k predicts the token at anchor + k; anchor_first: at anchor + k + 1
    layout_reason: str
    block_size: int  # B, rows of a block, anchor included
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    attention_bias: bool = False  # biases on q, k, v and o
    layer_types: tuple[str, ...]  # [num_layers] of FULL and SLIDING
    sliding_window: int | None = None  # W: on a sliding layer a row at p sees p - (W - 1) .. p; a full layer sees all
    target_layer_ids: tuple[int, ...]  # [K] taps: residual stream after these target layers; -1 is the embedding output
    num_target_layers: int | None = None  # depth of the target it was trained for
    target_hidden_size: int
    vocab_size: int  # V of the target
    draft_vocab_size: int | None = None  # Vd if the file drafts in a reduced vocabulary (it then holds d2t)
    mask_token_id: int
    markov_rank: int = 0  # 0: no Markov head
    markov_head_type: str = "vanilla"
    confidence_head: bool = False
    confidence_with_markov: bool = False  # the head also reads W1[previous token]
    confidence_bias: bool = True
    own_embedding: bool = False  # the file holds its own table; otherwise the target's is used
    own_head: bool = False  # the file holds its own output head; otherwise the target's is used
    dialect: str = field(default="slipstream", compare=False)  # whose way of writing the file has; says nothing else

    def __post_init__(self) -> None:
        _check_spec(self)

    @property
    def max_draft_tokens(self) -> int:
        """Drafts of a whole block: row 0 of a fill-in block predicts nothing."""
        return self.block_size - 1 if self.layout == "fill_in" else self.block_size

    @property
    def num_draft_logits(self) -> int:
        """Vd, or V where the vocabulary is not reduced."""
        return self.draft_vocab_size or self.vocab_size

    def rows(self, num_drafts: int) -> int:
        """Block rows that must run to get this many drafts."""
        return num_drafts + 1 if self.layout == "fill_in" else num_drafts

    def draft_rows(self, num_drafts: int) -> slice:
        """The rows that predict drafts 0 .. num_drafts - 1, in order."""
        return slice(1, num_drafts + 1) if self.layout == "fill_in" else slice(0, num_drafts)

    def window(self, layer: int) -> int | None:
        """The window of a sliding layer, None for a full one."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


def _check_spec(spec: DrafterSpec) -> None:
    """Raise on a spec that contradicts itself."""
    heads, kv_heads, ids = spec.num_heads, spec.num_kv_heads, spec.target_layer_ids
    need(spec.block_size >= 2, f"block_size {spec.block_size} leaves nothing to draft; it must be at least 2")
    need(heads % kv_heads == 0, f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    need(spec.head_dim % 2 == 0, f"head_dim {spec.head_dim} is odd; RoPE needs pairs")
    need(
        0 <= spec.mask_token_id < spec.vocab_size,
        f"mask_token_id {spec.mask_token_id} is outside the embedding table of {spec.vocab_size} rows; "
        "set it to the id that the drafter was trained with",
    )
    need(
        (spec.draft_vocab_size or 1) <= spec.vocab_size,
        f"draft_vocab_size {spec.draft_vocab_size} exceeds vocab_size {spec.vocab_size}",
    )
    need(
        spec.markov_head_type in MARKOV_HEAD_TYPES,
        f"markov_head_type {spec.markov_head_type!r} is unknown; known: {', '.join(MARKOV_HEAD_TYPES)}",
    )
    need(
        spec.markov_rank > 0 or not spec.confidence_with_markov,
        "confidence_head_with_markov is true but markov_rank is 0; correct one of them",
    )
    need(len(ids) > 0, "target_layer_ids is empty; a block drafter reads at least one target layer")
    need(
        list(ids) == sorted(set(ids)) and ids[0] >= -1,
        f"target_layer_ids {list(ids)} must ascend from -1 (embedding output) or 0",
    )
    need(
        spec.num_target_layers is None or ids[-1] < spec.num_target_layers,
        f"target_layer_ids {list(ids)} reaches past the target's {spec.num_target_layers} layers (num_target_layers), "
        "which count from 0",
    )
    need(
        len(spec.layer_types) == spec.num_layers,
        f"layer_types names {len(spec.layer_types)} layers, num_hidden_layers is {spec.num_layers}",
    )
    need(
        SLIDING not in spec.layer_types or (spec.sliding_window or 0) >= 1,
        f"layer_types names {SLIDING}, so sliding_window must be at least 1, found {spec.sliding_window}",
    )


def check_fit(spec: DrafterSpec, target: DecoderSpec) -> None:
    """Raise unless the drafter can serve this target."""

    def fits(ok: bool, message: str) -> None:
        need(ok, f"the drafter does not fit the target: {message}; use a drafter made for this target")

    fits(
        spec.target_hidden_size == target.hidden_size,
        f"draft hidden size: it reads target features of width {spec.target_hidden_size}, "
        f"the target's hidden size is {target.hidden_size}",
    )
    fits(
        spec.hidden_size == target.hidden_size or (spec.own_embedding and spec.own_head),
        f"draft hidden size {spec.hidden_size} is not the target's {target.hidden_size}, "
        "and it has no embedding and head of its own",
    )
    fits(spec.vocab_size == target.vocab_size, f"vocab_size {spec.vocab_size} is not the target's {target.vocab_size}")
    fits(
        spec.target_layer_ids[-1] < target.num_layers,
        f"target_layer_ids {list(spec.target_layer_ids)} reaches past the target's {target.num_layers} layers, "
        "which count from 0",
    )
    fits(
        spec.num_target_layers in (None, target.num_layers),
        f"num_target_layers is {spec.num_target_layers}, the target has {target.num_layers}",
    )


# --- reading ----------------------------------------------------------------------------------------------------------

# What a speculators file leaves out of transformer_layer_config, which is saved as a difference from class defaults.
_QWEN3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip


def read_checkpoint(folder: Path, layout: str | None = None) -> tuple[DrafterSpec, dict[str, TensorHeader]]:
    """A drafter folder's spec and its tensors by canonical name, checked; `layout` overrides what the file says."""
    if not folder.is_dir():
        raise CheckpointError(f"drafter folder {folder} does not exist")
    config = read_json(member(folder, "config.json"))
    with naming(folder):
        refuse_other_networks(config)
        refuse_foreign_files(folder)
        headers = read_headers(folder)
        spec = with_tensors(spec_from_config(config, layout), headers)
        _check_tied(config, spec)
        return spec, check_tensors(spec, headers)


def _check_tied(config: Mapping[str, Any], spec: DrafterSpec) -> None:
    """A tied file that stores its table alone is read in two ways: transformers takes it as head, vLLM the target's."""
    tied = {**config, **section(config, "transformer_layer_config")}.get("tie_word_embeddings")
    need(
        not tied or not spec.own_embedding or spec.own_head,
        "tie_word_embeddings is true and the file holds embed_tokens.weight but no lm_head.weight: store lm_head.weight, "
        "or set tie_word_embeddings to false if the head is the target's",
    )


def read_spec(folder: Path, layout: str | None = None) -> DrafterSpec:
    """The spec of a drafter folder; `layout` overrides what the file says."""
    return read_checkpoint(folder, layout)[0]


def spec_from_config(config: Mapping[str, Any], layout: str | None = None) -> DrafterSpec:
    """The spec that a drafter's config.json describes, before its tensors are looked at."""
    refuse_other_networks(config)
    kind = config.get("speculators_model_type")  # None in every other dialect
    get = _Fields({**config, **_merged_nested(config)})
    body = _speculators_body(config) if kind else get
    block_size = get.count("block_size", minimum=2, default=8 if kind else None)
    decision = decide_layout(config, block_size, layout)
    num_layers = body.count("num_hidden_layers", minimum=1)
    hidden_size = body.count("hidden_size", minimum=1)
    vocab_size = body.count("vocab_size", minimum=1)
    num_heads = body.count("num_attention_heads", minimum=1)
    draft_vocab_size = get.optional_count("draft_vocab_size")
    markov_rank = get.count("markov_rank", minimum=0, default=256 if kind == "dspark" else 0)
    has_weight = get.number("confidence_head_alpha", default=0.0) > 0  # in the loss: SpecForge's way of saying it
    confidence = get.flag("enable_confidence_head", default=kind == "dspark" or has_weight)
    layer_types, window = _windows(config, body, num_layers)
    return DrafterSpec(
        algorithm="dspark" if markov_rank or confidence else "dflash",
        layout=decision.layout,
        layout_reason=decision.reason,
        block_size=block_size,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=body.count("intermediate_size", minimum=1),
        num_heads=num_heads,
        num_kv_heads=body.count("num_key_value_heads", minimum=1, default=num_heads),
        head_dim=body.count("head_dim", minimum=2, default=hidden_size // num_heads),
        rms_norm_eps=body.above_zero("rms_norm_eps", default=1e-6),
        rope=_rope(body, set(layer_types)),
        max_position_embeddings=body.count("max_position_embeddings", minimum=1, default=32768),
        attention_bias=body.flag("attention_bias", default=False),
        layer_types=layer_types,
        sliding_window=window,
        target_layer_ids=_target_layer_ids(config, get, num_layers),
        num_target_layers=get.optional_count("num_target_layers"),
        target_hidden_size=get.optional_count("target_hidden_size") or hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=None if draft_vocab_size == vocab_size else draft_vocab_size,
        mask_token_id=_mask_token_id(get),
        markov_rank=markov_rank,
        markov_head_type=str(get.value("markov_head_type", "vanilla")),
        confidence_head=confidence,
        confidence_with_markov=confidence and get.flag("confidence_head_with_markov", default=kind == "dspark"),
        dialect=dialect_of(config),
    )


class _Fields:
    """Typed reads of a config that name the field when its value is not what it should be."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def value(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, minimum: int, default: int | None = None) -> int:
        value = self.value(key, default)
        need(value is not None, f"config.json lacks {key}; add it")
        most = most_of(key)
        ok = type(value) is int and minimum <= value <= most
        need(ok, f"{key} is {value!r}; it must be a whole number from {minimum} to {most}")
        return int(value)

    def optional_count(self, key: str) -> int | None:
        return None if self.value(key) is None else self.count(key, minimum=1)

    def number(self, key: str, default: float) -> float:
        value = self.value(key, default)
        ok = type(value) in (int, float) and abs(value) <= sys.float_info.max
        need(ok, f"{key} is {value!r}; it must be a finite number")
        return float(value)

    def above_zero(self, key: str, default: float) -> float:
        value = self.number(key, default)
        need(value > 0, f"{key} is {self.value(key)!r}; it must be above 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key, default)
        need(isinstance(value, bool), f"{key} is {value!r}; it must be true or false")
        return bool(value)


def _merged_nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """dflash_config without its nulls; a value that differs from the top level's is an error."""
    nested = {key: value for key, value in section(config, "dflash_config").items() if value is not None}
    for key, value in nested.items():
        outer = config.get(key)
        need(outer in (None, value), f"{key} is {outer!r} at the top level and {value!r} in dflash_config")
    return nested


def _speculators_body(config: Mapping[str, Any]) -> _Fields:
    """transformer_layer_config over the defaults of its class; what stands at the top level as well must agree."""
    body = {**_QWEN3_DEFAULTS, **section(config, "transformer_layer_config")}
    for key in sorted(body.keys() & config.keys() & (_QWEN3_DEFAULTS.keys() | {"layer_types", "sliding_window"})):
        need(
            config[key] in (None, body[key]),
            f"{key} is {config[key]!r} at the top level and {body[key]!r} in transformer_layer_config or its defaults",
        )
    algorithm, kind = section(config, "speculators_config").get("algorithm"), config["speculators_model_type"]
    need(
        algorithm in (None, kind),
        f"speculators_model_type is {kind!r}, speculators_config.algorithm {algorithm!r}; correct one of them",
    )
    return _Fields(body)


def _mask_token_id(get: _Fields) -> int:
    """The id under any of its names; a text would need the target's tokenizer, so it is not enough."""
    given = {key: get.value(key) for key in MASK_ID_KEYS if get.value(key) is not None}
    texts = [value for value in (*given.values(), get.value(MASK_TEXT_KEY)) if isinstance(value, str)]
    need(
        not texts or any(type(value) is int for value in given.values()),
        f"the mask token is given as the text {texts and texts[0]!r}; set mask_token_id to the id that the target's "
        "tokenizer gives to it",
    )
    named = ", ".join(f"{key} {value!r}" for key, value in given.items())
    need(
        all(value == next(iter(given.values())) for value in given.values()), f"the mask ids differ: {named}; keep one"
    )
    return get.count(next(iter(given), "mask_token_id"), minimum=0)


def _rope(body: _Fields, layer_types: set[str]) -> RopeSpec:
    """RopeSpec reads the keys; that their values are of a sensible kind is checked here."""
    for key in ("rope_theta", "partial_rotary_factor"):
        body.above_zero(key, default=1.0)
    values = {**body.values, "max_position_embeddings": body.value("max_position_embeddings", 32768)}
    by_type = body.value("rope_parameters")
    if isinstance(by_type, dict) and by_type.keys() <= {FULL, SLIDING} and len(layer_types & by_type.keys()) == 1:
        values["rope_parameters"] = by_type[next(iter(layer_types))]  # only one kind of layer is there
    try:
        return RopeSpec.from_hf(values)
    except (TypeError, ValueError, ArithmeticError) as error:
        given = body.value("rope_scaling") or body.value("rope_parameters")
        raise CheckpointError(f"RoPE parameters {given!r} are malformed: {error}") from error


def _windows(config: Mapping[str, Any], body: _Fields, num_layers: int) -> tuple[tuple[str, ...], int | None]:
    """Layer types and window. In the block, sliding layers are causal, full ones are not; other files are refused."""
    given = body.value("layer_types") or _layer_types_by_rule(body, num_layers)
    ok = isinstance(given, list) and all(isinstance(kind, str) for kind in given)
    need(ok, f"layer_types is {given!r}; it must be a list of names")
    types = tuple(given)
    unknown = sorted(set(types) - {FULL, SLIDING})
    need(not unknown, f"layer_types {unknown} are not supported (known: {FULL}, {SLIDING})")
    nested = section(config, "dflash_config")
    for place, values in (("", config), ("dflash_config.", nested)):
        for key in CAUSAL_KEYS:  # such a key speaks of all layers at once
            need(FULL not in types or not values.get(key), f"{place}{key}=true with full layers is not supported")
            off = SLIDING in types and values.get(key) is False
            need(not off, f"{place}{key}=false with sliding layers is not supported")
    if SLIDING not in types:
        need(not nested.get("use_swa"), "dflash_config.use_swa without sliding layers is not supported")
        return types, None
    need(not config.get("sliding_window_non_causal"), "sliding_window_non_causal=true is not supported")
    window = nested.get("swa_window_size") or body.value("sliding_window")
    ok = type(window) is int and window > 0
    need(ok, f"layer_types names {SLIDING}, so sliding_window must be a whole number above 0, found {window!r}")
    return types, window


def _layer_types_by_rule(body: _Fields, num_layers: int) -> list[str]:
    """Qwen's rule for files that name no layer types: with windows in use, layers from max_window_layers on slide."""
    slides = body.flag("use_sliding_window", default=False)
    first = body.count("max_window_layers", minimum=0, default=28) if slides else num_layers
    return [FULL if layer < first else SLIDING for layer in range(num_layers)]


def _target_layer_ids(config: Mapping[str, Any], get: _Fields, num_layers: int) -> tuple[int, ...]:
    ids, twice, shift = get.value("target_layer_ids"), None, 0
    if config.get("speculators_model_type"):
        # Speculators counts entries of hidden_states, where 0 is the embedding output: one more than layers from 0.
        twice, ids, shift = ids, get.value("aux_hidden_state_layer_ids"), 1
        need(ids is not None, "config.json lacks aux_hidden_state_layer_ids; add it")
    if ids is None:
        return default_target_layer_ids(get.count("num_target_layers", minimum=1), num_layers)
    ok = isinstance(ids, list) and all(type(one) is int for one in ids)
    need(ok, f"target_layer_ids is {ids!r}; it must be a list of layer numbers")
    layers = [one - shift for one in ids]
    need(twice in (None, layers), f"target_layer_ids is {twice!r}, aux_hidden_state_layer_ids less one is {layers}")
    return tuple(layers)


def default_target_layer_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """z-lab's rule for files that name no layers: evenly spaced from 1 to L - 3, rounded half to even."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_layers - 1)
    return tuple(round(1 + layer * step) for layer in range(num_layers))


# --- tensors ----------------------------------------------------------------------------------------------------------

_PREFIXES = {
    "model.": "",
    "logit_head.": "",
    "midlayer.": "layers.0.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}
_TRAINING_ONLY, _VERIFIER = "t2d", "verifier_"  # left over in speculators files: masks, copies of the target's tensors


def canonical_name(name: str) -> str:
    """A tensor name of any dialect in the spelling used here, which is z-lab's."""
    for prefix, replacement in _PREFIXES.items():
        if name.startswith(prefix):
            name = replacement + name.removeprefix(prefix)
    return "d2t" if name == "draft_id_to_target_id" else name


def canonical_names(headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """The tensors by canonical name, without those that only training needs; two spellings of one name are an error."""
    names: dict[str, TensorHeader] = {}
    for name, header in headers.items():
        canonical = canonical_name(name)
        if canonical == _TRAINING_ONLY or canonical.startswith(_VERIFIER):
            continue
        refuse_foreign_tensor(name)
        other = names.get(canonical)
        need(other is None, f"tensors {other and other.name} and {name} are the same weight; remove one")
        names[canonical] = header
    return names


def with_tensors(spec: DrafterSpec, headers: Mapping[str, TensorHeader]) -> DrafterSpec:
    """The spec completed by what only tensors tell: own embedding, own head, a bias, a reduced vocabulary."""
    by_name = canonical_names(headers)
    draft_vocab_size = spec.draft_vocab_size
    if "d2t" in by_name:
        draft_vocab_size = draft_vocab_size or by_name["d2t"].num_values
        need(draft_vocab_size > 0, "tensor d2t is empty, so nothing can be drafted; fetch the drafter again")
    need(
        draft_vocab_size is None or "d2t" in by_name,
        f"tensor d2t is missing, which maps the {draft_vocab_size} draft ids (draft_vocab_size) to target ids",
    )
    return dataclasses.replace(
        spec,
        draft_vocab_size=draft_vocab_size,
        own_embedding="embed_tokens.weight" in by_name,
        own_head="lm_head.weight" in by_name,
        confidence_bias="confidence_head.proj.bias" in by_name or not spec.confidence_head,
    )


def expected_tensors(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a file of this spec holds, in its order of writing."""
    hidden, rank, features = spec.hidden_size, spec.markov_rank, len(spec.target_layer_ids) * spec.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, features),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(spec.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_tensors(spec).items()}
    if rank:
        shapes["markov_head.markov_w1.weight"] = (spec.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (spec.num_draft_logits, rank)
    if rank and spec.markov_head_type == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
    if rank and spec.markov_head_type == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if spec.confidence_head:
        shapes["confidence_head.proj.weight"] = (1, hidden + (rank if spec.confidence_with_markov else 0))
    if spec.confidence_head and spec.confidence_bias:
        shapes["confidence_head.proj.bias"] = (1,)
    if spec.own_embedding:
        shapes["embed_tokens.weight"] = (spec.vocab_size, hidden)
    if spec.own_head:
        shapes["lm_head.weight"] = (spec.num_draft_logits, hidden)
    if spec.draft_vocab_size is not None:
        shapes["d2t"] = (spec.draft_vocab_size,)
    return shapes


def _layer_tensors(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    hidden, wide = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    projections = {"q": (q_rows, hidden), "k": (kv_rows, hidden), "v": (kv_rows, hidden), "o": (hidden, q_rows)}
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes |= {f"self_attn.{name}_proj.weight": shape for name, shape in projections.items()}
    if spec.attention_bias:
        shapes |= {f"self_attn.{name}_proj.bias": shape[:1] for name, shape in projections.items()}
    shapes |= {"self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,)}
    shapes |= {"mlp.gate_proj.weight": (wide, hidden), "mlp.up_proj.weight": (wide, hidden)}
    return shapes | {"mlp.down_proj.weight": (hidden, wide)}


def check_tensors(spec: DrafterSpec, headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Raise unless the file holds exactly the tensors of the spec; returns them by canonical name."""
    by_name, expected = canonical_names(headers), expected_tensors(spec)
    for name, shape in expected.items():
        need(name in by_name, f"tensor {name} {list(shape)} is missing from the drafter, its config.json asks for it")
        header = by_name[name]
        need(header.shape == shape, _shape_message(spec, header, name, shape))
        number = ("I64", "I32") if name == "d2t" else ("BF16", "F16", "F32")
        need(header.dtype in number, f"tensor {header.name} has type {header.dtype}; supported: {', '.join(number)}")
    surplus = [header.name for name, header in by_name.items() if name not in expected]
    need(
        not surplus,
        f"tensor {surplus and surplus[0]} is surplus ({len(surplus)} in all): nothing in config.json asks for it; "
        "correct config.json, or remove the tensor",
    )
    return by_name


def _shape_message(spec: DrafterSpec, header: TensorHeader, name: str, shape: tuple[int, ...]) -> str:
    message = f"tensor {header.name} has shape {list(header.shape)}, config.json asks for {list(shape)}"
    if name == "fc.weight":
        message += (
            f": its columns are {len(spec.target_layer_ids)} target layers x target hidden size "
            f"{spec.target_hidden_size}; correct target_layer_ids or the hidden size"
        )
    return message
