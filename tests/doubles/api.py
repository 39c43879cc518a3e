"""The ingress's application, whose bodies this process reads: without workers, and without bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.apis import api
from serve_app.config.schema import IngressConfig
from serve_app.server.http import request_context, request_model
from serve_app.server.model_registry import Models, ServedModel
from serve_app.server.workers.pool import Workers
from serve_app.server.workers.wire import Piece
from serve_app.server.workers.worker import NO_FILES, provide_files

T = TypeVar("T")


def prepared(work: Callable[[Models, Any], T], models: Models, body: bytes) -> T:
    """What a worker makes of a body."""
    return work(models, request_model.body_for(work, body))


class InProcess:
    """Reads bodies in this process, in the place of workers."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def run(
        self,
        client: str,
        work: Callable[[Models, Any], T],
        *pieces: Piece,
        files: Mapping[str, bytes] = NO_FILES,
    ) -> T:
        with request_model.ignored_fields() as ignored, provide_files(files):
            made = prepared(work, self._models, b"".join(pieces))
        request_context.current().ignored += ignored
        return made


class _Ends:
    """A middleware that gives answers without an end one: httpx's ASGITransport knows no others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_end = True

        async def watch(message: Message) -> None:
            nonlocal has_end
            has_end = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        await self._app(scope, receive, watch)
        if not has_end:
            await send({"type": "http.response.body"})


def build_api(
    models: Mapping[str, ServedModel],
    config: IngressConfig = IngressConfig(),  # noqa: B008
    workers: Workers | None = None,
    *,
    breaks: bool = False,
    **parts: Any,
) -> FastAPI:
    """The application. Unless it `breaks`, streams that fail have an end."""
    built = api.build_api(models, config, workers or InProcess(models), **parts)
    if not breaks:
        built.add_middleware(_Ends)
    return built
