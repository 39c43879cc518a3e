"""The requests that change which version of a model answers. Corral's own."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from serve_app.ingress.http.request_model import RequestModel
from serve_app.ingress.openai.answers import VersionCard

Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]


class WeightsRequest(RequestModel):
    """POST /models/weights."""

    model: str
    weights: Annotated[dict[str, Percent], Field(min_length=1)]
    """Percent of the requests, by the names of versions. The others share the rest as they did before."""


class RollbackRequest(RequestModel):
    """POST /models/rollback."""

    model: str


class VersionList(BaseModel):
    """A model's versions after a change."""

    model: str
    versions: list[VersionCard]
