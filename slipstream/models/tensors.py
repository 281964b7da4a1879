"""Which tensors a target has, by name and shape, and whether those of a file are the same: every one, and no other.

Told from the spec and from headers alone, before memory is taken for a single weight. Torch-free; `weights` and
`inspect` call it for targets, and whoever fills a network while tensors stream in.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from slipstream.errors import CheckpointError
from slipstream.models.spec import DecoderSpec

Shape = tuple[int, ...]
TIED = {"lm_head.weight": "embed_tokens.weight"}  # what a tied model may store twice
FLOATS = ("F64", "F32", "F16", "BF16")
# Tables that old files store although they follow from config.json.
_DERIVED = ("rotary_emb.inv_freq",)
_NAMES_SHOWN = 3


class Stored(NamedTuple):
    """A tensor as a file's header has it."""

    name: str
    shape: Shape
    dtype: str  # in the spelling of safetensors, or of GGUF


class Matching:
    """Tensors of a file, as they come, against the places that they are for. All errors are CheckpointErrors."""

    def __init__(self, places: Mapping[str, Shape], source: str, aliases: Mapping[str, str] | None = None) -> None:
        self._places, self._source, self._aliases = places, source, aliases or {}
        self._missing = set(places)
        self._surplus: list[str] = []

    def place(self, given: str, shape: Shape) -> str | None:
        """The place of a tensor, that of its alias; None where there is none for it, which `finish` will say."""
        name = bare_name(given)
        if name.endswith(_DERIVED):
            return None
        name = self._aliases.get(name, name)
        if name not in self._places:
            self._surplus.append(given)
            return None
        if shape != self._places[name]:
            raise CheckpointError(
                f"{self._source}: tensor {given} has shape {list(shape)}, the config asks for "
                f"{list(self._places[name])}; the weights do not belong to this config.json"
            )
        if not self.is_alias(given):
            if name not in self._missing:
                raise CheckpointError(
                    f"{self._source}: tensor {given} is stored twice (as {name} with and without a prefix); remove one"
                )
            self._missing.discard(name)
        return name

    def is_alias(self, given: str) -> bool:
        return bare_name(given) in self._aliases

    def finish(self) -> None:
        """All have come: raise for those that are too many or too few."""
        if self._surplus:
            raise CheckpointError(
                f"{self._source}: {_some(self._surplus)} not used by this network; the weights do not belong to this "
                "config.json, or hold layers that are not supported"
            )
        if self._missing:
            names = sorted(self._missing)
            raise CheckpointError(f"{self._source}: {_some(names)} missing; {_missing_remedy(names)}")


def check_target(spec: DecoderSpec, stored: Iterable[Stored], source: str) -> None:
    """Raise unless these are exactly the tensors of such a target, in floats."""
    matching = Matching(target_tensors(spec), source, TIED if spec.tie_word_embeddings else None)
    for tensor in stored:
        if matching.place(tensor.name, tensor.shape) is not None and tensor.dtype not in FLOATS:
            raise CheckpointError(
                f"{source}: tensor {tensor.name} is stored as {tensor.dtype}, which cannot be read as floats; use a "
                "checkpoint that is not quantised"
            )
    matching.finish()


def target_tensors(spec: DecoderSpec) -> dict[str, Shape]:
    """Name and shape of every tensor of a target, as files have them but for a leading "model."."""
    hidden = spec.hidden_size
    shapes: dict[str, Shape] = {"embed_tokens.weight": (spec.vocab_size, hidden)}
    layer = _layer_tensors(spec)
    for index in range(spec.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["norm.weight"] = (hidden,)
    return shapes if spec.tie_word_embeddings else shapes | {"lm_head.weight": (spec.vocab_size, hidden)}


def _layer_tensors(spec: DecoderSpec) -> dict[str, Shape]:
    hidden, inner, q, kv = spec.hidden_size, spec.intermediate_size, spec.num_q_dims, spec.num_kv_dims
    products = {
        "self_attn.q_proj": (q, hidden, spec.qkv_bias), "self_attn.k_proj": (kv, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv, hidden, spec.qkv_bias), "self_attn.o_proj": (hidden, q, spec.o_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias), "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }  # fmt: skip
    shapes: dict[str, Shape] = {f"{name}.weight": (rows, columns) for name, (rows, columns, _) in products.items()}
    shapes |= {f"{name}.bias": (rows,) for name, (rows, _, has_bias) in products.items() if has_bias}
    shapes |= {f"{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
    heads = ("q_norm", "k_norm") if spec.qk_norm else ()
    return shapes | {f"self_attn.{norm}.weight": (spec.head_dim,) for norm in heads}


def bare_name(name: str) -> str:
    """A tensor's name without the "model." that some files put before it."""
    while name.startswith("model."):
        name = name.removeprefix("model.")
    return name


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    if len(names) == 1:
        return f"tensor {shown} is"
    return f"tensors {shown}{f' and {len(names) - _NAMES_SHOWN} more' if len(names) > _NAMES_SHOWN else ''} are"


def _missing_remedy(missing: list[str]) -> str:
    if missing == ["lm_head.weight"]:
        return "set tie_word_embeddings to true if the embedding is the output head, else fetch the files again"
    return "the files are incomplete or do not belong to this config.json; fetch them again"
