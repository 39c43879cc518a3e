"""Translates patterns of JSON schemas, which are JavaScript's, to Rust's, which llguidance reads.

Most signs mean the same in both. In a class, `&&`, `--`, `~~` and `[` mean something in Rust only, and so
do flags before a pattern.

Source: ECMA-262, "RegExp (Regular Expression) Objects" and its annex B; the documentation of Rust's crate
`regex`.
"""

from __future__ import annotations

import re

_GROUP = re.compile(r"\((?:\?(?:[:=!]|<[=!]|P?<[\w$]+>|(?!-?:)[ims]*(?:-[ims]*)?:))?")
"""The beginning of a group; Python's way to name one is taken, too."""
_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})\??")
_ESCAPE = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|u\{(?P<point>[0-9a-fA-F]{1,6})\}"
    r"|c(?P<control>[a-zA-Z])|(?P<null>0(?!\d))|(?P<set>[dDwWsS]|[pP]\{[\w=]+\})"
    r"|(?P<sign>.))",
    re.DOTALL,
)
_SIGNS = {"f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_NO_DOT = r"[^\n\r\x{2028}\x{2029}]"
_ANY, _NONE = r"[\x{0}-\x{10FFFF}]", r"[^\x{0}-\x{10FFFF}]"


def to_rust(pattern: str) -> str:
    """The pattern as Rust writes it. Raises ValueError if JavaScript does not know it."""
    return _Translator(pattern).translate()


class _Translator:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def translate(self) -> str:
        written, repeats = list[str](), False
        while self._at < len(self._pattern):
            sign = self._pattern[self._at]
            if quantifier := _QUANTIFIER.match(self._pattern, self._at):
                if not repeats:
                    raise ValueError(f"nothing to repeat before {quantifier[0]!r}")
                written.append(self._take(len(quantifier[0])))
                repeats = False
                continue
            repeats = sign not in "(|^"
            if sign == "(":
                written.append(self._group())
            elif sign == "[":
                written.append(self._class())
            elif sign == "\\":
                written.append(self._escape())
            elif sign == ".":
                self._take(1)
                written.append(_NO_DOT)
            else:
                written.append(f"\\{sign}" if sign in "{}]" else sign)
                self._take(1)
        return "".join(written)

    def _take(self, n_chars: int) -> str:
        taken = self._pattern[self._at : self._at + n_chars]
        self._at += n_chars
        return taken

    def _group(self) -> str:
        opening = _GROUP.match(self._pattern, self._at)
        if opening is None or self._pattern.startswith("?", opening.end()):
            raise ValueError(f"no group of JavaScript: {self._pattern[self._at :][:16]!r}")
        return self._take(len(opening[0]))

    def _escape(self) -> str:
        """An escape outside a class."""
        sign = self._pattern[self._at + 1 : self._at + 2]
        if sign and sign in "bBk123456789":  # boundaries, references
            return self._take(2)
        return self._atom()[0]

    def _atom(self) -> tuple[str, int | None]:
        """A character as Rust writes it anywhere, and its number; None if it is a set of them."""
        escape = _ESCAPE.match(self._pattern, self._at)
        if escape is None:
            if self._pattern[self._at] == "\\":
                raise ValueError("nothing behind the last backslash")
            number = ord(self._take(1))
            return _literal(number), number
        self._take(len(escape[0]))
        if escape["set"]:
            return escape[0], None
        hexadecimal = escape["x"] or escape["u"] or escape["point"]
        if hexadecimal:
            number = self._code_point(int(hexadecimal, 16))
        elif escape["control"]:
            number = ord(escape["control"]) % 32
        else:
            number = 0 if escape["null"] else ord(_SIGNS.get(escape["sign"], escape["sign"]))
        return _literal(number), number

    def _code_point(self, number: int) -> int:
        """A character that is written as two halves."""
        second = _ESCAPE.match(self._pattern, self._at)
        low = int(second["u"], 16) if second and second["u"] else 0
        if number in range(0xD800, 0xDC00) and low in range(0xDC00, 0xE000):
            self._take(6)
            return 0x10000 + ((number - 0xD800) << 10) + low - 0xDC00
        return number

    def _class(self) -> str:
        self._take(1)
        negation = self._take(1) if self._pattern.startswith("^", self._at) else ""
        parts = list[str]()
        while not self._pattern.startswith("]", self._at):
            if self._at >= len(self._pattern):
                raise ValueError("a class without its end")
            first, low = self._member()
            is_range = self._pattern[self._at : self._at + 2] not in ("-", "-]")
            if not (is_range and self._pattern.startswith("-", self._at)):
                parts.append(first)
                continue
            self._take(1)
            last, high = self._member()
            if low is None or high is None:  # then the sign means itself
                parts += [first, r"\-", last]
            elif low > high:
                raise ValueError(f"the range {chr(low)}-{chr(high)} is in no order")
            else:
                parts.append(f"{first}-{last}")
        self._take(1)
        if not parts:
            return _ANY if negation else _NONE
        return f"[{negation}{''.join(parts)}]"

    def _member(self) -> tuple[str, int | None]:
        if self._pattern.startswith(r"\b", self._at):
            self._take(2)
            return _literal(8), 8
        return self._atom()


def _literal(number: int) -> str:
    char = chr(number)
    return char if char.isalnum() and char.isascii() else f"\\x{{{number:X}}}"
