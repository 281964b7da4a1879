"""Schemas that would not be kept are refused with the keyword, its place and a remedy.

That those which are taken are kept, tests/e2e/test_schema_kept.py asks the library.
"""

from typing import Any

import pytest

from slipstream.errors import RequestError
from slipstream.schema import check_schema
from slipstream.structured import StructuredOutput

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"not": {"type": "string"}}, "has 'not', which cannot be kept: remove it"),
    ({"type": "string", "not": {"const": "a"}}, "'not'"),
    ({"if": {"const": "a"}, "then": {"const": "b"}}, "'if'"),
    ({"typ": "integer"}, "'typ'"),
    ({"nullable": True, "type": "integer"}, "'nullable'"),
    ({"type": "array", "items": {"enum": [1]}, "uniqueItems": True}, "'uniqueItems'"),
    ({"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}}, "'contains'"),
    ({"type": "array", "prefixItems": [True], "additionalItems": False}, "'additionalItems'"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, "'propertyNames'"),
    ({"type": "object", "unevaluatedProperties": False}, "'unevaluatedProperties'"),
    ({"$anchor": "x", "type": "integer"}, r"'\$anchor'"),
    ({"items": {"$id": "x", "type": "integer"}}, r"'\$id' at /items"),
    ({"allOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, "'allOf', which cannot be kept: of several schemas"),
    ({"allOf": [{"type": "integer"}], "minimum": 3}, "'minimum', which cannot be kept: beside 'allOf'"),
    ({"anyOf": [{"enum": ["a"]}], "enum": ["b"]}, "'anyOf', which cannot be kept: beside 'enum'"),
    ({"anyOf": [{"type": "integer"}], "type": "string"}, "'type', which cannot be kept: beside 'anyOf'"),
    ({"oneOf": [{"type": "integer"}], "minimum": 3}, "'minimum', which cannot be kept: beside 'oneOf'"),
    ({"anyOf": []}, "'anyOf' as .*give a list"),
    ({"enum": []}, "'enum' as .*give a list"),
    ({"enum": ["a"], "const": "a"}, "'const', which cannot be kept: beside 'enum'"),
    ({"type": "integer", "enum": [1, 2], "minimum": 2}, "'minimum', which cannot be kept: beside 'enum'"),
    ({"type": "string", "enum": ["a", 1]}, "has 1, which is not of its type"),
    ({"type": "integer", "enum": [True]}, "has True, which is not of its type"),
    ({"type": "string", "const": 1}, "has 1, which is not of its type"),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"enum": [1, 2]}}, "minimum": 2}, r"beside '\$ref'"),
    ({"$ref": "x", "$defs": {"x": {"$id": "x"}}}, r"'\$ref: x', which cannot be kept: give a path"),
    ({"$ref": "#/$defs/x%20y", "$defs": {"x y": True}}, "give a path"),
    ({"$ref": "#/$defs/y"}, r"the \$ref '#/\$defs/y', and nothing stands there"),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"not": {}}}}, r"'not' at /\$defs/x"),
    ({"type": "string", "pattern": "^a+$", "minLength": 3}, "'minLength', which cannot be kept: beside 'pattern'"),
    ({"type": "string", "format": "date", "pattern": "a"}, "'pattern', which cannot be kept: beside 'format'"),
    ({"type": "string", "format": "date", "maxLength": 3}, "'maxLength', which cannot be kept: beside 'format'"),
    ({"type": "string", "format": "iban"}, "'format: iban', which cannot be kept: remove it; known are date,"),
    ({"type": "string", "pattern": "(?=x)x"}, "for it looks ahead"),
    ({"type": "string", "pattern": "(?!x)y"}, "for it looks ahead"),
    ({"type": "string", "pattern": "a$b"}, r"for it has \^ or \$ within"),
    ({"type": "string", "pattern": "a^b"}, r"for it has \^ or \$ within"),
    ({"type": "string", "pattern": 5}, "the pattern 5"),
    ({"minLength": 2}, "'minLength', which cannot be kept: without 'type'"),
    ({"minimum": 2}, "'minimum'.*without 'type'"),
    ({"required": ["a"]}, "'required'.*without 'type'"),
    ({"type": "number", "multipleOf": 7}, "'multipleOf'"),
    ({"type": ["integer", "number"], "multipleOf": 7}, "'multipleOf'"),
    ({"type": "integer", "multipleOf": 0.5}, "'multipleOf'"),
    ({"type": "integer", "multipleOf": 5, "minimum": 0}, "'multipleOf', .*a bound on one side"),
    ({"type": "integer", "multipleOf": 5, "exclusiveMaximum": 0}, "'multipleOf', .*a bound on one side"),
    ({"const": 2**63}, "'const', which cannot be kept: with a whole number of more than 64 bits"),
    ({"enum": [1, {"a": [-(2**63) - 1]}]}, "'enum', which cannot be kept: with a whole number"),
    ({"type": "string", "pattern": "[^]"}, "it has .*write ."),
    ({"type": "string", "pattern": "(?i)a"}, r"it has \(\?i"),
    ({"type": "string", "format": ["date"]}, r"format: \['date'\]"),
    ({"type": "object", "properties": {"a": True}, "required": [["a"]]}, r"requires \['a'\]"),
    ({"$ref": "#/$defs/" + "1" * 5000, "$defs": [True]}, "nothing stands there"),
    ({"type": "any"}, "the type 'any'"),
    ({"type": []}, r"the type \[\]"),
    ({"type": [["string"]]}, "the type"),
    ({"type": "object", "properties": {"a": True}, "required": ["b"]}, "requires 'b', which is none of its properties"),
    ({"type": "object", "required": ["b"]}, "requires 'b'"),
    ({"type": "object", "properties": []}, "'properties' as"),
    ({"type": "object", "properties": {"a": 5}}, "has 5 at /properties/a, which is no schema"),
    ({"type": "object", "properties": {"a": {"not": {}}}}, "'not' at /properties/a"),
    ({"type": "object", "patternProperties": {"^x": True}, "properties": {"a": True}}, "beside 'properties'"),
    ({"type": "object", "patternProperties": {"^x": True, "^y": True}}, "beside another one"),
    ({"type": "object", "patternProperties": {"x": {"enum": [1]}}, "additionalProperties": True}, "beside 'addit"),
    ({"type": "object", "patternProperties": {"(?=x)x": True}}, "for it looks ahead"),
    ({"type": "object", "additionalProperties": True, "minProperties": 2}, "'minProperties'"),
    ({"type": "array", "items": [{"type": "integer"}]}, "at /items, which is no schema"),
    ({"type": "array", "items": {"not": {}}}, "'not' at /items"),
    ({"type": "array", "prefixItems": [True, {"not": {}}]}, "'not' at /prefixItems/1"),
    ({"anyOf": [True, {"not": {}}]}, "'not' at /anyOf/1"),
    ({"additionalProperties": {"not": {}}}, "'not' at /additionalProperties"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "says"), REFUSED)
def test_what_would_not_be_kept_is_refused(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=f"structured.json .*{says}|structured.json {says}"):
        StructuredOutput(json=schema)


TAKEN: list[dict[str, Any]] = [
    {},
    {"$schema": "x", "$id": "y", "title": "A", "description": "b", "default": 1, "examples": [1], "type": "integer"},
    {"$defs": {"unused": {"not": {}}}, "type": "string", "minimum": 3},
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"type": "object", "properties": {"not": {"type": "string"}, "enum": True}, "required": ["enum"]},
    {"$ref": "#/$defs/a~1b/0", "$defs": {"a/b": [{"type": "integer"}]}},
    {"type": "string", "enum": ["a", "b"]},
    {"type": ["string", "null"], "enum": ["a", None]},
    {"type": "number", "enum": [1, 1.5]},
    {"type": "integer", "const": 1.0},
    {"type": "array", "uniqueItems": False},
    {"type": "string", "pattern": r"(^\$[$^a]|\^b$)"},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "exclusiveMaximum": 9},
]


@pytest.mark.parametrize("schema", TAKEN)
def test_what_is_kept_is_taken(schema: dict[str, Any]) -> None:
    check_schema(schema)
