"""Any text in: prompts files, config files in JSON and TOML, forms of answers. What they say, or an error of ours."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.config import EngineConfig, SamplingParams, SpeculativeConfig
from slipstream.errors import ConfigError, RequestError, SlipstreamError
from slipstream.options import field_names, gather
from slipstream.prompts import prompt_source, read_prompts
from slipstream.structured import StructuredOutput

FUZZ = settings(
    derandomize=True, database=None, deadline=None, max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
NUMBERS = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from([0, 1, -1, 0.5])
ATOMS = (
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.sampled_from(["lag", "off", "auto", "cpu", "ngram"])
)


def values(keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        ATOMS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
    )


# ------------------------------------------------------------------------------------------------------------- prompts

TURNS = values(st.just("turns") | st.text(max_size=4))
LINES = (
    st.fixed_dictionaries({"turns": st.lists(st.text(max_size=12), max_size=2) | TURNS}).map(json.dumps)
    | TURNS.map(json.dumps)
    | st.text(max_size=20)
)


@FUZZ
@given(raw=st.lists(LINES, max_size=4).map("\n".join) | st.binary(max_size=60))
def test_a_prompts_file_holds_prompts_or_is_named(tmp_path: Path, raw: str | bytes) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(raw if isinstance(raw, bytes) else raw.encode("utf-8", "surrogatepass"))
    try:
        prompts = read_prompts(path)
    except ConfigError as error:
        assert "prompts.jsonl" in str(error)  # noqa: PT017 (either will do)
        return
    assert prompts
    for prompt in prompts:
        assert prompt.strip()
        prompt.encode()


@FUZZ
@given(name=st.text(max_size=12) | st.text(max_size=6).map("random:{}".format))
def test_a_name_of_prompts_is_a_path_or_a_number(name: str) -> None:
    try:
        assert str(prompt_source(name)) is not None
    except ConfigError as error:
        assert "random" in str(error)  # noqa: PT017


# -------------------------------------------------------------------------------------------------------- config files

NAMES = sorted(
    frozenset({"model", "verify"}).union(*map(field_names, (EngineConfig, SamplingParams, SpeculativeConfig)))
)
OPTIONS = st.dictionaries(st.sampled_from(NAMES), values(st.text(max_size=4)), min_size=1, max_size=3)
STRANGE = st.dictionaries(st.text(max_size=6), values(st.text(max_size=4)), max_size=3)


def toml(options: dict[str, Any]) -> str:
    """As TOML, as far as JSON's spelling of a value is TOML's."""
    return "\n".join(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in options.items())


def read(path: Path) -> None:
    """As commands read their options."""
    options = gather({}, path)
    options.sampling_params()
    options.engine_config()
    options.speculative_config()


@FUZZ
@given(
    raw=(OPTIONS | STRANGE).map(json.dumps) | OPTIONS.map(toml) | st.text(max_size=60) | st.binary(max_size=40),
    suffix=st.sampled_from([".json", ".toml"]),
)
def test_a_config_file_holds_options_or_is_refused(tmp_path: Path, raw: str | bytes, suffix: str) -> None:
    path = tmp_path / f"options{suffix}"
    path.write_bytes(raw if isinstance(raw, bytes) else raw.encode("utf-8", "surrogatepass"))
    try:
        read(path)
    except SlipstreamError as error:
        assert str(error)  # noqa: PT017


@pytest.mark.parametrize("name", NAMES)
def test_any_value_of_any_option_is_taken_or_refused_by_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    for value in (
        None,
        -1,
        2**70,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "\0",
        [],
        [[]],
        ["a", 1],
        {},
        {"a": {}},
        True,
    ):
        path.write_text(json.dumps({name: value}))
        try:
            read(path)
        except SlipstreamError as error:
            assert name in str(error), (value, str(error))  # noqa: PT017


# ----------------------------------------------------------------------------------------------------- forms of answers

KEYWORDS = st.sampled_from(
    ["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "properties", "required", "additionalProperties", "items",
     "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "multipleOf", "not",
     "patternProperties", "minProperties", "title"]
)  # fmt: skip
KINDS = st.sampled_from(
    ["object", "array", "string", "integer", "number", "boolean", "null", "#/$defs/a", "#", "^a+$", "date"]
)
SCHEMAS = st.recursive(
    KINDS | ATOMS,
    lambda inner: st.dictionaries(KEYWORDS, inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=10,
)
FORMS = st.dictionaries(
    st.sampled_from(["json", "regex", "grammar", "choice", "after", "x"]), SCHEMAS | st.text(max_size=12), max_size=2
)


@FUZZ
@given(form=SCHEMAS.map(lambda schema: {"json": schema}) | FORMS | SCHEMAS)
def test_a_form_is_taken_or_refused_by_field(form: Any) -> None:
    try:
        taken = StructuredOutput.of(form)
    except RequestError as error:
        assert "structured" in str(error)  # noqa: PT017
        return
    assert all(taken.texts)
    if taken.form == "json":
        assert isinstance(json.loads(taken.texts[0]), dict)
