"""Files that declare more than they hold: refused in at most twice their size of memory, in a process that is measured."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.corrupt import ARRAY, CONFIG, METADATA, STRING, gguf, packed, text, typed, write
from tests.models.corrupt import folder_files as whole

MB = 1_000_000
SLACK = 40 * MB  # that a refusal may take however small the file is
# Loads each path of its arguments; one line for each: the growth of the peak in bytes, seconds, the message.
CHILD = """
import re, sys, time
from pathlib import Path
from slipstream.errors import SlipstreamError
from slipstream.load import load_models
def status(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
load_models(sys.argv[1], dtype="float32", device="cpu")
for path in sys.argv[2:]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    before, began = status("VmRSS"), time.monotonic()
    try:
        load_models(path, dtype="float32", device="cpu")
        said = "loaded"
    except SlipstreamError as error:
        said = str(error)
    print(status("VmHWM") - before, time.monotonic() - began, said, sep="|")
"""


def folders(root: Path) -> dict[str, tuple[Path, str]]:
    """By name: a model, and what is said about it."""
    files = whole()
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    entries = "{" + ",".join(f'"{index}":{entry}' for index in range(200_000)) + "}"
    lists = b'{"a":[' + b"[]," * 3_000_000 + b"[]]}"
    shards = json.dumps({"weight_map": {f"t{index}": f"{index}.safetensors" for index in range(300_000)}}).encode()
    sparse = root / "sparse"
    made = {
        "200,000 tensors of nothing": (files | {"model.safetensors": packed(entries.encode(), b"")}, "values"),
        "3 million lists": (files | {"model.safetensors": packed(lists, b"")}, "values"),
        "300,000 shards": (files | {"model.safetensors.index.json": shards}, "values|missing"),
        "a config of lists": (files | {"config.json": b'{"a":[' + b"[]," * 1_300_000 + b"[]]}"}, "values"),
        "a network of 2^48 weights": (
            files | {"config.json": json.dumps(CONFIG | {"vocab_size": 2**24, "intermediate_size": 2**24}).encode()},
            "has shape",
        ),
    }
    found = {
        name: (write(root / str(index), content), says) for index, (name, (content, says)) in enumerate(made.items())
    }
    write(sparse, files)
    with (sparse / "model.safetensors").open("wb") as file:  # takes no room on the disk
        file.write(struct.pack("<Q", 90 * MB))
        file.truncate(100 * MB)
    return found | {"a header of 90 MB of zeros": (sparse, "broken safetensors header")}


def ggufs(root: Path) -> dict[str, tuple[Path, str]]:
    words = [f"w{index}" for index in range(500_000)]
    made = {
        "half a million tokens": ({"tokenizer.ggml.tokens": (ARRAY, (STRING, words))}, "tokens has 500000 items"),
        "half a million merges": ({"tokenizer.ggml.merges": (ARRAY, (STRING, words))}, "merges has 500000 items"),
        "half a million of something": (
            {"x": (ARRAY, (STRING, words)), "llama.block_count": (STRING, "1")},
            "block_count",
        ),
    }
    found = {}
    for index, (name, (changes, says)) in enumerate(made.items()):
        (root / f"{index}.gguf").write_bytes(gguf(METADATA | changes).to_bytes())  # type: ignore[operator]
        found[name] = (root / f"{index}.gguf", says)
    assert typed(STRING, "a") == text("a")
    return found


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read as Linux has it")
def test_what_is_refused_takes_no_more_than_twice_its_size(tmp_path: Path) -> None:
    cases = folders(tmp_path) | ggufs(tmp_path)
    paths = [write(tmp_path / "whole", whole()), *(path for path, _ in cases.values())]
    done = subprocess.run([sys.executable, "-c", CHILD, *map(str, paths)], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(cases), done.stderr
    for (name, (path, says)), line in zip(cases.items(), lines, strict=True):
        grown, seconds, message = line.split("|", 2)
        assert any(part in message for part in says.split("|")), f"{name}: {message}"
        assert int(grown) <= 2 * size(path) + SLACK, f"{name}: {int(grown) / MB:.0f} MB for {size(path) / MB:.0f} MB"
        assert float(seconds) < 5, name
