"""Reads the bodies of requests that change weights. Runs in workers."""

from __future__ import annotations

from serve_app.ingress.http.json_body import parsed
from serve_app.ingress.model_registry import family, find
from serve_app.ingress.versions.protocol import RollbackRequest, WeightsRequest
from serve_app.ingress.workers.worker import Models


def weights(models: Models, body: bytes) -> WeightsRequest:
    """POST /models/weights, with the name of all versions. Raises CorralError."""
    asked = parsed(WeightsRequest, body)
    return asked.model_copy(update={"model": family(find(models, asked.model))})


def rollback(models: Models, body: bytes) -> str:
    """POST /models/rollback: the name of all versions. Raises CorralError."""
    return family(find(models, parsed(RollbackRequest, body).model))
