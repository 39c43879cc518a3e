"""Pieces of llguidance's Lark for the form of calls, and the schemas of the values in them.

Source: the syntax chapter of llguidance's documentation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serve_app.prompt import json_schemas
from serve_app.prompt.tool_calls.calls import Function

TAG = r"\]<\][^][<>]*\[>\[|<[^<>\s]+>|\[/?[A-Z_]+\]"
"""The pattern of texts that are tokens of their own in some vocabularies."""
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


def comma_list(name: str, members: Sequence[tuple[str, bool]], comma: str) -> list[str]:
    """The rule of that name, which is these members in their order with commas between, and the rules that
    it needs. A member without the flag may be missing."""
    rules = [f'{name}_end: ""']
    first = rest = f"{name}_end"
    for i, (member, is_needed) in enumerate(reversed(members)):
        pair = f"{member} {rest}"
        others = ("", "") if is_needed else (f" | {first}", f" | {rest}")
        first, rest = f"{name}_first_{i}", f"{name}_rest_{i}"
        rules += [f"{first}: {pair}{others[0]}", f"{rest}: {comma} {pair}{others[1]}"]
    return [*rules, f"{name}: {first}"]


def pieces(literal: str, delimiter: Delimiter) -> list[str]:
    """The pieces of the literal: texts, and tokens for tags where the vocabulary has these."""
    found: list[str] = []
    plain = ""
    for part in re.split(f"({TAG})", literal):
        if re.fullmatch(TAG, part) and not delimiter(part).startswith('"'):
            found += [text(plain), delimiter(part)] if plain else [delimiter(part)]
            plain = ""
        else:
            plain += part
    return [*found, text(plain)] if plain else found


def parameters(
    function: Function,
    opening: Callable[[str], str],
    closing: str,
    behind: Callable[[str], str] = lambda _: "",
) -> list[str]:
    """The function's parameters, in the order of their schema, for formats that write strings without
    quotation marks. Each is what `opening` makes of the name, the value, `closing`, and what `behind`
    makes of the name, all as grammars say them. Parameters that are not required may be missing. Needs
    the rule of `free_text`."""
    schema = function.get("parameters") or {}
    required = schema.get("required")
    rules = []
    for name, inner in properties_of(schema).items():
        body = f"{opening(name)} {_bare_value(inner, schema, closing)} {behind(name)}"
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
    values = [one for one in constants(resolve_reference(schema, root)) if isinstance(one, str)]
    if types == {"string"} and values:
        return f"({' | '.join(text(value) for value in values)}) {closing}"
    if not types or "string" in types:
        return "free"
    named = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"{value({**named, **schema})} {closing}"


# -- schemas ------------------------------------------------------------------------------------------

_TYPES = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}
# What a Jinja template writes for them, so that models write it too.
_PYTHONIC = {"True": True, "False": False, "None": None}


# `$ref`s that are followed, so that a circle ends.
_MAX_REFS = 16


def read_value(text: str, schema: Any, root: Any) -> object:
    """The value of the text: itself where the schema wants a string, else its JSON value, if it is
    JSON. `root` is what the schema's `$ref`s are in."""
    types = types_of(schema, root)
    if types == {"string"}:
        return text
    try:
        value = _PYTHONIC[text] if text in _PYTHONIC else json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str) or ("string" in types and not types & _TYPES[type(value)]):
        return text
    return value


def types_of(schema: Any, root: Any) -> set[str]:
    """The JSON types that the schema names; none if it leaves them open."""
    types, seen, left = set[str](), set[str](), [schema]
    while left:
        inner_schema = left.pop()
        if not isinstance(inner_schema, Mapping):
            return set()
        choices = _inner(inner_schema)
        if isinstance(ref := inner_schema.get("$ref"), str):
            # Each is followed once: callers may send circles.
            left += [] if ref in seen else [_at(root, ref)]
            seen.add(ref)
        elif named := _named_types(inner_schema):
            types |= named
        elif choices:
            left += choices
        else:
            return set()
    return types


def properties_of(schema: Any) -> Mapping[str, Any]:
    """An object's properties, if these are as they should be."""
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def constants(schema: Mapping[str, Any]) -> list[Any]:
    """The values of a schema that lists them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else []


def resolve_reference(schema: Any, root: Any) -> Mapping[str, Any]:
    """The schema itself behind a `$ref` to the root's definitions or an `allOf` of one (pydantic's)."""
    for _ in range(_MAX_REFS):
        if not isinstance(schema, Mapping):
            return {}
        inner = schema.get("allOf")
        if isinstance(ref := schema.get("$ref"), str):
            schema = _at(root, ref)
        elif isinstance(inner, list) and len(inner) == 1:
            schema = inner[0]
        else:
            return schema
    return {}


def _named_types(schema: Mapping[str, Any]) -> set[str]:
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {name for name in named if isinstance(name, str)}
    return {name for value in constants(schema) for name in _TYPES[type(value)]}


def _inner(schema: Mapping[str, Any]) -> list[Any]:
    """Schemas of which one decides: any of several, or the only one of all."""
    for key, most in (("anyOf", None), ("oneOf", None), ("allOf", 1)):
        found = schema.get(key)
        if isinstance(found, list) and (most is None or len(found) == most):
            return found
    return []


def _at(root: Any, ref: str) -> Any:
    for key in ref.removeprefix("#/").split("/"):
        root = root.get(key) if isinstance(root, Mapping) else None
    return root
