"""What all formats share: a call, and how calls are found in a text that arrives in pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

Function = Mapping[str, Any]
"""As OpenAI describes functions: `name`, and `parameters`, a JSON schema, if there are any."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called."""

    name: str
    arguments: str
    """A JSON object, as text."""


Found = tuple[Sequence[ToolCall], int]
"""Calls, and how many characters they take; without calls, what was read is prose."""


class After(Enum):
    """What came last."""

    NOTHING = 0
    CALL = 1
    PROSE = 2


class CallParser:
    """Splits a text that arrives in pieces into prose and calls. What is found does not depend on how the
    text is cut, and nothing is lost but line ends around calls, and what a format has between them: what
    looks like a call and is none comes back as the prose that it is. Not thread-safe."""

    mark: str
    """What every call begins with."""

    def __init__(self) -> None:
        self._held = ""
        """What cannot be told apart yet: the start of a mark, or a call that is not complete."""
        self._after = After.NOTHING

    def feed(self, text: str) -> list[str | ToolCall]:
        """What is certain now, in order; no piece of prose is empty."""
        self._held += text
        parts: list[str | ToolCall] = []
        while True:
            if self._after is After.CALL:
                self._held = self._held.lstrip("\n")
            start, end = self._find(self._held)
            if start:
                parts.append(self._prose(start))
            found = None if end is None else self._read(self._held[end - start :])
            if end is None or found is None:
                return parts
            calls, length = found
            if calls:
                parts += calls
                self._held = self._held[end - start + length :]
                self._after = After.CALL
            elif prose := self._prose(end - start):
                parts.append(prose)

    def finish(self) -> list[str | ToolCall]:
        """The rest, when there is no more text."""
        rest, self._held = self._held, ""
        return [rest] if rest else []

    def _prose(self, length: int) -> str:
        prose, self._held = self._held[:length], self._held[length:]
        self._after = After.PROSE
        return prose

    def _find(self, text: str) -> tuple[int, int | None]:
        """Where the first mark begins, with the line ends before it, and where it ends: None while there
        is only what may become one. The text's end if there is not even that."""
        found = text.find(self.mark)
        if found >= 0:
            return len(text[:found].rstrip("\n")), found + len(self.mark)
        lengths = range(len(self.mark) - 1, -1, -1)
        begun = next(n for n in lengths if text.endswith(self.mark[:n]))
        return len(text[: len(text) - begun].rstrip("\n")), None

    def _read(self, text: str) -> Found | None:
        """The calls at the beginning of what is behind a mark; None if that needs more text."""
        raise NotImplementedError


def calls_of(*bodies: object, arguments: tuple[str, ...]) -> list[ToolCall]:
    """The calls that JSON objects with a `name` stand for; none at all if one of them is no call. The
    first of the keys `arguments` that an object has holds its arguments, if one does."""
    found = []
    for body in bodies:
        if not isinstance(body, dict):
            return []
        given: object = next((body[key] for key in arguments if key in body), {})
        call = call_of(body.get("name"), given)
        if call is None:
            return []
        found.append(call)
    return found


def call_of(name: object, arguments: object) -> ToolCall | None:
    """The call; None if these are no name and no JSON object, or cannot be written as JSON again."""
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except (ValueError, RecursionError):  # infinities, half characters
        return None
    return ToolCall(name, text)


def json_at(text: str, start: int = 0) -> tuple[object, int] | None:
    """The JSON value that begins there, after blanks, and its end; None if there is none, or not yet."""
    start = len(text) - len(text[start:].lstrip())
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):  # huge numbers are a ValueError too
        return None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
