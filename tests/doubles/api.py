"""The ingress's application, whose bodies this process reads: without workers, and without bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastapi import FastAPI

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


def build_api(
    models: Mapping[str, ServedModel],
    config: IngressConfig = IngressConfig(),  # noqa: B008
    workers: Workers | None = None,
    **parts: Any,
) -> FastAPI:
    return api.build_api(models, config, workers or InProcess(models), **parts)
