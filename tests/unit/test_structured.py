"""What a request may say about the form of its answer, and what is refused with the field named."""

import dataclasses
import json

import pytest

from slipstream import SamplingParams, StructuredOutput
from slipstream.errors import RequestError
from slipstream.options import gather
from slipstream.schema import MAX_NESTING
from slipstream.structured import MAX_CHARS, MAX_MARKER_BYTES

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "form", "texts"),
    [
        ({"json": SCHEMA}, "json", (json.dumps(SCHEMA),)),
        ({"json": json.dumps(SCHEMA)}, "json", (json.dumps(SCHEMA),)),
        ({"json": True}, "json", ('{"type": "object"}',)),
        ({"json": nested(MAX_NESTING)}, "json", (json.dumps(nested(MAX_NESTING)),)),
        ({"regex": "[a-z]+"}, "regex", ("[a-z]+",)),
        ({"grammar": 'root ::= "a"', "after": "</think>"}, "grammar", ('root ::= "a"',)),
        ({"choice": ["yes", "no"]}, "choice", ("yes", "no")),
        ({"choice": ("é", "\n")}, "choice", ("é", "\n")),
    ],
)  # fmt: skip
def test_one_form_is_taken(fields, form, texts):
    asked = StructuredOutput(**fields)
    assert (asked.form, asked.texts) == (form, texts)
    assert asked == StructuredOutput(**fields) and hash(asked) == hash(StructuredOutput(**fields))
    params = SamplingParams(structured=asked)
    assert hash(params) == hash(dataclasses.replace(params))
    assert SamplingParams(structured=fields) == params, "a table, as files have it"


LOOP: dict = {}
LOOP["items"] = LOOP
REFUSED = [
    ({}, "exactly one of json, regex, grammar, choice; it has none"),
    ({"after": "x"}, "it has none"),
    ({"json": True, "regex": "a"}, "it has json and regex"),
    ({"json": False}, r"structured\.json is False"),
    ({"json": 5}, r"structured\.json is 5"),
    ({"json": "{"}, r"structured\.json is no JSON"),
    ({"json": "[]"}, r"structured\.json holds \[\]"),
    ({"json": "5"}, r"structured\.json holds 5"),
    ({"json": ""}, r"structured\.json is no JSON"),
    ({"json": {"const": float("nan")}}, r"structured\.json is no JSON"),
    ({"json": {"const": {1, 2}}}, r"structured\.json is no JSON"),
    ({"json": LOOP}, r"structured\.json is no JSON"),
    ({"json": '{"items":' * 20000 + "{}" + "}" * 20000}, r"structured\.json is no JSON"),
    ({"json": nested(500)}, r"structured\.json is nested 500 deep"),
    ({"json": nested(900)}, r"structured\.json is (nested 900 deep|no JSON)"),
    ({"json": '{"items":' * 960 + "{}" + "}" * 960}, r"structured\.json is (nested 961 deep|no JSON)"),
    ({"json": nested(MAX_NESTING + 1)}, rf"structured\.json is nested {MAX_NESTING + 1} deep"),
    ({"json": {"const": "\ud800"}}, "lone surrogate"),
    ({"regex": ""}, r"structured\.regex is ''"),
    ({"regex": 5}, r"structured\.regex is 5"),
    ({"regex": "a\ud800"}, "lone surrogate"),
    ({"regex": "a\0b"}, "null character"),
    ({"regex": "a" * (MAX_CHARS + 1)}, r"structured\.regex has .* characters"),
    ({"grammar": ["a"]}, r"structured\.grammar is \['a'\]"),
    ({"choice": []}, r"structured\.choice is \[\]"),
    ({"choice": "yes"}, r"structured\.choice is 'yes'"),
    ({"choice": ["yes", ""]}, r"structured\.choice is ''"),
    ({"choice": ["yes", 5]}, r"structured\.choice is 5"),
    ({"choice": ["x" * 1000] * 70}, r"structured\.choice has .* characters"),
    ({"regex": "a", "after": ""}, r"structured\.after is ''"),
    ({"regex": "a", "after": 5}, r"structured\.after is 5"),
    ({"regex": "a", "after": "x" * (MAX_MARKER_BYTES + 1)}, r"structured\.after has"),
    ({"regex": "a", "after": "\N{GRINNING FACE}" * (MAX_MARKER_BYTES // 4 + 1)}, r"structured\.after has 68 bytes"),
]


@pytest.mark.parametrize(("fields", "says"), REFUSED)
def test_what_is_no_form_is_refused(fields, says):
    with pytest.raises(RequestError, match=says):
        StructuredOutput(**fields)
    with pytest.raises(RequestError, match=says):
        SamplingParams(structured=fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"structured": "json"}, "structured is 'json'; give a StructuredOutput"),
        ({"structured": True}, "structured is True"),
        ({"structured": {"jsn": True}}, "structured has no 'jsn'; known: json, regex"),
        ({"structured": {"json": True}, "min_tokens": 1}, "min_tokens bans the only tokens"),
        ({"structured": {"json": True}, "ignore_eos": True}, "ignore_eos leaves no token"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_together_is_refused(fields, says):
    with pytest.raises(RequestError, match=says):
        SamplingParams(**fields)


def test_ignored_ends_are_fine_where_another_is_given():
    asked = SamplingParams(structured={"json": True}, ignore_eos=True, stop_token_ids=(5,))
    assert asked.structured == StructuredOutput(json=True)


def test_a_config_file_may_name_it(tmp_path):
    path = tmp_path / "options.json"
    path.write_text(json.dumps({"structured": {"json": SCHEMA, "after": "</think>"}, "max_tokens": 9}))
    asked = StructuredOutput(json=SCHEMA, after="</think>")
    assert gather({}, path).sampling_params() == SamplingParams(structured=asked, max_tokens=9)
    path = tmp_path / "options.toml"
    path.write_text('[structured]\nchoice = ["yes", "no"]\n')
    assert gather({}, path).sampling_params() == SamplingParams(structured=StructuredOutput(choice=("yes", "no")))
