"""The record of a dense trace: what a file keeps, what is cut from it, and what is refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.errors import ConfigError
from slipstream.lab.dense import DenseTrace


def trace(**changes: Any) -> DenseTrace:
    """Two answers, of 3 and 2 tokens, S = 2."""
    fields: dict[str, Any] = {
        "starts_np": np.array([0, 3, 5]), "prompt_lengths_np": np.array([7, 9], np.int32),
        "token_ids_np": np.array([11, 12, 13, 21, 22], np.int32), "runs_np": np.array([2, 0, 0, 1, 0], np.int8),
        "signals": {"head": np.linspace(0, 1, 10, dtype=np.float16).reshape(5, 2)},
        "set_names": ("gsm8k", "mbpp"), "sets_np": np.array([0, 1], np.int32), "about": {"model": "tiny"},
    }  # fmt: skip
    return DenseTrace(**(fields | changes))


def test_a_file_keeps_everything(tmp_path: Path) -> None:
    saved = trace()
    saved.save(tmp_path / "a" / "trace.npz")
    loaded = DenseTrace.load(tmp_path / "a" / "trace.npz")
    for name in ("starts_np", "prompt_lengths_np", "token_ids_np", "runs_np", "sets_np"):
        assert (getattr(loaded, name) == getattr(saved, name)).all()
    assert (loaded.signals["head"] == saved.signals["head"]).all()
    assert (loaded.num_answers, loaded.num_drafts, loaded.about) == (2, 2, {"model": "tiny"})


def test_some_answers_only() -> None:
    turned = trace().answers(np.array([1, 0]))
    assert turned.token_ids_np.tolist() == [21, 22, 11, 12, 13]
    assert turned.starts_np.tolist() == [0, 2, 5]
    assert turned.prompt_lengths_np.tolist() == [9, 7]
    assert turned.signals["head"][:2].tolist() == trace().signals["head"][3:].tolist()
    only = trace().of_sets(["mbpp"])
    assert only.token_ids_np.tolist() == [21, 22] and only.runs_np.tolist() == [1, 0]
    with pytest.raises(ConfigError, match="no set 'code'; it has gsm8k, mbpp"):
        trace().of_sets(["code"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"starts_np": np.array([0, 3, 3])}, "starts must rise"),
        ({"starts_np": np.array([0, 5])}, "starts must rise"),
        ({"runs_np": np.array([2, 0, 0, 2, 0], np.int8)}, "a run is longer"),
        ({"runs_np": np.array([2, 0, 0, -1, 0], np.int8)}, "a run is longer"),
        ({"runs_np": np.array([2, 0], np.int8)}, "a row for each of 5 tokens"),
        ({"signals": {}}, "no signal"),
        ({"sets_np": np.array([0, 2], np.int32)}, "one of the sets"),
    ],
)
def test_what_does_not_fit_together_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert trace().fault() is None
    replace(trace(), **changes).save(tmp_path / "trace.npz")
    with pytest.raises(ConfigError, match=message):
        DenseTrace.load(tmp_path / "trace.npz")


@pytest.mark.parametrize("content", [b"", b"PK no archive", b"\x93NUMPY"])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "trace.npz").write_bytes(content)
    with pytest.raises(ConfigError, match="slipstream trace"):
        DenseTrace.load(tmp_path / "trace.npz")


def test_a_file_without_an_array_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", header=np.array("{}"))
    with pytest.raises(ConfigError, match="is no slipstream-dense-trace"):
        DenseTrace.load(tmp_path / "other.npz")
