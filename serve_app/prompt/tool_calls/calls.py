"""A tool call, and how one is made from the JSON that a model wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Function = Mapping[str, Any]
"""A function as OpenAI describes it: `name`, and `parameters`, a JSON schema, if there are any."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called."""

    name: str
    arguments: str
    """A JSON object, as text."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Some of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call, where calls are told in pieces."""

    name: str | None
    """The function's name, with the first piece of a call; the next pieces go on with its arguments."""
    arguments: str
    """A piece of the text of a JSON object, which all pieces make together, unless the answer is cut short
    or goes wrong."""


def calls_of(*bodies: object, arguments: tuple[str, ...], name: str = "name") -> list[ToolCall]:
    """The calls that JSON objects stand for, with the function at the key `name`; none at all if one of
    them is no call. The first of the keys `arguments` that an object has holds its arguments, if one
    does."""
    found: list[ToolCall] = []
    for body in bodies:
        if not isinstance(body, dict):
            return []
        given: object = next((body[key] for key in arguments if key in body), {})
        calls = call_of(body.get(name), given)
        if not calls:
            return []
        found += calls
    return found


def call_of(name: object, arguments: object) -> list[ToolCall]:
    """The call; none if these are no name and no JSON object, or cannot be written as JSON again."""
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return []
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except (ValueError, RecursionError):  # infinities, half characters
        return []
    return [ToolCall(name, text)]
