"""Errors as clients expect them: OpenAI's, and on Anthropic's and Ollama's routes, theirs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from serve_app.errors import (
    CorralError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
)
from serve_app.ingress.http import json_body, request_context

logger = logging.getLogger("corral.ingress")


MAX_CHARS = 2000
"""The most characters of an error's message, which may repeat text of the client."""


def error_body(error: CorralError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {
        "error": {
            "message": _cut(error.message),
            "type": error.type,
            "param": None if error.param is None else _cut(error.param),
            "code": error.code,
            **error.details,
        }
    }


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


_OLLAMA_FULL = 503
"""Ollama's status where the queue is full."""


def anthropic_error_body(error: CorralError, status: int) -> dict[str, Any]:
    """Anthropic's error object. Source: Anthropic's API reference, "Errors"."""
    otherwise = "invalid_request_error" if status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(status, otherwise)
    return {"type": "error", "error": {"type": kind, "message": _cut(error.message)}}


def ollama_error_body(error: CorralError) -> dict[str, Any]:
    """Ollama's error object. Clients look for its words where a model is missing. Source: ollama,
    server/routes.go."""
    if isinstance(error, ModelNotFoundError):
        return {"error": _cut(f"model '{error.args[0]}' not found")}
    return {"error": _cut(error.message)}


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"


def install(app: FastAPI) -> None:
    """Answer every error of this app in the shape that belongs to the path."""
    app.add_exception_handler(CorralError, _corral_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)


async def _corral_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, CorralError)
    if isinstance(error, QueueFullError):
        request_context.current().refused()
    return response(request, error)


def response(
    request: Request,
    error: CorralError,
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """The answer to a request that failed; with the error's own status, unless another is given."""
    path = _path(request).removeprefix(request.scope.get("root_path", ""))
    is_ollamas = f"{path}/".startswith("/api/")
    if status is None:
        is_full = is_ollamas and isinstance(error, QueueFullError)
        status = _OLLAMA_FULL if is_full else error.status
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.is_final:
        headers["x-should-retry"] = "false"
    if is_ollamas:
        body = ollama_error_body(error)
    elif f"{path}/".startswith("/v1/messages/"):
        body = anthropic_error_body(error, status)
    else:
        body = error_body(error)
    return JSONResponse(body, status, headers)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]  # of the query or the path: workers read bodies
    return response(request, json_body.invalid(first["loc"][1:], first["msg"]))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {_path(request)}"
    return response(request, InvalidRequestError(message), error.status_code, error.headers)


def _path(request: Request) -> str:
    """Not `request.url.path`, which fails for some queries that are not UTF-8."""
    path: str = request.scope["path"]
    return path


async def _unexpected_error(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s failed", request.method, _path(request), exc_info=error)
    return response(request, unexpected())


def unexpected() -> CorralError:
    """The error that clients get for an unexpected exception; the log says more."""
    return CorralError("The server failed to handle this request.")
