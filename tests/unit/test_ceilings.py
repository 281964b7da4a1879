"""Ceilings of a tiny model: what is timed, and under which names."""

import torch

from slipstream.lab.ceilings import ceilings, linear_weights
from slipstream.testing import tiny_spec, tiny_target


def test_every_matrix_of_a_step_is_timed_once() -> None:
    target = tiny_target()
    assert len(linear_weights(target)) == 2 * 4 + 1  # two layers, and the head
    tied, own = (tiny_target(spec=tiny_spec(tie_word_embeddings=tie)) for tie in (True, False))
    assert linear_weights(tied)[-1].data_ptr() == tied.embed_tokens.weight.data_ptr()
    assert linear_weights(own)[-1].shape == (64, 32)


def test_ceilings_of_a_cpu() -> None:
    target = tiny_target()
    found = ceilings(target)
    names = [f"{kind}_ms_{rows}" for kind in ("linear", "prepacked") for rows in ("1_row", "8_rows")]
    assert list(found) == [*names, "linear_weights_mb", "linear_gb_per_s", "copy_gb_per_s"]
    assert all(value > 0 for value in found.values())
    size = sum(weight.numel() for weight in linear_weights(target)) * torch.float32.itemsize
    assert found["linear_weights_mb"] == size / 1e6
    assert "linear_ms_32_rows" in ceilings(target, rows=(1, 32))
