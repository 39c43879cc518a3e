"""Parses JSON bodies into requests, within bounds and by the standard. Runs in workers.

Python's own reader also accepts NaN, half a surrogate pair, and nesting up to its stack's end.
These would fail later, in a place that cannot say why.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from serve_app.errors import InvalidRequestError
from serve_app.ingress.http import request_model

MAX_DEPTH = 100
"""Deepest nesting of lists and objects."""
MAX_CONTAINERS = 250_000
"""Most lists and objects. An empty one takes two bytes of a body and a hundred of memory."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def loads(text: str) -> Any:
    """The value. Raises JSONDecodeError."""
    if (
        _n_containers(text) > MAX_CONTAINERS
        and _n_containers(_STRING.sub("", text)) > MAX_CONTAINERS
    ):
        raise json.JSONDecodeError(f"More than {MAX_CONTAINERS} lists and objects", "", 0)
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise json.JSONDecodeError(str(error).partition(":")[0], "", 0) from None
    if _n_containers(text) > MAX_DEPTH and depth(value) > MAX_DEPTH:
        raise _too_deep()
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            message = "A string has half of a surrogate pair"
            raise json.JSONDecodeError(message, "", 0) from None
    return value


def depth(value: object) -> int:
    """The levels of lists and objects, counted without recursion: callers send what they like."""
    level, levels = [value], 0
    while level := [
        inner
        for outer in level
        if isinstance(outer, Mapping | list)
        for inner in (outer.values() if isinstance(outer, Mapping) else outer)
    ]:
        levels += 1
    return levels


def _n_containers(text: str) -> int:
    """The most lists and objects that this JSON can have."""
    return text.count("[") + text.count("{")


def _too_deep() -> json.JSONDecodeError:
    return json.JSONDecodeError(f"Nested deeper than {MAX_DEPTH} levels", "", 0)


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("A number is too large")
    return value


M = TypeVar("M")


def parsed(kind: type[M], body: bytes) -> M:
    """The body as a request of this kind, a pydantic model or a list of such. Raises InvalidRequestError,
    also of the model's own.

    Fields that Corral does not have are removed: see request_model.
    """
    if not body:
        raise InvalidRequestError("Field required: the body is empty.")
    try:
        value = loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise _unreadable("Not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _unreadable(error.msg) from None
    try:
        request: M = _adapter(cast(Hashable, kind)).validate_python(value)
        request_model.ignore(request)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise invalid(problem["loc"], problem["msg"]) from None
    return request


@functools.cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter[Any](cast(Any, kind))


def _unreadable(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"The body cannot be read as JSON: {why}.")


def invalid(place: Sequence[int | str], message: str) -> InvalidRequestError:
    """The error for clients that pydantic found at this place of a request."""
    path = ".".join(str(part) for part in place if _names_a_field(part))
    where = f"{path}: " if path else ""
    return InvalidRequestError(f"{where}{message}", path or None)


def _names_a_field(part: int | str) -> bool:
    """Pydantic also names the branch of a union that it tried: `str`, `list[constrained-int]`."""
    return isinstance(part, int) or (part.isidentifier() and part != "str")
