"""Filling networks from files: every tensor of the file is used, every tensor of the network is found, or it fails.

`load_decoder` reads a Hugging Face folder or a GGUF file; `fill` is shared with the drafters' loader. Tensors stream
one at a time from the file into parameters that already have their final type and place, so the peak is the model
plus one tensor. Pickle files are never opened. Knows nothing of requests or caches; called by `LLM`, the trainer and
`inspect`.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn

from slipstream.errors import CapacityError, CheckpointError
from slipstream.models.decoder import Decoder
from slipstream.models.gguf import GGUFFile
from slipstream.models.headers import read_json, weight_files
from slipstream.models.layers import PackedLinear
from slipstream.models.spec import DecoderSpec, token_ids

# A packed layer and the layers of the file whose rows it holds, in order (the rows of each are `PackedLinear.parts`).
PACKING: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# Tables that old files store although they follow from config.json.
_DERIVED = ("rotary_emb.inv_freq",)
_NAMES_SHOWN = 3


def read_spec(path: Path) -> DecoderSpec:
    """The shape of the target in a Hugging Face folder or a GGUF file, without its weights."""
    if path.is_file():
        with GGUFFile(path) as file:
            return file.spec()
    config = read_json(path / "config.json")
    generation = path / "generation_config.json"
    if generation.is_file():  # its list of end tokens is the complete one; config.json often names only the first
        both = token_ids(config.get("eos_token_id")) + token_ids(read_json(generation).get("eos_token_id"))
        config = {**config, "eos_token_id": list(dict.fromkeys(both))}
    return DecoderSpec.from_hf(config)


def load_decoder(path: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    """The target in `path`, frozen and in evaluation mode. Raises CheckpointError naming the tensor at fault."""
    path = Path(path)
    if path.is_file():
        with GGUFFile(path) as file:
            decoder = empty_decoder(file.spec(), dtype, device)
            fill(decoder, _from_numpy(file), source=str(path))
        return decoder
    decoder = empty_decoder(read_spec(path), dtype, device)
    aliases = {"lm_head.weight": "embed_tokens.weight"} if decoder.spec.tie_word_embeddings else {}
    fill(decoder, read_tensors(path), source=str(path), aliases=aliases)
    return decoder


def empty_decoder(spec: DecoderSpec, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """A target whose weights are not set yet. Raises CapacityError where it does not fit in memory."""
    try:
        return Decoder(spec, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:  # torch's lack of memory is a RuntimeError
        raise CapacityError(f"the target's weights do not fit in memory: {str(error).splitlines()[0]}") from error


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every tensor in a folder's safetensors files, one at a time, on the CPU."""
    for path in weight_files(folder):
        try:
            with safetensors.safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    yield name, file.get_tensor(name)
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error


def fill(
    module: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    source: str,
    packing: Mapping[str, tuple[str, ...]] = PACKING,
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Copy `tensors` into the parameters and persistent buffers of `module`, converting type and device.

    Names match those of `module` with packed layers taken apart; a leading "model." is dropped. A tensor under a name
    of `aliases` must equal the one that it is an alias of. Raises CheckpointError for a tensor that is missing,
    surplus, doubled, of another shape, or not of floats where floats are expected.
    """
    places = destinations(module, packing)
    missing = set(places)
    copies: dict[str, tuple[str, Tensor]] = {}
    surplus: list[str] = []
    for given, value in tensors:
        name = bare_name(given)
        if name.endswith(_DERIVED):
            continue
        if aliases and name in aliases:
            copies[given] = (aliases[name], value)
        elif name not in places:
            surplus.append(given)
        elif name not in missing:
            raise CheckpointError(f"{source}: tensor {given} is stored twice (as {name} with and without a prefix)")
        else:
            _copy(places[name], value, given, source)
            missing.discard(name)
    if surplus:
        raise CheckpointError(
            f"{source}: {_some(surplus)} not used by this network; the weights do not belong to this config.json, "
            "or hold layers that are not supported"
        )
    if missing:
        raise CheckpointError(f"{source}: {_some(sorted(missing))} missing; {_missing_remedy(missing)}")
    for given, (name, value) in copies.items():
        if value.shape != places[name].shape or not torch.equal(value.to(places[name]), places[name]):
            raise CheckpointError(
                f"{source}: tensor {given} differs from {name}, but the config says that they are tied; "
                "set tie_word_embeddings to false, or remove the tensor"
            )


def destinations(module: nn.Module, packing: Mapping[str, tuple[str, ...]] = PACKING) -> dict[str, Tensor]:
    """Where each tensor of a file goes: names as files spell them, values as views into the module's own memory."""
    places: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        layer_name, _, kind = name.rpartition(".")
        parent, _, leaf = layer_name.rpartition(".")
        if leaf not in packing:
            places[name] = tensor.detach()
            continue
        layer = module.get_submodule(layer_name)
        assert isinstance(layer, PackedLinear), f"{layer_name} is in the packing table, but is a {type(layer).__name__}"
        prefix = f"{parent}." if parent else ""
        rows = tensor.detach().split_with_sizes(layer.parts)
        places |= {f"{prefix}{part}.{kind}": view for part, view in zip(packing[leaf], rows, strict=True)}
    return places


def bare_name(name: str) -> str:
    """A tensor's name without the "model." that some files put before it."""
    while name.startswith("model."):
        name = name.removeprefix("model.")
    return name


@torch.no_grad()
def _copy(place: Tensor, value: Tensor, name: str, source: str) -> None:
    if value.shape != place.shape:
        raise CheckpointError(
            f"{source}: tensor {name} has shape {list(value.shape)}, the config asks for {list(place.shape)}; "
            "the weights do not belong to this config.json"
        )
    if place.is_floating_point() != value.is_floating_point() or value.element_size() == 1:
        raise CheckpointError(
            f"{source}: tensor {name} is stored as {str(value.dtype).removeprefix('torch.')}, "
            f"which cannot be read as {str(place.dtype).removeprefix('torch.')}; use a checkpoint that is not quantised"
        )
    place.copy_(value)


def _from_numpy(file: GGUFFile) -> Iterator[tuple[str, Tensor]]:
    for name, values in file.tensors():
        yield name, torch.from_numpy(values)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    if len(names) == 1:
        return f"tensor {shown} is"
    return f"tensors {shown}{f' and {len(names) - _NAMES_SHOWN} more' if len(names) > _NAMES_SHOWN else ''} are"


def _missing_remedy(missing: set[str]) -> str:
    if missing == {"lm_head.weight"}:
        return "set tie_word_embeddings to true if the embedding is the output head, else fetch the files again"
    return "the files are incomplete or do not belong to this config.json; fetch them again"
