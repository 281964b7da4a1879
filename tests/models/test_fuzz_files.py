"""Any bytes in: what a file says, or an error of ours. Headers of both formats, JSON, templates."""

import json
import math
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.errors import CheckpointError
from slipstream.models import folder
from slipstream.models.gguf import GGUFFile
from slipstream.models.gguf_container import TYPES, Container, Span
from slipstream.models.headers import DTYPE_BITS, read_file_header
from slipstream.models.template import rendered
from tests.models.corrupt import gguf, header, packed

FUZZ = settings(
    derandomize=True, database=None, deadline=None, max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
SAFETENSORS, GGUF = packed(header()), gguf().to_bytes()
NUMBERS = st.integers(-(2**70), 2**70) | st.sampled_from([0, 1, 8, 2**31, 2**32, 2**63, 2**64 - 1]) | st.floats()
ATOMS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.sampled_from([*DTYPE_BITS])
FIELDS = st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__"]) | st.text(max_size=4)
VALUES = st.recursive(
    ATOMS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4), max_leaves=10
)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """A file with a few bytes changed, cut out or put in, most of them near its beginning."""
    raw = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        most = draw(st.sampled_from([24, 200, len(raw)]))
        place = draw(st.integers(0, min(most, len(raw))))
        length = draw(st.sampled_from([0, 1, 1, 2, 4, 8, 50]))
        raw[place : place + length] = draw(st.binary(max_size=8) | st.sampled_from([b"\0" * 8, b"\xff" * 8]))
    return bytes(raw)


def entries() -> st.SearchStrategy[dict[str, Any]]:
    """Headers of which something may be true."""
    shape = st.lists(st.integers(0, 9), max_size=3)
    offsets = st.tuples(st.integers(0, 80), st.integers(0, 80)).map(sorted)
    entry = st.fixed_dictionaries({"dtype": st.sampled_from(["F32", "U8"]), "shape": shape, "data_offsets": offsets})
    return st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), entry | VALUES, max_size=4)


HEADERS = (
    st.binary(max_size=200)
    | damaged(SAFETENSORS)
    | st.tuples(entries(), st.binary(max_size=80)).map(lambda pair: packed(*pair))
    | VALUES.map(lambda value: packed(json.dumps(value).encode()))
)


@FUZZ
@given(raw=HEADERS)
def test_a_safetensors_header_tells_tensors_that_fill_the_file_or_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    try:
        tensors = read_file_header(path)
    except CheckpointError:
        return
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    assert sum(tensor.num_bytes for tensor in tensors) == len(raw) - 8 - int.from_bytes(raw[:8], "little")


@FUZZ
@given(raw=st.binary(max_size=200).map(lambda raw: b"GGUF\3\0\0\0" + raw) | damaged(GGUF))
def test_a_gguf_header_tells_tensors_within_the_file_or_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    try:
        found = Container(raw, path)
        for key, value in found.metadata.items():
            if isinstance(value, Span) and value.num_items < 100:
                assert len(found.array(key)) == value.num_items
        for tensor in found.entries.values():
            _, block_values, block_bytes = TYPES[tensor.kind]
            assert math.prod(tensor.shape) * block_bytes == tensor.num_bytes * block_values
            assert tensor.start + tensor.num_bytes <= len(raw)
        with GGUFFile(path) as file:
            assert file.spec().num_layers > 0
    except CheckpointError as error:
        assert "m.gguf" in str(error)  # noqa: PT017 (either will do)


@FUZZ
@given(text=VALUES.map(json.dumps) | st.text(max_size=80) | st.text(alphabet='{}[]":,0 ', max_size=40))
def test_json_is_what_the_library_says_or_a_value_error(text: str) -> None:
    try:
        value = folder.parse_json(text, len(text))
    except ValueError:
        return
    assert json.dumps(value) == json.dumps(json.loads(text))


@FUZZ
@given(raw=st.binary(max_size=80) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_a_config_is_an_object_or_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    try:
        assert isinstance(folder.read_json(tmp_path / "config.json"), dict)
    except CheckpointError as error:
        assert "config.json" in str(error)  # noqa: PT017


WORDS = st.sampled_from(
    ["messages", "m", "loop", "x", "1", "0", "'a'", "m.role", "m['content']", "+", "~", "/", "*", "|", ".", "[", "]", "(", ")", "is", "in",
     "upper", "tojson", "join", "sort", "length", "for", "endfor", "if", "else", "endif", "set", "=", "macro", "endmacro", "break",
     "namespace", "range", "__class__", "{{", "}}", "{%", "%}", "{#", "#}", " ", "\n", "raise_exception"]
)  # fmt: skip
PHRASES = st.lists(WORDS, max_size=8).map(" ".join)
TEMPLATES = (
    st.lists(WORDS, max_size=16).map(" ".join)
    | PHRASES.map("{{{{ {} }}}}".format)
    | PHRASES.map("{{% for m in messages %}}{{{{ {} }}}}{{% endfor %}}".format)
    | st.text(max_size=40)
)


@FUZZ
@given(template=TEMPLATES)
def test_a_template_makes_a_text_or_says_why_not(template: str) -> None:
    kind, text = rendered(template, {"messages": [{"role": "user", "content": "hi"}], "x": 1})
    assert isinstance(kind, bytes)
    assert isinstance(text, str)
