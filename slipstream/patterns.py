"""Regular expressions of structured answers: what the library that compiles them would misread, and how to write the rest.

To the library `^` and `$` are nothing, and an escape that it does not know is the letter alone. In a string of JSON it
leaves out what must be escaped there, unless nothing else can be said or the pattern holds a character beyond ASCII; and
of `(ab*)?` it makes what admits `bbb`. The first are refused by name, the others written in a way that it reads as
meant. Everything goes through a pattern once: it may be long. Called by `schema`, `structured` and `compiler`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# One character, of a set or beside one.
_ESCAPE = r"\\(?:u\{[0-9a-fA-F]{1,6}\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|c[A-Za-z]|.)"
_MEMBER = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_PART = re.compile(
    rf"(?P<escape>{_ESCAPE})|(?P<set>\[(?:\\.|[^\]\\])*+\])|(?P<open>\((?:\?:|\?P?<\w{{1,32}}>|(?!\?)))|(?P<special>\(\?)"
    r"|(?P<close>\))|(?P<bar>\|)|(?P<anchor>[$^])|(?P<repeat>[*+?]|\{\d*,?\d*\})|(?P<char>.)",
    re.DOTALL,
)
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_KNOWN_LETTERS = "dDwWsSbBpPkxuc" + "".join(_CONTROLS)  # and what the library refuses itself
# Sets of code points; the last one, 128, stands for all beyond ASCII.
_ALL = frozenset(range(129))
_ESCAPED = frozenset((*range(32), ord('"'), ord("\\")))  # in JSON
_DIGITS = frozenset(range(48, 58))
_WORD = _DIGITS | {*range(65, 91), 95, *range(97, 123)}
_SPACE = frozenset((9, 10, 11, 12, 13, 32, 128))
_CLASSES = {
    "d": _DIGITS,
    "D": _ALL - _DIGITS,
    "w": _WORD,
    "W": _ALL - _WORD,
    "s": _SPACE,
    "S": _ALL - {*_SPACE} | {128},
}


@dataclass(frozen=True, slots=True)
class _Part:
    kind: str
    text: str


def misread(pattern: str, *, in_json: bool) -> str | None:
    """What in it would be misread, and what to do. in_json: it is of a string there."""
    parts = list(_parts(pattern))
    reason = _unknown_escape(parts) or _inner_anchor(parts)
    if reason or not in_json:
        return reason
    for number, part in enumerate(parts):
        if part.kind == "special":
            after = parts[number + 1].text if number + 1 < len(parts) else ""
            return ("it looks ahead" if after in ("=", "!") else f"it has (?{after}") + "; write it without"
        if part.text == "[^]":
            return "it has [^]; write ."
        if _is_only_escaped(part):
            return f"it has {part.text[:80]!r}, which JSON writes with an escape; write it without"
    return None


def as_json_string(pattern: str) -> str:
    """The same language, for the library to read within JSON."""
    written, before = [], ""
    for part in _parts(pattern):
        text = part.text
        if part.kind == "open":
            text = "("
        elif text == "?" and before not in ("repeat", "special"):
            text = "{0,1}"
        elif text == "]":
            text = r"\]"
        elif not text.isascii():
            text = "".join(map(_ascii, _MEMBER.findall(text)))
        written.append(text)
        before = part.kind
    return "".join(written)


def _parts(pattern: str) -> Iterator[_Part]:
    """They join to the pattern. A set without an end is the rest of it."""
    place = 0
    while place < len(pattern):
        found = _PART.match(pattern, place)
        assert found is not None and found.lastgroup is not None
        if found.lastgroup == "char" and found[0] == "[":
            yield _Part("rest", pattern[place:])  # which the library refuses
            return
        yield _Part(found.lastgroup, found[0])
        place = found.end()


def _unknown_escape(parts: Sequence[_Part]) -> str | None:
    """The library takes it for a letter."""
    after_null = False
    for part in parts:
        members = [part.text] if part.kind == "escape" else _MEMBER.findall(part.text) if part.kind == "set" else []
        for member in members:
            is_short = len(member) == 2 and member[0] == "\\" and member[1].isascii() and member[1].isalpha()
            if is_short and (member[1] not in _KNOWN_LETTERS or member[1] in "xuc"):  # these have more behind them
                return f"{member} is no escape; write it without"
        if after_null and part.text.isdigit():
            return rf"\0{part.text} is no escape; write it without"
        after_null = part.text == r"\0"
    return None


def _inner_anchor(parts: Sequence[_Part]) -> str | None:
    """Anchors mean nothing to the library, which is right where the text begins and ends anyway."""
    repeated, count = _repeated(parts), len(parts)
    for anchor, order, opening, closing in (
        ("^", range(count), "open", "close"), ("$", range(count - 1, -1, -1), "close", "open"),
    ):  # fmt: skip
        is_outer, groups = True, [True]  # whether nothing stands before, and before the group
        for place in order:
            kind = parts[place].kind
            if kind == opening:
                is_outer &= place not in repeated
                groups.append(is_outer)
            elif kind == "bar":
                is_outer = groups[-1]
            elif kind == closing and len(groups) > 1:
                groups.pop()
                is_outer = False
            elif kind not in ("anchor", "repeat"):
                is_outer = False
            elif parts[place].text == anchor and not is_outer:
                return "it has ^ or $ within; write it without"
    return None


def _repeated(parts: Sequence[_Part]) -> set[int]:
    """Places of the brackets of groups that may come more than once."""
    begins, found = list[int](), set[int]()
    for place, part in enumerate(parts):
        if part.kind == "open":
            begins.append(place)
        elif part.kind == "close" and begins:
            begin = begins.pop()
            if place + 1 < len(parts) and parts[place + 1].kind == "repeat" and parts[place + 1].text != "?":
                found |= {begin, place}
    return found


def _is_only_escaped(part: _Part) -> bool:
    """Whether nothing of it can stand in JSON as it is."""
    if part.kind == "set":
        negated = part.text.startswith("[^")
        held = _held(part.text[1 + negated : -1])
        return part.text != "[]" and not ((_ALL - held if negated else held) - _ESCAPED)
    if part.kind not in ("escape", "char"):
        return False
    code = _code(part.text)
    return code is not None and (code in _ESCAPED or 0xD800 <= code < 0xE000)


def _held(inner: str) -> set[int]:
    """The code points of a set's members and ranges."""
    members, held, place = _MEMBER.findall(inner), set[int](), 0
    while place < len(members):
        low = _code(members[place])
        is_range = members[place + 1 : place + 2] == ["-"] and place + 2 < len(members)
        high = _code(members[place + 2]) if is_range else low
        if low is None or high is None:
            held |= _CLASSES.get(members[place][-1], frozenset())
            place += 1
        else:
            held.update(range(min(low, 128), min(high, 128) + 1))
            place += 3 if is_range else 1
    return held


def _code(member: str) -> int | None:
    """Of a character or an escape; None for classes, and for what the library refuses."""
    if len(member) == 1:
        return ord(member)
    letter, rest = member[1], member[2:].strip("{}")
    if rest:
        return ord(rest) & 31 if letter == "c" else int(rest, 16)
    if letter in _CONTROLS:
        return _CONTROLS[letter]
    return None if letter.isascii() and letter.isalnum() else ord(letter)


def _ascii(member: str) -> str:
    """A character or an escape in ASCII."""
    if member.isascii():
        return member
    code = ord(member[-1])
    return f"\\u{code:04x}" if code < 0x10000 else f"\\u{{{code:x}}}"
