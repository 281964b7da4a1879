"""Regular expressions: what the library would misread is refused, and what it reads wrongly as it stands is written anew."""

import time

import pytest

from slipstream.errors import RequestError
from slipstream.patterns import as_json_string, misread
from slipstream.structured import StructuredOutput

MISREAD = [
    ("a$b", r"\^ or \$ within"),
    ("a^b", r"\^ or \$ within"),
    ("(a|b$)c", r"\^ or \$ within"),
    ("(a$)*", r"\^ or \$ within"),
    ("(^a|b)+", r"\^ or \$ within"),
    ("a(^b|c)", r"\^ or \$ within"),
    (r"\Aa", r"\\A"),
    (r"a\Z", r"\\Z"),
    (r"[\h]", r"\\h"),
    (r"\x{22}", r"\\x"),
    (r"\u12", r"\\u"),
    (r"\042", r"\\04"),
]


@pytest.mark.parametrize(("pattern", "says"), MISREAD)
def test_what_means_something_else_to_the_library_is_refused(pattern: str, says: str) -> None:
    with pytest.raises(RequestError, match=f"structured.regex .*{says}"):
        StructuredOutput(regex=pattern)
    with pytest.raises(RequestError, match=f"structured.json .*{says}"):
        StructuredOutput(json={"type": "string", "pattern": pattern})


@pytest.mark.parametrize(
    "pattern",
    [
        '"', r"\"", "a\"b", r"\\", r"[\\]", '["]', r'["\\]', r"\n", r"a\tb", "a\nb", r"[\n\t]", r"\x22", r"\u0022",
        r"\u{22}", r"\cA", r"\0", r"[\x00-\x1f]", '["-"]', r"[^\s\S]", r"[^ -\u{10ffff}]", r"\ud83d\ude00",
    ],
)  # fmt: skip
def test_what_json_writes_with_an_escape_is_refused_in_json_alone(pattern: str) -> None:
    StructuredOutput(regex=pattern)
    for schema in ({"type": "string", "pattern": pattern}, {"type": "object", "patternProperties": {pattern: True}}):
        with pytest.raises(RequestError, match=r"structured\.json has .*, which JSON writes with an escape"):
            StructuredOutput(json=schema)


@pytest.mark.parametrize(
    "pattern",
    [
        "^a$", "(^a$)|b", "(^a|b$)", "^(?:^a)?", "$^", "^", r"^\$[$^a]\^$", '["a]', '[^"]', r"[^\\]", r"[^\n]", r'[\w"]', "[!-#]",
        r"\.\-\/\_", "(?<n>a)", "(?P<n>a)(?:b)", "[]", "[a", "a{2,3}?", "é[^é]", r"\u00e9\xe9", "", "[^\\S]",
    ],
)  # fmt: skip
def test_what_is_kept_is_taken(pattern: str) -> None:
    assert misread(pattern, in_json=True) is None


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ("(cb*)?a??b{0,1}?c*?", "(cb*){0,1}a{0,1}?b{0,1}?c*?"),
        ("(?:a)?(?<n>b)?", "(a){0,1}(b){0,1}"),
        ("é[^é😀]\\é[\\\\é]", r"\u00e9[^\u00e9\u{1f600}]\u00e9[\\\u00e9]"),
        (r"a\?[?](\?|a)", r"a\?[?](\?|a)"),
        ("a]", r"a\]"),
    ],
)
def test_optional_parts_and_characters_beyond_ascii_are_written_anew(pattern: str, written: str) -> None:
    assert as_json_string(pattern) == written


@pytest.mark.parametrize(
    "bomb", ["[", "(", "(?<", "{", "{1", "\\", "[\\", "[^", "(?<a", "(?<a>", "|", "^", "$(", "[a-", "*", "é"]
)
def test_long_ones_are_read_in_linear_time(bomb: str) -> None:
    begun = time.thread_time()
    misread(bomb * (30_000 // len(bomb)), in_json=True)
    as_json_string(bomb * (30_000 // len(bomb)))
    assert time.thread_time() - begun < 2
