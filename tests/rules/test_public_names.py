"""What users import from the package, and that all of it is there."""

import tomllib
from pathlib import Path

import pytest

import slipstream


@pytest.mark.parametrize("name", slipstream.__all__)
def test_public_names_load(name: str) -> None:
    assert getattr(slipstream, name).__name__ == name
    assert name in dir(slipstream)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="Engin"):
        slipstream.Engin  # type: ignore[attr-defined]  # noqa: B018


def test_version_is_said_once() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["version"] == slipstream.__version__
