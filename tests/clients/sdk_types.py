"""The types of requests that SDKs know: a graph of fields, as JSON if this file is run.

It runs where the SDKs are installed, and imports nothing of Corral's.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NotRequired, Required, get_args, get_origin

from pydantic import BaseModel
from typing_extensions import get_type_hints, is_typeddict

Graph = dict[str, dict[str, Any]]
"""By a type's place: `kinds`, the values of its `type`, and `fields`, the places of the types in each."""


def place_of(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def named(place: str) -> Any:
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(module), name)


def is_record(kind: Any) -> bool:
    return is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, BaseModel))


def members(annotation: Any) -> Iterator[Any]:
    """The types with fields in an annotation, but for those that are values of mappings."""
    origin = get_origin(annotation)
    if origin is Literal or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return
    if origin is None and is_record(annotation):
        yield annotation
    wraps = origin in (Annotated, Required, NotRequired)
    for argument in get_args(annotation)[: 1 if wraps else None]:
        yield from members(argument)


def fields(kind: Any) -> dict[str, Any]:
    """The annotations of a type's fields, by the names that requests have."""
    if is_typeddict(kind):
        return dict(get_type_hints(kind, include_extras=True))
    return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}


def kinds(kind: Any) -> frozenset[str]:
    """The values that the field `type` may have; none if it may have any."""

    def values(annotation: Any) -> frozenset[str]:
        if get_origin(annotation) is Literal:
            return frozenset(get_args(annotation))
        return frozenset().union(*map(values, get_args(annotation)))

    return values(fields(kind).get("type"))


def graph(places: list[str]) -> Graph:
    """The types at these places, and all that their fields lead to."""
    found: Graph = {}
    waiting = [(place, named(place)) for place in places]
    while waiting:
        place, kind = waiting.pop()
        if place in found:
            continue
        inner = {name: [*members(annotation)] for name, annotation in fields(kind).items()}
        waiting += [(place_of(one), one) for many in inner.values() for one in many]
        found[place] = {
            "kinds": sorted(kinds(kind)),
            "fields": {name: [place_of(one) for one in many] for name, many in inner.items()},
        }
    return found


if __name__ == "__main__":
    json.dump(graph(sys.argv[1:]), sys.stdout)
