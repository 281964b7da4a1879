"""Padded shapes: every step fits into its own, padding stays small, and all of them are among those captured."""

import itertools
from dataclasses import replace

import pytest

from slipstream.device.shapes import Buckets, row_buckets


@pytest.mark.parametrize("most", [1, 7, 8, 100, 2048])
def test_row_buckets_are_close(most: int) -> None:
    buckets = row_buckets(most)
    assert buckets[-1] == most
    assert buckets[0] == 1
    assert all(b - a <= max(1, a / 4) for a, b in itertools.pairwise(buckets))


def steps(buckets: Buckets) -> list[tuple[int, int]]:
    """(sequences, rows) of decode steps, narrow, mixed and full."""
    most = buckets.max_drafts + 1
    counts = {1, 2, 3, 5, 17, 31, 32, buckets.sequences[-1]}
    return [(n, n * w) for n in counts if n <= buckets.sequences[-1] for w in range(1, most + 1)]


@pytest.mark.parametrize("max_drafts", [0, 1, 7, 16])
@pytest.mark.parametrize("prunes", [True, False])
@pytest.mark.parametrize("max_num_seqs", [1, 6, 32, 256])
def test_every_decode_step_has_a_captured_shape_that_holds_it(max_num_seqs: int, prunes: bool, max_drafts: int) -> None:
    buckets = Buckets(max_num_seqs=max_num_seqs, max_drafts=max_drafts, max_rows=4096, prunes=prunes)
    captured = set(buckets.verify_shapes())
    for count, rows in steps(buckets):
        shape = buckets.verify(count, rows, rows, decode_only=True, filtered=False)
        assert shape in captured
        assert shape.num_sequences >= count
        assert shape.num_rows == shape.num_outputs >= rows
        assert shape.exact == (count, rows)


def test_rows_are_padded_by_a_quarter_at_most_where_widths_vary() -> None:
    buckets = Buckets(max_num_seqs=256, max_drafts=7, max_rows=4096, prunes=True)
    for count, rows in steps(buckets):
        padded = buckets.verify(count, rows, rows, decode_only=True, filtered=False).num_rows
        assert padded <= max(rows + 1, 1.25 * rows), (count, rows, padded)


@pytest.mark.parametrize("rows", [5, 64, 100, 2048])
def test_prefill_beside_decoding(rows: int) -> None:
    buckets = Buckets(max_num_seqs=8, max_drafts=3, max_rows=4096, prunes=True)
    shape = buckets.verify(3, rows, 4, decode_only=False, filtered=False)
    assert shape in set(buckets.verify_shapes())
    assert not shape.decode_only
    assert shape.num_rows >= rows
    assert shape.num_sequences >= 3
    assert shape.num_outputs == min(shape.num_rows, shape.num_sequences * 4)


def test_steps_beyond_the_largest_shape_are_padded_to_a_few_sizes() -> None:
    """An allocator keeps what it gave to one size, and it is too small for the next."""
    most = 8192 + 256 * 7
    buckets = Buckets(max_num_seqs=256, max_drafts=7, max_rows=most, prunes=True)
    captured, found = set(buckets.verify_shapes()), set()
    for rows in range(8193, most + 1):
        shape = buckets.verify(256, rows, 256, decode_only=False, filtered=False)
        assert shape not in captured
        assert rows <= shape.num_rows <= min(most, rows * 17 / 16)
        found.add(shape.num_rows)
    assert len(found) == 4


@pytest.mark.parametrize("decode_only", [True, False])
def test_what_is_asked_of_logits_makes_shapes_of_their_own(decode_only: bool) -> None:
    """Of the same sizes, whatever was looked up before."""
    buckets = Buckets(max_num_seqs=8, max_drafts=3, max_rows=4096, prunes=True)
    names, values = ("filtered", "shaped", "struck"), itertools.product((False, True), repeat=3)
    flags = [dict(zip(names, each, strict=True)) for each in values]
    found = [buckets.verify(8, 20, 20, decode_only=decode_only, **each) for each in 2 * flags]
    assert [{name: getattr(shape, name) for name in names} for shape in found] == 2 * flags
    assert len(set(found)) == 8
    assert {replace(shape, **flags[0]) for shape in found} == {found[0]}


def test_few_enough_to_be_captured_at_start() -> None:
    buckets = Buckets(max_num_seqs=256, max_drafts=7, max_rows=8192, prunes=True)
    assert len(list(buckets.verify_shapes())) < 350
    assert len(list(buckets.draft_shapes([0, 1, 2, 4, 7]))) < 80


@pytest.mark.parametrize("max_num_seqs", [1, 6, 32, 40, 256])
def test_reports_are_recorded_at_every_number_of_sequences(max_num_seqs: int) -> None:
    buckets = Buckets(max_num_seqs=max_num_seqs, max_drafts=7, max_rows=8192, prunes=True)
    sizes = buckets.report_sizes()
    assert set(sizes) == {shape.num_sequences for shape in buckets.verify_shapes()}
    assert sizes == tuple(sorted(sizes, reverse=True))
