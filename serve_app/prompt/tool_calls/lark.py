"""Pieces of llguidance's Lark, in which every format writes what its calls look like.

Source: the syntax chapter of llguidance's documentation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serve_app.prompt.tool_calls.calls import Function

Mark = Callable[[str], str]
"""How a grammar says a mark: as a token of the vocabulary, or as its text."""

# Between a JSON text's tokens, as in llama.cpp: without a bound, a model can go on with blanks for ever.
BLANKS = r" |\n{1,2}[ \t]{0,20}"


def text(literal: str) -> str:
    """This text and no other."""
    return json.dumps(literal)


def value(schema: Mapping[str, Any]) -> str:
    """A JSON text that the schema validates."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': BLANKS}})}"


def arguments(function: Function) -> str:
    """A JSON object of the function's arguments."""
    return value(function.get("parameters") or {"type": "object", "additionalProperties": False})


def json_call(function: Function, key: str) -> str:
    """A JSON object of the function's name and, at `key`, its arguments, but for the closing bracket."""
    name = json.dumps(function["name"])
    return " ".join([text(f'{{"name": {name}, "{key}": '), arguments(function)])


def one_of(name: str, bodies: Sequence[str]) -> str:
    """The rule of that name, which is any of these bodies."""
    rules = [f"{name}_{i}: {body}" for i, body in enumerate(bodies)]
    return "\n".join([f"{name}: {' | '.join(f'{name}_{i}' for i in range(len(bodies)))}", *rules])
