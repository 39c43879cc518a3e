"""Reads a text that arrives in pieces, without looking at any part of it twice."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import NoReturn, TypeVar

Result = TypeVar("Result")
Reading = Generator[None, None, Result]
"""Stops wherever it needs more text, goes on from there, and returns what it has read."""

BLANKS = re.compile(r"\s*")
_JSON_BLANKS = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[-+.0-9a-zE]*")
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_HIGH, _LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
# The characters with which a JSON value can begin.
_VALUE = '{["-0123456789tfn'


class NoCallError(Exception):
    """The text begins like a call, and is not one."""


class TextReader:
    """Reads patterns of one character's choices, literal texts and JSON. Each read begins where the last
    one ended, and raises NoCallError as soon as the text cannot be what is wanted. The work is linear in
    the text, however it is cut. Not thread-safe."""

    def __init__(self) -> None:
        self.text = ""
        """The held text, except the part that was read before the last piece came."""
        self.at = 0
        """The place in `text` where the next read begins."""
        self._begun = 0
        """The place in `text` where the part begins that is read and not forgotten."""
        self._before: list[str] = []
        """The parts of earlier pieces that are read and not forgotten."""

    # -- what is held -----------------------------------------------------------------------------

    def append(self, text: str) -> None:
        if self.at > self._begun:
            self._before.append(self.text[self._begun : self.at])
        self.text = self.text[self.at :] + text
        self.at = self._begun = 0

    def advance(self, end: int) -> None:
        self.at = end

    def rewind(self) -> None:
        if self._before:
            self.text = "".join(self._before) + self.text[self._begun :]
            self._before.clear()
            self._begun = 0
        self.at = self._begun

    def forget(self) -> str:
        """Returns the text that was read, and holds it no longer."""
        read = self._held_text()
        self._before.clear()
        self._begun = self.at
        return read

    def _held_text(self) -> str:
        return "".join(self._before) + self.text[self._begun : self.at]

    # -- reads ------------------------------------------------------------------------------------

    def peek(self) -> Reading[str]:
        """The next character, which stays unread."""
        while self.at == len(self.text):
            yield
        return self.text[self.at]

    def after_blanks(self) -> Reading[str]:
        """The next character that is no blank, which stays unread."""
        yield from self.run(BLANKS)
        return (yield from self.peek())

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """The characters up to the first one that is not in the pattern, a class with a star."""
        pieces: list[str] = []
        while True:
            match = pattern.match(self.text, self.at)
            if match:
                pieces.append(match[0])
                self.advance(match.end())
            if self.at < len(self.text):
                return "".join(pieces)
            yield

    def one_of(self, *texts: str) -> Reading[str]:
        """Whichever of these texts is next; none of them may begin with another."""
        while True:
            for text in texts:
                if self.text.startswith(text, self.at):
                    self.advance(self.at + len(text))
                    return text
            rest = self.text[self.at : self.at + max(map(len, texts))]
            if not any(text.startswith(rest) for text in texts):
                raise NoCallError
            yield

    def delimiter(self, *texts: str) -> Reading[str]:
        """Whichever of these texts is next after blanks, by `one_of`."""
        yield from self.run(BLANKS)
        return (yield from self.one_of(*texts))

    def some_until(self, text: str) -> Reading[str | None]:
        """The text before the next such text, and not empty; None when that is next, and read."""
        while True:
            found = self.text.find(text, self.at)
            end = found if found >= 0 else len(self.text) - overlap(self.text, text, self.at)
            if end > self.at:
                piece = self.text[self.at : end]
                self.advance(end)
                return piece
            if found >= 0:
                self.advance(end + len(text))
                return None
            yield

    def until(self, text: str, most_chars: int | None = None) -> Reading[str]:
        """The text before the next such text, which is read, too; of so many characters at most."""
        pieces: list[str] = []
        while (piece := (yield from self.some_until(text))) is not None:
            pieces.append(piece)
            if most_chars is not None and sum(map(len, pieces)) > most_chars:
                raise NoCallError
        return "".join(pieces)

    def json(self, brackets: str = "{") -> Reading[object]:
        """The JSON value that comes next, after blanks: it begins with one of these brackets. Decoded
        once, when its last bracket is there."""
        if (yield from self.after_blanks()) not in brackets:
            raise NoCallError
        n_before = len(self._held_text())
        yield from self.skip_json()
        return decode(self._held_text()[n_before:])

    def string_piece(self) -> Reading[str | None]:
        """The next piece of a JSON string, after its first quotation mark, as far as it has arrived; None
        at its end. Half of a character pair is U+FFFD, and what is no escape is itself."""
        if (yield from self.peek()) == '"':
            self.advance(self.at + 1)
            return None
        if self.text[self.at] != "\\":
            found = _PLAIN.match(self.text, self.at)
            self.advance(found.end() if found else self.at)
            return found[0] if found else ""
        self.advance(self.at + 1)
        char = yield from self.peek()
        self.advance(self.at + 1)
        if char != "u":
            return _ESCAPES.get(char, char)
        first = yield from self._code_unit()
        if first not in _HIGH:
            return "\ufffd" if first in _LOW else chr(first)
        if (yield from self.peek()) != "\\":
            return "\ufffd"
        self.advance(self.at + 1)
        if (yield from self.peek()) != "u":
            raise NoCallError
        self.advance(self.at + 1)
        second = yield from self._code_unit()
        pair = 0x10000 + ((first - _HIGH.start) << 10) + second - _LOW.start
        return chr(pair) if second in _LOW else "\ufffd"

    def _code_unit(self) -> Reading[int]:
        digits = ""
        for _ in range(4):
            digits += yield from self.peek()
            self.advance(self.at + 1)
        if not _HEX.fullmatch(digits):
            raise NoCallError
        return int(digits, 16)

    def json_value(self) -> Reading[object]:
        """The JSON value of any kind that comes next, after blanks."""
        return self.json(_VALUE)

    def skip_json(self) -> Reading[None]:
        """Reads past a JSON value: brackets, strings, commas and colons have to be where JSON has them."""
        closing: list[str] = []
        allowed = _VALUE
        while True:
            yield from self.run(_JSON_BLANKS)
            char = yield from self.peek()
            if char not in allowed:
                raise NoCallError
            if char in "{[":
                closing.append("}" if char == "{" else "]")
            elif char in "}]":
                closing.pop()
            yield from self._skip_token(char)
            if not closing:
                return
            is_key = char == '"' and "{" not in allowed
            allowed = ":" if is_key else _allowed_after(char, closing[-1])

    def is_empty_object(self) -> Reading[bool]:
        """Whether an object without keys comes next, which is read then. Nothing is read otherwise, and
        whatever was read before has to be forgotten."""
        yield from self.one_of("{")
        is_empty = (yield from self.after_blanks()) == "}"
        if is_empty:
            self.advance(self.at + 1)
        else:
            self.rewind()
        return is_empty

    def _skip_token(self, first: str) -> Reading[None]:
        """A bracket, a comma, a colon, a string, a number or a word, which begins like this."""
        if first == '"':
            self.advance(self.at + 1)
            yield from self._skip_string()
        elif first in _VALUE and first not in "{[":
            yield from self.run(_SCALAR)
        else:
            self.advance(self.at + 1)

    def _skip_string(self) -> Reading[None]:
        while True:
            yield from self.run(_PLAIN)
            is_end = self.text[self.at] == '"'
            self.advance(self.at + 1)
            if is_end:
                return
            yield from self.peek()
            self.advance(self.at + 1)  # what the backslash escapes


def _allowed_after(token: str, closing: str) -> str:
    """The tokens allowed after one that begins like this and is no key, before that bracket closes."""
    if token in "{[":
        return '"}' if token == "{" else f"{_VALUE}]"
    if token in ",:":
        return '"' if token == "," and closing == "}" else _VALUE
    return f",{closing}"


def overlap(text: str, delimiter: str, start: int = 0) -> int:
    """The number of characters at the end of `text[start:]` that may begin a delimiter."""
    lengths = range(min(len(text) - start, len(delimiter) - 1), -1, -1)
    return next(n for n in lengths if text.endswith(delimiter[:n]))


def decode(text: str) -> object:
    """The value of a JSON text. Raises NoCallError if it is none."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:  # huge numbers are a ValueError too
        raise NoCallError from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
