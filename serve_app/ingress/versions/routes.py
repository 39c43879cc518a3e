"""The routes that change which version of a model answers. Corral's own."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request

from serve_app.errors import InvalidRequestError
from serve_app.ingress.http.dependencies import operators_only, prepared
from serve_app.ingress.openai.answers import card_of
from serve_app.ingress.versions import preparation
from serve_app.ingress.versions.control import VersionControl
from serve_app.ingress.versions.preparation import VersionList, WeightsRequest

ROUTER = APIRouter(dependencies=[operators_only("What versions answer")])


@ROUTER.post("/models/weights")
async def change_weights(
    request: Request, change: Annotated[WeightsRequest, prepared(preparation.weights)]
) -> VersionList:
    """Give versions of a model so many percent of its requests. For operators."""
    await _control(request, change.model).change(change.model, change.weights)
    return _versions(request, change.model)


@ROUTER.post("/models/rollback")
async def roll_back(
    request: Request, model: Annotated[str, prepared(preparation.rollback)]
) -> VersionList:
    """Give all requests of a model to the version that had all before. For operators."""
    await _control(request, model).roll_back(model)
    return _versions(request, model)


def _versions(request: Request, model: str) -> VersionList:
    models = request.app.state.models  # as they are behind the change
    return VersionList(model=model, versions=card_of(models, model).versions)


def _control(request: Request, model: str) -> VersionControl:
    control: VersionControl | None = request.app.state.versions
    if control is None:
        raise InvalidRequestError(f"The model {model!r} has one version only.", "model")
    return control
