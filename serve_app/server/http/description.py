"""The API's description. FastAPI writes it, and learns here what it cannot see: workers read bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.params import Body, Depends
from fastapi.routing import APIRoute
from fastapi.utils import create_model_field
from pydantic import BaseModel

from serve_app.server.http.dependencies import prepared_bodies
from serve_app.server.http.errors import ErrorResponse
from serve_app.server.http.request_model import body_type

Json = dict[str, Any]

_RETRY_AFTER = {
    "Retry-After": {
        "schema": {"type": "integer"},
        "description": "Seconds to wait, if the same request may be answered then.",
    },
    "x-should-retry": {
        "schema": {"const": "false"},
        "description": "Clients should not try again by themselves: not soon, or never.",
    },
}
_SECURITY: Json = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "OpenAI's way to send a key."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""The ways to send a key. Nobody needs one if there is no API key file."""


def api_router(
    errors: type[BaseModel] = ErrorResponse, dependencies: Sequence[Depends] = ()
) -> APIRouter:
    """A protocol's router, with the type of its errors. Their codes say what is wrong."""
    content = {"model": errors, "headers": _RETRY_AFTER}
    return APIRouter(
        dependencies=dependencies,
        responses={
            "4XX": {"description": "The request is wrong, or not allowed now.", **content},
            "5XX": {"description": "The server cannot do what is asked for, or failed.", **content},
        },
    )


_EVENTS = "text/event-stream"
_EVENT = {
    "type": "object",
    "description": "One server-sent event.",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


def also(*media_types: str) -> dict[int | str, Json]:
    """More media types of a route's answer, as its `responses`."""
    schemas = {name: _EVENT if name == _EVENTS else {"type": "string"} for name in media_types}
    return {200: {"content": {name: {"schema": schema} for name, schema in schemas.items()}}}


CHAT: Json = {"messages": [{"role": "user", "content": "What is the capital of Portugal?"}]}
SHORT_CHAT = CHAT | {"max_tokens": 32}
"""Examples of bodies that several protocols take."""
STREAMED = also(_EVENTS)
"""The `responses` of routes that send server-sent events, if a request asks for them."""


def form(schema: Json) -> Json:
    """A body that is a form, as a route's `openapi_extra`."""
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"content": content, "required": True}}


class DescribedApi(FastAPI):
    """An application whose description has the bodies that workers read."""

    def openapi(self) -> Json:
        """The description, which is made once."""
        if self.openapi_schema is None:
            for route in self.routes:
                if isinstance(route, APIRoute):
                    _describe_body(route)
            described = super().openapi()
            described["components"]["securitySchemes"] = _SECURITY
            described["security"] = [*({name: []} for name in _SECURITY), {}]
        return super().openapi()


def _describe_body(route: APIRoute) -> None:
    """Have FastAPI write the body of a route into the description. It has made the route's handler before,
    which reads none."""
    for body in prepared_bodies(route):
        kind = body_type(body.prepare) if body.kind is None else body.kind
        examples: dict[str, Any] = {}
        if body.example is not None:
            examples["example"] = {"value": body.example}
        default = None if body.optional else ...
        info = Body(default, annotation=kind, openapi_examples=examples)
        route.body_field = create_model_field("body", kind, field_info=info)
