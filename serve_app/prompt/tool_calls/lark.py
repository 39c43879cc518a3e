"""Pieces of llguidance's Lark, in which every format writes what its calls look like.

Source: the syntax chapter of llguidance's documentation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serve_app.prompt import json_schemas
from serve_app.prompt.tool_calls.calls import Function
from serve_app.prompt.tool_calls.schemas import constants, properties_of, resolved, types_of

Delimiter = Callable[[str], str]
"""How a grammar says a delimiter: as a token of the vocabulary, or as its text."""


def text(literal: str) -> str:
    """The text, and no other, in Lark."""
    return json.dumps(literal)


def value(schema: Mapping[str, Any]) -> str:
    """A JSON text that the schema validates."""
    return f"%json {json.dumps({**schema, 'x-guidance': json_schemas.options()})}"


def arguments(function: Function) -> str:
    """A JSON object of the function's arguments."""
    return value(function.get("parameters") or {"type": "object", "additionalProperties": False})


def json_call(function: Function, key: str) -> str:
    """A JSON object of the function's name and, at `key`, its arguments, but for the closing bracket."""
    name = json.dumps(function["name"])
    # The bracket is a lexeme of its own, as in JSON that may stand in the place of the call.
    return " ".join([text("{"), text(f'"name": {name}, "{key}": '), arguments(function)])


def one_of(name: str, bodies: Sequence[str]) -> str:
    """The rule of that name, which is any of these bodies."""
    rules = [f"{name}_{i}: {body}" for i, body in enumerate(bodies)]
    return "\n".join([f"{name}: {' | '.join(f'{name}_{i}' for i in range(len(bodies)))}", *rules])


def parameters(function: Function, opening: Callable[[str], str], closing: str) -> list[str]:
    """The function's parameters, in the order of their schema, for formats that write strings without
    quotation marks: what `opening` makes of the name, the value, and `closing`, all as grammars say them.
    Parameters that are not required may be missing. Needs the rule of `free_text`."""
    schema = function.get("parameters") or {}
    required = schema.get("required")
    rules = []
    for name, inner in properties_of(schema).items():
        body = f"{opening(name)} {_bare_value(inner, schema, closing)}"
        is_needed = isinstance(required, list) and name in required
        rules.append(body if is_needed else f"({body})?")
    return rules


def free_text(closing: str) -> str:
    """The rule `free`: any text up to the first such closing, which may be a text or a token."""
    lazy = "[lazy]" if closing.startswith('"') else ""
    return f"free{lazy}: /(.|\\n)*/ {closing}"


def _bare_value(schema: Any, root: Mapping[str, Any], closing: str) -> str:
    """A value of this schema, and what closes it."""
    types = types_of(schema, root)
    values = [one for one in constants(resolved(schema, root)) if isinstance(one, str)]
    if types == {"string"} and values:
        return f"({' | '.join(text(value) for value in values)}) {closing}"
    if not types or "string" in types:
        return "free"
    named = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"{value({**named, **schema})} {closing}"
