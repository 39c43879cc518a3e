"""Ollama's routes about models and the server.

Source: ollama, docs/api.md and server/routes.go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from serve_app.errors import PermissionDeniedError
from serve_app.ingress.http.limits.bodies import unread
from serve_app.ingress.model_registry import ServedModel
from serve_app.ingress.ollama import preparation
from serve_app.ingress.ollama.catalogue import Catalogue
from serve_app.ingress.workers.bodies import Bodies

VERSION = "0.32.15"
"""The version of Ollama whose API this is. Clients ask for a least one."""
_CLOSED = {
    "/api/pull": "POST",
    "/api/push": "POST",
    "/api/create": "POST",
    "/api/copy": "POST",
    "/api/delete": "DELETE",
}
_BLOB = "/api/blobs/{digest}"


def add(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    """Add the routes."""
    _add_models(app, models, bodies)
    _add_server(app)
    for path, method in _CLOSED.items():
        app.add_route(path, _refuse_to_change_models, [method])
    app.add_route(_BLOB, _refuse_to_change_models, ["POST"])
    app.add_route(_BLOB, _refuse_to_change_models, ["HEAD"])


def _add_models(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    catalogue = Catalogue(bodies)

    @app.get("/api/tags")
    async def ollama_tags() -> dict[str, Any]:
        """The models that are served here by all of their names, the default first, Ollama's way."""
        described = await catalogue.all()
        own = [described[model.id].listed() for model in models.values()]
        others = [
            described[model.id].listed(alias)
            for model in models.values()
            for alias in model.aliases
            if alias != "*"
        ]
        return {"models": own + others}

    @app.post("/api/show", response_model=None)
    async def ollama_show(request: Request) -> Response:
        """The details and capabilities of a model, Ollama's way."""
        model_id = await bodies.read(request, preparation.show, any_type=True)
        return JSONResponse((await catalogue.all())[model_id].shown())

    @app.get("/api/ps")
    async def ollama_ps() -> dict[str, Any]:
        """The models that have an engine now, Ollama's way."""
        described = await catalogue.all()
        answers = await asyncio.gather(*(model.engine.stats() for model in models.values()))
        return {
            "models": [
                described[model.id].running()
                for model, of_model in zip(models.values(), answers, strict=True)
                if of_model.found or of_model.missing
            ]
        }

    async def head(_: Request) -> Response:
        return Response(media_type="application/json")

    app.add_route("/api/tags", head, ["HEAD"])


def _add_server(app: FastAPI) -> None:
    @app.get("/api/version")
    async def ollama_version() -> dict[str, str]:
        """The version of Ollama whose API this is."""
        return {"version": VERSION}

    async def head(_: Request) -> Response:
        return Response(media_type="application/json")

    async def running(_: Request) -> Response:
        return PlainTextResponse("Ollama is running")

    app.add_route("/api/version", head, ["HEAD"])
    app.add_route("/", running, ["GET"])  # and HEAD; browsers get the page before, if there is one


@unread
async def _refuse_to_change_models(request: Request) -> Response:
    """Whatever would change which models there are."""
    raise PermissionDeniedError(
        "This server's models are those of its configuration: requests cannot pull, create, copy, push "
        "or delete any. Add the model to `models` in the configuration file, and start or "
        "deploy it again."
    )
