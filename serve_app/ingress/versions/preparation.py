"""Reads the bodies of requests that change weights. Runs in workers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from serve_app.ingress.http.request_model import RequestModel
from serve_app.ingress.model_registry import Models, family, find
from serve_app.ingress.openai.answers import VersionCard

Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]


class WeightsRequest(RequestModel):
    model: str
    weights: Annotated[dict[str, Percent], Field(min_length=1)]
    """Percent of the requests, by the names of versions. The others share the rest as they did before."""


class RollbackRequest(RequestModel):
    model: str


class VersionList(BaseModel):
    model: str
    versions: list[VersionCard]


def weights(models: Models, change: WeightsRequest) -> WeightsRequest:
    """POST /models/weights, with the name of all versions. Raises CorralError."""
    return change.model_copy(update={"model": family(find(models, change.model))})


def rollback(models: Models, change: RollbackRequest) -> str:
    """POST /models/rollback: the name of all versions. Raises CorralError."""
    return family(find(models, change.model))
