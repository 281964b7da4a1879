"""The headers of safetensors files, read without torch and without touching a single weight; a digest tells files apart.

A header says which tensors a file holds, their types, shapes and byte ranges. It is checked here as text from a
stranger: its size is bounded, names can be shown, every range has the length that its shape asks for, and the ranges
fill the file without a gap and without an overlap; an index may only name files of its own folder. Pickle-based files
(`.bin`, `.pt`) are never opened.
Called by `checkpoint`, `inspect` and whoever keeps a calibration for some weights; the values themselves are read with
the safetensors library.
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.models.folder import member, parse_json, read_json

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
MAX_INDEX_BYTES = 64_000_000
MAX_NAME, MAX_DIMENSIONS = 1000, 16
DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
}  # fmt: skip
NUM_SLICES, SLICE_BYTES = 128, 1 << 18  # of each file that a digest reads: all of it up to 32 MiB
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHeader:
    """One tensor of a file: what it is, not what it holds."""

    name: str
    dtype: str  # safetensors spelling: "BF16", "F32", "I64", ...
    shape: tuple[int, ...]
    file: Path

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_values * DTYPE_BITS[self.dtype] // 8


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: the shards of its index, or its single file."""
    if (folder / INDEX).is_file():
        return _indexed_files(folder)
    files = [member(folder, path.name) for path in sorted(folder.glob("*.safetensors")) if path.is_file()]
    if not files:
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        hint = f"; {pickled[0]} is a pickle and is never opened, convert it to safetensors" if pickled else ""
        raise CheckpointError(f"{folder} holds no .safetensors file{hint}")
    if len(files) > 1:
        raise CheckpointError(
            f"{folder} holds {len(files)} .safetensors files and no {INDEX}; keep one, or add the index"
        )
    return files


def _indexed_files(folder: Path) -> list[Path]:
    weight_map = read_json(member(folder, INDEX), MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX} has no weight_map object; fetch it again")
    paths = []
    for name in sorted({str(name) for name in weight_map.values()}):
        if Path(name).name != name or not name.endswith(".safetensors") or not name.isprintable() or len(name) > 255:
            raise CheckpointError(
                f"{folder / INDEX} names {name!r}; a shard must be a .safetensors file of the same folder"
            )
        path = member(folder, name)
        if not path.is_file():
            raise CheckpointError(f"{folder / INDEX} names {name}, which is missing from the folder; fetch it too")
        paths.append(path)
    return paths


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Every tensor of a model folder by name, in file order; a name that occurs twice is an error."""
    found: dict[str, TensorHeader] = {}
    for path in weight_files(folder):
        for header in read_file_header(path):
            if header.name in found:
                first = found[header.name].file.name
                raise CheckpointError(
                    f"{folder}: tensor {header.name} is in both {first} and {path.name}; fetch the files again"
                )
            found[header.name] = header
    return found


def weights_digest(folder: Path) -> str:
    """16 hex digits that change with the weights of a model folder, at the cost of 32 MiB a file.

    The sha256 of each file's size and of 128 slices of 256 KiB, evenly spaced from its first byte to its last. Training
    moves every tensor, so a sample tells; it is no seal against somebody who alters a few weights on purpose.
    """
    digest = hashlib.sha256()
    for path in weight_files(folder):
        size = path.stat().st_size
        last = max(size - SLICE_BYTES, 0)
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for start in _slice_starts(last):
                file.seek(start)
                digest.update(file.read(SLICE_BYTES))
    return digest.hexdigest()[:16]


def _slice_starts(last: int) -> list[int]:
    """One after the other where they cover the file, else spread over it."""
    if last <= (NUM_SLICES - 1) * SLICE_BYTES:
        return list(range(0, last + SLICE_BYTES, SLICE_BYTES))
    return [last * index // (NUM_SLICES - 1) for index in range(NUM_SLICES)]


def read_file_header(path: Path) -> list[TensorHeader]:
    """The tensors of one safetensors file, validated against the file's size."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, file_bytes - 8):
            raise CheckpointError(
                f"{path} is not a whole safetensors file: header of {header_bytes} bytes, file of {file_bytes}; "
                "fetch it again"
            )
        raw = file.read(header_bytes)
    try:
        entries = parse_json(raw.decode("utf-8"), file_bytes)
    except ValueError as error:
        raise CheckpointError(f"{path} has a broken safetensors header: {error}; fetch it again") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} has a broken safetensors header: not an object; fetch it again")
    _check_metadata(path, entries.pop("__metadata__", {}))
    data_bytes = file_bytes - 8 - header_bytes
    found = [_tensor_header(path, name, entry, data_bytes) for name, entry in entries.items()]
    _check_ranges(path, found, data_bytes)
    return [header for header, _ in found]


def _check_metadata(path: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must be an object of texts; write the file again")


def _tensor_header(path: Path, name: str, entry: Any, data_bytes: int) -> tuple[TensorHeader, tuple[int, int]]:
    """What a tensor is, and the bytes of the data that it has: from, to."""
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise CheckpointError(
            f"{path}: a tensor has the name {name[:40]!r}, a name of {len(name)} characters; it must be of printable "
            f"characters, 1 to {MAX_NAME}"
        )
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where} lacks dtype, shape or data_offsets; write the file again")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where} has type {dtype!r}, which is not supported; known: {', '.join(DTYPE_BITS)}")
    if not _is_counts(shape, MAX_DIMENSIONS) or not _is_counts(offsets, 2) or len(offsets) != 2:
        raise CheckpointError(f"{where} has a malformed shape or data_offsets; write the file again")
    header = TensorHeader(name=name, dtype=dtype, shape=tuple(shape), file=path)
    if not offsets[0] <= offsets[1] <= data_bytes:
        raise CheckpointError(f"{where} lies outside the file (bytes {offsets} of {data_bytes}); the file is cut short")
    if offsets[1] - offsets[0] != header.num_bytes:
        raise CheckpointError(
            f"{where} has {offsets[1] - offsets[0]} bytes, its shape {shape} needs {header.num_bytes}; "
            "write the file again"
        )
    return header, (offsets[0], offsets[1])


def _check_ranges(path: Path, found: list[tuple[TensorHeader, tuple[int, int]]], data_bytes: int) -> None:
    """Every byte of the data belongs to one tensor."""
    at, before = 0, ""
    for header, (start, end) in sorted(found, key=lambda pair: pair[1]):
        if start < at:
            raise CheckpointError(f"{path}: tensor {header.name} begins within tensor {before}; write the file again")
        if start > at:
            raise CheckpointError(
                f"{path}: bytes {at} to {start} before tensor {header.name} belong to no tensor; write the file again"
            )
        at, before = end, header.name
    if at < data_bytes:
        raise CheckpointError(f"{path}: its last {data_bytes - at} bytes belong to no tensor; fetch the file again")


def _is_counts(value: Any, most: int) -> bool:
    return isinstance(value, list) and len(value) <= most and all(type(item) is int and item >= 0 for item in value)
