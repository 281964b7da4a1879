"""What form an answer must have: a JSON schema, a regular expression, a grammar, or one of several texts.

Plain values, checked here as far as that needs no vocabulary; `grammars` compiles them. Torch-free, and without the
library that compiles.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from slipstream.errors import RequestError
from slipstream.patterns import misread
from slipstream.schema import check_schema

MAX_CHARS = 1 << 16  # of everything that one request gives to compile
MAX_MARKER_BYTES = 64  # of `after`
FORMS = ("json", "regex", "grammar", "choice")


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutput:
    """Exactly one of json, regex, grammar and choice; the whole answer has this form, or what follows `after`.

    json: a schema, as a dict or its text, kept as text; True: any JSON object. It may have
      type (one, or several), enum, const (alone or beside a type); $ref to #/ within the schema; anyOf, and oneOf, which
      is taken for anyOf: an answer may fit several; allOf of one;
      strings: either minLength and maxLength, or pattern (of the whole text, no look-around, nothing that JSON writes with an
      escape), or one of the formats in `schema.FORMATS`; integers, numbers: minimum, maximum, exclusiveMinimum,
      exclusiveMaximum; integers: multipleOf, with bounds on both sides or none;
      objects: properties, in their order, required, additionalProperties, which are made only if it says so,
      minProperties, maxProperties, or one of patternProperties alone; arrays: items, prefixItems, minItems, maxItems.
      A name that the answer writes with \\u escapes counts as another one than `properties` has.
      Beside them title, description, default, examples and other annotations. Else RequestError: it would not be kept.
    regex: the whole text, without look-around and back-references; `.` is any character, a line's end too, \\w and \\d are
      of ASCII.
    grammar: EBNF (GBNF) whose rule `root` is the text. choice: texts, one of which is the answer.
    after: everything is free until the output holds this text, an end (EOS, a stop) as well, which leaves an answer
      without a form; then the form begins. None: with the first token.
    """

    json: Mapping[str, Any] | str | bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    after: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise RequestError(f"structured needs exactly one of {', '.join(FORMS)}; it has {found}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar", "after"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        if self.regex is not None and (reason := misread(self.regex, in_json=False)):
            raise RequestError(f"structured.regex is {self.regex[:80]!r}, which cannot be kept, for {reason}")
        if (size := len((self.after or "").encode())) > MAX_MARKER_BYTES:
            raise RequestError(f"structured.after has {size} bytes; give at most {MAX_MARKER_BYTES}")
        if (size := sum(map(len, self.texts))) > MAX_CHARS:
            raise RequestError(f"structured.{self.form} has {size} characters; give at most {MAX_CHARS}")

    @property
    def form(self) -> str:
        """The name of the field that says it."""
        return next(name for name in FORMS if getattr(self, name) is not None)

    @property
    def texts(self) -> tuple[str, ...]:
        """What was given for it; of a choice, several."""
        value: str | tuple[str, ...] = getattr(self, self.form)
        return value if isinstance(value, tuple) else (value,)

    @classmethod
    def of(cls, value: object) -> "StructuredOutput":
        """From one, or from a mapping of its fields, as files have it."""
        if isinstance(value, cls):
            return value
        known = [f.name for f in fields(cls)]
        if not isinstance(value, Mapping):
            raise RequestError(f"structured is {value!r}; give a StructuredOutput or a table with one of {known}")
        if unknown := [name for name in value if name not in known]:
            raise RequestError(f"structured has no {unknown[0]!r}; known: {', '.join(known)}")
        return cls(**value)


def _schema_text(schema: object) -> str:
    """The schema as JSON. True stands for any object."""
    if schema is True:
        return '{"type": "object"}'
    if not isinstance(schema, str | Mapping):
        raise RequestError(f"structured.json is {schema!r}; give a schema (a table or its text), or true")
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
        parsed = json.loads(text)  # as it will be read: keys are texts
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"structured.json is no JSON: {error}") from error
    if not isinstance(parsed, Mapping):
        raise RequestError(f"structured.json holds {text[:80]}; a schema is a JSON object")
    check_schema(parsed)
    _check_text("json", text)
    return text


def _choices(choice: object) -> tuple[str, ...]:
    if not isinstance(choice, list | tuple) or not choice:
        raise RequestError(f"structured.choice is {choice!r}; give a list of texts")
    for text in choice:
        _check_text("choice", text)
    return tuple(choice)


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError(f"structured.{name} is {text!r}; give a text that is not empty")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise RequestError(f"structured.{name} holds a lone surrogate, which is no character; decode it properly")
    if "\0" in text:
        raise RequestError(f"structured.{name} holds a null character, which no grammar can have")
