"""Filling networks from files: every tensor of the file is used, every tensor of the network is found, or it fails.

`load_decoder` reads a Hugging Face folder or a GGUF file; `fill` takes any network. Names, shapes and types are
compared with the headers before memory is taken for weights. Tensors then stream one at a time from the file into
parameters that already have their final type and place, so the peak is the model plus one tensor; one that holds NaN
or infinity is refused by name. Pickle files are never opened. Knows nothing of requests or caches; called by `load`,
the trainer and `inspect`.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn

from slipstream.errors import CapacityError, CheckpointError
from slipstream.models.decoder import Decoder
from slipstream.models.folder import member, naming, read_json
from slipstream.models.gguf import GGUFFile
from slipstream.models.headers import read_headers, weight_files
from slipstream.models.layers import PackedLinear
from slipstream.models.spec import DecoderSpec, token_ids
from slipstream.models.tensors import TIED, Matching, Stored, check_target

# A packed layer and the layers of the file whose rows it holds, in order (the rows of each are `PackedLinear.parts`).
PACKING: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def read_spec(path: Path) -> DecoderSpec:
    """The shape of the target in a Hugging Face folder or a GGUF file, without its weights."""
    if path.is_file():
        with GGUFFile(path) as file:
            return file.spec()
    config = read_json(member(path, "config.json"))
    generation = member(path, "generation_config.json")
    with naming(path):
        if generation.is_file():  # its list of end tokens is the complete one; config.json often names only the first
            both = token_ids(config.get("eos_token_id")) + token_ids(read_json(generation).get("eos_token_id"))
            config = {**config, "eos_token_id": list(dict.fromkeys(both))}
        return DecoderSpec.from_hf(config)


def load_decoder(path: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    """The target in `path`, frozen and in evaluation mode. Raises CheckpointError naming the tensor at fault."""
    path = Path(path)
    if path.is_file():
        with GGUFFile(path) as file:
            spec = file.spec()
            check_target(spec, file.stored(), str(path))
            decoder = empty_decoder(spec, dtype, device)
            fill(decoder, _from_numpy(file), source=str(path))
        return decoder
    spec = read_spec(path)
    headers = read_headers(path).values()
    check_target(spec, (Stored(header.name, header.shape, header.dtype) for header in headers), str(path))
    decoder = empty_decoder(spec, dtype, device)
    fill(decoder, read_tensors(path), source=str(path), aliases=TIED if spec.tie_word_embeddings else None)
    return decoder


def empty_decoder(spec: DecoderSpec, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """A target whose weights are not set yet. Raises CapacityError where torch cannot make it, or OutOfMemoryError."""
    try:
        return Decoder(spec, dtype=dtype, device=device)
    except torch.OutOfMemoryError:  # told by who knows what the target is called
        raise
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
    surplus, doubled, of another shape, not finite, or not of floats where floats are expected.
    """
    places = destinations(module, packing)
    matching = Matching({name: tuple(place.shape) for name, place in places.items()}, source, aliases)
    copies: dict[str, tuple[str, Tensor]] = {}
    for given, value in tensors:
        name = matching.place(given, tuple(value.shape))
        if name is None:
            continue
        if matching.is_alias(given):
            copies[given] = (name, value)
        else:
            copy(places[name], value, given, source)
    matching.finish()
    for given, (name, value) in copies.items():
        if not torch.equal(value.to(places[name]), places[name]):
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


@torch.no_grad()
def copy(place: Tensor, value: Tensor, name: str, source: str) -> None:
    """Fill `place` of the same shape. CheckpointError for another kind of number, or one that is not finite."""
    if place.is_floating_point() != value.is_floating_point() or value.element_size() == 1:
        raise CheckpointError(
            f"{source}: tensor {name} is stored as {str(value.dtype).removeprefix('torch.')}, "
            f"which cannot be read as {str(place.dtype).removeprefix('torch.')}; use a checkpoint that is not quantised"
        )
    place.copy_(value)
    if place.is_floating_point() and place.numel() and not is_finite(place):
        raise CheckpointError(f"{source}: tensor {name} {_not_finite(place, value)}")


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity: one pass, of a speed near that of memory, and no copy."""
    low, high = torch.aminmax(tensor)  # NaN, if there is one
    return bool(low.isfinite() & high.isfinite())


def _not_finite(place: Tensor, value: Tensor) -> str:
    if is_finite(value):
        largest = float(value.abs().amax())
        return (
            f"holds {largest:g}, which is more than {str(place.dtype).removeprefix('torch.')} can hold; "
            "load the model in another dtype"
        )
    count = int((~value.isfinite()).sum())
    return f"holds {count} values that are not finite (NaN or infinite): the file is damaged; fetch it again"


def _from_numpy(file: GGUFFile) -> Iterator[tuple[str, Tensor]]:
    for name, values in file.tensors():
        yield name, torch.from_numpy(values)
