"""Translates patterns of JSON schemas, which are JavaScript's, to Rust's, which llguidance reads.

Most signs mean the same in both. In a class, `&&`, `--`, `~~` and `[` mean something in Rust only, and so
do flags before a pattern. Rust's compiler, which reads the pattern next, says what else is wrong with it.

Source: ECMA-262, "RegExp (Regular Expression) Objects" and its annex B; the documentation of Rust's crate
`regex`.
"""

from __future__ import annotations

import re

_CHARACTER = (
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # two halves
    r"|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\u\{[0-9a-fA-F]{1,6}\}|\\c[a-zA-Z]|\\[pP]\{[\w=]+\}|\\?."
)
"""A character or a set of them, maybe as an escape."""
_MEMBER = re.compile(rf"({_CHARACTER})(?:-({_CHARACTER}))?", re.DOTALL)
_TOKEN = re.compile(
    r"\[(?P<negation>\^?)(?P<members>(?:\\.|[^\]\\])*)(?P<end>\]?)"
    r"|(?P<foreign>\(\?[a-zA-Z-]+\)|[*+?][*+]|\\\Z)"  # flags, Python's possessive quantifiers
    r"|(?P<same>\{\d+(?:,\d*)?\}|\\[bBk1-9])"  # counts, boundaries, references
    rf"|{_CHARACTER}",
    re.DOTALL,
)
_SIGNS = {"0": "\0", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_IN_RUST = {
    **{".": r"[^\n\r\x{2028}\x{2029}]", "{": r"\{", "}": r"\}", "]": r"\]"},
    **{"[]": r"[^\x{0}-\x{10FFFF}]", "[^]": r"[\x{0}-\x{10FFFF}]"},
}


def to_rust(pattern: str) -> str:
    """The pattern as Rust writes it. Raises ValueError for what Rust knows and JavaScript does not."""
    return _TOKEN.sub(_translate, pattern)


def _translate(token: re.Match[str]) -> str:
    text = token[0]
    if token["foreign"]:
        raise ValueError(f"no pattern of JavaScript has {text!r}")
    if token["same"] or len(text) == 1 or text in _IN_RUST:
        return _IN_RUST.get(text, text)
    if token["members"] is not None:
        members = _MEMBER.sub(_translate_member, token["members"])
        return f"[{token['negation']}{members}{token['end']}"
    return _literal(text)


def _translate_member(member: re.Match[str]) -> str:
    """A character, a set or a range in a class. Next to a set, the sign of a range means itself."""
    first, last = member.groups()
    if last is None:
        return _literal(first)
    sign = r"\-" if None in (_code_point(first), _code_point(last)) else "-"
    return f"{_literal(first)}{sign}{_literal(last)}"


def _literal(character: str) -> str:
    """The character, or the set, as Rust writes it anywhere."""
    number = _code_point(character)
    is_plain = character.isalnum() and character.isascii()
    return character if number is None or is_plain else f"\\x{{{number:X}}}"


def _code_point(character: str) -> int | None:
    """The character's number; None if it is a set of them."""
    kind, rest = character[1:2], character[2:]
    if not kind:
        return ord(character)
    if kind in "dDwWsS" or (kind in "pP" and rest):
        return None
    if kind == "c" and rest:
        return ord(rest) % 32
    digits = rest.strip("{}").replace("\\u", "")
    if len(digits) == 8:
        return ord(bytes.fromhex(digits).decode("utf-16-be"))
    return int(digits, 16) if digits else ord(_SIGNS.get(kind, kind))
