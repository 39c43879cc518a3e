"""Errors as clients expect them: in OpenAI's shape, and below a protocol's own paths in its shape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from serve_app.base.errors import CorralError, InvalidRequestError, QueueFullError
from serve_app.base.logs import ClientText
from serve_app.server.http import request_context, request_model

logger = logging.getLogger("corral.ingress")


MAX_CHARS = 2000
"""The most characters of an error's message, which may repeat text of the client."""


class ErrorBody(BaseModel):
    """The error, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every answer that is not a success."""

    error: ErrorBody


def openai_error_body(error: CorralError) -> dict[str, Any]:
    return {
        "error": {
            "message": cut(error.message),
            "type": error.type,
            "param": None if error.param is None else cut(error.param),
            "code": error.code,
            **error.details,
        }
    }


def cut(text: str) -> str:
    """The text, or as much of it as an error's message may have."""
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """The form that a protocol's errors have below its paths."""

    body: Callable[[CorralError, int], dict[str, Any]]
    """An error's body, for that status."""
    full_status: int | None = None
    """The status where the queue is full, if it is not the error's own."""


_OPENAI = ErrorShape(lambda error, _: openai_error_body(error))


def install(app: FastAPI, shapes: Mapping[str, ErrorShape]) -> None:
    """Answer every error of this app in the shape that belongs to the path. Paths below a prefix, which
    ends with a slash, have its shape, and others have OpenAI's."""
    app.state.error_shapes = shapes
    app.add_exception_handler(CorralError, _corral_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)


async def _corral_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, CorralError)
    if isinstance(error, QueueFullError):
        request_context.current().on_refusal()
    return response(request, error)


def response(
    request: Request,
    error: CorralError,
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """The answer to a request that failed; with the error's own status, unless another is given."""
    shape = _shape(request)
    if status is None:
        status = error.status
        if isinstance(error, QueueFullError):
            status = shape.full_status or status
    return JSONResponse(
        shape.body(error, status), status, {**(headers or {}), **retry_headers(error)}
    )


def retry_headers(error: CorralError) -> dict[str, str]:
    """The headers that say when to try again, and whether clients should do so by themselves."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return headers | ({"x-should-retry": "false"} if error.is_final or error.asks_patience else {})


def _shape(request: Request) -> ErrorShape:
    path = f"{_path(request).removeprefix(request.scope.get('root_path', ''))}/"
    shapes: Mapping[str, ErrorShape] = request.app.state.error_shapes
    return next((shape for prefix, shape in shapes.items() if path.startswith(prefix)), _OPENAI)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]  # of the query or the path: workers read bodies
    return response(request, request_model.invalid(first["loc"][1:], first["msg"]))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {_path(request)}"
    return response(request, InvalidRequestError(message), error.status_code, error.headers)


def _path(request: Request) -> str:
    """The path. `request.url.path` fails for some queries that are not UTF-8."""
    path: str = request.scope["path"]
    return path


async def _unexpected_error(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s failed", request.method, ClientText(_path(request)), exc_info=error)
    return response(request, unexpected_error())


def unexpected_error() -> CorralError:
    """The error that clients get for an unexpected exception; the log says more."""
    return CorralError("The server failed to handle this request.")
