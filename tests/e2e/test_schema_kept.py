"""Schemas that are taken are kept: of values on either side of each keyword the library admits those that conform."""

import itertools
import json
import random
import re
from functools import cache
from typing import Any

import pytest

from slipstream.compiler import Vocabulary, XMatcher, compiled_by
from slipstream.schema import FORMATS
from slipstream.structured import StructuredOutput

EOS = 256


@cache
def byte_compiler() -> Any:
    return Vocabulary((*(bytes([byte]) for byte in range(256)), b""), (EOS,)).compiler()


def admits(schema: dict[str, Any], text: str) -> bool:
    compiled = compiled_by(byte_compiler(), ("json", StructuredOutput(json=schema).texts, (EOS,)))
    matcher = XMatcher(compiled, [EOS])
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(EOS)


REF = {"$ref": "#/$defs/x", "$defs": {"x": {"enum": [1, 2]}}, "description": "d"}
LIST = {"type": "object", "properties": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}, "required": ["n"]}
TWO = {"type": "object", "properties": {"a": {"enum": [1]}, "b": {"enum": [1]}}}
A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
STR, INT, NUM, OBJ, ARR = ({"type": name} for name in ("string", "integer", "number", "object", "array"))
CASES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [  # schema, what conforms, what does not
    ({}, [1, "a", {}, [], None], []),
    ({"type": "null"}, [None], [1, "a"]),
    ({"type": "boolean"}, [True, False], [0]),
    ({"type": ["integer", "string"], "minimum": 2, "maxLength": 2}, [2, "a"], [1, "abc", None]),
    ({**STR, "minLength": 2, "maxLength": 3}, ["ab", "éé", "abc"], ["a", "abcd", 1]),
    ({**STR, "maxLength": 0}, [""], ["a"]),
    ({**STR, "pattern": "^ab$"}, ["ab"], ["a", "abx", "xab"]),
    ({**STR, "pattern": "^a(-b+)?$"}, ["a", "a-b", "a-bb"], ["ab", "abb", "a-"]),
    ({**INT, "minimum": -5, "maximum": 5}, [-5, 0, 5], [-6, 6, 1.5]),
    ({**INT, "exclusiveMinimum": 1, "exclusiveMaximum": 5}, [2, 4], [1, 5]),
    ({**INT, "multipleOf": 7, "minimum": 1, "maximum": 20}, [7, 14], [0, 6, 21]),
    ({**INT, "multipleOf": 7}, [0, 7, -14], [1, 20, -6]),
    ({**NUM, "minimum": 1.5, "maximum": 1.6}, [1.5, 1.55, 1.6], [1.4, 1.7, 0.9, 2]),
    ({**NUM, "exclusiveMinimum": 0}, [0.1, 1], [0, -1]),
    ({"enum": ["a", 1, None, [1]]}, ["a", 1, None], ["b", 2]),
    ({"type": "string", "enum": ["a", "b"]}, ["a", "b"], ["c", 1]),
    ({"const": "é"}, ["é"], ["e"]),
    ({"const": -(2**63)}, [-(2**63)], [2**63]),
    (REF, [1, 2], [3]),
    (LIST, [{"n": None}, {"n": {"n": None}}], [{}, {"n": 1}, {"n": {"n": 1}}]),
    ({"anyOf": [INT, STR]}, [1, "a"], [None]),
    ({"oneOf": [INT, STR]}, [1, "a"], [None]),
    ({"allOf": [INT]}, [1], ["a"]),
    (OBJ, [{}, {"a": {"b": [1]}}], [[], 1]),
    (A, [{}, {"a": 1}], [{"a": "x"}, {"b": 1}]),
    ({**A, "required": ["a"]}, [{"a": 1}], [{}]),
    ({**A, "additionalProperties": True}, [{"a": 1}, {"a": 1, "b": "x"}], [{"a": "x"}]),
    ({**A, "additionalProperties": {"type": "string"}}, [{"b": "x"}], [{"b": 1}, {"a": "x"}]),
    ({**TWO, "minProperties": 1}, [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}], [{}]),
    ({**TWO, "maxProperties": 1}, [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
    ({**OBJ, "additionalProperties": INT, "maxProperties": 1}, [{}, {"x": 1}], [{"x": 1, "y": 2}, {"x": "a"}]),
    ({**OBJ, "patternProperties": {"^x[0-9]$": INT}}, [{"x1": 1}, {}], [{"x1": "a"}, {"y": 1}]),
    ({**OBJ, "patternProperties": {"x(é1*)?": INT}}, [{"x": 1}, {"xé1": 1}], [{"x1": 1}]),
    ({"properties": {"a": INT}}, [{"a": 1}], [{"a": "x"}]),
    ({**ARR, "items": INT, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3], ["a"]]),
    ({**ARR, "prefixItems": [INT], "items": STR}, [[1], [1, "a"]], [["a"], [1, 2]]),
    ({**ARR, "prefixItems": [INT, STR], "items": False}, [[1, "a"]], [["a"], [1, "a", 2]]),
    ({"items": INT}, [[], [1]], [["a"]]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES)
def test_what_conforms_is_admitted_and_nothing_else(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not admits(schema, json.dumps(value, ensure_ascii=False))] == []
    assert [value for value in bad if admits(schema, json.dumps(value, ensure_ascii=False))] == []


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_that_are_taken_are_honoured(name: str) -> None:
    assert not admits({"type": "string", "format": name}, '"zz {zz"')


@pytest.mark.parametrize(
    "schema", [STR, {**STR, "minLength": 1}, {**STR, "maxLength": 5}, {**STR, "minLength": 1, "maxLength": 5}]
)
def test_strings_are_json(schema: dict[str, Any]) -> None:
    for control in map(chr, range(32)):
        assert not admits(schema, f'"a{control}"')
    assert admits(schema, '"\x7fé😀"')
    assert not admits(schema, '"a"b"')


ATOMS = (
    "a", "b", "é", "😀", "[ab]", "[^a]", "[^é]", "[^😀a]", '["a]', '[^"]', ".", r"\s", r"\S", r"\w", r"\W", r'[\w"]', r"[^\w]", r'[^\\"]',
    "[é-ü]", "[^é-ü]", "[a-é]", r"[^\n]", '[é"]', r'["\w\n]', r"[^\\é]", "]", r"\u00e9", r"[^\u{1F600}]", "a{2}", "[^-]",
)  # fmt: skip
CHARS = ("a", "b", '"', "\\", "\n", "é", "😀", "]")


def pattern_of(draw: random.Random, depth: int = 3) -> str:
    kind = draw.random()
    if depth == 0 or kind < 0.3:
        return draw.choice(ATOMS)
    first, second = pattern_of(draw, depth - 1), pattern_of(draw, depth - 1)
    if kind < 0.5:
        return first + second
    return f"({first}|{second})" if kind < 0.6 else f"(?:{first}){draw.choice(('?', '*', '+', '??', '{1,2}'))}"


@pytest.mark.parametrize("seed", range(4))
def test_a_string_with_a_pattern_is_json_and_matches(seed: int) -> None:
    """As Python reads it, of all texts that JSON need not write with an escape."""
    draw = random.Random(seed)
    texts = ["".join(chars) for count in range(4) for chars in itertools.product(CHARS, repeat=count)]
    for pattern in [pattern_of(draw) for _ in range(10)]:
        compiled = compiled_by(
            byte_compiler(), ("json", StructuredOutput(json={**STR, "pattern": pattern}).texts, (EOS,))
        )
        expected = re.compile(
            re.sub(r"\\u\{(.*?)\}", lambda found: chr(int(found[1], 16)), pattern), re.DOTALL | re.ASCII
        )
        for text in texts:
            matcher = XMatcher(compiled, [EOS])
            admitted = all(matcher.accept(byte) for byte in f'"{text}"'.encode()) and matcher.accept(EOS)
            assert admitted == bool(not set(text) & {'"', "\\", "\n"} and expected.fullmatch(text)), (pattern, text)
