"""Clients' JSON, read within bounds and by the standard.

What Python's own reader takes besides (NaN, half a surrogate pair, nesting up to its stack's end) would
fail later, in a place that cannot say why.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from serve_app.prompt.grammars import depth

MAX_DEPTH = 100
"""Deepest nesting of lists and objects."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def loads(text: str) -> Any:
    """The value. Raises JSONDecodeError."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise json.JSONDecodeError(str(error).partition(":")[0], "", 0) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and depth(value) > MAX_DEPTH:
        raise _too_deep()
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            message = "A string has half of a surrogate pair"
            raise json.JSONDecodeError(message, "", 0) from None
    return value


def _too_deep() -> json.JSONDecodeError:
    return json.JSONDecodeError(f"Nested deeper than {MAX_DEPTH} levels", "", 0)


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("A number is too large")
    return value


class JsonRequest(Request):
    """A request whose JSON is read here."""

    async def json(self) -> Any:
        """The body. Raises JSONDecodeError."""
        try:
            text = (await self.body()).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise json.JSONDecodeError("Not UTF-8", "", 0) from None
        return loads(text)


class JsonRoute(APIRoute):
    """A route that gets JsonRequests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See APIRoute."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
