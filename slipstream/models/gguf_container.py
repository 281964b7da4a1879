"""The container format GGUF: a header, key-value pairs, and a table of tensors, checked as text from a stranger.

Every length is compared with the file before it is used, counts are bounded, tensors have values and do not overlap.
Arrays are walked over, and read when somebody asks for them: a file that is refused has taken next to no memory.
Knows nothing of what keys and names mean. Called by `gguf`.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.errors import CheckpointError

# Values per block and bytes per block of the tensor types that are read, by their number in the format.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Far above every real file.
MAX_PAIRS = MAX_TENSORS = 1 << 16
MAX_ITEMS = 1 << 22  # texts and arrays within arrays, of all pairs together: each is walked over
MAX_NAME, MAX_TEXT_BYTES, MAX_ALIGNMENT = 1000, 4_000_000, 1 << 16
_MAX_DEPTH = 4  # of arrays within arrays


class Span(NamedTuple):
    """An array of the metadata, not read yet."""

    kind: int
    num_items: int
    start: int  # byte of its first item


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of the file: what it is and where it lies."""

    name: str
    shape: tuple[int, ...]  # as in torch: rows first
    kind: int  # key of TYPES
    start: int  # byte in the file
    num_bytes: int


class Container:
    """A parsed file. metadata: scalars, texts, and a `Span` for each array; entries: the tensors by name."""

    def __init__(self, data: mmap.mmap | bytes, path: Path) -> None:
        self.metadata: dict[str, Any] = {}
        self.entries: dict[str, TensorEntry] = {}
        self._data, self._path, self._at, self._num_items = data, path, 0, 0
        num_tensors, num_pairs = self._read_head()
        for _ in range(num_pairs):
            self._read_pair()
        raw = [self._raw_entry() for _ in range(num_tensors)]
        alignment = self._alignment()
        base = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in raw:
            if name in self.entries:
                raise self._broken(f"two tensors have the name {name}")
            if offset % alignment:
                raise self._broken(f"tensor {name} lies at {offset}, which is no multiple of {alignment}")
            self.entries[name] = self._entry(name, shape, kind, base + offset)
        self._check_ranges(base, alignment)

    def array(self, key: str) -> list[Any]:
        """The items of an array of scalars or of texts; CheckpointError where there is none."""
        span = self.metadata.get(key)
        if not isinstance(span, Span):
            raise self._broken(f"{key} is {span!r}, where a list is needed")
        self._at = span.start
        if span.kind in _SCALARS:
            return list(self._unpack(f"<{span.num_items}{_SCALARS[span.kind]}"))
        if span.kind != _STRING:
            raise self._broken(f"{key} is a list of lists, where a plain one is needed")
        return [self._text(key) for _ in range(span.num_items)]

    # ------------------------------------------------------------------------------------------------------ the header

    def _read_head(self) -> tuple[int, int]:
        magic, version, num_tensors, num_pairs = self._unpack("<4sIQQ")
        if magic != b"GGUF":
            raise CheckpointError(f"{self._path} is not a GGUF file (it starts with {magic!r})")
        if version not in (2, 3):
            raise CheckpointError(f"{self._path} is GGUF version {version}; versions 2 and 3 are read")
        for what, count, most in (("tensors", num_tensors, MAX_TENSORS), ("pairs of metadata", num_pairs, MAX_PAIRS)):
            if count > most:
                raise self._broken(f"it says that it has {count} {what}, and {most} at most are read")
        return num_tensors, num_pairs

    def _read_pair(self) -> None:
        key = self._text("a key")
        if key in self.metadata:
            raise self._broken(f"the key {key[:MAX_NAME]} stands twice in its metadata")
        self.metadata[key] = self._value(self._unpack("<I")[0], key)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind == _ARRAY:
            item_kind, count = self._unpack("<IQ")
            span = Span(item_kind, count, self._at)
            self._pass_over(span, key, 1)
            return span
        if kind not in _SCALARS:
            raise self._broken(f"{key[:MAX_NAME]} has a value of type number {kind}, which does not exist")
        return self._unpack("<" + _SCALARS[kind])[0]

    def _pass_over(self, span: Span, key: str, depth: int) -> None:
        """Move on to where an array ends."""
        kind, count, _ = span
        if depth > _MAX_DEPTH:
            raise self._broken(f"the arrays of {key[:MAX_NAME]} are nested too deeply")
        if kind in _SCALARS:
            self._skip(count * struct.calcsize("<" + _SCALARS[kind]), f"the {count} values of {key[:MAX_NAME]}")
            return
        self._num_items += count
        if self._num_items > MAX_ITEMS:
            raise self._broken(f"{key[:MAX_NAME]} has {count} items; {MAX_ITEMS} of all keys together are read at most")
        if kind == _STRING:
            self._pass_over_texts(count, key)
        elif kind == _ARRAY:
            for _ in range(count):
                item_kind, item_count = self._unpack("<IQ")
                self._pass_over(Span(item_kind, item_count, self._at), key, depth + 1)
        else:
            raise self._broken(f"{key[:MAX_NAME]} is a list of type number {kind}, which does not exist")

    def _pass_over_texts(self, count: int, key: str) -> None:
        data, at, last, length_at = self._data, self._at, len(self._data) - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > last:
                raise self._broken(f"the {count} texts of {key[:MAX_NAME]} run past the end")
            at += 8 + length_at(data, at)[0]
        self._at = at
        self._skip(0, f"the {count} texts of {key[:MAX_NAME]}")

    # ----------------------------------------------------------------------------------------------------- the tensors

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment % 8:
            raise self._broken(f"general.alignment is {alignment!r}; it must be a multiple of 8 up to {MAX_ALIGNMENT}")
        return alignment

    def _raw_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text("a tensor's name")
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise self._broken(f"a tensor has the name {name[:40]!r}, a name of {len(name)} characters")
        (num_dims,) = self._unpack("<I")
        if num_dims > 4:
            raise self._broken(f"tensor {name} has {num_dims} dimensions")
        shape = self._unpack(f"<{num_dims}Q")
        kind, offset = self._unpack("<IQ")
        return name, tuple(reversed(shape)), kind, offset

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> TensorEntry:
        if kind not in TYPES:
            known = ", ".join(label for label, _, _ in TYPES.values())
            raise CheckpointError(
                f"{self._path}: tensor {name} has type number {kind}, which is not read ({known} are)"
            )
        label, block_values, block_bytes = TYPES[kind]
        if not shape or 0 in shape or shape[-1] % block_values:
            raise self._broken(f"tensor {name} of shape {list(shape)} does not divide into {label} blocks")
        num_bytes = math.prod(shape) // block_values * block_bytes
        if start + num_bytes > len(self._data):
            raise self._broken(f"tensor {name} ends at byte {start + num_bytes} of {len(self._data)}")
        return TensorEntry(name=name, shape=shape, kind=kind, start=start, num_bytes=num_bytes)

    def _check_ranges(self, start: int, alignment: int) -> None:
        """Tensors follow one another, each from a multiple of the alignment on."""
        at, before = start, ""
        for entry in sorted(self.entries.values(), key=lambda entry: entry.start):
            if entry.start < at:
                raise self._broken(f"tensor {entry.name} begins within tensor {before}")
            if entry.start - at >= alignment:
                raise self._broken(f"{entry.start - at} bytes before tensor {entry.name} belong to no tensor")
            at, before = entry.start + entry.num_bytes, entry.name

    # ------------------------------------------------------------------------------------------------------ the cursor

    def _text(self, what: str) -> str:
        (length,) = self._unpack("<Q")
        start = self._at
        self._skip(length, f"{what[:MAX_NAME]}, a text of {length} bytes,")
        if length > MAX_TEXT_BYTES:
            raise self._broken(f"{what[:MAX_NAME]} is a text of {length} bytes; {MAX_TEXT_BYTES} at most are read")
        return self._data[start : self._at].decode("utf-8", errors="replace")

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        start = self._at
        self._skip(struct.calcsize(layout), "its header")
        return struct.unpack_from(layout, self._data, start)

    def _skip(self, num_bytes: int, what: str) -> None:
        self._at += num_bytes
        if self._at > len(self._data):
            raise self._broken(f"{what} runs past the end")

    def _broken(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is not a whole GGUF file: {what}; fetch it again")
