"""Ollama's routes about models and the server.

Source: ollama, docs/api.md and server/routes.go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from serve_app.errors import PermissionDeniedError
from serve_app.ingress.access.bodies import unread
from serve_app.ingress.http.dependencies import BodiesArgument, ModelsArgument, prepared
from serve_app.ingress.ollama import catalogue
from serve_app.ingress.ollama.catalogue import Catalogue, Description

VERSION = "0.32.15"
"""The version of Ollama whose API this is. Clients ask for a least one."""
ROUTER = APIRouter()


async def _descriptions(request: Request, bodies: BodiesArgument) -> Mapping[str, Description]:
    state = request.app.state
    if not hasattr(state, "ollama_catalogue"):
        state.ollama_catalogue = Catalogue()
    described: Mapping[str, Description] = await state.ollama_catalogue.all(bodies)
    return described


DescriptionsArgument = Annotated[Mapping[str, Description], Depends(_descriptions)]


@ROUTER.get("/api/tags")
async def ollama_tags(models: ModelsArgument, described: DescriptionsArgument) -> dict[str, Any]:
    """The models that are served here by all of their names, the default first, Ollama's way."""
    own = [described[model.id].listed() for model in models.values()]
    others = [
        described[model.id].listed(alias)
        for model in models.values()
        for alias in model.aliases
        if alias != "*"
    ]
    return {"models": own + others}


@ROUTER.post("/api/show", response_model=None)
async def ollama_show(
    model_id: Annotated[str, prepared(catalogue.named, any_type=True)],
    described: DescriptionsArgument,
) -> Response:
    """The details and capabilities of a model, Ollama's way."""
    return JSONResponse(described[model_id].shown())


@ROUTER.get("/api/ps")
async def ollama_ps(models: ModelsArgument, described: DescriptionsArgument) -> dict[str, Any]:
    """The models that have an engine now, Ollama's way."""
    answers = await asyncio.gather(*(model.engine.stats() for model in models.values()))
    return {
        "models": [
            described[model.id].running()
            for model, of_model in zip(models.values(), answers, strict=True)
            if of_model.found or of_model.missing
        ]
    }


@ROUTER.get("/api/version")
async def ollama_version() -> dict[str, str]:
    """The version of Ollama whose API this is."""
    return {"version": VERSION}


async def _running(_: Request) -> Response:
    return PlainTextResponse("Ollama is running")


@unread
async def _refuse_to_change_models(request: Request) -> Response:
    raise PermissionDeniedError(
        "This server's models are those of its configuration: requests cannot pull, create, copy, push "
        "or delete any. Add the model to `models` in the configuration file, and start or "
        "deploy it again."
    )


ROUTER.add_route("/", _running, ["GET"])  # browsers get the page before, if there is one
for path in ("/api/pull", "/api/push", "/api/create", "/api/copy"):
    ROUTER.add_route(path, _refuse_to_change_models, ["POST"])
ROUTER.add_route("/api/delete", _refuse_to_change_models, ["DELETE"])
ROUTER.add_route("/api/blobs/{digest}", _refuse_to_change_models, ["GET", "POST"])
