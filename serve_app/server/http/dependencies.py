"""Gives routes their arguments, as FastAPI's dependencies.

A protocol is a module with a `ROUTER`. Each route names there the function that prepares its body, so
that FastAPI's routes and the modules that workers import come from the same place.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.routing import BaseRoute

from serve_app.base.errors import (
    ContentEncodingError,
    CorralError,
    InvalidRequestError,
    PicturesWantedError,
)
from serve_app.base.logs import ClientText
from serve_app.server.http import request_context
from serve_app.server.model_registry import Models, ServedModel
from serve_app.server.workers.pool import Workers
from serve_app.server.workers.wire import Piece
from serve_app.server.workers.worker import ENCODINGS, inflate

logger = logging.getLogger("corral.ingress")
audit = logging.getLogger("corral.audit")

T = TypeVar("T")

LOG_EVERY_S, MOST_CHARS = 60.0, 500
"""The seconds between two logs of ignored fields, and the most characters of their names."""


Fetch = Callable[[str, PicturesWantedError], Awaitable[Mapping[str, bytes]]]
"""Fetches files for a client, by URL. Raises InvalidRequestError for what cannot be had."""


class Bodies:
    """Reads bodies. The event loop does nothing that grows with one, but to hand it over."""

    def __init__(
        self, workers: Workers, *, strict: bool = False, fetch: Fetch | None = None
    ) -> None:
        """`strict` refuses fields that Corral does not have; `fetch` gets the pictures that URLs name."""
        self._workers = workers
        self._strict, self._fetch = strict, fetch
        self._log_again_at = 0.0

    async def pieces(
        self, request: Request, *, optional: bool = False, any_type: bool = False
    ) -> list[bytes]:
        """The request's body as it came. It is JSON by its header unless it is `optional` and empty; with
        `any_type`, whatever its header says. Raises InvalidRequestError."""
        pieces = [piece async for piece in request.stream() if piece]  # `body()` would copy all
        is_json = any_type or _is_json(request.headers)
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity", *ENCODINGS):
            message = f"Send the body as it is, or as gzip, and not as {encoding[:100]!r}."
            raise ContentEncodingError(message)
        if not is_json and (pieces or not optional):
            raise InvalidRequestError("Send JSON, with Content-Type: application/json.")
        return [await self.work(inflate, *pieces)] if encoding in ENCODINGS else pieces

    async def work(self, function: Callable[[Models, Any], T], *pieces: Piece) -> T:
        caller = request_context.current()
        try:
            result = await self._workers.run(caller.holder, function, *pieces)
        except PicturesWantedError as missing:
            if self._fetch is None:
                raise
            files = await self._fetch(caller.holder, missing)
            result = await self._workers.run(caller.holder, function, *pieces, files=files)
        if caller.ignored:
            self._tell(caller.ignored)
        return result

    def _tell(self, ignored: Sequence[str]) -> None:
        if self._strict:
            raise InvalidRequestError(f"Unknown parameter: {ignored[0]!r}.", ignored[0])
        if time.monotonic() >= self._log_again_at:
            self._log_again_at = time.monotonic() + LOG_EVERY_S
            logger.info(
                "Ignored unknown fields of a request: %s.",
                ClientText(", ".join(ignored)[:MOST_CHARS]),
            )


_TYPES_OF_TOOLS = ("", "application/x-www-form-urlencoded")
"""The media types that tools such as `curl -d` say of JSON. Browsers let any page send it, so that
their word counts."""


def _is_json(headers: Headers) -> bool:
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type in _TYPES_OF_TOOLS:
        return "origin" not in headers and "sec-fetch-site" not in headers
    kind, _, subtype = content_type.partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


@dataclass(frozen=True, eq=False)
class PreparedBody(Generic[T]):
    """The dependency on a worker's result for the request's body. `optional` and `any_type`: see Bodies.
    The others are for the API's description."""

    prepare: Callable[[Models, Any], T]
    optional: bool = field(default=False, kw_only=True)
    any_type: bool = field(default=False, kw_only=True)
    example: Mapping[str, Any] | None = field(default=None, kw_only=True)
    """A body that the built-in model answers."""
    kind: Any = field(default=None, kw_only=True)
    """The body's type, if `prepare` takes bytes or fields."""

    async def __call__(self, request: Request) -> T:
        bodies: Bodies = request.app.state.bodies
        pieces = await bodies.pieces(request, optional=self.optional, any_type=self.any_type)
        return await bodies.work(self.prepare, *pieces)


def prepare_with(prepare: Callable[[Models, Any], Any], **options: Any) -> Any:
    return Depends(PreparedBody(prepare, **options))


def operators_only(what: str) -> Any:
    """A route's dependency: others are refused before their bodies are read. `what` begins the message. The
    log of `corral.audit` has what operators ask for."""

    async def check(request: Request) -> None:
        caller = request_context.current()
        caller.check_operator(what)
        if request.method != "GET":
            by, path = caller.key_name, request.scope["path"]
            entry = {"at": time.time(), "id": caller.request_id, "key": by, "from": caller.address}
            audit.info("%s", json.dumps(entry | {"method": request.method, "path": path}))

    return Depends(check)


async def _models(request: Request) -> Mapping[str, ServedModel]:
    return dict(request.app.state.models)  # it may change while a route awaits something


def of_app(name: str, missing: Callable[[], CorralError] | None = None) -> Any:
    """A route's dependency on the part of the application's state that has this name. `missing` makes the
    error that is raised if there is none."""

    async def find(request: Request) -> Any:
        part = getattr(request.app.state, name)
        if part is None and missing is not None:
            raise missing()
        return part

    return Depends(find)


ModelsArgument = Annotated[Mapping[str, ServedModel], Depends(_models)]
"""The argument of a route that is all models, by their ids."""
BodiesArgument = Annotated[Bodies, of_app("bodies")]
"""The argument of a route that has workers write its answer."""


def bytes_response(answer: bytes) -> Response:
    return Response(answer, media_type="application/json")


def add_routes(app: FastAPI, routers: Iterable[APIRouter]) -> None:
    """Add the routes of these routers, as they are: middleware looks at each route's endpoint."""
    for router in routers:
        app.router.routes.extend(router.routes)


def worker_modules(routers: Iterable[APIRouter]) -> tuple[str, ...]:
    """The modules of all functions that prepare bodies for these routers' routes."""
    routes = [route for router in routers for route in router.routes]
    bodies = (body for route in routes for body in prepared_bodies(route))
    return tuple(dict.fromkeys(body.prepare.__module__ for body in bodies))


def prepared_bodies(route: BaseRoute) -> Iterator[PreparedBody[Any]]:
    """The dependency of a route on its body: none or one."""
    if isinstance(route, APIRoute):
        for dependency in route.dependant.dependencies:
            if isinstance(dependency.call, PreparedBody):
                yield dependency.call
