"""What holds for every test: no network, no stray profile of the machine, a fixed number of threads."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    """Two threads, whatever the machine has, so that times and sums do not depend on it."""
    import torch

    torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Profiles measured by earlier runs on this machine must not change what a test sees."""
    home = tmp_path_factory.mktemp("home", numbered=True)
    monkeypatch.setenv("SLIPSTREAM_HOME", str(home))
    yield home
