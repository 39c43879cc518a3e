"""The routes that change which version of a model answers. Corral's own."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI, Request

from serve_app.errors import InvalidRequestError
from serve_app.ingress.http import request_context
from serve_app.ingress.model_registry import ServedModel, card_of
from serve_app.ingress.versions import preparation
from serve_app.ingress.versions.control import Versions
from serve_app.ingress.versions.protocol import VersionList
from serve_app.ingress.workers.bodies import Bodies


def add(
    app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies, versions: Versions | None
) -> None:
    """Add the routes. Without `versions`, models have one each."""

    @app.post("/models/weights")
    async def change_weights(request: Request) -> VersionList:
        """Give versions of a model so many percent of its requests. For operators."""
        request_context.current().check_operator("What versions answer")
        asked = await bodies.read(request, preparation.weights)
        await _those(versions, asked.model).change(asked.model, asked.weights)
        return VersionList(model=asked.model, versions=card_of(models, asked.model).versions)

    @app.post("/models/rollback")
    async def roll_back(request: Request) -> VersionList:
        """Give all requests of a model to the version that had all before. For operators."""
        request_context.current().check_operator("What versions answer")
        model = await bodies.read(request, preparation.rollback)
        await _those(versions, model).roll_back(model)
        return VersionList(model=model, versions=card_of(models, model).versions)


def _those(versions: Versions | None, model: str) -> Versions:
    if versions is None:
        raise InvalidRequestError(f"The model {model!r} has one version only.", "model")
    return versions
