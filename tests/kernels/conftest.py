"""Kernel tests run everywhere: on a CUDA device, or through Triton's interpreter on the CPU with tiny shapes.

With a device everything in this folder carries the mark `gpu` (`make test-gpu` runs it, `make test` does not); without
one it is part of `make test`. The interpreter cannot multiply bf16 matrices, so there it is fp32 only.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent
HAS_CUDA = torch.cuda.is_available()
DTYPES = (torch.float32, torch.bfloat16) if HAS_CUDA else (torch.float32,)

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The hook sees the items of all folders."""
    for item in items:
        if HAS_CUDA and FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> str:
    return "cuda" if HAS_CUDA else "cpu"


@pytest.fixture
def dtypes() -> tuple[torch.dtype, ...]:
    """All that kernels are tested in here; `dtype` runs a test once for each."""
    return DTYPES


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind


@pytest.fixture(autouse=not HAS_CUDA)
def interpreter_reads_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps scalars as arrays of one element, which NumPy 2.4 no longer takes for a loop's bound."""
    from triton.runtime import interpreter

    usual = interpreter._patch_lang_tensor

    def patch(tensor: object, scope: Any) -> None:
        usual(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
