"""Hands the bodies of requests to workers, for the routes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from fastapi import Request
from starlette.datastructures import Headers

from serve_app.errors import ContentEncodingError, InvalidRequestError
from serve_app.ingress.http import request_context, request_model
from serve_app.ingress.workers.pool import Workers
from serve_app.ingress.workers.worker import Models

logger = logging.getLogger("corral.ingress")

T = TypeVar("T")

LOG_EVERY_S, MOST_CHARS = 60.0, 500
"""The seconds between two logs of ignored fields, and the most characters of their names."""


class InProcess:
    """Workers that read bodies in this process, without bounds: for tests, and for one's own requests."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def run(self, client: str, work: Callable[[Models, bytes], T], *pieces: bytes) -> T:
        """The result of `work`: see Workers."""
        with request_model.ignored_fields() as ignored:
            made = work(self._models, b"".join(pieces))
        request_context.current().ignored += ignored
        return made


class Bodies:
    """Reads bodies. The event loop does nothing that grows with one, but to hand it over."""

    def __init__(self, workers: Workers, *, strict: bool = False) -> None:
        """`strict` refuses requests with fields that Corral does not have."""
        self._workers = workers
        self._strict = strict
        self._log_again_at = 0.0

    async def read(
        self,
        request: Request,
        prepare: Callable[[Models, bytes], T],
        *,
        optional: bool = False,
        any_type: bool = False,
    ) -> T:
        """A worker's result for the request's body, which is JSON unless it is `optional` and
        empty; with `any_type`, whatever its header says. Raises CorralError."""
        pieces = await self.pieces(request, optional=optional, any_type=any_type)
        return await self.work(prepare, *pieces)

    async def pieces(
        self, request: Request, *, optional: bool = False, any_type: bool = False
    ) -> list[bytes]:
        """The request's body as it came, of JSON by its header like that of `read`. Raises
        InvalidRequestError."""
        pieces = [piece async for piece in request.stream() if piece]  # `body()` would copy all
        is_json = any_type or _is_json(request.headers)
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise ContentEncodingError(f"Send the body as it is, and not as {encoding[:100]!r}.")
        if not is_json and (pieces or not optional):
            raise InvalidRequestError("Send JSON, with Content-Type: application/json.")
        return pieces

    async def work(self, function: Callable[[Models, bytes], T], *pieces: bytes) -> T:
        """A worker's result for these pieces together, for the caller. Raises CorralError."""
        caller = request_context.current()
        made = await self._workers.run(caller.holder, function, *pieces)
        if caller.ignored:
            self._tell(caller.ignored)
        return made

    def _tell(self, ignored: Sequence[str]) -> None:
        if self._strict:
            raise InvalidRequestError(f"Unknown parameter: {ignored[0]!r}.", ignored[0])
        if time.monotonic() >= self._log_again_at:
            self._log_again_at = time.monotonic() + LOG_EVERY_S
            logger.info("Ignored unknown fields of a request: %s.", ", ".join(ignored)[:MOST_CHARS])


_TYPES_OF_TOOLS = ("", "application/x-www-form-urlencoded")
"""What tools such as `curl -d` say of JSON. Browsers let any page send it, so that their word counts."""


def _is_json(headers: Headers) -> bool:
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type in _TYPES_OF_TOOLS:
        return "origin" not in headers and "sec-fetch-site" not in headers
    kind, _, subtype = content_type.partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))
