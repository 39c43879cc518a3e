"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from serve_app.errors import CorralError, InvalidRequestError

logger = logging.getLogger("corral.ingress")


def error_body(error: CorralError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def install(app: FastAPI) -> None:
    """Answer every error of this app in OpenAI's shape."""
    app.add_exception_handler(CorralError, _corral_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)


async def _corral_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, CorralError)
    return response(error)


def response(error: CorralError) -> JSONResponse:
    """The whole answer for an error."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return JSONResponse(error_body(error), error.status, headers)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    content_type = request.headers.get("content-type", "")
    if not content_type.startswith("application/json"):
        return response(InvalidRequestError("Send JSON, with Content-Type: application/json."))
    fault = error.errors()[0]
    if fault["type"] == "json_invalid":
        return response(InvalidRequestError(f"The body is not JSON: {fault['ctx']['error']}."))
    path = ".".join(str(part) for part in fault["loc"][1:] if _names_a_field(part))
    where = f"{path}: " if path else ""
    return response(InvalidRequestError(f"{where}{fault['msg']}", path or None))


def _names_a_field(part: int | str) -> bool:
    """Pydantic also names the branch of a union that it tried: `str`, `list[constrained-int]`."""
    return isinstance(part, int) or (part.isidentifier() and part != "str")


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    body = {
        "error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    }
    return JSONResponse(body, error.status_code, error.headers)


async def _unexpected_error(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return response(CorralError("The server failed to handle this request."))
