"""Of what type a value is that a format writes without quotes, by its JSON schema."""

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
    """What the text stands for: itself where the schema wants a string, else what it is as JSON, if it is
    that. `root` is what the schema's `$ref`s are in."""
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
    schema = resolved(schema, root)
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {name for name in named if isinstance(name, str)}
    if values := constants(schema):
        return {name for one in values for name in _TYPES[type(one)]}
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        found = [types_of(option, root) for option in options]
        return set().union(*found) if all(found) else set()
    return set()


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
        parts = schema.get("allOf")
        if isinstance(parts, list) and len(parts) == 1:
            schema = parts[0]
        elif isinstance(ref := schema.get("$ref"), str) and ref.startswith("#/"):
            schema = _at(root, ref)
        else:
            return schema
    return {}


def _at(root: Any, ref: str) -> Any:
    for key in ref.removeprefix("#/").split("/"):
        root = root.get(key) if isinstance(root, Mapping) else None
    return root
