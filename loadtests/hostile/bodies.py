"""Bodies of hostile requests, none larger than what a server takes. Pure."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from loadtests.hostile.attack import MIB, MOST_BODY_BYTES

ROOM = 4096
"""Bytes that the frame of a body may take beside what fills it."""
FULL = MOST_BODY_BYTES - ROOM
DEEP = 90
"""Nested less deeply than what is refused for that."""


def filled(frame: Mapping[str, Any], field: str, unit: str, n_bytes: int = FULL) -> bytes:
    """This object with one field more, a text that repeats the unit to about so many bytes."""
    text = unit * (n_bytes // len(json.dumps(unit)[1:-1]))
    return json.dumps({**frame, field: text}).encode()


def listed(frame: Mapping[str, Any], field: str, item: str, n_bytes: int = FULL) -> bytes:
    """This object with one field more, a list that repeats an item, which is JSON already."""
    n_items = max(1, n_bytes // (len(item) + 1))
    items = ",".join([item] * n_items)
    return _with(frame, f"{json.dumps(field)}:[{items}]")


def keyed(n_bytes: int = FULL, *, distinct: bool = True) -> bytes:
    """An object of many keys."""
    n_keys = n_bytes // 12
    keys = (f'"{number if distinct else 1:07d}":0' for number in range(n_keys))
    return f"{{{','.join(keys)}}}".encode()


def nested(frame: Mapping[str, Any], field: str, depth: int) -> bytes:
    """This object with one field more, lists in lists."""
    return _with(frame, f"{json.dumps(field)}:{'[' * depth}{']' * depth}")


def wide_and_deep(n_bytes: int = FULL) -> Any:
    """A value of about so many bytes: many objects, each nested as deeply as is taken."""
    one: Any = "x"
    for _ in range(DEEP - 4):
        one = {"k": one}
    return [one] * max(1, n_bytes // (2 + len(json.dumps(one))))


def run_of(character: str, n: int, frame: Callable[[str], Any]) -> bytes:
    """A body with a text of so many times one character."""
    return json.dumps(frame(character * n), ensure_ascii=False).encode()


def gzip_bomb(n_bytes: int = 512 * MIB) -> bytes:
    """Little that unpacks to much: JSON's blanks."""
    return gzip.compress(bytes([32]) * n_bytes, compresslevel=6)


def refs_schema(depth: int) -> dict[str, Any]:
    """A JSON schema whose definitions each use the next one twice: 2^depth paths."""
    names = [f"d{number}" for number in range(depth)]
    made: dict[str, Any] = {
        name: {"type": "object", "properties": {k: {"$ref": f"#/$defs/{after}"} for k in "ab"}}
        for name, after in pairwise(names)
    }
    made[names[-1]] = {"type": "string"}
    return {"$defs": made, "$ref": "#/$defs/d0"}


def doubling_schema(depth: int) -> dict[str, Any]:
    """A JSON schema that its text says once, and that means 2^depth cases."""
    schema: dict[str, Any] = {"type": "string"}
    for number in range(depth):
        schema = {"anyOf": [{"type": "array", "items": schema, "minItems": number}, schema]}
    return schema


def turns(n: int) -> list[dict[str, str]]:
    """A conversation of so many short turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": "a"} for i in range(n)]


def _with(frame: Mapping[str, Any], field: str) -> bytes:
    before = json.dumps(dict(frame))[1:-1]
    return f"{{{before}{', ' if before else ''}{field}}}".encode()
