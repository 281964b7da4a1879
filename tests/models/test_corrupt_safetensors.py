"""Damaged safetensors files, indices and folders: each is refused in time, by file and tensor, and nothing else is read."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.errors import CheckpointError
from slipstream.models.inspect import describe
from tests.models.corrupt import (
    CONFIG,
    HIDDEN,
    SHAPES,
    VOCAB,
    Files,
    Link,
    data,
    folder_files,
    header,
    load,
    packed,
    refusal,
    write,
)

EMBED, NORM, Q = "model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
WHOLE = packed(header())
HEADER_END = 8 + int.from_bytes(WHOLE[:8], "little")
NOT_WHOLE, BROKEN = (
    "model.safetensors is not a whole safetensors file",
    "model.safetensors has a broken safetensors header",
)


def entry(name: str, **changes: Any) -> bytes:
    """The whole file with one tensor's entry changed."""
    head = header()
    head[name] = head[name] | changes
    return packed(head)


def without(name: str, *fields: str) -> bytes:
    head = header()
    head[name] = {key: value for key, value in head[name].items() if key not in fields}
    return packed(head)


def renamed(name: str) -> bytes:
    head = header()
    return packed({name if key == NORM else key: value for key, value in head.items()})


def raw(old: str, new: str) -> bytes:
    """The header's text with something replaced, which JSON would not write."""
    text = json.dumps(header())
    assert old in text
    return packed(text.replace(old, new, 1).encode("utf-8", "surrogatepass"))


def shifted(by: int) -> bytes:
    """Tensors after a gap."""
    head = header()
    for name in SHAPES:
        head[name]["data_offsets"] = [offset + by for offset in head[name]["data_offsets"]]
    return packed(head, bytes(by) + data())


def with_values(name: str, change: Callable[[np.ndarray], None]) -> bytes:
    start, end = header()[name]["data_offsets"]
    values = np.frombuffer(data()[start:end], np.float32).copy()
    change(values)
    return packed(header(), data()[:start] + values.tobytes() + data()[end:])


def put(place: int, value: float) -> Callable[[np.ndarray], None]:
    def change(values: np.ndarray) -> None:
        values[place] = value

    return change


def more(name: str, **fields: Any) -> bytes:
    """One more tensor, of no bytes unless it says so."""
    return packed(header() | {name: {"dtype": "F32", "shape": [0], "data_offsets": [len(data())] * 2} | fields})


DEEP = b"[" * 100_000
HUGE = 2**63
LENGTHS = (0, 1, 7, 8, 9, HEADER_END // 2, HEADER_END - 1, HEADER_END, HEADER_END + 1, len(WHOLE) - 300, len(WHOLE) - 1)

FILES: dict[str, tuple[bytes, str]] = {
    **{f"cut to {length} bytes": (WHOLE[:length], r"model\.safetensors") for length in LENGTHS},
    "a byte too many": (WHOLE + b"\0", "1 bytes? .*no tensor"),
    "a MB too many": (WHOLE + bytes(1_000_000), "no tensor"),
    "two files in one": (WHOLE + WHOLE, "no tensor"),
    **{
        f"a header of {claim}": (packed(header(), claim=claim), NOT_WHOLE)
        for claim in (0, 1, HUGE, 2**64 - 1, len(WHOLE), len(WHOLE) - 7, 100_000_001)
    },
    "a header cut by its own length": (packed(header(), claim=HEADER_END - 9), BROKEN),
    "a pickle": (b"\x80\x04cos\nsystem\n(S'touch /tmp/canary'\ntR." + bytes(200), NOT_WHOLE),
    "a zip": (b"PK\x03\x04" + bytes(200), NOT_WHOLE),
    "no JSON": (packed(b"{nonsense}"), BROKEN),
    "a list": (packed([header()]), f"{BROKEN}: not an object"),
    "null": (packed(b"null"), BROKEN),
    "blanks": (packed(b" " * 64), BROKEN),
    "UTF-16": (packed(json.dumps(header()).encode("utf-16")), BROKEN),
    "a byte order mark": (packed(json.dumps(header()).encode("utf-8-sig")), BROKEN),
    "no UTF-8": (packed(b'{"\xff\xfe": 1}'), BROKEN),
    "zeros": (packed(bytes(64)), BROKEN),
    "JSON and more": (packed(json.dumps(header()).encode() + b"{}"), BROKEN),
    "deep nesting": (packed(DEEP), BROKEN),
    "deep nesting in an entry": (packed(b'{"a": ' + DEEP + b"]" * 100_000 + b"}"), BROKEN),
    "a number of 5,000 digits": (raw(f'"shape": [{HIDDEN}]', f'"shape": [{"9" * 5000}]'), BROKEN),
    "a tensor twice": (raw('{"__metadata__"', f'{{"{NORM}": {json.dumps(header()[Q])}, "__metadata__"'), f"{NORM}.*twice"),
    "a field twice": (raw('"dtype": "F32", "shape"', '"dtype": "F16", "dtype": "F32", "shape"'), "dtype.*twice"),
    "no dtype": (without(NORM, "dtype"), f"tensor {NORM} lacks"),
    "no shape": (without(NORM, "shape"), f"tensor {NORM} lacks"),
    "no offsets": (without(NORM, "data_offsets"), f"tensor {NORM} lacks"),
    "an entry that is a list": (packed(header() | {NORM: ["F32"]}), f"tensor {NORM} lacks"),
    "an entry that is null": (packed(header() | {NORM: None}), f"tensor {NORM} lacks"),
    **{
        f"dtype {dtype!r}": (entry(NORM, dtype=dtype), f"tensor {NORM} has type")
        for dtype in (None, [], {}, 32, "f32", "PICKLE", "F32 ", "Q4_0")
    },
    **{
        f"shape {shape!r}"[:40]: (entry(NORM, shape=shape), f"tensor {NORM}")
        for shape in (
            None, "8", 8, [-8], [8.0], [True] * 8, ["8"], [[8]], [None], [HUGE], [2**32, 2**32, 8], [8, 0], [], [4],
            [HUGE, 0], [1] * 100_000, {"0": 8}, [float("nan")],
        )
    },
    **{
        f"offsets {offsets!r}"[:40]: (entry(NORM, data_offsets=offsets), f"tensor {NORM}")
        for offsets in (
            None, [], [0], [0, 32, 64], ["0", "32"], [0.0, 32.0], [-32, 0], [32, 0], [HUGE, HUGE + 32], [0, HUGE],
            [0, 32], [len(data()), len(data()) + 32], [False, 32], [10**30, 10**30 + 32],
        )
    },
    "a gap before the first": (shifted(64), "no tensor"),
    "a gap in between": (packed({k: v for k, v in header().items() if k != Q}), "no tensor"),
    "two tensors of the same bytes": (packed(header() | {"extra": header()[Q]}), f"tensor extra begins within tensor {Q}"),
    "two that overlap": (more("extra", shape=[2], data_offsets=[len(data()) - 8, len(data())]), "extra begins within"),
    "a tensor of no values": (more("extra"), "tensor extra"),
    "a path as name": (renamed("../../etc/passwd"), r"\.\./\.\./etc/passwd"),
    "an absolute path as name": (renamed("/etc/passwd"), "/etc/passwd"),
    "a name with NUL": (renamed("model.norm\0.weight"), "name"),
    "a name that moves the cursor": (renamed("\x1b[2J\x1b]0;x\x07"), "name"),
    "a name of a MB": (renamed("x" * 1_000_000), "name of 1000000"),
    "no name": (renamed(""), "name"),
    "a name with half a surrogate": (raw(NORM, "\\ud800"), "name|broken"),
    "a name that differs by a letter": (renamed("model.Norm.weight"), r"model\.Norm\.weight is not used"),
    "metadata that is a list": (packed(header() | {"__metadata__": []}), "__metadata__"),
    "metadata of objects": (packed(header() | {"__metadata__": {"format": {"a": 1}}}), "__metadata__"),
    "metadata as tensor": (packed(header() | {"__metadata__": header()[NORM]}), "__metadata__"),
    "a missing tensor": (packed({k: v for k, v in header().items() if k != NORM}, data()[:-4 * HIDDEN]), "norm.weight is missing"),
    "a tensor turned around": (entry(EMBED, shape=[HIDDEN, VOCAB]), rf"{EMBED} has shape \[8, 16\].*\[16, 8\]"),
    "a tensor flattened": (entry(EMBED, shape=[HIDDEN * VOCAB]), EMBED),
    "a tensor of another rank": (entry(NORM, shape=[1, HIDDEN]), NORM),
    "floats said to be integers": (entry(NORM, dtype="I32"), f"{NORM}.*I32|{NORM}.*int32"),
    "floats said to be bytes": (entry(NORM, dtype="U8", shape=[4 * HIDDEN]), NORM),
    "floats said to be halves": (entry(NORM, dtype="F16", shape=[2 * HIDDEN]), NORM),
    "floats said to be eighths": (entry(NORM, dtype="F8_E4M3", shape=[4 * HIDDEN]), NORM),
    "NaN": (with_values(NORM, put(3, np.nan)), f"{NORM}.*not finite"),
    "NaN at the end of a matrix": (with_values(EMBED, put(-1, -np.nan)), f"{EMBED}.*not finite"),
    "infinity": (with_values(Q, put(0, np.inf)), f"{Q}.*not finite"),
    "minus infinity": (with_values(Q, put(7, -np.inf)), f"{Q}.*not finite"),
    "noise": (with_values(EMBED, lambda values: values.view(np.uint8).__setitem__(slice(None), 255)), "not finite"),
}  # fmt: skip


@pytest.fixture
def files() -> Files:
    return folder_files()


@pytest.mark.parametrize("case", FILES)
def test_a_damaged_file_is_refused(case: str, files: Files, tmp_path: Path) -> None:
    content, says = FILES[case]
    message = refusal(write(tmp_path / "m", files | {"model.safetensors": content}), says)
    assert str(tmp_path / "m") in message


def test_the_whole_file_loads(files: Files, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", files)
    assert load(folder).target.spec.vocab_size == VOCAB
    assert describe(folder)["tensors"] == len(SHAPES)


@pytest.mark.parametrize("case", [case for case, (_, says) in FILES.items() if "not finite" not in says])
def test_inspect_refuses_what_cannot_be_loaded(case: str, files: Files, tmp_path: Path) -> None:
    """By its header, so all but the values."""
    with pytest.raises(CheckpointError, match=FILES[case][1]):
        describe(write(tmp_path / "m", files | {"model.safetensors": FILES[case][0]}))


# ---------------------------------------------------------------------------------------------------- shards, an index

INDEX, ONE, TWO = "model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def part(names: list[str]) -> bytes:
    head, body = {}, b""
    for name in names:
        start, end = header()[name]["data_offsets"]
        head[name] = header()[name] | {"data_offsets": [len(body), len(body) + end - start]}
        body += data()[start:end]
    return packed(head, body)


NAMES = list(SHAPES)
WHERE = dict.fromkeys(NAMES[:5], ONE) | dict.fromkeys(NAMES[5:], TWO)


def sharded(**changes: "bytes | Link | None") -> Files:
    """The model in two shards; `changes` by the words index, one and two. None: the file is absent."""
    index = json.dumps({"metadata": {"total_size": len(data())}, "weight_map": WHERE}).encode()
    kept = {name: content for name, content in folder_files().items() if name != "model.safetensors"}
    names = {"index": INDEX, "one": ONE, "two": TWO}
    given: dict[str, bytes | Link | None] = {"index": index, "one": part(NAMES[:5]), "two": part(NAMES[5:]), **changes}
    return kept | {names[word]: content for word, content in given.items() if content is not None}


def index(where: Any) -> Files:
    return sharded(index=json.dumps({"weight_map": where}).encode())


def placed(shard: Any) -> Files:
    return index(WHERE | {NORM: shard})


INDICES: dict[str, tuple[Files, str]] = {
    "no JSON": (sharded(index=b"nonsense"), f"{INDEX} is not valid JSON"),
    "no bytes": (sharded(index=b""), f"{INDEX} is not valid JSON"),
    "a list": (sharded(index=b"[]"), f"{INDEX} holds a JSON list"),
    "deep nesting": (sharded(index=DEEP), f"{INDEX} is not valid JSON"),
    "no map": (sharded(index=b"{}"), f"{INDEX} has no weight_map"),
    "an empty map": (index({}), f"{INDEX} has no weight_map"),
    "a map that is a list": (index([ONE, TWO]), f"{INDEX} has no weight_map"),
    **{
        f"a shard called {shard!r}"[:50]: (placed(shard), INDEX)
        for shard in (
            None, 1, [], {}, True, "", ".", "..", "/", "../outside.safetensors", "/etc/passwd.safetensors", "sub/x.safetensors",
            "./" + TWO, "sub/../" + TWO, "a\0.safetensors", "..\\x.safetensors", "x.bin", "pytorch_model.pt", "absent.safetensors",
            "x" * 1_000_000 + ".safetensors", "\x1b[2J.safetensors", "\ud800.safetensors", "config.json",
        )
    },
    "100,000 shards": (index({str(i): f"{i}.safetensors" for i in range(100_000)}), "missing"),
    "a shard missing": (sharded(two=None), f"{INDEX} names {TWO}, which is missing"),
    "a shard empty": (sharded(two=b""), f"{TWO} is not a whole"),
    "a shard cut": (sharded(two=part(NAMES[5:])[:-5]), TWO),
    "a shard twice": (sharded(two=part(NAMES[:5])), f"is in both {ONE} and {TWO}"),
    "a tensor in no shard": (sharded(two=part(NAMES[5:-1])), "norm.weight is missing"),
    "a link out of the folder": (sharded(two=Link("../outside.safetensors")), f"{TWO} is a link"),
    "a link to a device": (sharded(two=Link("/dev/zero")), TWO),
    "a link to itself": (sharded(two=Link(TWO)), TWO),
    "a link to nothing": (sharded(two=Link("nothing")), TWO),
}  # fmt: skip


@pytest.mark.parametrize("case", INDICES)
def test_a_damaged_index_or_shard_is_refused(case: str, tmp_path: Path) -> None:
    """Beside the folder lies what a path out of it would find, and it would do."""
    (tmp_path / "outside.safetensors").write_bytes(part(NAMES[5:]))
    files, says = INDICES[case]
    refusal(write(tmp_path / "m", files), says)


def test_shards_load(tmp_path: Path) -> None:
    load(write(tmp_path / "m", sharded()))


# --------------------------------------------------------------------------------------------- links, pickles, devices

WITHIN = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@pytest.mark.parametrize("name", [*WITHIN, "chat_template.jinja", INDEX])
def test_a_link_out_of_the_folder_is_not_followed(name: str, files: Files, tmp_path: Path) -> None:
    """Though what it leads to would do."""
    there = {"chat_template.jinja": b"{{ messages }}", INDEX: json.dumps({"weight_map": WHERE}).encode()}
    (tmp_path / "canary").write_bytes(there.get(name) or files[name])  # type: ignore[arg-type]
    message = refusal(write(tmp_path / "m", files | {name: Link("../canary")}), r"is a link to .*canary")
    assert name in message
    assert "copy" in message


def test_links_within_a_folder_and_a_link_to_a_folder_are_followed(files: Files, tmp_path: Path) -> None:
    weights = files.pop("model.safetensors")
    folder = write(tmp_path / "m", files | {"weights": weights, "model.safetensors": Link("weights")})
    (tmp_path / "link").symlink_to(folder)
    load(tmp_path / "link")


def test_the_cache_of_a_hub_is_links_to_its_own_blobs(files: Files, tmp_path: Path) -> None:
    """As huggingface_hub lays it out: snapshots/REVISION/NAME leads to blobs/HASH, and to nowhere else."""
    blobs, snapshots = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots"
    blobs.mkdir(parents=True)
    snapshots.mkdir()
    for name, content in files.items():
        (blobs / name.replace(".", "0")).write_bytes(content)  # type: ignore[arg-type]
    links: Files = {name: Link(f"../../blobs/{name.replace('.', '0')}") for name in files}
    load(write(snapshots / "main", links))
    (tmp_path / "models--a--b" / "secret").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="is a link"):
        load(write(snapshots / "other", links | {"config.json": Link("../../secret")}))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.pth"])
def test_a_pickle_is_refused_by_name_and_never_run(name: str, files: Files, tmp_path: Path) -> None:
    del files["model.safetensors"]
    canary = tmp_path / "canary"
    files[name] = b"cos\nsystem\n(S'touch " + os.fsencode(canary) + b"'\ntR."
    refusal(write(tmp_path / "m", files), f"{name} is a pickle and is never opened")
    assert not canary.exists()


def test_what_is_no_file_is_not_waited_for(files: Files, tmp_path: Path) -> None:
    del files["model.safetensors"]
    folder = write(tmp_path / "m", files)
    os.mkfifo(folder / "model.safetensors")
    refusal(folder, "no .safetensors file")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    refusal(folder, "no .safetensors file")


def test_a_config_that_asks_for_more_than_there_is_takes_no_memory(files: Files, tmp_path: Path) -> None:
    """Found in the headers, before anything is allocated."""
    for field, most in {"num_hidden_layers": 4096, "vocab_size": 2**24, "intermediate_size": 2**24}.items():
        folder = tmp_path / field
        refusal(write(folder, files | {"config.json": json.dumps(CONFIG | {field: most}).encode()}), "tensor")
