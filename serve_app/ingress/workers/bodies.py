"""Hands the bodies of requests to workers, for the routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from serve_app.errors import InvalidRequestError
from serve_app.ingress.http import request_context
from serve_app.ingress.workers.pool import Workers
from serve_app.ingress.workers.worker import Models

T = TypeVar("T")


class Bodies:
    """Reads bodies. The event loop does nothing that grows with one, but to hand it over."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    async def read(
        self,
        request: Request,
        prepare: Callable[[Models, bytes], T],
        *,
        optional: bool = False,
        any_type: bool = False,
    ) -> T:
        """What a worker makes of the request's body, of JSON unless it is `optional` and empty; with
        `any_type`, whatever its header says. Raises CorralError."""
        pieces = [piece async for piece in request.stream() if piece]  # `body()` would copy all
        is_json = any_type or _is_json(request.headers.get("content-type", ""))
        if not is_json and (pieces or not optional):
            raise InvalidRequestError("Send JSON, with Content-Type: application/json.")
        return await self.work(prepare, *pieces)

    async def work(self, function: Callable[[Models, bytes], T], *pieces: bytes) -> T:
        """What a worker makes of what these pieces are together, for the caller. Raises CorralError."""
        return await self._workers.run(request_context.current().holder, function, *pieces)


def _is_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))
