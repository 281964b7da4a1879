"""What holds for every test: no network, no stray profile of the machine, a fixed number of threads."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton, whose own functions look at it too
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Idle threads of torch spin, which slows a real model down where other work shares the cores.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a device `make test-gpu` says so, test by test."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny models are fastest on one thread, far so on a busy machine, and sums do not depend on the machine."""
    torch.set_num_threads(1)


@pytest.fixture
def all_threads() -> Iterator[None]:
    """For tests that run a real model."""
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Profiles measured by earlier runs on this machine must not change what a test sees."""
    home = tmp_path_factory.mktemp("home", numbered=True)
    monkeypatch.setenv("SLIPSTREAM_HOME", str(home))
    return home
