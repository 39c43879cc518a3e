"""Gives routes their arguments, as FastAPI's dependencies.

A protocol is a module with a `ROUTER`. Each route names there the function that prepares its body, so
that FastAPI's routes and the modules that workers import come from the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from serve_app.ingress.http import request_context
from serve_app.ingress.model_registry import ServedModel
from serve_app.ingress.workers.bodies import Bodies
from serve_app.ingress.workers.worker import Models

T = TypeVar("T")


@dataclass(frozen=True)
class PreparedBody(Generic[T]):
    """The dependency on a worker's result for the request's body. For the options, see Bodies."""

    prepare: Callable[[Models, bytes], T]
    optional: bool = field(default=False, kw_only=True)
    any_type: bool = field(default=False, kw_only=True)

    async def __call__(self, request: Request) -> T:
        """Read the body in a worker. Raises CorralError."""
        bodies: Bodies = request.app.state.bodies
        return await bodies.read(
            request, self.prepare, optional=self.optional, any_type=self.any_type
        )


def prepared(
    prepare: Callable[[Models, bytes], Any], *, optional: bool = False, any_type: bool = False
) -> Any:
    """The annotation of an argument that is a worker's result for the request's body."""
    return Depends(PreparedBody(prepare, optional=optional, any_type=any_type))


def operators_only(what: str) -> Any:
    """A route's dependency: others are refused before their bodies are read. `what` begins the message."""

    async def check() -> None:
        request_context.current().check_operator(what)

    return Depends(check)


async def _models(request: Request) -> Mapping[str, ServedModel]:
    models: Mapping[str, ServedModel] = request.app.state.models
    return models


async def _bodies(request: Request) -> Bodies:
    bodies: Bodies = request.app.state.bodies
    return bodies


ModelsArgument = Annotated[Mapping[str, ServedModel], Depends(_models)]
"""The argument of a route that is all models, by their ids."""
BodiesArgument = Annotated[Bodies, Depends(_bodies)]
"""The argument of a route that has workers write its answer."""


def written(answer: bytes) -> Response:
    """The answer that a worker has written as JSON."""
    return Response(answer, media_type="application/json")


def add_routes(app: FastAPI, routers: Iterable[APIRouter]) -> None:
    """Add the routes of these routers, as they are: middleware looks at each route's endpoint."""
    for router in routers:
        app.router.routes.extend(router.routes)


def worker_modules(routers: Iterable[APIRouter]) -> tuple[str, ...]:
    """The modules of all functions that prepare bodies for these routers' routes."""
    functions = (prepare for router in routers for prepare in _preparations(router))
    return tuple(dict.fromkeys(function.__module__ for function in functions))


def _preparations(router: APIRouter) -> Iterator[Callable[..., Any]]:
    for route in router.routes:
        if isinstance(route, APIRoute):
            for dependency in route.dependant.dependencies:
                if isinstance(dependency.call, PreparedBody):
                    yield dependency.call.prepare
