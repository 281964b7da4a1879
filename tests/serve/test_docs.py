"""The lines that README and docs/SERVING.md tell people to type are typed here, against a server of their address."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.load import Models
from tests.serve.conftest import Running, make_llm, serving

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8000"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """(language, text) of all that speak to a server."""
    pages = [ROOT / "README.md", ROOT / "docs" / "SERVING.md"]
    found = [block for page in pages for block in _BLOCK.findall(page.read_text(encoding="utf-8"))]
    return [(language, text) for language, text in found if ADDRESS in text]


@pytest.fixture(scope="module")
def running(tiny_pair: Models) -> Iterator[Running]:
    with serving(make_llm(tiny_pair, max_model_len=128), served_name="smollm2-135m") as running:
        yield running
        running.settle()


def test_curl(running: Running) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    lines = [text for language, text in blocks() if language in ("", "bash", "sh")]
    assert len(lines) >= 2
    for text in lines:
        command = text.replace(ADDRESS, running.url).replace("curl ", "curl --silent --show-error --fail-with-body ")
        done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, text + done.stdout + done.stderr
        assert done.stdout


def test_python(running: Running) -> None:
    programs = [text for language, text in blocks() if language == "python"]
    assert programs
    for text in programs:
        command = [sys.executable, "-c", text.replace(ADDRESS, running.url)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout
