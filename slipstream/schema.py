"""Which JSON schemas can be kept: those whose every keyword the library that compiles them honours, where it stands.

The library passes over what it does not know, and over much that stands beside something else; an answer would then
break the schema that it was asked for. So the schema is walked before it is compiled, and what would be passed over is
refused by name. What can be kept is listed in `StructuredOutput`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.errors import RequestError
from slipstream.patterns import as_json_string, misread

MAX_NESTING = 64  # of a JSON schema: compiling takes the cube of it
ANNOTATIONS = {
    "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "discriminator",
    "contentEncoding", "contentMediaType", "$schema", "$comment", "$defs", "definitions",
}  # fmt: skip
BOUNDS = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
NUMBERS = {name for pair in BOUNDS for name in pair}
KEYWORDS: dict[str, set[str]] = {
    "null": set(),
    "boolean": set(),
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": NUMBERS,
    "integer": NUMBERS | {"multipleOf"},
    "object": {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
}
# No types of themselves. Each stands alone, but for annotations, and `type` beside the first two.
WHOLE = ("enum", "const", "$ref", "anyOf", "oneOf", "allOf")
FORMATS = {
    "date", "time", "date-time", "duration", "email", "uri", "uri-reference", "uri-template", "uuid", "ipv4", "ipv6",
    "hostname", "json-pointer", "relative-json-pointer",
}  # fmt: skip
_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),), "boolean": (bool,), "string": (str,), "number": (int, float), "integer": (int,),
    "object": (Mapping,), "array": (list, tuple),
}  # fmt: skip
_MOST_WHOLE = 1 << 63  # the library keeps whole numbers below it as they are

Schema = Mapping[str, Any]


def check_schema(root: Schema) -> None:
    """RequestError for a schema that cannot be kept: it names the keyword, where it stands, and what to do."""
    if (depth := nesting(root)) > MAX_NESTING:
        raise RequestError(f"structured.json is nested {depth} deep; at most {MAX_NESTING}")
    for place, schema in _walk(root):
        _check(place, schema, root)


def as_compiled(root: dict[str, Any]) -> dict[str, Any]:
    """A checked schema, changed in place to what the library reads as it was meant: its patterns are written anew."""
    for _, schema in list(_walk(root)):
        assert isinstance(schema, dict)
        if isinstance(schema.get("pattern"), str):
            schema["pattern"] = as_json_string(schema["pattern"])
        if isinstance(schema.get("patternProperties"), dict):
            schema["patternProperties"] = {as_json_string(k): v for k, v in schema["patternProperties"].items()}
    return root


def _walk(root: Schema) -> Iterator[tuple[str, Schema]]:
    """Every schema but true and false, and where it stands, once; checked before those within it are looked for."""
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [("", root)]
    while waiting:
        place, schema = waiting.pop()
        if isinstance(schema, bool) or id(schema) in seen:
            continue
        if not isinstance(schema, Mapping):
            raise RequestError(f"structured.json has {schema!r}{_at(place)}, which is no schema; give a table or true")
        seen.add(id(schema))
        yield place, schema
        waiting.extend(_inner(place, schema, root))


def nesting(root: object) -> int:
    """Tables and lists within each other."""
    deepest, waiting = 0, [(1, root)]
    while waiting:
        depth, value = waiting.pop()
        if isinstance(value, Mapping | list | tuple):
            deepest = max(deepest, depth)
            waiting += [(depth + 1, each) for each in (value.values() if isinstance(value, Mapping) else value)]
    return deepest


def _inner(place: str, schema: Schema, root: Schema) -> Iterator[tuple[str, object]]:
    """The schemas that this one is made of, and where they stand."""
    for name in ("properties", "patternProperties"):
        for key, each in _table(place, schema, name).items():
            yield f"{place}/{name}/{key}", each
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for index, each in enumerate(_listed(place, schema, name)):
            yield f"{place}/{name}/{index}", each
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield f"{place}/{name}", schema[name]
    if "$ref" in schema:
        yield str(schema["$ref"]).removeprefix("#"), _target(place, schema["$ref"], root)


def _check(place: str, schema: Schema, root: Schema) -> None:
    known = ANNOTATIONS.union(WHOLE, {"type"}, *KEYWORDS.values())
    for name in schema:
        harmless = (name == "$id" and schema is root) or (name == "uniqueItems" and schema[name] is False)
        if name not in known and not harmless:
            raise _cannot(place, name, "remove it")
    given = [name for name in schema if name not in ANNOTATIONS and name in known]
    whole = [name for name in WHOLE if name in schema]
    if not whole:
        _check_typed(place, schema, given)
        return
    others = [name for name in given if name != whole[0] and not (name == "type" and whole[0] in ("enum", "const"))]
    if others:
        raise _cannot(place, others[0], f"beside {whole[0]!r}; leave one of the two")
    if whole[0] in ("enum", "const"):
        _check_values(place, schema)
    if whole[0] == "allOf" and len(_listed(place, schema, "allOf")) != 1:
        raise _cannot(place, "allOf", "of several schemas; merge them into one")


def _check_values(place: str, schema: Schema) -> None:
    """Those of an enum or a const are of the type beside it, which the library does not look at."""
    kinds = _kinds(place, schema)
    for value in _listed(place, schema, "enum") if "enum" in schema else [schema["const"]]:
        if kinds and not any(_is_of(value, kind) for kind in kinds):
            raise RequestError(f"structured.json has {value!r}{_at(place)}, which is not of its type; remove it")
        if _has_big_number(value):
            raise _cannot(place, "enum" if "enum" in schema else "const", "with a whole number of more than 64 bits")


def _has_big_number(root: object) -> bool:
    """The library rounds it."""
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping | list | tuple):
            waiting += value.values() if isinstance(value, Mapping) else value
        elif isinstance(value, int) and not -_MOST_WHOLE <= value < _MOST_WHOLE:
            return True
    return False


def _is_of(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, float) and kind == "integer":
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _check_typed(place: str, schema: Schema, given: list[str]) -> None:
    kinds = _kinds(place, schema) or _implied(schema)
    applying = [name for name in given if name != "type"]
    if not kinds:
        if applying:
            raise _cannot(place, applying[0], "without 'type' beside it; add that")
        return
    if "string" in kinds:
        _check_string(place, schema)
    if "object" in kinds:
        _check_object(place, schema)
    if "number" in kinds and "multipleOf" in schema:
        raise _cannot(place, "multipleOf", "of type 'number'; make it 'integer', or remove it")
    if "integer" in kinds and not isinstance(schema.get("multipleOf", 1), int):
        raise _cannot(place, "multipleOf", "unless it is a whole number")
    bounds = [any(name in schema for name in pair) for pair in BOUNDS]
    if "multipleOf" in schema and any(bounds) and not all(bounds):
        raise _cannot(place, "multipleOf", "with a bound on one side only; give one on either side, or none")


def _implied(schema: Schema) -> list[str]:
    """The type that the library takes where none is named."""
    if "properties" in schema or "additionalProperties" in schema:
        return ["object"]
    return ["array"] if "items" in schema or "prefixItems" in schema else []


def _check_string(place: str, schema: Schema) -> None:
    form = next((name for name in ("format", "pattern") if name in schema), None)
    other = next((name for name in ("pattern", "minLength", "maxLength") if name in schema and name != form), None)
    if form and other:
        raise _cannot(place, other, f"beside {form!r}; leave one of the two")
    if "format" in schema and (not isinstance(schema["format"], str) or schema["format"] not in FORMATS):
        raise _cannot(place, f"format: {schema['format']}", f"remove it; known are {', '.join(sorted(FORMATS))}")
    for pattern in [schema["pattern"]] if "pattern" in schema else list(schema.get("patternProperties", ())):
        _check_pattern(place, pattern)


def _check_object(place: str, schema: Schema) -> None:
    properties, others = _table(place, schema, "properties"), schema.get("additionalProperties", False)
    patterns = _table(place, schema, "patternProperties")
    for name in _listed(place, schema, "required"):
        if not isinstance(name, str) or name not in properties:
            raise RequestError(
                f"structured.json requires {name!r}{_at(place)}, which is none of its properties; name it there"
            )
    if patterns and (properties or others or len(patterns) > 1):
        beside = "another one" if len(patterns) > 1 else "'properties'" if properties else "'additionalProperties'"
        raise _cannot(place, "patternProperties", f"beside {beside}; leave one of the two")
    for pattern in patterns:
        _check_pattern(place, pattern)
    if (patterns or others) and "minProperties" in schema:
        raise _cannot(place, "minProperties", "where properties are not named; name them, or remove it")


def _check_pattern(place: str, pattern: object) -> None:
    if not isinstance(pattern, str):
        raise RequestError(f"structured.json has the pattern {pattern!r}{_at(place)}; give a text")
    if reason := misread(pattern, in_json=True):
        raise _cannot(place, f"pattern: {pattern[:80]}", f"for {reason}")


def _target(place: str, ref: object, root: Schema) -> object:
    """What a $ref means, within the same schema."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")) or "%" in ref:
        raise _cannot(place, f"$ref: {ref}", "give a path within the schema, such as #/$defs/name")
    found: object = root
    for part in ref.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list | tuple) and _is_index(name) and int(name) < len(found):
            found = found[int(name)]
        else:
            raise RequestError(f"structured.json has the $ref {ref!r}{_at(place)}, and nothing stands there; add it")
    return found


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 10


def _kinds(place: str, schema: Schema) -> list[str]:
    """The types that are named."""
    if "type" not in schema:
        return []
    value = schema["type"]
    kinds = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []
    if not kinds or not all(isinstance(kind, str) and kind in KEYWORDS for kind in kinds):
        raise RequestError(f"structured.json has the type {value!r}{_at(place)}; known: {', '.join(KEYWORDS)}")
    return kinds


def _table(place: str, schema: Schema, name: str) -> Schema:
    value = schema.get(name, {})
    if not isinstance(value, Mapping):
        raise RequestError(f"structured.json has {name!r}{_at(place)} as {value!r}; give a table")
    return value


def _listed(place: str, schema: Schema, name: str) -> list[Any]:
    value = schema.get(name, [])
    if not isinstance(value, list | tuple) or (name in schema and name != "required" and not value):
        raise RequestError(f"structured.json has {name!r}{_at(place)} as {value!r}; give a list that is not empty")
    return list(value)


def _cannot(place: str, name: str, remedy: str) -> RequestError:
    return RequestError(f"structured.json has {name!r}{_at(place)}, which cannot be kept: {remedy}")


def _at(place: str) -> str:
    return f" at {place}" if place else ""
