"""Reads values that a format writes without quotes, by their JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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


def resolved(schema: Any, root: Any) -> Mapping[str, Any]:
    """The schema itself, where it is a `$ref` to one of the root's definitions, or `allOf` one schema, as
    pydantic writes these."""
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
