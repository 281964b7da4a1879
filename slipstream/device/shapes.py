"""Shapes of a step's stages: every number about a stage that the host knows, and nothing else.

A stage is a function of a shape and of tensors at fixed addresses, so a shape is the key of its CUDA graph. Where
nothing is captured shapes are exact; with `Buckets` they are padded up to one of a few, and what is padded belongs to
no sequence. Knows nothing of models or kernels.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, TypeAlias

from slipstream.ops.attention import Segment

SEQUENCES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# Steps in which somebody prefills: rows, and sequences in coarse steps, for rows are what such a step costs. A server
# that is busy admits somebody every other step: rows are fine where a batch with one prompt more lies. Beyond the last
# ones steps are not captured.
PREFILL_ROWS = (
    64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192,
)  # fmt: skip
PREFILL_SEQUENCES = (2, 8, 32, 128)
STEPS_BEYOND = 16  # per octave, of steps that are launched because they are larger than all that are captured
STEPS_PER_OCTAVE = 4  # a row bucket is at most a quarter larger than the one before: rows cost where weights do not


Stage: TypeAlias = Literal["load", "draft", "rank", "verify", "accept", "report"]  # those that may be captured


@dataclass(frozen=True, slots=True)
class DraftShape:
    num_sequences: int  # D, or its bucket
    draft_length: int  # d
    max_context: int  # upper bound of the context lengths; in buckets 0, where kernels go by the lengths themselves


@dataclass(frozen=True, slots=True)
class VerifyShape:
    num_sequences: int  # B, or its bucket
    num_rows: int  # R
    num_outputs: int  # O rows whose logits are wanted
    decode_only: bool  # every row is an output
    draft_length: int  # columns of the verdict, less one
    filtered: bool = False  # somebody asks for top-k, top-p or min-p
    shaped: bool = False  # somebody asks for penalties or edits
    struck: bool = False  # somebody has a grammar: acceptance reads logits that were made for this step
    keeps_hidden: bool = False  # somebody asks for log-probabilities of a prompt; in buckets hidden states always stay
    segments: tuple[Segment, ...] = ()  # bounds for attention in plain torch; none in buckets
    exact: tuple[int, int] = field(default=(0, 0), compare=False)  # sequences and outputs of the very step, unpadded


def row_buckets(most: int) -> tuple[int, ...]:
    """Row counts up to `most` (included), each a few percent above the one before."""
    found, rows = {most}, 1
    while rows < most:
        found.add(rows)
        octave = 1 << (rows.bit_length() - 1)
        rows += max(1, octave // STEPS_PER_OCTAVE)
    return tuple(sorted(found))


NUM_KNOWN = 4096  # steps whose shapes are not looked for again


class Buckets:
    """The padded shapes of an engine: few enough to be captured at start, fine where rows matter."""

    def __init__(self, *, max_num_seqs: int, max_drafts: int, max_rows: int, prunes: bool) -> None:
        """max_rows: given and draft rows of a step at most. prunes: widths below max_drafts are common."""
        self.max_drafts = max_drafts
        self.sequences = (*(n for n in SEQUENCES if n < max_num_seqs), max_num_seqs)
        full_width = {n * (max_drafts + 1) for n in self.sequences}
        self.rows = tuple(sorted({*row_buckets(max(full_width)), *full_width}))
        self.prefill_rows = tuple(n for n in PREFILL_ROWS if n <= max_rows)
        self._max_rows = max_rows
        self.prefill_sequences = (*(n for n in PREFILL_SEQUENCES if n < max_num_seqs), max_num_seqs)
        self._prunes = prunes
        self._find = lru_cache(NUM_KNOWN)(self._padded)

    def pad_sequences(self, count: int) -> int:
        return self.sequences[bisect_left(self.sequences, count)]

    def draft(self, num_sequences: int, draft_length: int) -> DraftShape:
        return DraftShape(self.pad_sequences(num_sequences), draft_length, 0)

    def verify(
        self, num_sequences: int, num_rows: int, num_outputs: int, *, decode_only: bool, filtered: bool = False,
        shaped: bool = False, struck: bool = False,
    ) -> VerifyShape:  # fmt: skip
        """The smallest captured shape that holds the step. Beyond them rows are padded by a sixteenth at most.

        Exact rows would be as many sizes of memory as there are steps, and an allocator keeps what it gave to each.
        """
        return self._find(num_sequences, num_rows, num_outputs, decode_only, filtered, shaped, struck)

    def _padded(
        self, num_sequences: int, num_rows: int, num_outputs: int, decode_only: bool, filtered: bool, shaped: bool,
        struck: bool,
    ) -> VerifyShape:  # fmt: skip
        if decode_only:
            padded = self.pad_sequences(num_sequences)
            shape = self._decode(padded, self._up(self._decode_rows(padded), num_rows))
        else:
            padded = self._up(self.prefill_sequences, num_sequences)
            shape = self._mixed(padded, self._mixed_rows(num_rows))
        return replace(
            shape, filtered=filtered, shaped=shaped, struck=struck, exact=(num_sequences, num_outputs)
        )  # fmt: skip

    def draft_shapes(self, lengths: Sequence[int]) -> Iterator[DraftShape]:
        for count in reversed(self.sequences):
            for length in lengths:
                if length:
                    yield DraftShape(count, length, 0)

    def verify_shapes(self) -> Iterator[VerifyShape]:
        """Largest first: smaller ones then fit into the memory that these have taken."""
        for rows in reversed(self.prefill_rows):
            for count in reversed(self.prefill_sequences):
                yield self._mixed(count, rows)
        for count in reversed(self.sequences):
            for rows in reversed(self._decode_rows(count)):
                yield self._decode(count, rows)

    def report_sizes(self) -> tuple[int, ...]:
        """Numbers of sequences that any captured shape has, largest first."""
        return tuple(sorted({*self.sequences, *self.prefill_sequences}, reverse=True))

    def _decode_rows(self, padded: int) -> tuple[int, ...]:
        """Row counts of steps in which `padded` sequences, or a few less, decode and nobody prefills."""
        at = self.sequences.index(padded)
        fewest = (self.sequences[at - 1] if at else 0) + 1  # fewer sequences have a bucket of their own
        most = padded * (self.max_drafts + 1)
        least = fewest if self._prunes else fewest * (self.max_drafts + 1)
        return tuple(dict.fromkeys([*(n for n in self.rows if least <= n < most), most]))

    def _decode(self, padded: int, rows: int) -> VerifyShape:
        return VerifyShape(padded, rows, rows, True, self.max_drafts)

    def _mixed(self, padded: int, rows: int) -> VerifyShape:
        outputs = min(rows, padded * (self.max_drafts + 1))
        return VerifyShape(padded, rows, outputs, False, self.max_drafts)

    def _mixed_rows(self, rows: int) -> int:
        if self.prefill_rows and rows <= self.prefill_rows[-1]:
            return self._up(self.prefill_rows, rows)
        part = max((1 << (rows.bit_length() - 1)) // STEPS_BEYOND, 1)
        return max(min(-(-rows // part) * part, self._max_rows), rows)

    @staticmethod
    def _up(buckets: Sequence[int], count: int) -> int:
        at = bisect_left(buckets, count)
        return buckets[at] if at < len(buckets) else count
